"""Export: a snapshot's files as an ordinary folder, for tools that want one.

Used by `api.export_snapshot`. `export_folder` keeps the folder safe, `export_file` makes one file; here is the flow:
the folder is looked at, threads make the files (and so overlap what is fetched), and it is left clean. An export
that was killed can be run again: files have their names only when they are whole, and those that are there are kept, if
the folder says that they are of this snapshot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datacache.manifest.model import Entry
from datacache.reader.export.file import FileMaker
from datacache.reader.export.folder import Folder, local_errors
from datacache.reader.snapshot import Snapshot
from datacache.store.sources import SourceRules

THREADS = 16
_BATCH_FILES, _BATCH_BYTES = 16, 4 * 2**20
_PROGRESS_EVERY_S = 0.1
Batch = list[tuple[int, Entry]]
"""Rows and entries of one directory."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export."""

    ref: str
    """`dataset@id`, the whole id."""
    directory: Path
    files: int
    bytes: int
    kept: int
    """Files that were there already."""
    cloned: int
    """Files that share their blocks with the bucket's (reflinks)."""
    linked: int
    """Files that are the bucket's (hard links)."""
    copied: int
    left_out: tuple[str, ...]
    """Paths that no folder can hold."""

    def as_json(self) -> dict[str, Any]:
        """Return it for machines."""
        return vars(self) | {"directory": str(self.directory), "left_out": list(self.left_out)}


def export(
    snapshot: Snapshot,
    directory: Path | str,
    *,
    link: str = "auto",
    threads: int = THREADS,
    rules: SourceRules | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write all files of a snapshot into a folder, which is made, is empty, or holds (a part of) the same export.

    `rules` say which files of this machine may be linked or copied. `progress(files, bytes)` is called from this
    thread. Nothing is waited for to reach the disk. Raises `UsageError`, `ExportError`, and the errors of reading; the
    folder then holds whole files only, and the export can be run again.
    """
    maker = FileMaker(snapshot, link, rules)
    folder = Folder(Path(os.path.abspath(directory)), snapshot.rows.tree, snapshot.ref, maker.is_there)
    left_out: list[str] = []
    complete = False
    try:
        with ThreadPoolExecutor(threads, "export") as pool:
            pending: set[Future[None]] = set()
            try:
                for prefix, batch in _batches(snapshot, left_out):
                    pending.add(pool.submit(_make, maker, folder, prefix, batch))
                    while len(pending) >= 2 * threads:
                        pending = _settle(pending, maker, progress)
                while pending:
                    pending = _settle(pending, maker, progress)
            except BaseException:
                maker.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        complete = True
    finally:
        folder.finish(complete=complete)
    made = {kind: maker.made[kind] for kind in ("kept", "cloned", "linked", "copied")}
    return Exported(
        ref=snapshot.ref,
        directory=folder.path,
        files=sum(made.values()),
        bytes=maker.bytes_done,
        left_out=tuple(left_out),
        **made,
    )


def _settle(
    pending: set[Future[None]], maker: FileMaker, progress: Callable[[int, int], None] | None
) -> set[Future[None]]:
    """Wait until one is done, or a moment; return those that are left. Raises what one raised."""
    done, pending = wait(pending, _PROGRESS_EVERY_S, FIRST_COMPLETED)
    for future in done:
        future.result()
    if progress is not None:
        progress(sum(maker.made.values()), maker.bytes_done)
    return pending


def _make(maker: FileMaker, folder: Folder, prefix: bytes, batch: Batch) -> None:
    with local_errors(folder.path / os.fsdecode(prefix), "the folder cannot be made"):
        directory = folder.directory(prefix)
    try:
        for row, entry in batch:
            maker.make(folder, directory, row, entry)
    finally:
        os.close(directory)


def _batches(snapshot: Snapshot, left_out: list[str]) -> Iterator[tuple[bytes, Batch]]:
    """Yield directories, and some of the files in each; none for a directory that is only there."""
    hidden = snapshot.manifest.root.hidden
    batch: Batch = []
    current, size_bytes = b"", 0
    for row, entry in enumerate(snapshot.manifest.entries()):
        parts = entry.path.removesuffix(b"/").split(b"/")
        fits = b"\0" not in entry.path and all(part not in (b"", b".", b"..") and len(part) <= 255 for part in parts)
        if entry.path in hidden or not fits:  # whatever the manifest says of it
            left_out.append(os.fsdecode(entry.path))
            continue
        prefix = entry.path[: entry.path.rfind(b"/") + 1]
        if batch and (prefix != current or len(batch) >= _BATCH_FILES or size_bytes >= _BATCH_BYTES):
            yield current, batch
            batch, size_bytes = [], 0
        current = prefix
        if entry.path.endswith(b"/"):
            yield entry.path, []
            continue
        batch.append((row, entry))
        size_bytes += entry.size_bytes
    if batch:
        yield current, batch
