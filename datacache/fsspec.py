"""`datacache://name@ref/path` for fsspec: read-only, so that pandas, pyarrow, tf.data and the like read snapshots.

Registered through the package's entry point; `fsspec.open("datacache://mask@v3/images/000001.jpg")` just works. The
same guarantees as `Snapshot`, which does the reading.
"""

from __future__ import annotations

from typing import Any

from fsspec.spec import AbstractFileSystem

from datacache.api import open_snapshot
from datacache.core.errors import UsageError
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings


class DatacacheFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """All snapshots of a catalog as one tree: `name@ref/path`. Raises `core.errors`, which inherit the builtins."""

    protocol = "datacache"
    root_marker = ""

    def __init__(self, settings: Settings | None = None, **storage_options: Any) -> None:
        super().__init__(settings=settings, **storage_options)
        self._settings = settings
        self._snapshots: dict[str, Snapshot] = {}

    def _split(self, path: str) -> tuple[Snapshot, str]:
        """A dataset's name may hold slashes: the reference ends at the first slash behind the '@'."""
        path = self._strip_protocol(path)
        name, at, rest = path.partition("@")
        if not at:
            raise UsageError(f"{path!r} names no snapshot", hint="Write datacache://NAME@REF/path.")
        version, _, inner = rest.partition("/")
        ref = f"{name}@{version}"
        if ref not in self._snapshots:
            self._snapshots[ref] = open_snapshot(ref, self._settings)
        return self._snapshots[ref], inner

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Size, type, mtime (seconds) and ETag of a path."""
        snapshot, inner = self._split(path)
        name = self._strip_protocol(path)
        stat = snapshot.stat(inner.rstrip("/"))
        kind = "directory" if stat.is_dir else "file"
        return {
            "name": name,
            "size": stat.size_bytes,
            "type": kind,
            "mtime": stat.mtime_ns / 1e9,
            "ETag": stat.etag,
        }

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """A directory's children; a file's own entry."""
        snapshot, inner = self._split(path)
        base = self._strip_protocol(path).rstrip("/")
        inner = inner.rstrip("/")
        if inner and not snapshot.stat(inner).is_dir:
            return [self.info(path)] if detail else [base]
        out = []
        for stat in snapshot.scan(inner):
            name = f"{base}/{stat.path[len(inner) :].lstrip('/')}"
            kind = "directory" if stat.is_dir else "file"
            out.append({"name": name, "size": stat.size_bytes, "type": kind, "mtime": stat.mtime_ns / 1e9})
        return out if detail else [item["name"] for item in out]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """A file's bytes, or a slice of them."""
        snapshot, inner = self._split(path)
        if start is None and end is None:
            return snapshot.read(inner)
        first, last, _step = slice(start, end).indices(snapshot.stat(inner).size_bytes)
        return snapshot.read_range(inner, first, last)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "rb":
            raise UsageError(f"snapshots are read-only: {path!r} cannot be opened with mode {mode!r}")
        snapshot, inner = self._split(path)
        return snapshot.open(inner)
