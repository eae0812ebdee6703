"""Mounts of the stand-in snapshots. Every mount is detached at teardown by the `home` fixture, whatever
happened.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fuse_mount
from datacache.settings import Settings
from fuse_mount import MountInfo
from tests import leftovers
from tests.fuse_mount.mount_processes import BucketMounter
from tests.servers import RcloneS3

Mounter = Callable[..., MountInfo]

ODD_NAMES = [
    "a b",
    "new\nline",
    "ünïcödé",
    "quote'\"",
    "-rf",
    ".hidden",
    "x" * 255,
    "back\\slash",
    "tab\t",
    "%s",
]


@pytest.fixture(autouse=True)
def _needs_fuse() -> None:
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse here")


@cache
def _contents() -> dict[str, bytes]:
    random_bytes = random.Random(7).randbytes
    sizes = [0, 1, 511, 4096, 4097, 110_000, 131_072, 1_048_577]
    files = {f"d{n % 4}/deep{n % 3}/{n:03d}.jpg": random_bytes(sizes[n % len(sizes)]) for n in range(60)}
    return files | {"large.bin": random_bytes(24 * 2**20)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files to mount: nested, odd names, empty, a few MB."""
    source = tmp_path / "source"
    for name, content in _contents().items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    for name in ODD_NAMES:
        (source / name).write_bytes(name.encode())
    (source / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"bytes")
    (source / "empty").mkdir()
    monkeypatch.setenv("STANDIN_FOLDER", str(source))
    return source


@pytest.fixture
def mounter(settings: Settings, tmp_path: Path) -> Iterator[Mounter]:
    """mount(…) → MountInfo of a stand-in snapshot at `tmp_path/mnt`, for all users' eyes."""
    leftovers.let_others_through(tmp_path)
    target = tmp_path / "mnt"
    target.mkdir()

    def mount(opener: str = "open_folder", **options: Any) -> MountInfo:
        options.setdefault("workers", 2)
        return fuse_mount.mount_snapshot(
            "mask@latest", target, settings=settings, opener=f"tests.fuse_mount.standin:{opener}", **options
        )

    yield mount
    leftovers.unmount_under(tmp_path)


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A folder that is used as a bucket by somebody else, too."""
    path = tmp_path / "bucket"
    path.mkdir()
    return path


@pytest.fixture(scope="session")
def writable_rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RcloneS3]:
    """Nobody puts files into its folders but through it, so it need not look for them."""
    with RcloneS3(tmp_path_factory.mktemp("rclone"), live=False, log_requests=False) as server:
        yield server


def files_below(folder: Path) -> dict[str, bytes]:
    """Relative path → content of every file."""
    return {
        os.path.relpath(os.path.join(top, name), folder): Path(top, name).read_bytes()
        for top, _, names in os.walk(folder)
        for name in names
    }


@pytest.fixture
def bucket_mounter(
    settings: Settings, tmp_path: Path, rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BucketMounter]:
    """mount(…) of `s3://BUCKET/run`, a new bucket's, at `tmp_path/mnt`."""
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    leftovers.let_others_through(tmp_path)
    bucket = rclone_s3.make_bucket(f"rw-{uuid.uuid4().hex[:12]}")
    target = tmp_path / "mnt"
    target.mkdir()
    yield BucketMounter(settings, f"s3://{bucket.name}/run", target, bucket / "run")
    leftovers.unmount_under(tmp_path)
