"""The folder of a home in memory, on a tmpfs: the RAM tier, the index, and the small files that processes map.

What is mapped for writing, or read through a mapping that cannot be asked first (LMDB), must not lie on a disk: one
that fails would kill every process that touches a page (SIGBUS). Its place is known to all, and anybody may have made
a folder there first. Then the daemon takes another name and leaves a link in the home.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from hashlib import blake2b
from pathlib import Path

from datacache.core.errors import CacheError
from datacache.tiers.layout import cache_dir

_LINK = "memory"


def memory_dir(home: Path, ram_dir: Path) -> Path:
    """Return where a home's folder in memory is, whether it was made already or not."""
    with contextlib.suppress(OSError):
        return Path(os.readlink(cache_dir(home) / _LINK))
    return _usual(home, ram_dir)


def counters_dir(home: Path, ram_dir: Path) -> Path:
    """The readers' counters."""
    return memory_dir(home, ram_dir) / "counters"


def lookahead_dir(home: Path, ram_dir: Path) -> Path:
    """The mapped files of published orders."""
    return memory_dir(home, ram_dir) / "lookahead"


def is_private(folder: Path) -> bool:
    """Tell whether a folder is there and of this process's user alone."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def make_shared(folder: Path) -> None:
    """Make a folder of `counters_dir` or `lookahead_dir`. `OSError` if it cannot be, or if what is above it is not this
    user's alone."""
    above = folder.parent
    with contextlib.suppress(FileExistsError):
        above.mkdir(mode=0o700)
    if not is_private(above):
        raise PermissionError(13, "not a folder of this user alone", str(above))
    folder.mkdir(mode=0o700, exist_ok=True)


def make_memory_dir(home: Path, ram_dir: Path) -> Path:
    """Make a home's folder in memory, or find it. For the daemon. `OSError`; `CacheError` if there is no tmpfs."""
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
