"""The lock that the image is built from: `deploy/requirements.lock`, as scripts/lock_image.py makes it."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import lock_image
from tests.promises import promise


@pytest.fixture(scope="module")
def lock() -> dict[str, tuple[str, list[str]]]:
    return lock_image.read(lock_image.LOCK.read_text(encoding="utf-8"))


@promise("Images can be named by digest, and ours is built from locked versions and checksums")
def test_the_lock_has_what_the_project_asks_for(lock: dict[str, tuple[str, list[str]]]) -> None:
    assert lock_image.misfits(lock) == [], "run: python scripts/lock_image.py"
    assert lock_image.misfits(lock | {"grpcio": ("1.0", ["sha256:0"])})
    assert len(lock_image.misfits({})) >= 10


def test_every_line_has_a_checksum_and_no_address(lock: dict[str, tuple[str, list[str]]]) -> None:
    text = lock_image.LOCK.read_text(encoding="utf-8")
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for _, digests in lock.values() for digest in digests)
    for name in ("numpy", "obstore", "grpcio"):
        assert len(set(lock[name][1])) == 2, "the wheels of x86-64 and arm64"
    assert "://" not in text
    for wrong in ("boto3==1.0", "boto3 --hash=sha256:00", "boto3==1.0 --hash=md5:00"):
        with pytest.raises(ValueError, match="boto3"):
            lock_image.read(wrong)


def test_what_a_locked_package_needs_is_locked_as_well(lock: dict[str, tuple[str, list[str]]]) -> None:
    looked_at = 0
    for name, (version, _) in lock.items():
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if distribution.version != version:
            continue
        looked_at += 1
        for text in distribution.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in lock, f"{name} needs {needed}"
                assert needed.specifier.contains(lock[canonicalize_name(needed.name)][0], prereleases=True)
    assert looked_at > 0


@promise("Images can be named by digest, and ours is built from locked versions and checksums")
def test_the_image_is_built_from_it_and_nothing_else() -> None:
    dockerfile = (lock_image.ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    assert "pip install --require-hashes --no-deps -r requirements.lock" in dockerfile
    assert f"pip install --no-deps '.[{','.join(lock_image.EXTRAS)}]'" in dockerfile
    python = re.search(r"ARG PYTHON_IMAGE=python:(\d+)\.(\d+)\.", dockerfile)
    assert python is not None
    assert tuple(map(int, python.groups())) == lock_image.PYTHON
    ignored = (lock_image.ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8")
    assert "!deploy/requirements.lock" in ignored
