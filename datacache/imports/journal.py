"""The journal of an import, so that one that was killed goes on where it was.

A `JobLog` under `{home}/imports/`, one for each input, data set and set of options. `jsonl` adds a record when a copy
is made, `videos.frames` when a stretch of a video is done, and both remove the file after the commit; nobody else reads
it. A record is JSON; of JSON lines:

    ["path", "digest of where it came from", size, mtime_ns, "etag", "version", source, "key", "when"]

Threads may add at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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


class RecordFile:
    """The file of an import's records, locked: a row of JSON a line. Close it. `ImportFailedError` if another process
    is at the same import."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        """`identity` is what must be the same for a later run to go on where this one was."""
        taken = ImportFailedError(
            "another process is at this very import",
            hint="Wait for the other process, or end it and run this again: it goes on where that was.",
        )
        self._log = JobLog(folder, {"format": _FORMAT, **identity}, taken=taken)

    def rows(self) -> Iterator[Any]:
        """Yield the rows of earlier runs, as they were added, and cut off what is not whole. Read them to the end
        before anything is added."""
        for _place, record in self._log.records():
            yield json.loads(record)

    def append(self, row: Any) -> None:
        """Add a row."""
        self._log.add(json.dumps(row, separators=(",", ":")).encode())

    def remove(self) -> None:
        """Remove the journal of a committed import."""
        self._log.remove()

    def close(self) -> None:
        """Give up the lock. What was noted stays."""
        self._log.close()


class Journal(RecordFile):
    """The journal of an import from JSON lines."""

    def done(self) -> Sorter[Done]:
        """Return what earlier runs did, by path; of records of one path the newest is the last. Close it. Call it
        before anything is added."""
        sorter: Sorter[Done] = Sorter(attrgetter("path"))
        for path, origin, size, mtime_ns, etag, version, source, key, at_s in self.rows():
            raw = path.encode()
            at = key.encode("utf-8", "surrogateescape") or None
            sorter.add(Done(raw, origin, Entry(raw, size, mtime_ns, etag, version, source, at), at_s))
        return sorter

    def add(self, origin: str, entry: Entry, at_s: int) -> None:
        """Note that a line was done then, in seconds of the epoch."""
        path, key = entry.path.decode(), (entry.key or b"").decode("utf-8", "surrogateescape")
        self.append([path, origin, *entry[1:5], entry.source, key, at_s])


def origin_of(url: str) -> str:
    """Return a URL as the journal keeps it: nobody can read a signature out of it."""
    return xxh3_128_hexdigest(url.encode("utf-8", "surrogateescape"))
