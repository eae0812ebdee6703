"""What an element of a `tf.data.Dataset` of samples is, made of chunks of samples or of serialized examples.

Used by `tf_dataset` and `tf_records`; needs TensorFlow. Both give the same elements:

- detection: `(image, {"boxes": float32 (n, 4), "labels": int64 (n,)})`, both ragged in a batch
- classification: `(image, int64)`; path: `(image, string)`; none: `image`

where an image is a string of its stored bytes. Feature names are those of `shards.records.TfRecordLabels`. Functions
that TensorFlow calls are traced into graphs, which run in its own threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from datacache.loaders.selection import NO_CLASS

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


# --- serialized examples ----------------------------------------------------------------------------------------------


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
