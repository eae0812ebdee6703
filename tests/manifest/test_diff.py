"""Test what changed between two snapshots, and that only what differs is read."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datacache.core.errors import CorruptManifestError
from datacache.core.ids import ObjectRef
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.diff import Change, diff
from datacache.manifest.model import BlobId, Entry, Source
from datacache.manifest.reader import Manifest
from tests.promises import promise

BUCKET = Source("s3://bucket", "data/")
ELSEWHERE = Source("s3://elsewhere", "copy/")
COPIES = Source("s3://objects", "all/", content_addressed=True)


class Blobs(dict[BlobId, bytes]):
    """A catalog's blobs, which remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[BlobId] = []

    def load(self, ids: Sequence[BlobId]) -> dict[BlobId, bytes]:
        self.loaded += ids
        return {id: self[id] for id in ids if id in self}


def build(blobs: Blobs, entries: dict[bytes, Entry], *sources: Source) -> Manifest:
    builder = ManifestBuilder(sources or (BUCKET,), blobs.update)
    for path in sorted(entries):
        builder.add(entries[path])
    return Manifest.open(builder.finish()[0], blobs.load)


def numbered(count: int) -> dict[bytes, Entry]:
    rows = (Entry(b"d%03d/f%06d" % (n // 100, n), n, n * 10**9, f"{n:032x}") for n in range(count))
    return {entry.path: entry for entry in rows}


def changes(a: Manifest, b: Manifest) -> list[tuple[str, bytes]]:
    return [(change.kind, change.path) for change in diff(a, b)]


def ref(sources: tuple[Source, ...], entry: Entry) -> ObjectRef:
    """Return what `Manifest.object_ref` must say."""
    source = sources[entry.source]
    key = (entry.key or source.prefix.encode() + entry.path).decode("utf-8", "surrogateescape")
    exact = ("", "") if source.content_addressed else (entry.etag, entry.version)
    return ObjectRef(source.store, key, entry.size_bytes, *exact)


def expected(
    a: dict[bytes, Entry], a_sources: tuple[Source, ...], b: dict[bytes, Entry], b_sources: tuple[Source, ...]
) -> list[Change]:
    """The plain comparison of two dicts."""
    found = []
    for path in sorted(a.keys() | b.keys()):
        if path.endswith(b"/"):
            continue
        one, other = a.get(path), b.get(path)
        if one is None:
            found.append(Change("added", path, None, other))
        elif other is None:
            found.append(Change("removed", path, one, None))
        elif (
            one.size_bytes != other.size_bytes
            or one.target != other.target
            or (one.mode != other.mode and one.mode and other.mode)
            or not (one.is_folder_link or one.etag == other.etag != "" or ref(a_sources, one) == ref(b_sources, other))
        ):
            found.append(Change("changed", path, one, other))
    return found


LISTED = numbered(500)
SOURCES = st.sampled_from([(BUCKET, COPIES), (BUCKET, COPIES, ELSEWHERE), (ELSEWHERE, COPIES), (COPIES, BUCKET)])
PATHS = st.one_of(
    st.sampled_from(sorted(LISTED)),
    st.sampled_from([b"d000/", b"d002/", b"e/"]),  # folder markers
    st.binary(min_size=1, max_size=6).filter(lambda p: p != b"/"),
)
ROWS = st.builds(
    Entry,
    PATHS,
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from(["", "", "plain", "0" * 32, '"' + "0" * 32 + '"']),
    st.sampled_from(["", "v1"]),
    st.integers(0, 1),
    st.sampled_from([None, b"own", b"other"]),
    st.sampled_from([0, 0, 0o100644, 0o100755]),
    st.sampled_from([b"", b"", b"", b"there", b"elsewhere"]),
)
EDITS = st.tuples(
    st.lists(ROWS, max_size=30),
    st.lists(PATHS, max_size=30),
    st.integers(0, 500),
    st.integers(0, 500),
)


def edited(edit: tuple[list[Entry], list[bytes], int, int]) -> dict[bytes, Entry]:
    rows, gone, first, last = edit
    entries = {path: entry for n, (path, entry) in enumerate(LISTED.items()) if not first <= n < last}
    entries |= {entry.path: entry for entry in rows}
    for path in gone:
        entries.pop(path, None)
    return entries


@promise("A diff is exactly the comparison of both lists, and reads only ranges that differ")
@settings(deadline=None)
@given(EDITS, SOURCES, EDITS, SOURCES)
def test_a_diff_is_the_plain_comparison_of_both_lists(a_edit, a_sources, b_edit, b_sources):
    a, b = edited(a_edit), edited(b_edit)
    blobs = Blobs()
    before, after = build(blobs, a, *a_sources), build(blobs, b, *b_sources)
    assert list(diff(before, after)) == expected(a, a_sources, b, b_sources)
    assert [before.object_ref(entry) for entry in before.entries()] == [ref(a_sources, a[path]) for path in sorted(a)]


@promise("A diff is exactly the comparison of both lists, and reads only ranges that differ")
def test_only_ranges_that_differ_are_loaded():
    before = numbered(20_000)
    after = dict(before)
    for path in random.Random(3).sample(sorted(before), 5):
        after[path] = after[path]._replace(etag="f" * 32)
    blobs = Blobs()
    a, b = build(blobs, before), build(blobs, after)
    roots = list(blobs.loaded)
    assert len(changes(a, b)) == 5
    own = {info.blob for info in a.root.ranges} ^ {info.blob for info in b.root.ranges}
    assert len(own) <= 10
    assert sorted(blobs.loaded) == sorted([*roots, *own])
    assert len(a.root.ranges) > 50


def test_files_added_under_a_new_prefix_cost_their_own_ranges_only():
    before = numbered(20_000)
    after = before | {b"e/%04d" % n: Entry(b"e/%04d" % n, 1, 0, f"{n:032x}") for n in range(1000)}
    blobs = Blobs()
    a, b = build(blobs, before), build(blobs, after)
    blobs.loaded.clear()
    assert [kind for kind, _ in changes(a, b)] == ["added"] * 1000
    assert len(blobs.loaded) < 15


def test_a_snapshot_does_not_differ_from_itself_and_nothing_is_loaded():
    blobs = Blobs()
    a = build(blobs, numbered(2_000))
    blobs.loaded.clear()
    assert changes(a, a) == []
    assert blobs.loaded == []


def test_nothing_and_something_differ_by_all_of_it():
    blobs = Blobs()
    full, empty = build(blobs, numbered(300)), build(blobs, {b"only/a/marker/": Entry(b"only/a/marker/", 0, 0)})
    assert changes(empty, full) == [("added", path) for path in sorted(numbered(300))]
    assert changes(full, empty) == [("removed", path) for path in sorted(numbered(300))]


def test_the_same_etag_and_size_in_another_bucket_is_the_same_file():
    blobs = Blobs()
    entries = numbered(300)
    assert changes(build(blobs, entries, BUCKET), build(blobs, entries, ELSEWHERE)) == []


def test_without_etags_another_bucket_is_another_file_though_the_ranges_are_equal():
    blobs = Blobs()
    entries = {path: entry._replace(etag="") for path, entry in numbered(3).items()}
    a, b = build(blobs, entries, BUCKET), build(blobs, entries, ELSEWHERE)
    assert a.root.ranges == b.root.ranges
    assert changes(a, b) == [("changed", path) for path in sorted(entries)]


def test_a_pinned_copy_is_the_same_file_as_its_original():
    blobs = Blobs()
    entries = numbered(300)
    pinned = {path: entry._replace(key=b"all/ab/%d" % entry.size_bytes) for path, entry in entries.items()}
    assert changes(build(blobs, entries), build(blobs, pinned, COPIES)) == []


def test_a_missing_range_is_an_error_that_names_it():
    blobs = Blobs()
    a, b = build(blobs, numbered(300)), build(blobs, numbered(301))
    blob = next(info.blob for info in b.root.ranges if info not in a.root.ranges)
    del blobs[blob]
    with pytest.raises(CorruptManifestError, match=blob.hex()):
        changes(a, b)
