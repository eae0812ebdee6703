"""Places for content-addressed objects, on real stores."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.conftest import WritableRclone


@pytest.fixture(scope="session")
def catalog_rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WritableRclone]:
    """An S3 server whose buckets are written through it only."""
    with WritableRclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(params=["file", "rclone", pytest.param("ceph", marks=pytest.mark.ceph)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL under which nothing is yet, in a folder, in rclone's S3 and in Ceph."""
    if request.param == "file":
        return f"file://{tmp_path}/a place"
    server = request.getfixturevalue("catalog_rclone" if request.param == "rclone" else "ceph_rgw")
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    bucket = f"objects-{uuid.uuid4().hex[:12]}"
    server.make_bucket(bucket)
    return f"s3://{bucket}/a place"
