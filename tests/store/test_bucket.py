"""Every live bucket against the conformance suite, on real servers and a real file system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from datacache.core.errors import UsageError
from datacache.settings import Settings
from datacache.store.bucket import Bucket
from datacache.store.local.bucket import LocalBucket
from datacache.store.open import open_bucket_backend
from tests.conformance.bucket import TRAILING_KEYS, BucketConformance
from tests.conformance.store import BUCKET_KEYS, CONTROL_KEYS, ODD_KEYS, PLAIN_KEYS
from tests.servers import CephRgw
from tests.store.conftest import WritableRclone, new_bucket

NOT_UTF8 = ("\udcff", "a\udc80b/\udcfe.jpg")


class TestLocalBucket(BucketConformance):
    odd_keys = (*BucketConformance.odd_keys, *NOT_UTF8, "n" * 255)
    conditional = False

    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Bucket:
        self.base = f"{str(tmp_path)[1:]}/"  # type: ignore[misc]
        return LocalBucket()


class _S3(BucketConformance):
    @pytest.fixture
    def open_s3(
        self, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Callable[..., Bucket]]:
        opened: list[Bucket] = []

        def open_it(server: WritableRclone | CephRgw, **options: Any) -> Bucket:
            for name, value in server.env().items():
                monkeypatch.setenv(name, value)
            name = new_bucket()
            server.make_bucket(name, **options)
            opened.append(open_bucket_backend(f"s3://{name}", make_settings()))
            return opened[-1]

        yield open_it
        for bucket in opened:
            bucket.close()


class TestRcloneS3(_S3):
    odd_keys = (*PLAIN_KEYS, *ODD_KEYS, *TRAILING_KEYS)
    conditional = False
    markers = False
    merges_metadata = True

    @pytest.fixture
    def bucket(self, writable_rclone: WritableRclone, open_s3: Callable[..., Bucket]) -> Bucket:
        return open_s3(writable_rclone)


@pytest.mark.ceph
class TestCeph(_S3):
    odd_keys = (
        *PLAIN_KEYS,
        *ODD_KEYS,
        *CONTROL_KEYS,
        "c\x01d/e\x02f",
        *TRAILING_KEYS,
        *(k for k in BUCKET_KEYS if k[-1] != "/"),
    )

    @pytest.fixture
    def bucket(self, ceph_rgw: CephRgw, open_s3: Callable[..., Bucket]) -> Bucket:
        return open_s3(ceph_rgw)


@pytest.mark.ceph
class TestCephWithVersions(_S3):
    conditional = False
    test_a_folder_is_listed_in_order_from_anywhere_on = None  # type: ignore[assignment]  # as without, and slow

    @pytest.fixture
    def bucket(self, ceph_rgw: CephRgw, open_s3: Callable[..., Bucket]) -> Bucket:
        return open_s3(ceph_rgw, versioning=True)


@pytest.mark.parametrize("url", ["gs://bucket", "memory://x", "https://host"])
def test_what_cannot_be_written_live_says_so(url: str, make_settings: Callable[..., Settings]) -> None:
    with pytest.raises(UsageError, match="live"):
        open_bucket_backend(url, make_settings())
