"""Errors as gRPC status codes: the only place that knows which error gets which.

The codes are those the CSI specification asks for. `RequestError` is for what is wrong with a request itself; errors of
`datacache` keep their own words, and their hint follows, as an Event on the PVC shows nothing else.
"""

from __future__ import annotations

import errno

import grpc

from datacache.core import errors

_CODES: tuple[tuple[type[errors.DatacacheError], grpc.StatusCode], ...] = (
    # The first that fits counts: classes before those they are made from.
    (errors.AccessDeniedError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.AddressRefusedError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.StoreAccessError, grpc.StatusCode.UNAUTHENTICATED),
    (errors.StagingBusyError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.StagingFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.SnapshotNotFoundError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.SettingsError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.CatalogUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.StoreUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.DaemonUnavailableError, grpc.StatusCode.UNAVAILABLE),
)


class RequestError(Exception):
    """A refused request: the code and the words of its answer."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def invalid(message: str) -> RequestError:
    """Return the error of a request that is wrong in itself."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, message)


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
