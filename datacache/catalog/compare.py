"""Two snapshots by their references, and what changed between them.

Used by `dsctl snapshot diff` and `api.diff_snapshots`. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from datacache.catalog.base import Catalog
from datacache.catalog.refs import resolve
from datacache.core.errors import SnapshotNotFoundError, UsageError
from datacache.manifest.diff import Change, diff
from datacache.manifest.model import SnapshotRecord
from datacache.manifest.reader import Manifest


class Comparison(NamedTuple):
    """Two snapshots and the way from the first to the second."""

    before: SnapshotRecord
    after: SnapshotRecord
    changes: Iterator[Change]
    """Read as it is taken; see `manifest.diff`."""


def compare(catalog: Catalog, before: str, after: str = "") -> Comparison:
    """What leads from one snapshot to another. With one reference: to it, from its parent.

    Raises `SnapshotNotFoundError`, `UsageError` for a snapshot without parent.
    """
    if after:
        old, new = resolve(catalog, before), resolve(catalog, after)
    else:
        new = resolve(catalog, before)
        old = _parent(catalog, new)
    load = catalog.get_blobs
    return Comparison(old, new, diff(Manifest.open(old.id, load), Manifest.open(new.id, load)))


def _parent(catalog: Catalog, record: SnapshotRecord) -> SnapshotRecord:
    if record.parent is None:
        raise UsageError(
            f"{record.ref} was the first snapshot of {record.dataset}: there is nothing to compare it with",
            hint=f"Name two snapshots: dsctl snapshot diff A B. See: dsctl snapshot list {record.dataset}",
        )
    parent = catalog.snapshot(record.dataset, record.parent)
    if parent is None:
        raise SnapshotNotFoundError(
            f"the snapshot before {record.ref} was removed",
            ref=f"{record.dataset}@{record.parent}",
            hint=f"Name two snapshots: dsctl snapshot diff A B. See: dsctl snapshot list {record.dataset}",
        )
    return parent
