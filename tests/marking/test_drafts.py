"""Drafts under both catalogs: what is kept, who may save, what is refused."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from datacache import api
from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.outline import Extra, Keypoints, Polygon, pack
from datacache.annotations.table.ranges import Row
from datacache.catalog.base import Catalog
from datacache.catalog.open import open_catalog_url
from datacache.core.errors import CatalogError, DraftConflictError, UsageError
from datacache.manifest.model import SnapshotRecord
from datacache.marking.drafts import KIND, Draft, DraftCount, MarkedObject, key_of
from tests.conformance.catalog import a_record
from tests.promises import promise

_fork = multiprocessing.get_context("fork")
RECORD = a_record("cells")
OUTLINE = Extra(outline=Polygon(pack([10, 10, 30, 10, 20, 30])), area=123.0)
POSE = Extra(keypoints=Keypoints(pack([41, 41]), b"\2"))
CAT = Box("cat", 1, 2, 30, 40, difficult=True, attributes=(("colour", "red"),), line=7)
ROW = Row(
    Annotation(
        "a.jpg",
        100,
        80,
        (
            CAT,
            Box("dog", 10, 10, 30, 30, extra=OUTLINE),
            Box("man", 40, 40, 50, 50, extra=POSE),
            Box("cat", 60, 60, 70, 70, attributes=(("score", "0.4"),), extra=Extra(score=0.4)),
        ),
        ("indoor",),
        "a.xml",
    ),
    "a.jpg",
)
CAT_MARK = MarkedObject(0, "cat", 1, 2, 30, 40)
NEW_MARK = MarkedObject(-1, "bird", 5, 5, 15.5, 20)


@pytest.fixture(params=["sqlite", "mongo"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/catalog.db"
    return str(request.getfixturevalue("mongod").database_url())


@pytest.fixture
def catalog(url: str) -> Iterator[Catalog]:
    opened = open_catalog_url(url)
    yield opened
    opened.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Catalog]:
    """A catalog for what has nothing to do with its kind."""
    opened = open_catalog_url(f"sqlite://{tmp_path}/catalog.db")
    yield opened
    opened.close()


def row_of(path: str, *boxes: Box, source: str = "a.xml") -> Row:
    return Row(Annotation(path, 100, 80, boxes, (), source), path)


def with_box(place: int, **fields: object) -> Annotation:
    assert ROW.annotation is not None
    boxes = list(ROW.annotation.boxes)
    boxes[place] = boxes[place]._replace(**fields)  # type: ignore[arg-type]
    return ROW.annotation._replace(boxes=tuple(boxes))


def save(
    catalog: Catalog,
    *marks: MarkedObject,
    row: Row = ROW,
    record: SnapshotRecord = RECORD,
    author: str = "ann",
    rev: str = "",
    labels: list[str] | None = None,
    done: bool = False,
    take_over: bool = False,
) -> Draft:
    how = {"done": done, "take_over": take_over}
    return api.save_draft(catalog, row, record, marks, labels=labels, author=author, rev=rev, **how)


@promise("A draft is there until it is committed or discarded, whatever ends in between")
def test_a_draft_is_read_as_it_was_saved_by_every_process_until_it_is_discarded(catalog: Catalog, url: str) -> None:
    assert api.draft(catalog, "cells", "a.jpg") is None
    first = save(catalog, CAT_MARK)
    second = save(catalog, CAT_MARK, NEW_MARK, rev=first.rev, labels=["outdoor", "outdoor"], done=True)
    again = open_catalog_url(url)
    assert api.draft(again, "cells", "a.jpg") == second
    assert second.rev != first.rev
    assert (second.objects, second.labels, second.author) == ((CAT_MARK, NEW_MARK), ("outdoor",), "ann")
    assert (second.done, second.base) == (True, RECORD.id)
    assert abs(second.saved_at - again.now_s()) < 60
    with pytest.raises(DraftConflictError):
        api.discard_draft(again, "cells", "a.jpg", author="bob", rev=second.rev)
    with pytest.raises(DraftConflictError):
        api.discard_draft(again, "cells", "a.jpg", author="ann", rev=first.rev)
    for _ in range(2):
        api.discard_draft(again, "cells", "a.jpg", author="ann", rev=second.rev)
    assert api.draft(catalog, "cells", "a.jpg") is None
    again.close()


@promise("Nobody's mark is overwritten")
def test_whoever_has_read_another_state_is_told_who_saved_and_nothing_is_changed(catalog: Catalog) -> None:
    first = save(catalog, CAT_MARK)
    second = save(catalog, NEW_MARK, rev=first.rev)
    for author, rev in (("ann", ""), ("ann", first.rev), ("bob", ""), ("bob", first.rev), ("bob", second.rev)):
        with pytest.raises(DraftConflictError, match=r"ann has saved marks of 'a\.jpg' at 20") as told:
            save(catalog, author=author, rev=rev)
        assert (told.value.author, told.value.saved_at) == ("ann", second.saved_at)
    assert api.draft(catalog, "cells", "a.jpg") == second


def test_a_take_over_changes_the_author_alone_and_the_first_one_is_told(catalog: Catalog) -> None:
    first = save(catalog, CAT_MARK, done=True)
    taken = save(catalog, author="bob", rev=first.rev, take_over=True)
    assert taken == first._replace(author="bob") == api.draft(catalog, "cells", "a.jpg")
    assert save(catalog, author="bob", rev=taken.rev, take_over=True) == taken
    with pytest.raises(DraftConflictError) as told:
        save(catalog, NEW_MARK, rev=first.rev)
    assert told.value.author == "bob"
    assert save(catalog, NEW_MARK, author="bob", rev=taken.rev).objects == (NEW_MARK,)


def test_a_draft_that_went_meanwhile_is_neither_made_again_nor_taken_over(local: Catalog) -> None:
    first = save(local, CAT_MARK)
    api.discard_draft(local, "cells", "a.jpg", author="ann", rev=first.rev)
    for rev, take_over in ((first.rev, False), (first.rev, True), ("", True)):
        with pytest.raises(DraftConflictError):
            save(local, NEW_MARK, author="bob", rev=rev, take_over=take_over)
    assert api.draft(local, "cells", "a.jpg") is None


@promise("Nobody's mark is overwritten")
def test_of_processes_that_save_at_once_each_is_kept_or_told(catalog: Catalog, url: str) -> None:
    start, saved = _fork.Barrier(3), _fork.SimpleQueue()

    def child(number: int) -> None:
        own = open_catalog_url(url)
        start.wait(30)
        rev = ""
        for n in range(20):
            mark = MarkedObject(-1, f"by {number}, {n}", 0, 0, 10, 10)
            try:
                rev = save(own, mark, rev=rev).rev
            except DraftConflictError:
                found = api.draft(own, "cells", "a.jpg")
                assert found is not None
                rev = found.rev
            else:
                saved.put((number, n))
        own.close()

    children = [_fork.Process(target=child, args=(number,)) for number in range(3)]
    for each in children:
        each.start()
    for each in children:
        each.join(60)
    assert [each.exitcode for each in children] == [0, 0, 0]
    succeeded = []
    while not saved.empty():
        succeeded.append(saved.get())
    found = api.draft(catalog, "cells", "a.jpg")
    assert found is not None
    assert found.objects[0].label in {f"by {number}, {n}" for number, n in succeeded}
    assert len(set(succeeded)) == len(succeeded) > 0


def test_drafts_of_a_data_set_are_listed_page_by_page_and_counted_by_author(catalog: Catalog) -> None:
    for n in range(7):
        row = row_of(f"{n}.jpg")
        save(catalog, NEW_MARK, row=row, author="ann" if n % 2 else "bob", done=n < 3)
        save(catalog, NEW_MARK, row=row, record=a_record("cells/more"))
        save(catalog, NEW_MARK, row=row, record=a_record("cells2"))
    found: list[Draft] = []
    while page := api.drafts(catalog, "cells", after=found[-1].key if found else "", limit=3):
        assert len(page) <= 3
        found += page
    assert [each.path for each in sorted(found)] == [f"{n}.jpg" for n in range(7)]
    assert {each.dataset for each in found} == {"cells"}
    assert api.count_drafts(catalog, "cells") == [DraftCount("ann", 3, 1), DraftCount("bob", 4, 2)]
    assert api.count_drafts(catalog, "cell") == []


def test_marks_keep_what_the_object_has_and_leave_out_what_is_not_named(local: Catalog) -> None:
    draft = save(
        local,
        CAT_MARK._replace(x1=3, label=" lion "),
        MarkedObject(1, "wolf", 10.004, 10, 30, 30),
        MarkedObject(3, "cat", 60, 60, 70, 70, accepted=True),
        NEW_MARK,
        labels=[],
    )
    found = api.marked(ROW, draft)
    assert ROW.annotation is not None
    assert found.boxes == (
        CAT._replace(label="lion", x1=3),
        Box("wolf", 10, 10, 30, 30, extra=OUTLINE),
        Box("cat", 60, 60, 70, 70, extra=Extra(author="ann")),
        Box("bird", 5, 5, 15.5, 20),
    )
    assert (found.labels, found.source, found.width) == ((), "a.xml", 100)
    kept = api.marked(ROW, draft._replace(labels=None, objects=(MarkedObject(3, "cat", 60, 60, 71, 70),)))
    assert kept.labels == ("indoor",)
    assert kept.boxes[0].extra == Extra(score=0.4)


def test_a_draft_is_stale_once_another_version_says_something_else_of_its_image(local: Catalog) -> None:
    draft = save(local, CAT_MARK)
    annotation = ROW.annotation
    assert annotation is not None
    moved_lines = annotation._replace(boxes=tuple(box._replace(line=box.line + 3) for box in annotation.boxes))
    assert not api.is_stale(Row(moved_lines._replace(source="b.xml"), "a.jpg"), draft)
    for rounded in (
        with_box(0, x1=1.000049, y2=39.996),
        with_box(1, extra=Extra(outline=Polygon(pack([10.004, 10, 30, 10, 20, 29.999])))),
    ):
        assert not api.is_stale(Row(rounded, "a.jpg"), draft)
    newer = a_record("cells", 2)
    assert save(local, NEW_MARK, rev=draft.rev, record=newer).base == RECORD.id
    for other in (
        annotation._replace(labels=()),
        annotation._replace(boxes=annotation.boxes[1:]),
        with_box(0, x1=1.5),
        annotation._replace(width=101),
        with_box(1, extra=OUTLINE._replace(outline=Polygon(pack([10, 10, 30, 10, 21, 30])))),
        with_box(2, extra=POSE._replace(keypoints=Keypoints(pack([41, 41]), b"\1"))),
        with_box(3, extra=None),
    ):
        row = Row(other, "a.jpg")
        assert api.is_stale(row, draft)
        with pytest.raises(DraftConflictError, match="another version has changed"):
            api.marked(row, draft)
        found = api.draft(local, "cells", "a.jpg")
        assert found is not None
        with pytest.raises(DraftConflictError, match="another version has changed"):
            save(local, row=row, record=newer, rev=found.rev)


@pytest.mark.parametrize(
    ("mark", "wrong"),
    [
        (NEW_MARK._replace(x1=float("nan")), "no number"),
        (NEW_MARK._replace(y2=float("inf")), "no number"),
        (NEW_MARK._replace(x1="5"), "no number"),
        (NEW_MARK._replace(x2=10**400), "no number"),
        (NEW_MARK._replace(x1=-0.5), "partly outside"),
        (NEW_MARK._replace(y2=80.5), "partly outside"),
        (NEW_MARK._replace(x1=15.5), "no area"),
        (NEW_MARK._replace(y1=30), "no area"),
        (NEW_MARK._replace(label=" "), "is empty"),
        (NEW_MARK._replace(label="a\nb"), "characters that no list"),
        (NEW_MARK._replace(label="a\ud800"), "characters that no list"),
        (NEW_MARK._replace(label=None), "is empty"),
        (NEW_MARK._replace(of=4), "has 4 objects"),
        (NEW_MARK._replace(of=-2), "has 4 objects"),
        (NEW_MARK._replace(of=0.5), "has 4 objects"),
        (MarkedObject(1, "dog", 11, 10, 30, 30), "outline or keypoints"),
        (MarkedObject(2, "man", 40, 40, 50, 51), "outline or keypoints"),
    ],
)
def test_marks_that_cannot_be_are_refused(local: Catalog, mark: MarkedObject, wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        save(local, CAT_MARK, mark)
    assert api.draft(local, "cells", "a.jpg") is None


def test_edges_that_rounding_has_put_outside_are_moved_in(local: Catalog) -> None:
    draft = save(local, NEW_MARK._replace(x1=-0.004, y2=80.004))
    assert draft.objects == (NEW_MARK._replace(x1=0.0, y2=80.0),)


def test_too_much_and_repeated_marks_and_nameless_authors_are_refused(local: Catalog) -> None:
    for marks, author, wrong in (
        ([NEW_MARK] * 10_001, "ann", "10,000 at most"),
        ([NEW_MARK._replace(label="x" * 1000)] * 1_100, "ann", "1,048,576 at most"),
        ([CAT_MARK, CAT_MARK], "ann", "two marks"),
        ([], " ", "author"),
        ([], "a\nb", "author"),
        ([], "x" * 201, "author"),
    ):
        with pytest.raises(UsageError, match=wrong):
            save(local, *marks, author=author)
    with pytest.raises(UsageError, match="no image that can be used"):
        save(local, row=Row(None, "a.jpg"))
    with pytest.raises(UsageError, match=r"a label of 'a\.jpg' is empty"):
        save(local, labels=[""])


def test_a_path_that_is_no_text_has_a_draft_of_its_own(local: Catalog) -> None:
    path = b"\xff/a.jpg".decode("utf-8", "surrogateescape")
    draft = save(local, NEW_MARK, row=row_of(path))
    assert api.draft(local, "cells", path) == draft
    assert api.drafts(local, "cells") == [draft]


def test_a_draft_of_another_datacache_is_told_apart_from_a_damaged_one(local: Catalog) -> None:
    for text, wrong in ((json.dumps({"version": 99}), "version 99"), ("{", "cannot be understood"), ("[]", "object")):
        key = key_of("cells", "a.jpg")
        local.remove_document(KIND, key)
        assert local.set_document(KIND, key, text, old=None)
        for read in (lambda: api.draft(local, "cells", "a.jpg"), lambda: api.count_drafts(local, "cells")):
            with pytest.raises(CatalogError, match=wrong):
                read()
