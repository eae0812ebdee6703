"""A snapshot and the shards made of it give the same classes and targets, whatever the annotations are."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from datacache import api
from datacache.core.errors import UsageError
from datacache.settings import Settings
from datacache.torch import ShardDataset, SnapshotDataset

pytestmark = pytest.mark.shared_home

_IDS = (0, 1, 2, 3, 5, 7, 8, 9, 10, 11, 13, 20, 100)
Make = Callable[[dict[str, bytes]], tuple[str, Path]]


@pytest.fixture
def make(settings: Settings, tmp_path: Path) -> Make:
    """A snapshot of these files, and its shards."""

    def made(files: dict[str, bytes]) -> tuple[str, Path]:
        folder = tmp_path / "files"
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        ref = api.create_snapshot(tmp_path.name, folder.as_uri(), settings=settings).ref
        api.shard(ref, to=str(tmp_path / "set"), max_size_bytes=20_000, processes=1, settings=settings)
        return ref, tmp_path / "set"

    return made


def _image(colour: int = 0) -> bytes:
    out = BytesIO()
    Image.new("RGB", (40, 30), (colour, 9, 9)).save(out, "JPEG")
    return out.getvalue()


def _voc(*labels: str) -> bytes:
    boxes = "".join(
        f"<object><name>{label}</name><bndbox><xmin>{n}</xmin><ymin>1</ymin><xmax>20</xmax><ymax>20</ymax></bndbox></object>"
        for n, label in enumerate(labels)
    )
    return f"<annotation><size><width>40</width><height>30</height></size>{boxes}</annotation>".encode()


def _yolo() -> dict[str, bytes]:
    """Thirteen classes without names, and numbers that none has."""
    files = {f"images/{id:03d}.jpg": _image(id) for id in _IDS}
    return files | {f"labels/{id:03d}.txt": b"%d 0.5 0.5 0.2 0.2\n" % id for id in _IDS}


def _keras() -> dict[str, bytes]:
    lines = "".join(f"images/{id:03d}.jpg 1,2,20,20,{id}\n" for id in _IDS)
    return {f"images/{id:03d}.jpg": _image(id) for id in _IDS} | {"train.txt": lines.encode()}


def _of_voc() -> dict[str, bytes]:
    labels = [("zebra", "ant"), ("cat",), ("cat", "cat"), ()]
    files = {f"JPEGImages/{n}.jpg": _image(n) for n in range(len(labels))}
    return files | {f"Annotations/{n}.xml": _voc(*each) for n, each in enumerate(labels)}


def _both() -> dict[str, bytes]:
    """Boxes and labels of whole images; a label that no box has."""
    said = [{"file_name": "0.jpg", "label": "beach"}, {"file_name": "1.jpg", "label": "cat"}]
    listed = "".join(json.dumps(each) + "\n" for each in said)
    return _of_voc() | {"JPEGImages/metadata.jsonl": listed.encode()}


@pytest.mark.parametrize("files", [_yolo, _keras, _of_voc, _both])
def test_a_snapshot_and_its_shards_have_the_same_classes_and_targets(
    make: Make, files: Callable[[], dict[str, bytes]]
) -> None:
    ref, folder = make(files())
    for target in ("auto", "detection", "classification", "path", None):
        first, second = SnapshotDataset(ref, target=target), ShardDataset(folder, target=target)
        assert first.kind == second.kind, target
        assert len(first) == len(second)
        if target not in ("path", None):
            assert first.classes == second.classes
        for number in range(len(first)):
            _expect_equal(first[number], second[number])


def _expect_equal(first: Any, second: Any) -> None:
    if isinstance(first, tuple) and isinstance(first[1], dict):
        assert first[0] == second[0]
        assert torch.equal(first[1]["boxes"], second[1]["boxes"])
        assert torch.equal(first[1]["labels"], second[1]["labels"])
    else:
        assert first == second


def test_classes_without_names_are_numbered_as_their_files_say(make: Make) -> None:
    ref, _ = make(_yolo())
    dataset = SnapshotDataset(ref)
    assert [int(dataset[number][1]["labels"][0]) for number in range(len(dataset))] == list(_IDS)
    assert dataset.classes == tuple(f"class_{id}" for id in range(101))


def test_a_class_of_boxes_is_an_images_class_where_they_are_all_of_it(make: Make) -> None:
    ref, folder = make(_of_voc())
    for dataset in (SnapshotDataset(ref, target="classification"), ShardDataset(folder, target="classification")):
        names = ["" if target < 0 else dataset.classes[target] for _, target in (dataset[n] for n in range(4))]
        assert names == ["", "cat", "cat", ""]


def test_a_missing_shard_does_not_change_what_targets_are(make: Make) -> None:
    _, folder = make({path: data for path, data in _of_voc().items() if path.endswith(".xml")} | _large(4))
    whole = ShardDataset(folder)
    assert len(whole.shards.set.shards) > 1
    (folder / whole.shards.set.shards[-1].name).unlink()
    for target in ("auto", "classification", "path"):
        dataset = ShardDataset(folder, target=target, on_error="skip")
        assert dataset.kind == ("detection" if target == "auto" else target)
        assert dataset.shards.classes.tolist() == [-1] * 4
        assert len(dataset.__getitems__(range(4))) == 4 - dataset.skipped
        assert dataset.skipped == whole.shards.set.shards[-1].samples


def _large(count: int) -> dict[str, bytes]:
    """Images of some kilobytes, so that there are several shards."""
    files = {}
    for number in range(count):
        out = BytesIO()
        Image.effect_noise((40, 30), 90 + number).resize((200, 150)).convert("RGB").save(out, "PNG")
        files[f"JPEGImages/{number}.png"] = out.getvalue()
    return files


def test_files_that_are_no_images_have_no_boxes_whatever_their_names_are(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text("words")
        (folder / f"{number}.json").write_text('{"path": "not/this", "boxes": []}')
    ref = api.create_snapshot("texts", folder.as_uri(), settings=settings).ref
    api.shard(ref, to=str(tmp_path / "set"), settings=settings)
    dataset = ShardDataset(tmp_path / "set")
    assert dataset.kind == "path"
    assert [dataset[number][1] for number in range(3)] == ["0", "1", "2"]
    with pytest.raises(UsageError, match="have no boxes"):
        ShardDataset(tmp_path / "set", target="detection")


def test_annotations_without_classes_are_no_classes(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    for path, data in {"JPEGImages/0.jpg": _image(), "Annotations/0.xml": _voc()}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    ref = api.create_snapshot("bare", folder.as_uri(), settings=settings).ref
    api.shard(ref, to=str(tmp_path / "set"), settings=settings)
    assert SnapshotDataset(ref).kind == ShardDataset(tmp_path / "set").kind == "path"
    with pytest.raises(UsageError, match="no classes"):
        SnapshotDataset(ref, target="classification")
    with pytest.raises(UsageError, match="no classes"):
        ShardDataset(tmp_path / "set", target="classification")
