"""Logs of processes that run for long: bounded in size, and no line again and again.

The process writes to stderr, which whoever started it may have made a file. That file is moved to NAME.1, and another
begun in its place, when it is larger than `MAX_BYTES`: both together are never much more than twice that. Several
processes may write to one file. What is not a file (a terminal, a container's pipe) is left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import time
from pathlib import Path

from datacache.core import lockfile

MAX_BYTES = 8 * 2**20
_SAME_LINES = 20
_SAME_PER_S = 60.0
_LOOK_EVERY_LINES = 50
_KEPT_LINES = 1000


class BoundedStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr. Threads: as `logging.Handler`, which holds its lock around `emit`."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        super().emit(record)
        self._lines += 1
        if self._lines % _LOOK_EVERY_LINES == 0 or record.exc_info:
            with contextlib.suppress(OSError):
                bound(sys.stderr.fileno(), MAX_BYTES)


class Repeated(logging.Filter):
    """Lets a line through twenty times a minute, whatever its arguments; the next one after that says how many were
    left out.

    A line of code that speaks for many names what it speaks of, `extra={"about": …}`: each is counted by itself, so
    that a noisy one hides no other.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int, str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        about = str(getattr(record, "about", ""))
        key, now_s = (record.name, record.lineno, str(record.msg)[:200], about), time.monotonic()
        since_s, count = self._seen.get(key, (now_s, 0))
        left_out = 0
        if now_s - since_s > _SAME_PER_S:
            left_out, since_s, count = max(0, count - _SAME_LINES), now_s, 0
        if len(self._seen) >= _KEPT_LINES and key not in self._seen:
            self._seen.clear()
        self._seen[key] = since_s, count + 1
        if left_out:
            record.msg = f"{record.getMessage()} (and {left_out:,} more like it)"
            record.args = None
        return count < _SAME_LINES


def log_to_stderr(text_format: str) -> None:
    """Have this process's log on stderr, bounded. Called once, at its start."""
    with contextlib.suppress(OSError):  # a file that is removed
        bound(sys.stderr.fileno(), MAX_BYTES)
    handler = BoundedStderr()
    handler.addFilter(Repeated())
    logging.basicConfig(level=logging.INFO, format=text_format, handlers=[handler])


def set_level(name: str) -> None:
    """Have our own packages log from this level on, such as `debug`. Others go on from `info` on."""
    for package in ("datacache", "fuse_mount", "csi_driver"):
        logging.getLogger(package).setLevel(name.upper())


def bound(fd: int, max_bytes: int) -> None:
    """Put a fresh file in the place of `fd`, and of every standard stream that is the same, where it is too large or
    was moved away already.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return
    path = Path(os.readlink(f"/proc/self/fd/{fd}"))
    if path.suffix == ".1" and not path.with_suffix("").exists():
        return
    if path.suffix == ".1":  # another process has moved it
        path = path.with_suffix("")
    elif status.st_size <= max_bytes:
        return
    else:
        lockfile.take(fd)  # of several that notice, one moves it
        try:
            there = os.stat(path)
            if (there.st_dev, there.st_ino) == (status.st_dev, status.st_ino):
                os.replace(path, f"{path}.1")
        finally:
            lockfile.give_back(fd)
    same = [n for n in {1, 2, fd} if os.path.sameopenfile(n, fd)]
    fresh = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        for number in same:
            os.dup2(fresh, number)
    finally:
        os.close(fresh)
