"""Mounting and unmounting: mount(2) as root, `fusermount3` for everybody else; what is mounted where, and who uses it.

It opens /dev/fuse and hands descriptors out, and reads no request but INIT. No state; any thread may call.

A mount whose processes were killed is *dead*, and stays in its place. `place` puts the next one beneath it, so that the
mount point is never free, and takes it away (../CONCURRENCY.md).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import queue
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from datacache.core import ipc
from datacache.core.errors import MountError
from datacache.core.mounts import Mount, mounts
from fuse_mount.kernel import protocol

DEVICE = "/dev/fuse"
_SUBTYPE = "datacache"
MOUNT_TYPE = f"fuse.{_SUBTYPE}"
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4  # <sys/mount.h>
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)
# include/uapi/asm-generic/unistd.h; the same on all architectures
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 428, 429, 430, 431, 432
_AT_FDCWD = -100
_OPEN_TREE_CLONE = 1  # <linux/mount.h>
_FSCONFIG_CMD_CREATE = 6
_FUSECTL = "/sys/fs/fuse/connections"
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_BENEATH = 0x4, 0x200
_INIT_TIMEOUT_MS = 10_000
_NAMED_USERS = 10
_ANSWER_S = 1.0
"""How long a mount may take to say that nobody serves it: the kernel says it at once. One that says nothing is served,
or is about to be: somebody holds its connection."""
_NOBODY_S = 1.0
"""How long a mount may be busy without anybody using it."""

_log = logging.getLogger("fuse_mount")


class User(NamedTuple):
    """A process that keeps a mount busy."""

    pid: int
    command: str


class Placed(NamedTuple):
    """A mount whose INIT is not answered yet."""

    fd: int
    strays: list[str]
    """Names that somebody wrote into the folder below while nothing was mounted on it."""


# --- what is mounted ----------------------------------------------------------------------------------------


def mount_at(mountpoint: str | Path) -> Mount | None:
    """Return the mount on exactly this directory (the one on top), or None."""
    wanted = str(mountpoint)
    return next((mount for mount in reversed(list(mounts())) if mount.mountpoint == wanted), None)


def is_ours_at(mountpoint: str | Path) -> bool:
    """Tell whether one of our mounts is on this directory."""
    there = mount_at(mountpoint)
    return there is not None and there.kind == MOUNT_TYPE


def is_dead(mountpoint: str) -> bool:
    """Tell whether one of our mounts is there that no process serves, or can serve any more. Not for a process that
    holds its connection: the kernel may keep it from ending until the mount answers."""
    if not is_ours_at(mountpoint):
        return False
    found: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def look() -> None:
        try:
            os.statvfs(mountpoint)  # stat(2) is answered from what the kernel remembers
            found.put(False)
        except OSError as exc:
            found.put(exc.errno in _DEAD)

    threading.Thread(target=look, name="is-dead", daemon=True).start()
    try:
        return found.get(timeout=_ANSWER_S)
    except queue.Empty:
        return False


def mounts_by_place() -> dict[str, Mount]:
    """Return all mounts by their mount points, the one on top each, for who looks at many."""
    return {mount.mountpoint: mount for mount in mounts()}


def resolved(mountpoint: str | Path) -> str:
    """Return the mount point as mountinfo spells it. Only its parent is looked at, as the mount may be dead."""
    path = Path(os.path.abspath(mountpoint))
    return str(Path(os.path.realpath(path.parent)) / path.name) if path.name else str(path)


def check_mountpoint(mountpoint: str) -> None:
    """Raise `MountError` unless this is an empty directory with nothing mounted on it."""
    there = mount_at(mountpoint)
    if there is not None:
        what = there.source if there.kind == MOUNT_TYPE else there.kind
        raise MountError(f"{mountpoint} is mounted already ({what})", hint=f"dsctl umount {mountpoint}")
    try:
        names = os.listdir(mountpoint)
    except FileNotFoundError as exc:
        raise MountError(f"the mount point {mountpoint} does not exist", hint=f"mkdir -p {mountpoint}") from exc
    except NotADirectoryError as exc:
        raise MountError(f"the mount point {mountpoint} is not a directory", hint="Mount on a directory.") from exc
    except OSError as exc:
        raise MountError(f"the mount point {mountpoint} cannot be read: {exc.strerror}") from exc
    if names:
        raise MountError(
            f"the mount point {mountpoint} is not empty ({names[0]} …)",
            hint="Mount on an empty directory: what lies there would be hidden.",
        )


def check_device() -> None:
    """Raise `MountError` unless /dev/fuse can be used and, for an ordinary user, `fusermount3` is there."""
    if not os.path.exists(DEVICE):
        raise MountError(
            f"there is no {DEVICE}",
            hint="Load the module (modprobe fuse); in a container, give it the device (--device /dev/fuse).",
        )
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        raise MountError(f"{DEVICE} may not be used by you", hint=f"As root: chmod 666 {DEVICE} (the usual mode).")
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise MountError("fusermount3 is not installed", hint="Install the package fuse3, or mount as root.")


def check_pyfuse3() -> None:
    """Raise `MountError` unless pyfuse3 can be loaded."""
    try:
        import pyfuse3  # noqa: F401
        import trio  # noqa: F401
    except ImportError as exc:
        raise MountError(
            f"DATACACHE_FUSE is pyfuse3, and that cannot be loaded: {exc}",
            hint="Unset DATACACHE_FUSE, or install it with `pip install 'dsctl[rw]'`. It is built on the spot: first "
            "`apt-get install libfuse3-dev pkg-config gcc python3-dev` (or what your system calls them).",
        ) from exc


# --- mounting -----------------------------------------------------------------------------------------------


def mount(mountpoint: str, source: str, *, allow_other: bool, passthrough: bool = False) -> int:
    """Mount and answer INIT; return the connection's descriptor. Raises `MountError`; nothing stays mounted then."""
    fd = connect(mountpoint, source, allow_other=allow_other, read_only=True)
    try:
        answer_init(fd, passthrough=passthrough)
    except BaseException:
        os.close(fd)
        unmount_now(mountpoint, lazy=True)
        raise
    return fd


def connect(mountpoint: str, source: str, *, allow_other: bool, read_only: bool) -> int:
    """Mount, and return the descriptor of the connection, on which the kernel's INIT waits. Raises `MountError`."""
    options = f"default_permissions,max_read={protocol.MAX_READ_BYTES}" + (",allow_other" if allow_other else "")
    if os.geteuid() == 0:
        return _mount_as_root(mountpoint, source, options, read_only=read_only)
    return _mount_through_fusermount(mountpoint, source, options, read_only=read_only)


def _mount_as_root(mountpoint: str, source: str, options: str, *, read_only: bool) -> int:
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    data = f"fd={fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},{options}"
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if read_only else 0)
    places = os.fsencode(source), os.fsencode(mountpoint)
    if libc.mount(*places, MOUNT_TYPE.encode(), ctypes.c_ulong(flags), data.encode()):
        number = ctypes.get_errno()
        os.close(fd)
        hint = ""
        if number == errno.EPERM:
            hint = "A container needs CAP_SYS_ADMIN (and no seccomp or AppArmor profile against mount) for this."
        raise MountError(f"{mountpoint} cannot be mounted: {os.strerror(number)}", hint=hint)
    return fd


def _mount_through_fusermount(mountpoint: str, source: str, options: str, *, read_only: bool) -> int:
    """Have the set-uid helper mount, and send the descriptor through the socket named in _FUSE_COMMFD."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    access = "ro" if read_only else "rw"
    name = source.replace("\\", "\\\\").replace(",", "\\,")
    options = f"{access},nosuid,nodev,fsname={name},subtype={_SUBTYPE},{options}"
    with ours, theirs:
        process = subprocess.Popen(
            ["fusermount3", "-o", options, "--", mountpoint],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"_FUSE_COMMFD": str(theirs.fileno())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        _, fds = ipc.receive_fds(ours, 1, 1)
        _, said = process.communicate()
    if fds:
        return fds[0]
    said = said.strip().removeprefix("fusermount3: ") or f"fusermount3 ended with {process.returncode}"
    hint = ""
    if "user_allow_other" in said:
        hint = "Mount without allow_other, or have root put the line user_allow_other into /etc/fuse.conf."
    elif "mount_max" in said:
        hint = "Unmount others, or have root raise mount_max in /etc/fuse.conf."
    raise MountError(f"{mountpoint} cannot be mounted: {said}", hint=hint)


def answer_init(fd: int, *, writable: bool = False, passthrough: bool = False) -> None:
    """Answer the kernel's first request. Raises `MountError`."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(_INIT_TIMEOUT_MS):
        raise MountError("the kernel did not start the FUSE connection within 10 s")
    request = protocol.decode_init(os.read(fd, protocol.REQUEST_BUFFER_BYTES))
    if request.major != protocol.KERNEL_MAJOR or request.minor < protocol.OLDEST_MINOR:
        raise MountError(
            f"this kernel speaks FUSE {request.major}.{request.minor}; {protocol.KERNEL_MAJOR}."
            f"{protocol.OLDEST_MINOR} (Linux 5.1) or newer is needed"
        )
    os.write(fd, protocol.encode_init(request, writable=writable, passthrough=passthrough))


def place(mountpoint: str, source: str, *, allow_other: bool) -> Placed:
    """Mount to read and write, in the place of a dead mount if there is one. Raises `MountError`."""
    if not is_dead(mountpoint):
        check_mountpoint(mountpoint)
    elif os.geteuid() != 0:
        while is_dead(mountpoint):
            unmount_now(mountpoint, lazy=True)
        below = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = connect(mountpoint, source, allow_other=allow_other, read_only=False)
            return Placed(fd, sorted(os.listdir(below)))
        finally:
            os.close(below)
    elif (beneath := _beneath(mountpoint, source, allow_other=allow_other)) is not None:
        return Placed(beneath, [])
    return Placed(connect(mountpoint, source, allow_other=allow_other, read_only=False), [])


def _beneath(mountpoint: str, source: str, *, allow_other: bool) -> int | None:
    """Mount on a folder of our own, and move a clone of that under the dead mount; None where that cannot be done."""
    with tempfile.TemporaryDirectory(prefix="datacache-mount-") as private:
        fd = connect(private, source, allow_other=allow_other, read_only=False)
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
            unmount_now(private, lazy=True)
    try:
        unmount_now(mountpoint, lazy=True)  # the dead one, which lies on top
    except MountError:
        os.close(fd)
        raise
    return fd


def _syscall(*arguments: int | bytes | None) -> int:
    found = int(ctypes.CDLL(None, use_errno=True).syscall(*arguments))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _move_beneath(source: str, mountpoint: str) -> None:
    tree = _syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    try:
        flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_BENEATH
        _syscall(_SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(mountpoint), flags)
    finally:
        os.close(tree)


def set_readahead(device: int) -> None:
    """Let the kernel ask for large pieces ahead. Measured, 2 GiB file: 128 KiB (its default) 0.4 to 1.3 GB/s, 4 MiB
    2.5. Needs root; a mount without it works, with smaller requests."""
    path = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        path.write_text(str(protocol.MAX_READAHEAD_BYTES // 1024), encoding="ascii")
    except OSError as exc:
        _log.info("the read-ahead stays at the kernel's default (%s: %s)", path, exc.strerror)


def clone(fd: int) -> int | None:
    """Return another descriptor of the connection with a queue of its own; None where that is refused."""
    try:
        new = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.ioctl(new, protocol.DEV_IOC_CLONE, array.array("I", [fd]))
    except OSError:
        os.close(new)
        return None
    return new


def open_backing(connection: int, fd: int) -> int:
    """Have the kernel hold an open file for files that are passed through; return the id that it has in this
    connection, which no other file gets. `OSError` where the kernel cannot (before 6.9, or without
    CONFIG_FUSE_PASSTHROUGH), the process may not (EPERM without CAP_SYS_ADMIN), or the file's file system does not do
    (ELOOP: it lies on another one, as an overlay does)."""
    return int(fcntl.ioctl(connection, protocol.DEV_IOC_BACKING_OPEN, bytearray(protocol.backing_map(fd))))


def close_backing(connection: int, id: int) -> None:
    """Have the kernel let go of a file once no file that is open is passed through to it."""
    fcntl.ioctl(connection, protocol.DEV_IOC_BACKING_CLOSE, array.array("I", [id]))


def resend(fd: int) -> bool:
    """Have all unanswered requests queued again. False where the kernel cannot (before 6.9)."""
    try:
        os.write(fd, protocol.encode_resend())
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            return False
        if exc.errno not in (errno.ENODEV, errno.ENOTCONN, errno.EPERM):
            raise
    return True


def abort(device: int) -> None:
    """Have the kernel end the connection of a mount, whoever holds it, and the mount dead: by the file system of all
    connections (fusectl), which is not always mounted. Without it or its rights nothing happens."""
    name = f"{os.minor(device)}/abort"
    folder = -1
    try:
        if os.geteuid() == 0:
            fusectl = _syscall(_SYS_FSOPEN, b"fusectl", 0)
            try:
                _syscall(_SYS_FSCONFIG, fusectl, _FSCONFIG_CMD_CREATE, None, None, 0)
                folder = _syscall(_SYS_FSMOUNT, fusectl, 0, 0)
            finally:
                os.close(fusectl)
        else:
            folder = os.open(_FUSECTL, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
        try:
            os.write(file, b"1")
        finally:
            os.close(file)
    except OSError as exc:
        _log.info("the connection of a mount cannot be ended: %s", exc.strerror)
    finally:
        if folder >= 0:
            os.close(folder)


# --- unmounting ---------------------------------------------------------------------------------------------


def unmount_now(mountpoint: str, *, lazy: bool = False) -> None:
    """Unmount. Raises `MountError`, naming who uses the mount when it is busy."""
    unmounting = Unmounting(mountpoint, lazy=lazy)
    while not unmounting.step():
        time.sleep(max(unmounting.due - time.monotonic(), 0.0))


def take_away(mountpoint: str, *, lazy: bool = False) -> None:
    """Unmount, and dead mounts of ours that lie below as well. Raises `MountError` when it is busy."""
    if mount_at(mountpoint) is not None and not is_dead(mountpoint):
        unmount_now(mountpoint, lazy=lazy)
    while is_dead(mountpoint):
        unmount_now(mountpoint, lazy=True)


class Unmounting:
    """An unmount that is tried again for a moment where the mount is busy and nobody is seen to use it: a process that
    has just ended, or closed its file, is still being let go of by the kernel."""

    def __init__(self, mountpoint: str, *, lazy: bool = False) -> None:
        self._mountpoint = mountpoint
        self._lazy = lazy
        self._until: float | None = None
        self.due = 0.0
        """When `step` tries again (`time.monotonic`)."""

    def step(self) -> bool:
        """Try if it is time to; whether it is unmounted. Raises `MountError`, naming who uses the mount when it is
        busy. Waits for nothing; all processes are looked through twice at most, at the first try and at the last."""
        now = time.monotonic()
        if now < self.due:
            return False
        if _is_unmounted(self._mountpoint, lazy=self._lazy):
            return True
        self.due = now + _NOBODY_S / 10
        if self._until is not None and now < self._until:
            return False
        users = list(users_of(self._mountpoint))
        if users or self._until is not None:
            raise _busy(self._mountpoint, users)
        self._until = now + _NOBODY_S
        return False


def _is_unmounted(mountpoint: str, *, lazy: bool) -> bool:
    """Try to unmount. False where it is busy; raises `MountError` where it is refused."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if not libc.umount2(os.fsencode(mountpoint), _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)):
            return True
        number = ctypes.get_errno()
        busy, reason = number == errno.EBUSY, os.strerror(number)
    else:
        if shutil.which("fusermount3") is None:
            raise MountError("fusermount3 is not installed", hint="Install the package fuse3, or unmount as root.")
        command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", mountpoint]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return True
        reason = done.stderr.strip().removeprefix("fusermount3: ")
        busy = "busy" in reason.lower()
    if mount_at(mountpoint) is None:  # somebody else was quicker
        return True
    if not busy:
        raise MountError(f"{mountpoint} cannot be unmounted: {reason}")
    return False


def _busy(mountpoint: str, users: list[User]) -> MountError:
    named = ", ".join(f"{user.pid} ({user.command})" for user in users[:_NAMED_USERS])
    more = f" and {len(users) - _NAMED_USERS} more" if len(users) > _NAMED_USERS else ""
    error = MountError(
        f"{mountpoint} is busy: " + (f"used by {named}{more}" if users else "by processes that are not visible here"),
        hint=f"End them and try again, or detach it and let them finish: dsctl umount --lazy {mountpoint}",
    )
    error.errno = errno.EBUSY
    return error


def users_of(mountpoint: str) -> Iterator[User]:
    """Find processes with an open file, a mapping, a working directory, a root or a program on the mount."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and _uses(f"/proc/{entry}", mountpoint):
            yield User(int(entry), _command(entry))


def _uses(process: str, mountpoint: str) -> bool:
    below = mountpoint.rstrip("/") + "/"
    links = [f"{process}/{name}" for name in ("cwd", "root", "exe")]
    with contextlib.suppress(OSError):  # gone, or somebody else's
        links += [f"{process}/fd/{name}" for name in os.listdir(f"{process}/fd")]
    for link in links:
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target == mountpoint or target.startswith(below):
            return True
    try:
        with open(f"{process}/maps", encoding="utf-8", errors="surrogateescape") as file:
            return any(f" {below}" in line for line in file)
    except OSError:
        return False


def _command(pid: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        text = b" ".join(words).decode("utf-8", "replace").strip()
        return text[:80] or Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "ended"
