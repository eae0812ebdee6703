"""Every backend against the conformance suite, on real servers where it talks to one."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore as ObstoreMemory

from datacache.settings import Settings, StoreOptions
from datacache.store.base import ObjectStore
from datacache.store.cloud import ObstoreStore
from datacache.store.filesystems import FsspecStore
from datacache.store.local.store import LocalStore
from datacache.store.open import open_store
from datacache.store.retry import RetryingStore
from tests.conformance.store import CONTROL_KEYS, ODD_KEYS, PLAIN_KEYS, StoreConformance
from tests.memory import MemoryStore
from tests.promises import promise
from tests.servers import CephRgw
from tests.store.conftest import WritableRclone, new_bucket

NOT_UTF8 = ("\udcff", "a\udc80b/\udcfe.jpg")
"""Bytes that are no UTF-8, as `os.fsdecode` gives them."""


class TestLocalStore(StoreConformance):
    odd_keys = (*PLAIN_KEYS, *ODD_KEYS, *CONTROL_KEYS, *NOT_UTF8, "m/", "n" * 255)

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        self.base = f"{str(tmp_path)[1:]}/"  # type: ignore[misc]
        return LocalStore()


class TestMemoryStore(StoreConformance):
    odd_keys = (*StoreConformance.odd_keys, *NOT_UTF8, "")

    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryStore(f"memory://{uuid.uuid4().hex}")


class TestObstoreStore(StoreConformance):
    odd_keys = tuple(k for k in (*PLAIN_KEYS, *ODD_KEYS, "f", "f/g") if k != " a ")

    @pytest.fixture
    def store(self) -> ObjectStore:
        driver = ObstoreMemory()
        return ObstoreStore("mem://x", lambda: driver, node_wide=False)

    test_it_works_after_close = None  # type: ignore[assignment]  # the driver is all there is of its objects

    def test_a_read_gives_the_drivers_buffer_and_no_copy(self, store: ObjectStore) -> None:
        data = store.read(self._put(store, "a", b"first"), 1, 3)
        assert isinstance(data, memoryview)
        assert data.readonly
        assert (data.format, data.itemsize, data.shape) == ("B", 1, (2,))
        assert not isinstance(data.obj, bytes)


class TestFsspecStore(StoreConformance):
    odd_keys = (*PLAIN_KEYS, *ODD_KEYS)

    @pytest.fixture
    def store(self) -> ObjectStore:
        return FsspecStore(f"memory://{uuid.uuid4().hex}")


class _S3(StoreConformance):
    @pytest.fixture
    def open_s3(
        self, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Callable[..., ObjectStore]]:
        opened: list[ObjectStore] = []

        def open_it(server: WritableRclone | CephRgw, *, backend: str = "", **options: Any) -> ObjectStore:
            for name, value in server.env().items():
                monkeypatch.setenv(name, value)
            bucket = new_bucket()
            server.make_bucket(bucket, **options)
            stores = (StoreOptions(name="named", url=f"s3://{bucket}", backend=backend),) if backend else ()
            opened.append(open_store(f"s3://{bucket}", make_settings(stores=stores)))
            return opened[-1]

        yield open_it
        for store in opened:
            store.close()


class TestRcloneS3(_S3):
    odd_keys = (*PLAIN_KEYS, *ODD_KEYS)

    @pytest.fixture
    def store(self, writable_rclone: WritableRclone, open_s3: Callable[..., ObjectStore]) -> ObjectStore:
        return open_s3(writable_rclone)


class _S3fs(_S3):
    page_test_keys = 200

    def test_s3fs_is_behind_it(self, store: ObjectStore) -> None:
        assert isinstance(store, RetryingStore)
        assert isinstance(store.inner, FsspecStore)


class TestRcloneByS3fs(_S3fs):
    odd_keys = (*PLAIN_KEYS, *ODD_KEYS)

    @pytest.fixture
    def store(self, writable_rclone: WritableRclone, open_s3: Callable[..., ObjectStore]) -> ObjectStore:
        return open_s3(writable_rclone, backend="s3fs")


@pytest.mark.ceph
class TestCephByS3fs(_S3fs):
    odd_keys = (*PLAIN_KEYS, *ODD_KEYS)

    @pytest.fixture
    def store(self, ceph_rgw: CephRgw, open_s3: Callable[..., ObjectStore]) -> ObjectStore:
        return open_s3(ceph_rgw, backend="s3fs")


@pytest.mark.ceph
class TestCeph(_S3):
    page_test_keys = 1100

    @pytest.fixture
    def store(self, ceph_rgw: CephRgw, open_s3: Callable[..., ObjectStore]) -> ObjectStore:
        return open_s3(ceph_rgw)


@pytest.mark.ceph
class TestCephWithVersions(_S3):
    page_test_keys = 1100

    @pytest.fixture
    def store(self, ceph_rgw: CephRgw, open_s3: Callable[..., ObjectStore]) -> ObjectStore:
        return open_s3(ceph_rgw, versioning=True)

    @promise("In a bucket with versioning, a snapshot outlives overwriting and deletion")
    def test_a_recorded_version_outlives_overwriting_and_deletion(self, store: ObjectStore) -> None:
        first = store.put("a", b"first").ref(store.url)
        odd = store.put("a//b", b"odd").ref(store.url)
        assert first.version
        for key in (first.key, odd.key):
            store.put(key, b"second!")
            store.delete(key)
        assert store.read(first, 0, 5) == b"first"
        assert store.read(odd, 1, 3) == b"dd"
