"""The keeper: a thread of the daemon that holds descriptors for other processes, so that mounts outlive those.

A mount of FUSE is gone when the last copy of its descriptor is closed. Its supervisor (`fuse_mount`, of which this
layer knows nothing) hands a copy over, with a command that brings a new owner up, and keeps the connection open. When
that ends without a word, and the kernel still serves the descriptor, the command is run: it asks for the descriptor
and is the next owner. What comes without a descriptor is only started again. Of several descriptors the first is the
one whose end is looked for. The others are held because the kernel aborts what was read from a queue when its last copy
is closed, or are memory that goes with the mount.

`note` is for people, and says which thing it is: what comes with another note under the same key is another thing in
the place of the former, whose owners count for nothing any more.

One thread does everything and waits for nobody; `start` and `close` are called by the daemon's main thread. Nothing is
read from a descriptor here, and none is waited for in `poll`: the kernel would wake this thread at each request.

Messages on `<home>/run/keeper.sock` (mode 0600) are JSON lines, each answered by one, `{"ok": …}` or `{"error": …}`:

    {"op": "keep", "key", "argv", "environment", "log", "note", "descriptors": N}    N descriptors come along
    {"op": "release", "key"}     it is over, and nothing is to be run; a connection that ends releases nothing
    {"op": "fetch", "key"}       {"ok": {"note"}} with copies of its descriptors
    {"op": "list"}               {"ok": {key: {"owned": bool, "descriptor": bool, "note"}}}
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datacache.core import breaker as pauses
from datacache.core import ipc
from datacache.core.disk import open_private
from datacache.core.errors import CacheError
from datacache.daemon import paths

_GRACE_S = 0.3
"""From an owner's end to the command: processes of its own may be bringing it back."""
_CALM_S = 10.0
"""An owner that lived this long was no part of a crash loop."""
_MAX_DELAY_S = 30.0
_PATIENCE_S = 15.0
"""From the start of a command, which may have somebody else do it, until there is to be an owner."""
_COMMAND_TIMEOUT_S = 120.0
"""A command that still runs and owns nothing is not waited for any more: the next one is run beside it."""
_AT_A_TIME = 4
_TURN_S = 5.0
"""Time for which a command keeps others waiting for their turn: one that hangs must not keep others from starting."""
_NO_ROOM_PAUSE_S = 0.1
_LOOK_EVERY_S = 5.0
_LOOK_AT_CHILDREN_EVERY_S = 0.1
_MAX_MESSAGE_BYTES = 4 * 2**20
_MAX_DESCRIPTORS = 253  # of one message: SCM_MAX_FD, <net/scm.h>
_GONE_EVENTS = select.POLLERR | select.POLLHUP | select.POLLNVAL

log = logging.getLogger(__name__)


class _Client:
    """A connection, and what it owns."""

    def __init__(self, connection: socket.socket) -> None:
        self.lines = ipc.Lines(connection, most_bytes=_MAX_MESSAGE_BYTES, most_fds=_MAX_DESCRIPTORS)
        self.keys: set[str] = set()
        """The keys of what it owns."""


@dataclass(eq=False, kw_only=True)
class _Kept:
    key: str
    fds: list[int]
    argv: list[str]
    environment: dict[str, str]
    log: str
    note: Any
    owners: set[_Client] = field(default_factory=set)
    """More than one while a mount is handed over."""
    since: float = 0.0
    tries: int = 0
    due: float | None = None
    """When to run the command, if nobody is the owner by then."""
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0

    def is_waited_for(self, now: float) -> bool:
        """Tell whether its command is under way, and others wait for that."""
        return self.process is not None and not self.owners and now - self.started < _TURN_S


def is_connected(fd: int) -> bool:
    """Tell whether the kernel serves a descriptor of /dev/fuse (POLLERR: the mount is gone). Read nothing from it."""
    poll = select.poll()
    poll.register(fd, 0)
    return not any(events & _GONE_EVENTS for _, events in poll.poll(0))


def keeper_answers(home: Path, timeout_s: float) -> bool:
    """Ask the keeper of a home whether it is there: its daemon lives, and may be opening its tiers still."""
    try:
        ipc.ask(paths.keeper_socket_path(home), {"op": "list"}, timeout_s=timeout_s)
    except (OSError, ValueError):
        return False
    return True


class Keeper:
    """The thread and what it keeps."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._kept: dict[str, _Kept] = {}
        self._children: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def start(self) -> None:
        """Listen. Raises `CacheError`. Whoever calls holds the daemon's lock, so a socket that is there is stale."""
        path = paths.keeper_socket_path(self._home)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._listener = ipc.listen(path, backlog=128)
        except OSError as exc:
            raise CacheError(f"the keeper's socket cannot be made: {exc.strerror}") from exc
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread.start()

    def close(self) -> None:
        """End the thread and let go of everything. Owners hand it over again to the next daemon."""
        os.write(self._wake_write, b"x")
        if self._thread.is_alive():
            self._thread.join()
        paths.keeper_socket_path(self._home).unlink(missing_ok=True)
        for kept in self._kept.values():
            if not kept.owners and kept.fds and not _is_gone(kept):
                log.error("nobody serves %s, and its descriptor goes with this daemon: it is lost", _name(kept))
            ipc.close_all(kept.fds)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Client):
                key.data.lines.close()
        self._selector.close()
        if self._listener is not None:
            self._listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._timeout_s()):
                if key.fileobj == self._wake_read:
                    return
                try:
                    if key.data is None:
                        self._accept()
                    else:
                        self._receive(key.data)
                except Exception:  # one client's, never everybody's end
                    log.exception("the keeper failed to answer")
            try:
                self._look()
            except Exception:
                log.exception("the keeper failed to look after what it keeps")

    def _timeout_s(self) -> float | None:
        if not self._kept and not self._children:
            return None
        now = time.monotonic()
        until = [_LOOK_EVERY_S, *(kept.due - now for kept in self._kept.values() if kept.due is not None)]
        if any(kept.process is not None for kept in self._kept.values()):
            until.append(_LOOK_AT_CHILDREN_EVERY_S)
        return max(0.0, min(until))

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it went away
            return
        except OSError as exc:
            log.error("somebody cannot be let in to the keeper: %s", exc)
            time.sleep(_NO_ROOM_PAUSE_S)  # it is asked again at once, and logs each time
            return
        self._selector.register(connection, selectors.EVENT_READ, _Client(connection))

    def _receive(self, client: _Client) -> None:
        lines = client.lines.receive()
        if lines is None:
            self._lose(client)
            return
        for line in lines:
            try:
                answer, fds = self._answer(client, ipc.parse_object(line))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as exc:
                answer, fds = {"error": f"bad request: {exc!r}"}, []
            if not client.lines.send(answer, fds):
                self._lose(client)
                return

    def _answer(self, client: _Client, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        operation = message["op"]
        if operation == "keep":
            return self._keep(client, message), []
        if operation == "release":
            self._release(client, str(message["key"]))
            return {"ok": None}, []
        if operation == "fetch":
            kept = self._kept.get(str(message["key"]))
            if kept is None or _is_gone(kept):
                return {"error": "it is not kept here"}, []
            return {"ok": {"note": kept.note}}, kept.fds
        if operation == "list":
            of_all = {
                key: {"owned": bool(kept.owners), "descriptor": bool(kept.fds), "note": kept.note}
                for key, kept in self._kept.items()
            }
            return {"ok": of_all}, []
        return {"error": f"unknown operation {operation!r}"}, []

    def _keep(self, client: _Client, message: dict[str, Any]) -> dict[str, Any]:
        count = int(message["descriptors"])
        if not 0 <= count <= len(client.lines.fds):
            raise ValueError("descriptors are missing")
        fds, client.lines.fds = client.lines.fds[:count], client.lines.fds[count:]
        try:
            new = _Kept(
                key=str(message["key"]),
                fds=fds,
                argv=[str(word) for word in message["argv"]],
                environment={str(name): str(value) for name, value in message["environment"].items()},
                log=str(message["log"]),
                note=message["note"],
                since=time.monotonic(),
            )
        except BaseException:
            ipc.close_all(fds)
            raise
        if _is_gone(new):
            ipc.close_all(new.fds)
            return {"error": "what the descriptor stands for is gone"}
        old = self._kept.get(new.key)
        if old is not None:
            if old.note == new.note:
                new.owners |= old.owners
                new.tries = old.tries
            ipc.close_all(old.fds)
        else:
            log.info("keeping %s", _name(new))
        new.owners.add(client)
        client.keys.add(new.key)
        self._kept[new.key] = new
        return {"ok": None}

    def _release(self, client: _Client, key: str) -> None:
        client.keys.discard(key)
        kept = self._kept.get(key)
        if kept is not None and kept.owners == {client}:
            self._drop(kept, "is over")
        elif kept is not None:
            kept.owners.discard(client)

    def _lose(self, client: _Client) -> None:
        self._selector.unregister(client.lines.connection)
        client.lines.close()
        now = time.monotonic()
        for kept in [self._kept[key] for key in client.keys if key in self._kept]:
            if kept.owners == {client}:
                kept.tries = 0 if now - kept.since > _CALM_S else kept.tries
                kept.due = now + _pause_s(kept)
            kept.owners.discard(client)

    def _look(self) -> None:
        """Run what is due, drop what is gone, reap what has ended."""
        now = time.monotonic()
        for kept in list(self._kept.values()):
            if kept.owners:
                continue
            if _is_gone(kept):
                self._drop(kept, "is gone")
            elif kept.process is not None and (code := kept.process.poll()) is not None:
                kept.process = None
                if code == 0 and not kept.fds:
                    self._drop(kept, "has nobody who would want it back")
                elif code != 0:
                    log.warning("%s did not come back (%d)", _name(kept), code)
                    kept.due = now + _pause_s(kept)
            elif kept.due is not None and kept.due <= now:
                if kept.process is not None and now - kept.started < _COMMAND_TIMEOUT_S:
                    kept.due = now + _PATIENCE_S
                elif sum(each.is_waited_for(now) for each in self._kept.values()) < _AT_A_TIME:
                    self._bring_back(kept)
                else:  # one command may bring back all that an owner had
                    kept.due = now + _GRACE_S
        self._children = [child for child in self._children if child.poll() is None]

    def _bring_back(self, kept: _Kept) -> None:
        kept.tries += 1
        kept.started = time.monotonic()
        kept.due = kept.started + max(_PATIENCE_S, _pause_s(kept))
        log.warning("the owner of %s is gone: bringing it back (try %d)", _name(kept), kept.tries)
        try:
            with open(kept.log, "ab", opener=open_private) as out:
                kept.process = subprocess.Popen(
                    kept.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    cwd="/",
                    env=kept.environment,
                    start_new_session=True,
                )
        except OSError as exc:
            log.error("%s cannot be brought back: %s", _name(kept), exc)
            return
        self._children.append(kept.process)

    def _drop(self, kept: _Kept, why: str) -> None:
        log.info("%s %s", _name(kept), why)
        ipc.close_all(kept.fds)
        del self._kept[kept.key]


def _pause_s(kept: _Kept) -> float:
    return pauses.pause_s(kept.tries + 1, first_s=_GRACE_S, longest_s=_MAX_DELAY_S)


def _name(kept: _Kept) -> str:
    note = kept.note
    return str(note.get("mountpoint", kept.key)) if isinstance(note, dict) else kept.key


def _is_gone(kept: _Kept) -> bool:
    return bool(kept.fds) and not is_connected(kept.fds[0])
