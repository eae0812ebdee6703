"""A page's filters find what a query finds, counts are those of its images, and pages go through all of them."""

from __future__ import annotations

import random

import pytest

from datacache.annotations.browsing import browser as browsing
from datacache.annotations.browsing.browser import Browser, Filter
from datacache.annotations.layout import Layout
from datacache.annotations.model import Problem
from datacache.annotations.query import FIELDS, Query, find, find_paths
from datacache.annotations.shapes.outline import Extra, Keypoints, Polygon, pack
from datacache.annotations.split_lists import ListedSplits
from datacache.annotations.table.ranges import Row
from datacache.annotations.table.table import Table
from datacache.core.errors import UsageError
from tests.annotations.tables import box, broken, build, image

LABELS = ("cat", "dog", "戴口罩", "a;b")
RED = (("colour", "red"),)


def _rows() -> list[Row]:
    """A few ranges of images in three folders, some unusable, some without boxes, one with outlines."""
    rng = random.Random(5)
    rows = []
    for n in range(900):
        path = f"{'abc'[n // 300]}/{n:04d}.jpg"
        if n % 97 == 0:
            rows.append(broken(path))
            continue
        boxes = [
            box(rng.choice(LABELS), 0, 0, rng.randrange(1, 90), rng.randrange(1, 90), difficult=rng.random() < 0.2)
            for _ in range(rng.randrange(4))
        ]
        if n % 50 == 7:
            boxes.append(box("cat", attributes=RED, extra=Extra(Polygon(pack([1, 1, 9, 1, 1, 9])))))
            boxes.append(box("dog", extra=Extra(keypoints=Keypoints(pack([1, 1, 2, 2]), bytes([2, 1])))))
        found = image(path, *boxes, size=(rng.choice((320, 640)), 480), labels=("street",) if n % 31 == 0 else ())
        problems = (Problem("box-clipped", "repaired", path, 1, "…"),) if n % 40 == 3 else ()
        rows.append(found._replace(problems=problems))
    return rows


ROWS = _rows()


@pytest.fixture(scope="module")
def table() -> Table:
    return build(ROWS, [Problem("annotation-without-image", "skipped", "z.xml", 0, "…")])


@pytest.fixture(scope="module")
def browser(table: Table) -> Browser:
    return Browser(
        table, lambda: ListedSplits(Layout(format="none", annotation_files=0, images=900, split_folders=frozenset()))
    )


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have conditions evaluated in parts of the table."""
    monkeypatch.setattr(browsing, "_ROWS_AT_ONCE", 256)


def shown(browser: Browser, wanted: Filter) -> list[str]:
    return [ROWS[row].path for row in browser.select(wanted).rows]


CONDITIONS = [
    *(f"{name} > 2" for name, (kind, _) in FIELDS.items() if kind == "number"),
    *(f"not {name} <= 30" for name, (kind, _) in FIELDS.items() if kind == "number"),
    "width >= 640 and count('cat') > count('dog') or has('戴口罩')",
    "not (width >= 640 and has('a;b'))",
    "0 < objects <= 2 < width",
    "objects / (objects - 1) > 1.2",
    "objects // 2 == 1 and -objects % 3 != 1",
    "objects in (1, 3) or width not in [640]",
    "'street' in labels",
    "'street' not in labels and True",
    "like(path, '*7.jpg') and not like(name, '?1*')",
    "folder == 'b' or name in ('0001.jpg', '0899.jpg') or 'c/08' in path",
    "folder < name < path",
    "like(path, 'b/*3*8.???') or like(folder, '[ab]') and not like(name, '*9*')",
    "folder != 'b' and name not in ('0001.jpg', '0899.jpg') and '1.' not in name",
    "'b' == folder",
    "path in labels",
    "annotated",
    "attribute('colour') + attribute('colour', 'blue') > 0",
    "boxes('side', 8, 16) > 0",
    "boxes('side', 5.5, 20) > 1",
    "boxes('area', 0.003) >= 1 and boxes('area', 0.001, 0.003) < 2",
    "boxes('aspect', 0, 0.5) == objects",
    "'a' == 'a' and not 1 > 2",
    "False",
    "min_side != min_side",
]


@pytest.mark.parametrize("where", CONDITIONS)
def test_a_condition_means_for_a_page_what_it_means_for_a_query(browser: Browser, table: Table, where: str) -> None:
    asked = Query(where=where)
    assert shown(browser, Filter(query=asked)) == list(find_paths(table, asked))


@pytest.mark.parametrize(
    "asked",
    [
        Query(labels=("cat", "dog")),
        Query(labels=("cat", "street"), any_label=True),
        Query(labels=("cat",), min_objects=2),
        Query(min_objects=1, max_objects=2, where="width > 400"),
        Query(labels=("戴口罩", "a;b"), any_label=True, max_objects=1),
    ],
)
def test_labels_and_numbers_mean_what_they_mean_for_a_query(browser: Browser, table: Table, asked: Query) -> None:
    found = list(find(table, asked))
    matches = browser.select(Filter(query=asked))
    assert [ROWS[row].path for row in matches.rows] == [each.path for each in found]
    for label, images, boxes in matches.labels:
        assert images == sum(label in each.labels for each in found)
        assert boxes == sum(each.labels.get(label, 0) for each in found)


def test_a_condition_of_many_columns_takes_the_memory_of_some(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browsing, "_ROWS_AT_ONCE", 50)
    browser, longest = Browser(table), [0]
    column = browser._column
    monkeypatch.setattr(
        browser,
        "_column",
        lambda *asked: longest.append(len(found := column(*asked))) or found,  # type: ignore[func-returns-value]
    )
    browser.select(
        Filter(query=Query(where=" + ".join([*map("count({!r})".format, LABELS), "width", "aspect"]) + "> 1"))
    )
    assert max(longest) == 50


def test_a_condition_that_reads_all_paths_and_details_over_and_over_is_refused(browser: Browser) -> None:
    for asked in ("like(path, '*{}')", "attribute('{}') > 0", "boxes('side', {}.5) > 0"):
        where = " or ".join(asked.format(n) for n in range(25))
        with pytest.raises(UsageError, match="asks 25 things"):
            browser.select(Filter(query=Query(where=where)))


def test_without_a_filter_every_image_is_shown_and_counted(browser: Browser, table: Table) -> None:
    matches = browser.select(Filter())
    assert len(matches.rows) == len(ROWS)
    assert matches.labels == tuple(table.labels.values())


def test_filters_of_folder_side_and_problem_hold_together(browser: Browser) -> None:
    def holds(row: Row) -> bool:
        sides = [min(b.x2 - b.x1, b.y2 - b.y1) for b in row.annotation.boxes] if row.annotation else []
        clipped = any(problem.code == "box-clipped" for problem in row.problems)
        return row.path.startswith("b/") and bool(sides) and min(sides) >= 3 and clipped

    expected = [row.path for row in ROWS if holds(row)]
    assert expected
    assert shown(browser, Filter(folder="b", min_side=3, problem="box-clipped")) == expected


def test_images_that_cannot_be_used_are_found_by_their_problem(browser: Browser) -> None:
    assert shown(browser, Filter(problem="image-truncated")) == [row.path for row in ROWS if row.annotation is None]


def test_a_problem_of_no_image_is_a_filter_that_finds_none(browser: Browser) -> None:
    assert shown(browser, Filter(problem="annotation-without-image")) == []


@pytest.mark.parametrize("wanted", [Filter(split="train"), Filter(problem="no-such"), Filter(query=Query(where="x"))])
def test_what_is_not_there_is_an_error_that_says_what_is(browser: Browser, wanted: Filter) -> None:
    with pytest.raises(UsageError) as caught:
        browser.select(wanted)
    assert caught.value.hint


@pytest.mark.parametrize("by", ["folders", "files"])
def test_a_split_has_the_images_of_its_folder_or_of_its_file(by: str) -> None:
    rows = [image(f"{split}/images/{n:03d}.jpg", box("cat")) for split in ("test", "train") for n in range(300)]
    layout = Layout(format="none", annotation_files=0, images=600, split_folders=frozenset(["test", "train"]))
    if by == "files":
        layout = Layout(format="coco", annotation_files=2, images=600, lists=(b"one_val.json", b"one_train.json"))
        rows = [
            row._replace(annotation=row.annotation._replace(source=f"one_{('val', 'train')[n % 2]}.json"))
            for n, row in enumerate(rows)
            if row.annotation
        ]
    browser = Browser(build(rows), lambda: ListedSplits(layout))
    assert browser.split_names is None
    first, second = ("train", "test") if by == "folders" else ("train", "val")
    found = [browser.select(Filter(split=split)).rows.tolist() for split in (first, second)]
    assert browser.split_names == (first, second)
    assert found == (
        [[*range(300, 600)], [*range(300)]] if by == "folders" else [[*range(1, 600, 2)], [*range(0, 600, 2)]]
    )


@pytest.mark.parametrize("wanted", [Filter(), Filter(query=Query(labels=("cat",))), Filter(folder="b")])
def test_pages_go_through_all_matches_and_back(browser: Browser, wanted: Filter) -> None:
    matches = browser.select(wanted)
    pages = [browser.page(matches, size=37)]
    while pages[-1].after:
        pages.append(browser.page(matches, after=pages[-1].after, size=37))
    assert [row for page in pages for row in page.rows] == [ROWS[n] for n in matches.rows]
    assert [page.first for page in pages] == [*range(0, len(matches.rows), 37)]
    back = [browser.page(matches, before=page.before, size=37) for page in pages if page.before]
    assert [page.numbers for page in back] == [page.numbers for page in pages[:-1]]
    assert not pages[0].before


def test_a_page_goes_on_behind_a_path_that_is_not_there(browser: Browser) -> None:
    matches = browser.select(Filter(folder="b"))
    assert browser.page(matches, after="a/9", size=1).rows[0].path == "b/0300.jpg"
    assert browser.page(matches, after="c", size=3).rows == []
    assert [row.path for row in browser.page(matches, before="b/0302x", size=2).rows] == ["b/0301.jpg", "b/0302.jpg"]


def test_neighbours_of_an_image_are_those_that_the_filter_means(browser: Browser) -> None:
    matches = browser.select(Filter(query=Query(labels=("street",))))
    paths = [ROWS[n].path for n in matches.rows]
    assert browser.neighbours(matches, paths[1]) == (paths[0], 1, paths[2])
    assert browser.neighbours(matches, paths[0]) == ("", 0, paths[1])
    assert browser.neighbours(matches, paths[-1]) == (paths[-2], len(paths) - 1, "")
    assert browser.neighbours(matches, f"{paths[0]}x") == (paths[0], 1, paths[1])


def test_a_page_of_a_large_table_decodes_no_other_ranges(table: Table) -> None:
    rows = [7, 8, 500, 899]
    assert table.rows_at(rows) == [ROWS[n] for n in rows]
    assert [table.path_at(n) for n in rows] == [ROWS[n].path for n in rows]
    assert [table.seek(ROWS[n].path) for n in rows] == rows
    assert (table.seek(""), table.seek("z")) == (0, 900)
