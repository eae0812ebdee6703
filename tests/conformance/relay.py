"""A relay in front of a TCP server, on the way to which the network misbehaves on demand.

For tests and benchmarks of whatever speaks TCP; for faults of HTTP there is `FaultProxy`. Bytes go through pipes inside
the kernel (splice(2)), so what passes costs little. Each connection has a thread for each direction; `close` ends them.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

_PIPE_BYTES = 2**20
_CONNECT_S = 5.0
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class Trouble(NamedTuple):
    """Say what a relay does with a piece, of 1 MiB at most, of what goes over a connection in either direction."""

    late_s: float = 0.0
    """Deliver it so much later, and all behind it: a packet was lost, and is sent again."""
    reset: bool = False
    """Drop it, and tell both sides that the connection is gone (RST)."""
    lost: bool = False
    """Drop it and all that comes behind it, and tell nobody."""


NO_TROUBLE = Trouble()


class Relay:
    """Passes connections on from a listener to `target`; open from the beginning. Any thread may call."""

    def __init__(
        self,
        listen: Callable[[], socket.socket],
        target: tuple[str, int],
        *,
        trouble: Callable[[], Trouble] = lambda: NO_TROUBLE,
    ) -> None:
        """`listen` makes the listener, again each time that it is opened. `trouble` is asked about each piece."""
        self._listen, self._target, self._trouble = listen, target, trouble
        self._listener: socket.socket | None = None
        self._passes = threading.Event()
        self._passes.set()
        self._lock = threading.Lock()  # guards the two below
        self._connections: set[_Relayed] = set()
        self._threads: set[threading.Thread] = set()
        self.open()

    def open(self) -> None:
        """Let connections through."""
        if self._listener is None:
            self._listener = self._listen()
            self._start(self._accept, self._listener)

    def shut(self) -> None:
        """Refuse connections, and cut those that are open."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(2) up
            self._listener.close()
            self._listener = None
        with self._lock:
            for connection in self._connections:
                connection.cut()

    def hold(self) -> None:
        """Pass nothing on from now on, and tell nobody: the network is parted."""
        self._passes.clear()

    def let_go(self) -> None:
        """Pass on what was held, and what comes: as TCP does when the network is whole again."""
        self._passes.set()

    def close(self) -> None:
        """End all. Idempotent."""
        self.shut()
        self.let_go()
        while True:
            with self._lock:
                threads = list(self._threads)
            if not threads:
                return
            for thread in threads:
                thread.join()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self, action: Callable[..., None], *arguments: object) -> threading.Thread:
        def run() -> None:
            try:
                action(*arguments)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()
        return thread

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # shut
                return
            connection = _Relayed(client)
            with self._lock:
                self._connections.add(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: _Relayed) -> None:
        try:
            self._passes.wait()
            with suppress(OSError):
                connection.connect(self._target)
                back = self._start(self._pump, connection, connection.server, connection.client)
                self._pump(connection, connection.client, connection.server)
                back.join()
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _pump(self, connection: _Relayed, source: socket.socket, target: socket.socket) -> None:
        """Move bytes until one side ends."""
        outlet, inlet = os.pipe()
        fcntl.fcntl(inlet, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            while count := os.splice(source.fileno(), inlet, _PIPE_BYTES):
                self._passes.wait()
                trouble = self._trouble()
                if trouble.reset:
                    connection.reset()
                    return
                time.sleep(trouble.late_s)
                connection.lost |= trouble.lost
                while count:
                    if connection.lost:
                        count -= len(os.read(outlet, count))
                    else:
                        count -= os.splice(outlet, target.fileno(), count)
            if not connection.lost:
                target.shutdown(socket.SHUT_WR)
        except OSError:  # one side has hung up, or the relay is shut
            connection.cut()
        finally:
            os.close(outlet)
            os.close(inlet)


@dataclass(eq=False)
class _Relayed:
    client: socket.socket
    server: socket.socket = field(default_factory=socket.socket)
    lost: bool = False
    cut_off: bool = False

    def connect(self, target: tuple[str, int]) -> None:
        """Connect to the server; reset the client's connection where that cannot be."""
        try:
            self.server.settimeout(_CONNECT_S)
            self.server.connect(target)
            self.server.settimeout(None)
            for one in (self.client, self.server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            self.reset()
            raise
        if self.cut_off:
            self.cut()

    def cut(self) -> None:
        """End both sides in good order."""
        self.cut_off = True
        for one in (self.client, self.server):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Have `close` send RST to both sides, soon."""
        self.lost = True  # so that the other direction says nothing of an end
        for one in (self.client, self.server):
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
                one.shutdown(socket.SHUT_RD)  # wakes up who waits for bytes, and sends nothing yet

    def close(self) -> None:
        self.client.close()
        self.server.close()
