"""TensorFlow: snapshots and shard sets as `tf.data.Dataset`s.

    import tensorflow as tf

    import datacache.tf

    faces = datacache.tf.dataset("faces@v3", shuffle=True, batch_size=32)
    for images, target in faces.prefetch(tf.data.AUTOTUNE):
        ...                                     # images: strings of stored bytes; target["boxes"], target["labels"]

Needs TensorFlow (`pip install 'dsctl[tensorflow]'`), and no PyTorch.
"""

from __future__ import annotations

from contextlib import closing
from os import PathLike
from typing import Any, Unpack

from datacache.annotations.query import Query
from datacache.api import open_catalog, open_samples
from datacache.api.options import QueryOptions, make_query, take
from datacache.api.progress import of_images, shown
from datacache.conversion.index import Reading
from datacache.core.errors import UsageError
from datacache.loaders.selection import select
from datacache.loaders.shard_source import ShardSource
from datacache.loaders.source import SnapshotSource
from datacache.settings import Settings, load_settings
from datacache.shards.reader import Shards

try:
    from datacache.loaders.tensorflow.dataset import TfOptions, samples_dataset
    from datacache.loaders.tensorflow.records import records_dataset
except ModuleNotFoundError as exc:
    if (exc.name or "").partition(".")[0] != "tensorflow":
        raise
    raise ModuleNotFoundError(
        "datacache.tf needs TensorFlow: pip install 'dsctl[tensorflow]'", name=exc.name, path=exc.path
    ) from exc

__all__ = ["dataset"]


class DatasetArguments(QueryOptions, total=False):
    """Say which samples there are, and how they are given; see `dataset`."""

    batch_size: int | None
    drop_remainder: bool
    shuffle: bool
    seed: int
    epoch: int | None
    on_error: str


def dataset(
    ref: str | PathLike[str],
    *,
    target: str | None = "auto",
    split: str = "",
    parse: bool = True,
    format: str | None = None,
    trust_sizes: bool = False,
    settings: Settings | None = None,
    **arguments: Unpack[DatasetArguments],
) -> Any:
    """Return the samples of a snapshot (`NAME@REF`), or of a shard set: in a snapshot, under a URL
    (`s3://bucket/shards`), or in a folder (`./shards`). A `tf.data.Dataset`.

    Elements are `(image, target)`. The image is a string of its stored bytes, to be decoded with `tf.io.decode_image`
    and the like. The target is, by `target` (as for `datacache.torch.SnapshotDataset`):

    - `"detection"`: `{"boxes": float32 (n, 4) as x1, y1, x2, y2 in pixels, "labels": int64 (n,)}`
    - `"classification"`, `"folder"`: the class id as int64, -1 for none
    - `"path"`: a string, the path, or in shards the key
    - `"auto"`: what the annotations are good for; without annotations the path
    - `None`: there is none, and an element is the image alone

    With `batch_size` elements are batches, boxes and labels ragged tensors; this is quicker than `.batch()` behind it.
    `labels`, `any_label`, `where`, `min_objects`, `max_objects` and `split` choose the images of a snapshot, as for
    `SnapshotDataset`. `len()` is known, except with `on_error="skip"`, which leaves out and logs what cannot be read.

    With `shuffle` each iteration (an epoch of `fit`, a round of `.repeat()`) has another order, the same in each run
    for the same `seed`; with `epoch` all have this epoch's. Files come in an order over all of them, shards of
    WebDataset some blocks at a time, and TFRecords some shards at a time through a shuffle buffer. The order is
    published, so that the node's daemon fetches ahead.

    Samples of files and of WebDataset shards are read by this process: such a dataset cannot be serialised, or be sent
    to a tf.data service. TFRecords are read by TensorFlow itself from local paths of the shards, each of which is
    verified when its turn comes. With `parse=False` elements are their serialized `tf.train.Example`s.

    Raises `SnapshotNotFoundError`, `UsageError`, and `ShardError` for a set that is not whole. What is found wrong
    while reading is a `tf.errors.OpError` with the error's text, which names the file, or the shard and sample.
    """
    given: dict[str, Any] = dict(arguments)
    query, options = make_query(**take(given, QueryOptions)), TfOptions.of("dataset", given)
    settings = settings or load_settings()
    found = open_samples(ref, settings, lenient=options.on_error == "skip")
    if isinstance(found, Shards):
        if query != Query() or split:
            raise UsageError(
                "queries and splits choose files of a snapshot, and this is a shard set",
                hint="Shard a subset: dsctl query REF … --as NAME, then dsctl shard NAME",
            )
        if found.set.format == "tfrecord":
            return records_dataset(found, target, options, settings, parse=parse)
    if not parse:
        raise UsageError(
            "parse=False is for TFRecords", hint="Samples of files and of WebDataset shards are no Examples."
        )
    if isinstance(found, Shards):
        return samples_dataset(ShardSource(found, target), options, settings)
    reading = Reading(format=format, trust_sizes=trust_sizes)
    with closing(open_catalog(settings)) as catalog, shown(settings, None, of_images) as progress:
        selection = select(found, catalog, target=target, query=query, split=split, reading=reading, progress=progress)
    return samples_dataset(SnapshotSource(found, selection), options, settings)
