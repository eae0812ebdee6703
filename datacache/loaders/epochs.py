"""Which epoch an iteration of a stream is: workers agree on it, and the training may set it while they live.

A `DataLoader` tells an iterable dataset in its workers neither that another iteration began nor which it is. Here each
iteration is entered once in memory that all of these processes share: by the process that reads, or by worker 0, and
its other workers find what it entered by the seed that PyTorch draws for each iterator (`WorkerInfo.seed` less the
worker's number) and by how often they themselves began. It is the epoch that was set since the iteration before, else
the one after that iteration's. Nothing locks: every word has one writer. The protocol is in docs/CONCURRENCY.md.

Used by `shard_dataset`; needs PyTorch. One iteration at a time in each rank; what is left of one that was given up may
end later.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from datacache.core.errors import DatacacheError, UsageError

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
    """The epochs of a stream. It goes along to workers, forked or spawned."""

    def __init__(self) -> None:
        self._shared = torch.zeros((_RANKS, _WIDTH), dtype=torch.int64).share_memory_()
        self._set = 0  # what was set here, whatever rank this turns out to be
        self._begun: dict[tuple[int, int], tuple[int, int]] = {}  # by process and worker: the seed, and how often

    def set(self, epoch: int, rank: int) -> None:
        """The next iteration of this rank is of this epoch."""
        if not 0 <= epoch < 1 << _EPOCH_BITS:
            raise UsageError(f"An epoch is 0 to 2**32-1, not {epoch}.")
        row = self._row(rank)
        times = max(self._set, int(row[_SET])) >> _EPOCH_BITS
        self._set = (times + 1) << _EPOCH_BITS | epoch
        row[_SET] = self._set

    def begin(self, rank: int) -> int:
        """The epoch of the iteration that begins now: once in the process that reads, or in each of its workers."""
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
    """The latest iterations. One that is being written this moment is none yet."""
    found = []
    for at in range(_ENTRIES, _JOINED, _ENTRY):
        *values, check = row[at : at + _ENTRY].tolist()
        entry = _Iteration(*values)
        if entry.number and hash(entry) == check:
            found.append(entry)
    return found


def _join(row: NDArray[Any], seed: int, begun: int, worker: int) -> int:
    """The epoch of the iteration that worker 0 enters or has entered."""
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
