"""Tell the catalog how much of each snapshot this node holds, for whoever places work near its data.

A thread of the daemon (of its first process) counts every half minute, and writes where something has changed by more
than a hair, or so that others see that the node lives (`catalog.holdings`). It looks at a sample of each snapshot's
blocks, drawn once from the manifest, so a count takes a millisecond a snapshot, however large it is: a snapshot of up
to 512 blocks is counted whole, of a larger one the share is right to about two in a hundred, less so where few files
have most of the bytes.

Counted are the snapshots that are mounted here, and of each data set with blocks in the cache the tagged and newest
ones: those share most of their blocks with the one that was read.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from datacache.catalog.base import Catalog
from datacache.catalog.holdings import MOST_HELD, Holding, write_holdings
from datacache.catalog.leases import REPORT_LEASE_S
from datacache.core.concurrency import RepeatedCall
from datacache.core.errors import CatalogUnavailableError, DatacacheError
from datacache.core.ids import BlockId, block_count, block_id, block_length, object_id
from datacache.daemon.mount_leases import mounted
from datacache.manifest.reader import Manifest
from datacache.store.clock import elapsed_s

log = logging.getLogger(__name__)
_FIRST_LOOK_S, _LOOK_EVERY_S = 1.0, 30.0
_RENEW_EVERY_S = REPORT_LEASE_S / 3
_LIST_EVERY_S = 120.0
"""How often data sets are asked for the snapshots that they list by now."""
_SAMPLE_BLOCKS = 512
_SAMPLE_RANGES = 128
_OF_A_DATASET = 8
_LEAST_SHARE = 0.01
_CHANGED_BY = 0.02
_BLOCK_ID_BYTES = 20
_STOP_TIMEOUT_S = 1.0


class BlockSample(NamedTuple):
    """Some blocks of a snapshot, and what each stands for."""

    blocks: bytes
    """The ids, one after the other."""
    weights: array[float]
    """The bytes that each block stands for."""
    total_bytes: int

    def held_bytes(self, missing: Callable[[Sequence[BlockId]], list[int]]) -> int:
        """Return about how many bytes of the snapshot are here. `missing` gives the positions of blocks that are
        not."""
        at_all = range(0, len(self.blocks), _BLOCK_ID_BYTES)
        gone = missing([BlockId(self.blocks[at : at + _BLOCK_ID_BYTES]) for at in at_all])
        if not gone:
            return self.total_bytes
        whole = sum(self.weights)
        return int(self.total_bytes * (1 - sum(self.weights[at] for at in gone) / whole))


def sample_blocks(manifest: Manifest) -> BlockSample:
    """Draw blocks evenly from a snapshot's rows: all of them, if they are few."""
    blocks, weights = bytearray(), array("d")
    rows, per_object = manifest.rows, max(1, _SAMPLE_BLOCKS // max(1, min(manifest.rows, _SAMPLE_BLOCKS)))
    if rows <= _SAMPLE_BLOCKS:
        wanted = {number: info.rows for number, info in enumerate(manifest.root.ranges)}
    else:
        # Ranges have very different sizes: each stands for as many rows as the others.
        first_rows = list(accumulate((info.rows for info in manifest.root.ranges), initial=0))
        hits = Counter(bisect_right(first_rows, row) - 1 for row in _evenly(rows, _SAMPLE_RANGES))
        wanted = {number: count * _SAMPLE_BLOCKS // _SAMPLE_RANGES for number, count in hits.items()}
    for number_of, held in zip(wanted, manifest.ranges(list(wanted)), strict=True):
        for at in _evenly(len(held.paths), wanted[number_of]):
            entry = held.entry(at)
            if not (entry.size_bytes and entry.has_object):
                continue
            object = object_id(manifest.object_ref(entry))
            whole = block_count(entry.size_bytes)
            some = _evenly(whole, per_object)
            for number in some:
                blocks += block_id(object, number)
                all_of_it = len(some) == whole
                weights.append(block_length(entry.size_bytes, number) if all_of_it else entry.size_bytes / len(some))
    return BlockSample(bytes(blocks), weights, manifest.root.total_bytes)


def _evenly(count: int, most: int) -> Sequence[int]:
    """Return at most so many positions of `count`, evenly spaced."""
    return range(count) if count <= most else [(2 * at + 1) * count // (2 * most) for at in range(most)]


class Holdings:
    """Writes to the catalog how much of each snapshot a home holds. One thread calls `look`: its own, after `start`."""

    def __init__(
        self,
        node: str,
        home: Path,
        catalog: Catalog,
        url: str,
        *,
        missing: Callable[[Sequence[BlockId]], list[int]],
        datasets: Callable[[], Iterable[str]],
    ) -> None:
        """`node`: the name that others know this node by. `url`: the catalog's, as mounts name it. `missing`: see
        `BlockSample.held_bytes`; `datasets`: names those with blocks in the cache."""
        self._node, self._home, self._catalog, self._url = node, home, catalog, url
        self._missing, self._datasets = missing, datasets
        self._samples: dict[str, BlockSample | None] = {}
        """By snapshot; None for one whose manifest cannot be read."""
        self._listed: set[str] = set()
        self._listed_at = self._written_at = float("-inf")
        self._written: dict[str, Holding] = {}
        trouble = "the catalog is not told what this node holds"
        self._looks = RepeatedCall(
            "holdings", self.look, _LOOK_EVERY_S, first_s=_FIRST_LOOK_S, trouble=trouble, log=log
        )

    def start(self) -> None:
        """Start the thread."""
        self._looks.start()

    def stop(self) -> None:
        """End the thread. What was written stays for a while: the blocks do, too, and another daemon comes."""
        self._looks.stop(_STOP_TIMEOUT_S)

    def look(self) -> dict[str, Holding]:
        """Count, write if that is due, and return what is held, by the snapshots' ids. The catalog's errors."""
        held = self._count()
        now_s = elapsed_s()
        if now_s - self._written_at >= _RENEW_EVERY_S or self._has_changed(held):
            write_holdings(self._catalog, self._node, held)
            self._written, self._written_at = held, now_s
        return held

    def _count(self) -> dict[str, Holding]:
        if elapsed_s() - self._listed_at >= _LIST_EVERY_S:
            self._listed = set(self._list())
            self._listed_at = elapsed_s()
        here = {mount.id for mount in mounted(self._home) if mount.catalog in ("", self._url)}
        wanted = [*sorted(here), *sorted(self._listed - here)][: 2 * MOST_HELD]
        self._samples = {id: self._samples[id] if id in self._samples else self._draw(id) for id in wanted}
        held = {}
        for id, sample in self._samples.items():
            if sample is not None and sample.blocks:
                holding = Holding(sample.held_bytes(self._missing), sample.total_bytes)
                if holding.share >= _LEAST_SHARE:
                    held[id] = holding
        return held

    def _list(self) -> Iterable[str]:
        """Yield the snapshots of the data sets in the cache that are counted: tagged ones and the newest."""
        for name in sorted(self._datasets()):
            dataset = self._catalog.dataset(name)
            if dataset is not None:
                newest = [record.id for record in self._catalog.snapshots(name)][::-1]
                tagged = set(dataset.tags.values())
                yield from sorted(newest, key=lambda id: id not in tagged)[:_OF_A_DATASET]

    def _draw(self, id: str) -> BlockSample | None:
        try:
            return sample_blocks(Manifest.open(id, self._catalog.get_blobs))
        except CatalogUnavailableError:
            raise
        except DatacacheError as exc:
            log.info("what is held of the snapshot %s is not counted: %s", id[:12], exc)
            return None

    def _has_changed(self, held: dict[str, Holding]) -> bool:
        none = Holding(0, 0)
        for id in held.keys() | self._written.keys():
            now, before = held.get(id, none).share, self._written.get(id, none).share
            if abs(now - before) >= _CHANGED_BY or (now == 1) != (before == 1):
                return True
        return False
