"""A mount compared with a plain directory: the same random operations on both, and everything they say must be equal.

`Side` does one operation on one of the two; `Comparison` is hypothesis's state machine over both. What an object store
cannot give is made equal here and nowhere else: hard links, which the plain directory refuses as the mount does;
directories' sizes, link counts and times that nobody set; inode numbers. FIFOs are made, and not opened: that is the
kernel's business, and waits for somebody at the other end.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from datacache.core import disk

NAMES = ["a", "b", "c d", "ü.pt", "日本", "x" * 255, "é" * 127 + "x", "e\u0301", "%41#?&+", "back\\slash", ".hidden"]
TOO_LONG = "n" * 256
SLOTS = 4
MAX_KEY_BYTES = 900
"""Longer paths are not made: an object's key has at most 1,024 bytes, which no local file system knows."""

CLOCK_STARTS_NS = 1_700_000_000 * 10**9
"""Times before this one were set by an operation, never by a clock."""


class Subject(Protocol):
    """Have what is compared with the plain directory."""

    def folder(self) -> Path:
        """Where it is mounted now."""
        ...

    def remount(self) -> None:
        """Unmount, with all that is pending left to the next mount, and mount again."""
        ...

    def flush(self) -> None:
        """Bring everything to the bucket."""
        ...

    def objects(self, prefix: str) -> Mapping[str, bytes] | None:
        """Every object of the bucket under a prefix, keys without it, read past the mount. None: there is no bucket."""
        ...


class PlainSubject:
    """A directory, to try the comparison itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folder(self) -> Path:
        return self._folder

    def remount(self) -> None:
        """Nothing to do."""

    def flush(self) -> None:
        """Nothing to do."""

    def objects(self, prefix: str) -> Mapping[str, bytes] | None:
        return None


class Refused(NamedTuple):
    """An operation failed."""

    errno: str


class Seen(NamedTuple):
    """Hold what stat(2) says that both sides must agree on. None: not comparable."""

    mode: str
    size_bytes: int | None
    links: int | None
    uid: int
    gid: int
    mtime_ns: int | None


def seen(found: os.stat_result) -> Seen:
    """The comparable part of a stat result."""
    folder = stat.S_ISDIR(found.st_mode)
    return Seen(
        f"{found.st_mode:o}",
        None if folder else found.st_size,
        None if folder else found.st_nlink,
        found.st_uid,
        found.st_gid,
        # A folder's times change with what is in it, which a mount knows in memory only.
        found.st_mtime_ns if found.st_mtime_ns < CLOCK_STARTS_NS and not folder else None,
    )


class Side:
    """One of the two trees, with its open files in numbered slots."""

    def __init__(self, root: Path, *, refuses: bool) -> None:
        self.root = root
        self.refuses = refuses
        """Whether this is the plain one, which must refuse what an object store cannot hold."""
        self.handles: dict[int, int] = {}

    def path(self, path: str) -> str:
        return f"{self.root}/{path}" if path else str(self.root)

    def attempt(self, operation: str, *arguments: Any) -> Any:
        """Return what an operation returns, or `Refused`."""
        method: Callable[..., Any] = getattr(self, operation)
        try:
            return method(*arguments)
        except OSError as exc:
            return Refused(errno.errorcode.get(exc.errno or 0, str(exc.errno)))

    # --- open files ---

    def open(self, slot: int, path: str, flags: int, mode: int) -> None:
        _expect_no_fifo(self.path(path))
        handle = os.open(self.path(path), flags, mode)
        if slot in self.handles:
            os.close(self.handles.pop(slot))
        self.handles[slot] = handle

    def close(self, slot: int) -> None:
        os.close(self.handles.pop(slot))

    def close_all(self) -> None:
        for slot in list(self.handles):
            self.close(slot)

    def write(self, slot: int, offset: int, data: bytes) -> int:
        return os.pwrite(self.handles[slot], data, offset)

    def append(self, slot: int, data: bytes) -> int:
        """write(2) where the handle's own position is: at the end with O_APPEND."""
        return os.write(self.handles[slot], data)

    def read(self, slot: int, offset: int, size: int) -> bytes:
        return os.pread(self.handles[slot], size, offset)

    def map_read(self, slot: int) -> bytes:
        handle = self.handles[slot]
        if self._mappable(handle) == 0:
            return b""
        with mmap.mmap(handle, 0, prot=mmap.PROT_READ) as mapped:
            return bytes(mapped)

    def map_write(self, slot: int, offset: int, data: bytes) -> int:
        """Through a shared mapping, inside the file only."""
        handle = self.handles[slot]
        size = self._mappable(handle)
        if size == 0:
            return 0
        with mmap.mmap(handle, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            start = offset % size
            data = data[: size - start]
            mapped[start : start + len(data)] = data
            mapped.flush()
        return len(data)

    @staticmethod
    def _mappable(handle: int) -> int:
        """Bytes of a file; of a folder, whose size is every file system's own affair, none."""
        found = os.fstat(handle)
        return found.st_size if stat.S_ISREG(found.st_mode) else 0

    def ftruncate(self, slot: int, size: int) -> None:
        os.ftruncate(self.handles[slot], size)

    def allocate(self, slot: int, mode: int, offset: int, size: int) -> None:
        disk.allocate(self.handles[slot], mode, offset, size)

    def copy(self, slot: int, start: int, to: int, offset: int, size: int) -> int:
        """copy_file_range(2), until all is copied."""
        copied = 0
        while count := os.copy_file_range(
            self.handles[slot], self.handles[to], size - copied, start + copied, offset + copied
        ):
            copied += count
        return copied

    def fsync(self, slot: int) -> None:
        os.fsync(self.handles[slot])

    def fstat(self, slot: int) -> Seen:
        return seen(os.fstat(self.handles[slot]))

    def fchmod(self, slot: int, mode: int) -> None:
        os.fchmod(self.handles[slot], mode)

    # --- names ---

    def truncate(self, path: str, size: int) -> None:
        os.truncate(self.path(path), size)

    def read_file(self, path: str) -> bytes:
        _expect_no_fifo(self.path(path))
        with open(self.path(path), "rb") as file:
            return file.read()

    def unlink(self, path: str) -> None:
        os.unlink(self.path(path))

    def rename(self, path: str, to: str) -> None:
        os.rename(self.path(path), self.path(to))

    def exchange(self, path: str, to: str) -> None:
        exchange(self.path(path), self.path(to))

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self.path(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self.path(path))

    def symlink(self, path: str, target: str) -> None:
        os.symlink(target, self.path(path))

    def readlink(self, path: str) -> str:
        return os.readlink(self.path(path))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self.path(path), mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        os.chown(self.path(path), uid, gid, follow_symlinks=False)

    def utimens(self, path: str, mtime_ns: int) -> None:
        os.utime(self.path(path), ns=(0, mtime_ns), follow_symlinks=False)

    def setxattr(self, path: str, name: str, value: bytes, flags: int) -> None:
        os.setxattr(self.path(path), f"user.{name}", value, flags, follow_symlinks=False)

    def getxattr(self, path: str, name: str) -> bytes:
        return os.getxattr(self.path(path), f"user.{name}", follow_symlinks=False)

    def removexattr(self, path: str, name: str) -> None:
        os.removexattr(self.path(path), f"user.{name}", follow_symlinks=False)

    def lstat(self, path: str) -> Seen:
        return seen(os.lstat(self.path(path)))

    def stat(self, path: str) -> Seen:
        return seen(os.stat(self.path(path)))

    def listdir(self, path: str) -> list[tuple[str, str]]:
        with os.scandir(self.path(path)) as entries:
            return sorted((e.name, _kind(e)) for e in entries)

    def sync_folder(self, path: str) -> None:
        handle = os.open(self.path(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def statfs(self) -> int:
        return os.statvfs(self.root).f_namemax

    def link(self, path: str, to: str) -> None:
        os.link(self.path(path), self.path(to), follow_symlinks=False)
        self._refuse(to)

    def _refuse(self, path: str) -> None:
        """Take back what worked on the plain side, and refuse it there as an object store's mount does."""
        if not self.refuses:
            return
        os.unlink(self.path(path))
        raise PermissionError(errno.EPERM, "an object store has no such thing")

    def fifo(self, path: str) -> None:
        os.mkfifo(self.path(path))

    def parent_times(self, *paths: str) -> Callable[[], None]:
        """A function that sets the modification times of the paths' folders back to what they are now."""
        before = {p: os.stat(p).st_mtime_ns for p in {os.path.dirname(self.path(path)) for path in paths} if exists(p)}

        def restore() -> None:
            for path, mtime_ns in before.items():
                os.utime(path, ns=(0, mtime_ns))

        return restore

    # --- everything ---

    def tree(self) -> dict[str, tuple[Seen, object, dict[str, bytes]]]:
        """Every path below the root with its attributes, its content (bytes, text for what is no file, or None) and
        its extended attributes."""
        return {
            path: (seen(os.lstat(self.path(path))), self._content(path), _xattrs(self.path(path)))
            for path in walk(self.root)
        }

    def _content(self, path: str) -> object:
        mode = os.lstat(self.path(path)).st_mode
        if stat.S_ISLNK(mode):
            return os.readlink(self.path(path))
        if stat.S_ISFIFO(mode):
            return "a FIFO"
        return None if stat.S_ISDIR(mode) else self.read_file(path)


def _xattrs(path: str) -> dict[str, bytes]:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as exc:
        if exc.errno != errno.EOPNOTSUPP:
            raise
        return {}
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in names if name.startswith("user.")}


def _kind(entry: os.DirEntry[str]) -> str:
    """A letter for the type that a directory tells of a name."""
    if entry.is_symlink():
        return "l"
    return "d" if entry.is_dir() else "f" if entry.is_file() else "p"


def _expect_no_fifo(path: str) -> None:
    if is_fifo(path):
        raise OSError(errno.ENXIO, "it is a FIFO")


def is_fifo(path: str) -> bool:
    """Return whether a path leads to a FIFO."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _EXCHANGE = -100, 2


def exchange(path: str, to: str) -> None:
    """renameat2(2) with RENAME_EXCHANGE."""
    if _libc.renameat2(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(to), _EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def exists(path: str) -> bool:
    """Return whether a path leads somewhere."""
    return os.path.exists(path)


def walk(root: Path) -> list[str]:
    """All paths below a folder, relative and sorted."""

    def fail(exc: OSError) -> None:
        raise exc

    return sorted(
        os.path.relpath(os.path.join(top, name), root)
        for top, dirs, files in os.walk(root, onerror=fail)
        for name in (*dirs, *files)
    )


def expected_objects(root: Path) -> tuple[dict[str, bytes], set[str], set[str]]:
    """Return what a bucket must hold for a plain tree: objects (files, and links with their target as content), the
    markers it may hold (folders), and those it must (empty folders). A FIFO has no bytes."""
    objects, folders, empty = {}, set(), set()
    for path in walk(root):
        full = os.path.join(root, path)
        if os.path.islink(full):
            objects[path] = os.fsencode(os.readlink(full))
        elif os.path.isdir(full):
            folders.add(f"{path}/")
            if not os.listdir(full):
                empty.add(f"{path}/")
        else:
            objects[path] = b"" if is_fifo(full) else Path(full).read_bytes()
    return objects, folders, empty


# --- what operations are about ---


class Place(NamedTuple):
    """A path, chosen when the operation is done: of what is there, or a name in a folder that is there."""

    existing: bool
    number: int
    name: str


names = st.one_of(st.sampled_from(NAMES[:3]), st.sampled_from([*NAMES, TOO_LONG]))
new_places = st.builds(Place, st.sampled_from([False, False, False, True]), st.integers(0, 40), names)
places = st.builds(Place, st.sampled_from([True, True, True, False]), st.integers(0, 40), names)
slots = st.integers(0, SLOTS - 1)
offsets = st.one_of(st.integers(0, 40), st.sampled_from([4095, 4096, 65_536, 131_071, 200_001]))
sizes = st.one_of(st.integers(0, 40), st.sampled_from([4096, 65_536, 65_537, 131_072, 300_000]))
modes = st.sampled_from([0o600, 0o644, 0o755, 0o700, 0o640, 0o1777, 0o4755, 0o2775])
"""The owner may read and write, so that the comparison also runs without root's rights."""
times = st.one_of(st.integers(1, CLOCK_STARTS_NS - 1), st.just(1_234_567_890_123_456_789))
_RENAMES = ["rename", "rename", "rename", "exchange"]
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = disk.FALLOC_KEEP_SIZE, disk.FALLOC_PUNCH_HOLE | 1, disk.FALLOC_ZERO_RANGE
targets = st.sampled_from([*NAMES, ".", "a/b", "nowhere/b", "t" * 1000])
open_flags = st.builds(
    lambda how, more: how | more,
    st.sampled_from([os.O_RDWR, os.O_RDWR, os.O_WRONLY, os.O_RDONLY]),
    st.sampled_from(
        [os.O_CREAT, os.O_CREAT, os.O_CREAT | os.O_APPEND, os.O_CREAT | os.O_TRUNC, 0, 0, os.O_TRUNC, os.O_APPEND,
         os.O_CREAT | os.O_EXCL, os.O_DIRECTORY, os.O_NOFOLLOW]
    ),
)  # fmt: skip


def data_of(size: int, mark: int) -> bytes:
    """Bytes that differ by mark, and from offset to offset."""
    return (bytes(range(mark % 251, 251)) * (size // 100 + 1))[:size] if size else b""


class Comparison(RuleBasedStateMachine):
    """Random operations on a plain directory and a subject. Subclasses say where both are in `setting`."""

    keeps_folders = True
    """Whether the store has objects for folders, which keep the empty ones and their attributes."""
    allocates = True
    """Tells whether the subject has fallocate(2)."""
    keeps_xattrs = True
    """Tells whether the subject has extended attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.subject, plain = self.setting()
        self.prefix = plain.name
        plain.mkdir(parents=True)
        self.plain = Side(plain, refuses=True)
        self.other = Side(self.subject.folder() / plain.name, refuses=False)
        self.other.root.mkdir()
        self.mark = 0

    def setting(self) -> tuple[Subject, Path]:
        """The subject, and a folder that is not there yet; one of the same name is made in the subject."""
        raise NotImplementedError

    # --- how both are asked ---

    def both(self, operation: str, *arguments: Any) -> Any:
        """Do it on both sides, compare what they say, and return it."""
        expected = self.plain.attempt(operation, *arguments)
        actual = self.other.attempt(operation, *arguments)
        assert actual == expected, f"{operation}{shortened(arguments)}: {shortened(actual)}, not {shortened(expected)}"
        return expected

    def resolve(self, place: Place, *, folder: bool = False) -> str:
        """The path meant. A folder's may be the root, ''."""
        paths = walk(self.plain.root)
        folders = ["", *(p for p in paths if os.path.isdir(self.plain.path(p)) and not os.path.islink(p))]
        if folder:
            return folders[place.number % len(folders)]
        if place.existing and paths:
            return paths[place.number % len(paths)]
        parent = folders[place.number % len(folders)]
        path = f"{parent}/{place.name}" if parent else place.name
        return path if len(os.fsencode(path)) < MAX_KEY_BYTES else place.name

    def fresh(self, size: int) -> bytes:
        self.mark += 1
        return data_of(size, self.mark)

    def check_tree(self) -> None:
        """Names, attributes and contents are equal."""
        expected, actual = self.plain.tree(), self.other.tree()
        assert list(actual) == list(expected)
        for path, told in expected.items():
            assert actual[path] == told, f"{path}: {shortened(actual[path])}, not {shortened(told)}"

    @initialize(mode=modes)
    def begin(self, mode: int) -> None:
        """The same permissions at the root, a folder, and an open file."""
        self.both("chmod", "", 0o755)
        self.both("mkdir", "b", mode)
        self.both("open", 0, "a", os.O_RDWR | os.O_CREAT, mode)

    # Few rules with many actions each: hypothesis leaves rules out by chance, and most sequences of these would be of
    # no use without the others.

    @rule(slot=slots, place=places, flags=open_flags, mode=modes)
    def open(self, slot: int, place: Place, flags: int, mode: int) -> None:
        self.both("open", slot, self.resolve(place), flags, mode)

    @precondition(lambda self: self.plain.handles)
    @rule(
        action=st.sampled_from(
            ["write", "write", "write", "append", "append", "read", "read", "map_read", "map_write", "ftruncate",
             "ftruncate", "allocate", "allocate", "copy", "copy", "fsync", "fstat", "fchmod", "close"]
        ),
        slot=slots,
        other=slots,
        start=offsets,
        how=st.sampled_from([0, KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE]),
        offset=offsets,
        size=sizes,
        mode=modes,
    )  # fmt: skip
    def use_open_file(
        self, action: str, slot: int, other: int, start: int, how: int, offset: int, size: int, mode: int
    ) -> None:
        handle = sorted(self.plain.handles)[slot % len(self.plain.handles)]
        match action:
            case "write" | "map_write":
                self.both(action, handle, offset, self.fresh(size))
            case "append":
                self.both(action, handle, self.fresh(size))
            case "read":
                self.both(action, handle, offset, size)
            case "allocate":
                if self.allocates:
                    self.both(action, handle, how, offset, size)
            case "copy":
                to = sorted(self.plain.handles)[other % len(self.plain.handles)]
                self.both(action, handle, start, to, offset, size)
            case "ftruncate":
                self.both(action, handle, size)
            case "fchmod":
                self.both(action, handle, mode)
            case _:
                self.both(action, handle)

    @rule(slot=slots, place=places, size=sizes)
    def write_whole_file(self, slot: int, place: Place, size: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        if not isinstance(self.both("open", slot, self.resolve(place), flags, 0o644), Refused):
            self.both("append", slot, self.fresh(size))
            self.both("close", slot)

    @rule(
        action=st.sampled_from(["mkdir", "mkdir", "symlink", "link", "fifo"]),
        place=new_places,
        existing=places,
        mode=modes,
        goal=targets,
    )
    def make(self, action: str, place: Place, existing: Place, mode: int, goal: str) -> None:
        path = self.resolve(place)
        restore = self.plain.parent_times(path)
        match action:
            case "mkdir":
                self.both(action, path, mode)
            case "symlink":
                self.both(action, path, goal)
            case "link":
                self.both(action, self.resolve(existing), path)
                restore()
            case _:
                self.both(action, path)

    @rule(place=places, to=st.one_of(places, new_places), lot=st.integers(0, 5), action=st.sampled_from(_RENAMES))
    def rename(self, place: Place, to: Place, lot: int, action: str) -> None:
        path, target = self.resolve(place), self.resolve(to)
        if lot == 5:
            target = f"{path}/{to.name}"  # into itself, or below a file
        longest = max(self.longest_below(path, target), self.longest_below(target, path) if action == "exchange" else 0)
        if longest < MAX_KEY_BYTES:
            self.both(action, path, target)

    def longest_below(self, path: str, target: str) -> int:
        """Bytes of the longest path when what lies below one is below another."""
        below = [os.path.relpath(p, path) for p in walk(self.plain.root) if p.startswith(f"{path}/")]
        return max((len(os.fsencode(f"{target}/{p}")) for p in below), default=0)

    @rule(action=st.sampled_from(["unlink", "rmdir"]), place=places, folder=st.booleans())
    def remove(self, action: str, place: Place, folder: bool) -> None:
        path = self.resolve(place, folder=action == "rmdir" and folder)
        if path:
            self.both(action, path)

    @rule(
        action=st.sampled_from(["truncate", "truncate", "chmod", "chown", "utimens"]),
        place=places,
        size=sizes,
        mode=modes,
        mtime_ns=times,
        owner=st.sampled_from([(0, 0), (1000, 100), (65_534, 65_534)]),
    )
    def change(self, action: str, place: Place, size: int, mode: int, mtime_ns: int, owner: tuple[int, int]) -> None:
        path = self.resolve(place)
        match action:
            case "truncate":
                self.both(action, path, size)
            case "chmod":
                self.both(action, path, mode)
            case "chown" if os.geteuid() == 0:
                self.both(action, path, *owner)
            case _:
                self.both("utimens", path, mtime_ns)

    @precondition(lambda self: self.keeps_xattrs)
    @rule(
        action=st.sampled_from(["setxattr", "setxattr", "getxattr", "removexattr"]),
        place=places,
        name=st.sampled_from(["a", "ü", 'b"c']),
        value=st.binary(max_size=20),
        how=st.sampled_from([0, 0, os.XATTR_CREATE, os.XATTR_REPLACE]),
    )
    def use_xattr(self, action: str, place: Place, name: str, value: bytes, how: int) -> None:
        path = self.resolve(place)
        if path:  # the mount point has none
            self.both(action, path, name, *((value, how) if action == "setxattr" else ()))

    @rule(action=st.sampled_from(["read_file", "stat", "listdir", "readlink", "sync_folder", "statfs"]), place=places)
    def look(self, action: str, place: Place) -> None:
        path = self.resolve(place)
        match action:
            case "stat":
                self.both("lstat", path)
                self.both("stat", path)
            case "listdir" | "sync_folder":
                self.both(action, self.resolve(place, folder=place.existing))
            case "statfs":
                self.both(action)
            case _:
                self.both(action, path)

    # --- the mount as a whole ---

    @rule(lot=st.integers(0, 5))
    def remount(self, lot: int) -> None:
        if lot != 5:  # it takes as long as hundreds of the others
            return
        self.both("close_all")
        self.subject.remount()
        self.other.root = self.subject.folder() / self.prefix
        self.check_tree()

    @rule(lot=st.integers(0, 5))
    def flush(self, lot: int) -> None:
        if lot != 5:
            return
        for slot in sorted(self.plain.handles):
            self.both("fsync", slot)
        self.subject.flush()
        self.check_bucket()

    def check_bucket(self) -> None:
        """The bucket's objects are exactly the files' contents, and empty folders have their markers."""
        found = self.subject.objects(f"{self.prefix}/")
        if found is None:
            return
        objects, folders, empty = expected_objects(self.plain.root)
        markers = {key for key in found if key.endswith("/")}
        actual = {key: data for key, data in found.items() if key and key not in markers}
        assert sorted(actual) == sorted(objects)
        wrong = [key for key, data in objects.items() if actual[key] != data]
        assert not wrong, f"the bucket's bytes of {wrong[0]!r}: {shortened(actual[wrong[0]])}"
        assert markers <= folders
        assert empty <= markers or not self.keeps_folders

    def teardown(self) -> None:
        try:
            self.check_tree()
            self.both("close_all")
            self.subject.flush()
            self.check_tree()
            self.check_bucket()
        finally:
            self.plain.close_all()
            self.other.attempt("close_all")


def shortened(value: object) -> str:
    """A value's representation, with long bytes as their length and what they begin with."""
    if isinstance(value, bytes) and len(value) > 40:
        return f"{len(value)} bytes {value[:12]!r}…{value[-8:]!r}"
    if isinstance(value, tuple):
        return f"({', '.join(map(shortened, value))})"
    return repr(value)
