"""Subsets: some of a snapshot's images with what belongs to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

import datacache
from datacache import api
from datacache.core.errors import UsageError
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings
from tests.promises import promise

Make = Callable[..., str]
Files = Callable[[str], dict[str, bytes]]
CHOSEN = ("000003", "000017", "000029")


@pytest.fixture
def subset(settings: Settings) -> Callable[..., str]:
    def run(ref: str, images: list[str], name: str = "few", **options: object) -> str:
        return datacache.subset(ref, images, name=name, settings=settings, **options).ref  # type: ignore[arg-type]

    return run


def test_images_and_annotations_come_by_reference_and_lists_are_cut_down(
    drawn: Path, make: Make, subset: Callable[..., str], files: Files, opened: Callable[[str], Snapshot]
) -> None:
    ref = make(drawn)
    few = subset(ref, [f"JPEGImages/{name}.jpg" for name in CHOSEN], parameters={"label": ["with_mask"]})
    got = files(few)
    assert {path for path in got if "ImageSets" not in path} == {
        f"{folder}/{name}.{suffix}"
        for name in CHOSEN
        for folder, suffix in (("JPEGImages", "jpg"), ("Annotations", "xml"))
    }
    with opened(ref) as source, opened(few) as result:
        for path in got:
            if "ImageSets" not in path:
                assert result.object_ref(path) == source.object_ref(path)
        assert result.record.lineage is not None
        assert result.record.lineage.command == "query"
        assert result.record.lineage.parameters == {"label": ["with_mask"]}
        assert result.record.lineage.inputs == (source.ref,)
    for split in ("train", "val", "test"):
        listed = (drawn / "ImageSets" / "Main" / f"{split}.txt").read_text().split()
        assert got[f"ImageSets/Main/{split}.txt"].decode().split() == [name for name in listed if name in CHOSEN]


def test_a_subset_of_yolo_data_keeps_data_yaml_and_the_labels(
    drawn: Path, make: Make, subset: Callable[..., str], files: Files, settings: Settings
) -> None:
    yolo = datacache.convert(make(drawn), to="yolo", name="yolo", split="none", settings=settings).record.ref
    few = files(subset(yolo, [f"images/{name}.jpg" for name in CHOSEN]))
    whole = files(yolo)
    paths = {"data.yaml"} | {f"{f}/{n}.{s}" for n in CHOSEN for f, s in (("images", "jpg"), ("labels", "txt"))}
    assert few == {path: whole[path] for path in paths}


def test_a_subset_of_coco_data_has_a_json_of_its_images(
    drawn: Path, make: Make, subset: Callable[..., str], files: Files, settings: Settings
) -> None:
    coco = datacache.convert(make(drawn), to="coco", name="coco", split="none", settings=settings).record.ref
    few = files(subset(coco, [f"images/{name}.jpg" for name in CHOSEN]))
    whole = json.loads(files(coco)["annotations/instances.json"])
    part = json.loads(few["annotations/instances.json"])
    assert [image["file_name"] for image in part["images"]] == [f"{name}.jpg" for name in CHOSEN]
    names = {image["id"]: image["file_name"] for image in whole["images"]}
    expected = [found["bbox"] for found in whole["annotations"] if names[found["image_id"]][:6] in CHOSEN]
    assert [found["bbox"] for found in part["annotations"]] == expected


def test_a_subset_of_a_video_keeps_its_tracks(
    tmp_path: Path, make: Make, subset: Callable[..., str], files: Files
) -> None:
    folder = tmp_path / "video" / "train"
    folder.mkdir(parents=True)
    for frame in range(3):
        Image.new("RGB", (10, 10)).save(folder / f"frame_{frame:06d}.png")
    boxes = "".join(f'<box frame="{n}" xtl="1" ytl="1" xbr="9" ybr="{7 + n}"/>' for n in range(3))
    video = f'<annotations><version>1.1</version><track id="4" label="hat">{boxes}</track></annotations>'
    (folder.parent / "annotations.xml").write_text(video)
    few = files(subset(make(folder.parent), ["train/frame_000000.png", "train/frame_000002.png"]))
    assert b'<track id="4" label="hat"' in few["annotations.xml"]
    assert {*few} == {"annotations.xml", "images/frame_000000.png", "images/frame_000002.png"}


@promise("A subset keeps what it needs when its source snapshot is gone")
def test_the_subset_of_a_subset_still_has_its_packs_when_the_others_are_gone(
    drawn: Path, make: Make, subset: Callable[..., str], files: Files, settings: Settings
) -> None:
    yolo = datacache.convert(make(drawn), to="yolo", name="yolo", split="none", settings=settings).record
    few = subset(yolo.ref, [f"images/{name}.jpg" for name in CHOSEN])
    before = files(few)
    catalog = datacache.open_catalog(settings)
    catalog.remove_snapshot("yolo", yolo.id)
    api.collect_garbage(grace_s=0, settings=settings)
    shutil.rmtree(settings.home / "ssd", ignore_errors=True)
    assert files(few) == before
    assert any(path.startswith("labels/") for path in before)
    catalog.close()


def test_a_subset_of_nothing_is_refused(drawn: Path, make: Make, subset: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match="no image fits"):
        subset(make(drawn), [])


def test_names_with_spaces_marks_and_other_folders_of_the_same_name_keep_their_splits(
    faces: Path, make: Make, subset: Callable[..., str], files: Files
) -> None:
    for old, new in (("000001", "my image 1"), ("000002", "my image 2")):
        (faces / "JPEGImages" / f"{old}.jpg").rename(faces / "JPEGImages" / f"{new}.jpg")
        (faces / "Annotations" / f"{old}.xml").rename(faces / "Annotations" / f"{new}.xml")
    lists = faces / "ImageSets" / "Main"
    (lists / "train.txt").write_text("\ufeffmy image 1\nmy image 2\n000003\n")
    (lists / "val.txt").write_bytes("000004\n000005\n".encode("utf-16"))
    (lists / "test.txt").write_text("")
    (lists / "trainval.txt").unlink()
    few = files(subset(make(faces), [f"JPEGImages/{n}.jpg" for n in ("my image 1", "000003", "000004")]))
    assert few["ImageSets/Main/train.txt"] == b"my image 1\n000003\n"
    assert few["ImageSets/Main/val.txt"] == b"000004\n"


def test_an_annotation_goes_with_the_image_it_is_of_and_no_other(
    faces: Path, make: Make, subset: Callable[..., str], files: Files
) -> None:
    with Image.open(faces / "JPEGImages" / "000001.jpg") as image:
        image.save(faces / "JPEGImages" / "000001.png")
    shutil.rmtree(faces / "ImageSets")
    got = files(subset(make(faces), ["JPEGImages/000001.png"]))
    assert set(got) == {"JPEGImages/000001.png"}


def test_labels_of_whole_images_are_cut_down_too(
    faces: Path, make: Make, subset: Callable[..., str], files: Files
) -> None:
    lines = [json.dumps({"file_name": f"JPEGImages/{n:06}.jpg", "label": "x"}) + "\n" for n in (1, 2, 3)]
    (faces / "metadata.jsonl").write_text("".join(lines))
    few = files(subset(make(faces), ["JPEGImages/000002.jpg"]))
    assert few["metadata.jsonl"].decode() == lines[1]


def test_a_path_that_is_no_image_is_refused_by_name(drawn: Path, make: Make, subset: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match=r"JPEGImages/none\.jpg"):
        subset(make(drawn), ["JPEGImages/000001.jpg", "JPEGImages/none.jpg"])


def test_coco_images_in_no_split_are_in_the_subset_all_the_same(
    faces: Path, make: Make, subset: Callable[..., str], files: Files, settings: Settings
) -> None:
    coco = datacache.convert(make(faces), to="coco", name="coco", split="train=0.5,val=0.5", settings=settings).record
    whole = files(coco.ref)
    folder = faces.parent / "with-more"
    for path, data in whole.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    shutil.copy(faces / "JPEGImages" / "000001.jpg", folder / "images" / "more.jpg")
    listed = next(path for path in whole if path.endswith(".jpg"))
    few = files(subset(make(folder, "more"), [listed, "images/more.jpg"]))
    assert sum(path.endswith(".jpg") for path in few) == 2
