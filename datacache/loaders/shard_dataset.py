"""A dataset over the samples of a shard set, map-style or as a stream of batches.

`datacache.torch.ShardDataset` opens a shard set; this is all the rest of it. See `dataset`.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from datacache.core.errors import UsageError
from datacache.loaders.dataset import Options, SampleDataset
from datacache.loaders.epochs import Epochs
from datacache.loaders.lookahead import publish
from datacache.loaders.order import EpochOrder, Even, RankOrder, Shuffle
from datacache.loaders.packed import collate as our_collate
from datacache.loaders.packed import is_empty
from datacache.loaders.processes import rank_and_world
from datacache.loaders.shard_source import ShardSource
from datacache.loaders.targets import tensors
from datacache.settings import Settings
from datacache.shards.reader import Shards


class ShardSamples(ShardSource, SampleDataset):
    """All samples of a set, in the order in which they lie in its shards."""

    def __init__(self, shards: Shards, target: str | None, options: Options, settings: Settings) -> None:
        if shards.set.format != "webdataset":
            raise UsageError(
                f"{shards.files.where} has shards of the format {shards.set.format}",
                hint="Read TFRecords with datacache.tf.dataset(). For PyTorch: dsctl shard REF --format webdataset",
            )
        ShardSource.__init__(self, shards, target)
        SampleDataset.__init__(self, options, settings)

    def target(self, sample: int) -> Any:
        """See `SampleSource`; boxes are tensors."""
        return tensors(super().target(sample))

    def stream(
        self,
        batch_size: int,
        *,
        shuffle: Shuffle | bool = "blocks",
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        even: Even = "pad",
        drop_last: bool = False,
        lookahead: bool = True,
        collate_fn: Callable[[Any], Any] = our_collate,
    ) -> ShardStream:
        """The same samples as an iterable over whole batches, for `DataLoader(stream, batch_size=None)`.

        The batches are the same for any number of workers, and each epoch has an order of its own: see
        `ShardStream.set_epoch`. `shuffle`: `"blocks"` reads a few blocks of the shards at a time, `"global"` anything
        from anywhere, False in the order of the shards. `rank` and `world` are, if not given, asked for when the stream
        is iterated: torch.distributed's once it is initialised, else RANK and WORLD_SIZE, else 0 of 1.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size}")
        kind: Shuffle = ("blocks" if shuffle else "none") if isinstance(shuffle, bool) else shuffle
        order = EpochOrder(len(self), seed=seed, shuffle=kind, groups=self.groups() if kind == "blocks" else None)
        return ShardStream(
            self,
            order,
            batch_size,
            rank=rank,
            world=world,
            even=even,
            drop_last=drop_last,
            lookahead=lookahead,
            collate=collate_fn,
        )


class ShardStream(IterableDataset):
    """Batches of a `ShardSamples` in an order of its own. One iteration at a time in each process."""

    def __init__(
        self,
        dataset: ShardSamples,
        order: EpochOrder,
        batch_size: int,
        *,
        rank: int | None,
        world: int | None,
        even: Even,
        drop_last: bool,
        lookahead: bool,
        collate: Callable[[Any], Any],
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self._order, self._drop_last, self._lookahead, self._collate = order, drop_last, lookahead, collate
        self._given, self._even = (rank, world), even
        self._epochs = Epochs()
        self._sent_from: tuple[int, tuple[int, int]] | None = None
        self._mine(0)  # whatever is wrong is said here

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration is, also for workers that persist. Called between iterations in the process
        that has the DataLoader. Without it each iteration is the next epoch, from 0 on, with and without workers; one
        that was given up counts. Without workers an iteration begins when its first batch is asked for, else with the
        `iter` of the DataLoader."""
        self._epochs.set(epoch, self._rank_and_world()[0])

    def __len__(self) -> int:
        """How many batches an epoch of this rank has. Those of which all samples are skipped do not come."""
        return self._count(self._mine(0))

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return self._batches(None, 0, 1)
        # At once, whether or not this worker is asked for a batch: all of them have to agree on the epoch.
        return self._batches(self._begin(), worker.id, worker.num_workers)

    def __getstate__(self) -> dict[str, Any]:
        """Spawned workers have no torch.distributed to ask."""
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
        plan = publish(self.dataset.settings, self.dataset, share) if self._lookahead else None
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
        rank, world = self._rank_and_world()
        order = self._order if epoch == self._order.epoch else self._order.of_epoch(epoch)
        return RankOrder(order, rank=rank, world=world, even=self._even)

    def _rank_and_world(self) -> tuple[int, int]:
        """Asked for each time, as ranks are often known later than streams. A forked worker has its parent's
        torch.distributed and can ask; a spawned one was told by its parent."""
        parent = multiprocessing.parent_process() if get_worker_info() is not None else None
        if parent is not None and self._sent_from is not None and self._sent_from[0] == parent.pid:
            return self._sent_from[1]
        return rank_and_world(*self._given)


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
        """The samples at these places."""
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
