"""Conversions in memory, for tests that make hundreds: the pipeline, tables and packs are real, and the catalog and
the tiers of a node are dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from datacache.annotations.table.table import Table
from datacache.catalog.base import Catalog
from datacache.catalog.commit import commit_manifest
from datacache.catalog.objects import NewFiles, ObjectWriter
from datacache.catalog.packs import PackStore
from datacache.conversion.index import Annotations, Reading
from datacache.conversion.model import Splits
from datacache.conversion.pipeline import Conversion, Plan, run
from datacache.core.ids import BlockId, ObjectRef, block_id, object_id
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import BlobId, Lineage, Naming, SnapshotRecord, Source
from datacache.manifest.reader import Manifest
from datacache.reader.blocks import NodeBlocks
from datacache.reader.snapshot import Snapshot


class InMemory:
    """A catalog, and the reader of its packs. All files are in packs, images too."""

    read_only = False

    def __init__(self) -> None:
        self._blobs: dict[BlobId, bytes] = {}
        self._tables: dict[tuple[str, str], BlobId] = {}
        self._here: dict[BlockId, ObjectRef] = {}
        self._packs = PackStore(self.get_blobs)
        self.local = self

    def make(self, files: Mapping[str, bytes]) -> Snapshot:
        """Return a snapshot of these files."""
        sources: list[Source] = []
        new = NewFiles(sources, self.put_blobs, _no_objects)
        entries = [entry for path, data in files.items() for entry in new.add(path, data, 0)] + new.end_pack()
        builder = ManifestBuilder(sources, self.put_blobs)
        for entry in sorted(entries, key=lambda entry: entry.path):
            builder.add(entry)
        naming, lineage = Naming(name="made"), Lineage("create", {}, ())
        catalog = cast("Catalog", self)
        return self._opened(commit_manifest(catalog, builder, naming, origin="", lineage=lineage, packs=new.packs))

    def convert(self, snapshot: Snapshot, to: str, **reading: Any) -> tuple[Snapshot, Conversion]:
        """Convert a snapshot, without splits."""
        naming, read = Naming(name="converted"), Reading(**reading)
        plan = Plan(to=to, naming=naming, reading=read, splits=Splits(), keep_unannotated=True)
        done = run(cast("Catalog", self), [snapshot], plan, open_objects=_no_objects, processes=1)
        return self._opened(done.record), done

    def table(self, snapshot: Snapshot, **reading: Any) -> Table:
        """Read the annotations of a snapshot."""
        return Annotations(snapshot, cast("Catalog", self), Reading(**reading)).table(processes=1)

    def _opened(self, record: SnapshotRecord) -> Snapshot:
        manifest = Manifest.open(record.id, self.get_blobs)
        refs = map(manifest.object_ref, manifest.entries())
        self._here |= {block_id(object_id(ref), 0): ref for ref in refs}
        return Snapshot(record, manifest, cast("NodeBlocks", self))

    # --- the catalog ---

    def put_blobs(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        self._blobs.update(blobs)

    def get_blobs(self, ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        return {id: self._blobs[id] for id in ids if id in self._blobs}

    def derived(self, snapshot_id: str, name: str) -> BlobId | None:
        return self._tables.get((snapshot_id, name))

    def set_derived(self, snapshot_id: str, name: str, root: BlobId, *, needs: object) -> None:
        self._tables[snapshot_id, name] = root

    def snapshots(self, dataset: str) -> list[SnapshotRecord]:
        return []

    def dataset(self, name: str) -> None:
        """There is no earlier version."""

    def document(self, kind: str, key: str) -> None:
        """Nothing has a list of who may open it."""

    def commit(self, record: SnapshotRecord, **_more: object) -> SnapshotRecord:
        return record

    # --- the blocks of a node ---

    def read(self, ref: ObjectRef, number: int, start: int, stop: int) -> bytes:
        assert number == 0
        return self._packs.read(ref, start, stop)

    def view(self, block: BlockId, start: int, stop: int) -> memoryview:
        return memoryview(self._packs.read(self._here[block], start, stop))

    def has_index(self) -> bool:
        return True

    def read_file(self, *_span: object) -> None:
        """Nothing is a file of this machine."""

    def unmap_pages(self) -> None:
        """There are none."""


def _no_objects() -> ObjectWriter:
    raise AssertionError("files are small")
