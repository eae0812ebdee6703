"""Who talks on a supervisor's control socket, without any of them being waited for.

Used by `supervisor`, whose loop must go on while somebody connects and says nothing: workers die meanwhile. Answers are
short and fit into a new connection's buffer. No threads.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

from datacache.core.ipc import parse_object
from fuse_mount.lifecycle.control import Request

_MOST = 32
"""Connections that have not said anything whole yet; of more, the oldest goes."""
_MOST_BYTES = 2**16

_log = logging.getLogger("fuse_mount")


class Callers:
    """A listener and those who have connected."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._said: dict[socket.socket, bytes] = {}
        self._closed = False

    def fds(self) -> list[int]:
        """What to wait for, to read."""
        return [self._listener.fileno(), *(connection.fileno() for connection in self._said)]

    def heard(self, readable: list[int]) -> Iterator[tuple[socket.socket, Request]]:
        """Whole requests, each with its connection, which is the caller's from then on. Ends when it is closed."""
        for connection in [connection for connection in self._said if connection.fileno() in readable]:
            request = self._read(connection)
            if request is not None:
                yield connection, request
            if self._closed:
                return
        if self._listener.fileno() in readable:
            self._accept()

    def close(self) -> None:
        """Listen no more, and hang up."""
        self._closed = True
        for connection in (self._listener, *self._said):
            connection.close()
        self._said.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it went away, or there is no descriptor left for it
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._said[connection] = b""
        while len(self._said) > _MOST:
            self._hang_up(next(iter(self._said)), "others came")

    def _read(self, connection: socket.socket) -> Request | None:
        try:
            part = connection.recv(_MOST_BYTES)
        except BlockingIOError:
            return None
        except OSError as exc:
            self._hang_up(connection, str(exc))
            return None
        text = self._said[connection] = self._said[connection] + part
        if not part or len(text) > _MOST_BYTES:
            self._hang_up(connection, "it said nothing whole" if text else "")
            return None
        if not text.endswith(b"\n"):
            return None
        try:
            request = parse_object(text)
        except ValueError:
            self._hang_up(connection, "it talks of something else")
            return None
        del self._said[connection]
        return request

    def _hang_up(self, connection: socket.socket, why: str) -> None:
        del self._said[connection]
        connection.close()
        if why:
            _log.warning("a caller on the control socket is hung up on: %s", why)
