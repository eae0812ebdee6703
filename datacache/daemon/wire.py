"""The messages between client and daemon: requests as JSON, blocks as bytes, errors by the name of their class.

`fields_of` checks each field of a request when it is taken: `UsageError` names the wrong one. Any thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from aiohttp import web

from datacache.core import errors
from datacache.core.errors import DaemonError, DatacacheError, UsageError
from datacache.core.ids import MAX_READABLE_BYTES, ObjectRef, block_count
from datacache.core.ipc import parse_object
from datacache.store.credentials import is_told

_STATUS: dict[type[DatacacheError], int] = {
    errors.ObjectNotFoundError: 404,
    errors.SnapshotNotFoundError: 404,
    errors.ObjectChangedError: 409,
    errors.StoreAccessError: 403,
    errors.StoreUnavailableError: 503,
    errors.CatalogUnavailableError: 503,
    errors.UsageError: 400,
}
_ATTRIBUTES = ("url", "ref", "path", "checksum")


def encode_ref(ref: ObjectRef) -> list[Any]:
    """Return an object reference as JSON."""
    return list(ref) if ref.root >= 0 else list(ref[:5])


def decode_ref(values: list[Any]) -> ObjectRef:
    """Return the object reference of `encode_ref`; `ValueError` or `TypeError` if it is none."""
    ref = ObjectRef(*values)
    kinds = [type(value) for value in ref]
    if kinds != [str, str, int, str, str, int]:
        raise ValueError("not an object reference")
    return ref


def encode_error(exc: DatacacheError) -> tuple[int, dict[str, str]]:
    """Return HTTP status and body for an error."""
    status = next((code for kind, code in _STATUS.items() if isinstance(exc, kind)), 500)
    body = {"error": type(exc).__name__, "message": str(exc), "hint": exc.hint}
    for name in _ATTRIBUTES:
        if hasattr(exc, name):
            body[name] = str(getattr(exc, name))
    return status, body


def decode_error(body: Mapping[str, Any]) -> DatacacheError:
    """Return the error of `encode_error`, of the same class."""
    kind = getattr(errors, str(body.get("error")), DaemonError)
    if not (isinstance(kind, type) and issubclass(kind, DatacacheError)):
        kind = DaemonError
    more = {name: body[name] for name in _ATTRIBUTES if name in body}
    message, hint = str(body.get("message", "the daemon failed")), str(body.get("hint", ""))
    return kind(message, hint=hint, **more)


def store_fingerprint(environ: Mapping[str, str] | None = None) -> str:
    """Return a short hash of the variables that tell how to reach stores and that clients do not send to the daemon. If
    a daemon has other ones than its client it may be denied access, and the client can name the reason. It reveals no
    values."""
    environ = os.environ if environ is None else environ
    names = sorted(n for n in environ if n.startswith(("AWS_", "GOOGLE_", "AZURE_")) and not is_told(n))
    text = "\0".join(f"{n}={environ[n]}" for n in names)
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


_MAX_TEXT = 4096


class Fields:
    """The JSON object of a request."""

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
            ref = decode_ref(values if isinstance(values, list) else [])
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
