"""Keeps what was known of the bucket for the next process on a staging area, which may find the store away.

    known.json   what was known some seconds ago: folders that were listed
    known.log    a line for each object that this node has brought there, or deleted, since then

The lines are written right before the journal forgets the uploads, so that what was acknowledged is in the one or in
the other: a name that the next process finds in neither was not there. Nothing is synced. What another boot has
written may be incomplete therefore and is not used, and neither is what is older than two hours; names are errors then
in an outage.

Part of the engine (`WriteBack.memory`). `note` needs the engine's lock and does no I/O; the others do, without it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from datacache.core.boot import boot_id
from datacache.core.disk import replace_file
from datacache.writeback.model import Attributes
from datacache.writeback.remote.known import ChangedWith, Known, RemoteFile, file_of
from datacache.writeback.sections import SectionLock

_OLDEST_S = 2 * 3600.0
_log = logging.getLogger("datacache.writeback")


class RemoteMemory:
    """The two files of one area."""

    def __init__(self, folder: Path) -> None:
        self._known_file, self._log_file = folder / "known.json", folder / "known.log"
        self._writing = threading.Lock()
        self._has_base = False
        """Tells whether there is a `known.json`, or soon will be: without one the lines tell nothing."""
        self._number = 0
        self._since: deque[tuple[int, bytes]] = deque()
        """The lines of the log that `known.json` does not have, with their numbers."""
        self._unwritten: deque[bytes] = deque()
        self._log_lock = threading.Lock()  # guards the two below, and the log; taken before the engine's
        self._fd = -1
        self._is_whole = True

    def recall(self, known: Known) -> None:
        """Put what an earlier process knew into what is known; before anything else is called. What is of no use goes:
        without its lines, and with a new time, it would tell the next process of an earlier bucket."""
        is_recalled = False
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            is_recalled = self._recall(known)
        try:
            if not is_recalled:
                self._known_file.unlink(missing_ok=True)
            replace_file(self._log_file, b"".join(line for _, line in self._since), durable=False)
        except OSError as exc:
            self._give_up(exc)

    def _recall(self, known: Known) -> bool:
        if time.time() - self._known_file.stat().st_mtime > _OLDEST_S:
            return False
        found = json.loads(self._known_file.read_bytes())
        if found["boot"] != boot_id():
            return False
        lines, changes = self._read_lines(found["until"])
        known.recall(found["folders"], changes)
        self._has_base = True
        self._since.extend(lines)
        self._number = max([found["until"], *(number for number, _ in lines)])
        return True

    def note(self, key: str, file: RemoteFile | None, attributes: Attributes | None) -> None:
        """Note that this node has brought an object to the bucket, or deleted it (None)."""
        if not self._has_base:
            return
        self._number += 1
        line = json.dumps([self._number, key, file, attributes], separators=(",", ":")).encode() + b"\n"
        self._since.append((self._number, line))
        self._unwritten.append(line)

    def write_lines(self) -> None:
        """Append what was noted to the log. Any thread."""
        with self._log_lock:
            lines = []
            while self._unwritten:
                lines.append(self._unwritten.popleft())
            if not (lines and self._is_whole):
                return
            data = b"".join(lines)
            try:
                if self._fd < 0:
                    self._fd = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                if os.write(self._fd, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as exc:
                self._give_up(exc)

    def _give_up(self, exc: OSError) -> None:
        """Keep nothing until `remember` has written all of it down."""
        _log.info("what is in the bucket by now was not written down: %s", exc)
        self._is_whole = False
        with suppress(OSError):
            self._known_file.unlink()  # of what is not in it the next process would say that it is not there

    def remember(self, known: Known, lock: SectionLock) -> None:
        """Write down what is known, which `lock` guards. May take long; `OSError` if it cannot be done. Any thread."""
        with self._writing:
            with lock:
                self._has_base = True
                folders, until = known.to_json(), self._number
            if folders is None:
                with suppress(FileNotFoundError):
                    os.utime(self._known_file)  # it still is what is known
                return
            text = json.dumps({"boot": boot_id(), "until": until, "folders": folders})
            replace_file(self._known_file, text.encode(), durable=False)
            with self._log_lock:
                with lock:
                    while self._since and self._since[0][0] <= until:
                        self._since.popleft()
                    self._unwritten.clear()  # they are among these
                    lines = b"".join(line for _, line in self._since)
                try:
                    replace_file(self._log_file, lines, durable=False)
                except OSError as exc:
                    self._give_up(exc)
                    raise
                if self._fd >= 0:
                    os.close(self._fd)
                    self._fd = -1
                self._is_whole = True

    def close(self) -> None:
        """Let go of the log."""
        with self._log_lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _read_lines(self, until: int) -> tuple[list[tuple[int, bytes]], list[ChangedWith]]:
        """Return the lines behind a number, and what they say."""
        lines, changes = [], []
        with suppress(FileNotFoundError):
            for line in self._log_file.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):  # it was cut off, so that the journal has it
                    break
                number, key, file, attributes = json.loads(line)
                if number > until:
                    there = None if file is None else file_of(file)
                    lines.append((number, line))
                    changes.append((key, there, None if attributes is None else Attributes(*attributes)))
        return lines, changes
