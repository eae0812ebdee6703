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

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from datacache.api import open_catalog, open_shards, open_snapshot
from datacache.api.options import QueryOptions, make_query, take
from datacache.api.progress import of_images, shown
from datacache.core.errors import UsageError
from datacache.core.front import front
from datacache.settings import Settings, load_settings

try:
    from datacache.loaders.dataset import Options, SampleDataset
    from datacache.loaders.packed import PackedBatch, collate, collate_ultralytics
    from datacache.loaders.shard_dataset import ShardSamples, ShardStream
    from datacache.loaders.source import SnapshotSource
except ModuleNotFoundError as exc:
    if (exc.name or "").partition(".")[0] != "torch":
        raise
    raise ModuleNotFoundError(
        "datacache.torch needs PyTorch: pip install 'dsctl[torch]'", name=exc.name, path=exc.path
    ) from exc

if TYPE_CHECKING:
    from datacache.api.models import PredictKeywords
    from datacache.loaders.device import DevicePrefetcher
    from datacache.loaders.loader import Loader, loader
    from datacache.loaders.mixed import MixedDataset
    from datacache.loaders.mixed_order import Stop
    from datacache.loaders.sampler import EpochSampler
    from datacache.loaders.tasks.elastic import ElasticDataset
    from datacache.models.predicting.predict import Predicted

__all__ = [
    "DevicePrefetcher",
    "ElasticDataset",
    "EpochSampler",
    "Loader",
    "MixedDataset",
    "PackedBatch",
    "ShardDataset",
    "ShardStream",
    "SnapshotDataset",
    "collate",
    "collate_ultralytics",
    "loader",
    "mix",
    "predict",
]
__getattr__, _ = front(__name__)


class SampleArguments(TypedDict, total=False):
    """Say how samples are given; see `SnapshotDataset`."""

    decode: str
    size: int | Sequence[int] | str | None
    transform: Callable[..., Any] | None
    packed: bool
    on_error: str


class SnapshotArguments(SampleArguments, QueryOptions, total=False):
    """Say which images are samples, too."""


class SnapshotDataset(SampleDataset, SnapshotSource):
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

    With `style="torchvision"` targets of objects have `area`, `iscrowd` and `image_id`, too; `style="ultralytics"`
    gives them the names and units that Ultralytics has, and `collate_ultralytics` its batch.

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
        split: str = "",
        format: str | None = None,
        trust_sizes: bool = False,
        style: str | None = None,
        settings: Settings | None = None,
        **arguments: Unpack[SnapshotArguments],
    ) -> None:
        from datacache.conversion.index import Reading
        from datacache.loaders.selection import select

        given: dict[str, Any] = dict(arguments)
        query, options = make_query(**take(given, QueryOptions)), Options.of("SnapshotDataset", given)
        settings = settings or load_settings()
        snapshot = open_snapshot(ref, settings)
        with closing(open_catalog(settings)) as catalog, shown(settings, None, of_images) as progress:
            reading = Reading(format=format, trust_sizes=trust_sizes)
            how: Any = {"target": target, "query": query, "split": split, "reading": reading, "style": style}
            selection = select(snapshot, catalog, progress=progress, **how)
        SnapshotSource.__init__(self, snapshot, selection)
        SampleDataset.__init__(self, options, settings)

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
        settings: Settings | None = None,
        **arguments: Unpack[SampleArguments],
    ) -> None:
        options = Options.of("ShardDataset", arguments)
        settings = settings or load_settings()
        shards = open_shards(where, settings, lenient=options.on_error == "skip")
        super().__init__(shards, target, options, settings)

    def __repr__(self) -> str:
        return f"<ShardDataset {self.shards.files.where}: {len(self):,} samples, targets: {self.kind}>"


def mix(
    parts: Mapping[str, float] | Iterable[tuple[str | SampleDataset, float]],
    *,
    classes: Sequence[str] | None = None,
    stop: Stop = "all",
    **arguments: Any,
) -> MixedDataset:
    """Return several data sets as one, whose batches draw from each by its weight.

        dataset = mix({"mask@v3": 0.7, "faces@v1": 0.3}, decode="rgb", size=(224, 224))
        with loader(dataset, batch_size=64, seed=1) as batches:  # 45 of mask and 19 of faces, or one more or less
            ...

    Weights have any sum above 0. A part is a reference, opened as a `SnapshotDataset` with `arguments`, or in a list of
    pairs a dataset of ours as it is: `mix([(ShardDataset("./shards"), 2), ("faces@v1", 1)])`. They have targets of one
    kind and are read in one way; `size` and `transform` are each part's own. Class ids are those of the union of all
    classes, by name in the order of the parts, or of `classes`, which has to name them all.

    An epoch ends when every part has come whole: that which is largest for its weight comes once, the others begin
    anew, in another order. With `stop="first"` it ends when the first part has come whole, and the next epoch goes on
    where this one has left the others. Either way a part's samples come equally often, to within one time.

    `loader` and `EpochSampler` have the shares in every stretch of an epoch, on all ranks together, and resume as with
    one data set. Other samplers, given each number of 0 … len-1 once, have those of an epoch with `stop="all"`, and
    each sample once with `stop="first"`.

    Raises what `SnapshotDataset` raises, and `UsageError` where parts do not go together.
    """
    from datacache.loaders.mixed import MixedDataset

    pairs = list(parts.items() if isinstance(parts, Mapping) else parts)
    opened: dict[str, SampleDataset] = {}
    datasets: list[SampleDataset] = []
    for part, _ in pairs:
        if isinstance(part, str):
            opened[part] = opened.get(part) or SnapshotDataset(part, **arguments)
        elif not isinstance(part, SampleDataset) or isinstance(part, MixedDataset):
            raise UsageError(
                f"a mix has no part that is a {type(part).__name__}",
                hint="Give references, and datasets of datacache.torch; of another mix its parts.",
            )
        datasets.append(opened[part] if isinstance(part, str) else part)
    if arguments and not opened:
        raise UsageError(
            f"{', '.join(arguments)}: these are for parts that are opened here, and all are datasets already",
            hint="Give them to the datasets.",
        )
    return MixedDataset(datasets, [weight for _, weight in pairs], classes=classes, stop=stop)


def predict(
    model: str | Callable[..., Any],
    ref: str,
    *,
    name: str,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Unpack[PredictKeywords],
) -> Predicted:
    """Make a snapshot `name` with the images of `ref` and what `model` finds in them; see `datacache.api.predict`.

    A module of PyTorch, or any other callable that takes a batch of images, runs in this process while others decode.
    A module stays on its device, unless `devices` names one, and trains afterwards if it did before.
    """
    from datacache.api.models import predict as run

    told: dict[str, Any] = {} if progress is None else {"progress": progress}
    return run(ref, model, name=name, settings=settings, **told, **options)
