"""The messages between client and daemon: requests as JSON, blocks as bytes, errors by the name of their class. Any
thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from datacache.core import errors
from datacache.core.errors import DaemonError, DatacacheError
from datacache.core.ids import ObjectRef
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


def store_fingerprint() -> str:
    """Return a short hash of the variables that tell how to reach stores and that clients do not send to the daemon. If
    a daemon has other ones than its client it may be denied access, and the client can name the reason. It reveals no
    values."""
    names = sorted(n for n in os.environ if n.startswith(("AWS_", "GOOGLE_", "AZURE_")) and not is_told(n))
    text = "\0".join(f"{n}={os.environ[n]}" for n in names)
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
