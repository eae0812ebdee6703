"""A dataset over the samples of a shard set, map-style or as a stream of batches.

`datacache.torch.ShardDataset` opens a shard set; this is all the rest of it. See `dataset`. Needs PyTorch.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from datacache.core.errors import DatacacheError, UsageError
from datacache.loaders.dataset import Options, SampleDataset
from datacache.loaders.lookahead import publish
from datacache.loaders.order import Ordering, OrderOptions, RankOrder
from datacache.loaders.packed import collate as our_collate
from datacache.loaders.packed import is_empty
from datacache.loaders.shard_source import ShardSource
from datacache.settings import Settings
from datacache.shards.reader import Shards


class ShardSamples(SampleDataset, ShardSource):
    """All samples of a set, in the order in which they lie in its shards."""

    def __init__(self, shards: Shards, target: str | None, options: Options, settings: Settings) -> None:
        if shards.set.format != "webdataset":
            raise UsageError(
                f"{shards.files.where} has shards of the format {shards.set.format}",
                hint="Read TFRecords with datacache.tf.dataset(). For PyTorch: dsctl shard REF --format webdataset",
            )
        ShardSource.__init__(self, shards, target)
        SampleDataset.__init__(self, options, settings)

    def stream(
        self,
        batch_size: int,
        *,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] = our_collate,
        **order: Unpack[OrderOptions],
    ) -> ShardStream:
        """Return the same samples as an iterable over whole batches, for `DataLoader(stream, batch_size=None)`.

        The batches are the same for any number of workers, and each epoch has an order of its own: see
        `ShardStream.set_epoch`. `shuffle`: `"blocks"` (or True) reads a few blocks of the shards at a time, `"global"`
        anything from anywhere, False in the order of the shards. `seed`, `even` and `lookahead`: see `EpochSampler`;
        `multiple_of`, in batches: see `loader`. `rank` and `world` are, if not given, asked for when the stream is
        iterated: torch.distributed's once it is initialised, else RANK and WORLD_SIZE, else 0 of 1.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size}")
        if order.get("shuffle", True) is True:
            order["shuffle"] = "blocks"
        if "multiple_of" in order:
            order["multiple_of"] *= batch_size  # from here on it counts samples
        ordering = Ordering(**order)
        return ShardStream(self, ordering, batch_size, drop_last=drop_last, collate=collate_fn)


class ShardStream(IterableDataset):
    """Batches of a `ShardSamples` in an order of its own. One iteration at a time in each process."""

    def __init__(
        self,
        dataset: ShardSamples,
        ordering: Ordering,
        batch_size: int,
        *,
        drop_last: bool,
        collate: Callable[[Any], Any],
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self._ordering, self._order = ordering, ordering.of(dataset)
        self._drop_last, self._collate = drop_last, collate
        self._epochs = Epochs()
        self._sent_from: tuple[int, tuple[int, int]] | None = None
        self._mine(0)  # whatever is wrong is said here

    def set_epoch(self, epoch: int) -> None:
        """Set which epoch the next iteration is, also for workers that persist. Called between iterations in the
        process that has the DataLoader. Without it each iteration is the next epoch, from 0 on, with and without
        workers; one that was given up counts. Without workers an iteration begins when its first batch is asked for,
        else with the `iter` of the DataLoader."""
        self._epochs.set(epoch, self._rank_and_world()[0])

    def __len__(self) -> int:
        """Return how many batches an epoch of this rank has. Those of which all samples are skipped do not come."""
        return self._count(self._mine(0))

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return self._batches(None, 0, 1)
        # At once, whether or not this worker is asked for a batch: all of them have to agree on the epoch.
        return self._batches(self._begin(), worker.id, worker.num_workers)

    def __getstate__(self) -> dict[str, Any]:
        """Add the rank: spawned workers have no torch.distributed to ask."""
        state = self.__dict__ | {"_sent_from": None}
        with suppress(UsageError):  # said where it is iterated: this may go to a process that is told its rank
            state["_sent_from"] = (os.getpid(), self._rank_and_world())
        return state

    def _begin(self) -> RankOrder:
        return self._mine(self._epochs.begin(self._rank_and_world()[0]))

    def _batches(self, order: RankOrder | None, mine: int, workers: int) -> Iterator[Any]:
        order = order or self._begin()
        batches = self._count(order)
        share = _Share(order, self.batch_size, mine, workers, batches)
        plan = publish(self.dataset.settings, self.dataset, share) if self._ordering.lookahead else None
        try:
            done = 0
            for number in range(mine, batches, workers):
                samples = order.take(number * self.batch_size, (number + 1) * self.batch_size)
                if plan is not None:
                    plan.advance(done)
                batch = self.dataset.__getitems__(samples.tolist())
                done += len(samples)
                if not is_empty(batch):
                    yield self._collate(batch)
        finally:
            if plan is not None:
                plan.close()

    def _count(self, order: RankOrder) -> int:
        return len(order) // self.batch_size if self._drop_last else -(-len(order) // self.batch_size)

    def _mine(self, epoch: int) -> RankOrder:
        order = self._order if epoch == self._order.epoch else self._order.of_epoch(epoch)
        return self._ordering.share(order, self._rank_and_world())

    def _rank_and_world(self) -> tuple[int, int]:
        """Ask each time: a forked worker has its parent's torch.distributed; a spawned one was told by its parent."""
        parent = multiprocessing.parent_process() if get_worker_info() is not None else None
        if parent is not None and self._sent_from is not None and self._sent_from[0] == parent.pid:
            return self._sent_from[1]
        return self._ordering.ranks()


class _Share:
    """The samples of one worker's batches, in its order: what it publishes."""

    def __init__(self, order: RankOrder, batch_size: int, worker: int, workers: int, batches: int) -> None:
        self._order, self._batch = order, batch_size
        self._numbers = range(worker, batches, workers)

    def __len__(self) -> int:
        if not self._numbers:
            return 0
        whole = (len(self._numbers) - 1) * self._batch
        last = self._numbers[-1] * self._batch
        return whole + min(self._batch, len(self._order) - last)

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        stop = min(stop, len(self))
        if start >= stop:
            return np.zeros(0, np.int64)
        first, last = start // self._batch, (stop - 1) // self._batch
        parts = [
            self._order.take(number * self._batch, min((number + 1) * self._batch, len(self._order)))
            for number in self._numbers[first : last + 1]
        ]
        skip = start - first * self._batch
        return np.concatenate(parts)[skip : skip + stop - start]


# --- epochs ---------------------------------------------------------------------------------------------------------

_RANKS = 64
"""Rows; ranks that were started with one stream (`torch.multiprocessing.spawn`) share its memory."""
_KEPT = 8
"""Iterations that are remembered, for workers that are late."""
_WORKERS = 128
"""Workers of which it is known what they began last."""
_SET, _ENTRIES = 0, 1
_ENTRY = 6  # number, seed, begun, set, epoch, check
_JOINED = _ENTRIES + _KEPT * _ENTRY
_WIDTH = _JOINED + _WORKERS
_EPOCH_BITS = 32
_WAIT_S = 0.001


class _Iteration(NamedTuple):
    """One that was entered."""

    number: int
    """From 1 on; 0 is none."""
    seed: int
    begun: int
    set: int
    """The word `_SET` that it goes by: how often an epoch was set, and the epoch that was set last."""
    epoch: int


class Epochs:
    """Which epoch an iteration of a stream is: workers agree on it, and the training may set it while they live.

    A `DataLoader` tells an iterable dataset in its workers neither that another iteration began nor which it is. Here
    each iteration is entered once in memory that all of these processes share: by the process that reads, or by worker
    0, and its other workers find what it entered by the seed that PyTorch draws for each iterator (`WorkerInfo.seed`
    less the worker's number) and by how often they themselves began. It is the epoch that was set since the iteration
    before, else the one after that iteration's. Nothing locks: every word has one writer. The protocol is in
    docs/CONCURRENCY.md. One iteration at a time in each rank; what is left of one that was given up may end later.
    """

    def __init__(self) -> None:
        self._shared = torch.zeros((_RANKS, _WIDTH), dtype=torch.int64).share_memory_()
        self._set = 0  # what was set here, whatever rank this turns out to be
        self._begun: dict[tuple[int, int], tuple[int, int]] = {}  # by process and worker: the seed, and how often

    def set(self, epoch: int, rank: int) -> None:
        """Set the epoch of this rank's next iteration."""
        if not 0 <= epoch < 1 << _EPOCH_BITS:
            raise UsageError(f"An epoch is 0 to 2**32-1, not {epoch}.")
        row = self._row(rank)
        times = max(self._set, int(row[_SET])) >> _EPOCH_BITS
        self._set = (times + 1) << _EPOCH_BITS | epoch
        row[_SET] = self._set

    def begin(self, rank: int) -> int:
        """Return the epoch of the iteration that begins now: once in the process that reads, or in each of its
        workers."""
        worker = get_worker_info()
        row = self._row(rank)
        if worker is None:
            return self._enter(row, 0, 0)
        seed, me = worker.seed - worker.id, (os.getpid(), worker.id)
        before, begun = self._begun.get(me, (seed, 0))
        begun = begun + 1 if before == seed else 1
        self._begun[me] = (seed, begun)
        return self._enter(row, seed, begun) if worker.id == 0 else _join(row, seed, begun, worker.id)

    def _enter(self, row: NDArray[Any], seed: int, begun: int) -> int:
        before = max(_entered(row), default=_Iteration(0, 0, 0, -1, -1))
        asked = max(self._set, int(row[_SET]))
        epoch = before.epoch + 1 if asked == before.set else asked & ((1 << _EPOCH_BITS) - 1)
        entry = _Iteration(before.number + 1, seed, begun, asked, epoch)
        at = _ENTRIES + entry.number % _KEPT * _ENTRY
        row[at : at + _ENTRY] = (*entry, hash(entry))
        return epoch

    def _row(self, rank: int) -> NDArray[Any]:
        row: NDArray[Any] = self._shared[rank % _RANKS].numpy()
        return row

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_begun": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()  # a copy that was not made for a worker has memory of its own


def _entered(row: NDArray[Any]) -> list[_Iteration]:
    """Return the latest iterations. One that is being written this moment is none yet."""
    found = []
    for at in range(_ENTRIES, _JOINED, _ENTRY):
        *values, check = row[at : at + _ENTRY].tolist()
        entry = _Iteration(*values)
        if entry.number and hash(entry) == check:
            found.append(entry)
    return found


def _join(row: NDArray[Any], seed: int, begun: int, worker: int) -> int:
    parent = multiprocessing.parent_process()
    # Seeds come again where torch.manual_seed is called for every epoch: it is not one that this worker has been in.
    joined = int(row[_JOINED + worker]) if worker < _WORKERS else 0
    while True:
        for entry in _entered(row):
            if (entry.seed, entry.begun) == (seed, begun) and entry.number > joined:
                if worker < _WORKERS:
                    row[_JOINED + worker] = entry.number
                return entry.epoch
        if parent is not None and not parent.is_alive():
            raise DatacacheError("the process that this DataLoader worker reads for has ended")
        time.sleep(_WAIT_S)
