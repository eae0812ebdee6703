"""A snapshot from what an annotation tool exported: its files, and the images of another snapshot by reference.

Used by `api.import_export`. Annotations and other small files go into packs, images (and what is large) into
content-addressed storage. The same export gives the same snapshot; nothing is committed unless all of it could be read.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from datacache.annotations.pairing import is_image
from datacache.catalog.base import Catalog
from datacache.catalog.commit import commit_manifest
from datacache.catalog.objects import SMALL_BYTES, NewFiles, ObjectWriter
from datacache.catalog.refs import resolve
from datacache.core.concurrency import map_in_threads
from datacache.core.errors import ImportFailedError, UsageError
from datacache.imports.archives.members import Export, FolderExport, Member, UnpackLimits
from datacache.imports.archives.tar import TarExport, is_tar
from datacache.imports.archives.zip import ZipExport, is_zip
from datacache.imports.lines import content_hash
from datacache.imports.places import check_import
from datacache.manifest.builder import ManifestBuilder, Sorter
from datacache.manifest.model import Entry, Lineage, Naming, SnapshotRecord, Source
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.store.urls import join_url, split_object_url

COMMAND = "import-export"
TINY_IMAGE_BYTES = 16 * 2**10
"""An image up to this size is packed like a label; a catalog is no place for larger ones."""
_OTHER_BYTES = 2**20
"""The limit for videos, point clouds and other files without annotations: there may be many."""
_ANNOTATIONS = (b".json", b".jsonl", b".xml", b".txt", b".csv", b".yaml", b".yml")
_THREADS = 32
_IN_FLIGHT_BYTES = 256 * 2**20
_by_path = attrgetter("path")

Progress = Callable[[int, int, int], None]
"""Files that are done, of how many, and bytes."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How an export is imported."""

    images: str = ""
    """A snapshot whose images are taken by reference."""
    objects: str = ""
    """URL of the storage for images, in place of the setting."""
    limits: UnpackLimits = field(default_factory=UnpackLimits)


class ImportedExport(NamedTuple):
    """The result of an import."""

    record: SnapshotRecord
    files: int
    """Of the export."""
    images: int
    """Those of them that are images."""
    referenced: int
    """Images of the other snapshot."""
    replaced: int
    """Images of the other snapshot that are not taken, because the export has a file of that path."""
    passed_over: int
    """Names of files that desktops leave behind: `__MACOSX`, `.DS_Store`, `Thumbs.db`."""
    leading: str
    """The folders that were taken off, or ''."""


def import_export(
    catalog: Catalog,
    settings: Settings,
    path: Path | str,
    naming: Naming,
    *,
    options: ExportOptions,
    progress: Progress | None = None,
) -> ImportedExport:
    """Import a zip, a tar, a folder or a COCO file and commit it as the snapshot that `naming` names.

    `UsageError` for what is no export, `ImportFailedError` for one that is damaged, not safe or above the limits,
    `SnapshotNotFoundError`, `TagExistsError`, the errors of the storage.
    """
    place = _place(path)
    parameters: dict[str, Any] = {"file": place.name, "content": _content(place), "images": options.images}
    check_import(catalog, naming, Lineage(COMMAND, parameters, (options.images,) if options.images else ()))
    with ExitStack() as stack:
        others = resolve(catalog, options.images) if options.images else None
        export = stack.enter_context(closing(open_export(path, options.limits)))
        if not export.members:
            raise ImportFailedError(f"{place.name} holds no files")
        leading = leading_folders(export.members)
        sources: list[Source] = []
        files = NewFiles(
            sources,
            catalog.put_blobs,
            lambda: stack.enter_context(closing(ObjectWriter(catalog, settings, url=options.objects))),
        )
        entries: Sorter[Entry] = stack.enter_context(Sorter(_by_path))
        storing = _Storing(files, len(export.members), min(_THREADS, settings.concurrency), progress)
        for entry in storing.entries(export, leading):
            entries.add(entry)
        merged = _Merged(entries.sorted(), catalog, others, files)
        builder = ManifestBuilder(sources, catalog.put_blobs)
        for entry in merged:
            builder.add(entry)
        record = commit_manifest(
            catalog,
            builder,
            naming,
            origin=join_url("file://", str(place)[1:]),
            lineage=Lineage(
                COMMAND,
                parameters | {"leading": leading},
                (f"{others.dataset}@{others.id}",) if others is not None else (),
            ),
            packs=files.packs,
            objects=files.opened_objects,
        )
        counts = (len(export.members), storing.images, merged.referenced, merged.replaced)
        return ImportedExport(record, *counts, export.passed_over, leading)


class _Storing:
    """Stores the files of an export and gives their entries, in any order."""

    def __init__(self, files: NewFiles, total: int, threads: int, progress: Progress | None) -> None:
        self._files, self._total, self._threads, self._progress = files, total, threads, progress
        self._done = self._bytes = 0
        self.images = 0

    def entries(self, export: Export, leading: str) -> Iterator[Entry]:
        """Yield the entry of every file, once it is stored. Small ones come when their pack ends."""
        ready: list[Entry] = []

        def large() -> Iterator[tuple[Member, bytes]]:
            for found, data in export.read():
                member = found._replace(path=found.path[len(leading) :])
                raw = member.path.encode("utf-8", "surrogateescape")
                image = is_image(raw)
                self.images += image
                if len(data) > _packed_bytes(raw):
                    self._files.source(self._files.objects.source)  # opened here, not in a thread
                    yield member, data
                    continue
                ready.extend(self._files.add(member.path, data, member.mtime_ns))
                self._count(len(data))

        for entry in map_in_threads(
            self._store,
            large(),
            threads=self._threads,
            size_bytes=lambda item: len(item[1]),
            limit_bytes=_IN_FLIGHT_BYTES,
        ):
            self._count(entry.size_bytes)
            yield entry
            yield from ready
            ready.clear()
        yield from ready
        yield from self._files.end_pack()

    def _store(self, item: tuple[Member, bytes]) -> Entry:
        """Runs in any thread."""
        member, data = item
        objects = self._files.objects
        stored = objects.put(data)
        number = self._files.source(objects.source)
        path, key = (text.encode("utf-8", "surrogateescape") for text in (member.path, stored.key))
        return Entry(path, len(data), member.mtime_ns, stored.hex, "", number, key)

    def _count(self, size_bytes: int) -> None:
        self._done += 1
        self._bytes += size_bytes
        if self._progress is not None:
            self._progress(self._done, self._total, self._bytes)


class _Merged:
    """The entries of an export and the images of another snapshot, by path; the export's go before. Once."""

    def __init__(
        self, entries: Iterator[Entry], catalog: Catalog, others: SnapshotRecord | None, files: NewFiles
    ) -> None:
        self._entries, self._files = entries, files
        self._manifest = Manifest.open(others.id, catalog.get_blobs) if others is not None else None
        sources = self._manifest.root.sources if self._manifest is not None else ()
        self._numbers = [files.source(source) for source in sources]
        self.referenced = self.replaced = 0

    def __iter__(self) -> Iterator[Entry]:
        own = ((entry, True) for entry in self._entries)
        images = self._manifest.entries() if self._manifest is not None else ()
        others = ((entry, False) for entry in images if is_image(entry.path))
        last = b""
        for entry, is_own in heapq.merge(own, others, key=lambda item: item[0].path):  # of one path its own is first
            if is_own:
                last = entry.path
                yield entry
            elif entry.path == last:
                self.replaced += 1
            else:
                self.referenced += 1
                yield self._files.refer(entry._replace(source=self._numbers[entry.source]))


def _packed_bytes(path: bytes) -> int:
    """Return up to which size a file is packed."""
    if is_image(path):
        return TINY_IMAGE_BYTES
    return SMALL_BYTES if path.lower().endswith(_ANNOTATIONS) else _OTHER_BYTES


def _content(place: Path) -> str:
    """Hash a file's bytes; '' for a folder, or where it cannot be read (which opening it will say)."""
    try:
        with open(place, "rb") as file:
            return content_hash(file)
    except OSError:
        return ""


_SPLITS = ("train", "val", "valid", "test")
_LAYOUT_FOLDERS = frozenset(
    ["annotations", "annotation", "jpegimages", "images", "imagesets", "labels", "obj_train_data", *_SPLITS]
)
_LAYOUT_FILES = frozenset(
    ["data.yaml", "data.yml", "dataset.yaml", "obj.names", "obj.data", "classes.txt", "labelmap.txt"]
)
_MAX_LEADING = 3


def _place(path: Path | str) -> Path:
    """Return where an export is: a path, or a `file://` URL."""
    if str(path).startswith("file://"):
        return Path("/", split_object_url(str(path))[1])
    return Path(path).expanduser().absolute()


def open_export(path: Path | str, limits: UnpackLimits) -> Export:
    """Open a zip, a tar (also compressed), a folder or a JSON file, and look through its members.

    `UsageError` for anything else, `ImportFailedError` for an export that is damaged or not safe.
    """
    shown = str(path)
    if "://" in shown and not shown.startswith("file://"):
        raise UsageError(f"{shown} is not on this machine", hint="Fetch it first; exports are read from local files.")
    place = _place(path)
    if place.is_dir():
        return FolderExport(place, limits)
    try:
        with open(place, "rb") as file:
            head = file.read(1 << 10)
    except OSError as exc:
        raise UsageError(f"{place} cannot be opened: {exc.strerror}") from exc
    if is_zip(head):
        return ZipExport(place, limits)
    if is_tar(head):
        return TarExport(place, limits)
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") and place.suffix.lower() == ".json":
        return FolderExport(place, limits)
    raise UsageError(
        f"{place} is no export that can be read", hint="Give a zip, a tar, a folder, or a .json file of COCO."
    )


def leading_folders(members: list[Member]) -> str:
    """Return the folders that all members lie in and that hide a known layout: `export/` of `export/Annotations/a.xml`.

    '' unless a layout (VOC, YOLO, COCO) is recognised below them and not at the root. At most three folders.
    """
    if not members:
        return ""
    shared = members[0].path.split("/")[:-1][:_MAX_LEADING]
    for member in members:
        parts = member.path.split("/")[:-1]
        while shared and parts[: len(shared)] != shared:
            shared.pop()
    for depth in range(len(shared) + 1):
        skip = sum(len(part) + 1 for part in shared[:depth])
        for member in members:
            first, slash, _ = member.path[skip:].partition("/")
            if first.lower() in (_LAYOUT_FOLDERS if slash else _LAYOUT_FILES):
                return members[0].path[:skip]
    return ""
