"""What came out of a comparison: its numbers add up, and lead to the images that they count."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from datacache.annotations.comparing import compared
from datacache.annotations.comparing.changes import Changed, compare
from datacache.annotations.comparing.compared import IMAGE_KINDS, OBJECT_KINDS, Compared, WantedImages, find_differences
from datacache.annotations.table.table import Table
from datacache.core.errors import UsageError
from datacache.manifest.diff import Change
from tests.annotations.tables import build
from tests.annotations.test_comparison import drawn_versions

BYTES = [Change("changed", f"b/{n:04d}.jpg".encode(), None, None) for n in range(1, 700, 30)]
FILES = [*BYTES, Change("changed", b"b/0001.xml", None, None), Change("added", b"b/0002.jpg", None, None)]


@pytest.fixture(scope="module")
def tables() -> tuple[Table, Table]:
    before, after = drawn_versions(11)
    return build(before), build(after)


@pytest.fixture(scope="module")
def found(tables: tuple[Table, Table]) -> Compared:
    return find_differences(*tables, sorted(FILES, key=lambda change: change.path))


@pytest.fixture(scope="module")
def images(tables: tuple[Table, Table]) -> dict[str, tuple[set[str], list[tuple[str, str, str]]]]:
    """The images that differ, in order: their kinds, and kind and classes of each object."""

    def kind(each: Changed) -> str:
        return "image-added" if each.before is None else "image-gone" if each.after is None else "annotated"

    changed = {each.path: each for each in compare(*tables)}
    bytes_changed = {
        path for change in BYTES if all(table.row(path := change.path.decode()) is not None for table in tables)
    }
    assert len(bytes_changed - changed.keys()) > 3
    assert len(bytes_changed & changed.keys()) > 1
    return {
        path: (
            {kind(changed[path]) for _ in range(path in changed)} | {"image-changed" for _ in range(other)},
            [
                (each.kind, each.before.label if each.before else "", each.after.label if each.after else "")
                for each in (changed[path].objects if path in changed else ())
            ],
        )
        for path in sorted(changed.keys() | bytes_changed)
        for other in [path in bytes_changed]
    }


def paths(found: Compared, tables: tuple[Table, Table], asked: WantedImages) -> list[str]:
    pairs = found.pairs(found.select(asked).tolist(), *tables)
    return [row.path for before, after in pairs for row in [after or before] if row]


def test_each_kind_and_class_leads_to_its_images(
    found: Compared, tables: tuple[Table, Table], images: dict[str, tuple[set[str], list[tuple[str, str, str]]]]
) -> None:
    labels = ("", "cat", "dog")
    for kind, label, was, now in product(("", *IMAGE_KINDS, *OBJECT_KINDS), labels, labels, labels):
        asked = WantedImages(kind, label, was, now)

        def fits(event: tuple[str, str, str], asked: WantedImages = asked) -> bool:
            of_kind = asked.kind not in OBJECT_KINDS or event[0] == asked.kind
            of_class = asked.label in ("", *event[1:]) and asked.was in ("", event[1]) and asked.now in ("", event[2])
            return of_kind and of_class

        expected = [
            path
            for path, (kinds, events) in images.items()
            if (kind not in IMAGE_KINDS or kind in kinds)
            and (not (kind in OBJECT_KINDS or asked.asks_class) or any(map(fits, events)))
        ]
        assert paths(found, tables, asked) == expected, asked
    for number, path in enumerate(images):
        assert found.find(path, *tables) == number
        assert set(found.kinds_of(number)) == images[path][0] | {event[0] for event in images[path][1]}
    assert found.find("none.jpg", *tables) == -1


def test_the_numbers_of_classes_lead_from_one_version_to_the_other(
    found: Compared, images: dict[str, tuple[set[str], list[tuple[str, str, str]]]]
) -> None:
    assert found.objects() == Counter(event for _, events in images.values() for event in events)
    assert found.images() == {kind: sum(kind in kinds for kinds, _ in images.values()) for kind in IMAGE_KINDS}
    for each in found.classes():
        had = Counter(each.kinds)
        here = each.before + had["added"] - had["removed"] + had["relabelled-was"] - had["relabelled-now"]
        assert here == each.after, each.label
    assert found.size_bytes < 60 * len(found)


def test_thousands_of_classes_are_summed_alike(
    found: Compared, tables: tuple[Table, Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compared, "_MOST_SUMS", 0)
    assert find_differences(*tables, ()).objects() == found.objects()
    assert find_differences(tables[0], tables[0], ()).objects() == {}


def test_what_means_nothing_is_an_error(found: Compared) -> None:
    for asked in (
        WantedImages("none"),
        WantedImages("", "cow"),
        WantedImages("moved", "", "cow"),
        WantedImages("", "", "", "cow"),
    ):
        with pytest.raises(UsageError):
            found.select(asked)
