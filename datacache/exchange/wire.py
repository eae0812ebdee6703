"""The bodies of requests and answers: what they ask for and errors by the name of their class, as JSON. Any thread."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from xxhash import xxh3_64_digest

from datacache.core import errors
from datacache.core.errors import DaemonError, DatacacheError, UsageError
from datacache.core.ids import MAX_READABLE_BYTES, ObjectRef, block_count, block_length
from datacache.core.ipc import parse_object
from datacache.exchange.frames import Buffer

SUM_BYTES = 8
MOST_BLOCKS = 64
"""The blocks of one request."""
_MAX_TEXT = 4096
_ATTRIBUTES = ("url", "ref", "path", "checksum")


class Mode(StrEnum):
    """The way in which somebody asks for blocks."""

    READ = "read"
    """A reader of this node: get it, from wherever it is."""
    BROKEN = "broken"
    """A reader of this node that met broken bytes here: drop them and get the block again."""
    OWNER = "owner"
    """Another node, of the owner in its zone: get it, if need be from the owner among all zones."""
    ZONE = "zone"
    """A node of another zone, of the owner among all zones: get it from the store."""
    HAVE = "have"
    """Another node: only what is here."""

    @property
    def of_a_node(self) -> bool:
        """True where another node asks; each block of the answer has its checksum in the head."""
        return self in (Mode.OWNER, Mode.ZONE, Mode.HAVE)


@dataclass(frozen=True)
class BlocksRequest:
    """A request for some blocks of one data set. `snapshot` is '' for none. `spans`: the first byte and the end of what
    is wanted of each block; empty for whole blocks."""

    blocks: Sequence[tuple[ObjectRef, int]]
    dataset: str
    snapshot: str
    mode: Mode
    spans: Sequence[tuple[int, int]] = ()
    into: memoryview | None = None
    """Where to receive a single block, or its span, of exactly this length; nothing that is sent. After an error, or an
    answer that has no bytes, it may hold anything."""

    def span(self, at: int) -> tuple[int, int]:
        """Return what is wanted of the block at a position."""
        ref, number = self.blocks[at]
        return self.spans[at] if self.spans else (0, block_length(ref.size_bytes, number))

    def only(self, positions: Sequence[int]) -> BlocksRequest:
        """Return the request for those of the blocks that are at some positions."""
        if len(positions) == len(self.blocks):
            return self
        spans = [self.spans[at] for at in positions] if self.spans else ()
        return replace(self, blocks=[self.blocks[at] for at in positions], spans=spans)

    def encode(self) -> bytes:
        """Return the body of a `Kind.BLOCKS` frame."""
        wanted = [[*encode_ref(ref), number] for ref, number in self.blocks]
        return json.dumps([self.mode.value, self.dataset, self.snapshot, wanted, *self.spans]).encode()

    @classmethod
    def decode(cls, body: bytes | memoryview) -> BlocksRequest:
        """Return the request of `encode`; `UsageError` names what is wrong with it."""
        try:
            mode, dataset, snapshot, wanted, *given = json.loads(bytes(body))
            if not (0 < len(wanted) <= MOST_BLOCKS):
                raise UsageError(f"bad request: 1 to {MOST_BLOCKS} blocks can be asked for, not {len(wanted)}")
            blocks = [(decode_ref(values[:-1]), values[-1]) for values in wanted]
            spans = tuple((start, stop) for start, stop in given)
            request = cls(blocks, expect_text(dataset), expect_text(snapshot), Mode(mode), spans)
        except (KeyError, TypeError, ValueError, RecursionError) as exc:
            if isinstance(exc, UsageError):
                raise
            raise UsageError(f"bad request: {exc}") from exc
        for ref, number in blocks:
            if not 0 < ref.size_bytes <= MAX_READABLE_BYTES:
                raise UsageError(f"bad request: no object has {ref.size_bytes:,} bytes with blocks")
            if type(number) is not int or not 0 <= number < block_count(ref.size_bytes):
                raise UsageError(f"bad request: there is no block {number!r} of an object of {ref.size_bytes:,} bytes")
        if spans and (len(spans) != len(blocks) or request.mode.of_a_node):
            raise UsageError(f"bad request: {len(spans)} spans of {len(blocks)} blocks cannot be asked for")
        for (ref, number), (start, stop) in zip(blocks, spans, strict=False):
            if not (type(start) is type(stop) is int and 0 <= start < stop <= block_length(ref.size_bytes, number)):
                raise UsageError(f"bad request: block {number} of {ref.url} has no bytes {start!r} to {stop!r}")
        return request


class Fields:
    """The JSON object of a request, each field of which is checked when it is taken."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @classmethod
    def decode(cls, body: bytes | memoryview) -> Fields:
        """Return the fields of a body; `UsageError` if it is no JSON object."""
        try:
            return cls(parse_object(bytes(body) or b"{}"))
        except ValueError as exc:
            raise UsageError("bad request: its body is no JSON object") from exc

    def text(self, name: str) -> str:
        """Return a text that must be there."""
        value = self.optional_text(name)
        if not value:
            raise UsageError(f"bad request: {name!r} is missing")
        return value

    def optional_text(self, name: str) -> str:
        """Return a text; '' if it is not there, or null."""
        value = self._values.get(name)
        try:
            return "" if value is None else expect_text(value)
        except ValueError as exc:
            raise UsageError(f"bad request: {name!r} is {exc}") from exc

    def number(self, name: str) -> int:
        """Return a whole number that must be there, 0 or more."""
        value = self._values.get(name)
        if type(value) is not int or value < 0:
            raise UsageError(f"bad request: {name!r} is no whole number")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """Return a JSON object that must be there."""
        value = self._values.get(name)
        if not isinstance(value, dict):
            raise UsageError(f"bad request: {name!r} is no JSON object")
        return value

    def optional_mapping(self, name: str) -> dict[str, Any] | None:
        """Return a JSON object; None if it is not there, or null."""
        return None if self._values.get(name) is None else self.mapping(name)


def expect_text(value: object) -> str:
    """Return a text of a request; `ValueError` if it is none, or too long."""
    if not isinstance(value, str) or len(value) > _MAX_TEXT or "\0" in value:
        raise ValueError(f"no text of up to {_MAX_TEXT:,} characters")
    value.encode()  # the tiers write it down, as UTF-8; a `ValueError` in their thread would end it
    return value


def checksum_of(data: Buffer) -> bytes:
    """Return the checksum that a block has on its way between nodes."""
    return xxh3_64_digest(data)


def encode_ref(ref: ObjectRef) -> list[Any]:
    """Return an object reference as JSON."""
    return list(ref) if ref.root >= 0 else list(ref[:5])


def decode_ref(values: list[Any]) -> ObjectRef:
    """Return the object reference of `encode_ref`; `ValueError` or `TypeError` if it is none."""
    ref = ObjectRef(*values)
    kinds = [type(value) for value in ref]
    if kinds != [str, str, int, str, str, int]:
        raise ValueError("not an object reference")
    for text in (ref.store, ref.key, ref.etag, ref.version):
        text.encode("utf-8", "surrogateescape")  # its id is made of these bytes
    return ref


def encode_error(exc: DatacacheError) -> bytes:
    """Return the body for an error."""
    body = {"error": type(exc).__name__, "message": str(exc), "hint": exc.hint}
    for name in _ATTRIBUTES:
        if hasattr(exc, name):
            body[name] = str(getattr(exc, name))
    return json.dumps(body).encode()


def decode_error(body: bytes | memoryview) -> DatacacheError:
    """Return the error of `encode_error`, of the same class."""
    try:
        fields = parse_object(bytes(body))
    except ValueError:
        return DaemonError(f"the daemon answered {bytes(body[:200])!r}")
    kind = getattr(errors, str(fields.get("error")), DaemonError)
    if not (isinstance(kind, type) and issubclass(kind, DatacacheError)):
        kind = DaemonError
    more = {name: fields[name] for name in _ATTRIBUTES if name in fields}
    message, hint = str(fields.get("message", "the daemon failed")), str(fields.get("hint", ""))
    try:
        return kind(message, hint=hint, **more)
    except TypeError:  # of another version, whose class has other attributes
        return DaemonError(message, hint=hint)
