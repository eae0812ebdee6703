"""Bind mounts by descriptors: cloning a folder of a mount, attaching it, taking away what is mounted somewhere.

Used by `node`, `mounts` and `mender`. The kernel's newer interface (open_tree(2), mount_setattr(2), move_mount(2);
Linux 5.12): a bind is complete, with its flags, before anybody can see it, and no path into a volume is ever followed
by name. Needs root. `open_folder` and `make_folder` ask the mounted file system and may wait for it; nothing else here
does. No state; any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct

from csi_driver.status import invalid
from datacache.core.errors import MountError
from datacache.core.paths import RESOLVE_NO_SYMLINKS, RESOLVE_NO_XDEV, open_beneath
from fuse_mount import Mount, mounts

_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
"""include/uapi/asm-generic/unistd.h; the same on all architectures."""
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE = 1  # <linux/mount.h>, as all that follows
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_NOEXEC = 0x1, 0x2, 0x4, 0x8
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_MAX_STACK = 1000


# --- what is mounted ------------------------------------------------------------------------------------------------


def top_at(path: str) -> Mount | None:
    """Return the topmost mount on exactly this path, or None."""
    return tops().get(path)


def tops() -> dict[str, Mount]:
    """Return the topmost mounts by path."""
    stacks: dict[str, list[Mount]] = {}
    for mount in mounts():
        stacks.setdefault(mount.mountpoint, []).append(mount)
    found = {}
    for path, stack in stacks.items():
        below = {mount.parent for mount in stack}
        found[path] = next((mount for mount in stack if mount.id not in below), stack[-1])
    return found


# --- making ----------------------------------------------------------------------------------------------------------


def open_root(path: str) -> int:
    """Return a descriptor of the folder at a path, with what is mounted on it. Asks no file system."""
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)


def open_folder(root: int, subpath: str) -> int:
    """Return a descriptor of a folder below `root`, reached without `..`, symbolic links or other mounts.
    `INVALID_ARGUMENT` where there is none."""
    if not subpath:
        return os.dup(root)
    try:
        resolve = RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV
        return open_beneath(root, subpath, os.O_PATH | os.O_DIRECTORY, resolve=resolve)
    except FileNotFoundError as exc:
        raise invalid(f"there is no folder {subpath!r} in the volume") from exc
    except NotADirectoryError as exc:
        raise invalid(f"{subpath!r} is no folder of the volume") from exc
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.EXDEV):
            raise invalid(f"{subpath!r} leads through a symbolic link or out of the volume") from exc
        raise


def make_folder(root: int, subpath: str, *, uid: int, gid: int, umask: int) -> int:
    """Return a descriptor as `open_folder` does, and make missing folders of the path for this owner."""
    # Where a group is to write together, what its members make is the group's.
    mode = 0o777 & ~umask | (0 if umask & stat.S_IWGRP else stat.S_ISGID)
    found = os.dup(root)
    try:
        for name in subpath.split("/"):
            try:
                os.mkdir(name, mode & 0o777, dir_fd=found)
                made = True
            except FileExistsError:
                made = False
            inner = open_folder(found, name)
            os.close(found)
            found = inner
            if made:
                with contextlib.suppress(PermissionError):
                    os.chown(f"/proc/self/fd/{found}", uid, gid)
                    os.chmod(f"/proc/self/fd/{found}", mode)
    except BaseException:
        os.close(found)
        raise
    return found


def bind(folder: int, target: str, *, read_only: bool, noexec: bool = False) -> None:
    """Show an open folder at `target`, on top of anything mounted there. `MountError`."""
    try:
        tree = _call(_SYS_OPEN_TREE, folder, b"", _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH)
        try:
            flags = _ATTR_NOSUID | _ATTR_NODEV | (_ATTR_RDONLY if read_only else 0) | (_ATTR_NOEXEC if noexec else 0)
            attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
            _call(_SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, len(attributes))
            _call(_SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
        finally:
            os.close(tree)
    except OSError as exc:
        hint = "Bind mounts need root and Linux 5.12." if exc.errno in (errno.ENOSYS, errno.EPERM) else ""
        raise MountError(f"{target} cannot be mounted: {exc.strerror}", hint=hint) from exc


# --- places ----------------------------------------------------------------------------------------------------------


def make_place(path: str) -> None:
    """Make an empty folder to mount on. Remove an empty file in its way."""
    try:
        os.makedirs(path, mode=0o750)
    except FileExistsError:
        if top_at(path) is not None:
            return
        kind = os.lstat(path)
        if stat.S_ISDIR(kind.st_mode):
            return
        if not stat.S_ISREG(kind.st_mode) or kind.st_size:
            raise MountError(f"what lies at {path} is no folder", hint="Move it away.") from None
        os.unlink(path)
        os.mkdir(path, 0o750)


def clear(path: str) -> None:
    """Unmount everything at a path, dead mounts included. A busy mount is detached: its open files stay open."""
    libc = ctypes.CDLL(None, use_errno=True)
    for _ in range(_MAX_STACK):
        if top_at(path) is None:
            return
        for flags in (_UMOUNT_NOFOLLOW, _UMOUNT_NOFOLLOW | _MNT_DETACH):
            if not libc.umount2(os.fsencode(path), flags):
                break
            number = ctypes.get_errno()
            if number in (errno.EINVAL, errno.ENOENT):  # somebody else was quicker
                break
            if number != errno.EBUSY:
                raise MountError(f"{path} cannot be unmounted: {os.strerror(number)}")
    raise MountError(f"{path} cannot be unmounted: something is mounted there again and again")


def remove_place(path: str) -> None:
    """Remove the folder of a mount point. `MountError` if something is in it."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        if os.lstat(path).st_size and not os.path.islink(path):
            raise MountError(f"what lies at {path} is no folder", hint="Move it away.") from None
        os.unlink(path)
    except OSError as exc:
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        names = ", ".join(sorted(os.listdir(path))[:3])
        raise MountError(
            f"{path} has something in it while nothing is mounted there ({names})",
            hint="It was written while the volume was away. Move it to where it belongs.",
        ) from exc


# --- system calls ----------------------------------------------------------------------------------------------------


def _call(number: int, *arguments: int | bytes) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    found = int(libc.syscall(ctypes.c_long(number), *converted))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
