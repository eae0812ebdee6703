"""Shared memory that is used again: nothing changes under a tensor that somebody still has, on either side."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from datacache.loaders.packed import PackedBatch, collate, empty

_SIZE = 300_000


class _Numbered(Dataset):
    """Each batch is one tensor full of the number of its first sample."""

    def __init__(self, length: int = 240, keep: int = 0) -> None:
        self.length, self.keep = length, keep
        self.kept: list[Any] = []

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, samples: list[int]) -> PackedBatch:
        data = empty((_SIZE + 7 * samples[0],))
        data.fill_(samples[0] % 251)
        if self.keep:  # a worker that holds on to what it has sent
            self.kept.append(data)
            assert all(len(set(old[:: len(old) // 3].tolist())) == 1 for old in self.kept)
        return PackedBatch(data, torch.tensor(samples))


def _expect_right(batch: PackedBatch) -> None:
    number = int(batch.offsets[0])
    assert len(batch.data) == _SIZE + 7 * number
    assert bool((batch.data == number % 251).all())


def _loader(dataset: Dataset, context: str = "fork", workers: int = 2) -> DataLoader:
    return DataLoader(
        dataset,
        batch_size=4,
        num_workers=workers,
        multiprocessing_context=context,
        persistent_workers=True,
        collate_fn=collate,
    )


def _segments() -> int:
    """How many segments of workers this process has mapped."""
    return Path("/proc/self/maps").read_text().count("datacache-batch")


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_batches_that_are_kept_stay_as_they_are(context: str) -> None:
    loader = _loader(_Numbered(), context)
    kept: list[PackedBatch] = []
    for _ in range(2):
        for number, batch in enumerate(loader):
            _expect_right(batch)
            if number % 3 == 0:
                kept.append(batch)
            for old in kept:
                assert int(old.data[0]) == int(old.data[-1]) == int(old.offsets[0]) % 251
    for batch in kept:
        _expect_right(batch)


def test_a_slice_keeps_the_segment_although_its_batch_is_gone() -> None:
    loader = _loader(_Numbered())
    slices = []
    for number, batch in enumerate(loader):
        if number < 6:
            slices.append((batch.data[1000:2000], int(batch.offsets[0])))
    for kept, number in slices:
        assert bool((kept == number % 251).all())


def test_a_worker_that_holds_on_to_a_batch_does_not_write_over_it() -> None:
    for batch in _loader(_Numbered(keep=1)):
        _expect_right(batch)


def test_segments_are_used_again_and_few(tmp_path: Path) -> None:
    del tmp_path
    loader = _loader(_Numbered(400), workers=1)
    counts = []
    for _ in range(4):
        for batch in loader:
            _expect_right(batch)
        del batch
        counts.append(_segments())
    assert counts[-1] == counts[0] <= 8


def test_segments_go_with_their_workers() -> None:
    for _ in range(3):
        for batch in _loader(_Numbered(40)):
            _expect_right(batch)
    del batch
    gc.collect()
    assert _segments() <= 16


def test_a_fork_of_the_training_does_not_set_its_segments_free() -> None:
    loader = _loader(_Numbered(120), workers=1)
    batches: Iterator[PackedBatch] = iter(loader)
    kept = [next(batches) for _ in range(3)]
    child = os.fork()
    if not child:
        kept.clear()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    for batch in batches:
        _expect_right(batch)
    for batch in kept:
        _expect_right(batch)


class _Mixed(Dataset):
    """Samples with many small tensors, empty ones, other types, and views."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, at: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        base = torch.arange(at * 3, dtype=torch.float32).reshape(-1, 3)
        return torch.full((50, 60, 3), at, dtype=torch.uint8), {
            "boxes": base,
            "labels": torch.arange(at),
            "transposed": base.T,
            "half": torch.full((2,), at, dtype=torch.bfloat16),
            "flag": torch.tensor(at % 2 == 0),
        }


def test_tensors_of_all_kinds_arrive_as_they_were_sent() -> None:
    dataset = _Mixed()
    numbers = iter(range(len(dataset)))
    for images, targets in _loader(dataset):
        assert images.shape == (4, 50, 60, 3)
        for image, target in zip(images, targets, strict=True):
            expected_image, expected = dataset[next(numbers)]
            assert torch.equal(image, expected_image)
            assert target.keys() == expected.keys()
            for name, value in target.items():
                assert value.dtype == expected[name].dtype
                assert torch.equal(value, expected[name])
