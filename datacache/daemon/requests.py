"""Read the daemon's requests and send its answers. `UsageError` names a wrong field. For the event loop.

Apart from `wire`, which clients import too: aiohttp takes long to import.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from datacache.core.errors import DaemonError, DatacacheError, UsageError
from datacache.core.ids import MAX_READABLE_BYTES, ObjectRef, block_count
from datacache.core.ipc import parse_object
from datacache.daemon import wire
from datacache.daemon.orders.plan_file import HEAD_BYTES, PlanHeader, decode_header, header_length

log = logging.getLogger(__name__)
_MAX_HEADER_BYTES = 64 * 2**20  # the objects of a plan without a snapshot are in it
_MAX_PLAN_BYTES = 2**31
_PLAN_CHUNK_BYTES = 2**20
_MAX_TEXT = 4096
PIECE_BYTES = 2**18
_TAKEN_IN_S = 20.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse | dict[str, Any]]]


class Fields:
    """The JSON object of a request, each field of which is checked when it is taken."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def text(self, name: str) -> str:
        """Return a text that must be there."""
        value = self.optional_text(name)
        if not value:
            raise UsageError(f"bad request: {name!r} is missing")
        return value

    def optional_text(self, name: str) -> str:
        """Return a text; '' if it is not there, or null."""
        value = self._values.get(name)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > _MAX_TEXT or "\0" in value:
            raise UsageError(f"bad request: {name!r} is no text of up to {_MAX_TEXT:,} characters")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """Return a JSON object that must be there."""
        value = self._values.get(name)
        if not isinstance(value, dict):
            raise UsageError(f"bad request: {name!r} is no JSON object")
        return value

    def flag(self, name: str) -> bool:
        """Return true or false; false if it is not there."""
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            raise UsageError(f"bad request: {name!r} is neither true nor false")
        return value

    def parse_block(self) -> tuple[ObjectRef, int]:
        """Return an object, `ref`, and the number of one of its blocks, `number`."""
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
    """Return the fields of a request; `UsageError` if its body is no JSON object."""
    try:
        return Fields(parse_object(await request.read() or b"{}"))
    except ValueError as exc:
        raise UsageError("bad request: its body is no JSON object") from exc


async def read_plan(content: aiohttp.StreamReader) -> tuple[PlanHeader, NDArray[np.uint32]]:
    """Read a plan (`PlanHeader`) straight into the array that is used. `UsageError` if it is too large or ends
    early."""
    try:
        length = header_length(await content.readexactly(HEAD_BYTES))
        if length > _MAX_HEADER_BYTES:
            raise UsageError("a plan names too many objects")
        header = decode_header(await content.readexactly(length))
        if header.body_bytes > _MAX_PLAN_BYTES:
            raise UsageError(f"the order is too long: {header.body_bytes:,} bytes")
        raw, at = bytearray(header.body_bytes), 0
        while at < len(raw):
            part = await content.readexactly(min(_PLAN_CHUNK_BYTES, len(raw) - at))
            raw[at : at + len(part)] = part
            at += len(part)
    except asyncio.IncompleteReadError as exc:
        raise UsageError("a plan ended early") from exc
    except (KeyError, TypeError, ValueError) as exc:
        if isinstance(exc, DatacacheError):
            raise
        raise UsageError(f"bad request: {exc}") from exc
    return header, np.frombuffer(raw, "<u4").reshape(-1, header.columns)


async def send_pieces(request: web.Request, data: bytes | memoryview) -> web.StreamResponse:
    """Send a large block in pieces, each when the reader has taken the one before: the transport would copy all of it
    and keep it for slow readers. A reader that takes nothing for long is cut off; it asks again."""
    response = web.StreamResponse()
    response.content_type = "application/octet-stream"
    response.content_length = len(data)
    await response.prepare(request)
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(_TAKEN_IN_S) as patience:
            for start in range(0, len(data), PIECE_BYTES):
                await response.write(data[start : start + PIECE_BYTES])
                patience.reschedule(now() + _TAKEN_IN_S)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"a reader took nothing of its answer for {_TAKEN_IN_S:g} s") from None
    await response.write_eof()
    return response


@web.middleware
async def answer_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Send what a handler returns or raises."""
    try:
        answer = await handler(request)
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)
    except DatacacheError as exc:
        error = exc
    except web.HTTPException:
        raise
    except Exception as exc:  # a defect of ours, whatever was asked
        if isinstance(exc, ConnectionError) and (request.transport is None or request.transport.is_closing()):
            return web.Response()  # the reader went away. This goes nowhere; aiohttp would log what is raised.
        log.exception("%s %s", request.method, request.path)
        error = DaemonError(
            f"the daemon failed: {type(exc).__name__}: {exc}", hint="This is a defect; the daemon's log says where."
        )
    status, body = wire.encode_error(error)
    return web.json_response(body, status=status)
