"""Packs of small files: written, read back as objects, and as files of a snapshot through the daemon and without."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from datacache import create_snapshot, open_snapshot
from datacache.api import connect, open_catalog, running_daemon
from datacache.catalog.base import Catalog
from datacache.catalog.packs import (
    MAX_FILE_BYTES,
    PACK_BYTES,
    PackStore,
    PackWriter,
    content_etag,
    pack_key,
    parse_pack_key,
)
from datacache.core.errors import CorruptManifestError, DaemonUnavailableError, ObjectNotFoundError, UsageError
from datacache.core.ids import ObjectRef
from datacache.daemon.client import DaemonClient
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import PACKS, BlobId, Entry, SnapshotRecord
from datacache.settings import Settings
from datacache.store.base import ObjectStore
from datacache.store.open import Stores
from tests.promises import promise


class Blobs(dict[BlobId, bytes]):
    """Stands for a catalog's blobs, and counts what is asked for."""

    asked = 0

    def put(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        self.update(blobs)

    def load(self, ids: Sequence[BlobId]) -> dict[BlobId, bytes]:
        self.asked += len(ids)
        return {id: self[id] for id in ids if id in self}


def packed(blobs: Blobs, files: Sequence[bytes], *, at_a_time: int = 1000) -> list[ObjectRef]:
    writer = PackWriter(blobs.put)
    refs: list[ObjectRef] = []
    for start in range(0, len(files), at_a_time):
        part = files[start : start + at_a_time]
        offsets = [writer.add(data) for data in part]
        pack = writer.close()
        refs += [
            ObjectRef(PACKS.store, pack_key(pack, offset).decode(), len(data))
            for offset, data in zip(offsets, part, strict=True)
        ]
    return refs


def test_files_come_back_from_their_packs_whole_and_in_parts() -> None:
    blobs = Blobs()
    files = [os.urandom(random.Random(n).randrange(300)) for n in range(500)]
    store = PackStore(blobs.load)
    for ref, data in zip(packed(blobs, files, at_a_time=100), files, strict=True):
        assert store.read(ref, 0, len(data)) == data
        assert store.read(ref, 3, max(len(data) - 5, 3)) == data[3 : max(len(data) - 5, 3)]
    assert blobs.asked == 5


def test_the_same_files_closed_at_the_same_places_are_the_same_packs() -> None:
    files = [f"0 0.{n} 0.5 0.1 0.1\n".encode() for n in range(100)]
    one, two = Blobs(), Blobs()
    assert packed(one, files) == packed(two, files)
    assert one == two
    assert parse_pack_key(packed(one, files)[1].key) == (next(iter(one)), len(files[0]))


def test_a_writer_says_when_a_pack_is_full_and_refuses_what_is_too_large() -> None:
    writer = PackWriter(Blobs().put)
    writer.add(bytes(PACK_BYTES - 1))
    assert not writer.full
    writer.add(b"x")
    assert writer.full
    writer.add(bytes(MAX_FILE_BYTES))
    with pytest.raises(UsageError, match="too large for a pack"):
        writer.add(b"x")
    writer.close()
    with pytest.raises(UsageError, match="too large for a pack"):
        writer.add(bytes(MAX_FILE_BYTES + 1))


def test_a_missing_and_an_altered_pack_are_errors_that_name_it() -> None:
    blobs = Blobs()
    (ref,) = packed(blobs, [b"label"])
    pack = next(iter(blobs))
    stored = blobs.pop(pack)
    with pytest.raises(CorruptManifestError, match=f"{pack.hex()} is missing"):
        PackStore(blobs.load).read(ref, 0, 5)
    packed(blobs, [b"other"])
    blobs[pack] = blobs.popitem()[1]
    with pytest.raises(CorruptManifestError, match="other bytes"):
        PackStore(blobs.load).read(ref, 0, 5)
    blobs[pack] = stored
    assert PackStore(blobs.load).read(ref, 0, 5) == b"label"


def test_what_no_pack_holds_is_an_error_never_other_bytes() -> None:
    blobs = Blobs()
    (ref,) = packed(blobs, [b"label"])
    store = PackStore(blobs.load)
    for key in ("", "x", ref.key.upper() + "A", ref.key + "0", ref.key.replace("/", "/-"), f"{ref.key}\n"):
        with pytest.raises((ObjectNotFoundError, CorruptManifestError)):
            store.read(ref._replace(key=key), 0, 5)
    for size, start, stop in ((6, 0, 6), (5, 0, 6), (5, -1, 5)):
        with pytest.raises(CorruptManifestError, match="which has 5"):
            store.read(ref._replace(size_bytes=size), start, stop)
    with pytest.raises(ObjectNotFoundError):
        store.head(ref.key)
    for forbidden in (lambda: store.put("x", b""), lambda: store.delete(ref.key), lambda: store.list("")):
        with pytest.raises(UsageError, match="only be read"):
            forbidden()


def test_packs_held_are_bounded_in_bytes_and_the_last_used_stay() -> None:
    blobs = Blobs()
    refs = packed(blobs, [os.urandom(1000) for _ in range(10)], at_a_time=1)
    store = PackStore(blobs.load, held_bytes=3000)
    for ref in refs:
        store.read(refs[0], 0, 10)
        store.read(ref, 0, 10)
    assert blobs.asked == 10
    store.read(refs[1], 0, 10)
    assert blobs.asked == 11


def test_threads_that_ask_for_a_pack_at_once_load_it_once_and_all_hear_of_a_failure() -> None:
    blobs = Blobs()
    refs = packed(blobs, [b"a", b"b"])
    together = threading.Barrier(2)
    answers: list[dict[BlobId, bytes]] = [{}, dict(blobs)]

    def load(ids: Sequence[BlobId]) -> dict[BlobId, bytes]:
        blobs.asked += 1
        together.wait(30)
        return answers.pop(0)

    store = PackStore(load)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for failing in (True, False):
            reads = [pool.submit(store.read, refs[n % 2], 0, 1) for n in range(8)]
            together.wait(30)
            assert all(isinstance(read.exception(30), CorruptManifestError) == failing for read in reads)
    assert blobs.asked == 2


def test_a_store_of_packs_is_used_on_after_a_fork() -> None:
    blobs = Blobs()
    (ref,) = packed(blobs, [b"label"])
    store = PackStore(blobs.load)
    assert store.read(ref, 0, 5) == b"label"
    store._packs.get()._lock.acquire()  # as if another thread was in the middle of a read
    pid = os.fork()
    if pid == 0:
        os._exit(0 if store.read(ref, 0, 5) == b"label" else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_stores_of_ones_own_are_made_once_and_the_others_by_their_url(settings: Settings) -> None:
    blobs = Blobs()
    own: dict[str, Callable[[], ObjectStore]] = {PACKS.store: lambda: PackStore(blobs.load)}
    stores = Stores(settings, own=own)
    assert isinstance(stores.get(PACKS.store), PackStore)
    assert stores.get(PACKS.store) is stores.get(PACKS.store)
    assert stores.get("file://").url == "file://"
    stores.close()


@pytest.mark.parametrize("backend", ["sqlite", "mongodb"])
class TestSnapshotsOfPackedFiles:
    """Labels in packs, as files of a snapshot."""

    @pytest.fixture
    def files(self) -> dict[str, bytes]:
        return {"empty.txt": b""} | {f"labels/{n:04}.txt": f"0 0.5 0.5 0.{n} 0.1\n".encode() for n in range(300)}

    @pytest.fixture
    def catalog_url(self, backend: str, request: pytest.FixtureRequest) -> str | None:
        # Before the home is set, which a server that is started would belong to, and end with.
        return request.getfixturevalue("mongod").database_url() if backend == "mongodb" else None

    @pytest.fixture
    def settings(self, catalog_url: str | None, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
        if catalog_url is None:
            return settings
        monkeypatch.setenv("DATACACHE_CATALOG", catalog_url)
        return dataclasses.replace(settings, catalog=catalog_url)

    @pytest.fixture
    def record(self, settings: Settings, files: dict[str, bytes]) -> Iterator[SnapshotRecord]:
        catalog = open_catalog(settings)
        yield commit_packed(catalog, files)
        catalog.close()

    @promise("Small new files (labels) are read like any others")
    def test_they_are_read_through_the_daemon_and_then_from_its_tiers(
        self, settings: Settings, files: dict[str, bytes], record: SnapshotRecord
    ) -> None:
        for _ in range(2):
            with open_snapshot(record.ref, settings) as snapshot:
                assert {path: snapshot.read(path) for path in snapshot} == files
        client = running_daemon(settings)
        assert client is not None
        fetched = client.cache_status()["fetched"]
        assert fetched["failed"] == 0
        assert fetched["fetched"] == len(files) - 1

    def test_they_are_warmed(self, settings: Settings, files: dict[str, bytes], record: SnapshotRecord) -> None:
        subprocess.run([*dsctl(), "warm", record.ref, "--wait"], check=True, capture_output=True)
        assert connect(settings).cache_status()["fetched"]["fetched"] == len(files) - 1

    @promise("Small new files (labels) are read like any others")
    def test_they_are_read_without_a_daemon_in_children_and_by_pickle(
        self,
        settings: Settings,
        files: dict[str, bytes],
        record: SnapshotRecord,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def no_daemon(self: DaemonClient, *, fresh: bool = False) -> None:
            raise DaemonUnavailableError("none can be started here")

        monkeypatch.setattr(DaemonClient, "ensure", no_daemon)
        with open_snapshot(record.ref, settings) as snapshot:
            assert snapshot.read("labels/0001.txt") == files["labels/0001.txt"]
            pid = os.fork()
            if pid == 0:
                same = {path: snapshot.read(path) for path in snapshot} == files
                os._exit(0 if same else 1)
            assert os.waitpid(pid, 0)[1] == 0
            with pickle.loads(pickle.dumps(snapshot)) as other:
                assert {path: other.read(path) for path in other} == files

    def test_a_daemon_of_another_catalog_does_not_hide_them(
        self,
        settings: Settings,
        files: dict[str, bytes],
        record: SnapshotRecord,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> None:
        other = dataclasses.replace(settings, catalog=f"sqlite:///{tmp_path_factory.mktemp('other')}/catalog.db")
        connect(other)
        with open_snapshot(record.ref, settings) as snapshot:
            assert snapshot.read("labels/0007.txt") == files["labels/0007.txt"]


def commit_packed(catalog: Catalog, files: dict[str, bytes]) -> SnapshotRecord:
    """A snapshot of `labels` whose files all lie in one pack."""
    writer = PackWriter(catalog.put_blobs)
    offsets = {path: writer.add(data) for path, data in sorted(files.items())}
    pack = writer.close()
    builder = ManifestBuilder([PACKS], catalog.put_blobs)
    for path, offset in offsets.items():
        data = files[path]
        builder.add(Entry(path.encode(), len(data), 0, content_etag(data), "", 0, pack_key(pack, offset)))
    id, root = builder.finish(packs=[pack])
    record = SnapshotRecord(
        dataset="labels",
        id=id,
        created_at="2026-01-01T00:00:00Z",
        origin="",
        files=root.files,
        total_bytes=root.total_bytes,
    )
    return catalog.commit(record)


def dsctl() -> list[str]:
    return [sys.executable, "-m", "dataset_cli"]


def test_a_folder_beside_packs_is_read_as_ever(settings: Settings, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "a").write_bytes(b"hello")
    create_snapshot("mask", str(tmp_path))
    with open_snapshot("mask") as snapshot:
        assert snapshot.read("a") == b"hello"
