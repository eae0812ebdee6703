"""Commit drafts: make the next version of a data set out of its newest one and what the drafts say of their images.

Used by `api.commit_marks`. Nothing is visible before the version is, and the drafts go afterwards, each only as the
one that went in: one that was saved again meanwhile stays. Whoever is killed in between leaves drafts whose marks are
in the newest version, and the next commit removes these. If another version becomes the newest meanwhile, the work
begins anew on that one. Drafts are held in memory, some kilobytes each. One thread, and the processes of conversions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import Any, Final, NamedTuple

from xxhash import xxh3_128_hexdigest

from datacache.annotations.model import Annotation, Problem, quote
from datacache.annotations.table.ranges import Row
from datacache.annotations.table.table import Table
from datacache.catalog.base import Catalog
from datacache.catalog.commit import OvertakenError, is_latest
from datacache.catalog.objects import ObjectWriter
from datacache.catalog.refs import resolve
from datacache.conversion.index import Annotations, Reading
from datacache.conversion.model import Splits
from datacache.conversion.pipeline import Marks, Plan, Progress, run
from datacache.conversion.problems import own_format
from datacache.conversion.source import AnnotationSource
from datacache.conversion.targets import TARGETS
from datacache.core.errors import CorruptManifestError, UsageError
from datacache.core.html import html_table
from datacache.core.ids import ObjectId, object_id
from datacache.manifest.model import Lineage, Naming, SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.marking.drafts import (
    Draft,
    all_drafts,
    follow_commit,
    is_stale,
    is_there,
    marked,
    move_draft,
    remove_draft,
)
from datacache.marking.patch import commit_patched, patched_files
from datacache.reader.snapshot import Snapshot

NOT_DONE: Final = "not done"
OTHER_AUTHOR: Final = "another author"
STALE: Final = "stale"
GONE: Final = "image gone"
SAVED_AGAIN: Final = "saved again"
LEFT_OUT: Final = "left out"
_WHOLE_PX: Final = {"keras-yolo3": 0.5}
"""Formats that round to whole pixels."""


class Left(NamedTuple):
    """A draft that a commit has left."""

    path: str
    author: str
    why: str
    """`not done`, `another author`, `stale` (another version says something else of the image), `image gone` (the
    newest version has no such image, or it cannot be used), `saved again` (while the commit ran) or `left out` (the
    format cannot hold the image; `Committed.problems` says why)."""


class Committed(NamedTuple):
    """The result of a commit."""

    record: SnapshotRecord
    """The version that was made; the newest one where there was nothing to commit."""
    images: int
    """Images whose marks went in."""
    left: tuple[Left, ...]
    """By path."""
    problems: tuple[Problem, ...] = ()
    """Of the version that was made."""

    def _repr_html_(self) -> str:
        rows: list[tuple[object, ...]] = [("images marked", self.images)]
        return self.record._repr_html_() + html_table([*rows, *((left.path, left.why) for left in self.left)])


def commit_marks(
    catalog: Catalog,
    dataset: str,
    naming: Naming,
    *,
    to: str | None,
    authors: Collection[str] | None,
    only_done: bool,
    skip_predictions: bool,
    open_snapshot: Callable[[SnapshotRecord], AbstractContextManager[Snapshot]],
    open_objects: Callable[[], ObjectWriter],
    processes: int | None = None,
    progress: Progress = lambda _what, _done, _total: None,
) -> Committed:
    """Make a version of the drafts of a data set; see `api.commit_marks`."""
    while True:
        base = resolve(catalog, dataset)
        with open_snapshot(base) as snapshot:
            annotations = Annotations(snapshot, catalog, Reading())
            table = annotations.table(processes=processes, progress=progress)
            going, left = _choose(catalog, table, base, authors=authors, only_done=only_done)
            if not going.drafts:
                return Committed(base, 0, tuple(sorted(left)))
            target = _target(table, going, to)
            patch = None if skip_predictions else _patch(annotations.source, snapshot.manifest, table, target, going)
            try:
                if patch is not None:
                    files, problems = patch
                    lineage = Lineage("mark", {"to": target, **going.parameters()}, (snapshot.ref,))
                    record = commit_patched(
                        catalog, snapshot, naming, lineage, files, open_objects=open_objects, check=is_latest(base.id)
                    )
                else:
                    darknet = to is None and target == "yolo" and snapshot.manifest.find(b"obj.data") is not None
                    plan = Plan(
                        to="darknet" if darknet else target,
                        naming=naming,
                        reading=Reading(),
                        splits=Splits() if target == "cvat-video" else None,
                        keep_unannotated=True,
                        marks=Marks(going.after, going.labels(), going.looked_at, going.place, skip_predictions),
                        command="mark",
                        parameters=going.parameters(),
                    )
                    record, report = run(
                        catalog,
                        [snapshot],
                        plan,
                        open_objects=open_objects,
                        processes=processes,
                        progress=progress,
                        check=is_latest(base.id),
                    )
                    problems = report.problems
            except OvertakenError:
                continue
        again = []
        for path, draft in going.drafts.items():
            if path not in going.placed:
                left.append(Left(path, draft.author, LEFT_OUT))
            elif not remove_draft(catalog, draft):
                left.append(Left(path, draft.author, SAVED_AGAIN))
                again.append(draft)
        if again:
            with open_snapshot(record) as snapshot:
                table = Annotations(snapshot, catalog, Reading()).table(processes=processes, progress=progress)
                for draft in again:
                    if (row := table.row(draft.path)) is not None:
                        follow_commit(catalog, draft, row, base=record.id)
        if going.moved:
            _follow(catalog, Manifest.open(record.id, catalog.get_blobs), record, list(all_drafts(catalog, dataset)))
        return Committed(record, len(going.placed), tuple(sorted(left)), tuple(problems))


class _Going:
    """The drafts that go into a version."""

    def __init__(self, drafts: dict[str, Draft]) -> None:
        self.drafts = drafts
        """By path."""
        self.placed: set[str] = set()
        """The paths of those whose images are in the version."""
        self.moved = False
        """True once an image got another path."""

    def after(self, row: Row) -> Annotation | None:
        draft = self.drafts.get(row.path)
        return None if draft is None else marked(row, draft)

    def looked_at(self, path: str) -> bool:
        draft = self.drafts.get(path)
        return draft is not None and (bool(draft.objects) or not draft.labels)

    def place(self, path: str, now: str) -> None:
        self.moved = self.moved or path != now
        if path in self.drafts:
            self.placed.add(path)

    def labels(self) -> frozenset[str]:
        return frozenset(mark.label for draft in self.drafts.values() for mark in draft.objects)

    def parameters(self) -> dict[str, Any]:
        """Return what the lineage says: the same for the same marks, whenever they were saved."""
        said = [(path, draft.author, draft.objects, draft.labels) for path, draft in sorted(self.drafts.items())]
        images = Counter(draft.author for draft in self.drafts.values())
        marks = xxh3_128_hexdigest(json.dumps(said).encode())
        return {"authors": dict(sorted(images.items())), "images": len(said), "marks": marks}


def _choose(
    catalog: Catalog, table: Table, base: SnapshotRecord, *, authors: Collection[str] | None, only_done: bool
) -> tuple[_Going, list[Left]]:
    """Return the drafts to commit, and those that are left. Drafts whose marks are there already are
    removed."""
    found = {draft.path: draft for draft in all_drafts(catalog, base.dataset)}
    # Sorted, as neighbours lie in one range of the table.
    gone = [found[path] for path in sorted(found, key=_encode) if table.row(path) is None]
    if gone:
        for path, moved in _follow(catalog, Manifest.open(base.id, catalog.get_blobs), base, gone).items():
            del found[path]
            found[moved.path] = moved
    chosen: dict[str, Draft] = {}
    left: list[Left] = []
    slack = _WHOLE_PX.get(table.meta.get("format", ""), 0.0)
    for path in sorted(found, key=_encode):
        draft, row = found[path], table.row(path)
        if authors is not None and draft.author not in authors:
            why = OTHER_AUTHOR
        elif only_done and not draft.done:
            why = NOT_DONE
        elif row is None or row.annotation is None:
            why = GONE
        elif not is_stale(row, draft):
            chosen[path] = draft
            continue
        elif is_there(row, draft, slack=slack) and remove_draft(catalog, draft):
            continue
        else:
            why = STALE
        left.append(Left(path, draft.author, why))
    return _Going(chosen), left


def _target(table: Table, going: _Going, to: str | None) -> str:
    """Return the format of the version: `to`, or that of the data set. `UsageError` where it holds no objects, and
    there are some."""
    drawn = next((path for path, draft in going.drafts.items() if draft.objects), None)
    format = table.meta.get("format", "none")
    if to is None:
        to = "yolo" if format == "none" else own_format(table)
    if drawn is not None and TARGETS.get(to) is TARGETS["folders"]:
        raise UsageError(
            f"{quote(drawn)} was marked with objects, and folders of classes have none",
            hint="Choose another format, --to yolo for one: all images then go where that has them, and their classes "
            "into a metadata.jsonl.",
        )
    return to


def _patch(
    source: AnnotationSource, manifest: Manifest, table: Table, to: str, going: _Going
) -> tuple[dict[str, bytes], list[Problem]] | None:
    """Return what `patched_files` does of the marks; None where labels of whole images change, too."""
    marked = []
    for path in going.drafts:
        row = table.row(path)
        after = None if row is None else going.after(row)
        if row is None or row.annotation is None or after is None or after.labels != row.annotation.labels:
            return None
        marked.append(after)
    patch = patched_files(source, manifest, table, to, marked)
    if patch is not None:
        going.placed.update(going.drafts)
    return patch


def _follow(catalog: Catalog, newest: Manifest, record: SnapshotRecord, drafts: Sequence[Draft]) -> dict[str, Draft]:
    """Move drafts along whose images, by their objects, have another path in the newest version. Return them by their
    earlier paths."""
    objects: dict[ObjectId, list[Draft]] = {}
    manifests: dict[str, Manifest | None] = {}
    for draft in drafts:
        if draft.base not in manifests:
            try:
                manifests[draft.base] = Manifest.open(draft.base, catalog.get_blobs)
            except CorruptManifestError:  # the version was removed
                manifests[draft.base] = None
        manifest = manifests[draft.base]
        row = None if manifest is None else manifest.find(_encode(draft.path))
        if manifest is not None and row is not None and newest.find(_encode(draft.path)) is None:
            objects.setdefault(object_id(manifest.object_ref(manifest.entry(row))), []).append(draft)
    places: dict[ObjectId, list[str]] = {}
    for entry in newest.entries() if objects else ():
        id = object_id(newest.object_ref(entry)) if entry.has_object else None
        if id in objects:
            places.setdefault(id, []).append(entry.path.decode("utf-8", "surrogateescape"))
    moved: dict[str, Draft] = {}
    for id, paths in places.items():
        for draft in objects[id]:
            if paths:
                paths.remove(path := max(paths, key=lambda path: _alike(path, draft.path)))
                new = move_draft(catalog, draft, path, base=record.id)
                if new is not None:
                    moved[draft.path] = new
    return moved


def _alike(path: str, other: str) -> int:
    """Return how many characters at their ends are the same: of images that are equal, which is meant."""
    pairs = zip(reversed(path), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
