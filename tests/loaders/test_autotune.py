"""Finding the number of workers: what is decided without trying, what is tried, and that nothing stays."""

from __future__ import annotations

import multiprocessing
import os
import random
import time

import numpy as np
import pytest
import torch

from datacache.loaders.processes import processors
from datacache.loaders.tuning import autotune
from datacache.loaders.tuning.autotune import choose
from datacache.loaders.tuning.report import Report, Stretch

_STORED = bytes(100_000)


class Raw:
    """100 KB of stored bytes a sample, for which nothing is done: what takes time must not be the machine's load."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, sample: int) -> bytes:
        return _STORED


class Waits:
    """Not the processor is what is missing: a worker more is a sample more at a time."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, sample: int) -> torch.Tensor:
        time.sleep(0.004)
        return torch.tensor(random.random() + np.random.random() + float(torch.rand(())))


class Fails(Raw):
    def __getitem__(self, sample: int) -> bytes:
        raise OSError("the disk is on fire")


class FailsInWorkers(Waits):
    home = os.getpid()

    def __getitem__(self, sample: int) -> torch.Tensor:
        if os.getpid() != self.home:
            raise OSError("not here")
        return super().__getitem__(sample)


class Empty(Raw):
    def __len__(self) -> int:
        return 0


def _as_it_is(samples):
    return samples


def test_stored_bytes_need_no_workers_and_none_are_tried():
    choice = choose(Raw(), 32, _as_it_is)
    assert (choice.num_workers, choice.prefetch_factor) == (0, None)
    assert [report.stretch.workers for report in choice.measurements] == [0]
    assert "num_workers=0" in choice.text
    assert "handing it over" in choice.text


@pytest.mark.skipif(processors() < 2, reason="there is one processor")
def test_samples_that_take_time_get_workers_and_what_was_measured_says_why():
    choice = choose(Waits(), 8, torch.stack)
    tried = {report.stretch.workers: report.samples_per_s for report in choice.measurements}
    assert choice.num_workers >= 2
    assert choice.prefetch_factor >= 1
    assert tried[choice.num_workers] >= 1.1 * tried[0]
    assert not multiprocessing.active_children()


def test_it_is_measured_once_for_a_dataset_and_batch_size():
    dataset = Raw()
    assert choose(dataset, 8, _as_it_is) is choose(dataset, 8, _as_it_is)
    assert choose(dataset, 8, _as_it_is) is not choose(dataset, 16, _as_it_is)
    assert choose(Raw(), 8, _as_it_is) is not choose(dataset, 8, _as_it_is)


def test_one_batch_at_a_time_is_held_while_batches_are_read():
    class Batch(list):
        alive = most = 0

        def __init__(self, samples):
            super().__init__(samples)
            Batch.alive += 1
            Batch.most = max(Batch.most, Batch.alive)

        def __del__(self):
            Batch.alive -= 1

    trial = autotune._Trial(Raw(), 8, Batch, None, 1.0)
    trial._touch()
    assert len(trial._touched) > 1
    assert trial._batch_bytes == 800_000
    assert (Batch.most, Batch.alive) == (1, 0)


def test_the_users_random_numbers_stay_what_they_are():
    def draw() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    choose(Waits(), 4, torch.stack, budget_s=0.5)
    assert draw() == expected


@pytest.mark.parametrize("dataset", [Fails(), FailsInWorkers()], ids=["here", "in workers"])
def test_a_dataset_that_fails_is_not_measured_and_fails_in_its_place(dataset):
    choice = choose(dataset, 8, _as_it_is)
    assert choice.num_workers == 0
    assert "measuring failed (OSError" in choice.text
    assert not multiprocessing.active_children()


def test_of_no_samples_nothing_is_measured():
    assert choose(Empty(), 8, _as_it_is).measurements == ()


def test_a_read_ahead_quota_bounds_what_is_prefetched():
    class Huge(Waits):
        def __getitem__(self, sample: int) -> torch.Tensor:
            time.sleep(0.004)
            return torch.zeros(1, dtype=torch.uint8).expand(2**30)  # claims a gigabyte, and takes none

    trial = autotune._Trial(Huge(), 8, _as_it_is, None, 0.2)
    trial._touch()
    assert trial._prefetch(2) == 1


def test_numbers_of_workers_double_up_to_the_processors():
    assert [autotune.candidates(count) for count in (1, 2, 6, 8)] == [
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 4, 6],
        [0, 1, 2, 4, 8],
    ]


def test_more_workers_have_to_be_clearly_faster():
    def report(workers: int, samples: int) -> Report:
        return Report(Stretch(workers, 4, steps=1, samples=samples, step_s=1.0), "decoding", "")

    tried = [report(0, 100), report(1, 105), report(2, 190), report(4, 200)]
    assert autotune.best(tried).stretch.workers == 2
    assert autotune.best(tried[:2]).stretch.workers == 0


def test_a_daemonic_process_tries_no_workers():
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    child = context.Process(target=lambda: told.put(choose(Waits(), 8, torch.stack).text), daemon=True)
    child.start()
    assert "can start no others" in told.get()
    child.join()


# --- processors ------------------------------------------------------------------------------------------------------


def test_ranks_of_a_machine_share_its_processors(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = processors()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert processors() == max(1, alone // 2)
