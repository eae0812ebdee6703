"""The folder of a home in memory, on a tmpfs: the RAM tier, the index, and the small files that processes map.

Files that are mapped for writing, or read through a mapping that cannot be asked first (LMDB), must not lie on a disk:
a failing disk would kill every process that touches a page (SIGBUS). The folder's place is known to all, and anybody
may have made a folder there first. Then the daemon takes another name and leaves a link in the home.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import shutil
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from datacache.core import lockfile
from datacache.core.disk import map_file, replace_file
from datacache.core.errors import CacheError
from datacache.tiers.layout import cache_dir

_LINK = "memory"
_HOME = "home.json"


def memory_dir(home: Path, ram_dir: Path) -> Path:
    """Return the place of a home's folder in memory, whether it was made already or not."""
    with contextlib.suppress(OSError):
        return Path(os.readlink(cache_dir(home) / _LINK))
    return _usual(home, ram_dir)


def counters_dir(home: Path, ram_dir: Path) -> Path:
    """Return the folder of the readers' counters."""
    return memory_dir(home, ram_dir) / "counters"


def lookahead_dir(home: Path, ram_dir: Path) -> Path:
    """Return the folder of the mapped files of published orders."""
    return memory_dir(home, ram_dir) / "lookahead"


def is_private(folder: Path) -> bool:
    """Tell whether a folder is there and belongs to this process's user alone."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def make_shared(folder: Path, home: Path) -> None:
    """Make a folder of `counters_dir` or `lookahead_dir`. `OSError` if that fails, or if the folder above is not this
    user's alone."""
    above = folder.parent
    with contextlib.suppress(FileExistsError):
        above.mkdir(mode=0o700)
    if not is_private(above):
        raise PermissionError(13, "not a folder of this user alone", str(above))
    if not (above / _HOME).exists():  # no daemon has made it
        with contextlib.suppress(FileNotFoundError):  # nor the home yet
            _note_home(above, home)
    folder.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def held_memory_dir(home: Path, ram_dir: Path) -> Iterator[Path]:
    """Hold a home's folder in memory, which is made where it is missing: nobody takes it for one that a removed home
    has left. For the daemon. `OSError`; `CacheError` if there is no tmpfs."""
    fd = None
    while fd is None:
        folder = _make_memory_dir(home, ram_dir)
        with contextlib.suppress(FileNotFoundError):  # it was taken for such a one just before the home was made
            fd = lockfile.open_locked(folder, os.O_RDONLY | os.O_DIRECTORY, wait=True)
    try:
        _note_home(folder, home)
        yield folder
    finally:
        os.close(fd)


def _note_home(folder: Path, home: Path) -> None:
    noted = {"home": str(home.resolve()), "device": os.stat(home).st_dev, "namespace": _namespace()}
    beside = folder / f"{_HOME}.{os.getpid()}.{threading.get_ident()}"  # others may be at it, too
    replace_file(folder / _HOME, json.dumps(noted).encode(), beside=beside, durable=False)


def abandoned_dirs(ram_dir: Path) -> list[Path]:
    """Return this user's folders in memory that removed homes have left. Those of older versions, which do not say
    whose they are, are not told."""
    return [folder for folder in sorted(ram_dir.glob(f"datacache-{os.getuid()}-*")) if _is_abandoned(folder)]


def remove_abandoned_dirs(ram_dir: Path) -> None:
    """Remove `abandoned_dirs` unless a daemon holds them still. What processes have mapped of one stays theirs."""
    for folder in abandoned_dirs(ram_dir):
        with contextlib.suppress(OSError):  # another daemon was quicker
            fd = lockfile.open_locked(folder, os.O_RDONLY | os.O_DIRECTORY)
            if fd is None:
                continue
            try:
                if _is_abandoned(folder):
                    shutil.rmtree(folder)
                    log.info("removed %s, whose home does not exist any more", folder)
            finally:
                os.close(fd)


def _is_abandoned(folder: Path) -> bool:
    """Tell whether the home of a folder is gone, and not just out of sight: in another container, on a disk that is not
    mounted, behind an error."""
    try:
        noted = json.loads((folder / _HOME).read_bytes())
        place, device, namespace = Path(noted["home"]), noted["device"], noted["namespace"]
        if not is_private(folder) or namespace != _namespace() or os.path.lexists(place):
            return False
        while True:
            with contextlib.suppress(FileNotFoundError):
                return bool(os.lstat(place).st_dev == device)
            place = place.parent
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _namespace() -> str:
    """Name the mount namespace: what another one calls a path may be another folder."""
    return os.readlink("/proc/self/ns/mnt")


def _make_memory_dir(home: Path, ram_dir: Path) -> Path:
    if not ram_dir.is_dir():
        raise CacheError(
            f"the folder for the RAM tier, {ram_dir}, does not exist",
            hint="Set DATACACHE_RAM_DIR to a tmpfs, such as /dev/shm.",
        )
    link = cache_dir(home) / _LINK
    usual, linked = _usual(home, ram_dir), memory_dir(home, ram_dir)
    if linked != usual and linked.parent == ram_dir and is_private(linked):
        return linked
    with contextlib.suppress(FileExistsError):
        usual.mkdir(mode=0o700)
    if is_private(usual):
        link.unlink(missing_ok=True)
        return usual
    folder = Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=ram_dir))
    fresh = link.with_name(f"{_LINK}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder)
    fresh.replace(link)
    return folder


def _usual(home: Path, ram_dir: Path) -> Path:
    digest = blake2b(os.fsencode(home.resolve()), digest_size=8).hexdigest()
    return ram_dir / f"datacache-{os.getuid()}-{digest}"


log = logging.getLogger(__name__)
_SLOTS = 1 << 13
_TIME = struct.Struct("<d")
ACCESS_BYTES = _SLOTS * _TIME.size


class AccessTable:
    """The time of each container's last read, in a small file that all processes of the node map and write. Any thread.

    A float64 of seconds (Unix time) for a container's id modulo the number of slots; each write is one aligned store.
    Two containers may share a slot once ids wrap: both then count as read when either is, which costs precision, never
    correctness. A crash loses nothing. Without the file (no cache yet, a full disk, not ours to write) the table is
    this process's own: eviction knows less, and reading goes on.
    """

    def __init__(self, path: Path) -> None:
        try:
            if not is_private(path.parent):
                raise PermissionError(errno.EACCES, "not in a folder of this user alone", str(path))
            self._map = map_file(path, ACCESS_BYTES)
        except OSError as exc:
            log.debug("%s cannot be used: %s", path, exc)
            self._map = mmap.mmap(-1, ACCESS_BYTES)

    def touch(self, container: int) -> None:
        """Note that a container was read now."""
        _TIME.pack_into(self._map, (container % _SLOTS) * 8, time.time())

    def at_least(self, container: int, when_s: float) -> None:
        """Note that a container was used at `when_s` (Unix seconds), unless something later is known."""
        if when_s > self.last(container):
            _TIME.pack_into(self._map, (container % _SLOTS) * 8, when_s)

    def last(self, container: int) -> float:
        """Return when a container was read last (Unix seconds); 0.0 if never."""
        return float(_TIME.unpack_from(self._map, (container % _SLOTS) * 8)[0])
