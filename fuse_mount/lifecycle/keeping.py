"""A mount's line to the keeper in the cache daemon (`datacache.daemon.keeper`), which holds copies of its descriptors.

Used by supervisors, whose loops never wait for it: connecting, sending and hearing are steps that take what there is.
While no daemon runs it is tried again, at least once a second. `fetch`, `kept` and `known` are
the other side: who takes a mount over asks for its descriptor, and waits for the answer. No threads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datacache.core import ipc
from datacache.daemon import paths
from fuse_mount.lifecycle.process import environment
from fuse_mount.lifecycle.state import FilesOfMount

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_REFUSED_PAUSE_S = 10.0
_MOST_DESCRIPTORS = 253  # of one message: SCM_MAX_FD
_RELEASE_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 10.0

_log = logging.getLogger("fuse_mount")


class KeeperLine:
    """The line of one mount. `kept` says whether the keeper has what it was sent last."""

    def __init__(
        self,
        home: str,
        files: FilesOfMount[Any],
        arguments: list[str],
        note: dict[str, Any],
        fds: Sequence[int],
        *,
        is_mine: Callable[[], bool],
    ) -> None:
        """`arguments` (of `python -m fuse_mount`) bring a new owner up. `fds` stay the caller's; the first of them, if
        there is one, is the connection to the kernel. `is_mine` is asked before each connection: a line that was lost
        must not put an earlier mount into the place of the one that has its mount point now."""
        self._home = Path(home)
        self._key = files.key
        self._fds = list(fds)[:_MOST_DESCRIPTORS]
        self._is_mine = is_mine
        self._hello = {
            "op": "keep",
            "key": files.key,
            "argv": [sys.executable, "-m", "fuse_mount", *arguments],
            "environment": environment({}),
            "log": str(files.log),
            "note": note,
        }
        self._connection: socket.socket | None = None
        self._unsent = b""
        self._heard = b""
        self._pause_s = _FIRST_PAUSE_S
        self._due = time.monotonic()
        self._closed = False
        self.kept = False

    def want(self, reading: set[int], writing: set[int], times: list[float]) -> None:
        """Add what a loop is to wait for: descriptors to read and to write, and times (`time.monotonic`)."""
        if self._connection is not None:
            reading.add(self._connection.fileno())
            if self._unsent:
                writing.add(self._connection.fileno())
        elif not self._closed:
            times.append(self._due)

    def step(self) -> None:
        """Do what can be done without waiting."""
        if self._closed:
            return
        try:
            if self._connection is None:
                if time.monotonic() < self._due:
                    return
                if self._is_mine():
                    self._connect()
                else:
                    self.close()
                return
            if self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
            self._hear(self._connection.recv(65536))
        except BlockingIOError:
            if self._connection is None:  # too many are waiting to be let in
                self._lost(self._pause_s)
        except (OSError, ValueError):
            if self.kept:
                _log.warning("the cache daemon is gone: nobody else keeps the descriptors until the next one runs")
            self._lost(self._pause_s)

    def hand_over(self, fds: Sequence[int]) -> None:
        """Have other descriptors kept from now on. The keeper lets go of those before when it has these."""
        self._fds = list(fds)[:_MOST_DESCRIPTORS]
        if not self._closed:
            self._lost(0.0)

    def release(self) -> None:
        """Say that the mount is over, so that nobody brings it back, and close."""
        connection, self._connection = self._connection, None
        self.close()
        if connection is None:
            return
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(_RELEASE_TIMEOUT_S)
            if not self._unsent:
                connection.sendall(json.dumps({"op": "release", "key": self._key}).encode() + b"\n")
                connection.recv(1)  # it was read

    def close(self) -> None:
        """End the line. The keeper brings the mount back unless somebody else has told it that he owns it."""
        self._closed, self.kept = True, False
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> None:
        self._heard, self._unsent = b"", json.dumps(self._hello | {"descriptors": len(self._fds)}).encode() + b"\n"
        connection = ipc.connect(paths.keeper_socket_path(self._home), timeout_s=0.0)
        try:
            sent = socket.send_fds(connection, [self._unsent], self._fds)
        except OSError:
            connection.close()
            raise
        self._connection, self._unsent = connection, self._unsent[sent:]

    def _hear(self, part: bytes) -> None:
        if not part:
            raise ConnectionError("the daemon has ended")
        self._heard += part
        if not self._heard.endswith(b"\n"):
            return
        answer, self._heard = json.loads(self._heard), b""
        if "ok" in answer:
            self.kept, self._pause_s = True, _FIRST_PAUSE_S
            return
        _log.warning("the keeper refuses this mount: %s", answer.get("error"))
        self._lost(_REFUSED_PAUSE_S)

    def _lost(self, pause_s: float) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self.kept = False
        self._due = time.monotonic() + pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def fetch(home: str | Path, key: str, *, most: int = 1) -> tuple[dict[str, Any], list[int]]:
    """Return the note of a mount and copies of the first descriptors that the keeper holds for it; nothing where it
    holds none, or no daemon answers."""
    try:
        answer, fds = _ask(home, {"op": "fetch", "key": key}, most_fds=most)
        return answer["ok"]["note"], fds
    except (OSError, ValueError, KeyError):
        return {}, []


def kept(home: str | Path) -> set[str]:
    """Return the keys of mounts whose descriptor the keeper holds; none without a daemon. `TimeoutError` as `known`."""
    return {key for key, facts in known(home).items() if facts["descriptor"]}


def known(home: str | Path) -> dict[str, dict[str, Any]]:
    """Return all that the keeper looks after, by key; nothing without a daemon. `TimeoutError` where there is one that
    does not answer."""
    try:
        answer, _ = _ask(home, {"op": "list"}, most_fds=0)
    except TimeoutError:
        raise
    except (OSError, ValueError):
        return {}
    found: dict[str, dict[str, Any]] = answer.get("ok", {})
    return found


def _ask(home: str | Path, request: ipc.Message, *, most_fds: int) -> tuple[ipc.Message, list[int]]:
    return ipc.ask(paths.keeper_socket_path(Path(home)), request, timeout_s=_ANSWER_TIMEOUT_S, most_fds=most_fds)
