"""A `tf.data.Dataset` of a set of TFRecord shards, which TensorFlow reads itself from local paths.

`datacache.tf.dataset` opens the set. A shard's path is made when its turn comes, and while some shards are read the
next are fetched and verified (`ShardPaths`). TensorFlow verifies each record's own checksum. Needs TensorFlow; threads
as in `dataset`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from datacache.core.errors import DatacacheError, UsageError
from datacache.loaders.lookahead import PlanSource, publish
from datacache.loaders.order import EpochOrder, Shuffle
from datacache.loaders.selection import NO_CLASS, check_kind
from datacache.loaders.shard_source import ShardPath, ShardPaths, ShardSource
from datacache.loaders.tensorflow.dataset import (
    TfOptions,
    counted,
    explained,
    has_boxes,
    parse_example,
    parse_examples,
)
from datacache.settings import Settings
from datacache.shards.reader import Shards
from datacache.shards.source import SnapshotFiles

_MIXED_SHARDS = 4
"""Shards that a shuffle reads at a time."""
_BUFFER_BYTES = 128 * 2**20
_BUFFER_SAMPLES = 4096
"""The most records that a shuffle chooses from."""
_READ_BYTES = 2**20
_ALL_BLOCKS = 2**31
"""As a plan's number of blocks: more than any object has."""


def records_dataset(shards: Shards, target: str | None, options: TfOptions, settings: Settings, *, parse: bool) -> Any:
    """Return the samples of a set, shard by shard; shuffled, the shards in random order and the samples of some of
    them."""
    kind = _kind(shards, target) if parse else None
    turns = Turns(shards, options, settings)
    signature = tf.TensorSpec([None], tf.string)
    # `Turns` counts on it that one group waits here while one is read.
    groups = tf.data.Dataset.from_generator(explained(turns), output_signature=signature).prefetch(1)
    records = groups.flat_map(_records)
    if options.shuffle:
        mean_bytes = max(1, shards.set.size_bytes // max(1, len(shards)))
        buffer = max(16, min(_BUFFER_SAMPLES, _BUFFER_BYTES // mean_bytes))
        seed = (options.seed * 1_000_003 + (options.epoch or 0)) % 2**63
        records = records.shuffle(buffer, seed=seed, reshuffle_each_iteration=options.epoch is None)
    if options.batch_size is not None:
        records = records.batch(options.batch_size, drop_remainder=options.drop_remainder)
    if parse:
        function = parse_example if options.batch_size is None else parse_examples
        records = records.map(partial(function, kind), num_parallel_calls=tf.data.AUTOTUNE)
    return counted(records, len(shards), options)


def _records(paths: Any) -> Any:
    """Return the records of a group of shards, one of each in turn."""
    return tf.data.Dataset.from_tensor_slices(paths).interleave(
        lambda path: tf.data.TFRecordDataset(path, buffer_size=_READ_BYTES),
        cycle_length=_MIXED_SHARDS,
        block_length=1,
    )


class Turns:
    """The paths of the shards in groups, in the order in which they are read; each call begins another iteration.

    TensorFlow asks for a group when it has begun to read the one before it, and begins with a group when it has come to
    the end of the one before. So when it asks, all groups are done with but the latest. An empty one comes last, by
    which the end of the last shards is known.
    """

    def __init__(self, shards: Shards, options: TfOptions, settings: Settings) -> None:
        self._options, self._settings = options, settings
        self._plan = ShardPlan(shards)
        self._paths = ShardPaths(shards, settings)
        shuffle: Shuffle = "global" if options.shuffle else "none"
        self._order = EpochOrder(len(shards.set.shards), seed=options.seed, shuffle=shuffle)
        self._epochs = options.epochs()

    def __call__(self) -> Iterator[NDArray[Any]]:
        epoch = next(self._epochs)
        order = self._order.of_epoch(epoch)
        after = self._order.of_epoch(epoch + 1 if self._options.epoch is None else epoch)
        size = _MIXED_SHARDS if self._options.shuffle else 1
        done: list[ShardPath] = []
        latest: list[ShardPath] = []
        try:
            with publish(self._settings, self._plan, order, next_order=after) as plan:
                for start in range(0, len(order) + size, size):
                    plan.advance(start)
                    opened: list[ShardPath] = []
                    error = self._finish(done) or self._open(order.take(start, start + size).tolist(), opened)
                    done = []
                    if opened or error is not None or start >= len(order):
                        done, latest = latest, opened
                        yield np.array([os.fsencode(shard.path) for shard in opened], object)
                    if error is not None:  # what came before it has been read
                        raise error
            error = self._finish(done)
            if error is not None:
                raise error
        finally:
            for shard in (*done, *latest):
                shard.close()

    @staticmethod
    def _finish(shards: list[ShardPath]) -> DatacacheError | None:
        found: DatacacheError | None = None
        for shard in shards:
            try:
                shard.finish()
            except DatacacheError as exc:
                found = exc
        return found

    def _open(self, numbers: list[int], opened: list[ShardPath]) -> DatacacheError | None:
        for number in numbers:
            try:
                opened.append(self._paths.open(number))
            except DatacacheError as exc:
                if not self._options.skips(exc):
                    for shard in opened:
                        shard.close()
                    opened.clear()
                    return exc
        return None


class ShardPlan:
    """For lookahead: shards by number, each all of its object."""

    def __init__(self, shards: Shards) -> None:
        self._source = ShardSource(shards, None).plan_source()
        files = shards.files
        rows: Sequence[int | None] = range(len(shards.set.shards))
        if isinstance(files, SnapshotFiles) and files.listed:
            rows = files.rows
        self._items = np.array([[row or 0] for row in rows], np.uint32).reshape(-1, 1)
        if None in rows:  # of a shard that is not there, no block of any row
            counts = [[0, 0 if row is None else _ALL_BLOCKS] for row in rows]
            self._items = np.concatenate([self._items, np.array(counts, np.uint32)], axis=1)

    def plan_source(self) -> PlanSource | None:
        return self._source

    def plan_items(self, samples: NDArray[np.int64]) -> NDArray[np.uint32]:
        return self._items[samples]


def _kind(shards: Shards, target: str | None) -> str | None:
    check_kind(target)
    if target in (None, "path"):
        return target
    classes = bool(np.any(shards.classes != NO_CLASS))
    if target == "auto":
        return "classification" if classes else "detection" if shards.set.classes and _has_boxes(shards) else "path"
    if target == "detection" and not _has_boxes(shards):
        raise UsageError(f"the records of {shards.files.where} have no boxes", hint="target='path', or None.")
    if target != "detection" and not classes:
        raise UsageError(f"the records of {shards.files.where} have no classes", hint="target='path', or None.")
    return "detection" if target == "detection" else "classification"


def _has_boxes(shards: Shards) -> bool:
    """Look at the first record that can be read: all are made alike."""
    error: DatacacheError | None = None
    for first in shards.starts[:-1].tolist():
        (found,) = shards.read_first([first])
        if not isinstance(found, DatacacheError):
            return has_boxes(bytes(found))
        error = found
    if error is not None:
        raise error
    return False
