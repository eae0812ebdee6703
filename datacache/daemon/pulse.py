"""The daemon's pulse: a small file with the time when the daemon could last answer, so that readers need not wait to
learn it.

A daemon that is stopped, or whose threads hang, accepts connections and sends nothing. Each reader would have to wait
to notice. Instead the daemon writes the time into `<home>/run/daemon.pulse` a few times a second, only while its
threads make progress, and every process of the node reads it before and while it waits for an answer. So the first to
notice has waited `SILENT_S`, the others not at all, and all see the next beat when the daemon goes on.

The daemon holds a lock on the file: an old beat with a lock is a silent daemon, one without is no daemon. Readers test
the lock and never take it (`F_OFD_GETLK`, fcntl(2)). It ends with the daemon, however that ends, and shows in other PID
namespaces. Times are `CLOCK_MONOTONIC`, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)
_NAME = "daemon.pulse"
SILENT_S = 3.0
"""A daemon is silent after so long without a beat. A busy machine may keep a process from running for a second."""
_LATE_S = 1.0
BEAT_EVERY_S = 0.25
_LOCK_TRIES = 50
_BEAT = struct.Struct("<Q")  # nanoseconds
_LOCK = struct.Struct("hhqqixxxx")  # struct flock of 64-bit Linux
_OFD_GETLK, _OFD_SETLK = 36, 37  # fcntl.h; Python has no names for them before 3.13


class Pulse:
    """The daemon's side. The pulse's thread calls `hangs`, which names what makes no progress, or returns ''."""

    def __init__(self, home: Path, hangs: Callable[[], str]) -> None:
        self._path = home / "run" / _NAME
        self._hangs = hangs
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self.problem = ""
        """The thing that hangs, as `health` shows it. The thread sets it."""

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Stop beating and let go of the file, if `start` was called."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(SILENT_S)

    def _run(self) -> None:
        try:
            fd = self._open()
        except OSError as exc:
            log.warning("no pulse can be shown at %s: %s", self._path, exc.strerror)
            return
        try:
            while not self._stopping.is_set():
                problem = self._hangs()
                if bool(problem) != bool(self.problem):
                    log.warning("%s: readers go past this daemon" if problem else "no thread hangs any more%s", problem)
                self.problem = problem
                if not self.problem:
                    with contextlib.suppress(OSError):  # of a broken disk: readers go past it
                        os.pwrite(fd, _BEAT.pack(time.monotonic_ns()), 0)
                self._stopping.wait(BEAT_EVERY_S)
        finally:
            os.close(fd)

    def _open(self) -> int:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for _ in range(_LOCK_TRIES):
            # Before the lock: with it, the last beat of the daemon before this one would be that of a silent one.
            os.pwrite(fd, _BEAT.pack(time.monotonic_ns()), 0)
            try:
                fcntl.fcntl(fd, _OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
                break
            except OSError:  # that one is ending, perhaps
                time.sleep(0.1)
        return fd


class PulseWatch:
    """A reader's side: the pulse file, held open. Any thread, but not across `fork()`: a thread may hold the lock."""

    def __init__(self, home: Path) -> None:
        self._path = home / "run" / _NAME
        self._lock = threading.Lock()  # guards _fd
        self._fd = -1

    def silent_s(self) -> float | None:
        """Return how long a living daemon has been silent; None if it is not, or if no daemon shows a pulse."""
        age_s = self._living_s()
        return age_s if age_s is not None and age_s >= SILENT_S else None

    def late(self) -> bool:
        """Tell whether the daemon may turn out to be silent soon."""
        age_s = self._living_s()
        return age_s is not None and age_s > _LATE_S

    def beats(self) -> bool:
        """Tell whether a daemon lives and is not silent. False also for one that shows no pulse."""
        age_s = self._living_s(always=True)
        return age_s is not None and age_s < SILENT_S

    def _living_s(self, *, always: bool = False) -> float | None:
        """Return the age of a living daemon's last beat; None if none is known to live. Its lock is tested for an old
        beat only, or `always`."""
        with self._lock:
            age_s = self._age_s()
            if always or age_s is None or age_s >= SILENT_S:
                self._reopen()  # it may be another file by now
                age_s = self._age_s()
                if always or (age_s is not None and age_s >= SILENT_S):
                    # Once more: another daemon may have begun to beat between the two looks.
                    return self._age_s() if self._held() else None
            return age_s

    def _age_s(self) -> float | None:
        with contextlib.suppress(OSError, struct.error):  # where it is not open, too
            beat_ns: int = _BEAT.unpack(os.pread(self._fd, _BEAT.size, 0))[0]
            # A beat of the future is from before a restart of the machine: what it says is not known.
            return max(0.0, (time.monotonic_ns() - beat_ns) / 1e9)
        return None

    def _held(self) -> bool:
        try:
            answer = fcntl.fcntl(self._fd, _OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except (OSError, ValueError):
            return False
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def _reopen(self) -> None:
        with contextlib.suppress(OSError):
            if self._fd >= 0 and os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
                return
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._fd >= 0:
            close(self._fd)  # as the interpreter ends, `os` may be None here
