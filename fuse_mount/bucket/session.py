"""Putting a read-write mount in its place, also where a dead one lies whose server was killed.

Used by `bucket_server` and `bucket_launch`. As root the mount point is never free for an instant: whatever was
written there then would land in the folder below and be lost from sight. The new mount is placed beneath the dead one,
which is then taken away (move_mount(2), MOVE_MOUNT_BENEATH, Linux 6.5); where the kernel cannot, on top of it.
Ordinary users have to go through fusermount3, which mounts on no dead mount: there is a gap of some milliseconds, and
what came into it is reported. No state; any thread may call.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import tempfile
from typing import NamedTuple

from datacache.core.errors import MountError
from fuse_mount.kernel import session
from fuse_mount.lifecycle.state import MOUNT_TYPE

_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT = 428, 429  # include/uapi/asm-generic/unistd.h; the same on all architectures
_AT_FDCWD = -100
_OPEN_TREE_CLONE = 1  # <linux/mount.h>
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_BENEATH = 0x4, 0x200

_log = logging.getLogger("fuse_mount")


class Placed(NamedTuple):
    """A mount whose INIT is not answered yet."""

    fd: int
    strays: list[str]
    """What somebody wrote into the folder below while nothing was mounted on it."""


def is_dead(mountpoint: str) -> bool:
    """Whether one of our mounts is there that no process serves."""
    there = session.mount_at(mountpoint)
    if there is None or there.kind != MOUNT_TYPE:
        return False
    try:
        os.statvfs(mountpoint)  # stat(2) is answered from what the kernel remembers
    except OSError as exc:
        return exc.errno in _DEAD
    return False


def place(mountpoint: str, source: str, *, allow_other: bool) -> Placed:
    """Mount, in the place of a dead mount if there is one. Raises `MountError`."""
    if not is_dead(mountpoint):
        session.check_mountpoint(mountpoint)
        return Placed(session.connect(mountpoint, source, allow_other=allow_other, read_only=False), [])
    if os.geteuid() != 0:
        return _through_the_gap(mountpoint, source, allow_other=allow_other)
    fd = _beneath(mountpoint, source, allow_other=allow_other)
    if fd is None:
        return Placed(session.connect(mountpoint, source, allow_other=allow_other, read_only=False), [])
    return Placed(fd, [])


def take_away(mountpoint: str, *, lazy: bool = False) -> None:
    """Unmount, and dead mounts of ours that lie below as well. Raises `MountError` when it is busy."""
    if session.mount_at(mountpoint) is not None and not is_dead(mountpoint):
        session.unmount_now(mountpoint, lazy=lazy)
    while is_dead(mountpoint):
        session.unmount_now(mountpoint, lazy=True)


def _through_the_gap(mountpoint: str, source: str, *, allow_other: bool) -> Placed:
    while is_dead(mountpoint):
        session.unmount_now(mountpoint, lazy=True)
    below = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = session.connect(mountpoint, source, allow_other=allow_other, read_only=False)
        return Placed(fd, sorted(os.listdir(below)))
    finally:
        os.close(below)


def _beneath(mountpoint: str, source: str, *, allow_other: bool) -> int | None:
    """Mount on a folder of our own, and move a clone of that under the dead mount; None where that cannot be done."""
    with tempfile.TemporaryDirectory(prefix="datacache-mount-") as private:
        fd = session.connect(private, source, allow_other=allow_other, read_only=False)
        try:
            _move_beneath(private, mountpoint)
        except OSError as exc:
            _log.info("a mount cannot be placed beneath another one: %s", exc.strerror)
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        finally:
            session.unmount_now(private, lazy=True)
    try:
        session.unmount_now(mountpoint, lazy=True)  # the dead one, which lies on top
    except MountError:
        os.close(fd)
        raise
    return fd


def _move_beneath(source: str, mountpoint: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    tree = libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    if tree < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_BENEATH
        if libc.syscall(_SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(mountpoint), flags) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(tree)
