"""Attacks on the port of a node in a cluster: what each got, and how long a node that has the key waits meanwhile.

The node is a daemon of its own. Each attack keeps its connections open while a node introduces itself and asks for a
block that is not there: five times, of which the median counts. The flood comes from eight addresses, as fast as a
process can connect.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import get_context
from statistics import median
from typing import Any

from benchmarks.harness import ResultTable, benchmark
from datacache.core.ids import ObjectRef
from datacache.exchange.auth import HELLO, PROOF, Identity, introduce
from datacache.exchange.client import Connection
from datacache.exchange.frames import HEADER, MAGIC, VERSION, Deadline, FrameSocket, Kind, header
from datacache.exchange.wire import BlocksRequest, Mode, decode_error

KEY = secrets.token_hex(32)
NODE = Identity("lab", "a", KEY.encode())
MOST_BYTES = 2**20


class Port:
    """The port under attack, and the connections to it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.open = contextlib.ExitStack()

    def connect(self, host: str = "") -> FrameSocket:
        """Return a connection, from an address of this machine."""
        source = (host, 0) if host else None
        plain = socket.create_connection(self.address, timeout=30, source_address=source)
        deadline = Deadline("nothing in 30 s")
        deadline.give_up_at = time.monotonic() + 30
        frames = FrameSocket(plain, look_every_s=1.0, receiving=deadline.look, sending=deadline.look)
        self.open.callback(frames.close)
        return frames

    def enter(self, me: Identity) -> Connection:
        """Be let in as a node."""
        connection = Connection(self.connect().connection, look=lambda: None, look_every_s=30.0)
        introduce(connection.frames, me, "b")
        return connection


def main() -> None:
    with benchmark(__doc__, flood=(3.0, 0.5)) as (args, work):
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = free.getsockname()
        own = f"127.0.0.1:{address[1]}"
        cluster = {"cluster": "lab", "node": "b", "listen": own, "cluster_members": f"b={own}", "cluster_key": KEY}
        work.home("node", ram_bytes=2**24, ssd_bytes=2**26, **cluster).dsctl("daemon", "start")
        table = ResultTable("Attacks on a node's port", "attack", "got", "a node meanwhile, ms")
        for name, attack in ATTACKS.items():
            port = Port(address)
            with port.open:
                got = attack(port)
                table.row(name, got, 1e3 * median(_visit(address) for _ in range(5)))
        table.row(*_flood(address, args.flood))
        table.print()


def _visit(address: tuple[str, int]) -> float:
    """Introduce a node and ask for a block; return the seconds that it took."""
    port, begun = Port(address), time.perf_counter()
    with port.open:
        ref = ObjectRef("s3://bucket", "key", 7, "etag", "")
        assert list(port.enter(NODE).blocks(BlocksRequest([(ref, 0)], "d", "", Mode.HAVE))) == [None]
    return time.perf_counter() - begun


def _ending(frames: FrameSocket, after: str = "") -> str:
    """Return how the node ends the talk."""
    begun = time.monotonic()
    try:
        answer = frames.receive(most_bytes=MOST_BYTES)
        while answer.kind == Kind.OK:
            after, answer = "an answer, then ", frames.receive(most_bytes=MOST_BYTES)
    except ConnectionError:
        seconds = time.monotonic() - begun
        return f"{after}hung up on{f' after {seconds:.1f} s' if seconds > 1 else ''}"
    return f"refused: {decode_error(answer.body)}"


def _hello(**changed: object) -> bytes:
    return json.dumps(
        {"cluster": "lab", "node": "a", "nonce": "0" * 64, "versions": [VERSION, VERSION]} | changed
    ).encode()


def _says(*parts: bytes) -> Callable[[Port], str]:
    def attack(port: Port) -> str:
        frames = port.connect()
        frames.send_parts(list(parts))
        return _ending(frames)

    return attack


def _introduces(hello: bytes, proof: Callable[[bytes], bytes] = lambda answer: b"\0" * 32) -> Callable[[Port], str]:
    """Say a hello, and after the node's answer a proof."""

    def attack(port: Port) -> str:
        frames = port.connect()
        frames.send(Kind.CALL, 0, HELLO, hello)
        answer = frames.receive(most_bytes=MOST_BYTES)
        if answer.kind != Kind.OK:
            return f"refused: {decode_error(answer.body)}"
        frames.send(Kind.CALL, 0, PROOF, proof(bytes(answer.body)))
        return _ending(frames)

    return attack


def _replay(port: Port) -> str:
    sent: list[bytes] = []

    class Recorded(FrameSocket):
        def send_parts(self, parts: list[bytes]) -> None:  # type: ignore[override]
            sent.extend(map(bytes, parts))
            super().send_parts(parts)

    plain = port.connect().connection
    introduce(Recorded(plain, look_every_s=30.0, receiving=lambda: None, sending=lambda: None), NODE, "b")
    frames = port.connect()
    frames.send_parts(sent)
    frames.receive(most_bytes=MOST_BYTES)  # its hello
    return _ending(frames)


def _node_says(part: bytes) -> Callable[[Port], str]:
    """Say something as a node that was let in."""

    def attack(port: Port) -> str:
        frames = port.enter(NODE).frames
        frames.send_parts([part])
        return _ending(frames)

    return attack


def _drips(port: Port) -> str:
    frames, begun = port.connect(), time.monotonic()
    with contextlib.suppress(OSError):
        for byte in itertools.chain(header(Kind.CALL, 0, 5, 4000) + HELLO, itertools.repeat(32)):
            frames.connection.sendall(bytes([byte]))
            time.sleep(0.5)
    return f"hung up on after {time.monotonic() - begun:.1f} s"


def _half_open(port: Port) -> str:
    first = port.connect()
    for _ in range(500):
        port.connect()
    return _ending(first)


def _flood(address: tuple[str, int], seconds: float) -> tuple[str, str, float]:
    """Have another process connect from eight addresses and say hello, while one node after another comes."""
    context = get_context("fork")
    count = context.Value("l")
    process = context.Process(target=_connect_on, args=(address, count), daemon=True)
    process.start()
    begun, took = time.monotonic(), []
    while time.monotonic() < begun + seconds:
        took.append(_visit(address))
    rate = count.value / (time.monotonic() - begun)
    process.kill()
    process.join()
    got = f"ended by others of theirs; of {len(took)} nodes the slowest took {1e3 * max(took):,.0f} ms"
    return f"strangers that introduce themselves, {rate:,.0f} a second", got, 1e3 * median(took)


def _connect_on(address: tuple[str, int], count: Any) -> None:
    kept = deque[FrameSocket](maxlen=1000)
    for number in itertools.count():
        with contextlib.suppress(OSError):
            kept.append(Port(address).connect(f"127.0.0.{2 + number % 8}"))
            kept[-1].send(Kind.CALL, 0, HELLO, _hello())
            count.value += 1


ATTACKS: dict[str, Callable[[Port], str]] = {
    "no key": _introduces(_hello()),
    "another cluster": _introduces(_hello(cluster="other")),
    "an old version": _introduces(_hello(versions=[0, 0])),
    "a frame of a newer version": _says(HEADER.pack(MAGIC, VERSION + 1, Kind.CALL, 1, 0, 0)),
    "a recorded introduction, replayed": _replay,
    "the node's own proof, sent back": _introduces(_hello(), proof=lambda answer: answer[-32:]),
    "blocks, without an introduction": _says(header(Kind.BLOCKS, 1, 0, 2), b"[]"),
    "HTTP": _says(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n"),
    "a huge introduction (4 GiB)": _says(header(Kind.CALL, 0, 5, 2**32 - 1), HELLO),
    "a huge frame of a node (4 GiB)": _node_says(header(Kind.BLOCKS, 1, 0, 2**32 - 1)),
    "a node that asks to stop the daemon": _node_says(header(Kind.CALL, 1, 4, 0) + b"stop"),
    "half an introduction, then silence": _says(header(Kind.CALL, 0, 5, 200)[:7]),
    "a byte each half second": _drips,
    "501 connections that say nothing": _half_open,
}


if __name__ == "__main__":
    main()
