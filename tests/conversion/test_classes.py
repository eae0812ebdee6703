"""Data sets that number their classes: the ids stay, and names that are given serve where there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

from datacache import api
from datacache.conversion.index import Reading
from datacache.conversion.pipeline import Conversion
from datacache.core.errors import AnnotationError, ConversionError, UsageError
from datacache.settings import Settings

pytestmark = pytest.mark.shared_home
Convert = Callable[..., Conversion]
Files = Callable[[str], dict[str, bytes]]


@pytest.fixture
def convert(tmp_path: Path, make: Callable[..., str], settings: Settings, number: int) -> Convert:
    """Converts YOLO labels, given as ids by image, and other files."""

    def run(ids: Mapping[str, Iterable[int]], files: Mapping[str, str], to: str = "yolo", **more: object) -> Conversion:
        folder = tmp_path / "data"
        labels = {f"{path}.txt": "".join(f"{id} 0.5 0.5 0.2 0.2\n" for id in its) for path, its in ids.items()}
        for path in ids:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (100, 80)).save(folder / f"{path}.jpg")
        for path, text in (labels | dict(files)).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return api.convert(make(folder), to=to, name=f"converted-{number}", settings=settings, **more)  # type: ignore[arg-type]

    return run


def ids_in(files: dict[str, bytes]) -> dict[str, list[int]]:
    labels = {Path(path).stem: data for path, data in files.items() if path.startswith("labels/")}
    return {name: [int(line.split()[0]) for line in data.splitlines()] for name, data in labels.items()}


def test_ids_without_names_stay_what_they_are(convert: Convert, files: Files) -> None:
    ids = {"a": [0, 11], "b": [2], "c": [10]}
    got = files(convert(ids, {}).record.ref)
    assert ids_in(got) == ids
    assert b"nc: 12\n" in got["data.yaml"]
    ids["d"] = [14, 3]
    assert ids_in(files(convert(ids, {}).record.ref)) == ids


def test_ids_beyond_the_list_stay_what_they_are(convert: Convert, files: Files) -> None:
    ids = {"a": [0, 7], "b": [3]}
    assert ids_in(files(convert(ids, {"classes.txt": "x\ny\n"}).record.ref)) == ids


def test_an_id_that_no_list_could_hold_is_an_error_that_names_it(convert: Convert) -> None:
    with pytest.raises(UsageError, match="labels of class 2000000000") as caught:
        convert({"a": [0, 2_000_000_000]}, {})
    assert "--label class_2000000000" in caught.value.hint


@pytest.mark.parametrize(
    "lists",
    [
        {},
        {"data.yaml": "names: [x, x]\n"},
        {"data.yaml": "names: {\n"},
        {"classes.txt": "x\n\ny\n"},
        {"one/classes.txt": "x\ny\n", "two/classes.txt": "x\ny\nz\n"},
    ],
)
def test_classes_that_are_given_name_the_ids_where_the_lists_do_not_serve(
    lists: dict[str, str], convert: Convert, files: Files
) -> None:
    ids = {"a": [0, 1, 1], "b": [1, 2]}
    if lists:
        with pytest.raises((UsageError, AnnotationError)):
            convert(ids, lists)
    done = convert(ids, lists, classes=["mask", "no_mask"])
    assert done.report.classes == {"mask": 1, "no_mask": 3}
    assert [(p.code, p.line) for p in done.report.problems if p.action == "skipped"] == [("class-left-out", 2)]
    assert ids_in(files(done.record.ref)) == {"a": [0, 1, 1], "b": [1]}
    other = convert(ids, lists, classes=["no_mask", "mask", "hat"])
    assert other.report.classes == {"no_mask": 1, "mask": 3, "hat": 1}


def test_labels_with_keypoints_stay_so_where_data_yaml_does_not_serve(convert: Convert) -> None:
    label = {"a.txt": "1 0.5 0.5 0.2 0.2 0.1 0.1 2 0.3 0.3 2\n"}
    yaml = "names: [x, x]\nkpt_shape: [2, 3]\n"
    done = convert({"a": []}, label | {"data.yaml": yaml}, classes=["x", "y"])
    assert done.report.classes == {"y": 1}


def test_classes_that_are_given_choose_where_there_is_a_list(convert: Convert, files: Files) -> None:
    done = convert({"a": [0, 1]}, {"classes.txt": "x\ny\n"}, classes=["y"])
    assert done.report.classes == {"y": 1}
    assert ids_in(files(done.record.ref)) == {"a": [0]}


def test_classes_that_are_given_make_no_other_table_of_annotations_that_name_theirs(
    drawn: Path, make: Callable[..., str], settings: Settings
) -> None:
    ref = make(drawn)
    done = api.convert(ref, to="yolo", name="converted", classes=["with_mask"], settings=settings)
    id = done.record.lineage.inputs[0].rpartition("@")[2]  # type: ignore[union-attr]
    with closing(api.open_catalog(settings)) as catalog:
        assert catalog.derived(id, Reading().name) is not None
        assert catalog.derived(id, Reading(classes=("with_mask",)).name) is None


def test_a_conversion_that_would_leave_out_every_box_is_an_error(convert: Convert) -> None:
    with pytest.raises(ConversionError, match="none of the classes asked for") as caught:
        convert({"a": [0, 1]}, {"classes.txt": "x\ny\n"}, classes=["mask", "no_mask"])
    assert caught.value.hint == "It has x, y."


def test_labels_under_another_data_yaml_are_not_given_the_names_of_the_first(convert: Convert) -> None:
    ids = {"1": [0], "sub/b/2": [0]}
    assert convert(ids, {"data.yaml": "names: [x]", "sub/b/data.yaml": "names: [x]"}).report.classes == {"x": 2}
    with pytest.raises(UsageError, match=r"^data.yaml and sub/b/data.yaml list different classes"):
        convert(ids, {"data.yaml": "names: [x]", "sub/b/data.yaml": "names: [y]"})
