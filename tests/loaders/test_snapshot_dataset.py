"""`SnapshotDataset` in real DataLoaders: what samples are, targets, batches, errors, workers of both kinds."""

from __future__ import annotations

import pickle
import shutil
import tracemalloc
import xml.etree.ElementTree as ET
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from datacache import api
from datacache.annotations.model import Annotation, Box
from datacache.annotations.query import Query
from datacache.conversion.index import Reading
from datacache.core.errors import (
    AnnotationError,
    CorruptManifestError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    UsageError,
)
from datacache.core.ids import BLOCK_BYTES
from datacache.loaders.selection import BoxColumns, select
from datacache.loaders.tuning.clock import Clocks, Measured
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.torch import PackedBatch, ShardDataset, SnapshotDataset, collate
from tests.loaders.conftest import COUNT, read_until_here
from tests.promises import promise

pytestmark = pytest.mark.shared_home


def _images(folder: Path) -> list[Path]:
    return sorted((folder / "JPEGImages").iterdir())


def _boxes(folder: Path, image: Path) -> list[tuple[str, list[float]]]:
    root = ET.parse(folder / "Annotations" / f"{image.stem}.xml").getroot()
    found = []
    for thing in root.iter("object"):
        box = thing.find("bndbox")
        assert box is not None
        found.append(
            (thing.findtext("name", ""), [float(box.findtext(side, "")) for side in ("xmin", "ymin", "xmax", "ymax")])
        )
    return found


class _Flip:
    """A transform that can be pickled."""

    def __call__(self, image: torch.Tensor, target: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return image.flip(1), target["labels"]


@promise("A sample is the snapshot's bytes with the boxes of its annotation")
def test_samples_are_the_images_with_their_boxes_in_path_order(faces_ref: str, drawn_faces: Path) -> None:
    dataset = SnapshotDataset(faces_ref)
    assert len(dataset) == COUNT
    assert dataset.kind == "detection"
    assert dataset.classes == ("with_mask", "without_mask")
    for number, file in enumerate(_images(drawn_faces)):
        image, target = dataset[number]
        assert image == file.read_bytes()
        assert isinstance(image, bytes)
        expected = _boxes(drawn_faces, file)
        assert [dataset.classes[label] for label in target["labels"].tolist()] == [label for label, _ in expected]
        assert target["boxes"].tolist() == [box for _, box in expected]
        assert dataset.path(number) == f"JPEGImages/{file.name}"


def test_numbers_count_from_the_end_and_end(faces_ref: str) -> None:
    dataset = SnapshotDataset(faces_ref, target=None)
    assert dataset[-1] == dataset[COUNT - 1]
    with pytest.raises(IndexError):
        dataset[COUNT]
    with pytest.raises(IndexError):
        dataset[-COUNT - 1]


def test_decoded_images_are_resized_and_their_boxes_with_them(faces_ref: str) -> None:
    whole = SnapshotDataset(faces_ref, decode="rgb")
    small = SnapshotDataset(faces_ref, decode="rgb", size=(60, 160))
    image, target = whole[3]
    assert image.shape == (240, 320, 3)
    assert image.dtype == torch.uint8
    reduced, scaled = small[3]
    assert reduced.shape == (60, 160, 3)
    assert torch.allclose(scaled["boxes"], target["boxes"] * torch.tensor([0.5, 0.25, 0.5, 0.25]))
    assert abs(float(reduced.float().mean()) - float(image.float().mean())) < 3


def test_a_size_may_be_a_list_or_a_number(faces_ref: str) -> None:
    sizes = [(24, 32), [24, 32], np.array([24, 32]), torch.Size((24, 32)), 24, np.int64(24)]
    images = [SnapshotDataset(faces_ref, decode="rgb", size=size)[0][0] for size in sizes]
    assert [tuple(image.shape) for image in images] == [(24, 32, 3)] * 4 + [(24, 24, 3)] * 2
    assert all(torch.equal(image, images[0]) for image in images[:4])


def test_samples_that_are_here_need_no_look_into_the_manifest(faces_ref: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, packed = SnapshotDataset(faces_ref), SnapshotDataset(faces_ref, packed=True)
    read_until_here(dataset, range(COUNT))
    expected = [image for image, _ in dataset.__getitems__(range(COUNT))]
    dataset = pickle.loads(pickle.dumps(dataset))

    def look(*_arguments: object) -> NoReturn:
        raise AssertionError("the manifest was asked")

    for name in ("entry", "path", "range"):
        monkeypatch.setattr(Manifest, name, look)
    assert [image for image, _ in dataset.__getitems__(range(COUNT))] == expected
    assert [bytes(sample.image.numpy()) for sample in packed.__getitems__(range(COUNT))] == expected


def test_large_files_that_are_here_are_no_misses(settings: Settings, tmp_path: Path) -> None:
    sizes = (10, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 12345)
    contents = [np.random.default_rng(size).bytes(size) for size in sizes]
    for number, data in enumerate(contents):
        (tmp_path / f"{number}.bin").write_bytes(data)
    api.create_snapshot("large", tmp_path.as_uri(), settings=settings)
    dataset, packed = SnapshotDataset("large"), SnapshotDataset("large", packed=True)
    read_until_here(dataset, range(4))
    clocks = Clocks(0)
    given = Measured(dataset, clocks).__getitems__(range(4))
    batch = Measured(packed, clocks).__getitems__(range(4))
    assert [image for image, _ in given] == contents
    assert [bytes(sample.image.numpy()) for sample in batch] == contents
    assert (clocks.usage().samples, clocks.usage().misses) == (8, 0)


def test_a_large_file_of_which_a_part_is_here_is_read_whole(settings: Settings, tmp_path: Path) -> None:
    data = np.random.default_rng(1).bytes(2 * BLOCK_BYTES + 12345)
    (tmp_path / "large.bin").write_bytes(data)
    api.create_snapshot("half", tmp_path.as_uri(), settings=settings)
    with api.open_snapshot("half", settings) as snapshot:
        snapshot.read_range("large.bin", BLOCK_BYTES + 5, BLOCK_BYTES + 10)
    assert SnapshotDataset("half", target=None)[0] == data
    assert bytes(SnapshotDataset("half", target=None, packed=True).__getitems__([0]).data.numpy()) == data


def test_annotations_of_other_files_are_an_error(faces_ref: str, drawn_faces: Path, settings: Settings) -> None:
    few = settings.home / "few"
    shutil.copytree(drawn_faces, few)
    (few / "JPEGImages" / "000007.jpg").unlink()
    other = api.create_snapshot("few", few.as_uri(), settings=settings).ref
    id = SnapshotDataset(faces_ref).snapshot.record.id
    SnapshotDataset(other)
    with closing(api.open_catalog(settings)) as catalog, api.open_snapshot(other, settings) as snapshot:
        root = catalog.derived(id, Reading().name)
        assert root is not None
        catalog.set_derived(snapshot.record.id, Reading().name, root, needs=[root])
        with pytest.raises(CorruptManifestError, match=r"000007\.jpg"):
            select(snapshot, catalog, target="detection", query=Query())


def test_boxes_take_some_bytes_each_while_they_are_read_too() -> None:
    boxes = tuple(Box("a", float(n), 1.5, 200.25 + n, 300.75) for n in range(5))
    columns = BoxColumns(("a",))
    tracemalloc.start()
    for number in range(20_000):
        columns.add("", Annotation(f"{number:08d}.jpg", 640, 480, boxes))
    columns.finish()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000 * 200
    assert columns.get(19_999)["boxes"].tolist()[4] == [4.0, 1.5, 204.25, 300.75]
    assert columns.get(0)["labels"].dtype == np.int64


def test_paths_are_looked_up_for_errors_only(
    faces_ref: str, with_a_broken_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(SnapshotDataset, "path", lambda _self, sample: asked.append(sample) or "the path")
    SnapshotDataset(faces_ref, decode="rgb", size=8).__getitems__(range(COUNT))
    assert asked == []
    with pytest.raises(AnnotationError, match="the path"):
        SnapshotDataset(with_a_broken_image, decode="rgb", target=None)[2]
    assert asked == [2]


def test_a_target_changed_by_one_reader_is_whole_for_the_next(faces_ref: str) -> None:
    dataset = SnapshotDataset(faces_ref)
    before = dataset[0][1]["boxes"].clone()
    dataset[0][1]["boxes"].zero_()
    assert torch.equal(dataset[0][1]["boxes"], before)


@promise("A DataLoader, forked or spawned, gives every sample once an epoch")
@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_gives_every_sample_once(faces_ref: str, drawn_faces: Path, workers: int) -> None:
    dataset = SnapshotDataset(faces_ref, target="path")
    loader = DataLoader(
        dataset,
        batch_size=7,
        shuffle=True,
        num_workers=workers,
        persistent_workers=bool(workers),
        collate_fn=collate,
    )
    expected = {f"JPEGImages/{file.name}": file.read_bytes() for file in _images(drawn_faces)}
    for _ in range(2):
        seen = dict(pair for images, paths in loader for pair in zip(paths, images, strict=True))
        assert seen == expected


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_detection_batches_and_transforms_go_through_workers(faces_ref: str, context: str) -> None:
    dataset = SnapshotDataset(faces_ref, decode="rgb", size=(24, 32), transform=_Flip())
    loader = DataLoader(dataset, batch_size=8, num_workers=1, multiprocessing_context=context, collate_fn=collate)
    numbers = iter(range(COUNT))
    for images, labels in loader:
        assert images.shape == (8, 24, 32, 3)
        for image, label in zip(images, labels, strict=True):
            flipped, expected = dataset[next(numbers)]
            assert torch.equal(image, flipped)
            assert torch.equal(label, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_packed_batches_hold_the_bytes_and_pass_a_dataloader_as_it_is(
    faces_ref: str, drawn_faces: Path, workers: int
) -> None:
    dataset = SnapshotDataset(faces_ref, packed=True, target=None)
    expected = [file.read_bytes() for file in _images(drawn_faces)]
    got = []
    for batch in DataLoader(dataset, batch_size=9, num_workers=workers):
        assert isinstance(batch, PackedBatch)
        assert batch.data.dtype == torch.uint8
        assert batch.offsets[0] == 0
        assert batch.offsets[-1] == len(batch.data)
        got += [bytes(sample.image.numpy()) for sample in batch]
    assert got == expected


def test_packed_targets_of_classes_are_a_tensor(settings: Settings, tmp_path: Path) -> None:
    for number, kind in enumerate(("cat", "dog", "cat")):
        (tmp_path / kind).mkdir(exist_ok=True)
        (tmp_path / kind / f"{number}.bin").write_bytes(bytes([number]) * 10)
    api.create_snapshot("pets", tmp_path.as_uri(), settings=settings)
    dataset = SnapshotDataset("pets", target="folder", packed=True)
    (batch,) = DataLoader(dataset, batch_size=3)
    assert dataset.classes == ("cat", "dog")
    assert batch.targets.tolist() == [0, 0, 1]
    assert dataset[2][1] == 1


def test_queries_and_splits_choose_images(faces_ref: str, drawn_faces: Path) -> None:
    masked = [
        f"JPEGImages/{file.name}"
        for file in _images(drawn_faces)
        if any(label == "with_mask" for label, _ in _boxes(drawn_faces, file))
    ]
    dataset = SnapshotDataset(faces_ref, labels=["with_mask"], target="path")
    assert [path for _, path in (dataset[number] for number in range(len(dataset)))] == masked
    listed = (drawn_faces / "ImageSets/Main/val.txt").read_text().split()
    val = SnapshotDataset(faces_ref, split="val", target="path")
    assert [Path(val.path(number)).stem for number in range(len(val))] == sorted(listed)
    with pytest.raises(UsageError, match="no split 'dev'"):
        SnapshotDataset(faces_ref, split="dev")
    with pytest.raises(UsageError):
        SnapshotDataset(faces_ref, where="objects > 1000")


@pytest.mark.parametrize("kind", [SnapshotDataset, ShardDataset])
def test_a_wrong_keyword_is_told_in_the_name_of_the_dataset(kind: type) -> None:
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) got an unexpected keyword argument 'foo'$"):
        kind("faces@v1", foo=1)


def test_files_without_annotations_come_with_their_paths(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"sound")
    (tmp_path / "empty.wav").write_bytes(b"")
    api.create_snapshot("sounds", tmp_path.as_uri(), settings=settings)
    dataset = SnapshotDataset("sounds")
    assert [dataset[number] for number in range(2)] == [(b"sound", "a.wav"), (b"", "empty.wav")]
    assert dataset.__getitems__([1, 0]) == [(b"", "empty.wav"), (b"sound", "a.wav")]


def test_distributed_samplers_share_the_samples_out(faces_ref: str) -> None:
    dataset = SnapshotDataset(faces_ref, target="path")
    seen: list[str] = []
    for rank in range(2):
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=True)
        for _, paths in DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=collate):
            seen += paths
    assert len(seen) == len(set(seen)) == COUNT


def test_a_pickled_dataset_reads_the_same(faces_ref: str) -> None:
    dataset = SnapshotDataset(faces_ref, decode="rgb", size=(10, 10))
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again[5][0], dataset[5][0])
    assert again.classes == dataset.classes


@promise("A batch belongs to the caller, and does not change while somebody has any part of it")
def test_what_a_dataset_gives_keeps_no_view_of_the_cache(faces_ref: str) -> None:
    image, _ = SnapshotDataset(faces_ref)[0]
    assert type(image) is bytes
    pixels, _ = SnapshotDataset(faces_ref, decode="rgb")[0]
    pixels[:] = 0  # its own memory: writable
    assert int(SnapshotDataset(faces_ref, decode="rgb")[0][0].sum()) > 0


@pytest.fixture
def with_a_broken_image(settings: Settings, tmp_path: Path, drawn_faces: Path) -> str:
    for number, file in enumerate(_images(drawn_faces)[:6]):
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if number == 2 else data)
    return api.create_snapshot(tmp_path.name, tmp_path.as_uri(), settings=settings).ref


@promise("A broken image, and a shard that is cut short, damaged, missing or swapped, is an error that names it")
def test_an_image_that_is_cut_short_is_an_error_that_names_it(with_a_broken_image: str) -> None:
    dataset = SnapshotDataset(with_a_broken_image, decode="rgb", target="path", size=(8, 8))
    with pytest.raises(AnnotationError, match=r"000003\.jpg"):
        dataset[2]
    with pytest.raises(AnnotationError, match=r"000003\.jpg"):
        dataset.__getitems__([0, 1, 2])


@promise("A broken image, and a shard that is cut short, damaged, missing or swapped, is an error that names it")
@pytest.mark.parametrize("workers", [0, 2])
def test_what_cannot_be_read_is_skipped_and_counted_if_the_user_asks(with_a_broken_image: str, workers: int) -> None:
    dataset = SnapshotDataset(with_a_broken_image, decode="rgb", target="path", size=(8, 8), on_error="skip")
    batches = list(DataLoader(dataset, batch_size=3, num_workers=workers, collate_fn=collate))
    assert [len(paths) for _, paths in batches] == [2, 3]
    assert dataset.skipped == 1


def test_a_file_that_is_gone_is_an_error_or_skipped_in_packed_batches(settings: Settings, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.bin").write_bytes(np.random.default_rng(number).bytes(1000 + number))
    api.create_snapshot("files", tmp_path.as_uri(), settings=settings)
    (tmp_path / "1.bin").unlink()
    dataset = SnapshotDataset("files", packed=True, target="path")
    with pytest.raises(ObjectNotFoundError, match=r"1\.bin"):
        dataset.__getitems__([0, 1, 2, 3])
    lenient = SnapshotDataset("files", packed=True, target="path", on_error="skip")
    batch = lenient.__getitems__([0, 1, 2, 3])
    assert batch.targets == ["0.bin", "2.bin", "3.bin"]
    for sample in batch:
        assert bytes(sample.image.numpy()) == (tmp_path / sample.target).read_bytes()
    assert lenient.skipped == 1
    with pytest.raises(StoreError):
        lenient[1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"decode": "jpeg"},
        {"on_error": "ignore"},
        {"size": (10, 10)},
        {"packed": True, "decode": "rgb"},
        {"target": "captions"},
        {"decode": "rgb", "size": (0, 10)},
        {"decode": "rgb", "size": 0},
        {"decode": "rgb", "size": -3},
        {"decode": "rgb", "size": (10, 10, 3)},
        {"decode": "rgb", "size": "22"},
        {"decode": "rgb", "size": (10.5, 10)},
        {"decode": "rgb", "size": True},
        {"decode": "rgb", "size": (10, 2**40)},
        {"size": 10},
        {"labels": "with_mask"},
    ],
    ids=str,
)
def test_arguments_that_cannot_be_meant_are_refused(faces_ref: str, arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SnapshotDataset(faces_ref, **arguments)


class _Failing:
    """A transform that raises, as reading what the sample refers to might."""

    def __init__(self, error: type[StoreError]) -> None:
        self.error = error

    def __call__(self, image: bytes, target: object) -> NoReturn:
        raise self.error("s3://pictures")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [StoreUnavailableError, StoreAccessError, StoreError])
def test_a_store_that_is_away_or_lets_nobody_in_is_never_skipped(
    faces_ref: str, error: type[StoreError], workers: int
) -> None:
    dataset = SnapshotDataset(faces_ref, on_error="skip", transform=_Failing(error))
    with pytest.raises(error, match="s3://pictures"):
        list(DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=collate))
    assert dataset.skipped == 0


def test_objects_that_are_gone_or_changed_are_skipped(faces_ref: str) -> None:
    for error in (ObjectNotFoundError, ObjectChangedError):
        dataset = SnapshotDataset(faces_ref, on_error="skip", transform=_Failing(error))
        assert len(dataset.__getitems__([0, 1])) == 0
        assert dataset.skipped == 2
