"""Mounts whose supervisor was killed: its workers still hold the descriptor, or else the keeper does, and a new
supervisor gets it from them.

Used by `mounting` when it takes over and nobody answers on the control socket. No threads, no state.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from datacache.core import ipc as unix_sockets
from datacache.core.errors import MountError
from datacache.daemon.keeper import is_connected
from fuse_mount.lifecycle import keeping
from fuse_mount.lifecycle.control import receive, reply
from fuse_mount.lifecycle.pool import worker_socket
from fuse_mount.lifecycle.state import FilesOfMount, MountInfo

_TIMEOUT_S = 5.0


def adopt(info: MountInfo, files: FilesOfMount, home: str | Path) -> int:
    """Get a copy of a mount's descriptor, from a worker or else from the keeper. Raises `MountError` where nobody has
    it: the mount is lost.

    A worker is asked for this very mount, by mount point and device: it knows what it serves, whatever an older state
    says of it.
    """
    for pid in info.workers:
        try:
            with _asked(info, home, pid, "descriptor") as connection:
                _, fds = receive(connection, timeout_s=_TIMEOUT_S, most_fds=1)
        except (OSError, ValueError):
            continue
        for fd in fds:
            if is_connected(fd):
                return fd
            os.close(fd)  # it was unmounted
    fd_kept = keeping.fetch(home, files.key)
    if fd_kept is not None:
        return fd_kept
    raise MountError(
        f"the mount at {files.mountpoint} is lost: none of its workers is left, and the cache daemon does not keep its "
        "descriptor",
        hint="Unmount it and mount it again (dsctl umount --lazy DIR; dsctl mount REF DIR).",
    )


def stop(info: MountInfo, home: str | Path) -> None:
    """Tell what is left of a former supervisor's workers to answer what they had read and to let go of a mount."""
    for pid in info.workers:
        try:
            with _asked(info, home, pid, "stop") as connection:
                receive(connection, timeout_s=_TIMEOUT_S)
        except (OSError, ValueError):  # it died just now
            continue


def _asked(info: MountInfo, home: str | Path, pid: int, operation: str) -> socket.socket:
    connection = unix_sockets.connect(worker_socket(home, info.pool, pid), timeout_s=_TIMEOUT_S)
    try:
        reply(connection, {"op": operation, "mountpoint": str(info.mountpoint), "device": info.device})
    except OSError:
        connection.close()
        raise
    return connection
