"""PyTorch: datasets over snapshots and shards, and what feeds a training from them.

    from datacache.torch import ShardDataset, loader

    dataset = ShardDataset("s3://bucket/shards", decode="rgb", size=(224, 224))
    with loader(dataset, batch_size=64) as batches:
        for images, targets in batches:
            ...

Needs PyTorch (`pip install 'dsctl[torch]'`). The datasets work in any `torch.utils.data.DataLoader`, under `fork`
and `spawn`, with samplers of any kind. Parts that are not datasets are imported when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from os import PathLike
from typing import TYPE_CHECKING, Any

from datacache.annotations.query import Query
from datacache.api import open_catalog, open_shards, open_snapshot
from datacache.conversion.index import Reading
from datacache.core.errors import UsageError
from datacache.settings import Settings, load_settings

try:
    from datacache.loaders.dataset import Options
    from datacache.loaders.packed import PackedBatch, collate
    from datacache.loaders.shard_dataset import ShardSamples, ShardStream
    from datacache.loaders.snapshot_dataset import SnapshotSamples
except ModuleNotFoundError as exc:
    if (exc.name or "").partition(".")[0] != "torch":
        raise
    raise ModuleNotFoundError(
        "datacache.torch needs PyTorch: pip install 'dsctl[torch]'", name=exc.name, path=exc.path
    ) from exc

if TYPE_CHECKING:
    from datacache.loaders.device import DevicePrefetcher
    from datacache.loaders.loader import Loader, loader
    from datacache.loaders.sampler import EpochSampler
    from datacache.loaders.tasks.elastic import ElasticDataset

__all__ = [
    "DevicePrefetcher",
    "ElasticDataset",
    "EpochSampler",
    "Loader",
    "PackedBatch",
    "ShardDataset",
    "ShardStream",
    "SnapshotDataset",
    "collate",
    "loader",
]
_HOME = {
    "DevicePrefetcher": "datacache.loaders.device",
    "ElasticDataset": "datacache.loaders.tasks.elastic",
    "EpochSampler": "datacache.loaders.sampler",
    "Loader": "datacache.loaders.loader",
    "loader": "datacache.loaders.loader",
}


class SnapshotDataset(SnapshotSamples):
    """The images of a snapshot (or all its files, if none is an image), in the byte order of their paths.

    `ds[i]` is `(image, target)`. The image is `bytes`, or with `decode="rgb"` a uint8 tensor of height x width x 3,
    resized to `size` (height and width, as torch has it, or one number for both; as text width x height, as
    `dsctl convert --resize` has it: `"640x480"`). The target is, by `target`:

    - `"detection"`: `{"boxes": float32 (n, 4) as x1, y1, x2, y2 in pixels of the image given, "labels": int64 (n,)}`
    - `"classification"`: the class id, of the image's label or of its boxes where they are all of one class; else -1
    - `"folder"`: the class id, classes being the names of the folders that the files lie in
    - `"path"`: the path
    - `"auto"`: boxes where there are any, else classes of images, else the path
    - `None`: there is none, and `ds[i]` is the image alone

    `classes` names the class ids. `labels`, `any_label`, `where`, `min_objects` and `max_objects` choose images as
    `dsctl query` does, `split` one of the splits that the data set brings. `transform` gets image and target.

    A batch that a DataLoader asks for is read at once, and what of it is not on this node is fetched at once. With
    `packed=True` batches are `PackedBatch`es of stored bytes. Every byte is verified by its checksum. `on_error="skip"`
    leaves out what cannot be read and counts it in `skipped`; a single `ds[i]` raises all the same.

    Give `collate_fn=datacache.torch.collate` to a DataLoader for targets of boxes and images of several sizes.

    Raises `SnapshotNotFoundError`, and `UsageError` where nothing is left or the target is not to be had; reading
    raises the store's errors and `AnnotationError` for an image that is none.
    """

    def __init__(
        self,
        ref: str,
        *,
        target: str | None = "auto",
        decode: str = "bytes",
        size: int | Sequence[int] | str | None = None,
        transform: Callable[..., Any] | None = None,
        labels: Sequence[str] = (),
        any_label: bool = False,
        where: str = "",
        min_objects: int | None = None,
        max_objects: int | None = None,
        split: str = "",
        packed: bool = False,
        on_error: str = "raise",
        format: str | None = None,
        trust_sizes: bool = False,
        settings: Settings | None = None,
    ) -> None:
        from datacache.loaders.selection import select

        if isinstance(labels, str):
            raise UsageError(f"labels are a list of names, not the text {labels!r}")
        options = Options(decode=decode, size=size, transform=transform, packed=packed, on_error=on_error)
        settings = settings or load_settings()
        query = Query(
            labels=tuple(labels), any_label=any_label, where=where, min_objects=min_objects, max_objects=max_objects
        )
        snapshot = open_snapshot(ref, settings)
        with closing(open_catalog(settings)) as catalog:
            reading = Reading(format=format, trust_sizes=trust_sizes)
            selection = select(snapshot, catalog, target=target, query=query, split=split, reading=reading)
        super().__init__(snapshot, selection, options, settings)

    def __repr__(self) -> str:
        return f"<SnapshotDataset {self.snapshot.record.ref}: {len(self):,} samples, targets: {self.kind}>"


class ShardDataset(ShardSamples):
    """The samples of a shard set that `dsctl shard` made, in the order of the shards.

    `where` is a snapshot of the set (`NAME@REF`), a URL (`s3://bucket/shards`), or a folder (`./shards`). A snapshot
    and a URL are read through this node's cache, a folder is mapped. Arguments, samples, targets and classes are as for
    a `SnapshotDataset` of what the shards were made from; but `"folder"` is for shards made with
    `--classes-from-folders`, where it means `"classification"`, and the path of files that are no images is their key.
    `stream(batch_size)` gives the same as an iterable over batches.

    Every sample is verified by the checksum that the set's index has of it. A shard that is missing, cut short, damaged
    or another one is a `ShardError` that names shard and sample, at once where it can be seen without reading; with
    `on_error="skip"` its samples are left out of batches and counted in `skipped`.
    """

    def __init__(
        self,
        where: str | PathLike[str],
        *,
        target: str | None = "auto",
        decode: str = "bytes",
        size: int | Sequence[int] | str | None = None,
        transform: Callable[..., Any] | None = None,
        packed: bool = False,
        on_error: str = "raise",
        settings: Settings | None = None,
    ) -> None:
        options = Options(decode=decode, size=size, transform=transform, packed=packed, on_error=on_error)
        settings = settings or load_settings()
        shards = open_shards(where, settings, lenient=on_error == "skip")
        super().__init__(shards, target, options, settings)

    def __repr__(self) -> str:
        return f"<ShardDataset {self.shards.files.where}: {len(self):,} samples, targets: {self.kind}>"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'datacache.torch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
