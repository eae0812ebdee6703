"""Answer the other nodes of the cluster: blocks, and what is to be said and taken over when one drains (`handover`).

A node asks the owner of a block, which gets it if it is not here, or whoever may have it from before. It proves first
that it has the cluster's key (`exchange.auth`). Each connection has a thread.

All parts of a node (`parts`) let others in at its one address, so nobody needs to know how many there are. Whichever is
asked gives what any of them has stored, and has another part get what is that one's.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Generator, Iterator
from itertools import groupby

from datacache.cluster.peers import Peers
from datacache.cluster.replicas.receiver import Replicas
from datacache.core.errors import CacheError, DaemonError, DatacacheError, UsageError
from datacache.core.ids import BLOCK_BYTES, block_id, object_id
from datacache.daemon.fetcher import Fetcher, Reading
from datacache.daemon.handover import Receiver
from datacache.daemon.parts import OtherParts
from datacache.daemon.turns import TurnKind
from datacache.exchange.auth import welcome
from datacache.exchange.frames import Frame, Kind
from datacache.exchange.server import Answer, FrameServer, error_answer
from datacache.exchange.wire import BlocksRequest, Fields, Mode, checksum_of
from datacache.tiers.parts import part_of

_MOST_REQUEST_BYTES = 2 * BLOCK_BYTES
"""Of the blocks that another node hands over in one frame."""
_MOST_UNDER_WAY = 512
"""Blocks that other nodes wait for at a time. A node that asks for more is told to ask another one."""
_SIGN_EVERY_S = 0.25
"""How often a node that waits for a block hears that it is being got: four times before it gives this one up."""
_PART_SILENT_S = 0.75
"""How long another part may be silent: less than the second that this node may be."""
_REPLICA_S = 8.0
"""How long the first part may take to make a replica durable: less than `cluster.replicas.sender` waits."""
_ORDER_S = 5.0
"""How long the first part may take for what is no block."""

_OF_CONNECTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Options of the listener that its connections inherit. A node that vanished without a word is noticed after a minute:
its connections would keep a thread and a descriptor each for ever."""


def listen_to_nodes(address: str) -> socket.socket:
    """Return the listener of a node; `CacheError` if the address cannot be listened at."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, int(port)), family=family, backlog=512)
        for level, option, value in _OF_CONNECTIONS:
            listener.setsockopt(level, option, value)
    except OSError as exc:
        raise CacheError(
            f"the node cannot listen at {address}: {exc.strerror or exc}",
            hint="Set DATACACHE_LISTEN to an address of this machine and a port that nobody has.",
        ) from exc
    return listener


def serve_nodes(nodes: NodeRequests, listener: socket.socket, *, shared: bool = False) -> FrameServer:
    """Let other nodes in from now on. `shared`: see `FrameServer.listen`."""
    server = FrameServer(
        nodes.answer,
        most_bytes=_MOST_REQUEST_BYTES,
        name="nodes",
        welcome=lambda frames: welcome(frames, nodes.peers.me),
        crowded=lambda: any(map(nodes.fetcher.turns.crowded, (TurnKind.ZONE, TurnKind.NODE))),
    )
    server.listen(listener, shared=shared)
    return server


class _AskedPart:
    """Blocks that another node wants and another part of this node gets. One thread, which ends with `close`."""

    def __init__(self, parts: OtherParts, part: int, request: BlocksRequest) -> None:
        """Send the request. `OSError` if the part does not take it."""
        self._parts, self._part, self._request = parts, part, request
        self._came: dict[int, memoryview | DatacacheError | Kind] = {}
        self._to_come = list(range(len(request.blocks)))
        self._error: OSError | None
        """Why nothing comes any more."""
        self._ask()

    def _ask(self) -> None:
        self._asked, self._first_left = tuple(self._to_come), len(self._to_come)
        connection, request = self._parts.take(self._part, _PART_SILENT_S), self._request.only(self._asked)
        try:
            connection.ask_blocks(request)
        except BaseException as exc:
            connection.close()  # half a request may be on its way
            self._parts.give_back(connection, exc)
            raise
        self._connection, self._answers, self._error = connection, connection.asked_answers(request), None

    def got(self, at: int) -> Iterator[Answer]:
        """Yield signs of life until the block at this position has come, then the block or the error. Positions come
        in their order."""
        again = True
        while at in self._to_come and self._error is None:
            try:
                self._connection.give_time(_PART_SILENT_S)
                nth, came = next(self._answers)
            except OSError as exc:
                self._connection.close()
                self._parts.give_back(self._connection, exc)
                self._error = exc
                # It hangs up where its answer waits for another block to be sent, and others for its room.
                if again and not isinstance(exc, TimeoutError):
                    again = False
                    with contextlib.suppress(OSError):
                        self._ask()
                continue
            self._parts.heard(self._part)
            if came is not Kind.WAIT:
                self._came[self._asked[nth]] = came
                self._to_come.remove(self._asked[nth])
            elif not self._first_left:
                yield Answer(Kind.WAIT)
            self._first_left = max(0, self._first_left - 1)
        came = self._came.pop(at, Kind.BUSY)
        if isinstance(came, memoryview):
            yield Answer(Kind.OK, checksum_of(came), came)
        elif isinstance(came, DatacacheError):
            yield error_answer(came)
        else:  # *wait* was said, so it is too late for *busy*
            error = f"another part of this node does not answer: {self._error}" if self._error else "this node is busy"
            yield error_answer(DaemonError(error))

    def close(self) -> None:
        """Let others have the connection, if all has come."""
        if self._error is None:
            if self._to_come:
                self._connection.close()
            self._parts.give_back(self._connection)


class NodeRequests:
    """Answer what other nodes ask of one part of this node. Any thread."""

    def __init__(
        self,
        peers: Peers,
        fetcher: Fetcher,
        parts: OtherParts,
        replicas: Replicas | None = None,
    ) -> None:
        """`replicas` of other nodes' staging areas, which the first part holds."""
        self.peers, self.fetcher, self._parts, self._replicas = peers, fetcher, parts, replicas
        self._receiver = Receiver(fetcher, parts)
        self._room = threading.BoundedSemaphore(_MOST_UNDER_WAY)

    def answer(self, frame: Frame) -> Generator[Answer, None, None]:
        """Answer one frame of another node."""
        if frame.kind == Kind.CALL:
            yield Answer(Kind.OK, body=self.call(frame.head, frame.body))
            return
        if frame.kind != Kind.BLOCKS:
            raise UsageError("bad request: another node may ask for blocks only")
        request = BlocksRequest.decode(frame.body)
        if not request.mode.of_a_node:
            raise UsageError("bad request: another node may not ask as a reader")
        yield from self.blocks(request)

    def blocks(self, request: BlocksRequest) -> Iterator[Answer]:
        """Answer a request of another node for blocks."""
        begun: dict[int, Reading | None] = {}
        others: dict[int, list[int]] = {}
        leaves = self.peers.leaves
        with contextlib.ExitStack() as until_given:
            try:
                came = [self._begin(at, request, begun, others, leaves=leaves) for at in range(len(request.blocks))]
                asked = self._ask_parts(request, others, came, until_given)
                for kind, alike in groupby(came, _kind):
                    if kind is Kind.OK:
                        yield from (
                            Answer(Kind.OK, checksum_of(here), here) for here in alike if not isinstance(here, Kind)
                        )
                    else:
                        yield Answer(kind, (len(list(alike)) - 1).to_bytes(2, "big"))  # and so many more
                for at in sorted([*begun, *asked]):
                    if at in asked:
                        of_part, nth = asked[at]
                        yield from of_part.got(nth)
                    else:
                        yield from self._got(at, request, begun)
                        self._end(begun.pop(at))
            finally:
                for reading in begun.values():
                    self._end(reading)

    def call(self, op: bytes, body: memoryview) -> bytes:
        """Do what another node asks for besides blocks: it drains, or has a replica of a staging area here."""
        if op == b"replica":
            if self._replicas is not None:
                return self._replicas.call(body)
            with self._parts.connected(0, _REPLICA_S) as connection:
                return bytes(connection.call(op.decode(), body))
        if op in (b"lacks", b"keep") and self.peers.leaves:
            raise DaemonError("the node drains, and takes nothing over")
        if op == b"lacks":
            return self._receiver.lacks(body)
        if op == b"keep":
            return self._receiver.keep(body)
        if op in (b"drain", b"state") and self._parts.part.number:  # the first part knows
            with self._parts.connected(0, _ORDER_S) as connection:
                return bytes(connection.call(op.decode(), body))
        if op == b"drain":
            return json.dumps(self.peers.drain("")).encode()
        if op == b"state":
            fields = Fields.decode(body)
            mine = self.peers.note(fields.text("node"), fields.optional_text("state"), fields.number("left"))
            return json.dumps(mine).encode()
        raise UsageError("bad request: another node may ask for blocks only, or hand them over")

    def _begin(
        self,
        at: int,
        request: BlocksRequest,
        begun: dict[int, Reading | None],
        others: dict[int, list[int]],
        *,
        leaves: bool,
    ) -> memoryview | Kind:
        """Return a block that is here, else the answer until it is: `begun` has it then, if it is being got, and
        `others`, by part, if another part is to be asked."""
        ref, number = request.blocks[at]
        obj = object_id(ref)
        here = self.fetcher.local.view(block_id(obj, number), 0, None)
        if here is not None:
            return here
        if request.mode is Mode.HAVE:
            return Kind.ABSENT
        if leaves:  # the node that asks has not heard of it yet
            return Kind.BUSY
        if not self._parts.part.has(obj):
            others.setdefault(part_of(obj, self._parts.part.of), []).append(at)
            return Kind.BUSY
        if not self._room.acquire(blocking=False):
            return Kind.BUSY
        reading = self._read(at, request)
        if reading is None:
            self._room.release()
            return Kind.BUSY
        begun[at] = reading
        return Kind.WAIT

    def _ask_parts(
        self,
        request: BlocksRequest,
        others: dict[int, list[int]],
        came: list[memoryview | Kind],
        until_given: contextlib.ExitStack,
    ) -> dict[int, tuple[_AskedPart, int]]:
        """Ask other parts for their blocks, and put into `came` that those are on their way; return whom each was asked
        of, as which of its blocks. A part that is not there leaves what is in `came`."""
        asked = {}
        for part, positions in others.items():
            with contextlib.suppress(OSError):
                of_part = until_given.enter_context(
                    contextlib.closing(_AskedPart(self._parts, part, request.only(positions)))
                )
                for nth, at in enumerate(positions):
                    came[at], asked[at] = Kind.WAIT, (of_part, nth)
        return asked

    def _read(self, at: int, request: BlocksRequest) -> Reading | None:
        ref, number = request.blocks[at]
        return self.fetcher.read_for_node(ref, number, request.dataset, zone=request.mode is Mode.ZONE)

    def _got(self, at: int, request: BlocksRequest, begun: dict[int, Reading | None]) -> Iterator[Answer]:
        """Yield signs of life until a block has come, then the block or the error. Meanwhile blocks behind it give way,
        for which others wait in turn; None in `begun`, they are read again."""
        reading = begun[at] = begun[at] or self._read(at, request)
        while reading is not None:
            try:
                data = reading.data.result(_SIGN_EVERY_S)
            except Exception as exc:  # noqa: BLE001 - this block's answer
                if reading.data.done() and exc is reading.data.exception():
                    yield error_answer(exc)
                    return
                for later, other in begun.items():
                    if later > at and other is not None and self.fetcher.turns.crowded(_turn_kind(request)):
                        other.close()
                        begun[later] = None
                yield Answer(Kind.WAIT)  # the block may have come just now
            else:
                yield Answer(Kind.OK, checksum_of(data), data)
                return
        yield error_answer(DaemonError("the node is busy"))  # it waits for another node itself by now

    def _end(self, reading: Reading | None) -> None:
        if reading is not None:
            reading.close()
        self._room.release()


def _turn_kind(request: BlocksRequest) -> TurnKind:
    return TurnKind.ZONE if request.mode is Mode.ZONE else TurnKind.NODE


def _kind(found: memoryview | Kind) -> Kind:
    return found if isinstance(found, Kind) else Kind.OK
