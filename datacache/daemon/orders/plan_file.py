"""The messages between the publisher of an order and the daemon: the plan's mapped file, and a plan as it is sent.

The file `lookahead/<pid>-<token>` in the home's folder in memory (`tiers.memory`) has two 64-bit words. The publisher
writes the position; the daemon sets the mark when it has the plan, and the next daemon clears all marks when it starts.
Each write is one aligned store. A plan lives while its file has its name and its publisher a lock on it (flock(2)),
which ends with the process however it ends, and shows in other PID namespaces. A child of `fork()` closes the
descriptor it inherited, so that no worker keeps its dead parent's plan.

A plan is sent as: magic, length of a JSON header (u32), header (a multiple of four bytes long), then `items` +
`next_items` rows of `columns` u32 each, little-endian."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import struct
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from datacache.core import lockfile
from datacache.core.errors import UsageError
from datacache.core.ids import ObjectRef
from datacache.core.ipc import parse_object
from datacache.exchange.wire import decode_ref, encode_ref
from datacache.tiers.memory import make_shared

_FILE_BYTES = 16
_POSITION, _MARK = 0, 1
_TRIES = 3
_MAGIC = b"DCP1"
_LENGTH = struct.Struct("<I")
ITEM_BYTES = 4
HEAD_BYTES = len(_MAGIC) + _LENGTH.size


class PlanFile:
    """The mapped file of one plan. Safe from several threads and processes."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """`OSError` if it cannot be opened (or made)."""
        self.path = path
        self._lock = _create_locked(path) if create else None
        if self._lock is not None:
            weakref.finalize(self, self._lock.close).atexit = False
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # not the lock's: a child inherits mappings with what they hold
        try:
            if os.fstat(fd).st_size < _FILE_BYTES:
                raise OSError(f"{path} is too short")
            self.words = memoryview(mmap.mmap(fd, _FILE_BYTES)).cast("q")
            """Position and mark, for a publisher that writes the position often."""
        except (OSError, ValueError):
            if create:
                self.remove()
            raise
        finally:
            os.close(fd)

    @property
    def position(self) -> int:
        """The number of samples that the publisher has asked for."""
        return int(self.words[_POSITION])

    @position.setter
    def position(self, value: int) -> None:
        self.words[_POSITION] = value

    @property
    def marked(self) -> bool:
        """True if the daemon has the plan."""
        return bool(self.words[_MARK])

    @marked.setter
    def marked(self, value: bool) -> None:
        self.words[_MARK] = int(value)

    def remove(self) -> None:
        """End the plan. Idempotent."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()


def new_plan_file(folder: Path, home: Path, position: int) -> PlanFile:
    """Make a new file for a plan of this process. `OSError` if there can be none."""
    make_shared(folder, home)
    tries = _TRIES
    while True:
        tries -= 1
        try:
            file = PlanFile(folder / f"{os.getpid()}-{secrets.token_hex(6)}", create=True)
        except FileNotFoundError:
            if not tries:
                raise
        else:
            file.position = position
            return file


@dataclass(frozen=True, kw_only=True)
class PlanHeader:
    """The message before a plan's items."""

    id: str
    """The name of its file."""
    pid: int
    started: int
    """See `core.boot.born`: both together tell a process from others, also of other PID namespaces."""
    dataset: str
    snapshot: str
    """Id of a snapshot of the catalog; '' if `refs` name the objects of the rows."""
    refs: tuple[ObjectRef, ...]
    columns: int
    """1: the row of a whole object. 3: row, first block, number of blocks."""
    items: int
    next_items: int

    def encode(self) -> bytes:
        """Return the header with its magic and length."""
        text = json.dumps(asdict(self) | {"refs": [encode_ref(ref) for ref in self.refs]}).encode()
        text += b" " * (-len(text) % ITEM_BYTES)  # what follows is an array
        return _MAGIC + _LENGTH.pack(len(text)) + text

    @property
    def body_bytes(self) -> int:
        """The length of what follows the header."""
        return ITEM_BYTES * self.columns * (self.items + self.next_items)


def decode_header(plan: memoryview) -> tuple[PlanHeader, memoryview]:
    """Return the header of a plan and what follows it. `UsageError` if this is no plan."""
    try:
        if plan[: len(_MAGIC)] != _MAGIC:
            raise ValueError("not a plan")
        end = HEAD_BYTES + int(_LENGTH.unpack_from(plan, len(_MAGIC))[0])
        values = parse_object(bytes(plan[HEAD_BYTES:end]))
        refs = tuple(decode_ref(ref) for ref in values.pop("refs"))
        header = PlanHeader(refs=refs, **values)
        kinds = [type(value) for value in (header.id, header.dataset, header.snapshot)]
        numbers = (header.pid, header.started, header.items, header.next_items)
        if kinds != [str, str, str] or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError("not a plan's header")
        if header.columns not in (1, 3) or "/" in header.id or header.id.startswith("."):
            raise ValueError("not a plan's header")
        if len(plan) - end != header.body_bytes:
            raise ValueError("a plan ended early")
    except (KeyError, TypeError, ValueError, struct.error) as exc:
        raise UsageError(f"bad request: {exc}") from exc
    return header, plan[end:]


def remove_if_dead(path: Path) -> bool:
    """Remove a plan's file unless its publisher runs; tell whether it is gone."""
    try:
        fd = lockfile.open_locked(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    if fd is None:
        return False
    try:
        path.unlink(missing_ok=True)  # before its publisher may have the lock: it looks for the name then
    finally:
        os.close(fd)
    return True


def _create_locked(path: Path) -> lockfile.OwnDescriptor:
    lock = lockfile.OwnDescriptor(lambda: os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        os.posix_fallocate(lock.fd, 0, _FILE_BYTES)  # to write into a hole is fatal on a full disk
        lockfile.take(lock.fd)
        if not os.fstat(lock.fd).st_nlink:  # a daemon that starts took it for a dead process's
            raise FileNotFoundError(f"{path} was removed")
    except OSError:
        path.unlink(missing_ok=True)
        lock.close()
        raise
    return lock
