"""The prefetcher to a device: a real DataLoader with workers, on the CPU, and on a GPU where there is one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from datacache.core.errors import UsageError
from datacache.loaders.device import DevicePrefetcher, record
from datacache.loaders.packed import PackedBatch
from datacache.loaders.sampler import EpochSampler
from tests.promises import promise

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Pair(NamedTuple):
    image: Any
    name: Any


class Numbers(Dataset):
    def __init__(self, size: int, broken: int = -1) -> None:
        self.size, self.broken = size, broken

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int) -> Any:
        if at == self.broken:
            raise ValueError(f"sample {at} is broken")
        return {"x": torch.full((3,), at), "name": f"n{at}"}


class Counting:
    """A loader with a state, as those of datacache.torch and torchdata have."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.given, self.epoch = batches, 0, 0

    def __iter__(self) -> Any:
        while self.given < len(self.batches):
            self.given += 1
            yield self.batches[self.given - 1]
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_every_batch_comes_once_in_order_and_epoch_after_epoch() -> None:
    prefetcher = DevicePrefetcher(DataLoader(Numbers(10), batch_size=4, num_workers=2), "cpu")
    assert len(prefetcher) == 3
    for _ in range(2):
        assert [batch["x"][:, 0].tolist() for batch in prefetcher] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_next_gives_none_at_the_end_and_then_begins_again() -> None:
    prefetcher = DevicePrefetcher(DataLoader(Numbers(4), batch_size=2), "cpu")
    for _ in range(2):
        seen = []
        while (batch := prefetcher.next()) is not None:
            seen.append(batch["name"])
        assert seen == [["n0", "n1"], ["n2", "n3"]]


def test_an_epoch_that_was_left_is_begun_again_and_an_empty_one_is_empty() -> None:
    prefetcher = DevicePrefetcher([1, 2, 3], "cpu")
    assert next(iter(prefetcher)) == 1
    assert list(prefetcher) == [1, 2, 3]
    assert list(DevicePrefetcher([], "cpu")) == []
    assert DevicePrefetcher([], "cpu").next() is None


def test_a_batch_that_is_none_does_not_end_the_epoch() -> None:
    assert list(DevicePrefetcher([1, None, 3], "cpu")) == [1, None, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_where_its_batch_would_have_come(workers: int) -> None:
    prefetcher = DevicePrefetcher(DataLoader(Numbers(8, broken=5), batch_size=2, num_workers=workers), "cpu")
    batches = iter(prefetcher)
    assert next(batches)["name"] == ["n0", "n1"]
    assert next(batches)["name"] == ["n2", "n3"]
    with pytest.raises(ValueError, match="sample 5 is broken"):
        next(batches)


def test_the_next_batch_is_read_before_one_is_handed_out() -> None:
    loader = Counting([10, 11, 12])
    batches = iter(DevicePrefetcher(loader, "cpu"))
    assert next(batches) == 10
    assert loader.given == 2


@promise("What was read ahead for a device does not count as used")
def test_a_state_counts_what_was_handed_out_and_not_what_was_read_ahead() -> None:
    prefetcher = DevicePrefetcher(Counting([10, 11, 12, 13]), "cpu")
    assert prefetcher.state_dict() == {"given": 0}
    batches = iter(prefetcher)
    assert [next(batches), next(batches)] == [10, 11]
    state = prefetcher.state_dict()
    assert state == {"given": 2}
    batches.close()  # as a `break` does
    assert prefetcher.state_dict() == {"given": 2}
    resumed = DevicePrefetcher(Counting([10, 11, 12, 13]), "cpu")
    resumed.load_state_dict(state)
    assert list(resumed) == [12, 13]
    assert resumed.state_dict() == {"given": 0}
    assert list(resumed) == [10, 11, 12, 13]


def test_with_next_a_state_counts_the_same() -> None:
    prefetcher = DevicePrefetcher(Counting([10, 11, 12]), "cpu")
    for given in (1, 2, 3):
        prefetcher.next()
        assert prefetcher.state_dict() == {"given": given}
    assert prefetcher.next() is None
    assert prefetcher.state_dict() == {"given": 0}


def test_an_epochs_number_reaches_the_loader_or_its_sampler() -> None:
    loader = Counting([1])
    DevicePrefetcher(loader, "cpu").set_epoch(3)
    assert loader.epoch == 3
    sampler = EpochSampler(10, rank=0, world=1)
    DevicePrefetcher(DataLoader(Numbers(10), sampler=sampler), "cpu").set_epoch(4)
    assert sampler.epoch == 4
    DevicePrefetcher([1], "cpu").set_epoch(5)


def test_a_loader_without_a_state_is_said_to_have_none() -> None:
    with pytest.raises(UsageError, match=r"no state_dict\(\)"):
        DevicePrefetcher([1]).state_dict()


def test_on_the_cpu_a_batch_is_passed_through_as_it_is() -> None:
    batch = {"x": torch.ones(2)}
    assert next(iter(DevicePrefetcher([batch], "cpu"))) is batch


def test_tensors_are_moved_wherever_they_are_in_a_batch() -> None:
    one = torch.ones(2)
    packed = PackedBatch(torch.zeros(3, dtype=torch.uint8), torch.tensor([0, 3]), [5])
    batch = OrderedDict(a=[one, (one, "text")], b=Pair(one, b"bytes"), c=packed, d=None, e=7)
    moved = next(iter(DevicePrefetcher([batch], "meta")))  # a device that is not the CPU and has no streams
    assert isinstance(moved, OrderedDict)
    assert isinstance(moved["b"], Pair)
    tensors = [moved["a"][0], moved["a"][1][0], moved["b"].image, moved["c"].data, moved["c"].offsets]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert (moved["a"][1][1], moved["b"].name, moved["c"].targets, moved["d"], moved["e"]) == (
        "text",
        b"bytes",
        [5],
        None,
        7,
    )
    assert batch["a"][0].device.type == "cpu"


@needs_gpu
@pytest.mark.parametrize("pin", [False, True])
def test_batches_arrive_on_the_gpu_whole_while_it_computes(pin: bool) -> None:
    loader = DataLoader(Numbers(400), batch_size=4, num_workers=2, pin_memory=pin)
    prefetcher = DevicePrefetcher(loader)
    assert prefetcher.device.type == "cuda"
    weights = torch.ones(2048, 2048, device="cuda")
    sums = []
    for batch in prefetcher:
        assert batch["x"].is_cuda
        weights = (weights @ weights).clamp(
            max=1.0
        )  # keeps the device behind: the next copy begins before this is done
        sums.append((batch["x"].float() * weights[0, 0]).sum())
    assert [int(total) for total in sums] == [3 * sum(range(4 * k, 4 * k + 4)) for k in range(100)]


@needs_gpu
def test_memory_of_a_batch_is_not_given_to_another_before_the_gpu_is_done_with_it() -> None:
    batches = [torch.full((1 << 20,), float(k)) for k in range(50)]
    weights = torch.ones(4096, 4096, device="cuda")
    sums = []
    for batch in DevicePrefetcher(batches, "cuda"):
        weights = (weights @ weights).clamp(max=1.0)
        sums.append((batch * weights[0, 0]).mean())
        del batch
    assert [float(value) for value in sums] == [float(k) for k in range(50)]


@needs_gpu
def test_a_packed_batch_arrives_on_the_gpu() -> None:
    packed = PackedBatch(torch.arange(6, dtype=torch.uint8), torch.tensor([0, 2, 6]), torch.tensor([1, 0]))
    moved = next(iter(DevicePrefetcher([packed], "cuda")))
    assert moved.data.is_cuda
    assert moved.targets.is_cuda
    assert moved[1].image.cpu().tolist() == [2, 3, 4, 5]


class Slotted:
    """A part of a batch that moves, and has neither a `__dict__` nor `record_stream`."""

    __slots__ = ("boxes", "unset")

    def __init__(self, boxes: Any) -> None:
        self.boxes = boxes

    def to(self, device: Any, **_how: Any) -> Slotted:
        return Slotted(self.boxes.to(device))


class Recorded:
    """Has memory that a stream uses."""

    def __init__(self) -> None:
        self.streams: list[Any] = []

    def to(self, _device: Any) -> Recorded:
        return self

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


def test_the_memory_of_objects_with_slots_is_the_streams() -> None:
    part = Recorded()
    record([], "a stream")
    record(Slotted(part), "a stream")
    record(Slotted({"boxes": [part]}), "another")
    assert part.streams == ["a stream", "another"]


@needs_gpu
def test_objects_with_slots_arrive_on_the_gpu() -> None:
    (batch,) = DevicePrefetcher([Slotted(torch.ones(3))], "cuda")
    assert batch.boxes.is_cuda
