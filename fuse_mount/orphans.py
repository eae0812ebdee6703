"""Mounts whose supervisor was killed: its workers still hold the descriptor, or else the keeper does, and a new
supervisor gets it from them.

Used by `supervisor` when it takes over and nobody answers on the control socket. No threads, no state.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable

from datacache.core.errors import MountError
from datacache.daemon.keeper import is_connected
from fuse_mount import keeping, process
from fuse_mount.session import DEVICE
from fuse_mount.state import FilesOfMount

_SYS_PIDFD_GETFD = 438  # include/uapi/asm-generic/unistd.h; the same on all architectures


def adopt(workers: Iterable[int], files: FilesOfMount, home: str) -> tuple[int, list[int]]:
    """A copy of a mount's descriptor, from a worker or else from the keeper, and the processes that serve the mount.
    Raises `MountError` where nobody has it: the mount is lost.

    A process id may have been given to another program since it was written down, also to another mount's worker, so
    only what was started for this mount and has /dev/fuse open counts.
    """
    serving = {
        pid: fd for pid in workers if process.serves(pid, files.mountpoint) and (fd := _device_of(pid)) is not None
    }
    reason = "none of its workers is left"
    for pid, number in serving.items():
        try:
            return _connected(_copy(pid, number, files.mountpoint)), list(serving)
        except OSError as exc:
            reason = f"worker {pid} cannot hand it over: {exc.strerror}"
    fd = keeping.fetch(home, files.key)
    if fd is not None:
        return fd, list(serving)
    raise MountError(
        f"the mount at {files.mountpoint} is lost: {reason}, and the cache daemon does not keep its descriptor",
        hint="Unmount it and mount it again (dsctl umount --lazy DIR; dsctl mount REF DIR).",
    )


def _connected(fd: int) -> int:
    if not is_connected(fd):
        os.close(fd)
        raise OSError(errno.ENODEV, "it was unmounted")
    return fd


def _device_of(pid: int) -> int | None:
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            if os.readlink(f"{folder}/{name}") == DEVICE:
                return int(name)
    except OSError:
        pass  # gone, or somebody else's
    return None


def _copy(pid: int, number: int, mountpoint: str) -> int:
    """pidfd_getfd(2), Linux 5.6: a duplicate of another process's descriptor, for who may trace it."""
    pidfd = os.pidfd_open(pid)
    try:
        if not process.serves(pid, mountpoint):  # from here on the id stands for this one
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
        libc = ctypes.CDLL(None, use_errno=True)
        fd: int = libc.syscall(_SYS_PIDFD_GETFD, pidfd, number, 0)
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return fd
    finally:
        os.close(pidfd)
