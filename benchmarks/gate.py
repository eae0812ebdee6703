"""A gate before a server: while it is shut connections are refused and those that were open are cut.

`Gate` is for benchmarks; the process it starts is this module, one thread for each direction of a connection. Bytes go
through pipes inside the kernel (splice(2)), so what passes costs little.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import threading
from urllib.parse import urlsplit

from benchmarks.harness import ToldProcess

_PIPE_BYTES = 2**20


class Gate:
    """Stands at `endpoint` for another endpoint of this machine; shut at first."""

    def __init__(self, endpoint: str) -> None:
        self._child = ToldProcess(sys.executable, "-m", "benchmarks.gate", str(urlsplit(endpoint).port))
        self.endpoint = f"http://127.0.0.1:{int(self._child.answer())}"

    def open(self) -> None:
        """Let connections through."""
        self._tell("open")

    def shut(self) -> None:
        """Refuse them, and cut those that are open."""
        self._tell("shut")

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc: object) -> None:
        self._child.close()

    def _tell(self, command: str) -> None:
        self._child.say(command)
        if not self._child.answer():
            raise SystemExit("the gate has died")


class _Relay:
    """One listening socket while it is open, and the connections through it."""

    def __init__(self, port: int) -> None:
        self._target = port
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()  # guards the set
        self._connections: set[socket.socket] = set()

    def open(self) -> None:
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=256)
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def shut(self) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._listener.close()
            self._listener = None
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # shut
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections |= {client, server}
            threading.Thread(target=self._both_ways, args=(client, server), daemon=True).start()

    def _both_ways(self, client: socket.socket, server: socket.socket) -> None:
        back = threading.Thread(target=_pump, args=(server, client), daemon=True)
        back.start()
        _pump(client, server)
        back.join()
        with self._lock:
            self._connections -= {client, server}
        client.close()
        server.close()


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Move bytes until one side ends."""
    outlet, inlet = os.pipe()
    fcntl.fcntl(inlet, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    with contextlib.suppress(OSError):
        while count := os.splice(source.fileno(), inlet, _PIPE_BYTES):
            while count:
                count -= os.splice(outlet, target.fileno(), count)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
    os.close(outlet)
    os.close(inlet)


def main() -> None:
    relay = _Relay(int(sys.argv[1]))
    print(relay.port, flush=True)
    for line in sys.stdin:
        relay.open() if line.strip() == "open" else relay.shut()
        print("done", flush=True)


if __name__ == "__main__":
    main()
