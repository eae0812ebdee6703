"""Workers whose supervisor was killed: they still hold the mount, and a new supervisor gets the descriptor
from them.

Used by `supervisor` when it takes over and nobody answers on the control socket. No threads, no state.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from datacache.core.errors import MountError
from fuse_mount.session import DEVICE

_SYS_PIDFD_GETFD = 438  # include/uapi/asm-generic/unistd.h; the same on all architectures


def adopt(workers: Iterable[int]) -> tuple[int, list[int]]:
    """A copy of the first descriptor found, and the processes that serve the mount. Raises `MountError`
    without any.

    A process id may have been given to another program since it was written down, so only what has /dev/fuse
    open counts.
    """
    serving = {pid: fd for pid in workers if (fd := _device_of(pid)) is not None}
    reason = "none of its workers is left"
    for pid, number in serving.items():
        try:
            return _copy(pid, number), list(serving)
        except OSError as exc:
            reason = f"worker {pid} cannot hand it over: {exc.strerror}"
    raise MountError(
        f"the mount cannot be taken over: {reason}",
        hint="Unmount it and mount it again (dsctl umount --lazy DIR; dsctl mount REF DIR).",
    )


def _device_of(pid: int) -> int | None:
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            if os.readlink(f"{folder}/{name}") == DEVICE:
                return int(name)
    except OSError:
        pass  # gone, or somebody else's
    return None


def _copy(pid: int, number: int) -> int:
    """pidfd_getfd(2), Linux 5.6: a duplicate of another process's descriptor, for who may trace it."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        fd: int = libc.syscall(_SYS_PIDFD_GETFD, process, number, 0)
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return fd
    finally:
        os.close(process)
