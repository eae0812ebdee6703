"""A `tf.data.Dataset` of the samples of a source: read many at a time in Python, whole chunks handed to TensorFlow.

`datacache.tf.dataset` opens what is read; this and `records` are all the rest of it. Both give the same elements:

- detection: `(image, {"boxes": float32 (n, 4), "labels": int64 (n,)})`, both ragged in a batch
- classification: `(image, int64)`; path: `(image, string)`; none: `image`

where an image is a string of its stored bytes. Needs TensorFlow. Generators run in TensorFlow's threads, several at a
time where there are several iterators; what they share is read-only or a counter of epochs. Functions that TensorFlow
calls are traced into graphs, which run in its own threads.
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
from datacache.loaders.selection import NO_CLASS, check_kind
from datacache.loaders.source import SampleOptions, SampleSource
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
    check_kind(source.kind)
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


Sample = tuple[bytes, Any]
"""An image's bytes, and its target as a `SampleSource` gives it."""


# --- chunks: what a generator hands over, many samples at once --------------------------------------------------------


def chunk_spec(kind: str | None, size: int | None) -> Any:
    """Return the signature of chunks of this many samples (None: any number)."""
    images = tf.TensorSpec([size], tf.string)
    if kind == "detection":
        boxes, labels = tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int64)
        return images, boxes, labels, tf.TensorSpec([size], tf.int64)
    if kind is None:
        return (images,)
    return images, tf.TensorSpec([size], tf.string if kind == "path" else tf.int64)


def encode_chunk(samples: Sequence[Sample], kind: str | None) -> tuple[NDArray[Any], ...]:
    """Return samples as arrays of `chunk_spec`: images, and flat boxes with their number in each image, or other
    targets."""
    images = _objects([image for image, _ in samples])
    targets = [target for _, target in samples]
    if kind == "detection":
        counts = np.array([len(target["labels"]) for target in targets], np.int64)
        boxes = np.concatenate([target["boxes"] for target in targets])
        return images, boxes, np.concatenate([target["labels"] for target in targets]), counts
    if kind is None:
        return (images,)
    if kind == "path":
        return images, _objects([target.encode("utf-8", "surrogateescape") for target in targets])
    return images, np.array(targets, np.int64)


def batch_of_chunk(kind: str | None, *chunk: Any) -> Any:
    if kind == "detection":
        images, boxes, labels, counts = chunk
        return images, {"boxes": _ragged(boxes, counts), "labels": _ragged(labels, counts)}
    return chunk[0] if kind is None else chunk


def elements_of_chunk(kind: str | None, *chunk: Any) -> Any:
    if kind != "detection":
        return tf.data.Dataset.from_tensor_slices(chunk[0] if kind is None else chunk)
    images, boxes, labels, counts = chunk
    ends = tf.cumsum(counts)

    def element(image: Any, start: Any, end: Any) -> Any:
        return image, {"boxes": boxes[start:end], "labels": labels[start:end]}

    return tf.data.Dataset.from_tensor_slices((images, ends - counts, ends)).map(element)


# --- serialized examples, with features named as in `shards.records.TfRecordLabels` -----------------------------------


_IMAGE = {"image/encoded": tf.io.FixedLenFeature([], tf.string)}
_SIDES = tuple(f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax"))
_BOX_CLASS, _CLASS, _KEY = "image/object/class/label", "image/class/label", "image/key"


def has_boxes(serialized: bytes) -> bool:
    """Tell whether an example says anything of boxes, if only that there are none."""
    features = tf.train.Example.FromString(serialized).features.feature
    return _SIDES[0] in features and _BOX_CLASS in features


def parse_example(kind: str | None, serialized: Any) -> Any:
    found = tf.io.parse_single_example(serialized, _features(kind, batched=False))
    image = found["image/encoded"]
    if kind == "detection":
        return image, {"boxes": _boxes([found[side] for side in _SIDES], _size(found)), "labels": found[_BOX_CLASS]}
    if kind == "classification":
        return image, _only(tf.reduce_sum(found[_CLASS]), tf.size(found[_CLASS]))
    return (image, found[_KEY]) if kind == "path" else image


def parse_examples(kind: str | None, serialized: Any) -> Any:
    found = tf.io.parse_example(serialized, _features(kind, batched=True))
    images = found["image/encoded"]
    if kind == "detection":
        labels = found[_BOX_CLASS]
        sizes = tf.gather(_size(found), labels.value_rowids())
        boxes = _boxes([found[side].flat_values for side in _SIDES], sizes)
        return images, {"boxes": tf.RaggedTensor.from_row_splits(boxes, labels.row_splits), "labels": labels}
    if kind == "classification":
        return images, _only(tf.reduce_sum(found[_CLASS], axis=1), found[_CLASS].row_lengths())
    return (images, found[_KEY]) if kind == "path" else images


def _features(kind: str | None, *, batched: bool) -> dict[str, Any]:
    def several(dtype: Any) -> Any:
        if batched:
            return tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)
        return tf.io.FixedLenSequenceFeature([], dtype, allow_missing=True)

    if kind == "detection":
        size = tf.io.FixedLenFeature([], tf.int64, 0)
        sides = {side: several(tf.float32) for side in _SIDES}
        return _IMAGE | sides | {_BOX_CLASS: several(tf.int64), "image/width": size, "image/height": size}
    if kind == "classification":
        return _IMAGE | {_CLASS: several(tf.int64)}
    return _IMAGE | {_KEY: tf.io.FixedLenFeature([], tf.string)} if kind == "path" else _IMAGE


def _size(found: dict[str, Any]) -> Any:
    width, height = (tf.cast(found[f"image/{side}"], tf.float32) for side in ("width", "height"))
    return tf.stack([width, height, width, height], axis=-1)


def _boxes(sides: list[Any], size: Any) -> Any:
    return tf.stack(sides, axis=-1) * size


def _only(total: Any, count: Any) -> Any:
    return tf.where(count == 1, total, tf.constant(NO_CLASS, tf.int64))


def _ragged(values: Any, counts: Any) -> Any:
    return tf.RaggedTensor.from_row_lengths(values, counts, validate=False)


def _objects(values: Sequence[bytes]) -> NDArray[Any]:
    array = np.empty(len(values), object)  # a NumPy string would lose zeros at its end
    array[:] = values
    return array
