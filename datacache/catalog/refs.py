"""`NAME@id|tag|latest`: parsing, and finding the snapshot it names.

Names and tags are letters, digits, '.', '_' and '-', starting with a letter or digit; a name may also have
'/' between parts. An id may be shortened to its first 6 or more hex digits as long as it is the only one. A
tag goes before an id that is shortened.

Two snapshots by their references, and what changed between them.

Used by `dsctl snapshot diff` and `api.diff_snapshots`. One thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import NamedTuple

from datacache.catalog.base import Catalog
from datacache.core.errors import SnapshotNotFoundError, UsageError
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
        """Whether `version` is a whole id: the same snapshot for ever."""
        return _WHOLE_ID.fullmatch(self.version) is not None

    def __str__(self) -> str:
        return f"{self.dataset}@{self.version}"


def check_name(name: str) -> str:
    """`name` if it can name a dataset; `UsageError` otherwise."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a dataset", hint="Use letters, digits, '.', '_', '-' and '/' between.")
    return name


def check_tag(tag: str) -> str:
    """`tag` if it can be a tag; `UsageError` otherwise."""
    if not _TAG.fullmatch(tag) or tag == LATEST:
        raise UsageError(f"{tag!r} cannot be a tag", hint="Use letters, digits, '.', '_' and '-'; 'latest' is taken.")
    return tag


def parse_ref(text: str) -> Ref:
    """`mask@v3` → `Ref("mask", "v3")`; a bare name means its latest snapshot. `UsageError` if it is
    neither.
    """
    name, at, version = text.partition("@")
    check_name(name)
    if at and version != LATEST and not _TAG.fullmatch(version):
        raise UsageError(f"{text!r} is no reference", hint="Write NAME@TAG, NAME@ID or NAME@latest.")
    return Ref(name, version if at else LATEST)


def resolve(catalog: Catalog, ref: Ref | str) -> SnapshotRecord:
    """The snapshot a reference names now. `SnapshotNotFoundError` says what there is instead."""
    ref = parse_ref(ref) if isinstance(ref, str) else ref
    dataset = catalog.dataset(ref.dataset)
    if dataset is None:
        names = [d.name for d in catalog.datasets()]
        near = get_close_matches(ref.dataset, names, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        shown = ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
        hint += f"There are: {shown}." if names else "Make one: dsctl snapshot create NAME --from URL"
        raise SnapshotNotFoundError(f"there is no dataset {ref.dataset!r}", ref=str(ref), hint=hint)
    if ref.is_whole_id and (record := catalog.snapshot(ref.dataset, ref.version)) is not None:
        return record  # whatever tag somebody gives this name
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
    if re.fullmatch(r"[0-9a-f]{1,5}", ref.version):
        hint = f"An id needs at least {_ID_DIGITS} of its digits. {hint}"
    elif near := get_close_matches(ref.version, dataset.tags, n=1):
        hint = f"Did you mean {ref.dataset}@{near[0]}? {hint}"
    raise SnapshotNotFoundError(f"{ref.dataset} has no tag or snapshot {ref.version!r}", ref=str(ref), hint=hint)


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
