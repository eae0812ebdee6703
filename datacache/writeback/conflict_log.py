"""The conflicts of a staging area, kept over restarts in its `conflicts.jsonl`.

A line for each: its number, counted from the first one there ever was, and the conflict. Used by the engine, whose
threads append one at a time. It is told to people only, so what cannot be written or read is left out and logged.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

from datacache.writeback.model import Conflict

_log = logging.getLogger("datacache.writeback")
KEPT = 300
"""Conflicts that are read again; older lines are dropped at the next start."""


class ConflictLog:
    """One file of conflicts. `count` and `last` say what it had when it was opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.count = 0
        self.last: list[Conflict] = []
        lines: list[str] = []
        try:
            lines = path.read_text().splitlines()
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as exc:
            _log.warning("%s cannot be read: %s", path, exc)
        for line in lines[-KEPT:]:
            try:
                number, *fields = json.loads(line)
                key, kept_as, at, reason = fields
                self.last.append(Conflict(str(key), str(kept_as), float(at), str(reason)))
                self.count = max(self.count, int(number))
            except (ValueError, TypeError):  # cut off by a crash
                continue
        if len(lines) > KEPT:
            self._shorten()

    def append(self, number: int, conflict: Conflict) -> None:
        """Write one down."""
        try:
            with self._lock, open(self._path, "ab") as file:
                # A line that was cut off ends here.
                file.write(b"\n" * (file.tell() > 0) + _line(number, conflict))
                file.flush()
                os.fdatasync(file.fileno())
        except OSError as exc:
            _log.warning("%s: a conflict cannot be written down: %s", self._path, exc)

    def _shorten(self) -> None:
        first = self.count - len(self.last) + 1
        lines = [_line(first + place, conflict) for place, conflict in enumerate(self.last)]
        beside = self._path.with_suffix(".new")
        try:
            beside.write_bytes(b"\n".join(lines))
            os.replace(beside, self._path)
        except OSError as exc:
            _log.warning("%s cannot be shortened: %s", self._path, exc)


def _line(number: int, conflict: Conflict) -> bytes:
    return json.dumps([number, *conflict]).encode()
