"""The conflicts of a staging area, kept over restarts in its `conflicts.jsonl`.

A line for each: its number, counted from the first one there ever was, and the conflict; or 0 and the name of a copy
that somebody has seen to since. Used by the engine, whose threads append one at a time. It is told to people only, so
what cannot be written or read is left out and logged.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path

from datacache.core.disk import replace_file
from datacache.writeback.model import Conflict

_log = logging.getLogger("datacache.writeback")
_TOLD_S = 24 * 3600.0
CONFLICTS = "conflicts.jsonl"
"""The file, in the area's folder."""
KEPT = 300
"""Conflicts that are remembered; of more, the oldest go."""


class ConflictLog:
    """One file of conflicts. Any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # guards all below, and the file
        self.count = 0
        """How many there have been, as far as the file tells."""
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
        """Those that nobody has seen to, the oldest first. Where ours was given up nobody can: they are told for a
        day."""
        since = time.time() - _TOLD_S
        with self._lock:
            return [conflict for conflict in self._last if conflict.kept_as or conflict.at > since]

    def append(self, conflict: Conflict) -> None:
        """Write one down."""
        with self._lock:
            self.count += 1
            self._last.append(conflict)
            self._write(_line(self.count, conflict))

    def settle(self, kept_as: str) -> None:
        """Write down that somebody has seen to one: its copy is deleted, or has another name."""
        with self._lock:
            found = [conflict for conflict in self._last if conflict.kept_as == kept_as]
            for conflict in found:
                self._last.remove(conflict)
            if found or self.count > KEPT:  # of those that are not remembered any more the file may tell
                self._write(json.dumps([0, kept_as]).encode())

    def _write(self, line: bytes) -> None:
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
