"""Files that speak of many images: which image each name means, and what becomes of an image that two files have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from PIL import Image

from datacache import api
from datacache.annotations.model import Problem
from datacache.conversion.model import Report
from datacache.settings import Settings

pytestmark = pytest.mark.shared_home
Make = Callable[..., str]
Boxes = Mapping[str, Iterable[float]]
ONE, TWO = (1.0, 1.0, 11.0, 11.0), (50.0, 50.0, 60.0, 60.0)


def coco(images: Mapping[str, Iterable[tuple[float, ...]]]) -> str:
    """A COCO file of one class with these boxes, given by their edges."""
    numbered = list(enumerate(images.items(), 1))
    return json.dumps(
        {
            "images": [{"id": id, "file_name": name, "width": 100, "height": 80} for id, (name, _) in numbered],
            "annotations": [
                {"id": 100 * id + at, "image_id": id, "category_id": 1, "bbox": [x1, y1, x2 - x1, y2 - y1]}
                for id, (_, boxes) in numbered
                for at, (x1, y1, x2, y2) in enumerate(boxes)
            ],
            "categories": [{"id": 1, "name": "face"}],
        }
    )


def keras(images: Mapping[str, Iterable[tuple[float, ...]]]) -> str:
    """A keras-yolo3 file of the same."""
    return "".join(
        " ".join([name, *(",".join(f"{edge:.0f}" for edge in (*box, 0)) for box in boxes)]) + "\n"
        for name, boxes in images.items()
    )


def yolo(*boxes: tuple[float, ...]) -> str:
    lines = ((x1 + x2) / 200 for x1, y1, x2, y2 in boxes)
    return "".join(f"0 {x:.6f} 0.5 0.1 0.1\n" for x in lines)


@pytest.fixture
def found(
    tmp_path: Path, make: Make, settings: Settings
) -> Callable[..., tuple[dict[str, list[tuple[float, ...]]], list[Problem]]]:
    """The boxes of each image of a folder of these images and files, and all problems."""

    def read(
        images: Iterable[str], files: Mapping[str, str]
    ) -> tuple[dict[str, list[tuple[float, ...]]], list[Problem]]:
        with api.open_annotations(write(tmp_path / "data", images, files, make), settings=settings) as (_, table):
            rows = [row.annotation for row in table.rows() if row.annotation]
            boxes = {row.path: [tuple(box[1:5]) for box in row.boxes] for row in rows if row.source}
            return boxes, list(table.problems())

    return read


@pytest.fixture
def converted(tmp_path: Path, make: Make, settings: Settings, number: int) -> Callable[..., Report]:
    """The report of a conversion of such a folder to YOLO."""

    def convert(images: Iterable[str], files: Mapping[str, str]) -> Report:
        ref = write(tmp_path / "data", images, files, make)
        return api.convert(ref, to="yolo", name=f"converted-{number}", settings=settings).report

    return convert


def write(folder: Path, images: Iterable[str], files: Mapping[str, str], make: Make) -> str:
    for path in (*images, *files):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
    for path in images:
        Image.new("RGB", (100, 80)).save(folder / path)
    for path, data in files.items():
        (folder / path).write_text(data)
    return make(folder)


def codes(problems: Iterable[Problem]) -> list[tuple[str, str, str]]:
    return sorted((problem.code, problem.action, problem.file) for problem in problems)


# --- images in two files ---------------------------------------------------------------------------------------------


def test_a_box_that_two_files_have_counts_once_and_is_reported(found) -> None:
    first, second = {"a.jpg": [ONE, TWO], "b.jpg": [ONE]}, {"a.jpg": [TWO, (1, 2, 3, 4)]}
    boxes, problems = found(
        ["images/a.jpg", "images/b.jpg"], {"annotations/one.json": coco(first), "annotations/two.json": coco(second)}
    )
    assert boxes == {"images/a.jpg": [ONE, TWO, (1, 2, 3, 4)], "images/b.jpg": [ONE]}
    assert codes(problems) == [("image-repeated", "noted", "annotations/two.json")]
    assert "Boxes that are the same and count once: 1; more, which are taken, too: 1" in problems[0].message


def test_a_file_of_captions_beside_one_of_objects_is_no_problem_and_problems_name_the_latter(converted) -> None:
    captions = {
        "images": [{"id": 7, "file_name": "a.jpg", "width": 100, "height": 80}],
        "annotations": [{"id": 1, "image_id": 7, "caption": "A dog."}],
    }
    objects = json.loads(coco({"a.jpg": [ONE]}))
    left, top, right, bottom = ONE
    objects["annotations"][0]["segmentation"] = [[left, top, right, top, right, bottom]]
    files = {"annotations/captions.json": json.dumps(captions), "annotations/instances.json": json.dumps(objects)}
    report = converted(["images/a.jpg"], files)
    assert codes(report.problems) == [("polygon-boxed", "changed", "annotations/instances.json")]


def test_an_image_that_two_files_have_and_one_says_nothing_of_is_no_problem(found) -> None:
    files = {"annotations/one.json": coco({"a.jpg": [ONE]}), "annotations/two.json": coco({"a.jpg": []})}
    assert found(["images/a.jpg"], files) == ({"images/a.jpg": [ONE]}, [])


def test_boxes_that_are_twice_in_one_file_stay_so(found) -> None:
    twice = coco({"a.jpg": [ONE, ONE]})
    boxes, _ = found(["a.jpg"], {"one.json": twice, "two.json": twice})
    assert boxes == {"a.jpg": [ONE, ONE]}


@pytest.mark.parametrize(
    ("write", "files"),
    [
        (
            coco,
            ("annotations/instances_all.json", "annotations/instances_train.json", "annotations/instances_val.json"),
        ),
        (keras, ("all.txt", "train.txt", "val.txt")),
    ],
)
def test_a_file_of_everything_beside_those_of_the_splits_changes_nothing(converted, write, files) -> None:
    all, train, val = files
    images = {"images/a.jpg": [ONE], "images/b.jpg": [TWO]}
    report = converted(
        images,
        {
            all: write(images),
            train: write({"images/a.jpg": [ONE]}),
            val: write({"images/b.jpg": [TWO]}),
            **({"classes.txt": "face\n"} if write is keras else {}),
        },
    )
    assert report.splits == {"train": 1, "val": 1}
    assert report.boxes == 2
    assert codes(report.problems) == [("image-repeated", "noted", train), ("image-repeated", "noted", val)]


def test_an_image_in_files_of_two_splits_is_in_the_first_and_reported(converted) -> None:
    both = coco({"a.jpg": [ONE]})
    files = {"annotations/instances_val.json": both, "annotations/instances_train.json": both}
    report = converted(["images/a.jpg"], files | {"annotations/instances_test.json": both})
    assert report.splits == {"train": 1}
    assert report.boxes == 1
    assert [of for of in codes(report.problems) if of[0] == "split-repeated"] == [
        ("split-repeated", "repaired", "annotations/instances_test.json"),
        ("split-repeated", "repaired", "annotations/instances_val.json"),
    ]


def test_labels_of_whole_images_in_the_folder_of_a_split_do_not_hide_the_boxes(converted) -> None:
    report = converted(
        ["train/a.jpg"],
        {
            "instances.json": coco({"train/a.jpg": [ONE]}),
            "train/metadata.jsonl": '{"file_name": "a.jpg", "label": "day"}\n',
        },
    )
    assert (report.written, report.boxes) == (1, 1)


def test_boxes_in_parts_of_the_image_are_beside_others_in_pixels(found) -> None:
    rows = "ImageID,LabelName,Confidence,XMin,XMax,YMin,YMax\na,face,1,0.5,0.6,0.625,0.75\n"
    line = {"file_name": "a.jpg", "objects": {"bbox": [[1, 1, 10, 10]], "categories": ["face"]}}
    boxes, problems = found(["a.jpg"], {"train-annotations-bbox.csv": rows, "metadata.jsonl": json.dumps(line) + "\n"})
    assert {path: sorted(each) for path, each in boxes.items()} == {"a.jpg": [ONE, TWO]}
    assert not [problem for problem in problems if problem.action != "noted"]


# --- images that are missing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("write", "file"), [(coco, "annotations/instances.json"), (keras, "boxes.txt")])
@pytest.mark.parametrize("root", ["", "/home/me/set/"])
def test_the_labels_of_a_missing_image_are_not_given_to_one_that_is_named_itself(found, write, file, root) -> None:
    listed = {f"{root}cam1/0001.jpg": [ONE], f"{root}cam2/0001.jpg": [TWO], f"{root}cam2/0002.jpg": [ONE]}
    boxes, problems = found(["cam2/0001.jpg", "cam2/0002.jpg"], {file: write(listed), "classes.txt": "face"})
    assert boxes == {"cam2/0001.jpg": [TWO], "cam2/0002.jpg": [ONE]}
    assert codes(problems) == [("annotation-without-image", "skipped", file)]
    assert "cam1/0001.jpg" in problems[0].message


def test_of_two_names_that_end_alike_in_one_file_neither_is_guessed(found) -> None:
    listed = {"/x/cam1/images/1.jpg": [ONE], "/x/cam2/images/1.jpg": [TWO], "/x/a/2.jpg": [ONE], "/x/b/2.jpg": [TWO]}
    boxes, problems = found(["images/1.jpg", "photos/2.jpg"], {"annotations/all.json": coco(listed)})
    assert boxes == {}
    assert codes(problems) == [("annotation-without-image", "skipped", "annotations/all.json")] * 4


def test_a_missing_image_is_found_by_its_name_alone_only_where_its_folder_is_missing_too(found) -> None:
    files = {"annotations/all.json": coco({"cam1/1.jpg": [ONE]})}
    boxes, problems = found(["cam2/1.jpg"], files)
    assert boxes == {"cam2/1.jpg": [ONE]}
    assert codes(problems) == [("image-by-name", "noted", "annotations/all.json")]
    assert "'cam1/1.jpg'" in problems[0].message
    assert "'cam2/1.jpg'" in problems[0].message
    boxes, problems = found(["cam2/1.jpg", "cam1/2.jpg"], files)
    assert boxes == {}
    assert codes(problems) == [("annotation-without-image", "skipped", "annotations/all.json")]


def test_paths_of_another_machine_are_no_problem(found) -> None:
    listed = {"/home/me/VOC2007/JPEGImages/1.jpg": [ONE], "C:\\set\\images\\2.jpg": [TWO]}
    boxes, problems = found(["images/1.jpg", "images/2.jpg"], {"train.txt": keras(listed), "classes.txt": "face"})
    assert boxes == {"images/1.jpg": [ONE], "images/2.jpg": [TWO]}
    assert problems == []


def test_label_files_of_a_missing_image_are_not_given_to_another_folders_image(found) -> None:
    boxes, problems = found(
        ["cam1/images/2.jpg", "cam2/images/1.jpg"], {"cam1/labels/1.txt": yolo(ONE), "classes.txt": "face"}
    )
    assert boxes == {}
    assert codes(problems) == [("annotation-without-image", "skipped", "cam1/labels/1.txt")]
    boxes, problems = found([], {"cam1/labels/2.txt": yolo(TWO)})
    assert list(boxes) == ["cam1/images/2.jpg"]
    assert codes(problems) == [("annotation-without-image", "skipped", "cam1/labels/1.txt")]


def test_label_files_of_a_missing_image_are_not_given_to_another_splits_image(found) -> None:
    boxes, problems = found(
        ["images/train/9.jpg", "images/train/1.jpg"],
        {"labels/val/9.txt": yolo(ONE), "labels/train/1.txt": yolo(ONE), "data.yaml": "names: [face]\n"},
    )
    assert list(boxes) == ["images/train/1.jpg"]
    assert codes(problems) == [("annotation-without-image", "skipped", "labels/val/9.txt")]


def test_one_label_file_that_has_lost_its_image_in_a_folder_that_has_others_takes_none_elsewhere(found) -> None:
    boxes, problems = found(
        ["a.jpg", "photos_2/b.jpg"], {"labels/a.txt": yolo(ONE), "labels/b.txt": yolo(ONE), "classes.txt": "face"}
    )
    assert list(boxes) == ["a.jpg"]
    assert codes(problems) == [("annotation-without-image", "skipped", "labels/b.txt")]
