"""Which annotation belongs to which image, and which image a name means."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datacache.annotations.layout import detect
from datacache.annotations.pairing import Pairing, choose_image, is_image, pair_leftovers
from datacache.conversion.source import NamedImages
from tests.annotations.folders import Folder


def pairing(paths, suffix=b".xml"):
    return Pairing(Folder(paths).manifest, suffix)


@pytest.mark.parametrize(
    ("image", "annotation"),
    [
        ("a.jpg", "a.xml"),
        ("a.JPG", "a.XML"),
        ("x/y/a.jpg", "x/y/a.xml"),
        ("JPEGImages/a.jpg", "Annotations/a.xml"),
        ("VOC2012/JPEGImages/a.jpg", "VOC2012/Annotations/a.xml"),
        ("images/a.jpg", "annotations/a.xml"),
        ("IMAGES/a.jpg", "ANNOTATIONS/a.xml"),
        ("Images/a.jpg", "xmls/a.xml"),
        ("images/train/cam 1/a.jpg", "annotations/train/cam 1/a.xml"),
        ("train/images/a.jpg", "train/annotations/a.xml"),
        ("train/a.jpg", "train/Annotations/a.xml"),
        ("a.jpg", "annotations/a.xml"),
        ("images/images/a.jpg", "images/annotations/a.xml"),
        ("a.v2.jpg", "a.v2.xml"),
        ("a.jpg", "a.jpg.xml"),
        ("images/a.png", "labels/a.PNG.xml"),
        ("口罩/é a.jpg", "口罩/é a.xml"),
        ("caf\udce9.jpg", "caf\udce9.xml"),
    ],
)
def test_an_image_and_its_annotation_find_each_other(image, annotation):
    pairs = pairing([image, annotation, "unrelated/b.jpg", "unrelated/c.xml"])
    image, annotation = (path.encode("utf-8", "surrogateescape") for path in (image, annotation))
    assert pairs.annotation_of(image) == annotation
    assert pairs.images_of(annotation) == (image,)


@pytest.mark.parametrize(
    ("image", "annotation"),
    [
        ("a.jpg", "b.xml"),
        ("a.jpg", "A.xml"),
        ("a.jpg", "a.txt"),
        ("a.jpg", "a.b.xml"),
        ("x/a.jpg", "y/a.xml"),
        ("images/x/a.jpg", "annotations/a.xml"),
        ("a.txt", "a.xml"),
        ("._a.jpg", "._a.xml"),
    ],
)
def test_what_does_not_belong_together_is_not_paired(image, annotation):
    assert pairing([image, annotation]).images_of(annotation.encode()) == ()


def test_labels_of_yolo_lie_beside_images_or_under_labels():
    paths = [
        "images/train/a.jpg",
        "labels/train/a.txt",
        "obj_train_data/b.jpg",
        "obj_train_data/b.txt",
        "labels/train/a.xml",
    ]
    pairs = pairing(paths, b".txt")
    assert pairs.annotation_of(b"images/train/a.jpg") == b"labels/train/a.txt"
    assert pairs.annotation_of(b"obj_train_data/b.jpg") == b"obj_train_data/b.txt"


def test_the_annotation_in_the_same_folder_goes_first():
    pairs = pairing(["images/a.jpg", "images/a.xml", "annotations/a.xml"])
    assert pairs.annotation_of(b"images/a.jpg") == b"images/a.xml"
    assert pairs.images_of(b"annotations/a.xml") == ()


def test_images_that_differ_only_in_their_extension_share_an_annotation():
    pairs = pairing(["JPEGImages/a.jpg", "JPEGImages/a.png", "JPEGImages/a.JPG", "Annotations/a.xml"])
    assert pairs.images_of(b"Annotations/a.xml") == (b"JPEGImages/a.JPG", b"JPEGImages/a.jpg", b"JPEGImages/a.png")
    pairs = pairing(["a.jpg", "a.png", "a.png.xml", "a.xml"])
    assert pairs.images_of(b"a.xml") == (b"a.jpg",)
    assert pairs.images_of(b"a.png.xml") == (b"a.png",)


def test_a_folder_that_begins_like_an_image_is_passed_over():
    paths = ["data.jpg", "data.xml", *[f"data.v2/{n}.jpg" for n in range(500)]]
    pairs = pairing(paths)
    assert pairs.annotation_of(b"data.jpg") == b"data.xml"
    assert pairs.images_of(b"data.xml") == (b"data.jpg",)


def choose(name, *images):
    image, problems = choose_image(name, [image.encode() for image in images], "a.xml")
    return image.decode(), [(problem.code, problem.action, problem.file) for problem in problems]


def test_the_name_in_the_annotation_decides_between_images():
    assert choose("a.png", "x/a.jpg", "x/a.png") == ("x/a.png", [])
    assert choose("C:\\data\\a.PNG", "a.jpg", "a.png") == ("a.png", [])
    assert choose(" /data/a.jpg", "a.JPG", "a.jpg") == ("a.jpg", [])
    assert choose("anything.jpg", "a.png") == ("a.png", [])


def test_without_a_name_that_fits_the_first_image_is_taken_and_reported():
    for name in ("", "a", "b.png", "\ud800"):
        assert choose(name, "a.png", "a.jpg") == ("a.jpg", [("image-ambiguous", "noted", "a.xml")])
    assert choose("a.png", "y/a.png", "x/a.png", "a.jpg") == ("x/a.png", [("image-ambiguous", "noted", "a.xml")])


def test_leftovers_are_paired_by_names_that_are_there_once():
    images = [b"x/a.jpg", b"x/b.jpg", b"x/c.jpg", b"y/c.jpg", b"x/d.jpg", b"x/f.jpg"]
    annotations = [b"z/a.xml", b"z/c.xml", b"z/d.xml", b"w/d.xml", b"z/e.xml", b"z/f.jpg.xml"]
    assert pair_leftovers(images, annotations) == {b"z/a.xml": b"x/a.jpg", b"z/f.jpg.xml": b"x/f.jpg"}
    assert pair_leftovers([], []) == {}


parts = st.sampled_from(["images", "labels", "Annotations", "JPEGImages", "a", "b", "train"])
names = st.sampled_from(["a.jpg", "a.JPG", "a.png", "b.jpg", "a.xml", "a.XML", "b.xml", "a.jpg.xml", "a.b.jpg", "a."])
paths = st.builds(lambda folders, name: "/".join([*folders, name]), st.lists(parts, max_size=3), names)


@given(st.lists(paths, unique=True, min_size=1, max_size=12))
@settings(max_examples=250, deadline=None)
def test_both_directions_agree(paths):
    pairs = pairing(paths)
    by_image = {}
    for path in map(str.encode, paths):
        annotation = pairs.annotation_of(path) if is_image(path) else None
        if annotation is not None:
            by_image.setdefault(annotation, set()).add(path)
    for path in map(str.encode, paths):
        if path.lower().endswith(b".xml"):
            assert set(pairs.images_of(path)) == by_image.get(path, set())


# --- names in files of many images ----------------------------------------------------------------------------------


def find(images, name, file="annotations/instances.json"):
    folder = Folder({**dict.fromkeys(images, b""), file: b'{"images": []}'})
    found = NamedImages(folder.manifest, detect(folder.manifest, folder.read, format="coco")).named(name, file.encode())
    return None if found is None else folder.manifest.path(found.row).decode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("image", "name", "file"),
    [
        ("a.jpg", "a.jpg", "instances.json"),
        ("images/a.jpg", "a.jpg", "annotations/instances.json"),
        ("images/a.jpg", "images/a.jpg", "annotations/instances.json"),
        ("images/a.jpg", "/home/me/set/images/a.jpg", "annotations/instances.json"),
        ("images/a.jpg", "C:\\set\\images\\a.jpg", "annotations/instances.json"),
        ("images/a.jpg", "./images/a.jpg", "annotations/instances.json"),
        ("images/a.jpg", "../images/a.jpg", "annotations/instances.json"),
        ("images/x/a.jpg", "x/a.jpg", "annotations/instances.json"),
        ("train2017/a.jpg", "a.jpg", "annotations/instances_train2017.json"),
        ("images/val/a.jpg", "a.jpg", "annotations/instances_val.json"),
        ("train/a.jpg", "a.jpg", "train/_annotations.coco.json"),
        ("valid/images/a.jpg", "a.jpg", "annotations/val.json"),
        ("photos/deep/down/a.jpg", "a.jpg", "annotations/instances.json"),
        ("caf\udce9.jpg", "caf\udce9.jpg", "instances.json"),
        ("a\\b.jpg", "a\\b.jpg", "instances.json"),
    ],
)
def test_a_name_is_found_wherever_the_images_lie(image, name, file):
    assert find([image, "other/z.jpg"], name, file) == image


def test_the_images_of_a_files_own_split_go_first():
    images = ["images/train/a.jpg", "images/val/a.jpg"]
    assert find(images, "a.jpg", "annotations/instances_val.json") == "images/val/a.jpg"
    assert find(images, "train/a.jpg", "annotations/all.json") == "images/train/a.jpg"


def test_an_image_of_another_split_or_one_of_several_is_not_taken():
    assert find(["images/train/a.jpg", "images/val/b.jpg"], "a.jpg", "annotations/instances_val.json") is None
    assert find(["x/a.jpg", "y/a.jpg"], "a.jpg") is None
    assert find(["x/a.jpg", "y/a.jpg"], "somewhere/y/a.jpg") == "y/a.jpg"


@pytest.mark.parametrize("name", ["", "/", "..", "b.jpg", "a.jpg/", "\ud800.jpg", "images", "instances.json", "\0"])
def test_a_name_of_no_image_is_none(name):
    assert find(["images/b.png"], name) is None


@given(st.text(max_size=20))
@settings(max_examples=300, deadline=None)
def test_no_name_raises(name):
    assert find(["images/b.png"], name) in (None, "images/b.png")
