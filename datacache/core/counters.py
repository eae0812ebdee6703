"""Counters that every reading process keeps in a small mapped file, and their sum over a home.

A reader that finds a block itself tells nobody, so the daemon learns of hits by adding up these files: one a process,
which holds a lock on it (flock(2)) for as long as it lives. Pids would not do: containers have some of their own. They
survive `kill -9`; the daemon folds those that nobody holds into one and removes them. The folder must lie in memory.
What concerns one data set is counted in a folder of its own in that folder (`folder_of_dataset`), by the same names.

Counts and times in messages: `1 link`, `1,204 links`, `1 min 15 s`. Used wherever something is said to people; any
thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import quote, unquote

from datacache.core import lockfile
from datacache.core.concurrency import PerProcess
from datacache.core.disk import map_file

NAMES = (
    "ram_hits",
    "ram_hit_bytes",
    "ssd_hits",
    "ssd_hit_bytes",
    "misses",
    "miss_bytes",
    "direct_reads",
    "broken_blocks",
    "loader_steps",
    "loader_samples",
    "loader_bytes",
    "loader_data_ns",
    "loader_step_ns",
)
"""Block reads answered from RAM and SSD, those that went to the daemon, those that went past it to the store, and
blocks found broken. Of trainings: steps, their samples, the bytes read for them, and how long they waited for data and
took in all. New names come last: files of the version before are shorter, and count."""

MISSES, MISS_BYTES, DIRECT_READS, BROKEN_BLOCKS, LOADER_STEPS = range(4, 9)  # hits are counted by the tier's number
LOADER = NAMES[LOADER_STEPS:]
_FILE_BYTES = 8 * len(NAMES)
_FOLDED = "past"
_OF, _MAX_NAME = "of-", 200


class Counters:
    """This process's counters for one home. Several objects of a process share one file; get them from
    `counters_of`. Safe from several threads and across `fork()`."""

    def __init__(self, folder: Path, make: Callable[[Path], None]) -> None:
        self._folder, self._make = folder, make
        self._state: PerProcess[tuple[memoryview, threading.Lock]] = PerProcess(self._open)

    def hit(self, tier: int, size_bytes: int) -> None:
        """Count one read answered from a tier (0 RAM, 1 SSD). Takes no lock: of two threads that count at the very
        same moment, one may go uncounted."""
        values, _ = self._state.get()
        values[2 * tier] += 1
        values[2 * tier + 1] += size_bytes

    def miss(self, size_bytes: int) -> None:
        """Count one read that goes to the daemon."""
        values, lock = self._state.get()
        with lock:
            values[MISSES] += 1
            values[MISS_BYTES] += size_bytes

    def count(self, name: int) -> None:
        """Count one event."""
        values, lock = self._state.get()
        with lock:
            values[name] += 1

    def step(self, samples: int, size_bytes: int, data_ns: int, step_ns: int) -> None:
        """Count one step of a training."""
        values, lock = self._state.get()
        with lock:
            for at, value in enumerate((1, samples, size_bytes, data_ns, step_ns), LOADER_STEPS):
                values[at] += value

    def _open(self) -> tuple[memoryview, threading.Lock]:
        try:
            self._make(self._folder)
            values = _own_file(self._folder)
        except OSError:  # nowhere to keep them: count for nobody rather than fail a read
            values = memoryview(bytearray(_FILE_BYTES)).cast("Q")
        return values, threading.Lock()


_all: dict[Path, Counters] = {}


def counters_of(folder: Path, make: Callable[[Path], None]) -> Counters:
    """Return the counters of a home, one object a process. `make(folder)` makes the folder, or raises `OSError`."""
    return _all.setdefault(folder, Counters(folder, make))


def folder_of_dataset(folder: Path, dataset: str) -> Path:
    """Return the folder of a data set's counters; that of all, if its name is too long for one."""
    name = _OF + quote(dataset, safe="")
    return folder / name if dataset and len(name) <= _MAX_NAME else folder


def totals(folder: Path) -> dict[str, int]:
    """Return the sum over all processes and data sets, dead ones included."""
    sums = [0] * len(NAMES)
    for each in (folder, *_folders_in(folder)):
        with contextlib.suppress(OSError):
            for path in each.iterdir():
                _add_file(sums, path)
    return dict(zip(NAMES, sums, strict=True))


def totals_by_dataset(folder: Path) -> dict[str, dict[str, int]]:
    """Return `totals` of each data set."""
    return {unquote(each.name.removeprefix(_OF)): totals(each) for each in _folders_in(folder)}


def _folders_in(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(folder / entry.name for entry in entries if entry.name.startswith(_OF))
    return []


def fold(folder: Path) -> None:
    """Add the files of dead processes to one for each folder, and remove them. One process at a time (the daemon). What
    cannot be folded now (a full disk) stays as it is."""
    for each in (folder, *_folders_in(folder)):
        _fold(each)


def _fold(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for path in [path for path in folder.iterdir() if path.name != _FOLDED and not path.name.startswith(_OF)]:
            fd = lockfile.open_locked(path, os.O_RDWR)
            if fd is None:  # its process lives
                continue
            try:
                past = _map(folder / _FOLDED)
                sums = list(past)
                _add_file(sums, path)
                path.unlink(missing_ok=True)  # while it is locked: who has just made it looks for its name then
                for at, value in enumerate(sums):
                    past[at] = value
            finally:
                os.close(fd)


def _own_file(folder: Path) -> memoryview:
    # It is this process's for as long as it lives. The descriptor stays open, and a child inherits it: what a parent
    # counted may be folded later than it could be.
    while True:
        path = folder / os.urandom(8).hex()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            lockfile.take(fd)
            if not os.fstat(fd).st_nlink:  # a daemon took it for a dead process's
                os.close(fd)
                continue
            return _map(path)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise


def _map(path: Path) -> memoryview:
    return memoryview(map_file(path, _FILE_BYTES)).cast("Q")


def _add_file(sums: list[int], path: Path) -> None:
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        known = len(data) <= _FILE_BYTES and len(data) % 8 == 0
        values: Iterable[int] = memoryview(data).cast("Q") if known else ()
        for at, value in enumerate(values):
            sums[at] += value


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun, in the plural (`many`, or with an s) unless it is 1."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def format_seconds(seconds: float) -> str:
    """Write `75` as `1 min 15 s`: the two largest units."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    rest = round(seconds)
    parts = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
