"""The loader with real DataLoader workers: what an epoch gives, what a state counts, and what is left behind."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from datacache.core import counters
from datacache.core.errors import UsageError
from datacache.loaders.loader import Loader, loader
from datacache.loaders.packed import EmptyBatch
from datacache.loaders.processes import worker_context
from datacache.loaders.tuning import clock as timing
from datacache.settings import load_settings
from datacache.tiers.memory import counters_dir
from tests.promises import promise

SIZE = 103


class Numbers:
    """Each sample is its number."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, sample: int) -> torch.Tensor:
        timing.clock().count(1, 10)
        return torch.tensor(sample)


class Fails(Numbers):
    """One sample cannot be read."""

    def __getitem__(self, sample: int) -> torch.Tensor:
        if sample == 50:
            raise RuntimeError("sample 50 is broken")
        return torch.tensor(sample)


class Skips(Numbers):
    """Leaves samples out of batches, as our datasets do."""

    def __getitems__(self, samples: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(sample) for sample in samples if not 8 <= sample < 24] or EmptyBatch(0)


class Pids(Numbers):
    def __getitem__(self, sample: int) -> torch.Tensor:
        return torch.tensor(os.getpid())


class Draws(Numbers):
    def __getitem__(self, sample: int) -> torch.Tensor:
        return torch.randint(0, 2**40, ())


@pytest.fixture(autouse=True)
def _home(home):
    """Counters go to the test's own home."""


def _make(dataset=None, batch_size=8, **how) -> Loader:
    return loader(dataset or Numbers(), batch_size, **({"num_workers": 0, "report_every": 0} | how))


def _rest(batches) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


def _some(batches: Loader, count: int) -> list[int]:
    """The samples of the next `count` batches, the iteration given up then."""
    found = []
    for batch in batches:
        found += batch.tolist()
        if len(found) >= 8 * count:
            break
    return found


@pytest.mark.parametrize("shuffle", [True, False, "global"])
def test_an_epoch_has_every_sample_once_and_each_epoch_its_own_order(shuffle):
    with _make(shuffle=shuffle, seed=3) as batches:
        assert len(batches) == 13
        first, second = _rest(batches), _rest(batches)
        assert batches.epoch == 1
    assert sorted(first) == sorted(second) == list(range(SIZE))
    assert (first == second) == (shuffle is False)


@promise("With `multiple_of` each rank's batches in an epoch are a multiple of it, and full")
@pytest.mark.parametrize(("even", "count"), [("pad", 16), ("drop", 12)])
def test_batches_are_a_multiple_of_those_that_gradients_are_added_up_over(even, count):
    with _make(multiple_of=4, even=even) as batches:
        assert len(batches) == count
        assert [len(batch) for batch in batches] == [8] * count
    with _make(multiple_of=4, even=even) as batches:
        seen = _some(batches, 5)
        state = batches.state_dict()
    with _make(multiple_of=4, even=even) as batches:
        batches.load_state_dict(state)
        seen += _rest(batches)
    assert (
        len(seen) == {"pad": 40 + 64, "drop": 40 + 32}[even]
    )  # whole steps behind the one that was left in its middle
    assert len(set(seen)) == (SIZE if even == "pad" else len(seen))


def test_the_order_does_not_depend_on_workers():
    with _make(seed=1) as here, _make(seed=1, num_workers=2) as elsewhere:
        assert _rest(here) == _rest(elsewhere)
        assert _rest(here) == _rest(elsewhere)


@pytest.mark.parametrize(
    "how",
    [
        {"num_workers": 0},
        {"num_workers": 2, "prefetch_factor": 4},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
        {"num_workers": 2, "device": "cpu"},
    ],
    ids=["none", "forked", "spawned", "device"],
)
def test_a_state_counts_the_batches_the_training_got_and_not_those_that_are_ready(how):
    with _make(**how) as batches:
        seen = _some(batches, 5)
        state = json.loads(json.dumps(batches.state_dict()))
    assert len(seen) == 40
    with _make(batch_size=16, num_workers=2) as resumed:
        resumed.load_state_dict(state)
        assert resumed.epoch == 0
        assert (len(resumed), resumed.remaining) == (7, 4)
        left = _rest(resumed)
        assert resumed.last is not None
        assert resumed.last.step == 2 + 3  # 40 samples are two batches of 16 and a half
        again = _rest(resumed)
    assert sorted(seen + left) == list(range(SIZE))
    assert sorted(again) == list(range(SIZE))


def test_steps_are_counted_on_where_a_state_was_saved_and_anew_in_the_next_epoch():
    before = _make(rank=0, world=2)
    _some(before, 3)
    steps: list[Any] = []
    resumed = _make(rank=1, world=2, on_step=steps.append)
    resumed.load_state_dict(before.state_dict())
    _rest(resumed)
    _rest(resumed)
    places = [(step.epoch, step.step) for step in steps]
    assert places == [*((0, step) for step in range(3, 7)), *((1, step) for step in range(7))]
    resumed.load_state_dict(before.state_dict())
    resumed.set_epoch(5)
    _rest(resumed)
    assert (steps[-7].epoch, steps[-7].step) == (5, 0)


def test_a_training_goes_on_with_other_ranks_and_again_after_that():
    seen = []
    first = [_make(rank=rank, world=2) for rank in range(2)]
    for batches in first:
        seen += _some(batches, 2)
    state = first[1].state_dict()
    second = [_make(rank=rank, world=3) for rank in range(3)]
    for batches in second:
        batches.load_state_dict(state)
        seen += _some(batches, 1)
    state = [batches.state_dict() for batches in second]
    last = _make()
    last.load_state_dict(state)
    assert sorted(seen + _rest(last)) == list(range(SIZE))


def test_a_state_of_the_end_of_an_epoch_goes_on_with_the_next():
    for drop_last in (False, True):
        batches, resumed = _make(drop_last=drop_last), _make(drop_last=drop_last)
        _rest(batches)
        state = batches.state_dict()
        resumed.load_state_dict(state)
        resumed.set_epoch(0)  # whoever names the epoch gets what is left of it
        assert _rest(resumed) == []
        assert resumed.epoch == 0
        resumed.set_epoch(0)
        resumed.load_state_dict(state)
        assert _rest(resumed) == _rest(batches)
        assert resumed.epoch == batches.epoch == 1


def test_ranks_of_which_none_has_a_whole_batch_left_go_on_with_the_next_epoch():
    batches, resumed = (_make(rank=0, world=2, even="uneven", batch_size=6, drop_last=True) for _ in range(2))
    _rest(batches)
    resumed.load_state_dict(batches.state_dict())  # 7 samples of 103 are left to both
    assert len(_rest(resumed)) == 48
    assert resumed.epoch == 1


def test_a_state_counts_from_the_beginning_of_the_epoch_that_was_set():
    batches = _make()
    _some(batches, 5)
    assert batches.remaining == 8
    batches.set_epoch(4)
    state = batches.state_dict()
    assert (state["epoch"], state["taken"], batches.remaining) == (4, 0, 13)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_of_which_all_samples_were_skipped_counts_as_used(workers):
    with _make(Skips(), shuffle=False, num_workers=workers) as batches:
        assert _some(batches, 2) == [*range(8), *range(24, 32)]
        assert batches.state_dict()["taken"] == 32


def test_ranks_with_a_sample_more_or_less_agree_on_the_epoch():
    ranks = [_make(rank=rank, world=2, even="uneven", batch_size=1) for rank in range(2)]
    states = []
    for batches in ranks:
        it = iter(batches)
        for _ in range(51):  # of 52 and 51
            next(it)
        states.append(batches.state_dict())
    resumed = [_make(rank=rank, world=2, even="uneven", batch_size=1) for rank in range(2)]
    for batches in resumed:
        batches.load_state_dict(states)
    assert [len(_rest(batches)) for batches in resumed] == [1, 0]
    assert [batches.epoch for batches in resumed] == [0, 0]


def test_set_epoch_names_the_epoch_and_keeps_what_was_loaded_of_it():
    batches = _make()
    batches.set_epoch(4)
    fourth = _rest(batches)
    assert _make_at(5) == _rest(batches)  # it goes on by itself
    batches.set_epoch(4)
    _some(batches, 3)
    resumed = _make()
    resumed.load_state_dict(batches.state_dict())
    resumed.set_epoch(4)
    assert _rest(resumed) == fourth[24:]
    resumed.load_state_dict(batches.state_dict())
    resumed.set_epoch(0)
    assert _rest(resumed) == _make_at(0)


@pytest.mark.parametrize("how", [{"multiple_of": 1000}, {"batch_size": 1000, "drop_last": True}])
def test_an_epoch_without_a_batch_is_told(how, caplog):
    with _make(even="drop", **how) as batches:
        assert len(batches) == 0
        assert _rest(batches) == []
    assert "has no batch on this rank" in caplog.text


def _make_at(epoch: int) -> list[int]:
    batches = _make()
    batches.set_epoch(epoch)
    return _rest(batches)


def test_an_epoch_that_was_given_up_is_followed_by_the_next_one():
    with _make(num_workers=2) as batches:
        _some(batches, 2)
        assert _rest(batches) == _make_at(1)
        assert batches.epoch == 1


def test_an_iteration_of_which_nobody_asks_a_batch_is_no_epoch():
    batches = _make()
    iter(batches)
    assert next(iter(batches)).tolist() == _make_at(0)[:8]
    assert batches.epoch == 0


def test_workers_stay_between_epochs_and_end_with_the_loader():
    with _make(Pids(), num_workers=2) as batches:
        first, second = set(_rest(batches)), set(_rest(batches))
        assert first == second
        assert len(first) == 2
        left = iter(batches)  # an iteration that nobody ends
        next(left)
    assert not {child.pid for child in multiprocessing.active_children()} & first


def _kill(batches: Iterator[Any]) -> None:
    for batch in batches:
        os.kill(int(batch[0]), signal.SIGKILL)


def test_a_killed_worker_is_an_error_and_the_next_iteration_has_new_ones():
    with _make(Pids(), num_workers=2) as batches:
        first = iter(batches)
        next(first)
        # PyTorch's handler would raise out of whatever this process is doing when the worker's death is told.
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            with pytest.raises((RuntimeError, OSError, EOFError)):  # as it is noticed, or as a descriptor is missing
                _kill(first)
        finally:
            signal.signal(signal.SIGCHLD, handler)
        assert sum(1 for _ in batches) == 13


def _ask(event: Any) -> None:
    while not event.is_set():
        pass


def test_a_worker_that_is_killed_as_it_asks_whether_to_end_leaves_nothing_locked():
    context = worker_context("fork")
    event = context.Event()
    for _ in range(20):
        worker = context.Process(target=_ask, args=(event,))
        worker.start()
        time.sleep(0.01)
        worker.kill()
        worker.join()
        assert not event.is_set()
    event.set()
    assert event.is_set()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_is_raised_where_its_batch_would_come(workers):
    with _make(Fails(), shuffle=False, num_workers=workers) as batches:
        found: list[int] = []
        with pytest.raises(RuntimeError, match="sample 50 is broken"):
            found.extend(number for batch in batches for number in batch.tolist())
        assert found == list(range(48))
        assert batches.state_dict()["taken"] == 48


def test_steps_are_given_to_the_callback_the_counters_and_the_log(home, caplog):
    steps = []
    with caplog.at_level(logging.DEBUG, "datacache.loader"), _make(on_step=steps.append, report_every=3600) as batches:
        for _ in batches:
            assert batches.last is steps[-1]
        report = batches.report()
    assert [step.step for step in steps] == list(range(13))
    assert [step.samples for step in steps] == [8] * 12 + [7]
    assert sum(step.size_bytes for step in steps) == 10 * SIZE
    assert all(0 <= step.data_s <= step.step_s for step in steps)
    counted = counters.totals(counters_dir(load_settings().home, load_settings().ram_dir))
    assert counted["loader_steps"] == 13
    assert counted["loader_samples"] == SIZE
    assert counted["loader_bytes"] == 10 * SIZE
    assert 0 < counted["loader_data_ns"] <= counted["loader_step_ns"]
    assert report.stretch.steps == 12  # the first has to start things
    messages = [record.getMessage() for record in caplog.records]
    assert sum("data_time=" in message and "step_time=" in message for message in messages) == 13
    assert "epoch 0: 12 steps, data_time" in messages[-1]


def test_a_loader_draws_none_of_the_users_random_numbers():
    torch.manual_seed(7)
    expected = torch.rand(3).tolist()
    torch.manual_seed(7)
    with _make(num_workers=1) as batches:
        _rest(batches)
    with _make(num_workers=None) as batches:
        _rest(batches)
    assert torch.rand(3).tolist() == expected


def test_what_workers_draw_follows_from_seed_epoch_and_rank():
    def drawn(seed: int, epoch: int, rank: int = 0) -> list[int]:
        with _make(Draws(), num_workers=1, seed=seed, rank=rank, world=2) as batches:
            batches.set_epoch(epoch)
            return _rest(batches)

    assert drawn(1, 1) == drawn(1, 1)
    assert drawn(1, 1) != drawn(1, 2)
    assert drawn(1, 1) != drawn(2, 1)
    assert drawn(1, 1) != drawn(1, 1, rank=1)


def test_workers_are_begun_as_the_user_says(tmp_path):
    def begin(worker: int) -> None:
        (tmp_path / str(worker)).write_text(str(get_worker_info().num_workers))

    with _make(num_workers=2, worker_init_fn=begin) as batches:
        _rest(batches)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.name in "01"} == {"0": "2", "1": "2"}


def test_what_cannot_be_meant_is_said_at_once():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    for dataset, how in (
        (Stream(), {}),
        (Numbers(), {"batch_size": 0}),
        (Numbers(), {"num_workers": -1}),
        (Numbers(), {"prefetch_factor": 0}),
        (Numbers(), {"shuffle": "wild"}),
    ):
        with pytest.raises(UsageError):
            loader(dataset, **({"batch_size": 4} | how))


def test_before_the_first_step_there_is_nothing_to_report():
    batches = _make()
    assert batches.last is None
    assert batches.report().bottleneck == "unknown"


# --- what holds a training up ----------------------------------------------------------------------------------------


class Waits(Numbers):
    """A store that takes its time."""

    def __getitem__(self, sample: int) -> torch.Tensor:
        time.sleep(0.004)
        return torch.tensor(sample)


class Misses(Numbers):
    """The same, for a dataset that says so."""

    def __getitem__(self, sample: int) -> torch.Tensor:
        clock = timing.clock()
        began = clock.start()
        time.sleep(0.004)
        clock.lap(timing.MISS, began)
        clock.count(1, 1000, misses=1)
        return torch.tensor(sample)


class Computes(Numbers):
    def __getitem__(self, sample: int) -> torch.Tensor:
        np.sort(np.random.default_rng(sample).random(40_000))
        return torch.tensor(sample)


class Large(Numbers):
    """Bytes that cost nothing to make, and much to hand over."""

    data = bytes(600_000)

    def __getitem__(self, sample: int) -> bytes:
        return self.data


def _as_it_is(samples):
    return samples


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "bottleneck", "words"),
    [
        (Waits(), "store", "Reading waits"),
        (Misses(), "store", "100 % of the samples were not in"),
        (Computes(), "decoding", "Decoding"),
    ],
)
def test_what_takes_the_time_of_reading_is_named(dataset, bottleneck, words, workers):
    with _make(dataset, num_workers=workers) as batches:
        _rest(batches)
        report = batches.report()
    assert report.bottleneck == bottleneck
    assert words in report.text
    assert "of each step is spent waiting for data" in str(report)


def test_a_training_that_takes_its_time_is_named():
    with _make(Numbers(), num_workers=0) as batches:
        for _ in batches:
            time.sleep(0.03)
        assert batches.report().bottleneck == "training"


def test_the_way_between_processes_is_named():
    with _make(Large(), batch_size=32, num_workers=2, collate_fn=_as_it_is) as batches:
        for _ in range(4):
            for _ in batches:
                pass
        report = batches.report()
    assert report.bottleneck == "handing"
    assert "num_workers=0" in report.text
