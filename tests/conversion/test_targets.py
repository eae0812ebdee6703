"""Test what the files of a result are called, what they can hold, and that they are read again as what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from PIL import Image

from datacache import api
from datacache.annotations.table.table import Table
from datacache.conversion.pipeline import Conversion
from datacache.conversion.targets import TARGETS
from datacache.core.errors import UsageError
from datacache.settings import Settings

pytestmark = pytest.mark.shared_home
Make = Callable[..., str]
Convert = Callable[..., Conversion]
Files = Callable[[str], dict[str, bytes]]
OF_BOXES = sorted({*TARGETS} - {"cvat-video", "folders", "yolo-classify", "yolo-pose"})
"""A video has no splits, and names its images anew."""


@pytest.fixture
def convert(settings: Settings, number: int) -> Convert:
    def run(ref: str, to: str = "yolo", name: str = f"converted-{number}", **options: object) -> Conversion:
        return api.convert(ref, to=to, name=name, settings=settings, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture
def labelled(tmp_path: Path, make: Make) -> Callable[..., str]:
    """Makes a snapshot of images with one YOLO box each, and of other files."""

    def made(*images: str, **files: str) -> str:
        folder = tmp_path / "labelled"
        for path in images:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (100, 80)).save(folder / path)
            (folder / path).with_suffix(".txt").write_text("0 0.5 0.5 0.2 0.2\n")
        (folder / "obj.names").write_text("face\n")
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)
        return make(folder)

    return made


# --- labels of whole images ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", OF_BOXES)
@pytest.mark.parametrize("split", ["none", "train=0.5,val=0.5"])
def test_labels_of_whole_images_are_carried_along_with_the_new_paths(
    to: str, split: str, labelled: Callable[..., str], convert: Convert, settings: Settings
) -> None:
    lines = [{"file_name": "a.jpg", "label": "night"}, {"file_name": "b.jpg", "label": ["day", 'r"ain', 3]}]
    ref = labelled("a.jpg", "b.jpg", "c.jpg", metadata__jsonl="".join(f"{json.dumps(line)}\n" for line in lines))
    done = convert(ref, to=to, split=split)
    with api.open_annotations(done.record.ref, settings=settings) as (_, table):
        table_of: Table = table
        labels = {Path(row.path).name: row.annotation.labels for row in table_of.rows() if row.annotation}
    assert labels == {"a.jpg": ("night",), "b.jpg": ("day", 'r"ain', "3"), "c.jpg": ()}


def test_without_labels_of_whole_images_there_is_no_file_of_them(
    labelled: Callable[..., str], convert: Convert, files: Files
) -> None:
    assert "metadata.jsonl" not in files(convert(labelled("a.jpg")).record.ref)


# --- paths with line breaks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("image", ["a\nb.jpg", "x\ry/a.jpg"])
@pytest.mark.parametrize(
    ("to", "split", "lists"),
    [
        ("darknet", "none", True),
        ("keras-yolo3", "none", True),
        ("voc", "train=1", True),
        ("voc", "none", False),
        ("coco", "train=1", False),
        ("yolo", "train=1", False),
    ],
)
def test_an_image_whose_path_no_list_can_hold_is_left_out_altogether(
    image: str, to: str, split: str, lists: bool, labelled: Callable[..., str], convert: Convert, files: Files
) -> None:
    done = convert(labelled(image, "c.jpg"), to=to, split=split)
    problems = [problem[:3] for problem in done.report.problems if problem.code == "path-unwritable"]
    assert problems == ([("path-unwritable", "skipped", image)] if lists else [])
    assert done.report.written == done.report.boxes == (1 if lists else 2)
    got = files(done.record.ref)
    assert sum(path.endswith(".jpg") for path in got) == done.report.written
    if lists:
        assert not [path for path in got if "\n" in path or "\r" in path]
        listed = next(data for path, data in got.items() if path.endswith("train.txt"))
        assert len(listed.splitlines()) == 1


@pytest.mark.parametrize(
    ("to", "image"),
    [
        ("open-images", "a\udcff.jpg"),
        ("open-images", "a\nb.jpg"),
        ("label-studio", "\udc85/a.jpg"),
        ("cvat", "a\udcff.jpg"),
        ("cvat", "a\x1b[31m.jpg"),
        ("coco", None),
        ("imagefolder", None),
    ],
)
def test_an_image_whose_name_the_format_cannot_hold_is_left_out_and_the_others_are_read_again(
    to: str, image: str | None, labelled: Callable[..., str], convert: Convert, settings: Settings
) -> None:
    done = convert(labelled(image or "a\udcff.jpg", "c.jpg", "C:d.jpg"), to=to)
    left_out = [problem[:3] for problem in done.report.problems if problem.code == "path-unwritable"]
    assert left_out == ([("path-unwritable", "skipped", image)] if image else [])
    with api.open_annotations(done.record.ref, settings=settings) as (_, table):
        assert [len(row.annotation.boxes) for row in table.rows() if row.annotation] == [1] * (2 if image else 3)
        assert list(table.problems()) == []


def test_a_frame_of_a_high_number_takes_no_numbers_from_those_behind_it(
    labelled: Callable[..., str], convert: Convert, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = labelled("frame_000004.jpg", "frame_999999999.jpg", "x.jpg")
    images = [path for path in files(convert(ref, to="cvat-video").record.ref) if path.endswith(".jpg")]
    assert images == ["images/frame_000004.jpg", "images/frame_000005.jpg", "images/frame_000006.jpg"]
    monkeypatch.setattr("datacache.annotations.formats.cvat.MAX_FRAMES", 2)
    with pytest.raises(UsageError, match="2 frames at most"):
        convert(ref, to="cvat-video", name="too-long")


# --- names of splits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "split"),
    [
        ("keras-yolo3", "classes"),
        ("keras-yolo3", "Classes"),
        ("darknet", "names"),
        ("darknet", "classes"),
        ("darknet", "backup"),
        ("yolo", "names"),
        ("yolo", "nc"),
        ("yolo", "channels"),
    ],
)
def test_a_split_that_would_be_called_like_something_else_is_refused(
    to: str, split: str, labelled: Callable[..., str], convert: Convert
) -> None:
    with pytest.raises(UsageError, match=f"a split cannot be called '{split}'"):
        convert(labelled("a.jpg"), to=to, split=f"train=0.5,{split}=0.5")


def test_darknets_own_name_for_val_is_not_there_twice(labelled: Callable[..., str], convert: Convert) -> None:
    with pytest.raises(UsageError, match="'valid'"):
        convert(labelled("a.jpg"), to="darknet", split="val=0.5,valid=0.5")


def test_names_of_splits_are_no_keywords_in_data_yaml(
    labelled: Callable[..., str], convert: Convert, files: Files
) -> None:
    names = ["no", "yes", "on", "true", "null", "2017", "1e3"]
    split = ",".join(f"{name}={1 / len(names):.9f}" for name in names)
    ref = labelled(*(f"{number}.jpg" for number in range(60)))
    content = yaml.safe_load(files(convert(ref, split=split).record.ref)["data.yaml"])
    assert {key: content[key] for key in names} == {name: f"images/{name}" for name in names}


def test_an_empty_split_is_noted_and_names_no_folder_that_is_not_there(
    labelled: Callable[..., str], convert: Convert, files: Files
) -> None:
    ref = labelled("a.jpg", "b.jpg")
    for to in OF_BOXES:
        done = convert(ref, to=to, name=to, split="train=0.9999,val=0.00005,test=0.00005", strict=True)
        problems = [problem for problem in done.report.problems if problem.code != "box-outlined"]
        assert [problem[:3] for problem in problems] == [("split-empty", "noted", "")] * 2
    done = convert(ref, split="train=0.9999,val=0.00005,test=0.00005")
    content = yaml.safe_load(files(done.record.ref)["data.yaml"])
    assert {key: content.get(key) for key in ("train", "val", "test")} == {
        "train": "images/train",
        "val": "images/train",
        "test": None,
    }
    assert [problem.message for problem in done.report.problems] == [
        "there is no image in the split val; data.yaml has the images of train for it",
        "there is no image in the split test",
    ]
