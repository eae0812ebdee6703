"""Fixtures of the write path's tests."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datacache.settings import load_settings
from tests.conformance.faults import FaultProxy
from tests.servers import CephRgw
from tests.writeback.upload_rig import BucketOnCeph, Rig

_numbers = itertools.count()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A small file system of its own: `disk("size=4m")` mounts a tmpfs. Skips where that is not permitted."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def bucket(ceph_rgw: CephRgw, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketOnCeph]:
    """A bucket of its own, behind a proxy that makes faults, and a folder for staging areas."""
    with FaultProxy(ceph_rgw.endpoint) as proxy:
        variables = {"AWS_ENDPOINT_URL": proxy.url, "DATACACHE_STORE_TIMEOUT_S": "10"}
        for name, value in (ceph_rgw.env() | variables).items():
            monkeypatch.setenv(name, value)
        name = f"uploader-{next(_numbers)}"
        ceph_rgw.make_bucket(name)
        staging = tmp_path / "staging"
        staging.mkdir()
        made = BucketOnCeph(ceph_rgw, staging, proxy, load_settings(), name)
        yield made
        proxy.heal()
        for rig in made.rigs:
            rig.close()


@pytest.fixture
def rig(bucket: BucketOnCeph) -> Rig:
    """An engine and its uploader, started, with short delays."""
    return bucket.rig().start()
