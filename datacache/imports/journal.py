"""The journal of an import, so that one that was killed goes on where it was.

A `JobLog` under `{home}/imports/`, one for each file, data set and set of options. `jsonl` adds a record when a copy is
made and removes the file after the commit; nobody else reads it. A record is JSON:

    ["path", "digest of where it came from", size, mtime_ns, "etag", "version", source, "key", "when"]

Threads may add at the same time.
"""

from __future__ import annotations

import json
import time
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_128_hexdigest

from datacache.core.errors import ImportFailedError
from datacache.core.joblog import JobLog
from datacache.manifest.builder import Sorter
from datacache.manifest.model import Entry

_FORMAT = 1


class Done(NamedTuple):
    """A line that is done."""

    path: bytes
    origin: str
    """`origin_of` its line: another URL under the same path is another line."""
    entry: Entry
    at_s: int
    """When, in seconds of the epoch."""


class Journal:
    """The journal of one import, locked. Close it. `ImportFailedError` if another process is at the same import."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        """`identity` is what must be the same for a later run to go on where this one was."""
        taken = ImportFailedError(
            "another process is at this very import",
            hint="Wait for the other process, or end it and run this again: it goes on where that was.",
        )
        self._log = JobLog(folder, {"format": _FORMAT, **identity}, taken=taken)

    def done(self) -> Sorter[Done]:
        """Return what earlier runs did, by path; of records of one path the newest is the last. Close it. Call it
        before anything is added."""
        sorter: Sorter[Done] = Sorter(attrgetter("path"))
        for _place, record in self._log.records():
            sorter.add(_done(record))
        return sorter

    def add(self, origin: str, entry: Entry) -> None:
        """Note that a line is done."""
        path, key = entry.path.decode(), (entry.key or b"").decode("utf-8", "surrogateescape")
        row = [path, origin, *entry[1:5], entry.source, key, int(time.time())]
        self._log.add(json.dumps(row, separators=(",", ":")).encode())

    def remove(self) -> None:
        """Remove the journal of a committed import."""
        self._log.remove()

    def close(self) -> None:
        """Give up the lock. What was noted stays."""
        self._log.close()


def origin_of(url: str) -> str:
    """Return a URL as the journal keeps it: nobody can read a signature out of it."""
    return xxh3_128_hexdigest(url.encode("utf-8", "surrogateescape"))


def _done(record: bytes) -> Done:
    path, origin, size, mtime_ns, etag, version, source, key, at_s = json.loads(record)
    raw = path.encode()
    return Done(
        raw,
        origin,
        Entry(raw, size, mtime_ns, etag, version, source, key.encode("utf-8", "surrogateescape") or None),
        at_s,
    )
