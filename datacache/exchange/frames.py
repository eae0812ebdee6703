"""Frames: a header of 16 bytes, a head of up to 64 KiB, a body. Both ends of the exchange speak nothing else.

A header is magic, version, kind, request number, length of the head and length of the body, little-endian. An answer
carries the number of its request; the answers to a request come in the order of what it asks for. Any thread, but one
at a time for each connection.
"""

from __future__ import annotations

import errno
import math
import socket
import struct
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"dX"
VERSION = 1
OLDEST_VERSION = 1
"""All that nodes of a cluster may agree upon (`auth`). An introduction has headers of this version for ever."""
HEADER = struct.Struct("<2sBBIHxxI")
_TLS = (b"\x15", b"\x16")
"""An alert and a handshake begin with these (RFC 8446, 5.1)."""
_AT_ONCE_BYTES = 2**12
_FIRST_BYTES = 2**20
"""The buffer that a body of unknown length begins with; it doubles as bytes come."""
LEAST_BYTES = 2**16
"""Less than that in the time that a connection has is no progress: byte by byte, a block would never end."""
_LOOK_AT_SENDS_S = 0.25
"""The longest time between two looks at bytes that are not taken; those who wait for a request may sleep for longer."""
_TIMEVAL = struct.Struct("@ll")
Buffer = bytes | bytearray | memoryview
Look = Callable[[], object]
"""Called now and then while a connection waits; raises to give up."""


class Kind(IntEnum):
    """The purpose of a frame."""

    CALL = 1
    """Do what the head names, with the body's JSON."""
    BLOCKS = 2
    """Give blocks, as the body's JSON says."""
    OK = 16
    """The body is the result."""
    ERROR = 17
    """The body is an error as JSON (`wire.encode_error`)."""
    BUSY = 18
    """Ask somebody else: too much is asked of this one."""
    ABSENT = 19
    """Tell that the block is not here."""
    REFUSED = 20
    """The body is an error, of the whole request: no more answers to it come."""
    WAIT = 21
    """The block is being got, and comes behind those that are here; then sent now and then as a sign of life."""


class FrameError(ConnectionError):
    """The other side sends something that is no frame, or one that is too long: the connection is of no use."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        """`hint` says what to do about it."""
        super().__init__(message)
        self.hint = hint


class Deadline:
    """The end of all waiting at a connection; one thread at a time. Apart from the connection, so that neither refers
    to the other and a connection that nobody holds is closed at once."""

    def __init__(self, words: str, *, watch: Look = lambda: None) -> None:
        """`words` say what did not happen in time; `watch` is called each time that there is some left."""
        self._words, self._watch = words, watch
        self.give_up_at = math.inf
        """By `time.monotonic`."""

    def look(self) -> None:
        """Raise `TimeoutError` when the time is up."""
        if time.monotonic() > self.give_up_at:
            raise TimeoutError(errno.ETIMEDOUT, self._words)
        self._watch()


class Pace:
    """The bytes that a connection has received and sent. Apart from the connection, as `Deadline` is."""

    def __init__(self) -> None:
        self.moved_bytes = self._marked_bytes = 0
        self._since = time.monotonic()

    def begin(self) -> None:
        """Begin to watch: something is to move from now on."""
        self._marked_bytes, self._since = self.moved_bytes, time.monotonic()

    def moved_on(self) -> bool:
        """Tell whether at least `LEAST_BYTES` have moved since `begin`, or since this was True last."""
        moved = self.moved_bytes - self._marked_bytes >= LEAST_BYTES
        if moved:
            self.begin()
        return moved

    def stalled_s(self) -> float:
        """Return since when it has not `moved_on`."""
        self.moved_on()
        return time.monotonic() - self._since


class Frame(NamedTuple):
    """One frame that came, whole."""

    kind: int
    number: int
    head: bytes
    body: memoryview


class Header(NamedTuple):
    """The first bytes of a frame."""

    kind: int
    number: int
    head_bytes: int
    body_bytes: int

    @classmethod
    def parse(cls, data: Buffer, expected: int = VERSION) -> Header:
        """Return the header in the first bytes; `FrameError` if there is none of the expected version."""
        magic, version, kind, number, head_bytes, body_bytes = HEADER.unpack_from(data)
        if magic[:1] in _TLS:
            raise FrameError(
                "the node that asks speaks TLS, and the one that is asked does not: see DATACACHE_CLUSTER_TLS"
            )
        if magic != MAGIC:
            raise FrameError("the other side speaks another protocol")
        if version != expected:
            raise FrameError(f"the other side speaks version {version} of the exchange, this one {expected}")
        return cls(kind, number, head_bytes, body_bytes)


def header(kind: Kind, number: int, head_bytes: int, body_bytes: int, version: int = VERSION) -> bytes:
    """Return the first bytes of a frame."""
    return HEADER.pack(MAGIC, version, kind, number, head_bytes, body_bytes)


class FrameSocket:
    """A connection that carries frames."""

    def __init__(self, connection: socket.socket, *, look_every_s: float, receiving: Look, sending: Look) -> None:
        """`receiving` is called each time that nothing, or only a part of what is left of a frame, has come for
        `look_every_s`; `sending` each time that little or nothing was taken: `pace.stalled_s` says since when."""
        self.connection, self.pace = connection, Pace()
        self.version = VERSION
        """Of the frames from now on."""
        self._left = memoryview(b"")  # what came behind the last frame
        connection.settimeout(None)
        self.wait(look_every_s, receiving, sending)

    def wait(self, look_every_s: float, receiving: Look, sending: Look) -> None:
        """Look around in another way from now on."""
        self._receiving, self._sending, self.look_every_s = receiving, sending, look_every_s
        if self.connection.gettimeout() is not None:  # TLS
            self.connection.settimeout(look_every_s)
            return
        # The kernel's timeouts: Python's own cost a second system call, and so a turn of the interpreter, each time.
        for option, seconds in (
            (socket.SO_RCVTIMEO, look_every_s),
            (socket.SO_SNDTIMEO, min(look_every_s, _LOOK_AT_SENDS_S)),
        ):
            value = _TIMEVAL.pack(int(seconds), int(1e6 * (seconds % 1)))
            self.connection.setsockopt(socket.SOL_SOCKET, option, value)

    def look(self) -> None:
        """Look around, as nothing has come."""
        self._receiving()

    def send(self, kind: Kind, number: int, head: bytes = b"", body: Buffer = b"") -> None:
        """Send one frame. `OSError`."""
        self.send_parts([header(kind, number, len(head), len(body), self.version), head, body])

    def send_parts(self, parts: Sequence[Buffer]) -> None:
        """Send bytes in parts: a frame, or more of a body that was announced. `OSError`."""
        left, waits = sum(map(len, parts)), False
        while True:
            try:
                sent = self.connection.sendmsg(parts)
            except BlockingIOError:
                sent = 0
            left -= sent
            if not left:
                return
            if not waits:
                self.pace.begin()
                waits = True
            self.pace.moved_bytes += sent
            if sent < LEAST_BYTES:
                self._sending()
            rest: list[Buffer] = []
            for part in parts:
                if sent >= len(part):
                    sent -= len(part)
                else:
                    rest.append(memoryview(part)[sent:])
                    sent = 0
            parts = rest

    def receive(
        self, *, most_bytes: int, head_bytes: int = 0, body_bytes: int = 0, into: memoryview | None = None
    ) -> Frame:
        """Return the next frame. `head_bytes` and `body_bytes` are those of the likely one, which is received without
        a copy: `into` a buffer of `body_bytes`, if there is one. `FrameError` for one whose body is longer than
        `most_bytes`; `ConnectionResetError` at the end."""
        if not (body_bytes or self._left):  # a request, most likely: header and body in one call
            first_bytes = bytearray(_AT_ONCE_BYTES)
            self._left = memoryview(first_bytes)[: self._some([first_bytes])]
        start = bytearray(HEADER.size + head_bytes)
        body: memoryview | bytearray = bytearray(body_bytes) if into is None else into
        got = 0
        while True:
            got += self._some([memoryview(start)[got:], body])
            if got >= HEADER.size:
                break
            self._receiving()  # a header that comes byte by byte would never end
        first = Header.parse(start, self.version)
        if (first.head_bytes, first.body_bytes) == (head_bytes, body_bytes):
            self._rest(memoryview(start)[got:])
            self._rest(memoryview(body)[max(0, got - len(start)) :])
            return Frame(first.kind, first.number, bytes(start[HEADER.size :]), memoryview(body).toreadonly())
        if first.body_bytes > most_bytes:
            raise FrameError(f"a frame of {first.body_bytes:,} bytes is too long")
        came = start[HEADER.size : got] + body[: max(0, got - len(start))]
        if came:
            self._left = memoryview(came + self._left)
        head = self._grown(first.head_bytes)
        return Frame(first.kind, first.number, bytes(head), memoryview(self._grown(first.body_bytes)).toreadonly())

    def close(self) -> None:
        """Hang up."""
        self.connection.close()

    def _grown(self, size_bytes: int) -> bytearray:
        """Receive so many bytes into a buffer that grows as they come: a header alone takes no memory."""
        found = bytearray()
        while len(found) < size_bytes:
            more = bytearray(min(size_bytes - len(found), max(_FIRST_BYTES, len(found))))
            self._rest(memoryview(more))
            found += more
        return found

    def _rest(self, out: memoryview) -> None:
        """Fill a buffer, in one call where the bytes come soon enough."""
        while out:
            out = out[self._some([out], socket.MSG_WAITALL) :]

    def _some(self, buffers: Sequence[memoryview | bytearray], flags: int = 0) -> int:
        """Receive at least a byte into the buffers."""
        if self._left:
            total = 0
            for buffer in buffers:
                count = min(len(buffer), len(self._left))
                buffer[:count] = self._left[:count]
                self._left, total = self._left[count:], total + count
            return total
        while True:
            try:
                got = self.connection.recvmsg_into(buffers, 0, flags)[0]
            except BlockingIOError:
                self._receiving()
                continue
            if not got:
                raise ConnectionResetError("the other side closed the connection")
            self.pace.moved_bytes += got
            if flags and got < len(buffers[0]):
                self._receiving()  # a frame that comes byte by byte would never end
            return got
