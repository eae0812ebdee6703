"""Which format a snapshot is in, where its classes are, and what its folders and lists say of splits."""

from __future__ import annotations

import json

import pytest

from datacache.annotations import split_lists
from datacache.annotations.formats import json_stream, yolo
from datacache.annotations.layout import detect, read_class_list
from datacache.annotations.pairing import file_split, folder_split
from datacache.annotations.split_lists import cut_down, read_splits
from datacache.core.errors import AnnotationError, UsageError
from tests.annotations.folders import Folder

XML = "<annotation><filename>a.jpg</filename></annotation>"
LABEL = "0 0.5 0.5 0.1 0.1\n"
COCO = json.dumps({"images": [], "annotations": [], "categories": []})
KERAS = "a.jpg 1,2,3,4,0\nb.jpg 5,6,7,8,1\n"


def layout(files, **more):
    folder = Folder(files)
    return detect(folder.manifest, folder.read, **more)


def format_of(files, **more):
    return layout(files, **more).format


@pytest.mark.parametrize(
    ("files", "format"),
    [
        ({"JPEGImages/a.jpg": "", "Annotations/a.xml": XML}, "voc"),
        ({"a.JPG": "", "a.XML": XML}, "voc"),
        ({"photos/x/a.jpg": "", "elsewhere/a.xml": XML}, "voc"),
        ({"Annotations/a.xml": XML}, "voc"),
        ({"images/a.jpg": "", "labels/a.txt": LABEL}, "yolo"),
        ({"images/train/a.jpg": "", "labels/train/a.txt": "", "data.yaml": "names: [a]"}, "yolo"),
        ({"obj_train_data/a.jpg": "", "obj_train_data/a.txt": LABEL, "train.txt": "data/obj_train_data/a.jpg"}, "yolo"),
        ({"pictures_1/a.jpg": "", "boxes_1/a.txt": LABEL}, "yolo"),
        ({"images/train_1.jpg": "", "labels/train_1.txt": LABEL}, "yolo"),
        ({"images/a.jpg": "", "annotations/instances_train.json": COCO}, "coco"),
        ({"train/a.jpg": "", "train/_annotations.coco.json": "\ufeff" + COCO}, "coco"),
        ({"images/a.jpg": "", "whatever.json": COCO}, "coco"),
        ({"images/a.jpg": "", "whatever.json": COCO.encode("utf-16")}, "coco"),
        ({"images/a.jpg": "", "train.txt": KERAS}, "keras-yolo3"),
        ({"images/a.jpg": "", "2007_train.txt": "a.jpg\n" + KERAS}, "keras-yolo3"),
        ({"images/a.jpg": "", "boxes.txt": KERAS}, "keras-yolo3"),
        ({"images/a.jpg": ""}, "none"),
        ({"images/a.jpg": "", "README.txt": LABEL, "package.json": "{}", "a.yaml": "x: 1"}, "none"),
        ({"a.jpg": "", "a.txt": "a photo of a cat"}, "none"),
        ({"a.jpg": "", "a.json": '{"version": "5.0", "shapes": [], "imagePath": "a.jpg"}'}, "labelme"),
        ({"images/a.jpg": "", "labels/a.json": '{"shapes": [ ]}'}, "labelme"),
        ({"a.jpg": "", "a.json": '{"annotation": []}'}, "none"),
        ({"images/a.jpg": "", "annotations.xml": "<annotations>\n <version>1.1</version></annotations>"}, "cvat"),
        ({"images/a.jpg": "", "annotations.xml": "<annotations><image/></annotations>"}, "none"),
    ],
)
def test_the_format_is_recognised_by_names_and_content(files, format):
    assert format_of(files) == format


def test_annotations_in_two_formats_are_an_error_until_one_is_chosen():
    files = {"images/a.jpg": "", "Annotations/a.xml": XML, "labels/a.txt": LABEL, "instances.json": COCO}
    with pytest.raises(UsageError, match=r"coco \(1 file\) and voc \(1 file\) and yolo \(1 file\)") as caught:
        layout(files)
    assert caught.value.hint == "Choose one with --format coco|voc|yolo"
    for format in ("voc", "yolo", "coco", "none"):
        assert format_of(files, format=format) == format


def test_a_format_that_is_not_there_is_an_error_that_says_what_is():
    with pytest.raises(UsageError, match=r"no annotations in the format yolo; it has 2 images, 1 \.xml file"):
        layout({"a.jpg": "", "b.png": "", "a.xml": XML}, format="yolo")
    with pytest.raises(UsageError, match="no such format"):
        layout({"a.jpg": ""}, format="darknet")


def test_a_format_that_is_asked_for_needs_no_proof():
    assert format_of({"a.jpg": "", "a.txt": "not yet annotated"}, format="yolo") == "yolo"
    assert format_of({"a.jpg": "", "b.xml": "<broken"}, format="voc") == "voc"


def test_a_snapshot_of_neither_images_nor_annotations_is_an_error():
    for files in ({}, {"README.md": ""}, {"__MACOSX/._a.jpg": "", "images/": "", ".DS_Store": ""}):
        with pytest.raises(UsageError, match="the snapshot has no images and no annotations"):
            layout(files)


def test_files_of_other_systems_and_masks_are_not_counted():
    found = layout(
        {
            "JPEGImages/a.jpg": "",
            "JPEGImages/._a.jpg": "",
            "__MACOSX/JPEGImages/a.jpg": "",
            "JPEGImages/.ipynb_checkpoints/a-checkpoint.jpg": "",
            "SegmentationClass/a.png": "",
            "SegmentationObject/a.png": "",
            "Annotations/a.xml": XML,
            "Annotations/._a.xml": "",
        }
    )
    assert (found.images, found.annotation_files) == (1, 1)


def test_images_are_counted_in_all_spellings_of_their_extensions():
    assert (
        layout(["a.jpg", "b.JPG", "c.Jpeg", "d.png", "e.webp", "f.tiff", "g.bmp", "h.txt", "i.jpg.bak", "jpg"]).images
        == 7
    )


def test_what_is_an_annotation_depends_on_the_format():
    files = {
        "images/a.jpg": "",
        "labels/a.txt": LABEL,
        "labels/classes.txt": "a",
        "train.txt": "images/a.jpg",
        "readme.txt": "",
    }
    found = layout(files)
    assert [path for path in Folder(files) if found.is_annotation(path)] == [b"labels/a.txt"]
    assert found.annotation_files == 1
    found = layout({"a.jpg": "", "a.XML": XML, "b.txt": "", "__MACOSX/a.xml": ""})
    assert [found.is_annotation(path) for path in (b"a.XML", b"b.txt", b"__MACOSX/a.xml")] == [True, False, False]
    assert not layout({"a.jpg": "", "instances.json": COCO}).is_annotation(b"instances.json")


def test_masks_of_all_things_are_not_read_where_there_are_instances():
    names = ("captions_val2017", "instances_val2017", "panoptic_val2017")
    files = {"a.jpg": "", **{f"annotations/{name}.json": COCO for name in names}}
    assert layout(files).lists == (b"annotations/captions_val2017.json", b"annotations/instances_val2017.json")
    files = {"a.jpg": "", "annotations/panoptic_val2017.json": COCO}
    assert layout(files).lists == (b"annotations/panoptic_val2017.json",)


def test_a_large_snapshot_is_recognised_by_a_sample():
    files = {f"images/{n:05}.jpg": "" for n in range(3000)} | {f"labels/{n:05}.txt": LABEL for n in range(3000)}
    found = layout(files | {"train.txt": "".join(f"./images/{n:05}.jpg\n" for n in range(3000))})
    assert (found.format, found.images, found.annotation_files) == ("yolo", 3000, 3000)
    assert found.image_lists == (b"train.txt",)
    found = layout(
        {f"images/train_{n:05}.jpg": "" for n in range(900)} | {f"labels/train_{n:05}.txt": "" for n in range(900)}
    )
    assert (found.format, found.annotation_files, found.image_lists) == ("yolo", 900, ())


# --- classes --------------------------------------------------------------------------------------------------------


def classes(files):
    folder = Folder({"images/a.jpg": "", "labels/a.txt": LABEL, **files})
    return read_class_list(folder.read, detect(folder.manifest, folder.read))


def test_classes_are_read_from_data_yaml_before_lists():
    assert classes({"data.yaml": "names: [a, b]", "classes.txt": "x"}).names == ("a", "b")
    assert classes({"my.yml": "nc: 1\nnames: [a]\n", "other.yaml": "x: 1"}).names == ("a",)
    assert classes({"data.yaml": "names: [a]", "sub/data.yaml": "names: [b]"}).names == ("a",)
    assert classes({"data.yaml": "names: [a]\nkpt_shape: [2, 3]"}).pose


@pytest.mark.parametrize(
    "name",
    [
        "classes.txt",
        "obj.names",
        "labels/classes.txt",
        "CLASSES.TXT",
        "voc_classes.txt",
        "_darknet.labels",
        "x/coco.names",
    ],
)
def test_classes_are_read_from_any_of_the_usual_lists(name):
    assert classes({name: "a\nb\n"}).names == ("a", "b")


def test_lists_that_differ_are_an_error_and_lists_that_agree_are_not():
    assert classes({"labels/train/classes.txt": "a\nb", "labels/val/classes.txt": "a\nb\n"}).names == ("a", "b")
    with pytest.raises(
        UsageError, match=r"labels/train/classes.txt and labels/val/classes.txt list different"
    ) as caught:
        classes({"labels/train/classes.txt": "a\nb", "labels/val/classes.txt": "b\na\n"})
    assert "--classes" in caught.value.hint
    with pytest.raises(UsageError, match="list different"):
        classes({"a.yaml": "names: [a]", "b.yaml": "names: [b]"})


def test_without_a_list_there_are_no_names_and_a_problem():
    found = classes({})
    assert found.names == ()
    assert [(problem.code, problem.action) for problem in found.problems] == [("classes-missing", "noted")]


def test_a_broken_data_yaml_is_an_error():
    with pytest.raises(AnnotationError, match=r"data.yaml does not say the classes"):
        classes({"data.yaml": "names: 5"})


def test_annotations_that_name_their_classes_need_no_list():
    folder = Folder({"a.jpg": "", "a.xml": XML, "classes.txt": "x"})
    assert read_class_list(folder.read, detect(folder.manifest, folder.read)).names == ()


# --- splits ---------------------------------------------------------------------------------------------------------


def splits(files, images, source=b""):
    folder = Folder({**files, **dict.fromkeys(images, "")})
    found = read_splits(folder.read, detect(folder.manifest, folder.read))
    problems = [(problem.code, problem.action, problem.file, problem.line) for problem in found.problems]
    return [found.of(path.encode(), source) for path in images], problems, found.names


VOC = [f"JPEGImages/{name}.jpg" for name in ("a", "b", "c", "d e")]


def voc(lists, images=VOC):
    return splits(
        {"Annotations/a.xml": XML, **{f"ImageSets/Main/{name}": data for name, data in lists.items()}}, images
    )


def test_image_sets_of_voc_are_splits():
    lists = {"train.txt": "a\n", "val.txt": "b\r\n\r\n", "test.txt": "\ufeffc.jpg\nd e", "trainval.txt": "a\nb\n"}
    assert voc(lists) == (["train", "val", "test", "test"], [], ("train", "val", "test"))


def test_lists_of_single_classes_and_of_other_tasks_are_no_splits():
    lists = {
        "train.txt": "a\n",
        "aeroplane_train.txt": "b 1\nc -1\n",
        "default.txt": "c",
    }
    layout = {"ImageSets/Layout/val.txt": "c 1", "ImageSets/val.txt": "b"}
    lists = {f"ImageSets/Main/{name}": data for name, data in lists.items()}
    assert splits({"Annotations/a.xml": XML, **lists, **layout}, VOC)[0] == ["train", "", "", ""]
    assert voc({"train.txt": "a  1\nb -1\n"})[0] == ["train", "train", "", ""]
    assert splits({"Annotations/a.xml": XML, "ImageSets/train.txt": "a"}, VOC)[0] == ["train", "", "", ""]


def test_a_column_of_ones_and_zeros_is_no_part_of_the_names():
    assert voc({"train.txt": "a 1\n# more\nb 0\n"})[0][:2] == ["train", "train"]
    assert voc({"train.txt": "d 0\nd 1\n"}, ["JPEGImages/d 0.jpg", "JPEGImages/d 1.jpg"])[0] == ["train", "train"]


def test_an_odd_line_in_a_list_is_passed_over_and_reported():
    files = {"a.txt": LABEL, "train.txt": "data/a.jpg\n", "val.txt": "# made by a tool\ndata/b.jpg\ndata/c.jpg\n?\n"}
    folder = Folder({**files, "a.jpg": "", "b.jpg": "", "c.jpg": ""})
    found = read_splits(folder.read, detect(folder.manifest, folder.read))
    assert [found.of(path) for path in (b"a.jpg", b"b.jpg", b"c.jpg")] == ["train", "val", "val"]
    assert [(problem.code, problem.action, problem.file, problem.line) for problem in found.problems] == [
        ("split-line", "noted", "val.txt", 1),
        ("split-line", "noted", "val.txt", 4),
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_list_is_read_line_by_line_and_an_overlong_line_is_left_out(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "MAX_ELEMENT", 100)
    text = f"a  -1\r\n{'x' * 200}\r\rb   1\n\u2028c  0\n"
    images = {"ImageSets/Main/train.txt": text.encode(encoding)}
    images |= {f"JPEGImages/{name}.jpg": b"" for name in "ab"} | {f"Annotations/{name}.xml": XML for name in "ab"}
    folder = Folder(images)
    opened: list[bytes] = []

    def read_none(path: bytes, limit: int | None = None, /) -> bytes:
        raise AssertionError

    found = read_splits(
        read_none, detect(folder.manifest, folder.read), lambda path: opened.append(path) or folder[path]
    )
    assert opened == [b"ImageSets/Main/train.txt"]
    assert [found.of(f"JPEGImages/{name}.jpg".encode()) for name in "ab"] == ["train", "train"]
    assert [problem[:4] for problem in found.problems] == [("line-malformed", "skipped", "ImageSets/Main/train.txt", 2)]
    assert cut_down(text.encode(encoding), [b"JPEGImages/b.jpg"]) == b"b   1\n"


def test_of_a_list_in_utf_16_the_beginning_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_lists, "_MAX_RECODED", 12)
    folder = Folder(
        {"ImageSets/Main/train.txt": "a\nb\nlost\n".encode("utf-16"), "JPEGImages/a.jpg": b"", "a.xml": XML}
    )
    found = read_splits(folder.read, detect(folder.manifest, folder.read))
    assert found.of(b"JPEGImages/a.jpg") == "train"
    assert [(problem.code, problem.action) for problem in found.problems] == [("line-malformed", "skipped")]


def test_entries_that_name_no_image_are_reported_once_for_each_list():
    folder = Folder({"Annotations/a.xml": XML, "a.jpg": "", "ImageSets/Main/train.txt": "x\na\ny\nz 1\n"})
    found = read_splits(folder.read, detect(folder.manifest, folder.read))
    found.found(b"a.jpg")
    assert [(problem.code, problem.line, problem.message) for problem in found.unmatched()] == [
        ("split-line", 1, "'x' names no image of the snapshot, nor do 2 more lines; passed over")
    ]


def test_an_image_in_two_splits_is_in_the_first_and_reported():
    found, problems, _ = voc({"val.txt": "b\na\n", "train.txt": "a\n", "test.txt": "b\n"})
    assert found == ["train", "val", "", ""]
    assert problems == [
        ("split-repeated", "repaired", "ImageSets/Main/val.txt", 2),
        ("split-repeated", "repaired", "ImageSets/Main/test.txt", 1),
    ]


def test_trainval_counts_only_where_train_or_val_is_missing():
    assert voc({"trainval.txt": "a\nb\n", "test.txt": "c"})[0] == ["train", "train", "test", ""]
    assert voc({"trainval.txt": "a\nb\n", "train.txt": "a"})[0] == ["train", "val", "", ""]
    assert voc({"trainval.txt": "a\nb\n", "val.txt": "a"})[0] == ["val", "train", "", ""]
    assert voc({"trainval.txt": "a\nb\nc", "val.txt": "a", "train.txt": "b"})[0] == ["val", "train", "", ""]


def test_lists_of_paths_are_splits_wherever_they_were_written():
    images = ["images/x/1.jpg", "images/y/1.jpg", "images/y/2.jpg", "images/y/3.jpg"]
    lists = {
        "labels/x/1.txt": LABEL,
        "train.txt": "/home/me/data/images/x/1.jpg\n./images/y/2.jpg\n",
        "valid.txt": "C:\\data\\images\\y\\1.jpg\n",
    }
    assert splits(lists, images) == (["train", "val", "train", ""], [], ("train", "val"))


def test_a_list_of_paths_that_is_called_after_no_split_is_no_split():
    images = ["images/train/1.jpg", "images/val/2.jpg"]
    files = {"labels/train/1.txt": LABEL, "bad.txt": "images/train/1.jpg\n"}
    assert splits(files, images)[0] == ["train", "val"]
    files["trainval.txt"] = "images/train/1.jpg\n"
    assert splits(files, images)[0] == ["train", ""]


def test_folders_named_after_splits_are_splits():
    images = ["images/train/a.jpg", "images/val/b.jpg", "images/test/sub/c.jpg"]
    assert splits({"labels/train/a.txt": LABEL}, images)[0] == ["train", "val", "test"]
    images = ["train/images/a.jpg", "valid/images/b.jpg", "x/c.jpg"]
    assert splits({"train/labels/a.txt": LABEL}, images)[0] == ["train", "val", ""]


def test_a_folder_called_test_alone_is_no_split():
    assert splits({"test/a.txt": LABEL}, ["test/a.jpg"]) == ([""], [], ())


def test_folders_that_data_yaml_names_are_splits():
    images = ["images/part1/a.jpg", "images/part2/b.jpg", "images/part3/c.jpg"]
    yaml = "train: ./images/part1\nval: [images/part2/]\nnames: [x]\n"
    assert splits({"labels/part1/a.txt": LABEL, "data.yaml": yaml}, images)[0] == ["train", "val", ""]
    both = yolo.data_yaml({"train": "images"}, ["x"]).decode()
    assert splits({"labels/part1/a.txt": LABEL, "data.yaml": both}, images)[0] == ["", "", ""]


def test_files_of_coco_and_keras_are_splits():
    files = {"annotations/instances_train2017.json": COCO, "annotations/instances_val2017.json": COCO}
    assert splits(files, ["a.jpg"], b"annotations/instances_val2017.json") == (["val"], [], ("train", "val"))
    files = {"2007_train.txt": KERAS, "2007_test.txt": KERAS}
    assert splits(files, ["a.jpg"], b"2007_test.txt") == (["test"], [], ("train", "test"))


def test_splits_are_recognised_in_names():
    assert [
        folder_split(path) for path in (b"a/TRAIN/images/x", b"val2017/x", b"images/training/a/x", b"a/test/b/c/x")
    ] == [
        "train",
        "val",
        "train",
        "",
    ]
    names = (b"instances_val2017.json", b"trainval.txt", b"train_val.txt", b"valid/_annotations.coco.json", b"x.json")
    assert [file_split(name) for name in names] == ["val", "", "", "val", ""]
