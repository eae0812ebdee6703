"""Unix stream sockets at any path, however long: the address itself holds 107 bytes only (unix(7)), so they are
reached through a descriptor of their folder. No state; any thread.

Messages of other processes: JSON objects, of which whoever opens a socket can send any.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FULL_PAUSE_S = 0.01


def connect(path: Path, *, timeout_s: float | None = None) -> socket.socket:
    """A connection. `OSError` where nobody listens. `timeout_s` is the socket's from the start. While too many are
    waiting to be let in it waits as well, and then raises `TimeoutError`; with 0 it waits for nothing and raises
    `BlockingIOError`.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        deadline = time.monotonic() + (timeout_s or 0.0)
        with _address(path) as address:
            while True:
                try:
                    connection.connect(address)
                    return connection
                except BlockingIOError as exc:  # at once, whatever the timeout
                    if not timeout_s:
                        raise
                    if time.monotonic() >= deadline:
                        raise TimeoutError(errno.ETIMEDOUT, f"nobody was let in for {timeout_s:g} s") from exc
                time.sleep(_FULL_PAUSE_S)
    except OSError:
        connection.close()
        raise


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
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    return listener


class Lines:
    """The lines that come over a connection, and the descriptors beside them, for a loop that waits for nobody."""

    def __init__(self, connection: socket.socket, *, most_bytes: int, most_fds: int) -> None:
        """`most_bytes`: of a line that has no end yet; `most_fds`: of one message."""
        self.connection = connection
        self.fds: list[int] = []
        """Descriptors that came and that nobody has taken. `close` closes them."""
        self._most_bytes = most_bytes
        self._most_fds = most_fds
        self._text = b""
        connection.setblocking(False)

    def receive(self) -> list[bytes] | None:
        """Read what there is and return the lines that it completes; None where the other side has ended, or says too
        much. Close it then.
        """
        try:
            part, fds, _, _ = socket.recv_fds(self.connection, 65536, self._most_fds, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError:
            part, fds = b"", []
        self._text += part
        self.fds += fds
        if not part or len(self._text) > self._most_bytes:
            return None
        *lines, self._text = self._text.split(b"\n")
        return lines

    def close(self) -> None:
        """Hang up."""
        self.connection.close()
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = []


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; `ValueError` for anything else, such as brackets that are nested a million deep, or a field
    that is there twice: who wrote it and who reads it may not mean the same one."""
    try:
        found = json.loads(text, object_pairs_hook=_object)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    if not isinstance(found, dict):
        raise ValueError("a message must be an object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is there twice")
    return found
