"""Look at many versions at once: what was made from them, and the numbers of those whose annotations were read before.

Nothing here reads a data set's files. Any thread.
"""

from __future__ import annotations

import time
from collections import Counter
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from datacache.api.options import make_reading
from datacache.core.errors import CorruptManifestError

if TYPE_CHECKING:
    from datacache.catalog.base import Catalog
    from datacache.manifest.model import SnapshotRecord


class VersionCounts(NamedTuple):
    """The numbers of a version's annotations."""

    images: int
    objects: int
    classes: int
    problems: dict[str, int]
    """Code → how many there are, sorted by code."""


def version_counts(catalog: Catalog, record: SnapshotRecord) -> VersionCounts | None:
    """Return the numbers of a version's annotations as they are read by default; None where nobody has read them yet,
    and where what was kept of them is damaged, which an error tells whoever opens them."""
    from datacache.annotations.table.table import Table

    root = catalog.derived(record.id, make_reading({}).name)
    try:
        table = Table.open(root, catalog.get_blobs) if root is not None else None
    except CorruptManifestError:
        table = None
    if table is None:
        return None
    problems: Counter[str] = Counter()
    for each in table.problem_counts:
        problems[each.code] += each.times
    return VersionCounts(table.images, table.boxes, len(table.labels), dict(problems))


class Descendants(NamedTuple):
    """The versions that were made from others."""

    by_input: dict[str, list[SnapshotRecord]]
    """`dataset@id` with the whole id → what was made from it, the newest first."""
    is_complete: bool
    """Whether all data sets were looked at."""


def descendants(catalog: Catalog, *, most: float = inf, limit_s: float = inf) -> Descendants:
    """Return what was made from which version, in all data sets; or in some `most` versions, or those that can be read
    within `limit_s`."""
    found: dict[str, list[SnapshotRecord]] = {}
    end_s = time.monotonic() + limit_s
    for dataset in catalog.datasets():
        if most <= 0 or time.monotonic() > end_s:
            return Descendants(found, is_complete=False)
        records = catalog.snapshots(dataset.name)
        most -= len(records)
        for record in records:
            for ref in record.lineage.inputs if record.lineage else ():
                found.setdefault(ref, []).append(record)
    for made in found.values():
        made.sort(key=lambda record: record.created_at, reverse=True)
    return Descendants(found, is_complete=True)
