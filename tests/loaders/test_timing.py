"""The clock that datasets tell what they do, in this process and in workers; and the words for what was measured."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from datacache.loaders.tuning import clock as timing
from datacache.loaders.tuning.clock import Clocks, Measured, MeasuredCollate, Usage, enter_worker
from datacache.loaders.tuning.report import Stretch, diagnose
from tests.leftovers import in_own_process


class Squares:
    """Reads, decodes and says so."""

    colour = "blue"

    def __len__(self) -> int:
        return 40

    def __getitem__(self, sample: int) -> torch.Tensor:
        clock = timing.clock()
        began = clock.start()
        time.sleep(0.001)
        began = clock.lap(timing.READ, began)
        clock.lap(timing.DECODE, began)
        clock.count(1, 100, misses=sample % 2)
        return torch.tensor(sample * sample)


class Batches(Squares):
    def __getitems__(self, samples):
        return [torch.tensor(-sample) for sample in samples]


class Dies(Squares):
    def __getitem__(self, sample: int) -> torch.Tensor:
        if sample == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(sample)


def _dataloader(dataset, clocks: Clocks, workers: int, context: str | None) -> DataLoader:
    return DataLoader(
        Measured(dataset, clocks),
        batch_size=4,
        num_workers=workers,
        multiprocessing_context=context,
        collate_fn=MeasuredCollate(torch.stack, clocks),
        worker_init_fn=partial(enter_worker, clocks),
    )


def test_without_a_loader_a_clock_does_nothing():
    clock = timing.clock()
    assert clock is timing.NO_CLOCK
    assert clock.lap(timing.READ, clock.start()) == 0
    clock.count(1, 1)
    assert Squares()[3] == 9


@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (1, "spawn")], ids=["here", "fork", "spawn"])
def test_what_is_told_the_clock_arrives_where_the_loader_is(workers, context):
    clocks = Clocks(workers)
    found = list(_dataloader(Squares(), clocks, workers, context))
    assert torch.cat(found).tolist() == [n * n for n in range(40)]
    usage = clocks.usage(1 if workers else 0)
    assert (usage.samples, usage.size_bytes, usage.misses, usage.batches) == (40, 4000, 20, 10)
    assert clocks.size_bytes() == 4000
    assert usage.read_s >= 0.04
    assert usage.fetch_s >= usage.read_s + usage.decode_s
    assert 0 < usage.fetch_cpu_s <= usage.fetch_s
    assert usage.collate_s > 0
    assert (usage.cpu_s > 0) == bool(workers)
    assert timing.clock() is timing.NO_CLOCK


def test_what_a_killed_worker_did_is_known():
    in_own_process(count_what_a_killed_worker_did)  # PyTorch raises from a signal handler, wherever that finds us


def count_what_a_killed_worker_did():
    clocks = Clocks(1)
    # PyTorch says that the worker died, or meets the end of the socket that its last batch was to come through.
    with pytest.raises((RuntimeError, EOFError, ConnectionError)):
        list(_dataloader(Dies(), clocks, 1, "fork"))
    assert clocks.usage().samples == 20


def test_of_two_times_the_difference_is_what_was_done_between():
    clocks = Clocks(0)
    data = Measured(Squares(), clocks)
    data.__getitems__([1])
    before = clocks.usage()
    data.__getitems__([2, 3])
    assert clocks.usage().minus(before).samples == 2


def test_a_measured_dataset_is_the_dataset():
    clocks = Clocks(0)
    data = Measured(Batches(), clocks)
    assert (len(data), data.colour, int(data[3])) == (40, "blue", 9)
    assert data.__getitems__([1, 2]) == [torch.tensor(-1), torch.tensor(-2)]
    assert not hasattr(data, "plan_source")


# --- words ---------------------------------------------------------------------------------------------------------


def _stretch(workers: int = 2, *, data_s: float = 9.0, cpu_s: float = 0.0, receive_cpu_s: float = 0.0, **usage: float):
    return Stretch(
        workers,
        processors=2,
        steps=100,
        samples=1000,
        data_s=data_s,
        step_s=10.0,
        receive_cpu_s=receive_cpu_s,
        cpu_s=cpu_s,
        usage=Usage(samples=1000.0, size_bytes=1e9, **usage),
    )


@pytest.mark.parametrize(
    ("stretch", "bottleneck", "words"),
    [
        (Stretch(0, 2), "unknown", "No whole step"),
        (_stretch(data_s=0.5), "training", "data is ready 95 % of the time"),
        (
            _stretch(miss_s=15, fetch_s=18, misses=970.0, decode_s=3),
            "store",
            "97 % of the samples were not in the cache",
        ),
        (_stretch(miss_s=15, fetch_s=18, misses=970.0, decode_s=3), "store", "at 97 MB/s"),
        (_stretch(fetch_s=19, fetch_cpu_s=1), "store", "95 % of the dataset's time"),
        (_stretch(0, fetch_s=8, read_s=7, fetch_cpu_s=2), "reading", "packed=True"),
        (
            _stretch(fetch_s=19.6, decode_s=19, fetch_cpu_s=19, cpu_s=19.5),
            "decoding",
            "2 workers are busy 98 % of the time",
        ),
        (_stretch(fetch_s=19.6, decode_s=19, fetch_cpu_s=19, cpu_s=19.5), "decoding", "all of 2 processors is in use"),
        (_stretch(fetch_s=19, decode_s=19, fetch_cpu_s=9, fetch_queued_s=9), "decoding", "waits for a processor"),
        (_stretch(1, fetch_s=9.8, decode_s=9, fetch_cpu_s=9, cpu_s=9), "decoding", "num_workers can be larger"),
        (_stretch(0, fetch_s=8.8, fetch_cpu_s=8.8, cpu_s=9), "decoding", "num_workers=1 or more"),
        (_stretch(fetch_s=19, decode_s=4, read_s=2, fetch_cpu_s=19, cpu_s=19), "transform", "The transform"),
        (_stretch(fetch_s=19, decode_s=4, transform_s=15, fetch_cpu_s=19, cpu_s=19), "transform", "The transform"),
        (_stretch(fetch_s=5, read_s=5, collate_s=14, cpu_s=19), "collate", "74 % of the loading time"),
        (_stretch(fetch_s=2, read_s=2, receive_cpu_s=8), "handing", "only 10 % of the time"),
        (_stretch(fetch_s=2, read_s=2, cpu_s=15), "handing", "num_workers=0"),
        (_stretch(0, fetch_s=1, read_s=1), "other", "89 % of the waiting"),
    ],
)
def test_numbers_become_words(stretch, bottleneck, words):
    if stretch.workers and stretch.cpu_s and bottleneck == "handing":
        stretch = stretch._replace(usage=stretch.usage._replace(cpu_s=stretch.cpu_s))
    report = diagnose(stretch)
    assert (report.bottleneck, words in report.text) == (bottleneck, True), report.text
    assert report.as_dict()["bottleneck"] == bottleneck


def test_a_report_has_its_numbers_as_rates():
    report = diagnose(_stretch(miss_s=15, fetch_s=18, misses=250.0, cpu_s=2))
    assert (report.data_share, report.miss_share, report.samples_per_s) == (0.9, 0.25, 100)
    assert (report.bytes_per_s, report.cpu_s_per_sample) == (1e8, 0.002)
