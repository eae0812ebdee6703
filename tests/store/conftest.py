"""Stores to test, each with a bucket of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datacache.settings import Settings
from tests.servers import RcloneS3

_numbers = itertools.count()


def new_bucket() -> str:
    """A bucket name nobody used before in this run."""
    return f"bucket-{next(_numbers)}"


class WritableRclone(RcloneS3):
    """Rclone's S3 server for tests that write through it.

    It keeps folders in memory: with a cache time of 0 every PUT walks them again, and the 20th takes 30 s.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, live=False)

    def make_bucket(self, name: str) -> Path:
        self.client().create_bucket(Bucket=name)
        return self.root / name


@pytest.fixture(scope="session")
def writable_rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WritableRclone]:
    with WritableRclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture
def make_settings(tmp_path: Path) -> Callable[..., Settings]:
    """Settings with a short store timeout; keyword arguments go on top."""

    def make(**more: object) -> Settings:
        values: dict[str, object] = {
            "home": tmp_path / "home",
            "catalog": f"sqlite:///{tmp_path}/catalog.db",
            "ram_bytes": 1 << 20,
            "ssd_bytes": 1 << 20,
            "store_timeout_s": 20.0,
            "allow_network": ("127.0.0.0/8",),  # the servers of the tests, also where a volume brought the endpoint
        }
        return Settings(**(values | more))  # type: ignore[arg-type]

    return make
