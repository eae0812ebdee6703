"""The two descriptors that a read-write mount outlives its server by, and who can be asked for them.

Used by server and supervisor (../CONCURRENCY.md). One is the connection to the kernel: the mount is there as long as
anybody holds it. The other is memory in which each server writes what the kernel was told
(`datacache.writeback.state_log`), so that the next one can go on. Any thread may call.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any, NamedTuple

from datacache.core import ipc, lockfile
from datacache.core.errors import MountError
from datacache.daemon.keeper import is_connected
from fuse_mount.lifecycle import keeping
from fuse_mount.lifecycle.state import BucketFiles

_ANSWER_TIMEOUT_S = 5.0
_FORMER_S = 10.0
_LOOK_EVERY_S = 0.02
COUNT = 2
REFUSED = 3
"""The exit code of a server that cannot go on from the memory it was given."""


class HeldMount(NamedTuple):
    """Copies of both. The owner closes them."""

    connection: int
    memory: int
    device: int
    """st_dev of the mount."""

    @property
    def fds(self) -> list[int]:
        """Return the descriptors in the order in which they are sent."""
        return [self.connection, self.memory]

    @property
    def note(self) -> dict[str, Any]:
        """Return what is sent beside them."""
        return {"device": self.device}

    def is_connected(self) -> bool:
        """Tell whether the kernel has the mount still."""
        return is_connected(self.connection)

    def close(self) -> None:
        """Let go of them."""
        ipc.close_all(self.fds)

    def to_argument(self) -> str:
        """Return the command line's words for a process that inherits them."""
        return f"{self.connection},{self.memory},{self.device}"

    @classmethod
    def from_argument(cls, text: str) -> HeldMount:
        """Return what this process has inherited; those that it starts do not."""
        connection, memory, device = map(int, text.split(","))
        held = cls(connection, memory, device)
        for fd in held.fds:
            os.set_inheritable(fd, False)
        return held


def lock(memory: int) -> int:
    """Be the one process that uses the memory, as long as it keeps the descriptor that is returned. A former server may
    be just dying, and is waited for. Raises `MountError` where one lives on: its supervisor was killed before it
    served."""
    fd = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_CLOEXEC)  # copies of a descriptor have one lock
    deadline = time.monotonic() + _FORMER_S
    while not lockfile.take(fd, wait=False):
        if time.monotonic() > deadline:
            os.close(fd)
            raise MountError("another server goes on with this mount")
        time.sleep(_LOOK_EVERY_S)
    return fd


def received(note: dict[str, Any], fds: list[int]) -> HeldMount | None:
    """Return what came with a message, unless something is missing or the mount is gone. All else is closed."""
    if len(fds) == COUNT and "device" in note and is_connected(fds[0]):
        connection, memory = fds
        return HeldMount(connection, memory, int(note["device"]))
    ipc.close_all(fds)
    return None


def hand_over(held: HeldMount, supervisor: int) -> None:
    """Send copies to the supervisor at the other end of a socket, and wait until it has them. `OSError`,
    `ValueError`."""
    with socket.socket(fileno=os.dup(supervisor)) as line:
        ipc.send(line, {"held": held.note}, held.fds)
        ipc.receive(line)


def fetch(files: BucketFiles) -> HeldMount | None:
    """Return copies from the server of a mount, or else from the keeper; None where neither has any."""
    with contextlib.suppress(OSError, ValueError), files.connect() as connection:
        ipc.send(connection, {"op": "held"})
        answer, fds = ipc.receive(connection, timeout_s=_ANSWER_TIMEOUT_S, most_fds=COUNT)
        held = received(answer.get("held", {}), fds)
        if held is not None:
            return held
    return received(*keeping.fetch(files.folder.parent, files.key, most=COUNT))
