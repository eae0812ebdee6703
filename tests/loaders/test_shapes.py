"""Masks, keypoints and corners as targets: what a snapshot's annotations say, in real DataLoaders."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from PIL import Image
from torch.utils.data import DataLoader

from datacache import api
from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.outline import NOTHING, Extra, Mask, Polygon, pack
from datacache.core.errors import UsageError
from datacache.loaders.selection import check_kind
from datacache.loaders.shapes import ShapeColumn
from datacache.loaders.styles import _turned
from datacache.settings import Settings
from datacache.shards.records import shapes_as_json, shapes_of_json
from datacache.torch import ShardDataset, SnapshotDataset, collate, collate_ultralytics
from tests.annotations.shapes import any_extra, cases

pytestmark = pytest.mark.shared_home
POLYGON = [10, 10, 50, 10, 50, 30, 10, 30]


def _snapshot(folder: Path, settings: Settings, *, keypoints: bool = True) -> str:
    folder.mkdir()
    images = [{"id": n, "file_name": f"{n}.png", "width": 80, "height": 60} for n in range(3)]
    for image in images:
        Image.new("RGB", (80, 60)).save(folder / str(image["file_name"]))
    cut = {"category_id": 1, "bbox": [10, 10, 40, 20], "segmentation": [POLYGON]}
    crowd = {"category_id": 1, "bbox": [0, 0, 2, 60], "segmentation": {"size": [60, 80], "counts": [0, 120, 4680]}}
    pose = {"category_id": 2, "bbox": [20, 20, 30, 30], "keypoints": [21, 22, 2, 40, 41, 1]}
    found = [{"image_id": n, "iscrowd": 0, **what} for n, what in ((0, cut), (0, pose), (1, crowd | {"iscrowd": 1}))]
    person = {"id": 2, "name": "person"} | ({"keypoints": ["a", "b"], "skeleton": [[1, 2]]} if keypoints else {})
    shared = {
        "images": images,
        "categories": [{"id": 1, "name": "thing"}, person],
        "annotations": [{"id": n, **each} for n, each in enumerate(found if keypoints else found[:1], 1)],
    }
    (folder / "instances.json").write_text(json.dumps(shared))
    return api.create_snapshot(folder.name, folder.as_uri(), settings=settings).ref


def test_masks_are_those_of_outlines_or_boxes_and_are_scaled_with_the_image(tmp_path: Path, settings: Settings):
    ref = _snapshot(tmp_path / "shapes", settings)
    dataset = pickle.loads(pickle.dumps(SnapshotDataset(ref, target="segmentation", decode="rgb", settings=settings)))
    wanted = np.zeros((3, 60, 80), np.uint8)
    wanted[0, 10:30, 10:50] = wanted[1, 20:50, 20:50] = wanted[2, :, :2] = 1
    masks = [target["masks"] for _, target in (dataset[n] for n in range(3))]
    assert [mask.shape[0] for mask in masks] == [2, 1, 0]
    assert torch.equal(torch.cat(masks[:2]), torch.from_numpy(wanted))
    halves = SnapshotDataset(ref, target="segmentation", decode="rgb", size=(30, 40), settings=settings)
    for images, targets in DataLoader(halves, batch_size=3, num_workers=1, collate_fn=collate):
        assert images.shape == (3, 30, 40, 3)
        assert [tuple(target["masks"].shape) for target in targets] == [(2, 30, 40), (1, 30, 40), (0, 30, 40)]
        assert torch.equal(targets[0]["masks"][0], torch.from_numpy(wanted[0, ::2, ::2]))
        assert targets[0]["boxes"][0].tolist() == [5, 5, 25, 15]


def test_an_outline_that_is_too_long_to_be_filled_is_filled_as_its_box():
    ends = [(10, 5000) if n % 2 else (5000, 10) for n in range(200)]
    comb = Box("comb", 10, 10, 5000, 5000, extra=Extra(Polygon(pack(v for point in ends for v in point))))
    column = ShapeColumn("segmentation", {})
    column.add(Annotation("a.png", 5010, 5010, (comb,)))
    column.finish()
    assert column.get(0)["masks"].sum() == 4990**2


def test_keypoints_and_corners_are_scaled_with_the_image(tmp_path: Path, settings: Settings):
    ref = _snapshot(tmp_path / "points", settings)
    for size, factor in (((60, 80), 1), ((120, 160), 2)):
        pose = SnapshotDataset(ref, target="pose", decode="rgb", size=size, settings=settings)[0][1]
        points = [[21 * factor, 22 * factor, 2], [40 * factor, 41 * factor, 1]]
        assert pose["keypoints"].tolist() == [[[0, 0, 0], [0, 0, 0]], points]
        assert [pose["labels"].dtype, pose["keypoints"].dtype] == [torch.int64, torch.float32]
        corners = SnapshotDataset(ref, target="obb", decode="rgb", size=size, settings=settings)[0][1]["corners"]
        for found, box in zip(corners, ((10, 10, 50, 30), (20, 20, 50, 50)), strict=True):
            left, top, right, bottom = (edge * factor for edge in box)
            assert {*map(tuple, found.tolist())} == {(left, top), (right, top), (right, bottom), (left, bottom)}
    assert SnapshotDataset(ref, target="obb", settings=settings)[2][1]["corners"].shape == (0, 4, 2)


def test_shards_give_the_targets_of_their_snapshot(tmp_path: Path, settings: Settings):
    ref = _snapshot(tmp_path / "sharded", settings)
    api.shard(ref, to=str(tmp_path / "shards"), settings=settings)
    for target in ("segmentation", "pose", "obb"):
        read = [
            SnapshotDataset(ref, target=target, decode="rgb", size=(30, 40), settings=settings),
            ShardDataset(tmp_path / "shards", target=target, decode="rgb", size=(30, 40), settings=settings),
        ]
        for (_, one), (_, other) in zip(*([each[n] for n in range(3)] for each in read), strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


@cases
@given(any_extra)
def test_shapes_in_shards_are_those_of_objects(extra: Extra):
    if isinstance(extra.outline, Mask):
        extra = extra._replace(outline=Mask(b"12", 3, 1))
    written = json.dumps(shapes_as_json(extra))
    assume("NaN" not in written)  # there are many, and checked objects have none
    again = shapes_of_json(json.loads(written), 3, 1) or NOTHING
    assert repr(again[:2]) == repr(extra[:2])


def test_targets_in_the_style_of_torchvision_have_all_that_its_models_are_evaluated_by(
    tmp_path: Path, settings: Settings
):
    ref = _snapshot(tmp_path / "vision", settings)
    for target in ("segmentation", "pose", "detection"):
        dataset = SnapshotDataset(
            ref, target=target, style="torchvision", decode="rgb", size=(30, 40), settings=settings
        )
        found = [target for _, target in DataLoader(dataset, batch_size=None)]
        assert [each["image_id"].tolist() for each in found] == [[0], [1], [2]]
        assert [each["area"].tolist() for each in found] == [[800 / 4, 900 / 4], [120 / 4], []]
        assert [each["iscrowd"].tolist() for each in found] == [[0, 0], [1], []]
        types = {name: (values.dtype, values.ndim) for name, values in found[2].items()}
        assert types.items() >= {
            "boxes": (torch.float32, 2), "labels": (torch.int64, 1), "area": (torch.float32, 1),
            "iscrowd": (torch.int64, 1), "image_id": (torch.int64, 1),
        }.items()  # fmt: skip


def test_targets_in_the_style_of_ultralytics_are_parts_of_the_image_and_make_its_batch(
    tmp_path: Path, settings: Settings
):
    ref = _snapshot(tmp_path / "styled", settings)
    batches = {}
    for target in ("detection", "segmentation", "pose", "obb"):
        dataset = SnapshotDataset(
            ref, target=target, style="ultralytics", decode="rgb", size=(30, 40), settings=settings
        )
        (batches[target],) = DataLoader(dataset, batch_size=3, num_workers=1, collate_fn=collate_ultralytics)
    for batch in batches.values():
        assert (batch["img"].shape, batch["img"].dtype) == ((3, 3, 30, 40), torch.uint8)
        assert batch["cls"].tolist() == [[0], [1], [0]]
        assert batch["batch_idx"].tolist() == [0, 0, 1]
        sides = torch.tensor([80, 60, 80, 60])
        middles = torch.tensor([[30.0, 20, 40, 20], [35, 35, 30, 30], [1, 30, 2, 60]])
        assert torch.allclose(batch["bboxes"][:, :4] * sides, middles)
    assert (batches["segmentation"]["masks"].shape, len(batches["segmentation"]["segments"])) == ((3, 30, 40), 3)
    corners = batches["segmentation"]["segments"][0] * torch.tensor([80, 60])
    assert torch.allclose(corners, torch.tensor(POLYGON, dtype=torch.float32).reshape(-1, 2))
    assert batches["obb"]["bboxes"].shape == (3, 5)
    assert torch.allclose(batches["obb"]["bboxes"][:, 4], torch.zeros(3), atol=1e-6)
    parts = batches["pose"]["keypoints"][1] * torch.tensor([80, 60, 1])
    assert torch.allclose(parts, torch.tensor([[21.0, 22, 2], [40, 41, 1]]))


def test_turned_boxes_have_their_sides_and_angle():
    turned = np.array([[[10, 10], [30, 30], [25, 35], [5, 15]], [[9, 9], [9, 4], [1, 4], [1, 9]]], np.float32)
    found = _turned(turned, np.array([100, 50], np.float32))
    root = 2**0.5
    wanted = [[0.175, 0.45, 0.2 * root, 0.1 * root, math.pi / 4], [0.05, 0.13, 0.05, 0.16, math.pi / 2]]
    assert np.allclose(found, wanted)


def test_classes_make_a_batch_of_ultralytics_and_images_of_several_sizes_none(tmp_path: Path, settings: Settings):
    for n, name in enumerate(("cat", "dog")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.new("RGB", (20 + n, 10)).save(tmp_path / "pets" / name / "a.png")
    ref = api.create_snapshot("pets", (tmp_path / "pets").as_uri(), settings=settings).ref
    dataset = SnapshotDataset(ref, target="folder", style="ultralytics", decode="rgb", settings=settings)
    with pytest.raises(UsageError, match="several sizes"):
        collate_ultralytics([dataset[0], dataset[1]])
    batch = collate_ultralytics([dataset[1]])
    assert (batch["img"].shape, batch["cls"].tolist()) == ((1, 3, 10, 21), [1])
    with pytest.raises(UsageError, match="no such style"):
        SnapshotDataset(ref, style="keras", settings=settings)


def test_targets_that_a_data_set_or_a_loader_does_not_have_are_refused(tmp_path: Path, settings: Settings):
    ref = _snapshot(tmp_path / "bare", settings, keypoints=False)
    with pytest.raises(UsageError, match="has no keypoints"):
        SnapshotDataset(ref, target="pose", settings=settings)
    with pytest.raises(UsageError, match="there is no such target"):
        SnapshotDataset(ref, target="masks", settings=settings)
    with pytest.raises(UsageError, match="only the datasets of datacache"):
        check_kind("pose")  # as of TensorFlow
