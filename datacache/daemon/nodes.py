"""Answer the other nodes of the cluster: blocks, and nothing else.

A node asks the owner of a block, which gets it if it is not here, or whoever may have it from before. It proves first
that it has the cluster's key (`exchange.auth`). Each connection has a thread.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator

from datacache.cluster.peers import Peers
from datacache.core.errors import CacheError, UsageError
from datacache.core.ids import ObjectRef, block_id, object_id
from datacache.daemon.fetcher import Fetcher
from datacache.exchange.auth import welcome
from datacache.exchange.frames import Frame, Kind
from datacache.exchange.server import Answer, FrameServer, error_answer
from datacache.exchange.wire import BlocksRequest, Mode, checksum_of

_MOST_REQUEST_BYTES = 2**20
_MOST_UNDER_WAY = 64
"""Blocks that are got for other nodes at a time. Who asks for more is told to ask somebody else."""

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
        _Nodes(fetcher).answer,
        most_bytes=_MOST_REQUEST_BYTES,
        name="nodes",
        welcome=lambda frames: welcome(frames, peers.me),
    )
    server.listen(listener)
    peers.join()
    return server


class _Nodes:
    """Answers to other nodes. Any thread."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._room = threading.BoundedSemaphore(_MOST_UNDER_WAY)

    def answer(self, frame: Frame) -> Generator[Answer, None, None]:
        """Answer one frame of another node."""
        if frame.kind != Kind.BLOCKS:
            raise UsageError("bad request: another node may ask for blocks only")
        request = BlocksRequest.decode(frame.body)
        if not request.mode.of_a_peer:
            raise UsageError("bad request: another node may not ask as a reader")
        for ref, number in request.blocks:
            yield from self._block(ref, number, request)

    def _block(self, ref: ObjectRef, number: int, request: BlocksRequest) -> Generator[Answer, None, None]:
        here = self._fetcher.local.view(block_id(object_id(ref), number), 0, None)
        if here is not None:
            yield Answer(Kind.OK, checksum_of(here), here)
        elif request.mode is Mode.HAVE:
            yield Answer(Kind.ABSENT)
        elif not self._room.acquire(blocking=False):
            yield Answer(Kind.BUSY)
        else:
            try:
                yield from self._got(ref, number, request.dataset)
            finally:
                self._room.release()

    def _got(self, ref: ObjectRef, number: int, dataset: str) -> Generator[Answer, None, None]:
        reading = self._fetcher.read_for_node(ref, number, dataset)
        if reading is None:
            yield Answer(Kind.BUSY)
            return
        try:
            try:
                data = reading.data.result()
            except Exception as exc:  # noqa: BLE001 - this block's answer
                yield error_answer(exc)
            else:
                yield Answer(Kind.OK, checksum_of(data), data)
        finally:
            reading.close()
