"""Build a shard set: a snapshot's samples in shards at a URL, in parallel, restartable, the same bytes every time.

Used by `api.shard`. The snapshot and the options alone decide what is in a set; its plan is a hash of them. While a set
is being written, `shards.unfinished` names its plan, and there is no `shards.json`, which comes last. So a build that
was killed goes on where it was: a shard whose sidecar exists and is of the plan is not made again. `commit_set` makes a
snapshot of a finished set, so that it has a version and is cached; the objects stay where they are. One thread, which
has worker processes, or an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xxhash import xxh3_128_hexdigest

from datacache.annotations.classes import class_ids, class_order
from datacache.annotations.table.table import ProblemCount
from datacache.catalog.base import Catalog
from datacache.catalog.commit import commit_manifest
from datacache.conversion.index import VERSION as READER_VERSION
from datacache.conversion.index import Annotations, Reading
from datacache.core.concurrency import map_in_threads
from datacache.core.counters import count
from datacache.core.engine import Engine
from datacache.core.errors import ShardError, UsageError
from datacache.core.html import html_table
from datacache.core.parallel import Workers, ordered_map
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import Entry, Lineage, Naming, SnapshotRecord, Source
from datacache.reader.snapshot import Snapshot
from datacache.shards import samples
from datacache.shards.index import FORMATS, SHARDS_JSON, SUFFIX, ShardIndex, ShardInfo, ShardSet, index_name
from datacache.shards.place import Place
from datacache.shards.records import Labels, TfRecordLabels, WebDatasetLabels
from datacache.shards.samples import Counts, Sample
from datacache.shards.writer import Plan, ShardWriter, Writing, shard_name, shard_plan
from datacache.store.base import ObjectInfo

VERSION = 1
"""The version of the written bytes: sets of another version are other sets."""
UNFINISHED = "shards.unfinished"
MAX_SIZE_BYTES = 256 * 10**6
OURS = re.compile(r"shard-[0-9]{6,}\.(?:tar|tfrecord|index)")
"""The files of a shard set, except its list."""
_THREADS = 16

Progress = Callable[[str, int, int, int], None]
"""Called with the name of the step, the number of samples (images, while annotations are read) that are done and in
all, and the bytes of shards."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a shard set."""

    format: str = "webdataset"
    max_size_bytes: int = MAX_SIZE_BYTES
    """Of a shard; a sample that is larger has one to itself."""
    shuffle: bool = False
    seed: int = 0
    classes: tuple[str, ...] | None = None
    """The only classes, in their order."""
    classes_from_folders: bool = False
    """Without annotations, take an image's folder as its class."""
    reading: Reading = field(default_factory=Reading)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UsageError(f"{self.format!r} is no format of shards", hint=f"There are: {', '.join(FORMATS)}.")
        if self.max_size_bytes < 1:
            raise UsageError(f"a shard cannot have {self.max_size_bytes} bytes")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"the seed {self.seed} is not between 0 and 2**64")

    def as_json(self) -> dict[str, Any]:
        """Return the options for `shards.json` and the lineage."""
        said: dict[str, Any] = {"max_size": self.max_size_bytes, **self.reading.as_json()}
        if self.shuffle:
            said |= {"shuffle": True, "seed": self.seed}
        if self.classes is not None:
            said["classes"] = list(self.classes)
        if self.classes_from_folders:
            said["classes_from_folders"] = True
        return said


class Built(NamedTuple):
    """The result of `build`."""

    set: ShardSet
    made: int
    """The number of shards that were made now; the others existed."""
    counts: Counts | None
    """None where the set was complete, so that no sample was looked at."""
    problems: Sequence[ProblemCount] = ()
    """Problems of the annotations, by kind."""
    left_out: dict[str, int] = {}  # noqa: RUF012 - never changed
    """Boxes by class, of classes that were not asked for."""


class Sharded(NamedTuple):
    """The result of `api.shard`."""

    built: Built
    url: str
    record: SnapshotRecord | None
    """The snapshot that was made of the set."""

    def _repr_html_(self) -> str:
        found = self.built.set
        rows = [("shards", len(found.shards)), ("samples", found.samples), ("bytes", found.size_bytes)]
        return html_table(rows, caption=self.url) + (self.record._repr_html_() if self.record else "")


def build(
    catalog: Catalog,
    snapshot: Snapshot,
    place: Place,
    options: Options,
    *,
    overwrite: bool = False,
    processes: Workers = None,
    progress: Progress = lambda _what, _done, _total, _bytes: None,
) -> Built:
    """Make a set, finish one, or find that it exists. With `overwrite`, write all of it anew. Raise `UsageError` where
    another set is at the URL, where there is nothing to put into shards, and for impossible options; `ShardError` that
    names the file that cannot be read; the stores' errors."""
    said = {
        "version": [VERSION, READER_VERSION],
        "source": snapshot.ref,
        "format": options.format,
        "parameters": options.as_json(),
    }
    identity = xxh3_128_hexdigest(json.dumps(said, sort_keys=True).encode())
    place.begin()
    there = place.files()
    found = _found_set(place, there, identity, overwrite=overwrite)
    if found is not None and _is_whole(found, there) and not overwrite:
        if UNFINISHED in there:
            _clear(place, found, there)
        return Built(found, 0, None)
    content = _content(catalog, snapshot, options, processes, progress)
    plan = Plan(
        content.samples,
        options.format,
        max_size_bytes=options.max_size_bytes,
        seed=options.seed if options.shuffle else None,
        scratch=place.scratch,
    )
    try:
        if not plan.samples:
            raise UsageError(f"{snapshot.record.ref} has no sample to put into shards", hint=content.hint)
        content.counts.samples = plan.samples
        if overwrite and _unfinished(place, there)[0] != identity:
            _forget_shards(place, there, snapshot.ref)
        done = _done_shards(place, there, plan, options.format, identity)
        _begin(place, identity, snapshot.ref)
        elsewhere = isinstance(processes, Engine)
        writer = ShardWriter(snapshot, None if elsewhere else plan, place, format=options.format, identity=identity)
        missing = (
            Writing(number, list(plan.shard(number)) if elsewhere else None)
            for number in range(plan.shards)
            if number not in done
        )
        making = ordered_map(writer, missing, processes=processes if elsewhere or place.forks else 1)
        shards: list[ShardInfo] = []
        written = size_bytes = 0
        for number in range(plan.shards):
            info = done[number] if number in done else next(making)
            shards.append(info)
            written += info.samples
            size_bytes += info.size_bytes
            progress("writing", written, plan.samples, size_bytes)
    finally:
        plan.close()
    if elsewhere:
        _expect_here(place, shards)
    made = ShardSet(options.format, content.classes, snapshot.ref, options.as_json(), tuple(shards), plan=identity)
    place.put(SHARDS_JSON, made.encode())
    _clear(place, made, there)
    left_out = dict(content.labels.left_out) if content.labels is not None else {}
    return Built(made, plan.shards - len(done), content.counts, content.problems, left_out)


def _expect_here(place: Place, shards: Sequence[ShardInfo]) -> None:
    """Raise `UsageError` where shards that others have written do not lie at the URL, as it is seen from here."""
    there = place.files()
    wrong = sum(shard.name not in there or there[shard.name].size_bytes != shard.size_bytes for shard in shards)
    if wrong:
        raise UsageError(
            f"{count(wrong, 'shard')} of {len(shards):,} were written elsewhere, and are not at {place.url}",
            hint="Write to a bucket, or a folder that this machine shares with all of the engine's.",
        )


def set_files(found: ShardSet) -> list[str]:
    """Return the names of all files of a set."""
    return [SHARDS_JSON, *(name for shard in found.shards for name in (shard.name, index_name(shard.name)))]


# --- the set at the URL ----------------------------------------------------------------------------------------------


def _found_set(place: Place, there: dict[str, ObjectInfo], identity: str, *, overwrite: bool) -> ShardSet | None:
    """Return the finished set of this plan. Raise `UsageError` where another set is at the URL, which must stay."""
    wrong = ""
    if SHARDS_JSON in there:
        try:
            found = ShardSet.decode(place.read(there[SHARDS_JSON]), place.url)
        except ShardError as exc:
            wrong = f"holds a shard set already, and {exc.message}"
        else:
            if found.plan == identity:
                return found
            wrong = (
                f"holds another shard set already: {count(len(found.shards), f'{found.format} shard')} of "
                f"{found.source}, made with {json.dumps(dict(found.parameters))}"
            )
    elif any(map(OURS.fullmatch, there)):
        plan, source = _unfinished(place, there)
        if UNFINISHED not in there:
            wrong = "holds shards already, and nothing says of what"
        elif plan != identity:
            wrong = f"holds an unfinished shard set of {source}, made with other options"
    if wrong and not overwrite:
        raise UsageError(f"{place.url} {wrong}", hint="Choose another URL, or --overwrite what is there.")
    return None


def _unfinished(place: Place, there: dict[str, ObjectInfo]) -> tuple[str, str]:
    """Return plan and source of the set that is being written, or that a killed builder was writing."""
    if UNFINISHED not in there:
        return "", ""
    try:
        said = json.loads(place.read(there[UNFINISHED]))
        return str(said["plan"]), str(said["source"])
    except (KeyError, TypeError, ValueError):
        return "", "an unknown snapshot"


def _begin(place: Place, identity: str, source: str) -> None:
    """Mark the set as unfinished."""
    place.put(UNFINISHED, json.dumps({"plan": identity, "source": source}).encode() + b"\n")
    place.delete(SHARDS_JSON)


def _forget_shards(place: Place, there: dict[str, ObjectInfo], source: str) -> None:
    """Delete the sidecars before all is written anew, so that no shard counts as done, also if this is broken off."""
    _begin(place, "", source)  # of no plan yet: if this ends here, some sidecars are still those of the old set
    sidecars = [name for name in there if OURS.fullmatch(name) and name.endswith(SUFFIX)]
    for name, _ in zip(sidecars, map_in_threads(place.delete, sidecars, threads=_THREADS), strict=True):
        del there[name]


def _is_whole(found: ShardSet, there: dict[str, ObjectInfo]) -> bool:
    return all(
        shard.name in there and there[shard.name].size_bytes == shard.size_bytes and index_name(shard.name) in there
        for shard in found.shards
    )


def _clear(place: Place, made: ShardSet, there: dict[str, ObjectInfo]) -> None:
    """Remove the remains of another set, and mark this one as finished. This is the last step."""
    for name in there.keys() - set(set_files(made)):
        if OURS.fullmatch(name):
            place.delete(name)
    place.delete(UNFINISHED)


def _done_shards(
    place: Place, there: dict[str, ObjectInfo], plan: Plan, format: str, identity: str
) -> dict[int, ShardInfo]:
    """Return the shards of the plan that exist, by number."""

    def look(number: int) -> ShardInfo | None:
        name = shard_name(number, format)
        raw = place.read(there[index_name(name)])
        try:
            index = ShardIndex.decode(raw, name)
        except ShardError:
            return None
        if index.plan != shard_plan(identity, number) or index.size_bytes != there[name].size_bytes:
            return None
        return ShardInfo(name, index.size_bytes, index.digest, len(index), xxh3_128_hexdigest(raw))

    names = (shard_name(number, format) for number in range(plan.shards))
    numbers = [number for number, name in enumerate(names) if name in there and index_name(name) in there]
    looked = map_in_threads(look, numbers, threads=_THREADS)
    return {number: info for number, info in zip(numbers, looked, strict=True) if info is not None}


# --- the samples of the set ------------------------------------------------------------------------------------------


@dataclass
class _Content:
    samples: Iterator[Sample]
    classes: tuple[str, ...]
    counts: Counts
    labels: Labels | None = None
    problems: Sequence[ProblemCount] = ()
    hint: str = ""


def _content(
    catalog: Catalog, snapshot: Snapshot, options: Options, processes: Workers, progress: Progress
) -> _Content:
    manifest, counts = snapshot.manifest, Counts()
    seen = samples.survey(manifest)
    if not seen.images:
        if options.format == "tfrecord":
            raise UsageError(
                f"{snapshot.record.ref} has no images, and records of TensorFlow are made of images",
                hint="Other files go into WebDataset shards: --format webdataset",
            )
        if options.classes_from_folders:
            raise UsageError(f"--classes-from-folders: {snapshot.record.ref} has no images")
        return _Content(samples.groups(manifest, counts), (), counts)
    annotations = Annotations(snapshot, catalog, options.reading)
    if annotations.source.layout.format in ("none", "folders"):
        found = samples.folder_classes(seen) if options.classes_from_folders else ()
        classes = class_order(found, given=options.classes) if found else ()
        labels = _labels(options.format, classes, detection=False)
        made = samples.images(manifest, labels, counts, classes_from_folders=options.classes_from_folders)
        return _Content(made, classes, counts, labels)
    if options.classes_from_folders:
        raise UsageError(f"--classes-from-folders: {snapshot.record.ref} has annotations, which say the classes")
    table = annotations.table(processes=processes, progress=lambda what, done, total: progress(what, done, total, 0))
    classes = class_ids(table, options.classes)
    if options.classes is not None and table.labels and not set(classes) & set(table.labels):
        raise UsageError(
            f"{snapshot.record.ref} has none of the classes asked for",
            hint=f"It has {', '.join(sorted(table.labels)[:10])}{' and more' if len(table.labels) > 10 else ''}.",
        )
    most = max((len(skeleton.names) for skeleton in table.skeletons.values()), default=0)
    labels = _labels(options.format, classes, detection=bool(table.boxes), keypoints=most)
    return _Content(
        samples.annotated(manifest, table, labels, counts),
        classes,
        counts,
        labels,
        table.problem_counts,
        hint=f"None of its {table.images:,} images can be used. See: dsctl stats {snapshot.record.ref}",
    )


def _labels(format: str, classes: Sequence[str], *, detection: bool, keypoints: int = 0) -> Labels:
    if format == "tfrecord":
        return TfRecordLabels(classes)
    return WebDatasetLabels(classes, detection=detection, keypoints=keypoints)


def commit_set(catalog: Catalog, place: Place, made: ShardSet, naming: Naming) -> SnapshotRecord:
    """Commit the files of a set, and no other files at the URL, as the snapshot that `naming` names. Idempotent. Raise
    `ShardError` if one of them is missing, `TagExistsError`, the catalog's errors."""
    there = place.files()
    builder = ManifestBuilder([Source(place.store.url, place.prefix)], catalog.put_blobs)
    for file in sorted(set_files(made)):
        info = there.get(file)
        if info is None:
            raise ShardError(f"{place.url} has lost {file}", shard=file, hint="Build the shards again.")
        builder.add(Entry(file.encode(), info.size_bytes, info.mtime_ns, info.etag, info.version))
    parameters = {"to": place.url, "format": made.format, **made.parameters}
    lineage = Lineage("shard", parameters, (made.source,))
    return commit_manifest(catalog, builder, naming, origin=place.url, lineage=lineage)
