"""The annotation table: what is put in comes out, in bounded pieces, and versions share what did not change."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Iterator
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datacache.annotations.model import Action, Annotation, Box, Problem
from datacache.annotations.query import Query, find
from datacache.annotations.shapes.outline import Extra, Mask, Polygon, Rotated, pack
from datacache.annotations.table import ranges as table_details
from datacache.annotations.table.ranges import Row
from datacache.annotations.table.shapes import SHAPED
from datacache.annotations.table.table import EncodedRange, ImageSummary, Table, TableBuilder, encode_range
from datacache.core.errors import CatalogError, CorruptManifestError
from datacache.manifest import codec
from datacache.manifest import codec as blobtree
from datacache.manifest.model import BlobId
from tests.annotations.shapes import any_extra
from tests.annotations.tables import Blobs, box, broken, build, encoded, image, ranges

texts = st.text(max_size=6) | st.sampled_from(["no_mask", "mit Maske", "戴口罩", "\ud800", "a\0b", "\udcff"])
numbers = st.integers(0, 3000).map(float) | st.floats(0, 1e9) | st.sampled_from([0.1, 1e-300, 2.0**33, math.pi])
boxes = st.builds(
    Box,
    texts,
    numbers,
    numbers,
    numbers,
    numbers,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(texts, texts), max_size=2).map(tuple),
    st.integers(0, 100_000),
    st.none() | any_extra,
)
paths = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8) | st.sampled_from(
    ["JPEGImages/a.jpg", "JPEGImages/a.png", "x/JPEGImages/b c.JPG", "\udcff.jpg", "a\0b.jpg", ".jpg", "dir/"]
)
problems = st.builds(
    Problem,
    st.sampled_from(["size-wrong", "box-outside"]),
    st.sampled_from(get_args(Action)),
    texts | paths,
    st.integers(0, 99),
    texts,
)


def images_with(table: Table, label: str | None = None) -> Iterator[ImageSummary]:
    """The images that a query finds, which reads summaries alone."""
    return find(table, Query(labels=(label,) if label is not None else ()))


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    found = []
    for path in sorted(draw(st.sets(paths, min_size=1, max_size=8)), key=_key):
        source = draw(st.just(path.replace("JPEGImages", "Annotations").replace(".jpg", ".xml")) | texts)
        annotation = st.builds(
            Annotation,
            st.just(path),
            st.integers(0, 70_000),
            st.integers(0, 300),
            st.lists(boxes, max_size=4).map(tuple),
            st.lists(texts, max_size=2).map(tuple),
            st.just(source),
            st.just(()) | st.lists(texts, max_size=2).map(tuple),
        )
        found.append(Row(draw(st.none() | annotation), path, tuple(draw(st.lists(problems, max_size=2)))))
    return found


def _key(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


@given(rows(), st.lists(problems, max_size=3))
def test_all_that_is_put_in_comes_out_again(given_rows, loose):
    table = build(given_rows, loose)
    assert list(table.rows()) == given_rows
    assert [table.row(row.path) for row in given_rows] == given_rows
    assert list(table.problems()) == sorted(loose, key=lambda p: (p.file, p.line, p)) + [
        problem for row in given_rows for problem in row.problems
    ]
    found = [row.annotation for row in given_rows if row.annotation]
    assert list(images_with(table)) == [
        ImageSummary(a.path, a.width, a.height, len(a.boxes), _counts(a)) for a in found
    ]
    for (_, summary), part in zip(table.summaries(), ranges(given_rows), strict=True):
        for name in SHAPED:
            assert list(summary.shaped(name)) == [_shaped(row.annotation, name) for row in part]
    for label, total in table.labels.items():
        having = [a for a in found if label in _counts(a)]
        assert (total.images, total.boxes) == (len(having), sum(_counts(a)[label] for a in having))
        assert [image.path for image in images_with(table, label)] == [a.path for a in having]
    assert (table.images, table.usable, table.boxes) == (
        len(given_rows),
        len(found),
        sum(len(a.boxes) for a in found),
    )


def _shaped(annotation: Annotation | None, name: str) -> int:
    extras = [box.extra for box in annotation.boxes if box.extra] if annotation else []
    outlines = [extra.outline for extra in extras]
    if name == "vertices":
        lines = [
            o.points if isinstance(o, Polygon) else o.corners for o in outlines if isinstance(o, Polygon | Rotated)
        ]
        return sum(map(len, lines)) // 16
    if name == "keypoints":
        return sum(seen > 0 for extra in extras if extra.keypoints for seen in extra.keypoints.visible)
    return sum(isinstance(o, {"polygons": Polygon, "masks": Mask, "rotated": Rotated}[name]) for o in outlines)


def test_many_points_make_several_blobs_and_decimals_make_small_ones() -> None:
    chance = random.Random(7)
    row = [
        image(
            f"{n:03}.jpg", box("a", extra=Extra(Polygon(pack(round(chance.uniform(0, 640), 2) for _ in range(20_000)))))
        )
        for n in range(60)
    ]
    parts = table_details.encode_details(row)
    assert [len(part) < 4 * 2**20 for part in parts] == [True, True]
    summary = table_details.Summary(table_details.encode_summary(row))
    assert list(table_details.decode_details(parts, summary)) == row


def _counts(annotation: Annotation) -> dict[str, int]:
    counts = dict.fromkeys(annotation.labels, 0)
    for found in annotation.boxes:
        counts[found.label] = counts.get(found.label, 0) + 1
    return counts


@given(rows())
def test_coordinates_come_out_as_the_same_doubles(given_rows):
    for before, after in zip(given_rows, build(given_rows).rows(), strict=True):
        for old, new in zip(before.annotation.boxes, after.annotation.boxes, strict=True) if before.annotation else ():
            assert [float(side).hex() for side in old[1:5]] == [side.hex() for side in new[1:5]]
            assert all(type(side) is float for side in new[1:5])
            assert [type(flag) for flag in new[5:8]] == [bool] * 3


@given(rows(), st.lists(problems, max_size=4), st.randoms())
def test_the_same_rows_give_the_same_root_whatever_the_order_of_problems(given_rows, loose, chance):
    first, second = Blobs(), Blobs()
    build(given_rows, loose, first, format="voc", classes=["a", "b"])
    chance.shuffle(loose)
    build(given_rows, loose, second, classes=["a", "b"], format="voc")
    assert first == second


def many(count: int, *, label: str = "mask") -> list[Row]:
    chance = random.Random(7)
    return [
        image(
            f"JPEGImages/{n:06}.jpg", *(box(label, chance.randrange(9), y2=100 + chance.random()) for _ in range(n % 4))
        )
        for n in range(count)
    ]


def test_a_changed_image_changes_one_range_and_the_root():
    before, after = Blobs(), Blobs()
    given_rows = many(3_000)
    build(given_rows, blobs=before)
    given_rows[1_500] = image(given_rows[1_500].path, box("mask", 9, 9, 99, 99))
    build(given_rows, blobs=after)
    assert len(before) > 10
    assert len(after.keys() - before.keys()) == 3  # summary, details, root


def test_a_next_version_takes_ranges_over_and_puts_nothing_for_them():
    blobs, given_rows = Blobs(), many(2_000)
    old = build(given_rows, blobs=blobs)
    given_rows[700] = broken(given_rows[700].path)
    new, reusable = Blobs(), {key: old.range(number) for key, number in old.range_numbers().items()}
    with TableBuilder(new.put) as builder:
        taken = 0
        for part in encoded(given_rows):
            found = reusable.get(part.summary.key)
            taken += found is not None
            assert found is None or found == part.summary
            builder.add_range(part if found is None else EncodedRange(found))
        root = builder.finish({})
    assert taken == len(reusable) - 1
    assert len(new) == 3
    blobs.update(new)
    assert list(Table.open(root, blobs.load).rows()) == given_rows
    assert (Table.open(root, blobs.load).images, Table.open(root, blobs.load).usable) == (2_000, 1_999)


def test_a_query_for_a_label_loads_the_summaries_of_ranges_that_have_it():
    blobs = Blobs()
    given_rows = many(2_000)
    given_rows[1_000] = image(given_rows[1_000].path, box("rare"), box("rare"), box("mask"))
    table = build(given_rows, blobs=blobs)
    blobs.loaded.clear()
    assert list(images_with(table, "rare")) == [
        ImageSummary(given_rows[1_000].path, 640, 480, 3, {"mask": 1, "rare": 2})
    ]
    assert len(blobs.loaded) == 1


def test_one_row_loads_one_range():
    blobs, given_rows = Blobs(), many(2_000)
    table = build(given_rows, blobs=blobs)
    blobs.loaded.clear()
    assert table.row(given_rows[1_234].path) == given_rows[1_234]
    assert len(blobs.loaded) == 2
    assert table.row("JPEGImages/001234.png") is None
    assert table.row("A") is None
    assert table.row("z") is None


def test_the_blobs_a_root_names_are_all_that_reading_needs():
    blobs = Blobs()
    loose = [Problem("annotation-alone", "skipped", f"{n}.xml", 0, "there is no image") for n in range(5_000)]
    table = build(many(2_000), loose, blobs)
    (root,) = blobs.keys() - set(table.blobs())
    assert sorted(blobtree.children(codec.decompress(blobs[root], root))) == sorted(table.blobs())
    kept = Blobs()
    kept.update({id: blobs[id] for id in [root, *table.blobs()]})
    again = Table.open(root, kept.load)
    assert len(list(again.rows())) == 2_000
    assert len(list(again.problems())) == 5_000
    assert [(p.code, p.action, p.times) for p in again.problem_counts] == [("annotation-alone", "skipped", 5_000)]


def test_the_root_of_a_million_images_is_small():
    # As many ranges as a million images have, each with 80 labels.
    part = encode_range([image("a.jpg", *(box(f"class {n}") for n in range(80)))], bytes(16))
    blobs = Blobs()
    chance = random.Random(3)
    with TableBuilder(blobs.put) as builder:
        for n in range(5_300):
            labels = tuple(
                label._replace(images=chance.randrange(1, 200), boxes=chance.randrange(1, 900))
                for label in part.summary.labels
                if chance.random() < 0.9
            )
            ids = [BlobId(chance.randbytes(16)) for _ in range(2)]
            summary = part.summary._replace(
                first_path=f"images/{n * 190:08}.jpg", key=chance.randbytes(16), labels=labels, summary=ids[0]
            )
            builder.add_range(EncodedRange(summary._replace(details=(ids[1],))))
        root = builder.finish({})
    assert len(blobs[root]) < 1_500_000
    assert len(Table.open(root, blobs.load).labels) == 80


def test_an_image_with_very_many_boxes_does_not_make_a_range_one_large_blob():
    chance = random.Random(5)
    crowd = tuple(box("head", chance.random(), x2=chance.random() + 9) for _ in range(20_000))
    given_rows = [image(f"{n}.jpg", *crowd) for n in range(6)]
    part = encode_range(given_rows, bytes(16))
    assert len(part.summary.details) == 3
    assert table_details.MAX_ITEMS == 50_000
    assert list(build(given_rows).rows()) == given_rows


def test_ranges_can_be_encoded_in_another_process():
    part = encode_range(many(10), bytes(16))
    assert pickle.loads(pickle.dumps(part)) == part


def test_ranges_out_of_order_are_refused():
    first, second = encoded([image("b.jpg")])[0], encoded([image("a.jpg")])[0]
    with TableBuilder(Blobs().put) as builder:
        builder.add_range(first)
        with pytest.raises(CatalogError, match="out of order"):
            builder.add_range(second)


def test_an_empty_table_is_a_table():
    table = build([], format="none")
    assert (list(table.rows()), list(table.problems()), list(images_with(table)), table.labels) == ([], [], [], {})
    assert table.row("a.jpg") is None
    assert table.meta == {"format": "none"}


def test_a_missing_blob_is_a_corrupt_manifest():
    blobs = Blobs()
    table = build(many(300), blobs=blobs)
    for id in table.blobs():
        del blobs[id]
    with pytest.raises(CorruptManifestError, match="missing"):
        list(table.rows())
    with pytest.raises(CorruptManifestError, match="missing"):
        Table.open(BlobId(bytes(16)), blobs.load)


@given(rows(), st.data())
def test_bytes_that_are_cut_or_changed_are_a_corrupt_manifest_and_nothing_else(given_rows, data):
    """The content's hash would tell, too; here the damaged bytes have the right hash."""
    blobs = Blobs()
    table = build(given_rows, [Problem("size-wrong", "noted", "a", 1, "m")], blobs)
    (root,) = blobs.keys() - set(table.blobs())
    victim = data.draw(st.sampled_from(sorted(blobs)))
    raw = bytearray(codec.decompress(blobs[victim], victim))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    damaged = _Rehashed(blobs, victim, bytes(raw))
    try:
        again = Table(damaged.root(root), damaged.load)
        list(again.rows())
        list(again.problems())
        list(images_with(again))
    except CorruptManifestError:
        pass


class _Rehashed:
    """Serves one blob's damaged bytes under the id they have now."""

    def __init__(self, blobs: Blobs, victim: BlobId, raw: bytes) -> None:
        self._blobs, self._victim, self._new = blobs, victim, codec.blob_id(raw)
        self._stored = codec.compress(raw)

    def root(self, root: BlobId) -> bytes:
        if root == self._victim:
            return codec.decompress(self._stored, self._new)
        return codec.decompress(self._blobs[root], root).replace(self._victim, self._new)

    def load(self, ids: list[BlobId]) -> dict[BlobId, bytes]:
        return self._blobs.load(ids) | ({self._new: self._stored} if self._new in ids else {})


def test_a_damaged_number_of_rows_is_found_before_room_is_taken_for_them():
    with pytest.raises(CorruptManifestError, match="rows in"):
        table_details.decode_problems(b"DCAP\xff\xff\xff\x00")
