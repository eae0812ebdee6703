"""Keywords that several functions of `datacache.api` share, and the objects that the layers below get for them.

Each `…Options` lists keywords for editors and type checkers; the functions make one object of them. No state, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from datacache.core.errors import UsageError

if TYPE_CHECKING:
    from datacache.annotations.query import Query
    from datacache.conversion.index import Reading
    from datacache.conversion.model import Splits


class NamingOptions(TypedDict, total=False):
    """Say how a new snapshot is named; see `Naming`."""

    tags: Sequence[str]
    move_tags: bool
    replace: bool
    message: str


class ReadingOptions(TypedDict, total=False):
    """Say how annotations are read; see `Reading`."""

    format: str | None
    """None: as the files look."""
    voc_origin: int
    """0 or 1: the number of the first pixel in Pascal VOC."""
    trust_sizes: bool
    """Take images' sizes from the annotations and open no image."""
    decode: bool
    """Decode every image to its end."""


class QueryOptions(TypedDict, total=False):
    """Say which images are meant; see `Query`."""

    labels: Sequence[str]
    any_label: bool
    min_objects: int | None
    max_objects: int | None
    where: str


class ImageOptions(TypedDict, total=False):
    """Say what is done to every image, as the options of `dsctl convert` do: `resize="640x480"`."""

    crop: str | None
    tile: str | None
    overlap: int
    drop_empty: bool
    rotate: float | None
    flip: str | None
    resize: str | None
    letterbox: bool
    quality: int
    min_visible: float


class MergeOptions(NamingOptions, ReadingOptions, total=False):
    """List the options of `merge` beside its own."""

    classes: Sequence[str] | None
    """Their order, and no others; None: the order of the version before, new ones after it by name."""
    rename: Mapping[str, str]
    """Class → what it is called in the result; several may become one."""
    skip_difficult: bool
    strict: bool


class ConvertOptions(MergeOptions, ImageOptions, total=False):
    """List the options of `convert` beside its own."""

    keep_unannotated: bool
    reencode_broken: bool
    """Store JPEGs with bytes behind their end anew, without these."""


class ShardOptions(NamingOptions, total=False):
    """List the options of `shard` beside its own."""

    format: str
    """`webdataset` or `tfrecord`."""
    max_size_bytes: int
    shuffle: bool
    seed: int
    classes: Sequence[str] | None
    classes_from_folders: bool
    annotations: str | None
    """The format of the snapshot's annotations; None: as the files look."""
    voc_origin: int
    trust_sizes: bool


def take(options: dict[str, Any], kind: type) -> dict[str, Any]:
    """Remove from `options` the keywords that `kind` lists, and return them."""
    return {name: options.pop(name) for name in kind.__annotations__ if name in options}


def make_reading(options: Mapping[str, Any], classes: tuple[str, ...] | None = None) -> Reading:
    """Return how annotations are read, by `ReadingOptions`."""
    from datacache.conversion.index import Reading

    given = dict(options)
    return Reading(origin=given.pop("voc_origin", 0), classes=classes, **given)


def make_splits(split: str | None, seed: int, stratify: bool) -> Splits | None:
    """Return the splits that `train=0.8,val=0.2` or `none` means; None for None: those that the data set brings."""
    from datacache.conversion.model import Splits, parse_splits

    if stratify and split in (None, "none"):
        raise UsageError("only splits that are dealt anew can be stratified", hint="Add --split train=0.8,val=0.2.")
    return None if split is None else Splits() if split == "none" else parse_splits(split, seed, stratify=stratify)


def make_query(**wanted: Unpack[QueryOptions]) -> Query:
    """Return the query that the keywords mean. `UsageError` for labels in one text."""
    from datacache.annotations.query import Query

    given: dict[str, Any] = dict(wanted)
    return Query(**given | {"labels": listed("labels", given.get("labels", ()))})


def check_options(options: Mapping[str, Any]) -> None:
    """Check what the commands for an engine check only when they begin; other keywords are left alone. Raises
    `UsageError`. Reads nothing."""
    from datacache.annotations.query import check_condition
    from datacache.catalog.refs import check_tag
    from datacache.conversion.operations import parse_operations

    given = dict(options)
    if given.get("model"):
        from datacache.models.predicting.predict import PredictOptions, check_for_engine

        check_for_engine(given["model"], PredictOptions(devices=given.get("devices") or ("",)))
    for tag in given.get("tags") or ():
        check_tag(tag)
    check_condition(given.get("where") or "")
    if "refs" in given:
        check_merged(given["refs"])
    parse_operations(**take(given, ImageOptions))
    if "stratify" in given:
        make_splits(given["split"], given["seed"], given["stratify"])


def check_merged(refs: Sequence[str]) -> None:
    """Check that there is something to merge. `UsageError` otherwise."""
    if len(listed("refs", refs)) < 2:
        raise UsageError("there is nothing to merge in fewer than two snapshots")


def listed(what: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names as a tuple. `UsageError` for one text, which would be taken letter by letter."""
    if isinstance(names, str):
        raise UsageError(f"{what} are a list of names, not the text {names!r}")
    return tuple(names)
