"""Remove a name of a snapshot, and the snapshot with its last name.

Used by `api.remove_snapshot`. Tags are names that somebody gave: a reference by tag removes that tag, and the snapshot
goes when no other tag names it. `latest` and ids are no names: they remove a snapshot that has no tag, or with
`all_tags` one with all of them. Atomic: a tag that somebody gives at the same moment is never lost. Any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from datacache.catalog import leases
from datacache.catalog.base import Catalog, still_tagged
from datacache.catalog.refs import parse_ref, resolve
from datacache.core.errors import TagExistsError, UsageError
from datacache.manifest.model import SnapshotRecord


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A reference's removal, done or only described: of tags, and perhaps of the snapshot."""

    record: SnapshotRecord
    tags: tuple[str, ...]
    """The tags that go."""
    kept_tags: tuple[str, ...]
    """Those that name the snapshot still. Without any, the snapshot goes."""
    latest: str
    """The id that is the dataset's latest afterwards; empty where none is left."""
    mounted_at: tuple[str, ...] = ()
    """The places where the snapshot is mounted, as `HOST:DIR`: its data stay for that long."""

    @property
    def of_snapshot(self) -> bool:
        """Tell whether the snapshot goes."""
        return not self.kept_tags


def plan_removal(catalog: Catalog, ref: str, *, all_tags: bool = False) -> Removal:
    """Return what `remove` would do now. `SnapshotNotFoundError`; `UsageError` for a bare name; `TagExistsError` for an
    id, or `latest`, of a snapshot that has tags, without `all_tags`.
    """
    parsed = parse_ref(ref)
    if "@" not in ref:
        raise UsageError(
            f"which snapshot of {ref}?", hint=f"Write {ref}@TAG, {ref}@ID or {ref}@latest: dsctl snapshot list {ref}"
        )
    record = resolve(catalog, parsed)
    dataset = catalog.dataset(record.dataset)
    names = sorted(tag for tag, id in dataset.tags.items() if id == record.id) if dataset is not None else []
    by_tag = parsed.version in names and not (parsed.is_whole_id and parsed.version == record.id)
    if all_tags:
        gone, kept = names, []
    elif by_tag:
        gone, kept = [parsed.version], [tag for tag in names if tag != parsed.version]
    elif names:
        raise still_tagged(record.dataset, record.id, names)
    else:
        gone, kept = [], []
    latest = dataset.latest if dataset is not None else ""
    if not kept:
        left = [other.id for other in catalog.snapshots(record.dataset) if other.id != record.id]
        latest = "" if not left else left[-1] if latest == record.id else latest
    return Removal(
        record=record,
        tags=tuple(gone),
        kept_tags=tuple(kept),
        latest=latest,
        mounted_at=tuple(leases.mounted_at(catalog, record.id)) if not kept else (),
    )


def remove(catalog: Catalog, planned: Removal) -> bool:
    """Do exactly what was planned. False, with nothing changed, where somebody has changed the tags meanwhile: plan it
    again."""
    record = planned.record
    if not planned.of_snapshot:
        (tag,) = planned.tags
        dataset = catalog.dataset(record.dataset)
        # At least one of the other names has to be there still, or the last one would go and leave it without a name.
        if dataset is None or not any(dataset.tags.get(other) == record.id for other in planned.kept_tags):
            return False
        return catalog.remove_tag(record.dataset, tag, id=record.id)
    try:
        return catalog.remove_snapshot(record.dataset, record.id, only_tags=planned.tags)
    except TagExistsError:
        return False
