"""Locks on files and folders that end with the process that has them (flock(2)).

A lock belongs to an open file. It ends when the last descriptor of that is closed, so a process that is killed leaves
none behind, and every container that shares the file sees it. A child of `fork()` shares the open file, so the lock
stays while the child lives, unless the parent has it by an `OwnDescriptor`. Any thread may call.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path


def take(fd: int, *, wait: bool = True, shared: bool = False) -> bool:
    """Lock an open file or folder. Return False where another process has it and `wait` is false. `OSError` where the
    file system has no locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def give_back(fd: int) -> None:
    """Unlock a file that stays open."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def open_locked(path: str | Path, flags: int = os.O_RDWR | os.O_CREAT, *, wait: bool = False) -> int | None:
    """Open a file and lock it. Return its descriptor, or None where another process has it and `wait` is false.

    The file has its name once it is locked: one that its former owner has removed meanwhile is opened again. `OSError`
    as of open(2).
    """
    while True:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        locked = named = False
        try:
            locked = take(fd, wait=wait)
            with contextlib.suppress(FileNotFoundError):
                named = os.path.samestat(os.fstat(fd), os.stat(path))
            if locked and named:
                return fd
        finally:
            if not (locked and named):
                os.close(fd)
        if not locked:
            return None


@contextlib.contextmanager
def held(path: str | Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file, which is made where it is missing. Give False where `wait` is false and another process
    has it."""
    fd = open_locked(path, wait=wait)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


class OwnDescriptor:
    """A descriptor that children of `fork()` close: a lock on it ends with this process, whoever outlives it."""

    def __init__(self, open_file: Callable[[], int]) -> None:
        """`open_file` returns the descriptor; no other thread forks meanwhile."""
        with _forking:
            self.fd = open_file()
            """-1 once it is closed, and in a child."""
            _own.add(self)

    def close(self) -> None:
        """Close it. Idempotent."""
        with _forking:
            fd, self.fd = self.fd, -1
            _own.discard(self)
            if fd >= 0:
                os.close(fd)


_own: set[OwnDescriptor] = set()
"""The open ones of this process."""
_forking = threading.RLock()  # guards _own: no child may inherit a descriptor that is not in it


def _close_inherited() -> None:
    for descriptor in list(_own):
        with contextlib.suppress(OSError):
            descriptor.close()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_inherited)
