"""Conflicts: somebody else changed what we changed as well. When that is so, our version's name then, and their list.

The bucket's newer object keeps its name; ours goes on as `NAME.conflict-<UTC time>-<host>` beside it. The suffix is
behind the extension on purpose: `*.pt` does not match a loser. Used by engine and uploader, from any thread.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from datacache.core.disk import replace_file
from datacache.store.bucket import LiveObject
from datacache.writeback.model import Conflict

_log = logging.getLogger("datacache.writeback")
CONFLICT_MARK = ".conflict-"
CONFLICTS = "conflicts.jsonl"
"""The file, in the area's folder."""
KEPT = 300
"""Conflicts that are remembered; of more, the oldest go."""
_TOLD_S = 24 * 3600.0
_SUFFIX = re.compile(rf"(?<=[^/]){re.escape(CONFLICT_MARK)}\d{{8}}T\d{{6}}Z-[A-Za-z0-9.-]+(?=/?\Z)")
_NAME_BYTES = 255  # the longest name that a directory shows
_KEY_BYTES = 1024  # the longest key that S3 has
_READABLE_BYTES = 16  # of a name, at least, or it goes where there is more room
_HOST_BYTES = 63


class Standing(enum.Enum):
    """The relation of an object in the bucket to what is to be written or deleted under its key."""

    FREE = "no object has the key"
    SAME = "it is what is to be written: the answer to an earlier try was lost"
    EXPECTED = "it is the one that we changed"
    EARLIER = "it is an earlier version that we wrote ourselves"
    THEIRS = "somebody else wrote it"


def standing(
    found: LiveObject | None, *, base: str, version: int, size_bytes: int | None, ours: int | None
) -> Standing:
    """Return how an object stands. `base` is the ETag that was expected ('' for none), `version` and `size_bytes` are
    of what is to be written (None: it is to be deleted), `ours` is the version the object was made of where this
    staging area wrote it."""
    if found is None:
        return Standing.FREE
    if ours == version and size_bytes in (None, found.info.size_bytes):  # else it was cut short on the way
        return Standing.SAME
    if base and found.info.etag == base:
        return Standing.EXPECTED
    return Standing.EARLIER if ours is not None and ours <= version else Standing.THEIRS


def is_conflict_copy(key: str) -> bool:
    """Return whether a key's name is that of a conflict's copy."""
    return _SUFFIX.search(key) is not None


def conflict_key(key: str, at: float, host: str, taken: Callable[[str], bool], *, prefix: str = "") -> str:
    """Return the key that our version of `key` goes on under; in the bucket it stands behind `prefix`. `at` in seconds
    since the epoch. The name is shortened where it would be longer than a name or a key can be, and numbered where
    `taken` says that there is one already. A conflict copy's own copy is named as another one of the original. Where
    the folder leaves no room for a name, it goes into the next one above."""
    folder, _, name = _SUFFIX.sub("", key.rstrip("/")).rpartition("/")
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))
    where = re.sub(r"[^A-Za-z0-9.-]+", "-", host)[:_HOST_BYTES] or "unknown"
    number = 1
    while True:
        suffix = f"{CONFLICT_MARK}{when}-{where}" + (f"-{number}" if number > 1 else "") + "/" * key.endswith("/")
        while True:
            above = f"{folder}/" if folder else ""
            room = min(_NAME_BYTES, _KEY_BYTES - len(_bytes(prefix + above))) - len(suffix)
            if not folder or room >= min(_READABLE_BYTES, len(_bytes(name))):
                break
            folder = folder.rpartition("/")[0]
        found = above + _shortened(name, max(0, room)) + suffix
        if not taken(found):
            return found
        number += 1


def _shortened(name: str, size_bytes: int) -> str:
    """Return the first characters of a name, as many as have room."""
    data = _bytes(name)
    if len(data) <= size_bytes:
        return name
    while size_bytes and data[size_bytes] & 0xC0 == 0x80:  # never a part of a character
        size_bytes -= 1
    return data[:size_bytes].decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class ConflictLog:
    """The conflicts of a staging area, kept over restarts in its `conflicts.jsonl`. Any thread.

    A line for each: its number, counted from the first one there ever was, and the conflict; or 0 and the name of a
    copy that somebody has seen to since. It is told to people only, so what cannot be written or read is left out and
    logged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # guards all below, and the file
        self.count = 0
        """All that there have been, as far as the file tells."""
        self._last: deque[Conflict] = deque(maxlen=KEPT)
        lines: list[str] = []
        try:
            lines = path.read_text().splitlines()
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as exc:
            _log.warning("%s cannot be read: %s", path, exc)
        settled: set[str] = set()
        found: list[Conflict] = []
        for line in lines:
            try:
                number, *fields = json.loads(line)
                if number == 0:
                    settled.add(fields[0])
                    continue
                key, kept_as, at, reason = fields
                found.append(Conflict(str(key), str(kept_as), float(at), str(reason)))
                self.count = max(self.count, int(number))
            except (ValueError, TypeError, IndexError):  # cut off by a crash
                continue
        self._last.extend(conflict for conflict in found if conflict.kept_as not in settled)
        if len(lines) > len(self._last):
            self.shorten()

    def unsettled(self) -> list[Conflict]:
        """Return those that nobody has seen to, the oldest first. Where ours was given up nobody can: they are told for
        a day."""
        since = time.time() - _TOLD_S
        with self._lock:
            return [conflict for conflict in self._last if conflict.kept_as or conflict.at > since]

    def append(self, conflict: Conflict) -> None:
        """Write down a conflict."""
        with self._lock:
            self.count += 1
            self._last.append(conflict)
            self._write_locked(_line(self.count, conflict))

    def settle(self, kept_as: str) -> None:
        """Write down that somebody has seen to a conflict: its copy is deleted, or has another name."""
        with self._lock:
            found = [conflict for conflict in self._last if conflict.kept_as == kept_as]
            for conflict in found:
                self._last.remove(conflict)
            if found or self.count > KEPT:  # of those that are not remembered any more the file may tell
                self._write_locked(json.dumps([0, kept_as]).encode())

    def _write_locked(self, line: bytes) -> None:
        try:
            with open(self._path, "ab") as file:
                # A line that was cut off ends here.
                file.write(b"\n" * (file.tell() > 0) + line)
                file.flush()
                os.fdatasync(file.fileno())
        except OSError as exc:
            _log.warning("%s: a conflict cannot be written down: %s", self._path, exc)

    def shorten(self) -> None:
        """Keep what is to be told, and nothing else: an area without any is not kept for its conflicts."""
        kept = self.unsettled()
        first = self.count - len(kept) + 1
        lines = [_line(first + place, conflict) for place, conflict in enumerate(kept)]
        try:
            if lines or self._path.exists():
                replace_file(self._path, b"\n".join(lines))
        except OSError as exc:
            _log.warning("%s cannot be shortened: %s", self._path, exc)


def _line(number: int, conflict: Conflict) -> bytes:
    return json.dumps([number, *conflict]).encode()
