"""The asking end: one connection, one request at a time."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from datacache.core.errors import DatacacheError
from datacache.exchange.frames import Buffer, Frame, FrameError, FrameSocket, Kind, Look, header
from datacache.exchange.wire import SUM_BYTES, BlocksRequest, checksum_of, decode_error

_MOST_ANSWER_BYTES = 256 * 2**20
_MOST_ERROR_BYTES = 2**20


class Connection:
    """A connection to a `FrameServer`. One thread at a time; `frames` is for an introduction.

    After any error but one that the server sent it is to be closed: an answer may be on its way still."""

    def __init__(self, connection: socket.socket, *, look: Look, look_every_s: float) -> None:
        """`look` is called every so often while the connection waits; raises to give up."""
        self.frames = FrameSocket(connection, look_every_s=look_every_s, receiving=look, sending=look)
        self._number = 0

    def call(self, op: str, body: Buffer) -> memoryview:
        """Have an operation done; return its result. Raises its error."""
        self._number += 1
        self.frames.send(Kind.CALL, self._number, op.encode(), body)
        return self._result()

    def upload(self, op: str, size_bytes: int, parts: Iterable[Buffer]) -> memoryview:
        """Have an operation done whose body of `size_bytes` comes in parts; return its result. Raises its error. An
        error of `parts` closes the connection: half a request was sent."""
        self._number += 1
        try:
            self.frames.send_parts(
                [header(Kind.CALL, self._number, len(op), size_bytes, self.frames.version), op.encode()]
            )
            for part in parts:
                self.frames.send_parts([part])
        except BaseException:
            self.close()
            raise
        return self._result()

    def ask(self, op: str, fields: object = None) -> dict[str, Any]:
        """Have an operation done whose request and result are JSON; return its result. Raises its error."""
        answer: dict[str, Any] = json.loads(
            bytes(self.call(op, b"" if fields is None else json.dumps(fields).encode()))
        )
        return answer

    def blocks(self, request: BlocksRequest) -> Iterator[memoryview | DatacacheError | None]:
        """Yield what came of each block, in their order; None for one that a node has not got, or has no time for.
        Raises the error of a request that is refused as a whole. The iterator must be gone through to its end, or the
        connection closed."""
        self.ask_blocks(request)
        for at in range(len(request.blocks)):
            yield self.asked_block(request, at)

    def ask_blocks(self, request: BlocksRequest) -> None:
        """Ask for blocks without waiting; the connection is readable once an answer comes."""
        self._number += 1
        self.frames.send(Kind.BLOCKS, self._number, body=request.encode())

    def asked_block(self, request: BlocksRequest, at: int) -> memoryview | DatacacheError | None:
        """Return what comes of the next block that `ask_blocks` asked for, as `blocks` does."""
        came = self._block(request, at)
        return None if isinstance(came, Frame) else came

    def answers(self, request: BlocksRequest) -> Iterator[tuple[int, memoryview | DatacacheError | Kind]]:
        """Yield the positions of a node's blocks and what came of each: first all in their order, with `Kind.WAIT` for
        those that the node gets; then these, each behind any number of `Kind.WAIT` as signs of life. A refusal of the
        whole request is the answer to each block that is left. See `blocks` for the end."""
        self.ask_blocks(request)
        yield from self.asked_answers(request)

    def asked_answers(self, request: BlocksRequest) -> Iterator[tuple[int, memoryview | DatacacheError | Kind]]:
        """Yield what `answers` does, to a request that `ask_blocks` has sent."""
        refusal: DatacacheError | None = None

        def next_answer(at: int) -> memoryview | DatacacheError | Frame:
            nonlocal refusal
            if refusal is None:
                try:
                    return self._block(request, at)
                except DatacacheError as exc:
                    refusal = exc
            return refusal

        later, positions = [], iter(range(len(request.blocks)))
        for at in positions:
            came = next_answer(at)
            if not isinstance(came, Frame):
                yield at, came
                continue
            kind, more = Kind(came.kind), int.from_bytes(came.head, "big")
            for each in (at, *itertools.islice(positions, more)):
                later += [each] if kind == Kind.WAIT else []
                yield each, kind
        for at in later:
            while isinstance(came := next_answer(at), Frame):
                if came.kind != Kind.WAIT:
                    raise FrameError(f"a block was announced, and answer {came.kind} came")
                yield at, Kind.WAIT
            yield at, came

    def _block(self, request: BlocksRequest, at: int) -> memoryview | DatacacheError | Frame:
        """Return a block, the error in its place, or the frame that tells why there is none now."""
        start, stop = request.span(at)
        length, sum_bytes = stop - start, SUM_BYTES if request.mode.of_a_node else 0
        answer = self._expected(
            self.frames.receive(
                most_bytes=max(length, _MOST_ERROR_BYTES), head_bytes=sum_bytes, body_bytes=length, into=request.into
            )
        )
        if answer.kind in (Kind.BUSY, Kind.ABSENT, Kind.WAIT):
            return answer
        if answer.kind == Kind.REFUSED:
            raise decode_error(answer.body)
        if answer.kind != Kind.OK:
            return decode_error(answer.body)
        if len(answer.body) != length or (sum_bytes and answer.head != checksum_of(answer.body)):
            ref, number = request.blocks[at]
            raise FrameError(f"block {number} of {ref.url} did not come as it was sent")
        return answer.body

    def _result(self) -> memoryview:
        answer = self._expected(self.frames.receive(most_bytes=_MOST_ANSWER_BYTES))
        if answer.kind != Kind.OK:
            raise decode_error(answer.body)
        return answer.body

    def _expected(self, answer: Frame) -> Frame:
        if answer.number != self._number:
            raise FrameError("an answer came that is another request's")
        return answer

    @property
    def closed(self) -> bool:
        """True once this end has hung up."""
        return self.frames.connection.fileno() < 0

    def close(self) -> None:
        """Hang up."""
        self.frames.close()
