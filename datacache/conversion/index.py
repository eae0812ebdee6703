"""The annotations of a snapshot, read once and kept in the catalog.

Used by conversions, queries, statistics and previews, all through `Annotations`. Images are taken in ranges whose ends
depend on their paths alone; the next version of a data set takes over the ranges in which no image and no annotation
has changed, and reads only the others. Annotation files are parsed and images' headers looked at in as many processes
as there are processors, or fewer where one file speaks of few images; the result does not depend on their number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple

from datacache.annotations.check import check, same_object
from datacache.annotations.formats import labelme, voc, yolo
from datacache.annotations.formats.mask_images import add_masks, with_masks
from datacache.annotations.formats.metadata import is_metadata
from datacache.annotations.formats.open_images import scaled
from datacache.annotations.image_header import ImageHeader, read_header
from datacache.annotations.layout import text
from datacache.annotations.model import (
    FORMATS,
    Annotation,
    Draft,
    Problem,
    broken_image,
    image_that_goes_on,
    quote,
    truncated_image,
    unforeseen,
    unusable_file,
)
from datacache.annotations.pairing import choose_image
from datacache.annotations.split_lists import ListedSplits, read_splits
from datacache.annotations.table.ranges import Row
from datacache.annotations.table.table import KEY_BYTES, EncodedRange, Table, TableBuilder, encode_range
from datacache.catalog.base import Catalog
from datacache.conversion.files import Data, Files, Part
from datacache.conversion.source import AnnotationSource, Item, SaidAside
from datacache.core.cores import cores
from datacache.core.errors import AnnotationError, BrokenImageError, CorruptManifestError, UsageError
from datacache.core.parallel import Workers, ordered_map
from datacache.manifest.codec import ends_range
from datacache.manifest.model import BlobId, Entry
from datacache.manifest.reader import Manifest
from datacache.reader.snapshot import Snapshot

VERSION = 13
"""Of what is read out of files: a table that another version made is made anew."""
_EARLIER_TABLES = 5
_IMAGES_A_PROCESS = 10_000
"""Where one file speaks of many images, and is parsed already: fewer are checked sooner than another process starts."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How annotations are to be read."""

    format: str | None = None
    """None: as the files look."""
    origin: int = 0
    """The coordinate of the first pixel in Pascal VOC; see `voc`."""
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
        """Name under which the table is kept beside its snapshot."""
        sizes = "decoded" if self.decode else "trusted" if self.trust_sizes else "checked"
        name = f"annotations/{VERSION}/{self.format or 'auto'}/{self.origin}/{sizes}"
        if self.classes is None:
            return name
        classes = blake2b("\n".join(self.classes).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return f"{name}/{classes}"

    def as_json(self) -> dict[str, Any]:
        """Return for lineage what differs from the default. Not the classes, which are in every lineage."""
        return {name: value for name, value in asdict(self).items() if value and name != "classes"}


class Annotations:
    """The annotations of one snapshot. Which file belongs to which image is found out once, when it is needed. One
    thread."""

    def __init__(self, snapshot: Snapshot, catalog: Catalog, reading: Reading) -> None:
        self._snapshot, self._catalog, self._reading = snapshot, catalog, reading

    @cached_property
    def source(self) -> AnnotationSource:
        """Find which file belongs to which image. `UsageError` where it is not clear which format they are in."""
        return AnnotationSource(self._snapshot, self._reading.format, self._reading.classes)

    @cached_property
    def reading(self) -> Reading:
        """Tell how they are read: classes that are given count only where they are needed, and make no other table
        else."""
        if self._reading.classes is None or self.source.classes_given:
            return self._reading
        return replace(self._reading, classes=None)

    def splits(self) -> ListedSplits:
        """Read the splits that the data set brings."""
        return read_splits(self.source.read, self.source.layout, self.source.open)

    def table(self, *, processes: Workers = None, progress: Progress = lambda _what, _done, _total: None) -> Table:
        """Return all of them: from the catalog, or read now and kept there.

        Idempotent; a making that was killed is begun again by the next who asks. The store's errors where files cannot
        be read.
        """
        catalog, id, name = self._catalog, self._snapshot.record.id, self.reading.name
        root = catalog.derived(id, name)
        if root is not None:
            return Table.open(root, catalog.get_blobs)
        with TableBuilder(catalog.put_blobs) as builder:
            root = self._build(builder, processes, progress)
        table = Table.open(root, catalog.get_blobs)
        catalog.set_derived(id, name, root, needs=[root, *table.blobs()])
        return table

    def _build(self, builder: TableBuilder, processes: Workers, progress: Progress) -> BlobId:
        source, reading, earlier = self.source, self.reading, self._earlier()
        numbers = {} if earlier is None else earlier.range_numbers()
        done = 0
        # Ranges in their order: taken over, or None for one that is being made.
        waiting: deque[EncodedRange | None] = deque()

        def tasks() -> Iterator[_Task]:
            for task in _ranges(source, reading):
                known = numbers.get(task.key)
                waiting.append(None if known is None or earlier is None else EncodedRange(earlier.range(known)))
                if known is None:
                    yield task

        if processes is None and source.layout.lists and not reading.decode:
            processes = min(cores(), 1 + source.layout.images // _IMAGES_A_PROCESS)
        reader = _Reader(self._snapshot, reading, source)
        made = ordered_map(reader, tasks(), processes=processes)
        more: EncodedRange | None = next(made, None)  # fills `waiting` ahead of what it makes
        while waiting or more is not None:
            known = waiting.popleft()
            if known is None:
                known, more = more, next(made, None)
            assert known is not None
            builder.add_range(known)
            done += known.summary.rows
            progress("reading annotations of", done, source.layout.images)
        for problem in source.problems:
            builder.add_problem(problem)
        meta = {"format": source.format, "classes": list(source.classes), "version": VERSION, **reading.as_json()}
        of_classes = {
            "skeletons": source.skeletons,
            "supercategories": source.supercategories,
            "identifiers": source.identifiers,
        }
        return builder.finish(meta | {name: value for name, value in of_classes.items() if value})

    def _earlier(self) -> Table | None:
        """Return the newest other table of the same data set."""
        catalog = self._catalog
        for record in reversed(catalog.snapshots(self._snapshot.record.dataset)[-_EARLIER_TABLES - 1 :]):
            root = catalog.derived(record.id, self.reading.name)
            if root is not None:
                return Table.open(root, catalog.get_blobs)
        return None


def with_entries(manifest: Manifest, rows: Iterable[Row]) -> Iterator[tuple[Row, int, Entry]]:
    """Yield each row with the manifest's row and entry of its image; both are in the order of paths."""
    rows = iter(rows)
    row = next(rows, None)
    first = 0
    for held in manifest.ranges(range(len(manifest.root.ranges))):
        at = 0
        while row is not None:
            path = _encode(row.path)
            at = bisect_left(held.paths, path, at)
            if at == len(held.paths):
                break  # in a later range
            entry = held.entry(at)
            if entry.path != path:
                break
            yield row, first + at, entry
            row = next(rows, None)
        first += len(held.paths)
    if row is not None:
        raise CorruptManifestError(f"the table of annotations has {quote(row.path)}, which the snapshot has not")


class _Task(NamedTuple):
    """A range of images, and the fingerprint of all that is read for it."""

    items: list[Item]
    key: bytes


def _ranges(source: AnnotationSource, reading: Reading) -> Iterator[_Task]:
    start = reading.name.encode() + source.fingerprint()
    items: list[Item] = []
    key = blake2b(start, digest_size=KEY_BYTES)
    for item in source.images():
        path = _encode(item.path)
        for name, part in ((path, item.image), (_encode(item.file), item.annotation)):
            if part is not None:
                key.update(b"%d %s%s" % (len(name), name, part.object))
        if item.masks:
            key.update(
                repr((item.mask_file, [part and part.object for part in item.masks])).encode("utf-8", "surrogateescape")
            )
        if item.rivals or item.draft:
            key.update(b"%d %b" % (len(item.draft), item.draft) + repr(item.rivals).encode())
        items.append(item)
        if ends_range(path, len(items)):
            yield _Task(items, key.digest())
            items, key = [], blake2b(start, digest_size=KEY_BYTES)
    if items:
        yield _Task(items, key.digest())


# --- in the worker processes -----------------------------------------------------------------------------------------


class _Reader:
    """Reads ranges. Made in the parent, used in each worker."""

    def __init__(self, snapshot: Snapshot, reading: Reading, source: AnnotationSource) -> None:
        self._files = Files(snapshot)
        self._origin, self._decode = reading.origin, reading.decode
        self._format, self._classes, self._pose = source.format, source.classes, source.pose
        self._rotated, self._mask_classes = source.rotated, source.mask_classes
        self._sized = FORMATS[source.format].sized
        self._trust = reading.trust_sizes and self._sized

    def work(self, task: _Task) -> EncodedRange:
        """Return the rows of a range."""
        each = [(self._image(item), item.annotation, *item.masks) for item in task.items]
        parts = [[part for part in parts if part is not None] for parts in each]
        data = self._files.read(chain.from_iterable(parts))
        rows = []
        for item, its in zip(task.items, parts, strict=True):
            own = islice(data, len(its))
            try:
                rows.append(self._row(item, own))
            except Exception as exc:  # noqa: BLE001 - one image must not end the reading of all
                rows.append(_failed(item, exc))
            deque(own, 0)  # what a failure has left
        self._files.done()
        return encode_range(rows, task.key)

    def _image(self, item: Item) -> Part | None:
        """Return what is read of an image itself. None where the size in its annotation is trusted."""
        if self._trust and (item.annotation is not None or item.draft):
            return None
        return self._checked(item)

    def _checked(self, item: Item) -> Part:
        """Return what is read of an image to check it."""
        return item.image._replace(ends_only=not self._decode)

    def _row(self, item: Item, data: Iterator[Data]) -> Row:
        problems: list[Problem] = []
        image = self._image(item)
        header = None if image is None else self._header(next(data), item, problems)
        raw = None if item.annotation is None else next(data)
        masks = [None if part is None else bytes(next(data)) for part in item.masks]
        if image is not None and header is None:
            return Row(None, item.path, tuple(problems))
        found: list[Problem] = []
        draft = self._draft(item, raw, header, found)
        if self._mask_classes and any(masks) and (raw is None or draft is not None):
            # Objects that the XML has and we have not would move the places of those behind them.
            by_place = not any(problem.action == "skipped" for problem in found)
            draft, more = add_masks(
                draft or Draft(item.mask_file), masks, item.mask_file, self._mask_classes, by_place=by_place
            )
            found += more
        problems += found
        if draft is None:
            if not found and header is None:  # sizes were to be trusted, and the annotation is of another image
                header = self._header(next(self._files.read([self._checked(item)])), item, problems)
            if found or header is None:
                return Row(None, item.path, tuple(problems))
            unannotated = Annotation(item.path, header.displayed_width, header.displayed_height)
            return Row(unannotated, item.path, tuple(problems))
        if draft.relative and header is not None:
            draft = scaled(draft, header.displayed_width, header.displayed_height)
            if masks:
                draft, more = with_masks(draft, masks, header.displayed_width, header.displayed_height)
                problems += more
        own = raw is not None or not (FORMATS[self._format].suffix or is_metadata(draft.file))
        annotation, more = check(draft, header, item.path, sized=self._sized and own)
        problems += more
        if annotation is not None and not annotation.boxes and any(p.action == "skipped" for p in problems):
            message = (
                "none of its objects can be used; the image is left out, as it would be taken for one without objects"
            )
            problems.append(Problem("objects-lost", "skipped", item.path, 0, message))
            annotation = None
        return Row(annotation, item.path, tuple(problems))

    def _header(self, data: Data, item: Item, problems: list[Problem]) -> ImageHeader | None:
        size_bytes = item.image.stop
        try:
            header = read_header(data, size_bytes=size_bytes)
        except BrokenImageError as exc:
            if len(data) < size_bytes:  # both ends of a large image, which may be right all the same
                return self._header_of_whole(item, problems)
            problems.append(broken_image(item.path, exc))
            return None
        if not header.complete and len(data) < size_bytes:  # its end may be far before that of the file
            return self._header_of_whole(item, problems)
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

    def _header_of_whole(self, item: Item, problems: list[Problem]) -> ImageHeader | None:
        [whole] = self._files.read([Part(item.image.row, item.image.stop)])
        return self._header(whole, item, problems)

    def _draft(self, item: Item, raw: Data | None, header: ImageHeader | None, problems: list[Problem]) -> Draft | None:
        """Return what the annotation says. None without a problem: there is no annotation of this image."""
        draft = None if raw is None else self._parsed(item, raw, header, problems)
        if not item.draft or (draft is None and problems):
            return draft
        listed, found = SaidAside.value_of(item.draft)
        problems += found
        if draft is None:
            return listed
        known = set(map(same_object, draft.boxes))
        more = tuple(box._replace(line=0) for box in listed.boxes if same_object(box) not in known)
        labels, captions = draft.labels + listed.labels, draft.captions + listed.captions
        return draft._replace(boxes=draft.boxes + more, labels=labels, captions=captions)

    def _parsed(self, item: Item, raw: Data, header: ImageHeader | None, problems: list[Problem]) -> Draft | None:
        """Read what the image's own file says."""
        try:
            if self._format == "voc":
                draft, found = voc.parse(raw, item.file, origin=self._origin)
            elif self._format == "labelme":
                draft, found = labelme.parse(raw, item.file)
            else:
                assert header is not None
                draft, found = yolo.parse(
                    raw,
                    item.file,
                    width=header.displayed_width,
                    height=header.displayed_height,
                    classes=self._classes,
                    pose=self._pose,
                    rotated=self._rotated,
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


def _failed(item: Item, error: Exception) -> Row:
    """Return the row of an image that cannot be used, as `error` says. Raise it where it is not of the image."""
    if isinstance(error, AnnotationError):
        problem = unusable_file(error, item.path)
    else:
        problem = unforeseen(error, item.file or item.path, f"{quote(item.path)} is")
    return Row(None, item.path, (problem,))


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
