"""The annotations of a snapshot, read once and kept in the catalog.

Used by conversions, queries, statistics and previews, all through `open_table`. Images are taken in ranges whose ends
depend on their paths alone; the next version of a data set takes over the ranges in which no image and no annotation
has changed, and reads only the others. Annotation files are parsed and images' headers looked at in as many processes
as there are processors; the result does not depend on their number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

from datacache.annotations.check import check
from datacache.annotations.formats import voc, yolo
from datacache.annotations.image_header import ImageHeader, read_header
from datacache.annotations.layout import text
from datacache.annotations.model import Annotation, Draft, Problem
from datacache.annotations.pairing import choose_image
from datacache.annotations.problems import broken_image, image_that_goes_on, truncated_image, unusable_file
from datacache.annotations.split_lists import ListedSplits, read_splits
from datacache.annotations.table.table import (
    KEY_BYTES,
    EncodedRange,
    RangeSummary,
    Row,
    Table,
    TableBuilder,
    encode_range,
)
from datacache.catalog.base import Catalog
from datacache.conversion.parallel import ordered_map
from datacache.conversion.source import AnnotationSource, Data, Files, Part
from datacache.core.errors import AnnotationError, BrokenImageError, UsageError
from datacache.core.ids import object_id
from datacache.manifest.codec import ends_range
from datacache.manifest.model import Entry
from datacache.manifest.reader import Manifest
from datacache.reader.snapshot import Snapshot

VERSION = 4
"""Of what is read out of files: a table that another version made is made anew."""
_EARLIER_TABLES = 5

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How annotations are to be read."""

    format: str | None = None
    """None: as the files look."""
    origin: int = 0
    """What the first pixel of Pascal VOC is called; see `voc`."""
    trust_sizes: bool = False
    """Take images' sizes from the annotations, where they give them, and open no image."""
    decode: bool = False
    """Decode every image to its end: only so a JPEG is found that was cut in its middle and given an end marker."""
    classes: tuple[str, ...] | None = None
    """Names of class ids, for data sets that have ids and no list of names that could be used."""

    def __post_init__(self) -> None:
        if self.origin not in (0, 1):
            raise UsageError(f"the origin of VOC pixels is 0 or 1, not {self.origin}")
        if self.decode and self.trust_sizes:
            raise UsageError("images are either decoded or not opened at all", hint="Leave out one of the two options.")

    @property
    def name(self) -> str:
        """Under which the table is kept beside its snapshot."""
        sizes = "decoded" if self.decode else "trusted" if self.trust_sizes else "checked"
        name = f"annotations/{VERSION}/{self.format or 'auto'}/{self.origin}/{sizes}"
        if self.classes is None:
            return name
        classes = blake2b("\n".join(self.classes).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return f"{name}/{classes}"

    def as_json(self) -> dict[str, Any]:
        """For lineage: what differs from the default. Not the classes, which are in every lineage."""
        return {name: value for name, value in asdict(self).items() if value and name != "classes"}


class Annotations:
    """The annotations of one snapshot: where they are is found out when it is first needed, and once. One thread."""

    def __init__(self, snapshot: Snapshot, catalog: Catalog, reading: Reading) -> None:
        self._snapshot, self._catalog, self._reading = snapshot, catalog, reading

    @cached_property
    def source(self) -> AnnotationSource:
        """Which file belongs to which image. `UsageError` where it is not clear which format they are in."""
        return AnnotationSource(self._snapshot, self._reading.format, self._reading.classes)

    @cached_property
    def reading(self) -> Reading:
        """How they are read: classes that are given count only where they are needed, and make no other table else."""
        if self._reading.classes is None or self.source.classes_given:
            return self._reading
        return replace(self._reading, classes=None)

    def splits(self) -> ListedSplits:
        """The splits that the data set brings."""
        return read_splits(self.source.read, self.source.layout)

    def table(self, *, processes: int | None = None, progress: Progress = lambda _what, _done, _total: None) -> Table:
        """All of them: from the catalog, or read now and kept there.

        Idempotent; a making that was killed is begun again by the next who asks. The store's errors where files cannot
        be read.
        """
        reading = self.reading
        catalog, id, name = self._catalog, self._snapshot.record.id, reading.name
        root = catalog.derived(id, name)
        if root is None:
            with TableBuilder(catalog.put_blobs) as builder:
                earlier = _earlier(self._snapshot, catalog, reading)
                meta = _build(
                    builder, self._snapshot, self.source, reading, earlier, processes=processes, progress=progress
                )
                root = builder.finish(meta)
            table = Table.open(root, catalog.get_blobs)
            catalog.set_derived(id, name, root, needs=[root, *table.blobs()])
            return table
        return Table.open(root, catalog.get_blobs)


def open_table(
    snapshot: Snapshot,
    catalog: Catalog,
    reading: Reading | None = None,
    *,
    processes: int | None = None,
    progress: Progress = lambda _what, _done, _total: None,
) -> Table:
    """The annotation table of a snapshot; see `Annotations`."""
    return Annotations(snapshot, catalog, reading or Reading()).table(processes=processes, progress=progress)


def with_entries(manifest: Manifest, rows: Iterable[Row]) -> Iterator[tuple[Row, int, Entry]]:
    """Yield each row with the manifest's row and entry of its image; both are in the order of paths."""
    rows = iter(rows)
    row = next(rows, None)
    first = 0
    for held in manifest.ranges(range(len(manifest.root.ranges))):
        at = 0
        while row is not None:
            path = row.path.encode("utf-8", "surrogateescape")
            at = bisect_left(held.paths, path, at)
            if at == len(held.paths):
                break  # in a later range
            entry = held.entry(at)
            assert entry.path == path
            yield row, first + at, entry
            row = next(rows, None)
        first += len(held.paths)


class _Item(NamedTuple):
    """One image to read, and where its annotation is: a file of its own, or a draft from a file of many."""

    path: str
    image: Part
    annotation: Part | None = None
    file: str = ""
    """The path of the annotation's file."""
    rivals: tuple[bytes, ...] = ()
    """The images that the annotation fits, where they are several."""
    draft: tuple[Draft, tuple[Problem, ...]] | None = None


class _Task(NamedTuple):
    """A range of images, and the fingerprint of all that is read for it."""

    items: list[_Item]
    key: bytes


def _build(
    builder: TableBuilder,
    snapshot: Snapshot,
    source: AnnotationSource,
    reading: Reading,
    earlier: Mapping[bytes, RangeSummary],
    *,
    processes: int | None,
    progress: Progress,
) -> dict[str, Any]:
    """Fill a table; how it was made."""
    total, done = source.layout.images, 0
    waiting: deque[EncodedRange | None] = (
        deque()
    )  # ranges in their order: taken over, or None for one that is being made

    def tasks() -> Iterator[_Task]:
        for task in _ranges(snapshot, source, reading):
            known = earlier.get(task.key)
            waiting.append(None if known is None else EncodedRange(known))
            if known is None:
                yield task

    def take(encoded: EncodedRange) -> None:
        nonlocal done
        builder.add_range(encoded)
        done += encoded.summary.rows
        progress("reading annotations of", done, total)

    reader = _Reader(snapshot, reading, source.format, source.classes, source.pose)
    for made in ordered_map(reader, tasks(), processes=processes):
        while (known := waiting.popleft()) is not None:
            take(known)
        take(made)
    for known in waiting:
        assert known is not None
        take(known)
    for problem in source.problems:
        builder.add_problem(problem)
    return {"format": source.format, "classes": list(source.classes), "version": VERSION, **reading.as_json()}


def _earlier(snapshot: Snapshot, catalog: Catalog, reading: Reading) -> Mapping[bytes, RangeSummary]:
    """The ranges of the newest other table of the same data set."""
    records = catalog.snapshots(snapshot.record.dataset)
    for record in reversed(records[-_EARLIER_TABLES - 1 :]):
        root = catalog.derived(record.id, reading.name)
        if root is not None:
            return Table.open(root, catalog.get_blobs).reusable()
    return {}


def _ranges(snapshot: Snapshot, source: AnnotationSource, reading: Reading) -> Iterator[_Task]:
    manifest = snapshot.manifest
    start = reading.name.encode() + source.fingerprint()
    items: list[_Item] = []
    key = blake2b(start, digest_size=KEY_BYTES)
    for found in source.images():
        row, entry = found.row, found.entry
        id = object_id(manifest.object_ref(entry))
        image = Part(row, entry.size_bytes, ends_only=not reading.decode, object=id)
        key.update(b"%d %s" % (len(entry.path), entry.path) + id)
        annotation, file = None, ""
        if found.annotation is not None:
            other = manifest.entry(found.annotation)
            file = text(other.path)
            annotation = Part(found.annotation, other.size_bytes, object=(id := object_id(manifest.object_ref(other))))
            key.update(b"%d %s" % (len(other.path), other.path) + id)
        if found.rivals or found.draft:
            key.update(repr((found.rivals, found.draft)).encode("utf-8", "surrogateescape"))
        items.append(_Item(text(entry.path), image, annotation, file, found.rivals, found.draft))
        if ends_range(entry.path, len(items)):
            yield _Task(items, key.digest())
            items, key = [], blake2b(start, digest_size=KEY_BYTES)
    if items:
        yield _Task(items, key.digest())


# --- in the worker processes -----------------------------------------------------------------------------------------


class _Reader:
    """Reads ranges. Made in the parent, used in each worker."""

    def __init__(self, snapshot: Snapshot, reading: Reading, format: str, classes: Sequence[str], pose: bool) -> None:
        self._files = Files(snapshot)
        self._origin = reading.origin
        self._format, self._classes, self._pose = format, classes, pose
        self._decode = reading.decode
        self._trust = reading.trust_sizes and format != "yolo"  # whose numbers mean nothing without the image's size

    def work(self, task: _Task) -> EncodedRange:
        """The rows of a range."""
        parts = [part for item in task.items for part in self._parts(item)]
        data = self._files.read(parts)
        rows = [self._row(item, data) for item in task.items]
        self._files.done()
        return encode_range(rows, task.key)

    def _parts(self, item: _Item) -> Iterator[Part]:
        """What is read for an image, in the order in which `_row` takes it."""
        if not self._trust or (item.annotation is None and item.draft is None):
            yield item.image
        if item.annotation is not None:
            yield item.annotation

    def _row(self, item: _Item, data: Iterator[Data]) -> Row:
        problems: list[Problem] = []
        header: ImageHeader | None = None
        looked = not self._trust or (item.annotation is None and item.draft is None)
        if looked:
            header = self._header(next(data), item, problems)
        raw = next(data) if item.annotation is not None else None
        if looked and header is None:
            return Row(None, item.path, tuple(problems))
        draft, sized = self._draft(item, raw, header, problems)
        if draft is None:
            if problems:
                return Row(None, item.path, tuple(problems))
            if header is None:  # sizes were to be trusted, and the annotation is of another image
                header = self._header(next(self._files.read([item.image])), item, problems)
                if header is None:
                    return Row(None, item.path, tuple(problems))
            return Row(Annotation(item.path, header.displayed_width, header.displayed_height), item.path, ())
        annotation, more = check(draft, header, item.path, sized=sized)
        problems += more
        if annotation is not None and not annotation.boxes and any(p.action == "skipped" for p in problems):
            message = (
                "none of its objects can be used; the image is left out, as it would be taken for one without objects"
            )
            problems.append(Problem("objects-lost", "skipped", item.path, 0, message))
            annotation = None
        return Row(annotation, item.path, tuple(problems))

    def _header(self, data: Data, item: _Item, problems: list[Problem]) -> ImageHeader | None:
        size_bytes = item.image.size_bytes
        try:
            header = read_header(data, size_bytes=size_bytes)
        except BrokenImageError as exc:
            if len(data) < size_bytes:  # both ends of a large image, which may be right all the same
                whole = self._files.read([Part(item.image.row, size_bytes)])
                return self._header(next(whole), item, problems)
            problems.append(broken_image(item.path, exc))
            return None
        if not header.complete:
            problems.append(truncated_image(item.path))
            return None
        if self._decode:
            from datacache.conversion.images import check_whole  # with numpy and Pillow

            try:
                check_whole(data, header, item.path)
            except AnnotationError as exc:
                problems.append(Problem(exc.code, "skipped", item.path, 0, f"{exc.message}; the image is left out"))
                return None
        if header.goes_on:
            problems.append(image_that_goes_on(item.path))
        return header

    def _draft(
        self, item: _Item, raw: Data | None, header: ImageHeader | None, problems: list[Problem]
    ) -> tuple[Draft | None, bool]:
        """What the annotation says, and whether its format knows the sizes of images. None without a problem: there is
        no annotation of this image."""
        draft = None
        if raw is not None:
            draft = self._parsed(item, raw, header, problems)
            if draft is None and problems:
                return None, False
        if item.draft is not None:
            listed, found = item.draft
            problems += found
            draft = listed if draft is None else draft._replace(labels=draft.labels + listed.labels)
        return draft, self._format == "coco" or (self._format == "voc" and raw is not None)

    def _parsed(self, item: _Item, raw: Data, header: ImageHeader | None, problems: list[Problem]) -> Draft | None:
        """What the image's own file says."""
        try:
            if self._format == "voc":
                draft, found = voc.parse(raw, item.file, origin=self._origin)
            else:
                assert header is not None
                draft, found = yolo.parse(
                    bytes(raw),
                    item.file,
                    width=header.displayed_width,
                    height=header.displayed_height,
                    classes=self._classes,
                    pose=self._pose,
                )
        except AnnotationError as exc:
            problems.append(unusable_file(exc, item.path))
            return None
        if item.rivals:
            chosen, ambiguous = choose_image(draft.name, item.rivals, item.file)
            if text(chosen) != item.path:
                return None
            problems += ambiguous
        problems += found
        return draft
