"""Shared memory that is used again: nothing changes under a tensor that somebody still has, on either side."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from datacache.loaders import segments
from datacache.loaders.packed import PackedBatch, collate, empty
from tests.leftovers import in_own_process
from tests.promises import promise

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


def _is_full_of(data: torch.Tensor, number: int) -> bool:
    """Asked in a forked child, where PyTorch's threads are gone and would be waited for."""
    return set(data.numpy().tobytes()) == {number}


def _expect_all_right(batches: Iterator[PackedBatch]) -> None:
    for batch in batches:
        _expect_right(batch)


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
    """Count the segments of workers that this process has mapped."""
    mapped = segments._mapped.peek()
    if mapped is not None:  # as arriving batches do now and then
        mapped.prune()
    return Path("/proc/self/maps").read_text().count("datacache-batch")


@promise("A batch belongs to the caller, and does not change while somebody has any part of it")
@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
def test_batches_that_are_kept_stay_as_they_are(context: str, workers: int) -> None:
    loader = _loader(_Numbered(), context, workers)
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


@promise("A batch belongs to the caller, and does not change while somebody has any part of it")
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
    assert _segments() == 1  # the last batch's
    _expect_right(batch)
    del batch
    gc.collect()
    assert _segments() == 0


class _Growing(Dataset):
    """Each batch is larger than the one before."""

    def __len__(self) -> int:
        return 60

    def __getitems__(self, samples: list[int]) -> PackedBatch:
        data = empty((200_000 * (1 + samples[0]),))
        data.fill_(samples[0])
        return PackedBatch(data, torch.tensor(samples))


def test_segments_that_became_too_small_are_unmapped() -> None:
    loader = DataLoader(_Growing(), batch_size=1, num_workers=1, collate_fn=collate, persistent_workers=True)
    for batch in loader:
        assert bool((batch.data == int(batch.offsets[0])).all())
    assert _segments() <= 9


@promise("A batch belongs to the caller, and does not change while somebody has any part of it")
@pytest.mark.parametrize("holder", ["training", "worker"])
def test_a_forked_child_has_a_batch_that_does_not_change(holder: str) -> None:
    batches = iter(_loader(_Forking() if holder == "worker" else _Numbered(160), workers=1))
    if holder == "worker":
        for batch in batches:
            _expect_right(batch)
        return
    batch = next(batches)
    number = int(batch.offsets[0])
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)  # until the training has gone on
        os._exit(0 if _is_full_of(batch.data, number % 251) else 1)
    del batch
    for batch in batches:
        _expect_right(batch)
    os.write(write, b"x")
    assert os.waitpid(child, 0)[1] == 0


class _Forking(Dataset):
    """A worker that forks while it has a batch; the child looks at its copy later."""

    def __len__(self) -> int:
        return 80

    def __getitems__(self, samples: list[int]) -> PackedBatch:
        data = empty((_SIZE + 7 * samples[0],))
        data.fill_(samples[0] % 251)
        if samples[0] == 0:
            self.read, self.write = os.pipe()
            self.child = os.fork()
            if not self.child:
                os.read(self.read, 1)
                os._exit(0 if _is_full_of(data, samples[0] % 251) else 1)
        if samples[0] == 76:
            os.write(self.write, b"x")
            assert os.waitpid(self.child, 0)[1] == 0
        return PackedBatch(data, torch.tensor(samples))


@promise("A batch belongs to the caller, and does not change while somebody has any part of it")
def test_threads_of_a_worker_do_not_get_one_segment() -> None:
    for batch in DataLoader(_Threaded(), batch_size=4, num_workers=1, collate_fn=_same):
        for data, number in batch:
            assert bool((data == number).all())


class _Threaded(Dataset):
    """A batch made by several threads of the worker at once."""

    def __len__(self) -> int:
        return 120

    def __getitems__(self, samples: list[int]) -> list[tuple[torch.Tensor, int]]:
        def make(sample: int) -> tuple[torch.Tensor, int]:
            data = empty((100_000,))
            data.fill_(sample)
            return data, sample

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(4) as pool:
                return list(pool.map(make, samples))
        finally:
            sys.setswitchinterval(before)


def test_batches_of_a_killed_worker_stay_as_they_are() -> None:
    in_own_process(keep_batches_of_a_killed_worker)  # PyTorch raises from a signal handler, wherever that finds us


def keep_batches_of_a_killed_worker() -> None:
    loader = _loader(_Numbered(200), workers=1)
    batches = iter(loader)
    kept = [next(batches) for _ in range(3)]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler would raise anywhere from now on
    os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)
    with pytest.raises((RuntimeError, OSError, EOFError)):  # as it is noticed, or as a descriptor cannot be had
        _expect_all_right(batches)
    for batch in kept:
        _expect_right(batch)


def _as_nchw(samples: Any) -> torch.Tensor:
    images, _ = collate(samples)
    return images.permute(0, 3, 1, 2)


def test_a_permuted_batch_arrives_permuted_and_in_its_segment() -> None:
    for context in ("fork", "spawn"):
        loader = DataLoader(_Mixed(), batch_size=4, num_workers=1, collate_fn=_as_nchw, multiprocessing_context=context)
        for number, images in enumerate(loader):
            assert images.shape == (4, 3, 50, 60)
            assert images.stride() == (9000, 1, 180, 3)
            assert images[:, 0, 0, 0].tolist() == list(range(4 * number, 4 * number + 4))
            assert _segments() > 0


class _Odd(Dataset):
    """Tensors that are more than numbers in memory."""

    def __len__(self) -> int:
        return 2

    def __getitems__(self, samples: list[int]) -> list[Any]:
        empty((10,))
        return [
            torch.tensor([1 + 2j, 3 - 1j]).conj(),
            torch.tensor([1 + 2j]).conj().imag,
            torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (3,)),
            torch.nn.Parameter(torch.ones(3)),
            torch.zeros(0, 4),
        ]


def _same(samples: Any) -> Any:
    return samples


def test_tensors_that_are_more_than_memory_go_as_pytorch_sends_them() -> None:
    (batch,) = DataLoader(_Odd(), batch_size=2, num_workers=1, collate_fn=_same, timeout=60)
    conjugate, negative, sparse, parameter, nothing = batch
    assert conjugate.shape == (2,)
    assert negative.shape == (1,)
    assert sparse.to_dense().tolist() == [1.0, 0.0, 2.0]
    assert parameter.tolist() == [1.0, 1.0, 1.0]
    assert nothing.shape == (0, 4)


@promise("A batch belongs to the caller, and does not change while somebody has any part of it")
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
