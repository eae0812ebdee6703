"""From each format into each other one and back, what comes is what the table in docs/ANNOTATIONS.md says, and the
report has a line for every change."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from datacache.annotations.formats.geometry import around_keypoints, inside, turned
from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes import mask as masks
from datacache.annotations.shapes.clip import box_around, clip, smallest_rectangle
from datacache.annotations.shapes.outline import (
    NOTHING,
    Extra,
    Keypoints,
    Mask,
    Outline,
    Polygon,
    Rotated,
    Skeleton,
    pack,
    polygon_of,
    unpack,
)
from datacache.annotations.table.table import Table
from datacache.conversion.fitting import fit
from datacache.conversion.targets import TARGETS, About
from datacache.core.errors import UsageError
from datacache.reader.snapshot import Snapshot
from tests.annotations.shapes import CASES, bitmaps
from tests.annotations.test_problems import DOCUMENT
from tests.conversion.in_memory import InMemory

few = settings(
    max_examples=max(2, CASES // 100),
    phases=(Phase.explicit, Phase.generate),
    derandomize="DATACACHE_TEST_CASES" not in os.environ,
)
"""Data sets of ten objects or more, and each goes from each format into every other one and back. What differs is said
of each object, so nothing is made smaller: that takes minutes. They are the same ones in every run, unless more are
asked for."""
NO_RECTANGLE_PX = 0.05
"""Corners of a rotated box that are less far from a rectangle are made one without a line."""
SKELETONS = {"person": Skeleton(("nose", "left eye", "right eye"), ((0, 1), (0, 2)))}
CLASSES = ("cat", "person")


class Row(NamedTuple):
    """What a format makes of an object, in the words of the document."""

    polygon: str
    rings: str
    holes: str
    mask: str
    rotated: str
    box: str
    keypoints: str
    besides: frozenset[str]
    digits: str


@cache
def formats() -> dict[str, Row]:
    """Return the rows of the document's table."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| to |"))
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        names, *cells, besides, digits = (cell.strip() for cell in line.strip("|").split("|"))
        for name in names.split(", "):
            found[name] = Row(*cells, frozenset(filter(None, besides.split(", "))), digits)
    return found


def test_the_document_has_a_row_for_every_format() -> None:
    assert sorted(formats()) == sorted(TARGETS)


# --- what the table says ----------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """An object behind a conversion, and the changes that are reported."""

    box: Box
    codes: set[str]


FLAGS = ("difficult", "truncated", "occluded")
BOXED = {Polygon: "polygon-boxed", Mask: "mask-boxed", Rotated: "rotation-boxed"}


def through(box: Box, row: Row, size: tuple[int, int], named: Collection[str]) -> Expected:
    """Return what a format makes of an object, by the table alone. The keypoints of classes that are `named` have
    names."""
    extra, codes = box.extra or NOTHING, set()
    outline, keypoints = extra.outline, extra.keypoints
    if keypoints is not None and (row.keypoints == "lost" or (row.keypoints == "alone" and not any(keypoints.visible))):
        codes.add("keypoints-left-out")
        keypoints = None
    if outline is not None:
        if keypoints is not None and row.keypoints == "alone":
            codes.add(BOXED[type(outline)])
            outline = None
        else:
            outline, more = _outline(outline, row, size)
            codes |= more
    edges = box[1:5]
    if keypoints is not None and row.keypoints == "alone":
        edges = around_keypoints(keypoints, *size) or edges
        codes |= {"box-of-keypoints"} if apart(edges, box[1:5]) > 0.01 else set()
    if outline is None and row.box in ("polygon", "rectangle"):
        x1, y1, x2, y2 = edges
        corners = pack((x1, y1, x2, y1, x2, y2, x1, y2))
        outline = Polygon(corners) if row.box == "polygon" else Rotated(corners)
        codes.add("box-outlined")
    if isinstance(outline, Rotated) and "corners inside" in row.besides:
        corners = [min(max(v, 0.0), size[n % 2]) for n, v in enumerate(unpack(outline.corners))]
        codes |= {"corner-moved"} if apart(corners, unpack(outline.corners)) > 1e-3 else set()
        outline = Rotated(pack(corners))
    if outline is not None and "own box" not in row.besides:
        edges = inside(box_around(outline) or edges, *size)
    if isinstance(outline, Rotated) and row.rotated == "kept if turned" and not turn_of(outline):
        outline = None
    if row.keypoints == "padded" and keypoints is None:
        codes.add("keypoints-padded")
    kept = extra._replace(
        outline=outline,
        keypoints=keypoints,
        track=extra.track if "track" in row.besides else -1,
        group=extra.group if "group" in row.besides else -1,
        score=extra.score if "score" in row.besides else None,
        author=extra.author if "author" in row.besides else "",
    )
    if "names of keypoints" not in row.besides and row.keypoints != "lost" and extra.keypoints and box.label in named:
        codes.add("details-left-out")
    codes |= {"track-made"} if "track" in row.besides and extra.track < 0 else set()
    held = "attributes" in row.besides
    flags = [flag and (held or name in row.besides) for name, flag in zip(FLAGS, box[5:8], strict=True)]
    details = (*flags, box.attributes if held else ())
    codes |= {"details-left-out"} if extra[2:6] != kept[2:6] or box[5:9] != details else set()
    return Expected(Box(box.label, *edges, *details, extra=None if kept == NOTHING else kept), codes)


def apart(edges: Sequence[float], others: Sequence[float]) -> float:
    """Return how far two boxes are from each other."""
    return max(abs(a - b) for a, b in zip(edges, others, strict=True))


def turn_of(outline: Rotated) -> float:
    """Return the turn of a box in hundredths of a degree, as CVAT writes them."""
    ax, ay, bx, by, *_ = unpack(outline.corners)
    return round(math.degrees(math.atan2(by - ay, bx - ax)) * 100) % 36000


def _outline(outline: Outline, row: Row, size: tuple[int, int]) -> tuple[Outline | None, set[str]]:
    """Return what becomes of an outline, and the codes that say so."""
    if isinstance(outline, Rotated):
        word, points = row.rotated, outline.corners
        word = "rectangle" if word == "kept if turned" and not is_rectangle(outline) else word.split()[0]
        if word in ("polygon", "mask"):
            inside = clip(Polygon(points), (0, 0, *size))
            assert inside is not None
            return (inside, {"rotation-outlined"}) if word == "polygon" else _of_points(word, inside, size)
        return (None, {"rotation-boxed"}) if word == "box" else _of_points(word, outline, size)
    if isinstance(outline, Mask):
        if row.mask in ("kept", "box"):
            return (outline, set()) if row.mask == "kept" else (None, {"mask-boxed"})
        traced = masks.trace(outline)
        found, codes = _outline(traced, row, size)
        return found, codes if row.mask == "rectangle" else {"mask-traced"} | codes
    return _of_points(row.holes if outline.holes else row.rings if outline.ends else row.polygon, outline, size)


def _of_points(word: str, outline: Polygon | Rotated, size: tuple[int, int]) -> tuple[Outline | None, set[str]]:
    if word == "kept":
        return outline, set()
    if word == "rectangle":
        return smallest_rectangle(outline[0]), {"outline-rotated"}
    assert isinstance(outline, Polygon)
    if word == "mask":
        return masks.fill(outline, *size), {"polygon-masked"}
    if word == "joined":
        # `test_fitting` shows that it fills the same pixels.
        alone = Annotation("", *size, (Box("", 0, 0, 1, 1, extra=Extra(outline)),))
        joined = fit(alone, frozenset({"polygon"}), []).boxes[0].extra
        return joined and joined.outline, {"rings-joined"}
    assert word == "box"
    return None, {"polygon-boxed"}


def is_rectangle(outline: Rotated) -> bool:
    """Tell whether a rectangle of the first side and the length of the last one has these corners."""
    ax, ay, bx, by, *_, dx, dy = unpack(outline.corners)
    across, down = math.hypot(bx - ax, by - ay), math.hypot(dx - ax, dy - ay)
    over, up = (ay - by) / across * down, (bx - ax) / across * down
    return apart(unpack(outline.corners), (ax, ay, bx, by, bx + over, by + up, ax + over, ay + up)) < 0.05


def digits(text: str, size: tuple[int, int]) -> tuple[float, float]:
    """Return how far an edge may be moved by what a format writes: 0 but for the last bits, or the half of a digit."""
    if text == "all":
        return 1e-9, 1e-9
    if text == "whole pixels":  # and a box keeps one
        return 1.0, 1.0
    unit = float(text.split()[0])
    return (unit * size[0], unit * size[1]) if text.endswith("of the side") else (unit, unit)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def thousandths(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers of three decimals."""
    return st.integers(round(low * 1000), round(high * 1000)).map(lambda value: value / 1000)


@st.composite
def stars(draw: st.DrawFn, x: float, y: float, low: float, high: float) -> bytes:
    """Points around a middle, so that no line crosses another one."""
    count = draw(st.integers(3, 8)) if low < 4 else 8
    turn = draw(st.integers(0, 359))
    radii = draw(st.lists(thousandths(low, high), min_size=count, max_size=count))
    angles = (2 * math.pi * n / count + turn for n in range(count))
    points = ((x + r * math.cos(a), y + r * math.sin(a)) for r, a in zip(radii, angles, strict=True))
    return pack(round(value, 3) for point in points for value in point)


KINDS = ("box", "polygon", "rings", "holed", "mask", "rotated", "points", "points+polygon", "points+mask")
CELL = 40


@st.composite
def objects(draw: st.DrawFn, column: int, line: int, size: tuple[int, int], kind: str) -> Box:
    """An object in a cell of its own, so that none hides another one."""
    x, y = (column + 0.5) * CELL, (line + 0.5) * CELL
    outline: Outline | None = None
    if "polygon" in kind:
        outline = Polygon(draw(stars(x, y, 3, 18)))
    elif kind == "rings":
        outline = polygon_of([draw(stars(x + dx, y, 3, 8)) for dx in (-10, 10)])
    elif kind == "holed":
        outline = polygon_of([draw(stars(x, y, 14, 18)), draw(stars(x, y, 4, 8))], 0b10)
    elif "mask" in kind:
        pixels = draw(bitmaps().filter(lambda found: found.any()))
        outline = masks.encode(pixels, draw(st.integers(0, 9)) + column * CELL, line * CELL + 3, *size)
    elif kind == "rotated":
        across, down, degrees = draw(thousandths(3, 10)), draw(thousandths(3, 10)), draw(st.integers(1, 359))
        square = [(x - across, y - down), (x + across, y - down), (x + across, y + down), (x - across, y + down)]
        outline = Rotated(pack(turned(square, x, y, degrees)))
    x1, y1 = x - draw(thousandths(2, 18)), y - draw(thousandths(2, 18))
    edges = (x1, y1, x + draw(thousandths(2, 18)), y + draw(thousandths(2, 18)))
    if outline is not None:
        edges = box_around(outline) or edges
    keypoints = None
    if "points" in kind:
        seen = draw(st.sampled_from([b"\2\2\2", b"\2\1\0", b"\0\2\2"]))
        near = ((x - 8, y - 9), (x + 8, y + 1), (x + 1, y + 9))
        points = [(px + draw(thousandths(-3, 3)), py + draw(thousandths(-3, 3))) for px, py in near]
        keypoints = Keypoints(pack(v * (s > 0) for s, point in zip(seen, points, strict=True) for v in point), seen)
    extra = Extra(
        outline,
        keypoints,
        # An outline and keypoints of one class and group are one object.
        group=draw(st.sampled_from([-1, -1, column + 3 * line])),
        score=draw(st.none() | thousandths(0, 0.999)),
        author=draw(st.sampled_from(["", "", "ann@example.org"])),
    )
    flags = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    attributes = draw(st.sampled_from([(), (("colour", "red"), ("wet", "yes"))]))
    label = "person" if keypoints else draw(st.sampled_from(CLASSES))
    return Box(label, *edges, *flags, attributes, extra=None if extra == NOTHING else extra)


@st.composite
def data_sets(draw: st.DrawFn) -> list[Annotation]:
    """Images of one size: one of them has an object of each kind."""
    columns, lines = 3, len(KINDS) // 3
    size = columns * CELL + draw(st.integers(0, 9)), lines * CELL + draw(st.integers(0, 9))
    annotations = []
    for n in range(draw(st.integers(1, 3))):
        chosen = draw(st.lists(st.sampled_from(KINDS), max_size=4)) if n else draw(st.permutations(KINDS))
        boxes = tuple(draw(objects(cell % columns, cell // columns, size, kind)) for cell, kind in enumerate(chosen))
        labels = draw(st.lists(st.sampled_from(["night", "day", "in the rain"]), unique=True, max_size=2))
        captions = draw(st.lists(st.sampled_from(["A cat.", "Two."]), unique=True, max_size=2))
        annotations.append(Annotation(f"{n}.png", *size, boxes, tuple(labels), "", tuple(captions)))
    return annotations


def files_of(format: str, annotations: Sequence[Annotation]) -> dict[str, bytes]:
    """Return a data set in a format."""
    target = TARGETS[format](About(CLASSES, (), 0, SKELETONS))
    files: dict[str, bytes] = {}
    placed = []
    for n, annotation in enumerate(annotations):
        path = target.image_path(target.relative(annotation.path, "", annotation.labels), "")
        image = io.BytesIO()
        Image.new("L", (annotation.width, annotation.height), n).save(image, "BMP")
        files[path] = image.getvalue()
        fitting = fit(annotation, target.holds, [])._replace(path=path, source=path)
        placed.append(fitting if target.of_objects else fitting._replace(boxes=()))
    target.expect(placed)
    for each in placed:
        files |= target.add(each, "", annotated=bool(each.boxes))[0]
    return files | dict(target.finish())


# --- there and back ---------------------------------------------------------------------------------------------------


def said(memory: InMemory, snapshot: Snapshot, format: str) -> tuple[Table, dict[str, Annotation]]:
    """Return what is said of each image, by its bytes."""
    table = memory.table(snapshot, format="folders" if format == "folders" else None)
    rows = {row.path: row.annotation for row in table.rows()}
    assert None not in rows.values(), [row.problems for row in table.rows()]
    return table, {snapshot.object_ref(path).key: annotation for path, annotation in rows.items() if annotation}


def expected_of(before: Annotation, row: Row, named: Collection[str]) -> tuple[Annotation, set[str]]:
    """Return what a format makes of an annotation, and the codes of its changes."""
    if row.box == "lost":
        codes = {"objects-left-out"} if before.boxes or before.captions else set()
        codes |= {"labels-left-out"} if len(before.labels) > 1 else set()
        return before._replace(boxes=(), labels=before.labels[:1], captions=()), codes
    made = [through(box, row, (before.width, before.height), named) for box in before.boxes]
    return before._replace(boxes=tuple(each.box for each in made)), set().union(*(each.codes for each in made))


def differences(found: Annotation, expected: Annotation, *passed: Row, tracks: bool) -> Iterator[str]:
    """Say what differs by more than the formats round it. Where not all have tracks their numbers are made anew."""
    if (found.labels, found.captions) != (expected.labels, expected.captions):
        yield f"{found.labels} and {found.captions}, not {expected.labels} and {expected.captions}"
    if len(found.boxes) != len(expected.boxes):
        yield f"{len(found.boxes)} objects, not {len(expected.boxes)}"
        return
    size = found.width, found.height
    limits = [sum(step) for step in zip(*(digits(row.digits, size) for row in passed), strict=True)]
    padded = any(row.keypoints == "padded" for row in passed)
    for box, wanted in zip(found.boxes, expected.boxes, strict=True):
        mine, theirs = (settled(each, tracks=tracks, padded=padded) for each in (box, wanted))
        if shape_of(mine) != shape_of(theirs):
            yield f"{shape_of(mine)}, not {shape_of(theirs)}"
            continue
        within = limits
        if isinstance((mine.extra or NOTHING).outline, Rotated):
            within = [4 * limit + NO_RECTANGLE_PX for limit in limits]  # four: by the rounding of a short side
        pairs = zip(numbers_of(mine), numbers_of(theirs), strict=True)
        if any(abs(a - b) > within[n % 2] for n, (a, b) in enumerate(pairs)):
            yield f"{numbers_of(mine)}, not {numbers_of(theirs)}"


def settled(box: Box, *, tracks: bool, padded: bool) -> Box:
    """Return an object without what is made anew: areas, numbers of tracks, and keypoints of which none is there."""
    extra = (box.extra or NOTHING)._replace(area=None)
    if padded and extra.keypoints and not any(extra.keypoints.visible):
        extra = extra._replace(keypoints=None)
    return box._replace(extra=extra if tracks else extra._replace(track=-1))


def shape_of(box: Box) -> tuple[object, ...]:
    """Return all of an object but its numbers."""
    outline, keypoints, *more = box.extra or NOTHING
    if isinstance(outline, Polygon | Rotated):
        outline = type(outline), outline[1:]  # type: ignore[assignment]
    return box[0], *box[5:9], outline, keypoints and keypoints.visible, *more


def numbers_of(box: Box) -> list[float]:
    """Return the coordinates of an object: x, y, x, y …"""
    outline, keypoints, *_ = box.extra or NOTHING
    points = outline[0] if isinstance(outline, Polygon | Rotated) else b""
    return [*box[1:5], *unpack(points), *unpack(keypoints.points if keypoints else b"")]


NOTES = {"image-unannotated", "box-shape-differ", "obb-or-polygon", "path-spaces"}
"""They say what is in the data set, not what becomes of it."""
NAMES = sorted({*TARGETS} - {"yolo-classify"})


@pytest.mark.parametrize("one", NAMES)
@few
@given(data_sets())
def test_what_a_format_makes_of_another_ones_data_set_is_what_the_document_says(
    one: str, annotations: list[Annotation]
) -> None:
    memory = InMemory()
    first = memory.make(files_of(one, annotations))
    table, before = said(memory, first, one)
    assert {problem.code for problem in table.problems()} <= NOTES
    wrong: list[str] = []
    for other in NAMES:
        rows = [formats()[format] for format in (other, one)]
        tracks = all("track" in row.besides for row in rows)
        if "yolo-pose" in (one, other) and not table.skeletons:
            continue
        there, done = memory.convert(first, other, format="folders" if one == "folders" else None)
        if one == "yolo-pose" and "names of keypoints" not in rows[0].besides:
            with pytest.raises(UsageError, match="no class has keypoints"):
                memory.convert(there, one, format="folders" if other == "folders" else None)
            continue
        back, again = memory.convert(there, one, format="folders" if other == "folders" else None)
        codes: tuple[set[str], set[str]] = set(), set()
        its, between = said(memory, there, other)
        if table.skeletons and "names of keypoints" in rows[0].besides:
            assert its.skeletons["person"].names == table.skeletons["person"].names, other
        _, after = said(memory, back, one)
        for key, annotation in before.items():
            made, more = expected_of(annotation, rows[0], table.skeletons)
            codes[0].update(more)
            wrong += (f"{one} to {other}: {line}" for line in differences(between[key], made, *rows, tracks=tracks))
            made, more = expected_of(between[key], rows[1], its.skeletons)
            codes[1].update(more)
            wrong += (f"{one} from {other}: {line}" for line in differences(after[key], made, *rows, tracks=tracks))
        for what, conversion, expected in (("to", done, codes[0]), ("from", again, codes[1])):
            found = {problem.code for problem in conversion.report.problems} - NOTES
            if found != expected:
                wrong.append(f"{one} {what} {other}: reported are {sorted(found)}, not {sorted(expected)}")
    assert not wrong, "\n".join(wrong)
