"""The fields of requests to the daemon, each checked when it is taken: `UsageError` names the one that is wrong."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from datacache.core.errors import UsageError
from datacache.core.messages import parse_object
from datacache.core.objects import MAX_READABLE_BYTES, ObjectRef, block_count
from datacache.daemon import wire

_MAX_TEXT = 4096


class Fields:
    """The JSON object of a request."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def text(self, name: str) -> str:
        """A text that must be there."""
        value = self.optional_text(name)
        if not value:
            raise UsageError(f"bad request: {name!r} is missing")
        return value

    def optional_text(self, name: str) -> str:
        """A text; '' if it is not there, or null."""
        value = self._values.get(name)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > _MAX_TEXT or "\0" in value:
            raise UsageError(f"bad request: {name!r} is no text of up to {_MAX_TEXT:,} characters")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object that must be there."""
        value = self._values.get(name)
        if not isinstance(value, dict):
            raise UsageError(f"bad request: {name!r} is no JSON object")
        return value

    def flag(self, name: str) -> bool:
        """True or false; false if it is not there."""
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            raise UsageError(f"bad request: {name!r} is neither true nor false")
        return value

    def parse_block(self) -> tuple[ObjectRef, int]:
        """Parse an object, `ref`, and the number of one of its blocks, `number`."""
        values, number = self._values.get("ref"), self._values.get("number")
        try:
            ref = wire.decode_ref(values if isinstance(values, list) else [])
        except (TypeError, ValueError) as exc:
            raise UsageError("bad request: 'ref' is no object reference") from exc
        if not 0 < ref.size_bytes <= MAX_READABLE_BYTES:
            raise UsageError(f"bad request: no object has {ref.size_bytes:,} bytes with blocks")
        if type(number) is not int or not 0 <= number < block_count(ref.size_bytes):
            raise UsageError(f"bad request: 'number' is no block of an object of {ref.size_bytes:,} bytes")
        return ref, number


async def fields_of(request: web.Request) -> Fields:
    """The fields of a request; `UsageError` if its body is no JSON object."""
    try:
        return Fields(parse_object(await request.read() or b"{}"))
    except ValueError as exc:
        raise UsageError("bad request: its body is no JSON object") from exc
