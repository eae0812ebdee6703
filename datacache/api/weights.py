"""Open files of weights, wherever they are: in a snapshot, behind a URL, on this machine, below one of our mounts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from datacache.api.opening import open_object, open_snapshot
from datacache.core.errors import SnapshotNotFoundError, UsageError
from datacache.core.mounts import mounts
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings, load_settings

if TYPE_CHECKING:
    from datacache.models.weights import WeightsFile

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_MOUNTED = re.compile(r"datacache:(.+@[0-9a-f]+)")
"""The source of a snapshot's mount in /proc/self/mountinfo."""


@contextmanager
def open_weights(where: str | PathLike[str], settings: Settings | None = None) -> Iterator[WeightsFile]:
    """Open a file to load tensors from: `NAME@REF/path`, `datacache://NAME@REF/path`, the URL of an object, or a path.

    A path below a mount of a snapshot leads to the snapshot, which is read without the mount. Text with an @ in its
    first part names a snapshot: for a file of such a name write `./NAME@…`. Raises the errors of what it is:
    `SnapshotNotFoundError`, `PathNotFoundError`, the store's errors, `OSError`.
    """
    from datacache.models.weights import LocalWeights, SnapshotWeights

    settings = settings or load_settings()
    with _found(where, settings) as place:
        if isinstance(place, _InSnapshot):
            yield SnapshotWeights(*place[:2], name=place.name)
            return
        mounted = _behind_a_mount(place)
        if mounted is not None:
            snapshot = None
            with suppress(SnapshotNotFoundError):  # another catalog's: its mount gives the bytes
                snapshot = open_snapshot(mounted[0], settings)
            if snapshot is not None:
                with snapshot:
                    yield SnapshotWeights(snapshot, mounted[1])
                return
        with closing(LocalWeights(place)) as file:
            yield file


@contextmanager
def weights_path(where: str | PathLike[str], settings: Settings) -> Iterator[Path]:
    """Give weights, named as for `open_weights`, a path on this machine for as long as the context lasts.

    A path stays as it is, and need not exist. Raises `CacheError` where a file has no room here, else as
    `open_weights`.
    """
    from datacache.reader.local_file import LocalFiles

    with _found(where, settings) as place:
        if isinstance(place, _InSnapshot):
            row = place.snapshot.row_of(place.path)
            with LocalFiles(place.snapshot, settings).open_row(row) as file:
                yield file.path
        else:
            yield Path(place)


def split_weights(where: str) -> tuple[str, str] | None:
    """Return the reference and the path where text names a file of a snapshot, None where it names another place.
    `UsageError` for half of a name."""
    scheme = _SCHEME.match(where)
    if scheme is not None:
        return _split_ref(where[scheme.end() :]) if scheme[1].lower() == "datacache" else None
    return _split_ref(where) if "@" in where and not where.startswith((".", "/", "~")) else None


class _InSnapshot(NamedTuple):
    """A file of a snapshot, or of a listing of a URL. `name` is the URL, '' for a snapshot."""

    snapshot: Snapshot
    path: str
    name: str


@contextmanager
def _found(where: str | PathLike[str], settings: Settings) -> Iterator[_InSnapshot | str]:
    """Find out what names weights. Yields a file of a snapshot, open until the context ends, or a path."""
    text = os.fspath(where)
    scheme = _SCHEME.match(text) if isinstance(where, str) else None
    if isinstance(where, str) and (named := split_weights(where)) is not None:
        ref, path = named
        with open_snapshot(ref, settings) as snapshot:
            yield _InSnapshot(snapshot, path, "")
    elif scheme and scheme[1].lower() != "file":
        listed, path = open_object(text, settings)
        with listed:
            yield _InSnapshot(listed, path, text)
    elif scheme:
        from datacache.store.urls import split_object_url

        yield "/" + split_object_url(text)[1]
    else:
        yield os.path.expanduser(text)


def _split_ref(text: str) -> tuple[str, str]:
    """Split `NAME@REF/path`: a name may have slashes, a reference ends at the first one."""
    name, _, rest = text.partition("@")
    version, _, path = rest.partition("/")
    if not (name and version and path):
        raise UsageError(f"{text!r} names no file of a snapshot", hint="Write NAME@REF/path, or ./… for a local file.")
    return f"{name}@{version}", path


def _behind_a_mount(path: str) -> tuple[str, str] | None:
    """Return the snapshot behind a path, and the path in it, if it lies below a mount of one."""
    path = os.path.realpath(path)
    above = [mount for mount in mounts() if path.startswith(mount.mountpoint.rstrip("/") + "/")]
    # Of those on the same folder the last one lies on top.
    found = max(reversed(above), key=lambda mount: len(mount.mountpoint), default=None)
    match = _MOUNTED.fullmatch(found.source) if found and found.kind == "fuse.datacache" else None
    if not found or not match:
        return None
    return match[1], os.path.join(found.root, path[len(found.mountpoint.rstrip("/")) + 1 :]).lstrip("/")
