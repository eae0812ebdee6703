"""Folders of classes: recognised where splits show them, read as labels, and written as Ultralytics and torchvision
read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from datacache import api
from datacache.annotations.check import clean_label
from datacache.annotations.layout import detect
from datacache.annotations.model import Annotation
from datacache.annotations.pairing import class_and_split, short_name
from datacache.conversion.pipeline import Conversion
from datacache.conversion.targets.base import About
from datacache.conversion.targets.folders import Folders
from datacache.core.errors import ConversionError
from datacache.settings import Settings
from tests.annotations.folders import Folder
from tests.annotations.shapes import cases

pytestmark = pytest.mark.shared_home
Make = Callable[..., str]
Files = Callable[[str], dict[str, bytes]]
Convert = Callable[..., Conversion]


@pytest.mark.parametrize(
    ("paths", "format"),
    [
        (["train/cat/a.jpg", "val/dog/a.jpg"], "folders"),
        (["Training/cat/a.jpg", "Training/dog/a.jpg", "README.txt"], "folders"),
        (["cat/a.jpg", "dog/a.jpg"], "none"),
        (["train/cat/a.jpg", "val/cat/a.jpg"], "none"),  # of one class, and likelier none
        (["train/cat/a.jpg", "train/dog/a.jpg", "train/a.jpg"], "none"),
        (["train/cat/a.jpg", "train/dog/a.jpg", "metadata.jsonl"], "imagefolder"),
        (["train/images/a.jpg", "val/JPEGImages/a.jpg"], "none"),
        (["images/train/a.jpg", "images/val/a.jpg"], "none"),
        (["train/train/a.jpg", "val/car/a.jpg"], "folders"),
        (["val/dog/a.jpg", "test/cat/a.jpg"], "folders"),
    ],
)
def test_folders_of_classes_are_recognised_below_those_of_splits(paths: list[str], format: str) -> None:
    folder = Folder(paths)
    assert detect(folder.manifest, folder.read).format == format
    assert detect(folder.manifest, folder.read, format="folders").format == "folders"


@pytest.fixture
def convert(settings: Settings, number: int) -> Convert:
    def run(ref: str, to: str, **options: object) -> Conversion:
        return api.convert(ref, to=to, name=f"{to}-{number}", settings=settings, replace=True, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture
def images(tmp_path: Path, make: Make) -> Callable[..., str]:
    def made(*paths: str, **files: str) -> str:
        folder = tmp_path / "images"
        for n, path in enumerate(paths):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20 + n, 10)).save(folder / path)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)
        return make(folder)

    return made


def labels_of(ref: str, settings: Settings, **reading: object) -> dict[str, tuple[str, ...]]:
    with api.open_annotations(ref, settings=settings, **reading) as (_, table):  # type: ignore[arg-type]
        return {row.path: row.annotation.labels for row in table.rows() if row.annotation}


PATHS = ("train/black cat/a.jpg", "train/black cat/b.jpg", "train/dog/a.jpg", "val/dog/c.jpg")


@pytest.mark.parametrize("to", ["folders", "yolo-classify"])
def test_folders_are_the_same_there_and_back(
    to: str, images: Callable[..., str], convert: Convert, settings: Settings, files: Files
) -> None:
    ref = images(*PATHS)
    assert labels_of(ref, settings) == {path: (path.split("/")[1],) for path in PATHS}
    done = convert(ref, to, strict=True)
    assert files(done.record.ref) == files(ref)
    assert (done.report.problems, done.report.splits) == ([], {"train": 3, "val": 1})
    assert sorted(files(convert(ref, to, split="none").record.ref)) == [
        "black cat/a.jpg",
        "black cat/b.jpg",
        "dog/a.jpg",
        "dog/c.jpg",
    ]


labels = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).map(clean_label).filter(bool)
paths = st.lists(st.sampled_from(["a", "cat", "images", "train"]), max_size=3).map(
    lambda above: "/".join((*above, "x.jpg"))
)


@cases
@given(labels, paths, st.sampled_from(["train", "val"]))
@example("TRAIN", "x.jpg", "val")
def test_any_label_is_the_folder_of_its_image(label: str, path: str, split: str) -> None:
    target = Folders(About((), ("train", "val")))
    written = target.image_path(target.relative(path, split, (label,)), split)
    raw, of = class_and_split(written.encode())
    folder = raw.decode()
    _, problems = target.add(Annotation(written, 1, 1, (), (label,)), split, annotated=True)
    assert (folder == label) == (not problems)
    assert folder.removeprefix("_") == label.replace("/", "_").removeprefix("_")
    assert of == split
    assert target.relative(written, split, (folder,)) == written


def test_folders_without_splits_are_classes_where_that_is_said(
    images: Callable[..., str], convert: Convert, settings: Settings, files: Files
) -> None:
    ref = images("x/cat/a.jpg", "x/dog/a.jpg", "top.jpg")
    assert set(labels_of(ref, settings).values()) == {()}
    assert labels_of(ref, settings, format="folders", trust_sizes=True) == {
        "top.jpg": (),
        "x/cat/a.jpg": ("cat",),
        "x/dog/a.jpg": ("dog",),
    }
    with pytest.raises(ConversionError, match="no image"):
        convert(ref, "yolo")
    done = convert(ref, "folders", format="folders", split="train=1")
    assert [problem[:3] for problem in done.report.problems] == [("image-unannotated", "skipped", "top.jpg")]
    assert sorted(files(done.record.ref)) == ["train/cat/x_a.jpg", "train/dog/x_a.jpg"]


def test_a_class_that_is_called_like_a_split_is_a_class(
    images: Callable[..., str], convert: Convert, settings: Settings, files: Files
) -> None:
    paths = ["test/train/a.jpg", "val/bus/a.jpg", "val/test/a.jpg", "val/train/b.jpg"]
    ref = images(*paths)
    assert labels_of(ref, settings) == {path: (path.split("/")[1],) for path in paths}
    done = convert(ref, "folders", strict=True)
    assert (sorted(files(done.record.ref)), done.report.splits) == (paths, {"val": 3, "test": 1})


def test_a_folder_beside_those_of_classes_is_one_whatever_it_is_called(
    images: Callable[..., str], convert: Convert, settings: Settings, files: Files
) -> None:
    paths = ["bus/a.jpg", "test/a.jpg", "train/b.jpg"]
    ref = images(*paths)
    assert labels_of(ref, settings, format="folders") == {path: (path.split("/")[0],) for path in paths}
    done = convert(ref, "folders", format="folders", strict=True)
    assert (sorted(files(done.record.ref)), done.report.splits) == (paths, {})


def test_a_folder_of_a_split_with_folders_of_classes_is_no_class(
    images: Callable[..., str], settings: Settings
) -> None:
    ref = images("train/bus/a.jpg", "train/b.jpg", "other/c.jpg")
    assert labels_of(ref, settings, format="folders") == {
        "train/bus/a.jpg": ("bus",),
        "train/b.jpg": (),
        "other/c.jpg": ("other",),
    }


def test_names_that_are_too_long_for_a_file_system_are_cut(
    images: Callable[..., str], convert: Convert, files: Files
) -> None:
    label, name = "é" * 128, f"{'a' * 140}/{'b' * 140}/c.jpg"
    said = [{"file_name": name, "label": label}, {"file_name": "d.jpg", "label": f"{label}e"}]
    ref = images(name, "d.jpg", metadata__jsonl="".join(json.dumps(line) + "\n" for line in said))
    done = convert(ref, "folders")
    written = [path.split("/") for path in files(done.record.ref)]
    assert all(len(part.encode()) <= 255 for path in written for part in path)
    assert len({folder for folder, _ in written}) == 2
    assert all(folder.startswith("é" * 100) and path.endswith(".jpg") for folder, path in written)
    assert [(problem.code, problem.action) for problem in done.report.problems] == [("label-folder", "changed")] * 2
    assert short_name("a" * 255) == "a" * 255


def test_what_folders_cannot_hold_is_counted(
    images: Callable[..., str], convert: Convert, settings: Settings, files: Files, tmp_path: Path
) -> None:
    lines = {"a.jpg": "night", "b.jpg": ["day", "rain"], "c.jpg": "and/or", "x/a.jpg": "night", "y/a.jpg": ".."}
    said = [{"file_name": name, "label": label} for name, label in lines.items()]
    text = "".join(json.dumps(line) + "\n" for line in [*said, {"file_name": "b.jpg", "text": "A day."}])
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    ref = images("a.jpg", "b.jpg", "c.jpg", "d.jpg", "x/a.jpg", "y/a.jpg", metadata__jsonl=text, obj__names="face\n")
    done = convert(ref, "folders", keep_unannotated=True)
    assert sorted(files(done.record.ref)) == [
        "_../y_a.jpg",
        "and_or/c.jpg",
        "d.jpg",
        "day/b.jpg",
        "night/a.jpg",
        "night/x_a.jpg",
    ]
    assert [problem[:3] for problem in done.report.problems] == [
        ("objects-left-out", "changed", "a.txt"),
        ("image-unannotated", "noted", "d.jpg"),
        ("objects-left-out", "changed", "metadata.jsonl"),
        ("labels-left-out", "changed", "metadata.jsonl"),
        ("label-folder", "changed", "metadata.jsonl"),
        ("label-folder", "changed", "metadata.jsonl"),
        ("image-repeated", "noted", "metadata.jsonl"),
    ]
    assert done.report.boxes == 0
    with pytest.raises(ConversionError, match="strict"):
        convert(ref, "folders", strict=True, keep_unannotated=True)


@pytest.mark.parametrize(
    ("given", "to", "lacks", "hint"),
    [
        ({"a__txt": "0 0.5 0.5 0.2 0.2\n"}, "folders", "label of the whole image", "--to yolo"),
        ({"metadata__jsonl": '{"file_name": "a.jpg", "label": "night"}'}, "yolo", "objects", "--keep-unannotated"),
    ],
)
def test_an_image_without_what_the_format_holds_is_not_said_to_have_no_annotation(
    images: Callable[..., str], convert: Convert, given: dict[str, str], to: str, lacks: str, hint: str
) -> None:
    ref = images("a.jpg", **given, obj__names="face\n", train__txt="a.jpg\n")
    with pytest.raises(ConversionError, match="no image") as error:
        convert(ref, to)
    assert [problem.message for problem in error.value.problems if problem.code != "classes-missing"] == [
        f"a.jpg has no {lacks}; it is left out"
    ]
    assert hint in error.value.hint
