"""Verifying: what is missing, changed or unreadable is found, and with few requests."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from datacache import create_snapshot
from datacache.api import open_catalog, verify_snapshot
from datacache.catalog.objects import ObjectWriter
from datacache.catalog.packs import PackStore, PackWriter, content_etag, pack_key
from datacache.catalog.verify import Problem, verify
from datacache.core.errors import (
    CorruptManifestError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
)
from datacache.core.ids import ObjectRef
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import PACKS, BlobId, Entry, Source
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.store.base import ObjectInfo
from datacache.store.open import Stores
from tests.memory import MemoryStore
from tests.promises import promise
from tests.servers import CephRgw


class Counting(MemoryStore):
    """Objects in memory; what is asked for is counted, and what is asked of may fail."""

    def __init__(self) -> None:
        super().__init__(f"memory://{uuid.uuid4().hex}")
        self.pages = self.heads = self.reads = 0
        self.errors: dict[str, StoreError] = {}
        """What a HEAD or read of a key, or with '' a listing, raises."""

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        if "" in self.errors:
            raise self.errors[""]
        for page in super().list(prefix, start_after=start_after):
            self.pages += 1
            yield page if self.sorted_listing else page[::-1]

    def head(self, key: str) -> ObjectInfo:
        self.heads += 1
        if key in self.errors:
            raise self.errors[key]
        return super().head(key)

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes:
        self.reads += 1
        if ref.key in self.errors:
            raise self.errors[ref.key]
        return super().read(ref, start, stop)


class Made:
    """A store with objects under `data/`, and manifests of them."""

    def __init__(self, count: int = 3000) -> None:
        self.store = Counting()
        self.blobs: dict[BlobId, bytes] = {}
        self.infos = [self.store.put(f"data/{n:05}.jpg", b"%d" % n) for n in range(count)]

    def load(self, ids: Sequence[BlobId]) -> dict[BlobId, bytes]:
        return {id: self.blobs[id] for id in ids if id in self.blobs}

    def manifest(self, entries: Sequence[Entry] = (), *sources: Source, packs: Sequence[BlobId] = ()) -> Manifest:
        builder = ManifestBuilder(sources or [Source(self.store.url, "data/")], self.blobs.update)
        for entry in sorted(entries or map(self.entry, self.infos)):
            builder.add(entry)
        return Manifest.open(builder.finish(packs=packs)[0], self.load)

    def entry(self, info: ObjectInfo) -> Entry:
        return Entry(info.key.removeprefix("data/").encode(), info.size_bytes, info.mtime_ns, info.etag, info.version)

    def verify(self, manifest: Manifest, settings: Settings, *, read: bool = False) -> list[Problem]:
        own = {self.store.url: lambda: self.store, PACKS.store: lambda: PackStore(self.load)}
        with closing(Stores(settings, own=own)) as stores:
            return list(verify(manifest, stores, read=read, threads=4))


@pytest.fixture
def made() -> Made:
    return Made()


def found(problems: Sequence[Problem]) -> list[tuple[str, bytes]]:
    return sorted((problem.kind, problem.path) for problem in problems)


@promise("`dsctl snapshot verify` names every object that is missing or changed")
@pytest.mark.parametrize("is_sorted", [True, False])
def test_what_was_listed_is_compared_with_a_listing_and_asked_for_no_more(
    made: Made, settings: Settings, is_sorted: bool
) -> None:
    made.store.sorted_listing = is_sorted
    manifest = made.manifest()
    assert made.verify(manifest, settings) == []
    made.store.delete("data/00007.jpg")
    made.store.delete("data/02999.jpg")
    made.store.put("data/00008.jpg", b"x")
    made.store.put("data/01000.jpg", b"longer than before")
    made.store.put("data/unrelated", b"new")
    assert found(made.verify(manifest, settings)) == [
        ("changed", b"00008.jpg"),
        ("changed", b"01000.jpg"),
        ("missing", b"00007.jpg"),
        ("missing", b"02999.jpg"),
    ]
    assert (made.store.pages, made.store.heads, made.store.reads) == (6, 0, 0)


def test_under_other_names_objects_are_still_compared_with_a_listing(made: Made, settings: Settings) -> None:
    """A conversion's images: the same objects, in another order."""
    entries = [made.entry(info)._replace(path=b"%d" % n, key=info.key.encode()) for n, info in enumerate(made.infos)]
    twice = entries[0]._replace(path=b"again")
    manifest = made.manifest([*entries, twice])
    made.store.delete("data/00000.jpg")
    made.store.put("data/02500.jpg", b"changed")
    assert found(made.verify(manifest, settings)) == [("changed", b"2500"), ("missing", b"0"), ("missing", b"again")]
    assert (made.store.pages, made.store.heads) == (3, 0)


def test_few_objects_of_a_large_bucket_are_asked_for_one_by_one(settings: Settings) -> None:
    made = Made(20_000)
    few = made.manifest([made.entry(info) for info in made.infos[::400]])
    made.store.delete("data/00400.jpg")
    assert found(made.verify(few, settings)) == [("missing", b"00400.jpg")]
    assert (made.store.pages, made.store.heads) == (0, 50)
    sparse = made.manifest([made.entry(info) for info in made.infos[::125]])
    assert found(made.verify(sparse, settings)) == []
    assert made.store.pages == 5
    assert 50 < made.store.heads <= 50 + 160


def test_objects_outside_of_the_place_that_is_listed_are_asked_for(made: Made, settings: Settings) -> None:
    outside = made.store.put("elsewhere", b"x")
    entry = Entry(b"z", 1, 0, outside.etag, "", 0, b"elsewhere")
    manifest = made.manifest([*map(made.entry, made.infos), entry])
    assert made.verify(manifest, settings) == []
    made.store.delete("elsewhere")
    assert found(made.verify(manifest, settings)) == [("missing", b"z")]


def test_who_may_read_but_not_list_can_verify(made: Made, settings: Settings) -> None:
    manifest = made.manifest()
    made.store.errors = {"": StoreAccessError("denied"), "data/00003.jpg": StoreAccessError("denied, too")}
    made.store.delete("data/00004.jpg")
    assert found(made.verify(manifest, settings)) == [("missing", b"00004.jpg"), ("unreadable", b"00003.jpg")]


def test_one_object_that_gives_no_answer_is_a_problem_and_a_store_that_gives_none_is_an_error(
    made: Made, settings: Settings
) -> None:
    manifest = made.manifest()
    down = StoreUnavailableError("the disk fails")
    made.store.errors = {"data/00003.jpg": down, "data/01003.jpg": down}
    assert found(made.verify(manifest, settings, read=True)) == [
        ("unreadable", b"00003.jpg"),
        ("unreadable", b"01003.jpg"),
    ]
    made.store.errors = {info.key: down for info in made.infos}
    with pytest.raises(StoreUnavailableError):
        made.verify(manifest, settings, read=True)
    made.store.errors = {"": down}
    with pytest.raises(StoreUnavailableError):
        made.verify(manifest, settings)


@promise("`verify --read` compares every byte, also of copies")
def test_reading_finds_what_sizes_and_etags_do_not_show(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "data").mkdir()
    for n in range(200):
        (tmp_path / "data" / f"{n:03}").write_bytes(b"%3d" % n * 50_000)
    record = create_snapshot("faces", str(tmp_path / "data"), pin=True, settings=settings)
    copy = next(path for path in (settings.home / "objects").rglob("*-150000") if path.read_bytes()[:3] == b"  7")
    with open(copy, "r+b") as file:
        file.seek(100_000)
        file.write(b"\xff")
    assert list(verify_snapshot(record.ref, settings=settings)) == []
    [problem] = verify_snapshot(record.ref, read=True, settings=settings)
    assert (problem.kind, problem.path) == ("changed", b"007")
    copy.unlink()
    assert found(list(verify_snapshot(record.ref, settings=settings))) == [("missing", b"007")]


def test_copies_that_were_cut_short_are_found_without_reading(tmp_path: Path, settings: Settings) -> None:
    with closing(open_catalog(settings)) as catalog, closing(ObjectWriter(catalog, settings)) as writer:
        stored = writer.put(b"whole")
        Path("/", stored.key).write_bytes(b"who")
        builder = ManifestBuilder([writer.source], catalog.put_blobs)
        builder.add(Entry(b"a", 5, 0, stored.hex, "", 0, stored.key.encode()))
        manifest = Manifest.open(builder.finish()[0], catalog.get_blobs)
        with closing(Stores(settings)) as stores:
            assert found(list(verify(manifest, stores))) == [("changed", b"a")]


def test_files_in_packs_are_read_and_lost_packs_found(made: Made, settings: Settings) -> None:
    files = {b"l/%03d.txt" % n: b"0 %d" % n for n in range(300)}
    writer, entries = PackWriter(made.blobs.update), []
    packs: list[BlobId] = []
    for part in (range(100), range(100, 300)):
        offsets = {n: writer.add(files[b"l/%03d.txt" % n]) for n in part}
        packs.append(writer.close())
        for n, offset in offsets.items():
            data = files[b"l/%03d.txt" % n]
            key = pack_key(packs[-1], offset)
            entries.append(Entry(b"l/%03d.txt" % n, len(data), 0, content_etag(data), "", 1, key))
    both = [*map(made.entry, made.infos), *entries]
    manifest = made.manifest(both, Source(made.store.url, "data/"), PACKS, packs=packs)
    assert made.verify(manifest, settings) == []
    wrong = entries[5]._replace(etag="0" * 32)
    other = made.manifest([wrong], Source(made.store.url, "data/"), PACKS, packs=packs)
    assert found(made.verify(other, settings)) == [("changed", b"l/005.txt")]
    del made.blobs[packs[0]]
    problems = made.verify(manifest, settings)
    assert found(problems) == [("unreadable", b"l/%03d.txt" % n) for n in range(100)]
    assert packs[0].hex() in problems[0].message


def test_a_range_of_the_snapshot_itself_that_is_missing_is_an_error(made: Made, settings: Settings) -> None:
    manifest = made.manifest()
    del made.blobs[manifest.root.ranges[3].blob]
    with pytest.raises(CorruptManifestError):
        made.verify(manifest, settings)


def test_folder_markers_are_not_asked_for(made: Made, settings: Settings) -> None:
    manifest = made.manifest([*map(made.entry, made.infos), Entry(b"nothing/here/", 0, 0)])
    assert made.verify(manifest, settings) == []


def test_where_the_whole_folder_is_gone_every_file_is_missing(tmp_path: Path, settings: Settings) -> None:
    for count in (5, 150):
        folder = tmp_path / f"data{count}"
        folder.mkdir()
        for n in range(count):
            (folder / f"{n}").write_bytes(b"x")
        record = create_snapshot(f"faces{count}", str(folder), settings=settings)
        folder.rename(tmp_path / f"gone{count}")
        problems = list(verify_snapshot(record.ref, settings=settings))
        assert [problem.kind for problem in problems] == ["missing"] * count


def test_progress_ends_at_the_number_of_files(tmp_path: Path, settings: Settings) -> None:
    for n in range(150):
        (tmp_path / f"{n}").write_bytes(b"x")
    record = create_snapshot("faces", str(tmp_path), settings=settings)
    seen: list[tuple[int, int]] = []
    list(verify_snapshot(record.ref, settings=settings, progress=lambda *at: seen.append(at)))
    assert seen[-1] == (150, 150)
    assert seen == sorted(seen)


@pytest.fixture
def ceph(ceph_rgw: CephRgw, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def make_bucket(**options: bool) -> str:
        for name, value in ceph_rgw.env().items():
            monkeypatch.setenv(name, value)
        bucket = f"data-{uuid.uuid4().hex[:12]}"
        ceph_rgw.make_bucket(bucket, **options)
        return bucket

    return make_bucket


@promise("`dsctl snapshot verify` names every object that is missing or changed")
@pytest.mark.ceph
def test_missing_and_changed_objects_of_a_real_bucket_are_found(
    ceph: Callable[..., str], ceph_rgw: CephRgw, settings: Settings
) -> None:
    bucket, client = ceph(), ceph_rgw.client()
    for n in range(120):
        client.put_object(Bucket=bucket, Key=f"data/{n:03} +ü", Body=b"%d" % n)
    record = create_snapshot("faces", f"s3://{bucket}/data", settings=settings)
    for read in (False, True):
        assert list(verify_snapshot(record.ref, read=read, settings=settings)) == []
    client.delete_object(Bucket=bucket, Key="data/005 +ü")
    client.put_object(Bucket=bucket, Key="data/006 +ü", Body=b"7")
    for read in (False, True):
        assert found(list(verify_snapshot(record.ref, read=read, settings=settings))) == [
            ("changed", "006 +ü".encode()),
            ("missing", "005 +ü".encode()),
        ]


@promise("In a bucket with versioning, a snapshot outlives overwriting and deletion")
@pytest.mark.ceph
def test_a_recorded_version_is_fine_for_as_long_as_it_can_be_read(
    ceph: Callable[..., str], ceph_rgw: CephRgw, settings: Settings
) -> None:
    bucket, client = ceph(versioning=True), ceph_rgw.client()
    put = [client.put_object(Bucket=bucket, Key=f"data/{n}", Body=b"%d" % n) for n in range(3)]
    with closing(open_catalog(settings)) as catalog:
        builder = ManifestBuilder([Source(f"s3://{bucket}", "data/")], catalog.put_blobs)
        for n, answer in enumerate(put):
            builder.add(Entry(b"%d" % n, 1, 0, answer["ETag"].strip('"'), answer["VersionId"]))
        manifest = Manifest.open(builder.finish()[0], catalog.get_blobs)
    client.put_object(Bucket=bucket, Key="data/0", Body=b"overwritten")
    client.delete_object(Bucket=bucket, Key="data/1")
    client.delete_object(Bucket=bucket, Key="data/2")
    client.delete_object(Bucket=bucket, Key="data/2", VersionId=put[2]["VersionId"])
    for read in (False, True):
        with closing(Stores(settings)) as stores:
            assert found(list(verify(manifest, stores, read=read))) == [("missing", b"2")]


def test_a_reference_to_nothing_is_an_error(settings: Settings) -> None:
    with pytest.raises(LookupError):
        list(verify_snapshot("faces", settings=settings))
