"""Subsets: some of a snapshot's images with what belongs to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import datacache
from datacache import api
from datacache.core.errors import UsageError
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings

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
