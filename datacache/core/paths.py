"""Opening a path below a folder, with a guarantee by the kernel that it does not lead out (openat2(2), Linux 5.6).

Used where a path comes from somebody who is trusted with less than the process may read. Any thread.

Symbolic links of a snapshot: do they stay inside of it? Pure functions, any thread.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
import struct

_SYS_OPENAT2 = 437
"""include/uapi/asm-generic/unistd.h; the same on all architectures."""
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 0x1, 0x2, 0x4, 0x8
"""<linux/openat2.h>"""
_MAX_RACES = 100
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long)


def open_beneath(root: int, path: str | bytes, flags: int, *, resolve: int = 0) -> int:
    """A descriptor of what a relative path below the folder `root` names, however it is linked. `resolve` forbids more.

    EXDEV where `..`, an absolute link or one that climbs leads out of the folder, ELOOP for a link that `resolve`
    forbids, and the errors of open(2). Where the kernel does not know the call no link is followed at all, and
    `RESOLVE_NO_XDEV` is ENOSYS.
    """
    raw = os.fsencode(path)
    if not _is_known() and not resolve & RESOLVE_NO_XDEV:
        return _by_steps(root, raw, flags)
    return _openat2(root, raw, flags, resolve | RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)


@functools.cache
def _is_known() -> bool:
    """Say whether the kernel knows the call, and no sandbox around this process forbids it. Asked once, of `/`: what a
    file answers later is about that file."""
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        os.close(_openat2(root, b".", os.O_PATH, RESOLVE_BENEATH))
    except OSError as exc:
        if exc.errno not in (errno.ENOSYS, errno.EPERM):  # such as too many open files: it says nothing of the call
            raise
        return False
    finally:
        os.close(root)
    return True


def _openat2(root: int, path: bytes, flags: int, resolve: int) -> int:
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve)
    number = errno.EAGAIN
    for _ in range(_MAX_RACES):
        found = int(_syscall(_SYS_OPENAT2, root, path, how, len(how)))
        if found >= 0:
            return found
        number = ctypes.get_errno()
        if number != errno.EAGAIN:  # something was renamed meanwhile
            break
    raise OSError(number, os.strerror(number))


def _by_steps(root: int, path: bytes, flags: int) -> int:
    parts = path.split(b"/")
    if any(part in (b"", b".", b"..") for part in parts):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    *folders, name = parts
    at = os.dup(root)
    try:
        for part in folders:
            above = at
            at = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
            os.close(above)
            if stat.S_ISLNK(os.fstat(at).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)


_PATH_MAX = 4096
"""<linux/limits.h>, with the NUL at the end."""


def stays_inside(path: bytes, target: bytes) -> bool:
    """Tell whether the link at `path` (relative to the snapshot) leads to something below the snapshot's root, whatever
    other links there are.

    It is no longer than the kernel takes, relative, climbs no higher than the root, and does not climb again after it
    has gone down: what it goes down through may be a link itself, whose parent is elsewhere. Links that all are like
    this lead nowhere else together.
    """
    if not 0 < len(target) < _PATH_MAX or target.startswith(b"/") or b"\0" in target:
        return False
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    climbed = 0
    while climbed < len(parts) and parts[climbed] == b"..":
        climbed += 1
    return b".." not in parts[climbed:] and climbed <= path.count(b"/")
