"""Unix stream sockets at any path, however long: the address itself holds 107 bytes only (unix(7)), so they are
reached through a descriptor of their folder. No state; any thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


def connect(path: Path, *, timeout_s: float | None = None) -> socket.socket:
    """A connection. `OSError` where nobody listens. `timeout_s` is the socket's from the start; with 0 it waits for
    nothing, and `BlockingIOError` says that too many are waiting to be let in.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with _address(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def listen(path: Path, *, backlog: int) -> socket.socket:
    """Listen at a path that only its owner may use (mode 0600), in the place of whoever did: not for an instant is
    there nobody. The folder must be there. `OSError`.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.unlink(missing_ok=True)
        with _address(beside) as address:
            listener.bind(address)
        beside.chmod(0o600)  # before anybody can connect; no umask, which is all threads'
        listener.listen(backlog)
        beside.replace(path)
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
