"""Answer the other nodes of the cluster: blocks, and what is to be said and taken over when one drains (`handover`).

A node asks the owner of a block, which gets it if it is not here, or whoever may have it from before. It proves first
that it has the cluster's key (`exchange.auth`). Each connection has a thread.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from collections.abc import Generator, Iterator
from itertools import groupby

from datacache.cluster.peers import Peers
from datacache.core.errors import CacheError, UsageError
from datacache.core.ids import BLOCK_BYTES, ObjectRef, block_id, object_id
from datacache.daemon.fetcher import Fetcher, Reading
from datacache.daemon.handover import Receiver
from datacache.daemon.turns import Kind as TurnKind
from datacache.exchange.auth import welcome
from datacache.exchange.frames import Frame, Kind
from datacache.exchange.server import Answer, FrameServer, error_answer
from datacache.exchange.wire import BlocksRequest, Fields, Mode, checksum_of

_MOST_REQUEST_BYTES = 2 * BLOCK_BYTES
"""Of the blocks that another node hands over in one frame."""
_MOST_UNDER_WAY = 512
"""Blocks that other nodes wait for at a time. Who asks for more is told to ask somebody else."""
_SIGN_EVERY_S = 0.25
"""How often a node that waits for a block hears that it is being got: four times before it gives this one up."""

_OF_CONNECTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Options of the listener that its connections inherit. A node that vanished without a word is noticed after a minute:
its connections would keep a thread and a descriptor each for ever."""


def serve_nodes(peers: Peers, fetcher: Fetcher) -> FrameServer:
    """Listen to other nodes and join the cluster. `CacheError` if the address cannot be listened at, `NodeTakenError`
    if there is a node of this name."""
    host, _, port = peers.address.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, int(port)), family=family, backlog=512)
        for level, option, value in _OF_CONNECTIONS:
            listener.setsockopt(level, option, value)
    except OSError as exc:
        raise CacheError(
            f"the node cannot listen at {peers.address}: {exc.strerror or exc}",
            hint="Set DATACACHE_LISTEN to an address of this machine and a port that nobody has.",
        ) from exc
    server = FrameServer(
        _Nodes(peers, fetcher).answer,
        most_bytes=_MOST_REQUEST_BYTES,
        name="nodes",
        welcome=lambda frames: welcome(frames, peers.me),
        crowded=lambda: fetcher.turns.crowded(TurnKind.NODE),
    )
    server.listen(listener)
    peers.join()
    return server


class _Nodes:
    """Answers to other nodes. Any thread."""

    def __init__(self, peers: Peers, fetcher: Fetcher) -> None:
        self._peers, self._fetcher, self._receiver = peers, fetcher, Receiver(fetcher)
        self._room = threading.BoundedSemaphore(_MOST_UNDER_WAY)

    def answer(self, frame: Frame) -> Generator[Answer, None, None]:
        """Answer one frame of another node."""
        if frame.kind == Kind.CALL:
            yield Answer(Kind.OK, body=self._call(frame.head, frame.body))
            return
        if frame.kind != Kind.BLOCKS:
            raise UsageError("bad request: another node may ask for blocks only")
        request = BlocksRequest.decode(frame.body)
        if not request.mode.of_a_peer:
            raise UsageError("bad request: another node may not ask as a reader")
        begun = deque[Reading]()
        try:
            came = [self._begin(ref, number, request, begun) for ref, number in request.blocks]
            for kind, alike in groupby(came, _kind):
                if kind is Kind.OK:
                    yield from (
                        Answer(Kind.OK, checksum_of(here), here) for here in alike if not isinstance(here, Kind)
                    )
                else:
                    yield Answer(kind, (len(list(alike)) - 1).to_bytes(2, "big"))  # and so many more
            while begun:
                yield from _got(begun[0])
                self._end(begun.popleft())
        finally:
            for reading in begun:
                self._end(reading)

    def _begin(self, ref: ObjectRef, number: int, request: BlocksRequest, begun: deque[Reading]) -> memoryview | Kind:
        """Return a block that is here, else the answer until it is: `begun` has it then, if it is being got."""
        here = self._fetcher.local.view(block_id(object_id(ref), number), 0, None)
        if here is not None:
            return here
        if request.mode is Mode.HAVE:
            return Kind.ABSENT
        # Who asks a node that drains has not heard of it yet.
        if self._peers.draining.is_set() or not self._room.acquire(blocking=False):
            return Kind.BUSY
        reading = self._fetcher.read_for_node(ref, number, request.dataset)
        if reading is None:
            self._room.release()
            return Kind.BUSY
        begun.append(reading)
        return Kind.WAIT

    def _call(self, op: bytes, body: memoryview) -> bytes:
        """Do what another node asks for besides blocks: all of it is about draining."""
        if op == b"lacks" and not self._peers.draining.is_set():
            return self._receiver.lacks(body)
        if op == b"keep":
            return self._receiver.keep(body)
        if op == b"drain":
            return json.dumps(self._peers.drain("")).encode()
        if op == b"state":
            fields = Fields.decode(body)
            mine = self._peers.note(fields.text("node"), fields.text("state"), fields.number("left"))
            return json.dumps(mine).encode()
        raise UsageError("bad request: another node may ask for blocks only, or hand them over")

    def _end(self, reading: Reading) -> None:
        reading.close()
        self._room.release()


def _kind(found: memoryview | Kind) -> Kind:
    return found if isinstance(found, Kind) else Kind.OK


def _got(reading: Reading) -> Iterator[Answer]:
    """Yield signs of life until a block has come, then the block or the error."""
    while True:
        try:
            data = reading.data.result(_SIGN_EVERY_S)
        except Exception as exc:  # noqa: BLE001 - this block's answer
            if reading.data.done():
                yield error_answer(exc)
                return
            yield Answer(Kind.WAIT)
        else:
            yield Answer(Kind.OK, checksum_of(data), data)
            return
