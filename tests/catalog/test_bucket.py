"""A bucket that others have written to: nothing of it is believed that can be checked, and nothing takes all memory."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from datacache import api
from datacache.annotations.table.arrays import ArrayStore
from datacache.catalog.bucket import BucketCatalog
from datacache.core.errors import CatalogError, CorruptManifestError, DatacacheError
from datacache.core.packed import unpack
from datacache.manifest import codec
from datacache.settings import Settings
from tests.catalog.test_travel import contents, draw, keys


@pytest.fixture
def pushed(tmp_path: Path, settings: Settings) -> Path:
    """A catalog in a folder that has `faces@v1`."""
    draw(tmp_path / "faces")
    api.create_snapshot("faces", str(tmp_path / "faces"), tags=["v1"], copy=True, settings=settings)
    api.push_snapshot("faces@v1", str(tmp_path / "catalog"), settings=settings)
    return tmp_path / "catalog"


@pytest.fixture
def annotated(pushed: Path, settings: Settings) -> Path:
    """The same, with annotations that were read before they were pushed."""
    api.stats("faces@v1", settings=settings)
    api.push_snapshot("faces@v1", str(pushed), settings=settings)
    return pushed


@pytest.fixture
def there(settings: Settings, pushed: Path, tmp_path: Path) -> Settings:
    """Somebody who has this catalog only."""
    return replace(settings, home=tmp_path / "reader", catalog=f"file://{pushed}")


@pytest.fixture
def elsewhere(settings: Settings, tmp_path: Path) -> Settings:
    """Another machine: a home in which nothing is yet."""
    home = tmp_path / "elsewhere"
    return replace(settings, home=home, catalog=f"sqlite:///{home}/catalog.db")


def only(folder: Path, pattern: str) -> Path:
    (file,) = folder.glob(pattern)
    return file


def change_record(catalog: Path, **values: object) -> None:
    file = only(catalog, "datasets/faces/@snapshots/*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


RECORDS: list[dict[str, object]] = [
    {"files": "many"},
    {"files": -1},
    {"created_at": 7},
    {"message": ["x"]},
    {"parent": {}},
    {"warnings": [1]},
    {"held": [float("inf"), 0, 0]},
    {"lineage": ["create", [], []]},
    {"lineage": ["create", {}, [3]]},
]


@pytest.mark.parametrize("values", RECORDS, ids=str)
def test_a_record_with_values_of_other_types_is_not_taken_over(
    values: dict[str, object], pushed: Path, elsewhere: Settings
) -> None:
    change_record(pushed, **values)
    with pytest.raises(CatalogError, match="cannot be read"):
        api.pull_snapshot("faces@v1", str(pushed), settings=elsewhere)
    assert api.list_datasets(elsewhere) == []


def test_a_record_with_other_numbers_than_its_manifest_is_not_taken_over(pushed: Path, elsewhere: Settings) -> None:
    change_record(pushed, files=7)
    with pytest.raises(CorruptManifestError, match="7 files"):
        api.pull_snapshot("faces@v1", str(pushed), settings=elsewhere)


def test_names_that_nothing_can_have_are_passed_over(pushed: Path, there: Settings) -> None:
    for name in ("datasets/-x/@latest", "datasets/a b/@latest", "datasets/\x1b[2J/@latest", "datasets/@latest"):
        (pushed / name).parent.mkdir(exist_ok=True, parents=True)
        (pushed / name).write_text("0" * 32)
    for name in ("latest", "a b", "-x", "deeper/tag"):
        (pushed / "datasets/faces/@tags" / name).parent.mkdir(exist_ok=True)
        (pushed / "datasets/faces/@tags" / name).write_text("0" * 32)
    (pushed / "datasets/faces/@snapshots/not an id.json").write_text("{")
    id = api.list_datasets(there)[0].latest
    (pushed / f"derived/{id}").mkdir(parents=True)
    (pushed / f"derived/{id}/%1b[2J").write_text("0" * 32)
    with closing(api.open_catalog(there)) as catalog:
        assert [(dataset.name, dataset.tags) for dataset in catalog.datasets()] == [("faces", {"v1": id})]
        assert [record.id for record in catalog.snapshots("faces")] == [id]
        assert all(name.isprintable() for name in catalog.derived_names(id))


@pytest.mark.parametrize("name", ["@latest", "@tags/v1"])
@pytest.mark.parametrize("text", ["", "../../x", "0" * 31, "x" * 32, "\x1b[2J", "\xff"])
def test_a_name_of_what_is_no_id_is_an_error_that_says_which(
    name: str, text: str, pushed: Path, there: Settings
) -> None:
    (pushed / "datasets/faces" / name).write_text(text)
    with pytest.raises(CatalogError, match=f"faces/{name} holds no id"):
        api.list_datasets(there)


@pytest.mark.parametrize("mark", ['{"version": Infinity}', "[" * 100_000, '{"version": "one"}', "[]", "\xff"])
def test_a_mark_that_cannot_be_read_is_an_error(mark: str, pushed: Path, there: Settings) -> None:
    (pushed / "catalog.json").write_text(mark)
    with pytest.raises(CatalogError):
        api.list_datasets(there)


@pytest.mark.parametrize(
    "name",
    ["catalog.json", "datasets/faces/@latest", "datasets/faces/@tags/v1", "datasets/faces/@snapshots/*", "index/*"],
)
def test_objects_that_are_larger_than_a_push_writes_them_are_not_read(
    name: str, pushed: Path, elsewhere: Settings
) -> None:
    for file in pushed.glob(name):
        os.truncate(file, 2**40)  # a hole: who reads it has no memory left
    with pytest.raises(CatalogError, match="bytes: a push writes"):
        api.pull_snapshot("faces@v1", str(pushed), settings=elsewhere)


Row = tuple[bytes, bytes, int, int, int]


@pytest.mark.parametrize(
    "lie",
    [
        lambda row, first: (row[0], row[1], row[2], 2**32 - 1, row[4]),
        lambda row, first: (row[0], row[1], 2**32 - 1, row[3], row[4]),
        lambda row, first: (row[0], *first[1:]),
    ],
    ids=["larger than its bundle", "behind its bundle", "all at one place"],
)
def test_an_index_that_names_impossible_places_is_not_followed(
    lie: Callable[[Row, Row], Row], pushed: Path, there: Settings, elsewhere: Settings
) -> None:
    layout = struct.Struct("<16s16sIII")
    for file in pushed.glob("index/*"):
        rows: list[Row] = [*layout.iter_unpack(unpack(file.read_bytes()))]
        file.write_bytes(codec.compress(b"".join(layout.pack(*lie(row, rows[0])) for row in rows)))
    with pytest.raises(CorruptManifestError, match=r"index/.* cannot be read"):
        api.pull_snapshot("faces@v1", str(pushed), settings=elsewhere)
    with pytest.raises(CorruptManifestError, match=r"index/.* cannot be read"):
        contents("faces@v1", there)


def test_a_push_does_not_build_on_ids_that_do_not_fit_their_bundle(
    pushed: Path, settings: Settings, tmp_path: Path
) -> None:
    ids = only(pushed, "bundles/*/*.ids")
    whole = ids.read_bytes()
    for other in (whole[:-20], whole + b"\0" * 16 + b"\xff" * 4, whole[:-1], whole[:-4] + b"\xff" * 4, b""):
        ids.write_bytes(other)
        with pytest.raises(CorruptManifestError, match="is not what a push has written"):
            api.push_snapshot("faces@v1", str(pushed), settings=settings)


def test_a_bundle_that_was_lost_is_pushed_again(pushed: Path, settings: Settings, elsewhere: Settings) -> None:
    only(pushed, "bundles/*/*[!s]").unlink()
    with pytest.raises(CorruptManifestError, match="missing from"):
        api.pull_snapshot("faces@v1", str(pushed), settings=elsewhere)
    assert api.push_snapshot("faces@v1", str(pushed), settings=settings).moved
    assert api.pull_snapshot("faces@v1", str(pushed), settings=elsewhere).moved


def test_what_pages_keep_of_annotations_travels_to_a_folder_too(
    annotated: Path, settings: Settings, elsewhere: Settings
) -> None:
    with closing(api.open_catalog(settings)) as catalog:
        id = api.resolve(catalog, "faces").id
        (table,) = catalog.derived_names(id)
        ArrayStore(catalog, id, table).put("boxes", {"edges": np.zeros(3)})
        names = catalog.derived_names(id)
    assert len(names) > 1
    api.push_snapshot("faces@v1", str(annotated), settings=settings)
    api.pull_snapshot("faces@v1", str(annotated), settings=elsewhere)
    with closing(api.open_catalog(elsewhere)) as catalog:
        assert catalog.derived_names(id) == names


def test_a_pull_does_not_replace_annotations_that_were_read_here(
    annotated: Path, settings: Settings, there: Settings
) -> None:
    with closing(api.open_catalog(settings)) as catalog:
        id = api.resolve(catalog, "faces").id
        (name,) = catalog.derived_names(id)
        before = catalog.derived(id, name)
        (file,) = annotated.glob(f"derived/{id}/*")
        file.write_text(id)
        api.pull_snapshot("faces@v1", str(annotated), settings=settings)
        assert catalog.derived(id, name) == before


def test_pushes_at_once_leave_all_that_each_has_pushed(
    place: str, settings: Settings, elsewhere: Settings, tmp_path: Path
) -> None:
    for number in range(4):
        draw(tmp_path / "faces", 3 + number // 2)  # two pairs of the same snapshot
        api.create_snapshot("faces", str(tmp_path / "faces"), tags=[f"v{number}"], copy=True, settings=settings)
    begin = threading.Barrier(4)
    failed: list[DatacacheError] = []

    def push(number: int) -> None:
        begin.wait()
        try:
            api.push_snapshot(f"faces@v{number}", place, tags=["best"], move_tags=True, settings=settings)
        except DatacacheError as exc:
            failed.append(exc)

    threads = [threading.Thread(target=push, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for number in range(4):
        api.pull_snapshot(f"faces@v{number}", place, settings=elsewhere)
        assert contents(f"faces@v{number}", elsewhere) == contents(f"faces@v{number}", settings)
    with closing(BucketCatalog(place, settings)) as catalog:
        (dataset,) = catalog.datasets()
        assert {"best", "v0", "v1", "v2", "v3"} == dataset.tags.keys()
        assert dataset.tags["best"] in set(dataset.tags.values())
    assert not [key for key in keys(place, settings) if "tmp" in key]
