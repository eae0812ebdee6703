"""The record of a snapshot: how it is written down, and how the snapshot's files are held.

Used by the backends, the blob cache and `dsctl snapshot`. A record is one JSON object, the same in every backend. Its
text is pure ASCII, so a message typed in another encoding, or a folder whose name is not UTF-8, survives every
database. An older version skips fields that a newer one has added. No I/O but reading a manifest; any thread may call
it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

from datacache.core.errors import CatalogError
from datacache.manifest.model import Held, Lineage, SnapshotRecord
from datacache.manifest.reader import LoadBlobs, Manifest

_FIELDS = frozenset(f.name for f in fields(SnapshotRecord))


def encode_record(record: SnapshotRecord) -> str:
    return json.dumps(asdict(record), separators=(",", ":"))


def decode_record(text: str) -> SnapshotRecord:
    """Return the record that `encode_record` wrote. Raise `CatalogError` for anything else."""
    try:
        values = {name: value for name, value in json.loads(text).items() if name in _FIELDS}
        values["warnings"] = tuple(values.get("warnings", ()))
        if values.get("lineage") is not None:
            command, parameters, inputs = values["lineage"]
            values["lineage"] = Lineage(command, parameters, tuple(inputs))
        if values.get("held") is not None:
            values["held"] = Held(*map(int, values["held"]))
        record = SnapshotRecord(**values)
        _check_types(record)
        return record
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise CatalogError(f"the catalog holds a snapshot record that cannot be read: {text[:80]!r}") from exc


def _check_types(record: SnapshotRecord) -> None:
    """Raise `TypeError` for a value of another type than the field has: a record from a bucket may be anybody's, and
    one that was pulled stands in lists beside all others."""
    lineage = record.lineage or Lineage("", {})
    texts = [record.dataset, record.id, record.created_at, record.origin, record.message, lineage.command]
    texts += ["" if record.parent is None else record.parent, *record.warnings, *lineage.inputs]
    numbers = [record.files, record.total_bytes, *(record.held or ())]
    if not (
        all(isinstance(text, str) for text in texts)
        and all(type(number) is int and number >= 0 for number in numbers)
        and isinstance(lineage.parameters, dict)
    ):
        raise TypeError("a value of another type than its field has")


def held_of(record: SnapshotRecord, load: LoadBlobs) -> Held:
    """Return how a snapshot's files are held. For a record of an older version, which does not say it, read the
    manifest, which may raise `CorruptManifestError`."""
    if record.held is not None:
        return record.held
    manifest = Manifest.open(record.id, load)
    sources = manifest.root.sources
    if all(source.content_addressed for source in sources):
        return Held(copied=record.files)
    copied = versioned = 0
    for entry in manifest.entries():
        if not entry.is_marker:
            copied += sources[entry.source].content_addressed
            versioned += not sources[entry.source].content_addressed and bool(entry.version)
    return Held(copied, versioned, record.files - copied - versioned)


def held_in_words(held: Held) -> str:
    """Return how files are held, as people are told: `copied`, or `1,200 copied, 3 not held`."""
    words = {"copied": held.copied, "bucket versions": held.versioned, "not held": held.referenced}
    parts = [(name, count) for name, count in words.items() if count]
    if len(parts) <= 1:
        return parts[0][0] if parts else "copied"
    return ", ".join(f"{count:,} {name}" for name, count in parts)
