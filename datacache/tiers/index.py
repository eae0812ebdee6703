"""The LMDB index of a node: for each tier, block → location; and the tiers' containers and pins.

The daemon opens it for writing, all other processes read-only; a lookup takes about a microsecond and asks no other
process. The index lies in memory (`memory`), with a copy on disk: LMDB reads through a mapping, and a page that a
failing disk does not give would kill its reader.

LMDB wants an environment opened once a process and never used across `fork()`, so a registry here shares environments,
and a child opens its own. Commits are not fsynced: they survive the death of any process, and after a power loss the
index is made again from the copy, or from the regions (`recovery`).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb

from datacache.core.errors import CacheError
from datacache.core.ids import BlockId, ObjectId

MAP_BYTES = 64 * 2**30  # address space only; the file is as large as what is in it
TIER_NAMES = ("ram", "ssd")
UNCHECKED = b"unchecked-"
"""The beginning of each `unchecked_key`. Earlier versions take all keys with a slash for containers."""
_MAX_READERS = 4096
_LOCK_BYTES = 64 * (_MAX_READERS + 64)
"""The size of LMDB's lock file: a line of the cache for each reader, and its head."""
_registry: dict[tuple[int, str], Index] = {}
_registry_lock = threading.Lock()


class Index:
    """One open LMDB environment. `blocks[tier]` and `meta` are its databases."""

    def __init__(self, folder: Path, *, writable: bool) -> None:
        self.folder = folder
        self._file = str(folder / "data.mdb")  # made once: each miss looks at it
        self.writable = writable
        try:
            with contextlib.ExitStack() as opened:
                if writable:
                    _allocate(folder / "lock.mdb", _LOCK_BYTES)
                self.env = lmdb.open(
                    str(folder),
                    map_size=MAP_BYTES,
                    max_dbs=8,
                    max_readers=_MAX_READERS,
                    readonly=not writable,
                    create=writable,
                    sync=False,
                    metasync=False,
                    readahead=False,
                    mode=0o600,
                )
                opened.callback(self.env.close)
                self._fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, self._fd)
                needed = self._needed_bytes()  # from the first two pages, which are there
                status = os.fstat(self._fd)
                if status.st_size < needed and not writable:
                    raise CacheError(f"the index {folder} is truncated")
                self.blocks = {tier: self.env.open_db(tier.encode(), create=writable) for tier in TIER_NAMES}
                self._ram, self._ssd = (self.blocks[tier] for tier in TIER_NAMES)
                self.meta = self.env.open_db(b"meta", create=writable)
                opened.pop_all()
        except (lmdb.Error, OSError) as exc:
            raise CacheError(f"the index {folder} cannot be opened: {exc}") from exc
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._inode = (status.st_dev, status.st_ino)
        self._seen_bytes = max(status.st_size, needed)

    @contextlib.contextmanager
    def write(self) -> Iterator[lmdb.Transaction]:
        """Yield a transaction that is committed at the end, rolled back by an exception. `lmdb.Error` if it cannot
        be."""
        with self.env.begin(write=True) as txn:
            yield txn
        self.extend()

    def extend(self) -> None:
        """Make the file as long as its pages say. LMDB does not write pages that a transaction took and gave back, so a
        sound file can end before its last page; readers take a file that is too short for a torn one."""
        needed = self._needed_bytes()
        if os.fstat(self._fd).st_size < needed:
            with contextlib.suppress(OSError):
                _allocate(self.folder / "data.mdb", needed)

    def find(self, block: BlockId) -> list[tuple[int, bytes]]:
        """Return the numbers of the tiers that have a block, fastest first, with its index value in each."""
        txn = self.env.begin()
        try:
            ram, ssd = txn.get(block, db=self._ram), txn.get(block, db=self._ssd)
        finally:
            txn.abort()
        if ram is None:
            return [(1, ssd)] if ssd is not None else []
        return [(0, ram), (1, ssd)] if ssd is not None else [(0, ram)]

    def missing(self, blocks: Sequence[BlockId], tiers: Sequence[int]) -> list[int]:
        """Return the positions of the blocks that none of some tiers has, with one look for all."""
        gone = list(range(len(blocks)))
        with self.env.begin() as txn:
            for number in tiers:
                db = self.blocks[TIER_NAMES[number]]
                gone = [at for at in gone if txn.get(blocks[at], db=db) is None]
        return gone

    def any_unchecked(self) -> bool:
        """Tell whether `meta` has an `unchecked_key`."""
        with self.env.begin(db=self.meta) as txn, txn.cursor() as cursor:
            return bool(cursor.set_range(UNCHECKED)) and bytes(cursor.key()).startswith(UNCHECKED)

    def is_unchecked(self, obj: ObjectId) -> bool:
        """Tell whether `meta` has the SSD tier's `unchecked_key` of an object."""
        with self.env.begin(db=self.meta) as txn:
            return txn.get(unchecked_key(obj, TIER_NAMES[1])) is not None

    def dataset_of(self, tier: int, container: int) -> str:
        """Return the data set of a container; '' if it is not there any more."""
        with self.env.begin(db=self.meta) as txn:
            value = txn.get(container_key(TIER_NAMES[tier], container))
        return "" if value is None else str(json.loads(value)["dataset"])

    def whole(self) -> bool:
        """Tell whether the file is at least as long as it was: reading a torn one through a mapping would be fatal."""
        seen = self._seen_bytes  # before the look: another thread may see the file grow meanwhile
        size = os.fstat(self._fd).st_size
        if size > seen:
            self._seen_bytes = size
        return size >= seen

    def current(self) -> bool:
        """Tell whether this is still the file at its path (a rebuilt index is a new file)."""
        try:
            status = os.stat(self._file)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._inode

    def size_bytes(self) -> int:
        """Return how much the index takes on disk."""
        return os.fstat(self._fd).st_size

    def _needed_bytes(self) -> int:
        return int((self.env.info()["last_pgno"] + 1) * self.env.stat()["psize"])

    def close(self) -> None:
        """Close the environment; nobody may be using it."""
        self._close_fd()
        self.env.close()


def container_key(tier: str, container: int) -> bytes:
    """Return the key in `meta` of a container of a tier."""
    return f"{tier}/{container:08x}".encode()


def unchecked_key(object_id: ObjectId, tier: str) -> bytes:
    """Return the key in `meta` that keeps a large object's ref while its file in a tier has blocks that came after the
    last check of all of it, or before any. It is written with each block."""
    return UNCHECKED + f"{object_id.hex()}-{tier}".encode()


def _allocate(path: Path, size_bytes: int) -> None:
    """Make a file this long, without holes: on a full tmpfs, touching a hole of a mapped file is fatal."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    finally:
        os.close(fd)


def open_index(folder: Path, *, writable: bool = False) -> Index:
    """Return this process's environment for a folder, which all callers share; a writer's serves readers, too.
    `CacheError` if it cannot be opened (before the daemon's first start there is none)."""
    key = (os.getpid(), str(folder))
    with _registry_lock:
        for other in [k for k in _registry if k[0] != key[0]]:
            # Inherited through a fork. LMDB clears only what belongs to the closing process, so the parent's
            # readers and locks stay; but it opens a file once a process, so this one must go first.
            _registry.pop(other).close()
        held = _registry.get(key)
        if held is not None and not held.writable:
            if writable:
                held.close()  # one environment a process: readers find the new one
                held = None
            elif not held.current():
                held = None  # made anew under the same name; closed once no other thread reads the old one
        if held is None:
            held = _registry[key] = Index(folder, writable=writable)
            if writable:
                held.extend()
        return held


def forget_index(folder: Path) -> None:
    """Close this process's environment for a folder, if it has one. No other thread may be using it."""
    with _registry_lock:
        held = _registry.pop((os.getpid(), str(folder)), None)
    if held is not None:
        held.close()


def _after_fork_in_child() -> None:
    global _registry_lock
    _registry_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
