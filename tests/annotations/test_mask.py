"""Masks against pycocotools, and counts from strangers."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as coco

from datacache.annotations.shapes import mask as masks
from datacache.annotations.shapes.outline import Mask, Polygon, area, pack, polygon_of, rings
from tests.annotations.shapes import bitmaps, cases, points_within


def of(pixels) -> Mask:
    return masks.encode(pixels, 0, 0, pixels.shape[1], pixels.shape[0])


def whole(mask: Mask):
    return masks.decode(mask, (0, 0, mask.width, mask.height))


def even_odd(polygon: Polygon, width: int, height: int):
    """Return the pixels whose middle a ray from the left reaches over an odd number of the rings' lines."""
    x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    inside = np.zeros((height, width), bool)
    for ring, _ in rings(polygon):
        corners = np.frombuffer(ring).reshape(-1, 2)
        for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, 0), strict=True):
            if ay != by:
                inside ^= ((ay > y) != (by > y)) & (x < (bx - ax) * (y - ay) / (by - ay) + ax)
    return inside


@cases
@given(bitmaps())
def test_a_bitmap_becomes_the_counts_that_pycocotools_makes_and_comes_back(pixels) -> None:
    mask, theirs = of(pixels), coco.encode(np.asfortranarray(pixels, np.uint8))
    assert mask == Mask(theirs["counts"], pixels.shape[1], pixels.shape[0])
    assert masks.checked(theirs["counts"], mask.width, mask.height) == mask
    assert masks.from_runs(masks.runs(mask).tolist(), mask.width, mask.height) == mask
    assert (whole(mask) == pixels).all()
    assert masks.area(mask) == coco.area(theirs) == pixels.sum()
    x, y, width, height = coco.toBbox(theirs)
    assert masks.bounds(mask) == ((x, y, x + width, y + height) if pixels.any() else None)


@cases
@given(bitmaps(), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_a_window_has_the_pixels_of_the_image_there(pixels, left, top, right, bottom) -> None:
    height, width = pixels.shape
    right, bottom = max(left, width - right), max(top, height - bottom)
    assert (masks.decode(of(pixels), (left, top, right, bottom)) == pixels[top:bottom, left:right]).all()
    placed = masks.encode(pixels, left, top, width + left + 2, height + top + 1)
    assert (whole(placed) == np.pad(pixels, ((top, 1), (left, 2)))).all()


@cases
@given(points_within(9, 8), st.one_of(st.none(), points_within(9, 8)))
def test_a_polygon_is_filled_as_pycocotools_does_it(outer, hole) -> None:
    def filled(ring):
        return coco.decode(coco.frPyObjects([np.frombuffer(ring).tolist()], 8, 9)[0]).astype(bool)

    assert (whole(masks.fill(Polygon(outer), 9, 8)) == filled(outer)).all()
    if hole is not None:
        assert (whole(masks.fill(polygon_of([outer, hole], 2), 9, 8)) == filled(outer) & ~filled(hole)).all()
        assert (whole(masks.fill(polygon_of([outer, hole]), 9, 8)) == filled(outer) | filled(hole)).all()


@cases
@given(bitmaps())
def test_a_traced_mask_filled_again_is_the_same(pixels) -> None:
    mask = of(pixels)
    polygon = masks.trace(mask)
    assert (even_odd(polygon, mask.width, mask.height) == pixels).all()
    assert area(polygon) == masks.area(mask)
    assert masks.fill(polygon, mask.width, mask.height) == mask
    # Each hole lies in the ring that it is said to be a hole of: group by group, they make the same area.
    whole_area = np.zeros_like(pixels)
    groups: list[list[bytes]] = []
    for ring, hole in rings(polygon):
        groups[-1].append(ring) if hole else groups.append([ring])
    for group in groups:
        there = even_odd(polygon_of(group), mask.width, mask.height)
        assert not (whole_area & there).any()
        assert there.sum() == area(polygon_of(group, 2 ** len(group) - 2))
        whole_area |= there
    assert (whole_area == pixels).all()


def test_a_square_of_three_pixels_has_an_area_of_nine() -> None:
    assert masks.trace(masks.encode(np.ones((3, 3), bool), 1, 2, 9, 9)) == Polygon(pack([1, 2, 4, 2, 4, 5, 1, 5]))


def test_runs_that_go_on_over_columns_are_traced_and_too_many_corners_are_refused() -> None:
    everything = masks.from_runs([0, 13_000 * 13_000], 13_000, 13_000)
    assert area(masks.trace(everything)) == 13_000**2
    assert masks.trace(masks.from_runs([13_000**2], 13_000, 13_000)) == Polygon(b"")
    many = masks.from_runs([6, *[1, 6] * 51_426, 1, 10], 601, 599)
    with pytest.raises(ValueError, match="more than 100,000 corners"):
        masks.trace(many)
    assert area(masks.trace(many, most=math.inf)) == 51_427


def test_a_ring_has_a_hole_and_the_hole_an_island() -> None:
    pixels = np.ones((7, 7), bool)
    pixels[1:6, 1:6] = False
    pixels[3, 3] = True
    polygon = masks.trace(of(pixels))
    assert [(len(ring) // 16, hole) for ring, hole in rings(polygon)] == [(4, False), (4, True), (4, False)]


@cases
@given(bitmaps(), st.integers(1, 3), st.integers(1, 3))
def test_a_mask_that_grows_by_whole_numbers_repeats_its_pixels(pixels, across, down) -> None:
    mask = of(pixels)
    width, height = mask.width * across, mask.height * down
    grown = masks.resample(mask, (1 / across, 0, 0, 0, 1 / down, 0), (0, 0, width, height), width, height)
    assert (whole(grown) == pixels.repeat(down, 0).repeat(across, 1)).all()


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (b"", "make 0 pixels"),
        (b"0", "make 0 pixels"),
        (b"T1", "make 36 pixels"),
        (b"/", "a character"),
        (b"p", "a character"),
        (b"T", "end within a number"),
        (b"PPPPPPPPPPPPPP1", "more than 7 characters"),
        (b"ooooooO", "below 0"),
        (b"@9", "below 0"),
        (b"oooooo?", "above the image's pixels"),
        (b"1" * (masks.MAX_COUNTS + 1), "more than 2,097,152"),
    ],
)
def test_counts_that_mean_nothing_are_refused(counts: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        masks.checked(counts, 5, 7)


@pytest.mark.parametrize("runs", [[36], [-1, 36], [2**64, 1], ["35"], [[35]], [34.5, 0.5], [True, 34], [None]])
def test_lists_of_runs_that_mean_nothing_are_refused(runs) -> None:
    with pytest.raises(ValueError, match="run length"):
        masks.from_runs(runs, 5, 7)


@cases
@given(st.binary(max_size=12).map(lambda raw: bytes(48 + value % 66 for value in raw)))
def test_any_text_gives_a_mask_or_an_error(counts) -> None:
    try:
        mask = masks.checked(counts, 3, 2)
    except ValueError:
        return
    assert masks.runs(mask).sum() == 6
    assert (whole(mask) == coco.decode({"counts": mask.counts, "size": [2, 3]})).all()
    assert masks.runs(mask)[1:].all()


def test_runs_that_are_empty_are_taken_out() -> None:
    mask = masks.from_runs([1, 2, 0, 1, 2, 0], 2, 3, listed=True)
    assert (masks.runs(mask).tolist(), mask.listed) == ([1, 3, 2], True)
    assert masks.runs(masks.from_runs([0, 0, 6], 2, 3)).tolist() == [6]
    assert masks.runs(masks.from_runs([0, 6], 2, 3)).tolist() == [0, 6]


def test_edges_too_long_to_be_filled_are_refused() -> None:
    zigzag = Polygon(pack([0, 0, 60_000, 60_000] * 40))
    with pytest.raises(ValueError, match="too long"):
        masks.fill(zigzag, 60_000, 60_000)
    with pytest.raises(ValueError, match="too long"):
        masks.fill(polygon_of([pack([0, 0, 8000, 0, 0, 8000])] * 50), 9000, 9000)
    with pytest.raises(ValueError, match="pixels large"):
        masks.from_runs([0, 46_000**2], 46_000, 46_000)
    with pytest.raises(ValueError, match="too long"):
        masks.fill(Polygon(pack([0, 0, float("nan"), 3, 4, 4])), 9, 9)
    assert masks.area(masks.fill(Polygon(pack([-1e300, -1e300, 1e300, -1e300, 1e300, 1e300])), 9, 9)) >= 36


HOSTILE = """
import resource, time
import datacache.annotations.shapes.mask as masks
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20,) * 2)
many = masks.MAX_COUNTS
for counts, width, said in [
    (b"P" * many, 30_000, "within"),
    (b"1" * many, 30_000, "make"),
    (b"oooooo?" * (many // 7), 30_000, "above"),
    (b"1O" * (many // 2), 30_000, "below"),
    (b"11" + b"0" * (many - 2), 2048, ""),
]:
    start = time.process_time()
    try:
        mask = masks.checked(counts, width, many // 2048)
        mask, said = masks.encode(masks.decode(mask, masks.bounds(mask)), 0, 0, width, many // 2048), said or "taken"
        raise ValueError("taken")
    except ValueError as exc:
        assert said in str(exc), (said, exc)
    print(time.process_time() - start)
"""


def test_counts_from_strangers_take_neither_memory_nor_time() -> None:
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(float(seconds) < 1 for seconds in done.stdout.split()), done.stdout
