"""Ranges, roots, building, finding, and the directory tree over them."""

from __future__ import annotations

import json
import random
import struct
from operator import itemgetter

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from datacache.core.errors import CatalogError, CorruptManifestError, UsageError
from datacache.core.ids import MAX_READABLE_BYTES
from datacache.core.packed import MOST_BYTES
from datacache.manifest import codec
from datacache.manifest.builder import ManifestBuilder, Sorter, sorted_entries
from datacache.manifest.diff import diff
from datacache.manifest.model import BlobId, Entry, Held, RangeInfo, Root, Source
from datacache.manifest.reader import Manifest
from datacache.manifest.view import Tree
from tests.promises import promise

SOURCE = Source("s3://bucket", "data/")


class Blobs(dict[BlobId, bytes]):
    """A catalog's blobs, as far as a manifest needs one."""

    def get_many(self, ids):
        return {id: self[id] for id in ids if id in self}


def build(entries, blobs=None):
    blobs = Blobs() if blobs is None else blobs
    builder = ManifestBuilder([SOURCE], blobs.update)
    for entry in entries:
        builder.add(entry)
    id, _ = builder.finish()
    return id, blobs


def opened(paths):
    id, blobs = build([Entry(path, 10, 0) for path in sorted(paths)])
    return Manifest.open(id, blobs.get_many)


def numbered(count, etag=lambda n: f"{n:032x}"):
    return [Entry(b"d%03d/f%06d" % (n // 1000, n), n, n * 10**9, etag(n)) for n in range(count)]


texts = st.text(max_size=40)
etags = st.one_of(st.just(""), texts, st.from_regex(r"[0-9a-f]{32}", fullmatch=True))
entries = st.lists(
    st.builds(
        Entry,
        st.binary(min_size=1, max_size=60),
        st.integers(0, MAX_READABLE_BYTES),
        st.integers(-(2**62), 2**62),
        etags,
        texts,
        st.integers(0, 3),
        st.one_of(st.none(), st.binary(min_size=1, max_size=40)),
        st.sampled_from([0, 0, 0o100755, 0o120777]),
        st.sampled_from([b"", b"", b"../x", b"a" * 4000]),
    ),
    min_size=1,
    max_size=50,
    unique_by=lambda e: e.path,
)


@given(entries)
def test_a_range_decodes_to_the_entries_it_was_made_of(entries):
    entries.sort()
    held = codec.Range(codec.encode_range(entries))
    assert [held.entry(n) for n in range(len(entries))] == entries


def test_the_same_entries_give_the_same_id_and_another_size_another_id():
    one, _ = build(numbered(5000))
    again, _ = build(numbered(5000))
    changed = numbered(5000)
    changed[2500] = changed[2500]._replace(size_bytes=1)
    assert one == again
    assert build(changed)[0] != one


def test_packs_in_any_order_and_twice_give_the_same_id():
    packs = [BlobId(bytes([number]) * 16) for number in range(20)]
    ids = set()
    for given_packs in (packs, packs[::-1], [*packs, *packs]):
        builder = ManifestBuilder([SOURCE], Blobs().update)
        builder.add(Entry(b"a", 1, 0))
        id, root = builder.finish(packs=given_packs)
        ids.add(id)
        assert root.packs == tuple(packs)
    assert len(ids) == 1


@promise("A new version writes what changed and shares the rest")
def test_what_is_known_to_be_in_the_catalog_is_not_put_again():
    _, blobs = build(numbered(5_000))
    changed = numbered(5_000)
    changed[2000] = changed[2000]._replace(etag="0" * 32)
    builder = ManifestBuilder([SOURCE], (put := Blobs()).update, known=blobs.keys())
    for entry in changed:
        builder.add(entry)
    id, _ = builder.finish()
    assert len(put) == 2  # the range and the root
    assert list(Manifest.open(id, Blobs(blobs | put).get_many).entries()) == changed


@promise("A new version writes what changed and shares the rest")
def test_a_change_rewrites_one_range_and_an_insertion_at_most_three():
    _, blobs = build(numbered(5_000))
    before = set(blobs)
    changed = numbered(5_000)
    changed[2000] = changed[2000]._replace(etag="0" * 32)
    _, after = build(changed)
    assert len(set(after) - before) == 2  # the range and the root
    inserted = numbered(5_000)
    inserted.insert(2001, Entry(inserted[2000].path + b"x", 1, 1, "0" * 32))
    _, after = build(inserted)
    assert len(set(after) - before) <= 4


def test_ranges_have_a_least_and_a_most_number_of_rows():
    id, blobs = build(numbered(20_000))
    rows = [info.rows for info in Manifest.open(id, blobs.get_many).root.ranges]
    assert min(rows[:-1]) >= codec.MIN_ROWS
    assert max(rows) <= codec.MAX_ROWS
    assert len(set(rows)) > len(rows) // 2, "boundaries follow the paths"


def test_every_row_is_found_by_its_path_and_by_its_number():
    manifest = opened([b"f%05d" % n for n in range(3000)])
    for row in random.Random(1).sample(range(3000), 300):
        path = b"f%05d" % row
        assert manifest.find(path) == row
        assert manifest.entry(row).path == path
        assert manifest.seek(path + b"\0") == row + 1
    assert manifest.find(b"f") is None
    assert manifest.find(b"zzz") is None
    assert manifest.seek(b"") == 0
    assert manifest.seek(b"zzz") == manifest.rows


def test_few_rows_are_kept_in_memory_when_few_are_allowed():
    id, blobs = build(numbered(10_000))
    manifest = Manifest(
        codec.decode_root(codec.decompress(blobs[bytes.fromhex(id)], bytes.fromhex(id))),
        blobs.get_many,
        cached_rows=2000,
    )
    assert [manifest.entry(row).size_bytes for row in range(10_000)] == list(range(10_000))
    assert manifest._rows_held <= 2000


def test_entries_stream_from_any_row():
    id, blobs = build(numbered(3000))
    manifest = Manifest.open(id, blobs.get_many)
    assert list(manifest.entries()) == numbered(3000)
    assert list(manifest.entries(1234)) == numbered(3000)[1234:]
    assert list(manifest.entries(3000)) == []


@promise("A damaged or contradictory manifest is an error, never other files")
def test_a_missing_and_an_altered_blob_are_errors_that_name_it():
    id, blobs = build(numbered(1000))
    first = Manifest.open(id, blobs.get_many).root.ranges[0].blob
    altered = Blobs(blobs)
    altered[first] = codec.compress(b"DCR1 something else")
    with pytest.raises(CorruptManifestError, match=first.hex()):
        Manifest.open(id, altered.get_many).entry(0)
    del altered[first]
    with pytest.raises(CorruptManifestError, match=first.hex()):
        Manifest.open(id, altered.get_many).entry(0)


@promise("Packed catalog records over 256 MiB are refused before they take memory")
def test_what_would_unpack_to_more_than_a_manifest_has_is_refused_by_its_declared_size():
    zeros = zstandard.ZstdCompressor(level=1).compressobj(size=MOST_BYTES + 1)
    bomb = b"".join([*(zeros.compress(bytes(2**20)) for _ in range(MOST_BYTES // 2**20)), zeros.compress(b"\0")])
    bomb += zeros.flush()
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(b"DCM1")
    for stored, why in ((bomb, "would take 268,435,457 bytes"), (silent, "does not say"), (b"", "cannot be")):
        with pytest.raises(CorruptManifestError, match=why):
            codec.decompress(stored, BlobId(bytes(16)))


def lying(entries, first=None, rows=None, more=()):
    """A manifest of one range (and `more`), as somebody writes it who does not keep to the rules."""
    raw = codec.encode_range(entries)
    blobs = Blobs({codec.blob_id(raw): codec.compress(raw)})
    info = RangeInfo(
        codec.blob_id(raw), entries[0].path if first is None else first, len(entries) if rows is None else rows
    )
    root = codec.encode_root(
        Root(sources=(SOURCE,), ranges=(info, *more), files=len(entries), markers=0, total_bytes=20)
    )
    blobs[codec.blob_id(root)] = codec.compress(root)
    return codec.blob_id(root).hex(), blobs


A, D = Entry(b"a", 10, 0), Entry(b"d/b", 10, 0)
OTHER = BlobId(b"o" * 16)


@promise("A damaged or contradictory manifest is an error, never other files")
@pytest.mark.parametrize(
    "lie",
    [
        {"rows": 5},
        {"rows": 1},
        {"rows": 0},
        {"first": b"0"},
        {"first": b"b"},
        {"entries": [D, A]},
        {"entries": [A, A]},
        {"entries": [A._replace(source=1), D]},
        {"entries": [A._replace(size_bytes=MAX_READABLE_BYTES + 1), D]},
        {"more": [RangeInfo(OTHER, b"b", 1)]},
        {"more": [RangeInfo(OTHER, b"d/b", 1)]},
        {"more": [RangeInfo(OTHER, b"a", 1)]},
        {"more": [RangeInfo(OTHER, b"0", 1)]},
    ],
    ids=repr,
)
def test_a_manifest_that_contradicts_itself_is_an_error_and_never_walked(lie):
    id, blobs = lying(**{"entries": [A, D]} | lie)
    walks = (
        lambda tree: next(tree.children(b"")),
        lambda tree: tree.child(b"", b"a"),
        lambda tree: tree.manifest.entry(0),
        lambda tree: next(tree.manifest.entries()),
        lambda tree: next(tree.manifest.paths()),
    )
    for walk in walks:
        with pytest.raises(CorruptManifestError) as caught:
            walk(Tree(Manifest.open(id, blobs.get_many)))
        assert caught.value.hint


@promise("A damaged or contradictory manifest is an error, never other files")
def test_columns_that_are_shorter_or_longer_than_the_rows_are_an_error():
    raw = codec.encode_range(numbered(70, lambda n: f"{n:032x}"))
    assert len(codec.Range(raw).paths) == 70
    for rows in (0, 69, 71, 2**32 - 1):
        with pytest.raises(CorruptManifestError, match="is no range of a manifest"):
            codec.Range(raw[:4] + struct.pack("<I", rows) + raw[8:])
    for end in range(4, len(raw), 7):
        with pytest.raises(CorruptManifestError):
            codec.Range(raw[:end])


@promise("A damaged or contradictory manifest is an error, never other files")
def test_a_root_that_is_none_is_an_error_and_takes_no_memory():
    def root(text, ranges=0):
        return b"DCM1" + struct.pack("<II", len(text), ranges) + text

    good = {"sources": [["s3://b", "p/"]], "files": 0, "markers": 0, "bytes": 0, "hidden": []}
    assert codec.decode_root(root(json.dumps(good).encode())).rows == 0
    bad = [{"files": "x"}, {"files": -1}, {"bytes": 2**63}, {"sources": [["s3://b"]]}, {"sources": [[1, 2]]}]
    bad += [{"sources": 3}, {"hidden": ["zz"]}, {"hidden": [1]}, {"packs": 7}]
    raws = [root(json.dumps(good | change).encode()) for change in bad]
    raws += [root(b"{}"), root(b"[]"), root(b"[" * 100_000), root(b"{}", ranges=2**32 - 1), b"DCM1", b"DCM1\1\0"]
    for raw in raws:
        with pytest.raises(CorruptManifestError, match="is no root of a manifest"):
            codec.decode_root(raw)


@promise("A damaged or contradictory manifest is an error, never other files")
def test_an_object_too_large_to_be_read_is_in_no_manifest():
    with pytest.raises(UsageError, match="too large"):
        build([Entry(b"a", MAX_READABLE_BYTES + 1, 0)])


@pytest.mark.parametrize(
    "odd", [{"etag": "e" * 2**16}, {"version": "v" * 2**16}, {"mtime_ns": 2**63}, {"size_bytes": -1}]
)
def test_what_no_object_has_is_an_error_that_tells_where(odd: dict[str, object]):
    with pytest.raises(UsageError, match="among b'a' to b'b', an object has"):
        build([Entry(b"a", 1, 0), Entry(b"b", 1, 0)._replace(**odd)])


def test_out_of_order_and_double_paths_are_refused():
    for paths in ([b"b", b"a"], [b"a", b"a"]):
        with pytest.raises(CatalogError, match="twice or out of order"):
            build([Entry(path, 1, 0) for path in paths])
    for unusable in (b"", b"x" * 65_536):
        with pytest.raises(UsageError):
            build([Entry(unusable, 1, 0)])
    assert opened([b"x" * 65_535]).path(0) == b"x" * 65_535


def test_the_objects_of_entries_are_under_the_prefix_unless_they_have_a_key():
    id, blobs = build([Entry(b"a", 1, 0, "e1"), Entry(b"b", 2, 0, "e2", key=b"other/x")])
    manifest = Manifest.open(id, blobs.get_many)
    assert manifest.object_ref(manifest.entry(0)).url == "s3://bucket/data/a"
    assert manifest.object_ref(manifest.entry(1)).url == "s3://bucket/other/x"


def test_the_folder_of_a_snapshot_bounds_the_objects_in_it_and_no_others():
    builder = ManifestBuilder([Source("file://", "data/set/")], (blobs := Blobs()).update)
    for entry in (Entry(b"a", 1, 0, "e1"), Entry(b"b", 1, 0, "e2", key=b"data/other/x")):
        builder.add(entry)
    manifest = Manifest.open(builder.finish()[0], blobs.get_many)
    assert [manifest.object_ref(entry).root for entry in manifest.entries()] == [len("data/set/"), 0]


def test_every_file_counts_once_among_those_that_are_held_and_those_that_are_not():
    copies = Source("s3://copies", "", content_addressed=True)
    builder = ManifestBuilder([SOURCE, copies], Blobs().update)
    for entry in (
        Entry(b"a", 1, 0, "e1"),
        Entry(b"b", 1, 0, "e2", version="v1"),
        Entry(b"c", 1, 0, "e3", version="v2", source=1),  # a copy of a version
        Entry(b"d", 1, 0, "e4", source=1),
    ):
        builder.add(entry)
    builder.finish()
    assert builder.held == Held(copied=2, versioned=1, referenced=1)


@given(st.lists(st.binary(min_size=1, max_size=6), min_size=1, unique=True), st.integers(1, 5))
def test_sorting_in_small_runs_gives_one_sorted_stream(paths, in_memory):
    entries = [Entry(path, 1, 0) for path in paths]
    assert list(sorted_entries(entries, rows_in_memory=in_memory)) == sorted(entries)


def test_rows_that_sort_the_same_keep_the_order_in_which_they_came():
    rows = [("a", number) for number in range(5)]
    with Sorter(itemgetter(0), rows_in_memory=2) as sorter:
        for row in rows:
            sorter.add(row)
        assert list(sorter.sorted()) == rows


def test_a_tree_shows_names_once_and_goes_on_from_any_child():
    tree = Tree(opened([b"a/b/c", b"a/b/d", b"a/x", b"a-b", b"z", b"empty/"]))
    assert [(c.name, c.is_dir) for c in tree.children(b"")] == [
        (b"a-b", False),
        (b"a", True),
        (b"empty", True),
        (b"z", False),
    ]
    assert [c.name for c in tree.children(b"a/")] == [b"b", b"x"]
    assert list(tree.children(b"empty/")) == []
    everything = list(tree.children(b""))
    for at, child in enumerate(everything):
        assert list(tree.children(b"", child.next_row)) == everything[at + 1 :]
    for child in everything:
        assert tree.child(b"", child.name) == child
    assert tree.child(b"", b"nothing") is None
    assert tree.prefix_of(2, tree.child(b"a/", b"b").row) == b"a/b/"
    assert tree.prefix_of(0, 0) == b""


def test_a_file_whose_name_is_also_a_folders_gives_way_to_the_folder():
    manifest = opened([b"a", b"a-b", b"a/b", b"c"])
    tree = Tree(manifest)
    assert manifest.root.hidden == {b"a"}
    assert [(c.name, c.is_dir) for c in tree.children(b"")] == [(b"a-b", False), (b"a", True), (b"c", False)]
    assert tree.child(b"", b"a").is_dir
    assert manifest.find(b"a") == 0  # still there by its exact path


@promise("Mounts leave out what no directory can hold")
def test_what_no_directory_can_hold_is_hidden_and_still_in_the_manifest():
    odd = [b"/lead", b"a//b", b"a/../b", b"./x", b"..", b"long/" + b"n" * 256, b"nul\0x"]
    manifest = opened([*odd, b"a/ok", b"ok"])
    assert manifest.root.hidden == set(odd)
    tree = Tree(manifest)
    assert [c.name for c in tree.children(b"")] == [b"a", b"long", b"ok"]
    assert [c.name for c in tree.children(b"a/")] == [b"ok"]
    assert list(tree.children(b"long/")) == []
    for path in odd:
        assert manifest.find(path) is not None


@given(st.lists(st.from_regex(rb"[ab][a\-]?(/[ab][a\-]?){0,3}/?", fullmatch=True), min_size=1, unique=True))
def test_a_tree_agrees_with_a_dictionary_of_folders(paths):
    tree = Tree(opened(paths))
    folders: dict[bytes, dict[bytes, bool]] = {b"": {}}
    for path in paths:
        parts = path.split(b"/")
        for depth in range(len(parts)):
            prefix = b"".join(part + b"/" for part in parts[:depth])
            folders.setdefault(prefix, {})
            if parts[depth]:
                is_dir = depth < len(parts) - 1
                folders[prefix][parts[depth]] = folders[prefix].get(parts[depth], False) or is_dir
    for prefix, expected in folders.items():
        assert {c.name: c.is_dir for c in tree.children(prefix)} == expected
        assert {name: tree.child(prefix, name).is_dir for name in expected} == expected
    files, root = [path for path in paths if not path.endswith(b"/")], tree.manifest.root
    assert (root.files, root.markers, root.total_bytes) == (len(files), len(paths) - len(files), 10 * len(paths))
    assert root.hidden == {path for path in files if any(other.startswith(path + b"/") for other in paths)}


@promise("Reading a snapshot of a folder never leads out of it")
def test_what_has_no_attributes_is_encoded_as_ever():
    plain = [Entry(b"a", 1, 2, "3"), Entry(b"b", 4, 5, "6", key=b"k")]
    raw = codec.encode_range(plain)
    assert raw.hex() == (
        "4443523102000000030600000001000100616204100000000100000000000000040000000000000004100000000200000000000000050000"
        "000000000003060000000100010033360000000000000000000003050000000000010" + "06b"
    )
    with_mode = codec.encode_range([plain[0]._replace(mode=0o100755), plain[1]])
    assert (raw[:4], with_mode[:4]) == (b"DCR1", b"DCR2")
    assert [codec.Range(with_mode).entry(n).mode for n in range(2)] == [0o100755, 0]


@promise("Reading a snapshot of a folder never leads out of it")
@pytest.mark.parametrize("target", [b"/etc/shadow", b"../../x", b"..", b"a/../../../x", b"a/..", b"x\0y"])
def test_a_link_that_may_lead_out_is_in_no_manifest(target):
    builder = ManifestBuilder([SOURCE], Blobs().update)
    builder.add(Entry(b"a", 0, 0, target=b"b/c"))
    builder.add(Entry(b"d/e", 0, 0, target=b"../a"))
    with pytest.raises(CatalogError, match="leads out"):
        builder.add(Entry(b"d/f" if target != b".." else b"e", 0, 0, target=target))


def test_links_and_permissions_are_told_apart_where_both_know_them():
    base = [Entry(b"%03d" % n, 5, 0, f"{n:032x}") for n in range(300)]
    noted = [entry._replace(mode=0o100644) for entry in base]
    run = [noted[0]._replace(mode=0o100755), noted[1]._replace(target=b"000"), *noted[2:]]
    manifests = []
    for each in (base, noted, run):
        id, blobs = build(each)
        manifests.append(Manifest.open(id, blobs.get_many))
    assert list(diff(manifests[0], manifests[1])) == []
    assert [change.path for change in diff(manifests[1], manifests[2])] == [b"000", b"001"]


def test_links_to_different_files_differ_though_all_else_is_the_same():
    there, elsewhere = (
        Manifest.open(id, blobs.get_many)
        for id, blobs in (build([Entry(b"link", 5, 0, "1" * 32, target=target)]) for target in (b"there", b"else"))
    )
    assert [change.path for change in diff(there, elsewhere)] == [b"link"]
