"""References, `NAME@id|tag|latest`: parse them, find the snapshot they name, compare two, and remove one.

Names and tags are letters, digits, '.', '_' and '-', starting with a letter or digit; a name may also have '/' between
parts. An id may be shortened to its first 6 or more hex digits as long as it is the only one. A tag goes before an id
that is shortened. Used by everything that takes a reference. Any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

from datacache.catalog import leases
from datacache.catalog.base import Catalog, still_tagged
from datacache.core.errors import SnapshotNotFoundError, TagExistsError, UsageError
from datacache.manifest.diff import Change, diff
from datacache.manifest.model import SnapshotRecord
from datacache.manifest.reader import Manifest

LATEST = "latest"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_NAME = re.compile(rf"{_PART}(/{_PART})*")
_TAG = re.compile(_PART)
_ID_DIGITS = 6
_NAMED = 10
_WHOLE_ID = re.compile(r"[0-9a-f]{32}")


class Ref(NamedTuple):
    """A parsed reference. `version` is an id, a tag or `latest`."""

    dataset: str
    version: str

    @property
    def is_whole_id(self) -> bool:
        """Tell whether `version` is a whole id, which names the same snapshot for ever."""
        return is_whole_id(self.version)

    def __str__(self) -> str:
        return f"{self.dataset}@{self.version}"


def is_name(text: str) -> bool:
    """Tell whether a dataset can be called so."""
    return _NAME.fullmatch(text) is not None


def is_tag(text: str) -> bool:
    """Tell whether this can be a tag."""
    return _TAG.fullmatch(text) is not None and text != LATEST


def is_whole_id(text: str) -> bool:
    """Tell whether this is a whole id of a snapshot."""
    return _WHOLE_ID.fullmatch(text) is not None


def check_name(name: str) -> str:
    """Return `name` if it can name a dataset; raise `UsageError` otherwise."""
    if not is_name(name):
        raise UsageError(f"{name!r} cannot name a dataset", hint="Use letters, digits, '.', '_', '-' and '/' between.")
    return name


def check_tag(tag: str) -> str:
    """Return `tag` if it can be a tag; raise `UsageError` otherwise."""
    if not is_tag(tag):
        raise UsageError(f"{tag!r} cannot be a tag", hint="Use letters, digits, '.', '_' and '-'; 'latest' is taken.")
    return tag


def parse_ref(text: str) -> Ref:
    """Parse `mask@v3` to `Ref("mask", "v3")`; a bare name means its latest snapshot. Raise `UsageError` for other
    texts."""
    name, at, version = text.partition("@")
    check_name(name)
    if at and version != LATEST and not _TAG.fullmatch(version):
        raise UsageError(f"{text!r} is no reference", hint="Write NAME@TAG, NAME@ID or NAME@latest.")
    return Ref(name, version if at else LATEST)


def resolve(catalog: Catalog, ref: Ref | str) -> SnapshotRecord:
    """Return the snapshot that a reference names now. `SnapshotNotFoundError` says which names exist instead."""
    ref = parse_ref(ref) if isinstance(ref, str) else ref
    dataset = catalog.dataset(ref.dataset)
    if dataset is None:
        hint = _elsewhere(ref) if ref.is_whole_id else _datasets_there(catalog, ref)
        raise SnapshotNotFoundError(f"there is no dataset {ref.dataset!r}", ref=str(ref), hint=hint)
    if ref.is_whole_id and (record := catalog.snapshot(ref.dataset, ref.version)) is not None:
        return record  # a tag may have the same name
    id = dataset.latest if ref.version == LATEST else dataset.tags.get(ref.version)
    if id is not None:
        record = catalog.snapshot(ref.dataset, id)
        if record is not None:
            return record
    matches = []
    if re.fullmatch(rf"[0-9a-f]{{{_ID_DIGITS},32}}", ref.version):
        matches = catalog.snapshots(ref.dataset, id_prefix=ref.version)
        if len(matches) == 1:
            return matches[0]
    if matches:
        words = f"{ref} names {len(matches)} snapshots"
        raise SnapshotNotFoundError(words, ref=str(ref), ambiguous=True, hint="Give more digits.")
    tags = ", ".join(sorted(dataset.tags)) or "no tags"
    hint = f"It has {tags}, and latest. See: dsctl snapshot list {ref.dataset}"
    if ref.is_whole_id:
        hint = f"{_elsewhere(ref)} {hint}"
    elif re.fullmatch(r"[0-9a-f]{1,5}", ref.version):
        hint = f"An id needs at least {_ID_DIGITS} of its digits. {hint}"
    elif near := get_close_matches(ref.version, dataset.tags, n=1):
        hint = f"Did you mean {ref.dataset}@{near[0]}? {hint}"
    raise SnapshotNotFoundError(f"{ref.dataset} has no tag or snapshot {ref.version!r}", ref=str(ref), hint=hint)


def _datasets_there(catalog: Catalog, ref: Ref) -> str:
    """Return what may be meant by a dataset that is not there, and which there are."""
    names = [d.name for d in catalog.datasets()]
    near = get_close_matches(ref.dataset, names, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    if ref.dataset.endswith(".lock"):
        hint = "No lock file of that name is here, either. "
    shown = ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
    if folder := next((n for n in names if ref.dataset.startswith(f"{n}/")), ""):
        inside = ref.dataset.removeprefix(f"{folder}/")
        hint = f"A path in a snapshot stands behind a version: {folder}@{ref.version}/{inside}. "
    return hint + (f"There are: {shown}." if names else "Make one: dsctl snapshot create NAME --from URL")


def _elsewhere(ref: Ref) -> str:
    """Return the way to a snapshot that somebody else has named by its whole id, such as in a lock file."""
    return f'Has another catalog got it? dsctl snapshot pull {ref} URL (a lock file says its URL as "catalog").'


class Comparison(NamedTuple):
    """Two snapshots and the changes from the first to the second."""

    before: SnapshotRecord
    after: SnapshotRecord
    changes: Iterator[Change]
    """Computed as they are taken; see `manifest.diff`."""


def compare(catalog: Catalog, before: str, after: str = "") -> Comparison:
    """Compare two snapshots, or with one reference its parent and it. Raise `SnapshotNotFoundError`, or `UsageError`
    for a snapshot without parent."""
    old = resolve(catalog, before)
    if after:
        new = resolve(catalog, after)
    else:
        old, new = _parent(catalog, old), old
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


@dataclass(frozen=True, kw_only=True)
class Removal:
    """The removal of a reference, planned or done: of tags, and perhaps of the snapshot."""

    record: SnapshotRecord
    tags: tuple[str, ...]
    """The tags that go."""
    kept_tags: tuple[str, ...]
    """Tags that still name the snapshot. Without any, the snapshot goes."""
    latest: str
    """The id that is the dataset's latest afterwards; empty where none is left."""
    mounted_at: tuple[str, ...] = ()
    """The places where the snapshot is mounted, as `HOST:DIR`: its data stay while it is."""

    @property
    def of_snapshot(self) -> bool:
        return not self.kept_tags


def plan_removal(catalog: Catalog, ref: str, *, all_tags: bool = False) -> Removal:
    """Return the removal that `remove` would do now.

    A reference by tag removes that tag, and the snapshot goes when no other tag names it. `latest` and ids are no
    names: they remove a snapshot without tags, or with `all_tags` one with all its tags. Raise `SnapshotNotFoundError`,
    `UsageError` for a bare name, and `TagExistsError` for an id, or `latest`, of a snapshot with tags without
    `all_tags`."""
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
    """Do exactly the planned removal. Return False, with nothing changed, where the tags have changed meanwhile: plan
    again. Atomic: a tag that somebody gives at the same moment is never lost."""
    record = planned.record
    if not planned.of_snapshot:
        (tag,) = planned.tags
        dataset = catalog.dataset(record.dataset)
        # One of the other names must still exist, or this would take the snapshot's last name.
        if dataset is None or not any(dataset.tags.get(other) == record.id for other in planned.kept_tags):
            return False
        return catalog.remove_tag(record.dataset, tag, id=record.id)
    try:
        return catalog.remove_snapshot(record.dataset, record.id, only_tags=planned.tags)
    except TagExistsError:
        return False


_VOLUMES = "csi-static"


def volume_snapshot(catalog: Catalog, volume_id: str, reference: str, resolve: Callable[[], str]) -> str:
    """Return the `NAME@ID` of a Kubernetes volume that nobody provisioned, such as a PV written by hand.

    `volume_id` is the PV's `volumeHandle`. The first node that needs the volume resolves its `reference` and writes the
    answer down, so that all nodes show the same snapshot, wherever a tag moves. Another reference is resolved anew.
    Nobody tells when such a volume is gone, so the document stays until `forget_volume`. Any process may call.
    """
    while True:
        text = catalog.document(_VOLUMES, volume_id)
        known = json.loads(text) if text is not None else {}
        if known.get("asked") == reference:
            return str(known["dataset"])
        dataset = resolve()
        if catalog.set_document(_VOLUMES, volume_id, json.dumps({"asked": reference, "dataset": dataset}), old=text):
            return dataset


def forget_volume(catalog: Catalog, volume_id: str) -> bool:
    """Have the next node resolve the volume's reference anew. Return whether anything was known."""
    return catalog.remove_document(_VOLUMES, volume_id)
