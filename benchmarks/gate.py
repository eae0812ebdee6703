"""A gate before a server: while it is shut connections are refused and those that were open are cut.

`Gate` is for benchmarks; the process it starts is this module.
"""

from __future__ import annotations

import socket
import sys
from urllib.parse import urlsplit

from benchmarks.harness import ToldProcess
from tests.conformance.relay import Relay
from tests.servers import LOOPBACK, free_port


class Gate:
    """Stands at `endpoint` for another endpoint of this machine; shut at first."""

    def __init__(self, endpoint: str) -> None:
        self._child = ToldProcess(sys.executable, "-m", "benchmarks.gate", str(urlsplit(endpoint).port))
        self.endpoint = f"http://{LOOPBACK}:{int(self._child.answer())}"

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


def main() -> None:
    port = free_port()
    relay = Relay(lambda: socket.create_server((LOOPBACK, port), backlog=256), (LOOPBACK, int(sys.argv[1])))
    relay.shut()
    print(port, flush=True)
    for line in sys.stdin:
        relay.open() if line.strip() == "open" else relay.shut()
        print("done", flush=True)


if __name__ == "__main__":
    main()
