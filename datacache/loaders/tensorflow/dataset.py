"""A `tf.data.Dataset` of the samples of a source: read many at a time in Python, whole chunks handed to TensorFlow.

`datacache.tf.dataset` opens what is read; this and `tf_records` are all the rest of it. Needs TensorFlow. Generators
run in TensorFlow's threads, several at a time where there are several iterators; what they share is read-only or a
counter of epochs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from datacache.core.errors import DatacacheError, UsageError
from datacache.loaders.lookahead import publish
from datacache.loaders.order import EpochOrder, Shuffle
from datacache.loaders.source import SampleOptions, SampleSource
from datacache.loaders.tensorflow.elements import Sample, batch_of_chunk, chunk_spec, elements_of_chunk, encode_chunk
from datacache.settings import Settings

log = logging.getLogger("datacache.loader")
_CHUNK_SAMPLES = 64
_CHUNK_BYTES = 32 * 2**20
_CHUNKS_AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class TfOptions(SampleOptions):
    """How samples are given; arguments of `datacache.tf.dataset`."""

    batch_size: int | None = None
    drop_remainder: bool = False
    shuffle: bool = False
    seed: int = 0
    epoch: int | None = None
    """The epoch whose order every iteration has; None: one after another, from 0."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"batch_size={self.batch_size}")
        SampleOptions.__post_init__(self)

    def epochs(self) -> Iterator[int]:
        """Return the numbers of the epochs that iterations are, one after another. Any thread may take the next."""
        return itertools.count() if self.epoch is None else itertools.repeat(self.epoch)

    def elements(self, samples: int) -> int:
        if self.batch_size is None:
            return samples
        return samples // self.batch_size if self.drop_remainder else -(-samples // self.batch_size)

    def skips(self, error: DatacacheError) -> bool:
        """Tell whether to go on without what cannot be read, and log it then."""
        if not super().skips(error):
            return False
        log.warning("left out: %s", error)
        return True


def samples_dataset(source: SampleSource, options: TfOptions, settings: Settings) -> Any:
    """Return the samples in an order of their own, each epoch another one."""
    groups = source.groups() if options.shuffle else None
    shuffle: Shuffle = "none" if not options.shuffle else "global" if groups is None else "blocks"
    order = EpochOrder(len(source), seed=options.seed, shuffle=shuffle, groups=groups)
    stream = Stream(source, order, options, settings)
    size = options.batch_size if options.drop_remainder else None
    chunks = tf.data.Dataset.from_generator(explained(stream), output_signature=chunk_spec(source.kind, size))
    chunks = chunks.prefetch(_CHUNKS_AHEAD)
    if options.batch_size is None:
        found = chunks.flat_map(partial(elements_of_chunk, source.kind))
    else:
        found = chunks.map(partial(batch_of_chunk, source.kind))
    return counted(found, len(source), options)


def counted(found: Any, samples: int, options: TfOptions) -> Any:
    """Return the dataset with its length, which TensorFlow cannot see; there is none where samples may be left out."""
    if options.on_error == "skip":
        return found
    return found.apply(tf.data.experimental.assert_cardinality(options.elements(samples)))


def explained(generate: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
    """Return a generator whose errors carry their hints: TensorFlow makes one text of all that is raised."""

    def generator() -> Iterator[Any]:
        try:
            yield from generate()
        except DatacacheError as exc:
            if exc.hint:
                exc.add_note(exc.hint)
            raise

    return generator


class Stream:
    """The chunks of an iteration; each call begins the next one."""

    def __init__(self, source: SampleSource, order: EpochOrder, options: TfOptions, settings: Settings) -> None:
        self._source, self._order, self._options, self._settings = source, order, options, settings
        self._epochs = options.epochs()

    def __call__(self) -> Iterator[tuple[NDArray[Any], ...]]:
        size, kind = self._options.batch_size, self._source.kind
        held: list[Sample] = []
        for samples in self._samples():
            held += samples
            while held and (size is None or len(held) >= size):
                yield encode_chunk(held[:size], kind)
                held = [] if size is None else held[size:]
        if held and not self._options.drop_remainder:
            yield encode_chunk(held, kind)

    def _samples(self) -> Iterator[list[Sample]]:
        epoch = next(self._epochs)
        order = self._order.of_epoch(epoch)
        after = self._order.of_epoch(epoch + 1 if self._options.epoch is None else epoch)
        with publish(self._settings, self._source, order, next_order=after) as plan:
            for start, numbers in self._pieces(order):
                plan.advance(start)
                yield self._read(numbers)

    def _pieces(self, order: EpochOrder) -> Iterator[tuple[int, list[int]]]:
        """Yield places and samples that are read at once: a batch's, or some, and not too many bytes."""
        step = max(_CHUNK_SAMPLES, self._options.batch_size or 0)
        for start in range(0, len(order), step):
            numbers = order.take(start, start + step)
            pieces = np.cumsum(self._source.sizes[numbers]) // _CHUNK_BYTES
            cuts = [0, *(np.flatnonzero(np.diff(pieces)) + 1).tolist(), len(numbers)]
            for first, stop in itertools.pairwise(cuts):
                yield start + first, numbers[first:stop].tolist()

    def _read(self, numbers: Sequence[int]) -> list[Sample]:
        samples = []
        for number, data in zip(numbers, self._source.read_each(numbers), strict=True):
            try:
                if isinstance(data, DatacacheError):
                    raise data
                samples.append((bytes(data), None if self._source.kind is None else self._source.target(number)))
            except DatacacheError as exc:
                if not self._options.skips(exc):
                    raise
        return samples
