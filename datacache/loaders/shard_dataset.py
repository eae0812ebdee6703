"""A dataset over the samples of a shard set, map-style or as a stream of batches.

`datacache.torch.ShardDataset` opens a shard set; this is all the rest of it. See `dataset`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from datacache.core.errors import UsageError
from datacache.loaders.dataset import Options, SampleDataset
from datacache.loaders.lookahead import publish
from datacache.loaders.order import EpochOrder, Even, RankOrder, Shuffle
from datacache.loaders.packed import collate as our_collate
from datacache.loaders.ranks import rank_and_world
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

        The batches are the same for any number of workers, and each epoch has an order of its own (`set_epoch`, or one
        more at each `iter`). `shuffle`: `"blocks"` reads a few blocks of the shards at a time, `"global"` anything from
        anywhere, False in the order of the shards.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size}")
        kind: Shuffle = ("blocks" if shuffle else "none") if isinstance(shuffle, bool) else shuffle
        order = EpochOrder(len(self), seed=seed, shuffle=kind, groups=self.groups() if kind == "blocks" else None)
        rank, world = rank_and_world(rank, world)
        mine = RankOrder(order, rank=rank, world=world, even=even)
        return ShardStream(self, mine, batch_size, drop_last=drop_last, lookahead=lookahead, collate=collate_fn)


class ShardStream(IterableDataset):
    """Batches of a `ShardSamples` in an order of its own. One iteration at a time in each process."""

    def __init__(
        self,
        dataset: ShardSamples,
        order: RankOrder,
        batch_size: int,
        *,
        drop_last: bool,
        lookahead: bool,
        collate: Callable[[Any], Any],
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self._order, self._drop_last, self._lookahead, self._collate = order, drop_last, lookahead, collate
        self._next_epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next. Workers that persist count for themselves."""
        self._next_epoch = epoch

    def __len__(self) -> int:
        """How many batches an epoch of this rank has."""
        samples = len(self._order)
        return samples // self.batch_size if self._drop_last else -(-samples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = self._of_epoch(self._next_epoch)
        self._next_epoch += 1
        share = _Share(order, self.batch_size, mine, workers, len(self))
        plan = publish(self.dataset.settings, self.dataset, share) if self._lookahead else None
        try:
            done = 0
            for number in range(mine, len(self), workers):
                samples = order.take(number * self.batch_size, (number + 1) * self.batch_size)
                if plan is not None:
                    plan.advance(done)
                yield self._collate(self.dataset.__getitems__(samples.tolist()))
                done += len(samples)
        finally:
            if plan is not None:
                plan.close()

    def _of_epoch(self, epoch: int) -> RankOrder:
        old = self._order
        return RankOrder(old.order.of_epoch(epoch), rank=old.rank, world=old.world, even=old.even)


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
