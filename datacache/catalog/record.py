"""How a snapshot's record is written down: one JSON object, the same in every backend.

Used by the backends and by the blob cache. It does no I/O; any thread may call it. The text is pure ASCII, so
a message typed in another encoding or a folder whose name is not UTF-8 survives every database. A field that
a newer version has added is passed over when an older one reads.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields

from datacache.core.errors import CatalogError
from datacache.manifest.model import Held, Lineage, SnapshotRecord

_FIELDS = frozenset(f.name for f in fields(SnapshotRecord))


def encode_record(record: SnapshotRecord) -> str:
    """The record as one line of JSON."""
    return json.dumps(asdict(record), separators=(",", ":"))


def decode_record(text: str) -> SnapshotRecord:
    """The record `encode_record` wrote. `CatalogError` if it is something else."""
    try:
        values = {name: value for name, value in json.loads(text).items() if name in _FIELDS}
        values["warnings"] = tuple(values.get("warnings", ()))
        if values.get("lineage") is not None:
            command, parameters, inputs = values["lineage"]
            values["lineage"] = Lineage(command, parameters, tuple(inputs))
        if values.get("held") is not None:
            values["held"] = Held(*map(int, values["held"]))
        return SnapshotRecord(**values)
    except (ValueError, TypeError, AttributeError) as exc:
        raise CatalogError(f"the catalog holds a snapshot record that cannot be read: {text[:80]!r}") from exc
