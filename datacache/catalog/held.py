"""Ways to hold snapshots' bytes: in the catalog, in storage of one's own, or where somebody else may overwrite them.

Used by `commit`, which counts, and by `dsctl snapshot list` and `show`. No I/O but reading a manifest.
"""

from __future__ import annotations

from datacache.manifest.model import Held, SnapshotRecord
from datacache.manifest.reader import LoadBlobs, Manifest


def held_of(record: SnapshotRecord, load: LoadBlobs) -> Held:
    """Return how a snapshot's files are held. Where the record, of an older version, does not say it, the manifest is
    read: `CorruptManifestError`.
    """
    if record.held is not None:
        return record.held
    manifest = Manifest.open(record.id, load)
    sources = manifest.root.sources
    if all(source.content_addressed for source in sources):
        return Held(copied=record.files)
    copied = versioned = 0
    for entry in manifest.entries():
        if not entry.path.endswith(b"/"):
            copied += sources[entry.source].content_addressed
            versioned += not sources[entry.source].content_addressed and bool(entry.version)
    return Held(copied, versioned, record.files - copied - versioned)


def in_words(held: Held) -> str:
    """Return what people are told."""
    words = {"copied": held.copied, "bucket versions": held.versioned, "not held": held.referenced}
    parts = [(name, count) for name, count in words.items() if count]
    if len(parts) <= 1:
        return parts[0][0] if parts else "copied"
    return ", ".join(f"{count:,} {name}" for name, count in parts)
