"""The errnos of requests that a read-write mount refuses, and which of them `dsctl status` tells of. For any skin."""

from __future__ import annotations

import errno
import logging

from datacache.core.errors import DatacacheError
from fuse_mount.bucket.fs.bucket_fs import BucketFs
from fuse_mount.errno_map import FailureLog, errno_of

_log = logging.getLogger("fuse_mount")
_TOLD = frozenset((errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT))
"""Errnos of `BucketFs` that no program brings about by what it asks for."""
_BY_HANDLE = frozenset(("read", "write", "fallocate", "copy", "flush", "fsync", "release"))
"""Requests of open files: ESTALE of these reaches a program, and so does that of a `setattr` with a handle, which has
no path. For all others the kernel looks the path up again, once: if the object is replaced all the time, the program
gets the second ESTALE, and status does not tell it."""
_LOST_HINT = "Write the file again. `lost` in dsctl status says how much of it, until dsctl flush --forget-lost."


class Refusals:
    """Turns errors into errnos. Any thread."""

    def __init__(self, fs: BucketFs, failures: FailureLog) -> None:
        """`failures` gets what those see as an errno who read and write."""
        self._fs, self._failures = fs, failures

    def errno_of(self, operation: str, exc: Exception, *, has_handle: bool = False) -> int:
        """Return the errno of a request's error. `has_handle`: it is of an open file though others like it are not, as
        ftruncate(2) and fchmod(2) are."""
        if isinstance(exc, DatacacheError):
            self._failures.report(_about(operation, exc), exc)
            return errno_of(exc)
        if isinstance(exc, OSError):
            is_told = exc.errno in _TOLD and (exc.errno != errno.ESTALE or has_handle or operation in _BY_HANDLE)
            if is_told:
                self._failures.report(_about(operation, exc), exc, exc.errno)
            return exc.errno or errno.EIO
        _log.error("%s failed", operation, exc_info=exc)
        return errno.EIO

    def errno_of_write(self, handle: int, exc: DatacacheError | OSError, n_bytes: int) -> int:
        """Return the errno of a write of so many bytes that failed, and note what is lost. Waits for the disk."""
        key = self._fs.handles.spoil(handle, exc, n_bytes)
        number = errno_of(exc) if isinstance(exc, DatacacheError) else exc.errno or errno.EIO
        # The kernel has answered its writer already, and close(2) knows ENOSPC and EIO only.
        told = errno.ENOSPC if number == errno.ENOSPC else errno.EIO
        if key is not None:  # the kernel sends many writes at a time: one file, one error
            self._failures.report(f"write {key}", exc, told, _LOST_HINT)
        self._fs.engine.losses.save()
        return number


def _about(operation: str, exc: BaseException) -> str:
    """Return what to call a failure by: what it is about, if it says so, and what was asked for."""
    names = (getattr(exc, name, "") for name in ("path", "key", "url", "filename"))
    about = next((name for name in names if name), "")
    return f"{operation} {about}".rstrip()
