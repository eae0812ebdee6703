"""Test what `collate` makes of samples, and packed batches: with transforms, with nothing, and on a device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate

from datacache import api
from datacache.loaders import loader as loaders
from datacache.loaders.packed import EmptyBatch, pack_targets
from datacache.settings import Settings
from datacache.torch import PackedBatch, SnapshotDataset, collate, loader
from tests.promises import promise

pytestmark = pytest.mark.shared_home

# --- collate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], torch.int64),
        ([0.5, 2.0], torch.float64),
        ([1, 0.5], torch.float64),
        ([True, False], torch.bool),
        ([np.float32(1), np.float32(2)], torch.float32),
        ([np.int16(1), np.int16(-2)], torch.int16),
        ([np.bool_(True), np.bool_(False)], torch.bool),
    ],
    ids=str,
)
def test_numbers_become_a_tensor(values: list[Any], dtype: Any) -> None:
    image = torch.zeros(2, 2)
    images, targets = collate([(image, value) for value in values])
    assert images.shape == (2, 2, 2)
    assert targets.dtype == dtype
    assert targets.tolist() == [value.item() if isinstance(value, np.generic) else value for value in values]
    assert torch.equal(collate(values), targets)


@pytest.mark.parametrize("values", [["a", "b"], [b"a", b"b"], [1, "b"], [2**70, 1], [{"a": 1}, {"a": 2}], [None, None]])
def test_what_is_no_number_stays_a_list(values: list[Any]) -> None:
    assert collate([(0, value) for value in values])[1] == values
    assert collate(values) == values


class Seen(NamedTuple):
    image: Any
    target: Any
    path: Any


def test_samples_of_any_number_of_parts_become_as_many_parts() -> None:
    samples = [(torch.full((2,), number), number / 2, f"{number}.jpg") for number in range(3)]
    images, targets, paths = collate(samples)
    assert images.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert targets.tolist() == [0, 0.5, 1]
    assert paths == ["0.jpg", "1.jpg", "2.jpg"]
    named = collate([Seen(*sample) for sample in samples])
    assert isinstance(named, Seen)
    assert named.path == paths
    assert [part.tolist() for part in collate([(1,), (2,)])] == [[1, 2]]
    assert collate([(1, 2), (1, 2, 3)]) == [(1, 2), (1, 2, 3)]


def test_arrays_are_stacked_also_reversed_ones_unless_they_hold_no_numbers() -> None:
    image = np.arange(6).reshape(2, 3)
    assert collate([image[:, ::-1], image]).tolist() == [image[:, ::-1].tolist(), image.tolist()]
    assert collate([np.float32(1), np.array(2.0)])[1] == 2.0
    names = [np.array(["a"]), np.array(["b"])]
    assert collate(names) == names


class Passed:
    """A dataset of which nothing but what is said of it matters."""

    def plan_source(self) -> None:
        return None


def test_our_collate_is_found_for_parts_and_sums_of_our_datasets() -> None:
    ours, other = Passed(), TensorDataset(torch.zeros(3))
    assert loaders.default_collate(ConcatDataset.__new__(ConcatDataset)) is default_collate
    for inner in (ours, Subset(ours, [0]), Subset(Subset(ours, [0]), [0])):
        both = ConcatDataset.__new__(ConcatDataset)
        both.datasets = [other, inner]
        assert loaders.default_collate(inner) is collate
        assert loaders.default_collate(both) is collate
        assert loaders.default_collate(Subset(both, [0])) is collate
    assert loaders.default_collate(Subset(other, [0])) is default_collate


# --- batches of which all was skipped ---------------------------------------------------------------------------------

SIZE, BATCH = 20, 4
LOST = range(4, 12)  # the second and the third batch


@pytest.fixture
def pictures(tmp_path: Path, settings: Settings) -> Callable[..., SnapshotDataset]:
    """Files in two folders of which those in the middle cannot be decoded, nor be read any more."""
    from PIL import Image

    folder = tmp_path / "pictures"
    for number in range(SIZE):
        path = folder / ("a" if number < 10 else "b") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number in LOST:
            path.write_bytes(b"no picture")
        else:
            Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    ref = api.create_snapshot(tmp_path.name, folder.as_uri(), settings=settings).ref
    for number in LOST:
        (folder / ("a" if number < 10 else "b") / f"{number:02}.png").unlink()

    def open_dataset(**options: Any) -> SnapshotDataset:
        return SnapshotDataset(ref, on_error="skip", settings=settings, **options)

    return open_dataset


_KINDS = {
    "decoded": {"decode": "rgb", "size": (4, 4), "target": "folder"},
    "packed": {"packed": True, "target": "folder"},
    "images": {"decode": "rgb", "size": (4, 4), "target": None},
    "three": {"decode": "rgb", "target": "path", "transform": lambda image, path: (image, path, 1)},
}


def _count(batch: Any) -> int:
    return len(batch[0]) if isinstance(batch, tuple | list) else len(batch)


@pytest.mark.parametrize("kind", _KINDS.values(), ids=_KINDS)
@pytest.mark.parametrize("default", [False, True], ids=["ours", "default_collate"])
def test_a_plain_dataloader_gives_batches_of_nothing(
    pictures: Callable[..., SnapshotDataset], kind: dict[str, Any], default: bool
) -> None:
    dataset = pictures(**kind)
    batches = list(DataLoader(dataset, batch_size=BATCH, collate_fn=None if default else collate))
    assert [_count(batch) if len(batch) else 0 for batch in batches] == [4, 0, 0, 4, 4]
    assert dataset.skipped == len(LOST)
    if dataset.options.packed:
        assert batches[1].targets.dtype == batches[1].offsets.dtype == torch.int64
        assert list(batches[1]) == []
    elif dataset.kind is not None:
        assert len(batches[1]) == len(batches[0])


@promise("A batch whose samples were all skipped does not come out, and counts as used in a state")
@pytest.mark.parametrize("kind", _KINDS.values(), ids=_KINDS)
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"device": "cpu"}], ids=["here", "workers", "device"])
def test_a_loader_passes_over_batches_of_nothing_and_counts_them(
    pictures: Callable[..., SnapshotDataset], kind: dict[str, Any], options: dict[str, Any]
) -> None:
    with loader(pictures(**kind), BATCH, shuffle=False, **({"num_workers": 0} | options)) as batches:
        given = iter(batches)
        assert _count(next(given)) == BATCH
        assert batches.state_dict()["taken"] == 4
        assert _count(next(given)) == BATCH
        state = json.loads(json.dumps(batches.state_dict()))
        assert state["taken"] == 16
        assert [_count(batch) for batch in given] == [4]
        assert batches.state_dict()["taken"] == SIZE
        batches.load_state_dict(state)
        assert [_count(batch) for batch in batches] == [4]


def test_a_users_collate_is_asked_for_no_batch_of_nothing(pictures: Callable[..., SnapshotDataset]) -> None:
    dataset = pictures(decode="rgb", size=(4, 4), target=None)
    with loader(dataset, BATCH, shuffle=False, num_workers=0, collate_fn=torch.stack) as batches:
        assert [len(batch) for batch in batches] == [4, 4, 4]
    with loader(dataset, BATCH, shuffle=False, collate_fn=torch.stack) as batches:
        assert "failed" not in batches.choice.text


@promise("A batch whose samples were all skipped does not come out, and counts as used in a state")
def test_a_stream_passes_over_batches_of_nothing(
    pictures: Callable[..., SnapshotDataset], settings: Settings, tmp_path: Path
) -> None:
    from datacache.torch import ShardDataset

    folder = tmp_path / "again"
    for number in range(12):
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02}.jpg").write_bytes(b"no picture")
    api.create_snapshot("again", folder.as_uri(), settings=settings)
    api.shard("again", to=str(tmp_path / "shards"), settings=settings)
    dataset = ShardDataset(tmp_path / "shards", target=None, decode="rgb", on_error="skip")
    assert list(dataset.stream(4)) == []
    assert dataset.skipped == 12


def test_none_of_a_kind_keep_its_dtype() -> None:
    assert pack_targets([], "classification").dtype == torch.int64
    assert pack_targets([], "path") == []
    assert collate(EmptyBatch(2)) == default_collate(EmptyBatch(2)) == ([], [])
    assert collate(EmptyBatch(0)) == default_collate(EmptyBatch(0)) == []


# --- packed batches ---------------------------------------------------------------------------------------------------


def _packed(targets: Any) -> PackedBatch:
    return PackedBatch(torch.arange(6, dtype=torch.uint8), torch.tensor([0, 1, 3, 6]), targets)


def test_samples_are_counted_from_the_end_as_well() -> None:
    batch = _packed(["a", "b", "c"])
    assert batch[-1].image.tolist() == batch[2].image.tolist() == [3, 4, 5]
    assert batch[-3].target == batch[np.int64(0)].target == "a"
    for at in (3, -4):
        with pytest.raises(IndexError):
            batch[at]


def test_targets_go_along_to_a_device() -> None:
    boxes = [{"boxes": torch.ones(number, 4), "labels": torch.ones(number)} for number in range(3)]
    moved = _packed(boxes).to("meta")
    assert {tensor.device.type for target in moved.targets for tensor in target.values()} == {"meta"}
    assert moved.data.device.type == moved.offsets.device.type == "meta"
    assert _packed(["a", "b", "c"]).to("meta").targets == ["a", "b", "c"]
    assert _packed(torch.arange(3)).to("meta").targets.device.type == "meta"
    assert _packed(None).to("meta").targets is None
    assert boxes[1]["boxes"].device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_targets_are_pinned_with_their_batch() -> None:
    pinned = _packed([{"boxes": torch.ones(2, 4)}] * 3).pin_memory()
    assert all(target["boxes"].is_pinned() for target in pinned.targets)
    assert pinned.to("cuda", non_blocking=True).targets[0]["boxes"].is_cuda
