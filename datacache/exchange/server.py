"""Answer frames at listeners: a thread for each connection, which waits for what it was asked for and sends it.

Threads rather than an event loop: a request that waits for a store is a thread asleep, an answer goes out in one call
of the kernel, and nobody is woken up for either. The handler is called in the connection's thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from typing import NamedTuple

from datacache.core.errors import DaemonError, DatacacheError
from datacache.exchange.frames import Buffer, Deadline, Frame, FrameError, FrameSocket, Kind
from datacache.exchange.wire import encode_error

log = logging.getLogger(__name__)
_MOST_CONNECTIONS = 2048
"""Each has a thread. One more ends the one that has been silent for longest; its client connects again."""
_MOST_STRANGERS = 64
"""Connections whose other side has not proved yet who it is. One more ends the oldest of the address that has most of
them: a node needs milliseconds, and a flood from other addresses is its own enemy."""
_INTRODUCTION_S = 5.0
_TAKEN_IN_S = 3.0
"""A reader that takes nothing of its answer, or next to nothing, for so long is hung up on, and asks again: until then
it has of the room that others of its data set wait for."""
_CROWDED_TAKEN_IN_S = 0.25
"""The same while others do wait for room."""
_RETRY_S = 0.2
_STOP_TIMEOUT_S = 1.0


class Answer(NamedTuple):
    """One frame of an answer."""

    kind: Kind
    head: bytes = b""
    body: Buffer = b""


Handler = Callable[[Frame], Generator[Answer, None, None]]
"""Yields the answers to a request, in order; what it needs for one may go when it is asked for the next, or closed.
An error that it raises is sent back as the last answer."""


class FrameServer:
    """See the module. `close` ends it."""

    def __init__(
        self,
        handler: Handler,
        *,
        most_bytes: int,
        name: str = "exchange",
        welcome: Callable[[FrameSocket], object] | None = None,
        crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        """`most_bytes`: of a request's body. `welcome` has a caller prove who it is, or raises; it has five seconds
        in all. `crowded` tells whether requests wait for room that answers on their way have."""
        self._handler, self._most_bytes, self._name, self._welcome = handler, most_bytes, name, welcome
        self._crowded = crowded
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards _strangers and _connections
        self._strangers: dict[FrameSocket, object] = {}  # and from which host
        self._connections: dict[FrameSocket, threading.Thread] = {}
        self._silent: dict[FrameSocket, None] = {}  # wait for a request, the longest first; each changes its own entry
        self._listeners: list[tuple[socket.socket, threading.Thread]] = []

    def listen(self, listener: socket.socket, *, shared: bool = False) -> None:
        """Let callers in from now on. `shared`: another process lets callers in there, too, and goes on after `close`;
        it ends the listener for both."""
        thread = threading.Thread(target=self._accept, args=(listener,), name=f"{self._name}-accept", daemon=True)
        if not shared:
            self._listeners.append((listener, thread))
        thread.start()

    def close(self) -> None:
        """Let nobody in any more and hang up; what is being answered has a moment to end."""
        self._closed.set()
        for listener, thread in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept(2) up, which close(2) would not
            thread.join(_STOP_TIMEOUT_S)
            listener.close()
        with self._lock:
            left = dict(self._connections)
        for frames in left:
            with contextlib.suppress(OSError):
                frames.connection.shutdown(socket.SHUT_RD)  # who waits for a request ends; an answer still goes out
        end = time.monotonic() + _STOP_TIMEOUT_S
        for thread in left.values():
            thread.join(max(0.0, end - time.monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, address = listener.accept()
                self._hear(connection, address[0] if self._welcome is not None else "")
            except (OSError, RuntimeError) as exc:  # no descriptor is free, for one, or no more threads
                shut_down = isinstance(exc, OSError) and exc.errno == errno.EINVAL  # by the other process
                if shut_down or self._closed.wait(_RETRY_S):
                    return
                log.warning("the %s socket: %s", self._name, exc)

    def _hear(self, connection: socket.socket, host: str) -> None:
        frames = FrameSocket(connection, look_every_s=_TAKEN_IN_S, receiving=_go_on, sending=_go_on)
        self._watch(frames)
        thread = threading.Thread(target=self._talk, args=(frames,), name=f"{self._name}-caller", daemon=True)
        with self._lock:
            full = len(self._connections) >= _MOST_CONNECTIONS and not self._end_one_locked(self._silent)
            if not full:
                self._connections[frames] = thread
                if self._welcome is not None:
                    self._add_stranger_locked(frames, host)
        if full:
            log.warning(
                "the %s socket: %d connections are open, one more is refused", self._name, len(self._connections)
            )
            frames.close()
            return
        try:
            thread.start()
        except RuntimeError:
            self._forget(frames)
            raise

    def _add_stranger_locked(self, frames: FrameSocket, host: str) -> None:
        if len(self._strangers) >= _MOST_STRANGERS:
            [(most, _)] = Counter(self._strangers.values()).most_common(1)
            self._end_one_locked({frames: None for frames, other in self._strangers.items() if other == most})
        self._strangers[frames] = host

    def _end_one_locked(self, some: dict[FrameSocket, None]) -> bool:
        """Hang up on the first of some connections; return False if there is none."""
        first = next(iter(list(some)), None)
        if first is not None:
            for known in (self._silent, self._strangers, self._connections):
                known.pop(first, None)
            with contextlib.suppress(OSError):
                first.connection.shutdown(socket.SHUT_RDWR)  # wakes its thread up, which closes it
        return first is not None

    def _talk(self, frames: FrameSocket) -> None:
        try:
            self._meet(frames)
            while not self._closed.is_set():
                self._silent[frames] = None
                request = frames.receive(most_bytes=self._most_bytes)
                self._silent.pop(frames, None)
                self._answer(frames, request)
        except (FrameError, DatacacheError) as exc:
            log.warning("a caller is hung up on: %s", f"{exc}. {exc.hint}".rstrip(". "))
        except OSError as exc:
            log.debug("a caller went away: %s", exc)
        finally:
            self._forget(frames)

    def _meet(self, frames: FrameSocket) -> None:
        if self._welcome is None:
            return
        deadline = Deadline("a caller did not introduce itself in time")
        deadline.give_up_at = time.monotonic() + _INTRODUCTION_S
        frames.wait(_INTRODUCTION_S / 10, deadline.look, deadline.look)
        self._welcome(frames)
        self._watch(frames)
        with self._lock:
            self._strangers.pop(frames, None)

    def _watch(self, frames: FrameSocket) -> None:
        """Wait for requests for as long as it takes, and hang up on who does not take the answers."""
        pace = frames.pace

        def look() -> None:
            stalled_s = pace.stalled_s()
            if stalled_s >= (_CROWDED_TAKEN_IN_S if self._crowded() else _TAKEN_IN_S):
                raise TimeoutError(f"a reader took nothing of its answer for {stalled_s:.1f} s")

        frames.wait(_TAKEN_IN_S, _go_on, look)

    def _answer(self, frames: FrameSocket, request: Frame) -> None:
        with contextlib.closing(self._handler(request)) as answers:
            while True:
                try:
                    answer = next(answers, None)
                except Exception as exc:  # noqa: BLE001 - the caller's answer
                    answer = error_answer(exc)._replace(kind=Kind.REFUSED)
                if answer is None:
                    return
                frames.send(answer.kind, request.number, answer.head, answer.body)
                if answer.kind == Kind.REFUSED:
                    return

    def _forget(self, frames: FrameSocket) -> None:
        with self._lock:
            for known in (self._silent, self._strangers, self._connections):
                known.pop(frames, None)
        frames.close()


def error_answer(exc: Exception) -> Answer:
    """Return the answer that names an error; one that is not a `DatacacheError` is a defect of ours, and logged."""
    if not isinstance(exc, DatacacheError):
        log.error("a request failed", exc_info=exc)
        exc = DaemonError(
            f"the daemon failed: {type(exc).__name__}: {exc}", hint="This is a defect; the daemon's log says where."
        )
    return Answer(Kind.ERROR, body=encode_error(exc))


def _go_on() -> None:
    """Wait for the next request for as long as it takes."""
