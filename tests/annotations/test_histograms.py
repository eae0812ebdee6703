"""A bar has as many images as its condition finds among those of the filter, and no image is in two bars."""

from __future__ import annotations

import random

import pytest

from datacache.annotations.browsing.browser import Browser, Filter
from datacache.annotations.browsing.histograms import image_histograms, object_plots, split_counts
from datacache.annotations.layout import Layout
from datacache.annotations.model import Annotation, Box
from datacache.annotations.query import FIELDS, Query
from datacache.annotations.split_lists import ListedSplits
from datacache.annotations.table.ranges import Row
from tests.annotations.tables import box, broken, build, image


def _rows() -> list[Row]:
    rng = random.Random(7)
    rows = []
    for n in range(600):
        path = f"{('train', 'val', 'other')[n % 3]}/{n:04d}.jpg"
        boxes = [
            box(rng.choice("ab"), 0, 0, 1 + rng.randrange(99) / 2, rng.randrange(1, 50))
            for _ in range(rng.randrange(2 + n % 9) * (1 + n % 7))
        ]
        size = (rng.randrange(50, 3000), rng.choice((100, 480, 640)))
        rows.append(broken(path) if n % 50 == 9 else image(path, *boxes, size=size))
    return rows


@pytest.fixture(scope="module")
def browser() -> Browser:
    listed = Layout(format="none", annotation_files=0, images=600, split_folders=frozenset(["train", "val"]))
    return Browser(build(_rows()), lambda: ListedSplits(listed))


FILTERS = [Filter(), Filter(query=Query(where="width > 500 or has('a')")), Filter(query=Query(max_objects=0)),
           Filter(split="val", min_side=4)]  # fmt: skip


@pytest.mark.parametrize("wanted", FILTERS)
def test_each_bar_has_the_images_that_its_condition_finds(browser: Browser, wanted: Filter) -> None:
    found = browser.select(wanted)
    histograms = image_histograms(browser, found)
    assert {each.field for each in histograms} <= FIELDS.keys()
    usable = set(browser.select(Filter(query=Query(where="True"))).rows) & set(found.rows)
    for histogram in histograms:
        seen: list[int] = []
        for bar in histogram.bars:
            meant = set(browser.select(Filter(query=Query(where=bar.condition))).rows) & set(found.rows)
            assert len(meant) == bar.images, bar
            seen += meant
        assert len(seen) == len(set(seen))
        assert set(seen) == usable or histogram.field in ("min_side", "min_area", "max_area")
    assert any(histogram.bars for histogram in histograms)


@pytest.mark.parametrize("wanted", FILTERS)
def test_each_bar_of_objects_has_those_that_a_closer_look_finds(browser: Browser, wanted: Filter) -> None:
    found = browser.select(wanted)
    plots = object_plots(browser, found)
    rows = [row.annotation for row in browser.table.rows_at(found.rows.tolist()) if row.annotation]
    boxes = [(each, box) for each in rows for box in each.boxes]
    assert sum(map(sum, plots.cells)) == len(boxes)
    for measure, bars in plots.bars.items():
        assert sum(bar.objects for bar in bars) == len(boxes)
        for bar in bars:
            meant = set(browser.select(Filter(query=Query(where=bar.condition))).rows) & set(found.rows)
            assert len(meant) == bar.images, bar
            held = [each.path for each, box in boxes if bar.low <= measured(each, box)[measure] < bar.high]
            assert len(held) == bar.objects, bar
            assert len(set(held)) == bar.images


def measured(image: Annotation, box: Box) -> dict[str, float]:
    width, height = box.x2 - box.x1, box.y2 - box.y1
    area = width * height / (image.width * image.height)
    return {"side": min(width, height), "area": area, "aspect": width / height}


def test_objects_are_counted_in_the_cell_of_their_middle() -> None:
    rows = [image("a.jpg", box("a", 0, 0, 10, 10), box("b", 300, 470, 340, 480), size=(640, 480))]
    browser = Browser(build(rows))
    cells = object_plots(browser, browser.select(Filter())).cells
    assert {(y, x) for y, row in enumerate(cells) for x, number in enumerate(row) if number} == {(0, 0), (15, 8)}


def test_few_numbers_have_a_bar_each_and_many_have_ranges(browser: Browser) -> None:
    bars = {each.field: each.bars for each in image_histograms(browser, browser.select(Filter()))}
    assert [bar.low for bar in bars["height"]] == [100, 480, 640]
    assert all(bar.high is None for bar in bars["height"])
    assert all(bar.high is not None for bar in bars["width"])


def test_no_image_has_no_bars(browser: Browser) -> None:
    found = browser.select(Filter(query=Query(where="width > 99999")))
    assert not any(each.bars for each in image_histograms(browser, found))


def test_images_of_a_split_are_counted_by_class(browser: Browser) -> None:
    counts = split_counts(browser, browser.select(Filter()), ["a"])
    assert browser.split_names is not None
    for place, split in enumerate(browser.split_names):
        assert counts[""][place] == len(browser.select(Filter(split=split)).rows)
        assert counts["a"][place] == len(browser.select(Filter(split=split, query=Query(labels=("a",)))).rows)
    assert sum(counts[""]) == 600
    assert counts[""][-1] == 200
