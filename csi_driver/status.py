"""Errors as gRPC status codes: the only place that knows which error gets which.

The codes are those the CSI specification asks for. `RequestError` is for what is wrong with a request itself; errors of
`datacache` keep their own words, and their hint follows, as an Event on the PVC shows nothing else.
"""

from __future__ import annotations

import errno
from functools import partial

import grpc

from datacache.core import errors


class RequestError(Exception):
    """A refused request: the code and the words of its answer."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


_CODE = grpc.StatusCode
# Each of these takes the words of an answer and returns its error.
invalid = partial(RequestError, _CODE.INVALID_ARGUMENT)
denied = partial(RequestError, _CODE.PERMISSION_DENIED)
precondition = partial(RequestError, _CODE.FAILED_PRECONDITION)
unavailable = partial(RequestError, _CODE.UNAVAILABLE)
unauthenticated = partial(RequestError, _CODE.UNAUTHENTICATED)
not_found = partial(RequestError, _CODE.NOT_FOUND)
exists = partial(RequestError, _CODE.ALREADY_EXISTS)
out_of_range = partial(RequestError, _CODE.OUT_OF_RANGE)
aborted = partial(RequestError, _CODE.ABORTED)

_CODES: tuple[tuple[type[errors.DatacacheError], grpc.StatusCode], ...] = (
    # The first that fits counts: classes before those they are made from.
    (errors.AccessDeniedError, _CODE.PERMISSION_DENIED),
    (errors.AddressRefusedError, _CODE.PERMISSION_DENIED),
    (errors.StoreAccessError, _CODE.UNAUTHENTICATED),
    (errors.StagingBusyError, _CODE.FAILED_PRECONDITION),
    (errors.StagingFullError, _CODE.RESOURCE_EXHAUSTED),
    (errors.SnapshotNotFoundError, _CODE.INVALID_ARGUMENT),
    (errors.UsageError, _CODE.INVALID_ARGUMENT),
    (errors.SettingsError, _CODE.FAILED_PRECONDITION),
    (errors.CatalogUnavailableError, _CODE.UNAVAILABLE),
    (errors.StoreUnavailableError, _CODE.UNAVAILABLE),
    (errors.DaemonUnavailableError, _CODE.UNAVAILABLE),
)


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Return the code and the words for an error."""
    if isinstance(error, RequestError):
        return error.code, error.message
    if isinstance(error, errors.DatacacheError):
        kind_of_mount = getattr(errors, error.kind, None) if isinstance(error, errors.MountError) else None
        # What the mount's process ended with.
        raised = kind_of_mount if isinstance(kind_of_mount, type) else type(error)
        code = next((code for kind, code in _CODES if issubclass(raised, kind)), grpc.StatusCode.INTERNAL)
        return code, f"{error.message}. {error.hint}".removesuffix(". ") if error.hint else error.message
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
