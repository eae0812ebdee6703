"""Staging areas: the folders in which writes wait, durable, until they are in the bucket. One area for each bucket URL
and, where the URL does not say which server is meant, for each endpoint.

    <root>/<readable name>-<hash of the bucket's URL (and the endpoint)>/
        area.json    format, URL, endpoint and id; written once
        owner.json   the process that works on it: host, pid, boot, mount point, start, a token; gone after a clean end
        lock         held with flock(2) by the owner for as long as it lives; never deleted
        journal/     `journal.Journal`
        data/        `files.StagedFiles`

Used by what composes a live bucket, and by status and flush (`areas()`). The root may be shared by several nodes.
What keeps two of them from one area is flock(2) alone: CephFS has it between clients, NFS since Linux 2.6.12 as a lock
of the whole file (flock(2), "NFS details"; a mount with `nolock` or `local_lock` has it within one node only). When an
owner's node dies, the file system gives its lock away after a while, and the next one that opens the area replaces
`owner.json`. Should the former owner not have died, `check()` tells it that the area is not its own any more.

What all that works in an area needs is here, too: durable names, and errors that say what to do. Any thread may call
anything here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from datacache.core import lockfile
from datacache.core.boot import boot_id
from datacache.core.disk import replace_file, sync_folder, write_all
from datacache.core.errors import StagingBusyError, StagingError, StagingFullError
from datacache.store.urls import join_url, split_url
from datacache.writeback.conflicts import CONFLICTS
from datacache.writeback.journal.segments import BALLAST
from datacache.writeback.staging.losses import LOSSES

_LOCK, _JOURNAL, _DATA = "lock", "journal", "data"
_CHECK_EVERY_S = 1.0
_LOCK_TRIES, _LOCK_PAUSE_S = 10, 0.05
"""`areas()` holds a lock for the moment it looks; and a new owner may not have said so in `owner.json` yet."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class AreaInfo(NamedTuple):
    """An area as it is found without opening it."""

    folder: Path
    bucket_url: str
    """'' where `problem` says why it cannot be known."""
    owner: Owner | None
    """The process that works on it, or did when it died. None after a clean end."""
    locked: bool
    """Tells whether the owner lives."""
    problem: str
    endpoint: str | None = None
    """See `Area`."""


class StagingArea:
    """An area that this process owns, from `open()` to `close()`."""

    def __init__(
        self, folder: Path, bucket_url: str, area_id: str, owner: Owner, lock: int, *, is_new: bool = False
    ) -> None:
        self.is_new = is_new
        """Tells whether it was made just now."""
        self.folder = folder
        self.bucket_url = bucket_url
        """In the form of `split_url`, with a trailing slash."""
        self.id = area_id
        """Random hex, made once with the area."""
        self.owner = owner
        self._lock = lock
        self._checked_at_s = time.monotonic()
        self._also_check: Callable[[], object] = lambda: None

    @property
    def journal_folder(self) -> Path:
        """Return where the journal is."""
        return self.folder / _JOURNAL

    @property
    def data_folder(self) -> Path:
        """Return where the data files are."""
        return self.folder / _DATA

    @classmethod
    def open(cls, root: Path, bucket_url: str, *, who: str, endpoint: str = "", area_id: str = "") -> StagingArea:
        """Take a bucket URL's area under `root`; what is not there is made (`root` too, but not its parent). An area
        that was made before endpoints were noted is that of the first endpoint that opens it.

        `StagingBusyError` if somebody else has it, `StagingError` if it cannot be used, `UsageError` for a URL that
        names no place or carries credentials. `who` is shown to others. `area_id` is of a replica; '' for a new one.
        """
        url = join_url(*split_url(bucket_url))
        with refusing(root):
            make_folder(root)
            folder = root / _folder_of(root, url, endpoint)
            make_folder(folder)
            _expect_own(folder, root)
            try:
                if folder.stat().st_mode & 0o077:
                    folder.chmod(0o700)
                lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # if it is empty: nobody else is making the area
                raise
        try:
            _take_lock(lock, folder)
            area_id, is_new = _read_or_make_area(folder, url, endpoint, area_id)
            owner = Owner(socket.gethostname(), os.getpid(), boot_id(), time.time(), who, secrets.token_hex(8))
            with refusing(folder):
                make_folder(folder / _JOURNAL)
                make_folder(folder / _DATA)
                write_owner(folder, owner, ballast=folder / _JOURNAL / BALLAST)
        except BaseException as exc:
            if not isinstance(exc, StagingBusyError):
                _remove_unmade(folder)
            os.close(lock)
            raise
        return cls(folder, url, area_id, owner, lock, is_new=is_new)

    def check(self) -> None:
        """Raise `StagingError` if the area is not this one's any more: taken over after the lock was lost, moved away,
        deleted, or out of reach. Looks at most once a second while all is well, so it may be asked before each write.
        """
        self._also_check()
        if self._lock >= 0 and time.monotonic() - self._checked_at_s < _CHECK_EVERY_S:
            return
        if self._lock < 0:
            raise StagingError(f"the staging area {self.folder} is closed")
        now_s = time.monotonic()
        try:
            # Opened anew, not only stat()ed: NFS asks its server at open(2), and not about what it has cached.
            found = read_owner(self.folder)
            there, mine = os.stat(self.folder / _LOCK), os.fstat(self._lock)
        except FileNotFoundError as exc:
            raise StagingError(
                f"the staging area {self.folder} is gone: {exc.filename} is not there any more",
                hint="If its file system was unmounted or the folder was moved, put it back; then mount again.",
            ) from exc
        except OSError as exc:
            raise StagingError(
                f"the staging area {self.folder} is out of reach: {exc.strerror}", hint="See to its file system."
            ) from exc
        if (
            found is None
            or found.token != self.owner.token
            or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)
        ):
            by = f"by {found}" if found is not None and found.token != self.owner.token else "or replaced"
            raise StagingError(
                f"the staging area {self.folder} was taken over {by}",
                hint="Nothing is written from here any more. What was acknowledged is in the area, and whoever has it "
                "now uploads it. Unmount here.",
            )
        self._checked_at_s = now_s

    def also_check(self, look: Callable[[], object]) -> None:
        """Have `check` call this as well, which raises `StagingError` if the area may not be used."""
        self._also_check = look

    def close(self, *, discard: bool = False) -> None:
        """Give the area back; with `discard` delete it, with all that is in it. A second call does nothing."""
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        try:
            if discard:
                shutil.rmtree(self.folder, ignore_errors=True)
                return
            with contextlib.suppress(OSError):  # gone or out of reach: there is nothing to say good-bye to
                found = read_owner(self.folder)
                if found is not None and found.token == self.owner.token:
                    (self.folder / OWNER).unlink()
        finally:
            os.close(lock)

    def put_aside(self) -> Path:
        """Close it, and rename its folder, durably, so that it is no area any more. Return the new name."""
        aside = self.folder.with_name(f"{self.folder.name}.taken-{int(time.time())}")
        with refusing(self.folder):
            self.folder.rename(aside)
            sync_folder(aside.parent)
        self.close()
        return aside

    def __enter__(self) -> StagingArea:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _expect_own(folder: Path, root: Path) -> None:
    """Raise `StagingError` where another user made the folder, or a link in its place. In a root that everybody may
    write to they would read along, or have this user change a folder elsewhere, or upload what they have put there."""
    trusted = {os.geteuid(), root.stat().st_uid}
    found = {folder.lstat().st_uid, folder.stat().st_uid}
    if not found <= trusted:
        with tempfile.TemporaryFile(dir=root) as made:  # NFS may know this user as another one
            trusted.add(os.fstat(made.fileno()).st_uid)
    if not found <= trusted:
        user = min(found - trusted)
        raise StagingError(
            f"the staging folder {folder} belongs to another user (uid {user})",
            hint="If that user's writes are in it, have them uploaded by that user: dsctl flush. Else delete it.",
        )


def _remove_unmade(folder: Path) -> None:
    """Remove what there is of an area that could not be made, on a full disk say: it would be taken for a damaged one.
    Whatever has something in it stays."""
    if not os.path.lexists(folder / AREA):
        with contextlib.suppress(OSError):
            (folder / f"{AREA}.new").unlink(missing_ok=True)
            for name in (_JOURNAL, _DATA):
                with contextlib.suppress(FileNotFoundError):
                    (folder / name).rmdir()
            (folder / _LOCK).unlink(missing_ok=True)
            folder.rmdir()


def areas(root: Path) -> list[AreaInfo]:
    """Return all areas under `root`, by name; change nothing. A root that is not there has none; `StagingError` if it
    cannot be looked into."""
    try:
        folders = sorted(path for path in root.iterdir() if re.search(r"-[0-9a-f]{16}$", path.name) and path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise StagingError(f"the staging folder {root} cannot be looked into: {exc.strerror}", hint=ELSEWHERE) from exc
    return [_look(folder) for folder in folders]


def discard_clean(folder: Path) -> bool:
    """Delete an area of which its last owner said at its end that everything is uploaded, and nobody has it; return
    whether it is deleted. An area with conflicts or losses stays, for people to see them."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        try:
            if not lockfile.take(lock, wait=False):
                return False
        except OSError:
            return False
        told = [folder / name for name in (CONFLICTS, LOSSES)]
        if (folder / OWNER).exists() or any(path.exists() and path.stat().st_size for path in told):
            return False
        shutil.rmtree(folder)
        return True
    finally:
        os.close(lock)


def _look(folder: Path) -> AreaInfo:
    try:
        _expect_own(folder, folder.parent)
        fd = os.open(folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            locked = not lockfile.take(fd, wait=False, shared=True)
        finally:
            os.close(fd)
        owner = None
        with contextlib.suppress(FileNotFoundError):
            owner = read_owner(folder)
        area = read_area(folder)
    except FileNotFoundError as exc:
        return AreaInfo(folder, "", None, False, f"{exc.filename} is not there")
    except OSError as exc:
        reason = str(exc) if isinstance(exc, StagingError) else f"cannot be looked into: {exc.strerror}"
        return AreaInfo(folder, "", None, False, reason)
    return AreaInfo(folder, area.url, owner, locked, "", area.endpoint)


def _folder_name(url: str, endpoint: str | None = None) -> str:
    readable = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[:60].strip("-")
    what = url if endpoint is None else f"{url}\n{endpoint}"
    return f"{readable}-{hashlib.sha256(what.encode(errors='surrogateescape')).hexdigest()[:16]}"


def _folder_of(root: Path, url: str, endpoint: str) -> str:
    """Return the name of the area's folder: after the URL alone where there is no endpoint, or where such a folder was
    there before endpoints were noted."""
    plain, own = _folder_name(url), _folder_name(url, endpoint)
    if (root / own).exists():
        return own
    try:
        return plain if read_area(root / plain).endpoint in (None, endpoint) else own
    except FileNotFoundError:
        return own if endpoint and not (root / plain).exists() else plain
    except OSError:
        return plain  # which says what is wrong with it


def _take_lock(fd: int, folder: Path) -> None:
    for tries_left in reversed(range(_LOCK_TRIES)):
        try:
            if lockfile.take(fd, wait=False):
                return
        except OSError as exc:
            if exc.errno not in _NO_LOCKS:
                raise StagingError(f"the staging area {folder} cannot be locked: {exc.strerror}") from exc
            raise StagingError(
                f"the file system of {folder} has no locks ({exc.strerror})",
                hint="An NFS mount needs its lock service (no `nolock`). Or set DATACACHE_STAGING to a folder on a "
                "file system that has flock(2): CephFS, RBD, a disk.",
            ) from exc
        if not tries_left:
            _raise_busy(folder)
        time.sleep(_LOCK_PAUSE_S)


def _raise_busy(folder: Path) -> NoReturn:
    owner = None
    with contextlib.suppress(OSError):
        owner = read_owner(folder)
    if owner is None:
        raise StagingBusyError(
            f"the staging area {folder} is in use by a process that does not say who it is",
            hint=f"See who has {folder / _LOCK} open: fuser, on each node that reaches this folder.",
        )
    here = owner.host == socket.gethostname() and owner.boot_id == boot_id()
    at = "there" if here else f"on {owner.host}"
    if owner.who.startswith("/"):
        hint = f"Unmount {at}: dsctl umount {owner.who}"
    else:
        hint = f"Wait until it has ended, or end it {at}: kill {owner.pid}"
    if not here:
        hint += (
            f". If {owner.host} is dead, wait: the file system takes the lock from a dead node after its session "
            "timeout (CephFS: 5 minutes unless set otherwise, NFS 4: a minute or two)."
        )
    raise StagingBusyError(f"the staging area {folder} is in use by {owner}", hint=hint)


def _read_or_make_area(folder: Path, url: str, endpoint: str, new_id: str) -> tuple[str, bool]:
    """Return the area's id, and whether it was made just now."""
    try:
        found, area_id, noted = read_area(folder)
    except FileNotFoundError:
        with refusing(folder):
            if any((folder / name).is_dir() and any((folder / name).iterdir()) for name in (_JOURNAL, _DATA)):
                raise damaged(folder, "it is not there") from None
            area_id = new_id or secrets.token_hex(8)
            write_json(folder / AREA, _area(url, area_id, endpoint))
        return area_id, True
    except StagingError:
        raise
    except OSError as exc:
        raise StagingError(f"the staging area {folder} cannot be read: {exc.strerror}") from exc
    if found != url:
        raise StagingError(
            f"the staging area {folder} belongs to {found}, not to {url}",
            hint=f"It was copied or renamed. Give it back its name and mount {found} to upload what is in it, or move "
            "it away to begin with an empty one.",
        )
    if noted is None and endpoint:
        with refusing(folder):
            write_json(folder / AREA, _area(url, area_id, endpoint))
    return area_id, False


def _area(url: str, area_id: str, endpoint: str) -> dict[str, object]:
    return {"format": FORMAT_VERSION, "bucket_url": url, "id": area_id, "endpoint": endpoint}


FORMAT_VERSION = 1
AREA, OWNER = "area.json", "owner.json"
FULL = (errno.ENOSPC, errno.EDQUOT)
ELSEWHERE = "Set DATACACHE_STAGING to a folder on durable storage that you can write to."


class Owner(NamedTuple):
    """The process that works on an area, in its own words."""

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
    """Raise what the file system refuses within as a `StagingError`."""
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
    """Raise what the file system refuses while an area is in use as a `StagingError`; but a file that is there already
    (`FileExistsError`) is the caller's affair."""
    try:
        yield
    except (StagingError, FileExistsError):
        raise
    except OSError as exc:
        raise unreachable(folder, what, exc) from exc


def unreachable(folder: Path, what: str, exc: OSError) -> StagingError:
    """Return the error for what cannot be done in a folder of an area; `errno` is the cause's."""
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


class Area(NamedTuple):
    """The content of an area's `area.json`."""

    url: str
    id: str
    endpoint: str | None
    """Of the bucket's server; '' for the one that the URL alone says. None: it was made before this was noted."""


def read_area(folder: Path) -> Area:
    """Read what an area says of itself. `FileNotFoundError` if it was never made."""
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
    """Return the error for an area whose `area.json` is missing or makes no sense."""
    return StagingError(
        f"the staging area {folder} is damaged: {AREA}: {how}",
        hint=f"Put {folder / AREA} back from a copy. Or move the folder away to begin with an empty area: what was "
        "not uploaded stays in the moved one.",
    )


def read_owner(folder: Path) -> Owner | None:
    """Read which process works on an area; None if it makes no sense. `FileNotFoundError` if nobody says to be the
    owner."""
    kinds = {"host": str, "pid": int, "boot_id": str, "since": float, "who": str, "token": str}
    try:
        table = json.loads((folder / OWNER).read_bytes())
        return Owner(**{name: kind(table[name]) for name, kind in kinds.items()})
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
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                data = json.dumps(table).encode()
                write_all(fd, data, 0)  # half of it reads as making no sense
                os.ftruncate(fd, len(data))
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as exc:
            if exc.errno not in (*FULL, errno.ENOENT):
                raise
            ballast.unlink(missing_ok=True)
            write_json(path, table)


def write_json(path: Path, table: dict[str, Any]) -> None:
    """Write a JSON file, durable and as a whole: after a crash the old one is there, or the new one."""
    replace_file(path, json.dumps(table, indent=1).encode())
