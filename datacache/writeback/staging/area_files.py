"""What a staging area says of itself, in two small files: `area.json` (what it is) and `owner.json` (whose it is); and
what all that works in an area needs: durable names, and errors that say what to do.

Used by `staging`, `files` and their parts. No state, any thread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from datacache.core.disk import replace_file, sync_folder, write_all
from datacache.core.errors import StagingError, StagingFullError

FORMAT_VERSION = 1
AREA, OWNER = "area.json", "owner.json"
FULL = (errno.ENOSPC, errno.EDQUOT)
ELSEWHERE = "Set DATACACHE_STAGING to a folder on durable storage that you can write to."


class Owner(NamedTuple):
    """Who works on an area, as it wrote itself."""

    host: str
    pid: int
    boot_id: str
    since: float
    """Seconds since the epoch."""
    who: str
    """The mount point, or whatever else it called itself."""
    token: str
    """Random, another one for each time an area is opened."""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(self.since))
        return f"{self.who} on {self.host} (pid {self.pid}, since {since})"


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """What the file system refuses becomes a `StagingError`."""
    try:
        yield
    except StagingError:
        raise
    except OSError as exc:
        at = f" ({exc.filename})" if exc.filename and str(exc.filename) != str(path) else ""
        hint = ELSEWHERE
        if exc.errno == errno.ENOENT:
            hint = "The folder it lies in must exist: is its file system mounted? " + ELSEWHERE
        elif exc.errno in FULL:
            hint = "Free some room on its file system. " + ELSEWHERE
        raise StagingError(f"the staging folder {path} cannot be used: {exc.strerror}{at}", hint=hint) from exc


@contextlib.contextmanager
def reaching(folder: Path, what: str) -> Iterator[None]:
    """What the file system refuses while an area is in use becomes a `StagingError`; but a file that is there already
    (`FileExistsError`) is the caller's affair."""
    try:
        yield
    except (StagingError, FileExistsError):
        raise
    except OSError as exc:
        raise unreachable(folder, what, exc) from exc


def unreachable(folder: Path, what: str, exc: OSError) -> StagingError:
    """The error for what cannot be done in a folder of an area; `errno` is the cause's."""
    if exc.errno in FULL:
        return StagingFullError(
            f"the file system of the staging area {folder} is full: {exc.strerror}",
            hint="Free some room there. Room also comes free as files are uploaded: see dsctl status.",
        )
    error = StagingError(f"the staging area {folder} cannot be {what}: {exc.strerror}", hint="See to its file system.")
    error.errno = exc.errno
    return error


def make_folder(path: Path) -> None:
    """Make a folder, its name durable; one that is there is fine, anything else is not."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        return
    sync_folder(path.parent)


def keep_private(folder: Path) -> None:
    """In a root that everybody may write to, somebody else may have made the folder, to read along."""
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


class Area(NamedTuple):
    """What an area is."""

    url: str
    id: str
    endpoint: str | None
    """Of the bucket's server; '' for the one that the URL alone says. None: it was made before this was noted."""


def read_area(folder: Path) -> Area:
    """What an area says of itself. `FileNotFoundError` if it was never made."""
    try:
        table = json.loads((folder / AREA).read_bytes())
        version = table["format"]
        if version == FORMAT_VERSION:
            url, area_id = table["bucket_url"], table["id"]
            endpoint = table.get("endpoint")
            known = isinstance(url, str) and isinstance(area_id, str) and isinstance(endpoint, str | None)
            if known and re.fullmatch("[0-9a-f]{8,}", area_id):
                return Area(url, area_id, endpoint)
            raise ValueError("no URL or no id")
    except (ValueError, TypeError, KeyError) as exc:
        raise damaged(folder, "it cannot be understood") from exc
    raise StagingError(
        f"the staging area {folder} has format {str(version)[:20]}; this version of datacache knows {FORMAT_VERSION}",
        hint="Upload what is in it with the version that made it, or set DATACACHE_STAGING to another folder.",
    )


def damaged(folder: Path, how: str) -> StagingError:
    return StagingError(
        f"the staging area {folder} is damaged: {AREA}: {how}",
        hint=f"Put {folder / AREA} back from a copy. Or move the folder away to begin with an empty area: what was "
        "not uploaded stays in the moved one.",
    )


def read_owner(folder: Path) -> Owner | None:
    """None if it makes no sense. `FileNotFoundError` if nobody says to be the owner."""
    try:
        table = json.loads((folder / OWNER).read_bytes())
        return Owner(
            host=str(table["host"]),
            pid=int(table["pid"]),
            boot_id=str(table["boot_id"]),
            since=float(table["since"]),
            who=str(table["who"]),
            token=str(table["token"]),
        )
    except (ValueError, TypeError, KeyError):
        return None


def write_owner(folder: Path, owner: Owner, *, ballast: Path) -> None:
    """Say whose it is, durably. Also on a disk that is full to the last block, or what is in the area could never be
    uploaded and make room: over the last owner then, and else with the journal's ballast given up."""
    path, table = folder / OWNER, owner._asdict()
    try:
        write_json(path, table)
    except OSError as exc:
        if exc.errno not in FULL:
            raise
        try:
            _write_over(path, json.dumps(table).encode())  # who reads half of it reads that it makes no sense
        except OSError as exc:
            if exc.errno not in (*FULL, errno.ENOENT):
                raise
            ballast.unlink(missing_ok=True)
            write_json(path, table)


def _write_over(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_all(fd, data, 0)
        os.ftruncate(fd, len(data))
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, table: dict[str, Any]) -> None:
    """Durable and as a whole: after a crash the old one is there, or the new one."""
    replace_file(path, json.dumps(table, indent=1).encode())
