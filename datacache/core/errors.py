"""The one hierarchy of errors.

A subclass exists for each thing a caller can act on; where a builtin says the same (`FileNotFoundError`,
`PermissionError`, …) it is inherited too. `hint` says what to do next and is printed after the message by `dsctl`.
Exit codes and errnos are mapped at the edges (`dataset_cli/main.py`, `fuse_mount/errno_map.py`), never here.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any


class DatacacheError(Exception):
    """Root of every error this project raises on purpose."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def hint(self) -> str:
        """The next step for the user; '' for none. A traceback shows it, too."""
        return self._hint

    @hint.setter
    def hint(self, text: str) -> None:
        self._hint = text
        self.__notes__ = [f"hint: {text}"] if text else []

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.__dict__.copy()))


def _rebuild(kind: type[DatacacheError], message: str, state: dict[str, object]) -> DatacacheError:
    """Unpickle an error without calling its own `__init__`, whose arguments differ from class to class."""
    error = kind.__new__(kind, message)
    error.__dict__.update(state)
    error.args = (message,)
    return error


class SettingsError(DatacacheError, ValueError):
    """A setting, or a line of the configuration file, is wrong."""


class UsageError(DatacacheError, ValueError):
    """The caller asked for something that cannot be meant (a bad URL, a bad ref, a bad name)."""


# --- object stores -------------------------------------------------------------------------------------------------


class StoreError(DatacacheError, OSError):
    """An object store refused or failed. `url` names the object or the bucket."""

    def __init__(self, message: str, *, url: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.url = url


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """The object (or the bucket) is not there."""


class ObjectChangedError(StoreError):
    """The object is not the one the snapshot recorded: another ETag, version or size."""


class ChecksumError(StoreError):
    """The object came with other bytes than the store's checksum of it is of. `checksum` is that ("crc32c 1a2b…")."""

    def __init__(self, message: str, *, url: str = "", checksum: str = "", hint: str = "") -> None:
        super().__init__(message, url=url, hint=hint)
        self.checksum = checksum


class StoreAccessError(StoreError, PermissionError):
    """Credentials are missing, wrong, or do not allow this."""


class AddressRefusedError(StoreAccessError):
    """The store lies at an address of this machine or of a private network, which whoever named it may not choose."""


class SourceNotAllowedError(StoreAccessError):
    """The object lies in a store that data sets may not be read from here (`DATACACHE_SOURCES`)."""


class StoreUnavailableError(StoreError, ConnectionError):
    """The store did not answer properly (refused, reset, 5xx, timeout). The only kind that is worth a retry."""


class StoreUnreachableError(StoreUnavailableError):
    """Nobody was met at the store's address: the connection was refused, or the host's name is unknown."""


class NoMarkersError(StoreError):
    """The store keeps no objects that stand for folders."""


# --- catalog and manifests -----------------------------------------------------------------------------------------


class CatalogError(DatacacheError):
    """The catalog database refused or failed."""


class CatalogUnavailableError(CatalogError, ConnectionError):
    """The catalog database cannot be reached or opened."""


class SnapshotNotFoundError(CatalogError, LookupError):
    """No such dataset, tag or snapshot. `ref` is what was asked for, `ambiguous` whether it names several."""

    def __init__(self, message: str, *, ref: str = "", ambiguous: bool = False, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.ref, self.ambiguous = ref, ambiguous


class AccessDeniedError(CatalogError, PermissionError):
    """A data set is not open to whoever asks for it."""


class TagExistsError(CatalogError):
    """The tag names another snapshot already."""


class OtherKindError(CatalogError):
    """The snapshot would make a dataset something else than it is, which is done only when asked for."""


class CorruptManifestError(CatalogError):
    """A manifest blob is missing or is not what its id says."""


class StoredObjectsGoneError(CatalogError):
    """Objects that a new snapshot needs went from the storage before it was committed."""


class DraftConflictError(CatalogError):
    """Somebody else has the marks of this image, or they are not what the caller has read: nothing was changed.
    `author` saved last, at `saved_at` (Unix time); '' and 0 where there is no draft any more."""

    def __init__(self, message: str, *, author: str = "", saved_at: float = 0.0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.author = author
        self.saved_at = saved_at


class SnapshotClosedError(DatacacheError, ValueError):
    """The snapshot was closed, and is read."""


class PathNotFoundError(DatacacheError, FileNotFoundError):
    """The snapshot has no such file. `path` and `ref` name both."""

    def __init__(self, message: str, *, path: str = "", ref: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self.ref = ref


# --- annotations and images ----------------------------------------------------------------------------------------


class AnnotationError(DatacacheError, ValueError):
    """An annotation or an image cannot be used at all. `code` is the problem's (`annotations/model.py`), `file` and
    `line` say where (0: a line makes no sense). All three are left out where PyTorch has brought it from a worker."""

    def __init__(self, message: str, *, code: str = "", file: str = "", line: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.file = file
        self.line = line


class BrokenImageError(DatacacheError, ValueError):
    """These bytes are no image that can be used: no known format, or its header is damaged or cut short."""


# --- annotations and conversion -------------------------------------------------------------------------------------


class ConversionError(DatacacheError):
    """A conversion found problems that it was told not to pass over. `problems` are all of them."""

    def __init__(self, message: str, *, problems: Sequence[Any] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


# --- models ----------------------------------------------------------------------------------------------------------


class PredictError(DatacacheError):
    """A model failed, or a process that ran it ended; nothing was committed. `images` are the paths of the batch that
    it was given, where it was one."""

    def __init__(self, message: str, *, images: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.images = tuple(images)


# --- imports ---------------------------------------------------------------------------------------------------------


class ImportFailedError(DatacacheError):
    """An import cannot be taken as it is (lines that failed, an archive that is damaged or unsafe), and
    nothing was committed. `failures` says how many lines."""

    def __init__(self, message: str, *, failures: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.failures = failures


# --- shards and task queues ------------------------------------------------------------------------------------------


class ShardError(DatacacheError):
    """A shard is missing, cut short, damaged, or not the one its index is of. `shard` and `sample` (a key, '' where it
    is the whole shard) say where."""

    def __init__(self, message: str, *, shard: str = "", sample: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.shard = shard
        self.sample = sample


class WeightsError(DatacacheError, ValueError):
    """A file of weights is cut short, damaged, or says of itself what cannot be. `file` is its name; the message names
    the place in it, too."""

    def __init__(self, message: str, *, file: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.file = file


class TasksError(DatacacheError):
    """A queue of training tasks cannot do what was asked: it is not there, or it is another one's."""


class LeaseLostError(TasksError):
    """The task was leased to another worker since: what this one reports counts for nothing. `task` is its number."""

    def __init__(self, message: str, *, task: int = -1, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.task = task


# --- the node: tiers, daemon, mounts -------------------------------------------------------------------------------


class CacheError(DatacacheError):
    """A local tier cannot be used (full disk, bad permissions, another version)."""


class DaemonError(DatacacheError):
    """The cache daemon refused or failed."""


class DaemonRunningError(DaemonError):
    """Another daemon already serves this home."""


class DaemonUnavailableError(DaemonError, ConnectionError):
    """No daemon answers and none could be started."""


class DaemonSilentError(DaemonUnavailableError):
    """A daemon is there and does not answer: it is stopped, or it hangs."""


class NodeTakenError(DatacacheError):
    """Another living node of the cluster has this node's id. `address` is that node's."""

    def __init__(self, message: str, *, address: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.address = address


class MountError(DatacacheError, OSError):
    """A mount, unmount or hand-over failed."""

    kind = ""
    """The class of the error that the mount's process ended with, where it was one of these."""


# --- the write path ------------------------------------------------------------------------------------------------


class StagingError(DatacacheError, OSError):
    """The staging area of a read-write mount cannot be used: another bucket's, damaged, no permission."""


class StagingBusyError(StagingError):
    """Another mount works on this staging area."""


class StagingFullError(StagingError):
    """There was no room for what was to be written, and none came in time. `errno` is ENOSPC."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno = errno.ENOSPC


class QuotaError(DatacacheError, OSError):
    """There would be more in the bucket than the mount's quota allows. `errno` is ENOSPC."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno = errno.ENOSPC


class UploadError(DatacacheError):
    """Acknowledged files are not in the bucket (yet). `failures` says why, for each key that was tried."""

    def __init__(self, message: str, *, failures: Sequence[Any] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.failures = tuple(failures)


# --- folders -------------------------------------------------------------------------------------------------------


class ExportError(DatacacheError, OSError):
    """The folder of an export cannot be written (full disk, no permission, something in the way)."""
