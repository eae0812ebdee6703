"""Read, query, draw, convert and shard what is annotated in a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from datacache.api.notebooks import ImageList, ProblemList
from datacache.api.opening import open_catalog, open_snapshot
from datacache.api.options import (
    ConvertOptions,
    ImageOptions,
    MergeOptions,
    NamingOptions,
    QueryOptions,
    ReadingOptions,
    ShardOptions,
    check_merged,
    listed,
    make_query,
    make_reading,
    make_splits,
    take,
)
from datacache.api.progress import of_checks, of_images, of_samples, shown, shows
from datacache.catalog.refs import resolve
from datacache.core.errors import DatacacheError, PathNotFoundError, UsageError
from datacache.manifest.model import Naming, SnapshotRecord
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings, load_settings

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from datacache.annotations.browsing.browser import Browser
    from datacache.annotations.pictures.preview import Picture
    from datacache.annotations.stats import Statistics
    from datacache.annotations.table.ranges import Row
    from datacache.annotations.table.table import Table
    from datacache.conversion.dedupe import Repeat
    from datacache.conversion.pipeline import Conversion
    from datacache.core.parallel import Workers
    from datacache.shards.build import Sharded
    from datacache.shards.index import ShardSet
    from datacache.shards.verify import ShardProblem


class SubsetOptions(NamingOptions, ReadingOptions, total=False):
    """List the options of `subset` beside its own."""


@contextmanager
def open_annotations(
    ref: str,
    *,
    processes: int | None = None,
    on: str | Executor | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **reading: Unpack[ReadingOptions],
) -> Iterator[tuple[Snapshot, Table]]:
    """Open a snapshot and the table of its annotations, which is made the first time it is asked for; `on` is as in
    `convert`.

    `UsageError` where the annotations' format cannot be told; the store's errors.
    """
    from datacache.conversion.index import Annotations
    from datacache.executors.open import open_workers

    settings = settings or load_settings()
    how = make_reading(reading)
    with closing(open_catalog(settings)) as catalog, open_snapshot(ref, settings) as snapshot:
        with shown(settings, progress, of_images) as tell, open_workers(on, processes, settings) as workers:
            table = Annotations(snapshot, catalog, how).table(processes=workers, progress=tell)
        yield snapshot, table


def has_annotations(ref: str, *, settings: Settings | None = None) -> bool:
    """Tell whether the annotations of a snapshot have been read before, as `open_annotations` reads them."""
    with closing(open_catalog(settings or load_settings())) as catalog:
        return catalog.derived(resolve(catalog, ref).id, make_reading({}).name) is not None


@contextmanager
def open_browser(
    ref: str,
    *,
    processes: int | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[tuple[Snapshot, Browser]]:
    """Open a snapshot and a `Browser` of its images, as `open_annotations` does."""
    from datacache.annotations.browsing.browser import Browser
    from datacache.annotations.table.arrays import ArrayStore
    from datacache.conversion.index import Annotations

    settings = settings or load_settings()
    with closing(open_catalog(settings)) as catalog, open_snapshot(ref, settings) as snapshot:
        annotations = Annotations(snapshot, catalog, make_reading({}))
        with shown(settings, progress, of_images) as tell:
            table = annotations.table(processes=processes, progress=tell)
        browser = Browser(table, annotations.splits, ArrayStore(catalog, snapshot.record.id, annotations.reading.name))
        try:
            yield snapshot, browser
        finally:
            browser.close()


def query(ref: str, *, settings: Settings | None = None, **wanted: Unpack[QueryOptions]) -> ImageList:
    """Return the images of `ref` that fit, in the order of their paths: path, width, height and boxes by label.

    The options are those of `dsctl query`. `UsageError` for a condition that cannot be understood.
    """
    from datacache.annotations.query import find

    settings, asked = settings or load_settings(), make_query(**wanted)
    with open_annotations(ref, settings=settings) as (snapshot, table):
        return ImageList(snapshot.record, settings, find(table, asked))


def stats(ref: str, *, on: str | Executor | None = None, settings: Settings | None = None) -> Statistics:
    """Return what `dsctl stats` shows: classes, boxes, sizes and problems of a snapshot's annotations; `on` is as in
    `convert`."""
    from datacache.annotations.stats import collect

    with open_annotations(ref, on=on, settings=settings) as (_snapshot, table):
        return collect(table)


@shows(of_images)
def problems(
    ref: str,
    *,
    predictions: str | None = None,
    processes: int | None = None,
    on: str | Executor | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    **reading: Unpack[ReadingOptions],
) -> ProblemList:
    """Return all that is wrong in a snapshot's annotations, in the order of files and lines: what reading finds, and
    what a closer look does (`docs/ANNOTATIONS.md`). `predictions` is a snapshot of the same images whose objects have
    scores. Images of equal sizes in several splits are read. Annotations are read `on` an engine, as in `convert`."""
    from datacache.conversion.index import Annotations
    from datacache.conversion.problems import find
    from datacache.executors.open import open_workers

    settings = settings or load_settings()
    how = make_reading(reading)
    with (
        ExitStack() as opened,
        closing(open_catalog(settings)) as catalog,
        open_snapshot(ref, settings) as snapshot,
    ):
        annotations = Annotations(snapshot, catalog, how)
        predicted = opened.enter_context(open_annotations(predictions, settings=settings))[1] if predictions else None
        with open_workers(on, processes, settings) as workers:
            table = annotations.table(processes=workers, progress=progress)
        found = list(find(snapshot, annotations, table, predicted))
    return ProblemList(sorted(found, key=lambda problem: (problem.file, problem.line)))


def preview(ref: str, *, paths: Collection[str] | None = None, n: int = 16, settings: Settings | None = None) -> bytes:
    """Draw images with their boxes and return the bytes of a PNG: the images at `paths`, or the first `n`. One that
    cannot be read is a tile that says why. `UsageError` where the snapshot has no image."""
    from datacache.annotations.pictures.draw import colours_of
    from datacache.annotations.pictures.preview import preview as draw

    with open_annotations(ref, settings=settings) as (snapshot, table):
        if paths is None:
            rows = list(islice(table.rows(), n))
        else:
            found = [(path, table.row(path)) for path in paths]
            rows = [row for _, row in found if row is not None]
            missing = next((path for path, row in found if row is None), None)
            if missing is not None:
                raise PathNotFoundError(f"{snapshot.record.ref} has no image {missing}", path=missing)
        if not table.images:
            raise UsageError(f"{snapshot.record.ref} has no image: there is nothing to draw")
        pictures = [picture_of(snapshot, row.path, row) for row in rows]
        subtitle = f"{len(pictures):,} of {table.images:,} images"
        colours = colours_of(table.labels)
        return draw(pictures, title=snapshot.record.ref, subtitle=subtitle, colours=colours, skeletons=table.skeletons)


def picture_of(snapshot: Snapshot, path: str, now: Row | None, before: Row | None = None, note: str = "") -> Picture:
    """Return an image with what is annotated in it now, and was before; where it cannot be read, with the reason."""
    from datacache.annotations.pictures.preview import Picture

    notes = [note] if note else []
    data = None
    try:
        data = snapshot.read(path)
    except DatacacheError as exc:
        notes = [exc.message]
    if now is not None and now.annotation is None:
        notes += [problem.code for problem in now.problems]
    annotation, earlier = (row.annotation if row is not None else None for row in (now, before))
    return Picture(path, data, annotation, earlier, ", ".join(notes))


@shows(of_images)
def subset(
    ref: str,
    images: Collection[str],
    *,
    name: str,
    parameters: Mapping[str, Any] | None = None,
    command: str = "query",
    chosen_by: Sequence[str] = (),
    processes: int | None = None,
    on: str | Executor | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    **options: Unpack[SubsetOptions],
) -> SnapshotRecord:
    """Make a snapshot of dataset `name` with these images of `ref` (their paths) and their annotations, by reference.

    `command` and `parameters` say in its lineage how they were chosen, `chosen_by` by which other snapshots.
    Annotations are read `on` an engine, as in `convert`. Deterministic. `UsageError` where `images` is empty.
    """

    def chosen(_snapshot: Snapshot, _table: Table, _workers: Workers) -> Choice:
        return command, parameters or {}, images

    how: dict[str, Any] = {"processes": processes, "on": on, "progress": progress}
    return _subset(ref, chosen, name, settings, options, chosen_by=chosen_by, **how)


@shows(of_images)
def dedupe(
    ref: str,
    *,
    name: str,
    similar: int | None = None,
    processes: int | None = None,
    on: str | Executor | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    **options: Unpack[SubsetOptions],
) -> tuple[SnapshotRecord, list[Repeat]]:
    """Make a snapshot of dataset `name` with the images of `ref` that repeat no other, and return the others, too.

    Those repeat another that have its bytes; with `similar`, those that look like it, too: their hashes differ in so
    many bits at most. The image with the most objects is kept, of several the first path. Deterministic. `on` is as
    in `convert`.
    """
    from datacache.conversion.dedupe import find_repeats

    found: list[Repeat] = []

    def choose(snapshot: Snapshot, table: Table, workers: Workers) -> Choice:
        found.extend(find_repeats(snapshot, table, similar=similar, processes=workers, progress=progress))
        without = {repeat.path for repeat in found}
        images = [row.path for row in table.rows() if row.annotation is not None and row.path not in without]
        return "dedupe", {} if similar is None else {"similar": similar}, images

    return _subset(ref, choose, name, settings, options, processes=processes, on=on, progress=progress), found


@shows(of_images)
def sample(
    ref: str,
    n: int,
    *,
    name: str,
    by: str | None = None,
    seed: int = 0,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    **options: Unpack[SubsetOptions],
) -> SnapshotRecord:
    """Make a snapshot of dataset `name` with `n` images of `ref`, chosen by a hash of path and seed.

    With `by="label"` each label chooses one in turn, the rarest first, and images without a label come last.
    Deterministic, and images that are added change little. All images where there are fewer.
    """
    from datacache.conversion.deal import sample as choose

    if by not in (None, "label"):
        raise UsageError(f"a sample is taken by label, not by {by}")

    def chosen(_snapshot: Snapshot, table: Table, _workers: Workers) -> Choice:
        asked = {"n": n, "seed": seed} | ({} if by is None else {"by": by})
        return "sample", asked, choose(table, n, seed, by_label=by is not None)

    return _subset(ref, chosen, name, settings, options, progress=progress)


Choice = tuple[str, Mapping[str, Any], Collection[str]]
"""The command that chooses images, its parameters, and the images."""


def _subset(
    ref: str,
    choose: Callable[[Snapshot, Table, Workers], Choice],
    name: str,
    settings: Settings | None,
    options: Mapping[str, Any],
    *,
    progress: Callable[[str, int, int], None],
    chosen_by: Sequence[str] = (),
    processes: int | None = None,
    on: str | Executor | None = None,
) -> SnapshotRecord:
    from datacache.catalog.objects import ObjectWriter
    from datacache.conversion.index import Annotations
    from datacache.conversion.subset import subset as make
    from datacache.executors.open import open_workers

    settings = settings or load_settings()
    given = dict(options)
    naming, reading = Naming(name=name, **take(given, NamingOptions)), make_reading(given)
    with (
        closing(open_catalog(settings)) as catalog,
        open_snapshot(ref, settings) as snapshot,
        open_workers(on, processes, settings) as workers,
    ):
        table = Annotations(snapshot, catalog, reading).table(processes=workers, progress=progress)
        command, parameters, images = choose(snapshot, table, workers)
        others = (resolve(catalog, each) for each in chosen_by)
        return make(
            catalog,
            snapshot,
            images,
            naming,
            reading=reading,
            parameters=parameters,
            open_objects=lambda: ObjectWriter(catalog, settings),
            command=command,
            chosen_by=[f"{record.dataset}@{record.id}" for record in others],
            processes=workers,
        )


@shows(of_images)
def convert(
    ref: str,
    *,
    to: str,
    name: str,
    split: str | None = None,
    seed: int = 0,
    stratify: bool = False,
    objects: str | None = None,
    processes: int | None = None,
    on: str | Executor | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    **options: Unpack[ConvertOptions],
) -> Conversion:
    """Make a snapshot of dataset `name` with the images of `ref` and its annotations in the format `to`.

    The options are those of `dsctl convert`: `split` is `"train=0.8,val=0.2"` (by a hash of path and seed), `"none"`,
    or None for the splits the data set brings; `stratify` gives each split its share of each class; `resize` is
    `"640x480"`. `progress(what, done, total)` counts images. The result has `record` and `report`.

    Deterministic and idempotent: the same snapshot, options and earlier classes of `name` give the same id. Nothing is
    visible before the end, and a conversion that was killed can be run again. Any thread may call it. Annotations and
    images are read in worker processes made by `fork()`; `processes=1` makes none. `on` names an engine that does it
    instead, such as `"dask://HOST:PORT"`, or is a `concurrent.futures.Executor`. Raises `ConversionError` (`strict`),
    `UsageError`, and what stores and catalogs raise.
    """
    from datacache.catalog.objects import ObjectWriter, check_place
    from datacache.conversion.operations import parse_operations
    from datacache.conversion.pipeline import Plan, run
    from datacache.executors.open import open_workers

    settings = settings or load_settings()
    given: dict[str, Any] = dict(options)
    classes = _classes(given)
    plan = Plan(
        to=to,
        naming=Naming(name=name, **take(given, NamingOptions)),
        reading=make_reading(take(given, ReadingOptions), classes),
        splits=make_splits(split, seed, stratify),
        operations=parse_operations(**take(given, ImageOptions)),
        classes=classes,
        **given,
    )
    if plan.operations:
        check_place(settings, objects or "")  # else it is told when all annotations have been read
    with (
        closing(open_catalog(settings)) as catalog,
        open_snapshot(ref, settings) as snapshot,
        open_workers(on, processes, settings) as workers,
    ):
        return run(
            catalog,
            [snapshot],
            plan,
            open_objects=lambda: ObjectWriter(catalog, settings, url=objects or "", resumes=workers is not processes),
            processes=workers,
            progress=progress,
        )


@shows(of_images)
def merge(
    refs: Sequence[str],
    *,
    name: str,
    to: str | None = None,
    split: str | None = None,
    seed: int = 0,
    stratify: bool = False,
    objects: str | None = None,
    processes: int | None = None,
    on: str | Executor | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    **options: Unpack[MergeOptions],
) -> Conversion:
    """Make a snapshot of dataset `name` with the images of all `refs` and their annotations, classes of one name being
    one class, by reference.

    An image that several have, by its bytes, is there once, with all its objects. `to` is the format, None for the one
    they all have; all else is as in `convert`.
    """
    from datacache.catalog.objects import ObjectWriter
    from datacache.conversion.combine import own_target
    from datacache.conversion.index import Annotations
    from datacache.conversion.pipeline import Plan, run
    from datacache.executors.open import open_workers

    settings = settings or load_settings()
    given: dict[str, Any] = dict(options)
    naming = Naming(name=name, **take(given, NamingOptions))
    classes = _classes(given)
    reading = make_reading(take(given, ReadingOptions), classes)
    check_merged(refs)
    with ExitStack() as opened:
        catalog = opened.enter_context(closing(open_catalog(settings)))
        snapshots = [opened.enter_context(open_snapshot(ref, settings)) for ref in refs]
        workers = opened.enter_context(open_workers(on, processes, settings))
        if to is None:
            read = (Annotations(snapshot, catalog, reading) for snapshot in snapshots)
            to = own_target([each.table(processes=workers, progress=progress) for each in read])
        plan = Plan(
            to=to,
            naming=naming,
            reading=reading,
            splits=make_splits(split, seed, stratify),
            classes=classes,
            keep_unannotated=True,
            command="merge",
            **given,
        )
        return run(
            catalog,
            snapshots,
            plan,
            open_objects=lambda: ObjectWriter(catalog, settings, url=objects or ""),
            processes=workers,
            progress=progress,
        )


@shows(of_images)
def fix_problems(
    ref: str,
    *,
    name: str,
    processes: int | None = None,
    on: str | Executor | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    **options: Unpack[SubsetOptions],
) -> Conversion:
    """Make a snapshot of dataset `name` with the images of `ref` and its annotations in the format they are in, without
    the problems that `problems` finds and that can be mended; the report of the result says what was done.

    Deterministic and idempotent, as `convert` is, and done `on` an engine as there. `UsageError` where there are no
    annotations of objects."""
    from datacache.catalog.objects import ObjectWriter
    from datacache.conversion.index import Annotations
    from datacache.conversion.model import Splits
    from datacache.conversion.pipeline import Plan, run
    from datacache.conversion.problems import own_format
    from datacache.executors.open import open_workers

    settings = settings or load_settings()
    given: dict[str, Any] = dict(options)
    naming, reading = Naming(name=name, **take(given, NamingOptions)), make_reading(given)
    with (
        closing(open_catalog(settings)) as catalog,
        open_snapshot(ref, settings) as snapshot,
        open_workers(on, processes, settings) as workers,
    ):
        to = own_format(Annotations(snapshot, catalog, reading).table(processes=workers, progress=progress))
        splits = Splits() if to == "cvat-video" else None
        plan = Plan(
            to=to, naming=naming, reading=reading, splits=splits, keep_unannotated=True, fix=True, command="fix"
        )
        return run(
            catalog,
            [snapshot],
            plan,
            open_objects=lambda: ObjectWriter(catalog, settings),
            processes=workers,
            progress=progress,
        )


@shows(of_samples)
def shard(
    ref: str,
    *,
    to: str,
    name: str | None = None,
    overwrite: bool = False,
    processes: int | None = None,
    on: str | Executor | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int, int], None] = lambda _what, _done, _total, _bytes: None,
    **options: Unpack[ShardOptions],
) -> Sharded:
    """Write the samples of `ref` as shards to the URL or folder `to`: WebDataset tars or TFRecords, each with a sidecar
    that says where its samples are, and `shards.json`. With `name`, a snapshot of dataset `name` is made of them.

    The options are those of `dsctl shard`; `annotations` is the format of the snapshot's. `progress(what, done, total,
    bytes)` counts samples, and bytes of shards. The result has `built` (its `set` is what `shards.json` says) and
    `record`, None without a `name`.

    Deterministic: the same snapshot and options give the same bytes, whatever the number of processes. Idempotent: a
    set that is there is not made again, and one that was killed goes on where it was. Shards are made in worker
    processes (`fork()`), of which `processes=1` makes none, or `on` an engine, as in `convert`. `UsageError` where
    something else is at the URL (unless `overwrite`), `ShardError` that names the file that cannot be read, and what
    stores and catalogs raise.
    """
    from datacache.catalog.commit import check_target
    from datacache.executors.open import open_workers
    from datacache.manifest.model import Lineage
    from datacache.shards.build import Options, Sharded, build, commit_set
    from datacache.shards.place import Place

    settings = settings or load_settings()
    given: dict[str, Any] = dict(options)
    classes = _classes(given)
    naming = Naming(name=name or "", **take(given, NamingOptions))
    if name is None and (naming.tags or naming.message):
        raise UsageError("tags and messages are of snapshots, and none is asked for", hint="Name it: --as NAME.")
    annotations = {"format": given.pop("annotations", None)}
    annotations |= {name: given.pop(name) for name in ("voc_origin", "trust_sizes") if name in given}
    how = Options(classes=classes, reading=make_reading(annotations, classes), **given)
    with (
        closing(open_catalog(settings)) as catalog,
        open_snapshot(ref, settings) as snapshot,
        closing(Place(to, settings)) as place,
        open_workers(on, processes, settings) as workers,
    ):
        if name is not None:
            check_target(catalog, naming, Lineage("shard", {"format": how.format}, (snapshot.ref,)))
        built = build(catalog, snapshot, place, how, overwrite=overwrite, processes=workers, progress=progress)
        record = None if name is None else commit_set(catalog, place, built.set, naming)
        return Sharded(built, place.url, record)


@shows(of_checks)
def verify_shards(
    url: str,
    *,
    settings: Settings | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[ShardSet, list[ShardProblem]]:
    """Read every byte of the shard set at a URL or folder; return what `shards.json` says, and all that is not so.

    `progress(done, total)` counts shards. `ShardError` if there is no finished set; the store's errors.
    """
    from datacache.shards.place import Place
    from datacache.shards.verify import read_set, verify

    with closing(Place(url, settings or load_settings())) as place:
        found = read_set(place)
        return found, list(verify(place, found, progress=progress))


def read_classes(file: Path) -> list[str]:
    """Return the names of classes in a file, a name a line. `UsageError` where it cannot be read or holds none."""
    from datacache.annotations.classes import read_classes as parse

    try:
        return list(parse(file.read_bytes(), str(file)))
    except OSError as exc:
        raise UsageError(f"--classes: {file} cannot be read: {exc.strerror}") from exc


def _classes(options: dict[str, Any]) -> tuple[str, ...] | None:
    classes = options.pop("classes", None)
    return None if classes is None else listed("classes", classes)
