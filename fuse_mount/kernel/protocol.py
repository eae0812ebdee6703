"""The kernel's FUSE protocol: struct layouts, opcodes, flags, and the encoding and decoding of messages.

Source of every number: `include/uapi/linux/fuse.h` of the Linux kernel, protocol 7.45 (and what older minors lack). It
does no I/O, knows no file system and keeps no state; any thread may call it. All layouts are little-endian, as on every
machine this runs on (x86-64, arm64).
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable
from typing import NamedTuple

KERNEL_MAJOR = 7
KERNEL_MINOR = 45
OLDEST_MINOR = 29
"""Linux 5.1: the first with no-open for directories. Before 7.23 the reply to INIT is shorter, too."""

ROOT_INODE = 1
UNKNOWN_INODE = 0xFFFFFFFF
"""d_ino of '..': what libfuse gives where the parent's number is not known; nothing may rely on it."""

# --- opcodes (enum fuse_opcode) -----------------------------------------------------------------------------

LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK = 1, 2, 3, 4, 5, 6
MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK = 8, 9, 10, 11, 12, 13
OPEN, READ, WRITE, STATFS, RELEASE, FSYNC = 14, 15, 16, 17, 18, 20
SETXATTR, GETXATTR, LISTXATTR, REMOVEXATTR, FLUSH, INIT = 21, 22, 23, 24, 25, 26
OPENDIR, READDIR, RELEASEDIR, FSYNCDIR = 27, 28, 29, 30
ACCESS, CREATE, INTERRUPT, DESTROY, FALLOCATE = 34, 35, 36, 38, 43
BATCH_FORGET, READDIRPLUS, RENAME2, LSEEK, COPY_FILE_RANGE, TMPFILE, STATX = 42, 44, 45, 46, 47, 51, 52
COPY_FILE_RANGE_64 = 53

NOTIFY_INVAL_INODE, NOTIFY_INVAL_ENTRY = 2, 3
"""Have the kernel drop what it keeps of a file, or a name (enum fuse_notify_code)."""

UNANSWERED = frozenset((FORGET, BATCH_FORGET, INTERRUPT))
"""Requests that get no reply. INTERRUPT may be ignored: the reply to the request it means comes anyway."""

MODIFYING = frozenset((SETATTR, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, WRITE, SETXATTR,
REMOVEXATTR, CREATE, FALLOCATE, RENAME2, COPY_FILE_RANGE, COPY_FILE_RANGE_64, TMPFILE))  # fmt: skip
"""Requests that would change something. The mount is read-only, so the kernel refuses most of them itself."""

# --- flags of INIT ------------------------------------------------------------------------------------------

ASYNC_READ = 1 << 0
ATOMIC_O_TRUNC = 1 << 3
BIG_WRITES = 1 << 5
DO_READDIRPLUS = 1 << 13
READDIRPLUS_AUTO = 1 << 14
ASYNC_DIO = 1 << 15
WRITEBACK_CACHE = 1 << 16
NO_OPEN_SUPPORT = 1 << 17
PARALLEL_DIROPS = 1 << 18
MAX_PAGES = 1 << 22
NO_OPENDIR_SUPPORT = 1 << 24
EXPLICIT_INVAL_DATA = 1 << 25
HANDLE_KILLPRIV_V2 = 1 << 28
INIT_EXT = 1 << 30
PASSTHROUGH = 1 << 37
"""Linux 6.9; in `flags2` of the messages, which hold the upper half where there is INIT_EXT."""

WANTED_FLAGS = ASYNC_READ | DO_READDIRPLUS | READDIRPLUS_AUTO | ASYNC_DIO | NO_OPEN_SUPPORT | PARALLEL_DIROPS
WANTED_FLAGS |= MAX_PAGES | NO_OPENDIR_SUPPORT | EXPLICIT_INVAL_DATA

WRITABLE_FLAGS = ASYNC_READ | ATOMIC_O_TRUNC | BIG_WRITES | DO_READDIRPLUS | ASYNC_DIO
WRITABLE_FLAGS |= WRITEBACK_CACHE | PARALLEL_DIROPS | MAX_PAGES | HANDLE_KILLPRIV_V2
"""Of a mount to write to. The kernel gathers small writes and trusts its own size and times of a file. It leaves it to
us to take set-user-ID and set-group-ID away: else, where there are extended attributes, it asks for one before each
write(2) (2 µs become 74)."""

# --- flags of requests and answers --------------------------------------------------------------------------

SET_MODE, SET_UID, SET_GID, SET_SIZE, SET_ATIME, SET_MTIME, SET_FH, SET_ATIME_NOW, SET_MTIME_NOW, SET_CTIME = (
    1 << bit for bit in (0, 1, 2, 3, 4, 5, 6, 7, 8, 10)
)
"""FATTR_*: the fields of a SETATTR that count."""
SET_NO_PRIVILEGES = 1 << 11
"""FATTR_KILL_SUIDGID: set-user-ID and set-group-ID are to go, and so with the two that follow."""
_WRITE_NO_PRIVILEGES, _OPEN_NO_PRIVILEGES = 1 << 2, 1 << 0
_HAS_LOCK_OWNER = 1 << 1
"""FUSE_READ_LOCKOWNER, FUSE_WRITE_LOCKOWNER: these are a program's own bytes. Pages of a file have no owner."""
KEEP_CACHE = 1 << 1
"""FOPEN_KEEP_CACHE: the kernel's pages of the file are right."""
NO_FLUSH = 1 << 5
"""FOPEN_NOFLUSH: close(2) asks nothing."""
PASS_THROUGH = 1 << 7
"""FOPEN_PASSTHROUGH: the kernel reads a backing file itself. With KEEP_CACHE it refuses to open."""

# --- sizes and limits ---------------------------------------------------------------------------------------

MAX_READ_BYTES = 1024 * 1024
"""Largest READ: 256 pages, the kernel's limit unless `fs.fuse.max_pages_limit` was raised."""
MAX_READAHEAD_BYTES = 4 * 1024 * 1024
REQUEST_BUFFER_BYTES = 128 * 1024
"""A read of the device needs room for the largest request: a write of `_MAX_WRITE_BYTES`, or 64 KiB of xattr."""
_MAX_WRITE_BYTES = 4096
WRITE_BYTES = 1024 * 1024
"""Largest WRITE of a mount to write to: 256 pages, as for READ."""
WRITE_BUFFER_BYTES = WRITE_BYTES + 4096
_MAX_BACKGROUND = 128
_CONGESTION_THRESHOLD = 96
VALID_S = 365 * 86400
"""How long the kernel may keep names and attributes: a snapshot never changes."""

NOTIFY_RESEND = 7
"""Linux 6.9: every request that was read and not answered is queued again (enum fuse_notify_code)."""
UNIQUE_RESEND = 1 << 63
"""Set in `unique` of a request that is sent again. The answer carries the id as received."""
DEV_IOC_CLONE = 0x8004E500
"""_IOR(229, 0, uint32_t): makes a newly opened /dev/fuse another queue of the connection of the descriptor given."""
DEV_IOC_BACKING_OPEN, DEV_IOC_BACKING_CLOSE = 0x4010E501, 0x4004E502
"""_IOW(229, 1, struct fuse_backing_map), _IOW(229, 2, uint32_t)."""

IN_HEADER_BYTES = 40
OUT_HEADER_BYTES = 16

_IN_START = struct.Struct("<IIQQ")  # len opcode unique nodeid; uid gid pid total_extlen padding follow
_OUT_HEADER = struct.Struct("<IiQ")  # len error unique
# ino size blocks a/m/ctime a/m/ctimensec mode nlink uid gid rdev blksize flags
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")  # nodeid generation entry_valid attr_valid entry_valid_nsec attr_valid_nsec
_ATTR_OUT = struct.Struct("<QII")  # attr_valid attr_valid_nsec dummy
_READ_IN = struct.Struct("<QQI")  # fh offset size …
_WRITE_IN = struct.Struct("<QQII")  # fh offset size write_flags …
_INIT_IN = struct.Struct("<IIII")  # major minor max_readahead flags …
_FLAGS2 = struct.Struct("<I")  # behind them, from 7.36 on
_INIT_OUT = struct.Struct("<IIIIHHIIHHII24x")  # major … max_pages map_alignment flags2 max_stack_depth, unused
_OPEN_OUT = struct.Struct("<QIi")  # fh open_flags backing_id
_BACKING_MAP = struct.Struct("<iI8x")  # fd flags padding
_WRITE_OUT = struct.Struct("<I4x")  # size
_OPEN_IN = struct.Struct("<II")  # flags open_flags
_CREATE_IN = struct.Struct("<IIII")  # flags mode umask open_flags
_MKDIR_IN = struct.Struct("<II")  # mode umask
_LINK_IN = struct.Struct("<Q")  # oldnodeid
_MKNOD_IN = struct.Struct("<III4x")  # mode rdev umask
_RENAME_IN = struct.Struct("<Q")  # newdir
_RENAME2_IN = struct.Struct("<QI4x")  # newdir flags
_FALLOCATE_IN = struct.Struct("<QQQI4x")  # fh offset length mode
_COPY_IN = struct.Struct("<QQQQQQ")  # fh_in off_in nodeid_out fh_out off_out len …
_COPY_OUT = struct.Struct("<Q")  # bytes_copied
_SETXATTR_IN = struct.Struct("<II")  # size flags
_GETXATTR_IN = struct.Struct("<I4x")  # size
_GETXATTR_OUT = struct.Struct("<I4x")  # size
_FORGET_IN = struct.Struct("<Q")  # nlookup
_FORGET_ONE = struct.Struct("<QQ")  # nodeid nlookup
# valid fh size lock_owner a/m/ctime a/m/ctimensec mode uid gid
_SETATTR_IN = struct.Struct("<I4xQQQQQQIIII4xII4x")
_OWNER = struct.Struct("<II")  # uid gid, in the header of a request
_NOTIFY_INODE = struct.Struct("<Qqq")  # ino off len
_NOTIFY_ENTRY = struct.Struct("<QII")  # parent namelen flags
_STATFS = struct.Struct("<QQQQQIIII24x")  # blocks bfree bavail files ffree bsize namelen frsize padding spare
_NS = 1_000_000_000
_BLOCK_BYTES = 1 << 20
"""st_blksize of a file that may be written."""

unpack_start = _IN_START.unpack_from
"""(len, opcode, unique, nodeid) of the request at the start of a buffer: all that most requests are decided by."""
pack_out_header = _OUT_HEADER.pack
"""(len with the header, 0 or -errno, unique as received)."""


class InitRequest(NamedTuple):
    """The kernel's offer when the connection starts."""

    unique: int
    major: int
    minor: int
    max_readahead: int
    flags: int
    """With `flags2` as the upper half."""


class Ownership(NamedTuple):
    """Owner and group of every file of a mount, and the mode bits that are taken away."""

    uid: int
    gid: int
    umask: int


def read_arguments(buffer: bytearray) -> tuple[int, int]:
    """Return (offset, size) of a READ, READDIR or READDIRPLUS."""
    _, offset, size = _READ_IN.unpack_from(buffer, IN_HEADER_BYTES)
    return offset, size


def name_argument(buffer: bytearray, length: int) -> bytes:
    """Return the name that a LOOKUP asks for: all up to the first NUL (extensions may follow)."""
    return bytes(buffer[IN_HEADER_BYTES : buffer.index(0, IN_HEADER_BYTES, length)])


def decode_init(buffer: bytes | bytearray) -> InitRequest:
    """Decode the first request of a connection. `ValueError` when it is another one."""
    _, opcode, unique, _ = _IN_START.unpack_from(buffer)
    if opcode != INIT:
        raise ValueError(f"opcode {opcode} where INIT was due")
    major, minor, max_readahead, flags = _INIT_IN.unpack_from(buffer, IN_HEADER_BYTES)
    if flags & INIT_EXT:
        flags |= _FLAGS2.unpack_from(buffer, IN_HEADER_BYTES + _INIT_IN.size)[0] << 32
    return InitRequest(unique, major, minor, max_readahead, flags)


def encode_init(request: InitRequest, *, writable: bool = False, passthrough: bool = False) -> bytes:
    """Return the whole reply to INIT. A newer kernel is told our minor; flags are those that both know. With
    `passthrough` backing files may be on any file system that lies on no other one."""
    minor = min(KERNEL_MINOR, request.minor)
    flags = WRITABLE_FLAGS if writable else WANTED_FLAGS
    if passthrough:
        flags |= INIT_EXT | PASSTHROUGH
    flags &= request.flags
    most_below = 1 if flags & PASSTHROUGH else 0
    limits = (_MAX_BACKGROUND, _CONGESTION_THRESHOLD, WRITE_BYTES if writable else _MAX_WRITE_BYTES)
    time_granularity_ns, max_pages = 1, MAX_READ_BYTES // 4096
    halves = flags & 0xFFFFFFFF, flags >> 32
    body = _INIT_OUT.pack(
        KERNEL_MAJOR, minor, MAX_READAHEAD_BYTES, halves[0], *limits, time_granularity_ns, max_pages, 0, halves[1],
        most_below,
    )  # fmt: skip
    return pack_out_header(OUT_HEADER_BYTES + len(body), 0, request.unique) + body


def encode_resend() -> bytes:
    """Return the notification that has what was read and not answered queued again, on every clone."""
    return pack_out_header(OUT_HEADER_BYTES, NOTIFY_RESEND, 0)


class Encoder:
    """Encodes attributes for one mount: owner and modes are the same for all of its files. Immutable, thread-safe."""

    def __init__(self, owner: Ownership) -> None:
        self._uid = owner.uid
        self._gid = owner.gid
        self._file_mode = stat.S_IFREG | (0o444 & ~owner.umask)
        self._kept = 0o555 & ~owner.umask
        self._dir_mode = stat.S_IFDIR | (0o555 & ~owner.umask)

    def attributes(self, ino: int, is_dir: bool, size_bytes: int, mtime_ns: int, mode: int = 0) -> bytes:
        """Return a struct fuse_attr. `mode` is a link's, or what the snapshot knows of a file's, which loses write
        permission. A directory has one link, as on btrfs: 'not counted', so that `find` counts nothing on it."""
        s, ns = divmod(mtime_ns, _NS)
        s, blocks = max(s, 0), -(-size_bytes // 512)
        if not mode:
            mode = self._dir_mode if is_dir else self._file_mode
        elif not stat.S_ISLNK(mode):
            mode = stat.S_IFREG | (mode & self._kept)
        return _ATTR.pack(ino, size_bytes, blocks, s, s, s, ns, ns, ns, mode, 1, self._uid, self._gid, 0, 4096, 0)

    def attr_out(self, ino: int, is_dir: bool, size_bytes: int, mtime_ns: int, mode: int = 0) -> bytes:
        """Return a struct fuse_attr_out: the answer to GETATTR."""
        return _ATTR_OUT_VALID + self.attributes(ino, is_dir, size_bytes, mtime_ns, mode)

    def entry_out(self, ino: int, is_dir: bool, size_bytes: int, mtime_ns: int, mode: int = 0) -> bytes:
        """Return a struct fuse_entry_out: the answer to LOOKUP and the first part of a READDIRPLUS record."""
        return _ENTRY.pack(ino, 0, VALID_S, VALID_S, 0, 0) + self.attributes(ino, is_dir, size_bytes, mtime_ns, mode)

    def entry_as(self, node: int, valid_s: int, attributes: tuple[int, bool, int, int, int]) -> bytes:
        """Return a struct fuse_entry_out of a file that the kernel is to ask for by another number than its inode's,
        and by this name for so long."""
        return _ENTRY.pack(node, 0, valid_s, VALID_S, 0, 0) + self.attributes(*attributes)


_ATTR_OUT_VALID = _ATTR_OUT.pack(VALID_S, 0, 0)
NEGATIVE_ENTRY = _ENTRY.pack(0, 0, VALID_S, 0, 0, 0) + bytes(_ATTR.size)
"""Answer to LOOKUP of a name that does not exist, which the kernel may remember (node id 0)."""
UNLOOKED_ENTRY = bytes(_ENTRY.size + _ATTR.size)
"""The entry of '.' and '..' in READDIRPLUS: no node, so nothing is looked up."""
ENTRY_OUT_BYTES = len(NEGATIVE_ENTRY)

DT_DIR = stat.S_IFDIR >> 12
DT_REG = stat.S_IFREG >> 12
"""Types in directory records are those of st_mode, shifted."""


def dirent_packer(name_bytes: int) -> Callable[..., bytes]:
    """Return pack(ino, next_cookie, name_bytes, type, name) for names of this length; it pads records to 8 bytes.

    One precomputed layout per length makes a record one call: listings of 100,000 names spend their time here."""
    packer = _dirent_packers.get(name_bytes)
    if packer is None:
        padded = (name_bytes + 7) // 8 * 8
        packer = _dirent_packers[name_bytes] = struct.Struct(f"<QQII{padded}s").pack
    return packer


_dirent_packers: dict[int, Callable[..., bytes]] = {}


def dirent_bytes(name_bytes: int) -> int:
    """Return the length of a directory record with a name of this length."""
    return 24 + (name_bytes + 7) // 8 * 8


DOTS = 2
"""Positions that '.' and '..' take at the start of a listing."""


def dot_records(ino: int, position: int, *, plus: bool) -> bytes:
    """Return the records of '.' and '..' in a folder that come behind a position. They fit into every request."""
    entry = UNLOOKED_ENTRY if plus else b""
    parent = ROOT_INODE if ino == ROOT_INODE else UNKNOWN_INODE
    dots = enumerate(((b".", ino), (b"..", parent)), 1)
    return b"".join(
        entry + dirent_packer(len(name))(number, following, len(name), DT_DIR, name)
        for following, (name, number) in dots
        if position < following
    )


class Details(NamedTuple):
    """The attributes of one file of a mount to write to."""

    ino: int
    mode: int
    links: int
    uid: int
    gid: int
    size_bytes: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    valid_s: float
    """How long the kernel may use them, and the name."""
    rdev: int = 0
    """Of a device: its number."""

    def encode(self) -> bytes:
        """Return a struct fuse_attr."""
        size, times_ns = self.size_bytes, (self.atime_ns, self.mtime_ns, self.ctime_ns)
        seconds = [time_ns // _NS % 2**64 for time_ns in times_ns]
        parts = [time_ns % _NS for time_ns in times_ns]
        owner = self.mode, self.links, self.uid, self.gid
        return _ATTR.pack(self.ino, size, -(-size // 512), *seconds, *parts, *owner, self.rdev, _BLOCK_BYTES, 0)

    def attr_out(self) -> bytes:
        """Return a struct fuse_attr_out."""
        s, ns = divmod(int(self.valid_s * _NS), _NS)
        return _ATTR_OUT.pack(s, ns, 0) + self.encode()

    def entry_out(self) -> bytes:
        """Return a struct fuse_entry_out."""
        s, ns = divmod(int(self.valid_s * _NS), _NS)
        return _ENTRY.pack(self.ino, 0, s, s, ns, ns) + self.encode()


class FieldsToSet(NamedTuple):
    """The body of a SETATTR: `valid` says which count (`SET_*`)."""

    valid: int
    fh: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    uid: int
    gid: int


def fields_to_set(buffer: bytearray) -> FieldsToSet:
    """Return the body of a SETATTR."""
    fields = _SETATTR_IN.unpack_from(buffer, IN_HEADER_BYTES)
    valid, fh, size, _owner, *times, mode, uid, gid = fields
    atime_ns, mtime_ns, ctime_ns = (
        (s - 2**64 if s >= 2**63 else s) * _NS + ns for s, ns in zip(times[:3], times[3:], strict=True)
    )
    if ctime_ns == mtime_ns:  # as after a write: one object, of which there may be one for each of very many files
        ctime_ns = mtime_ns
    return FieldsToSet(valid, fh, size, atime_ns, mtime_ns, ctime_ns, mode, uid, gid)


def owner_of(buffer: bytearray) -> tuple[int, int]:
    """Return user and group of the process that asks."""
    found: tuple[int, int] = _OWNER.unpack_from(buffer, 24)
    return found


def names_of(buffer: bytearray, length: int, skip: int = 0) -> list[bytes]:
    """Return the names at the end of a request, behind `skip` bytes of other arguments: each ends in a NUL. Extensions
    may follow."""
    return bytes(memoryview(buffer)[IN_HEADER_BYTES + skip : length]).split(b"\0")


def opened(buffer: bytearray) -> int:
    """Return the handle of a READ, WRITE, FLUSH, RELEASE, FSYNC, or of the same for folders."""
    fh: int = _READ_IN.unpack_from(buffer, IN_HEADER_BYTES)[0]
    return fh


def data_of(buffer: bytearray) -> memoryview:
    """Return the bytes of a WRITE, where they lie in the buffer."""
    size = _READ_IN.unpack_from(buffer, IN_HEADER_BYTES)[2]
    return memoryview(buffer)[IN_HEADER_BYTES + 40 : IN_HEADER_BYTES + 40 + size]


def drops_privileges(buffer: bytearray, opcode: int) -> bool:
    """Return whether an OPEN or WRITE is to take set-user-ID and set-group-ID away."""
    if opcode == OPEN:
        return bool(_OPEN_IN.unpack_from(buffer, IN_HEADER_BYTES)[1] & _OPEN_NO_PRIVILEGES)
    return bool(_WRITE_IN.unpack_from(buffer, IN_HEADER_BYTES)[3] & _WRITE_NO_PRIVILEGES)


def is_direct(buffer: bytearray) -> bool:
    """Return whether a READ or WRITE goes past the kernel's pages of the file. The flag O_DIRECT of the open file does
    not say so of a READ: that may be for a page that is mapped."""
    return bool(_WRITE_IN.unpack_from(buffer, IN_HEADER_BYTES)[3] & _HAS_LOCK_OWNER)  # a READ begins as a WRITE


def creation(buffer: bytearray, length: int) -> tuple[int, int, bytes]:
    """Return (flags, mode, name) of a CREATE, or of a TMPFILE, whose name counts for nothing."""
    flags, mode, umask, _ = _CREATE_IN.unpack_from(buffer, IN_HEADER_BYTES)
    return flags, mode & ~umask, names_of(buffer, length, _CREATE_IN.size)[0]


def new_node(buffer: bytearray, length: int) -> tuple[int, int, bytes]:
    """Return (mode, device number, name) of a MKNOD."""
    mode, rdev, umask = _MKNOD_IN.unpack_from(buffer, IN_HEADER_BYTES)
    return mode & ~umask, rdev, names_of(buffer, length, _MKNOD_IN.size)[0]


def new_folder(buffer: bytearray, length: int) -> tuple[int, bytes]:
    """Return (mode, name) of a MKDIR."""
    mode, umask = _MKDIR_IN.unpack_from(buffer, IN_HEADER_BYTES)
    return mode & ~umask, names_of(buffer, length, _MKDIR_IN.size)[0]


def linking(buffer: bytearray, length: int) -> tuple[int, bytes]:
    """Return (inode, name) of a LINK, whose own inode is the folder."""
    return _LINK_IN.unpack_from(buffer, IN_HEADER_BYTES)[0], names_of(buffer, length, _LINK_IN.size)[0]


def renaming(buffer: bytearray, length: int, opcode: int) -> tuple[bytes, int, bytes, int]:
    """Return (name, new parent, new name, flags) of a RENAME or RENAME2."""
    layout = _RENAME2_IN if opcode == RENAME2 else _RENAME_IN
    new_parent, *flags = layout.unpack_from(buffer, IN_HEADER_BYTES)
    name, new_name, *_ = names_of(buffer, length, layout.size)
    return name, new_parent, new_name, flags[0] if flags else 0


class Allocation(NamedTuple):
    """A FALLOCATE's range of an open file, and its mode."""

    fh: int
    offset: int
    size: int
    mode: int


def allocation(buffer: bytearray) -> Allocation:
    """Return the body of a FALLOCATE."""
    return Allocation(*_FALLOCATE_IN.unpack_from(buffer, IN_HEADER_BYTES))


class Copying(NamedTuple):
    """A copy from one open file to another."""

    source: int
    start: int
    ino: int
    fh: int
    offset: int
    size: int


def copying(buffer: bytearray) -> Copying:
    """Return the body of a COPY_FILE_RANGE, of either width."""
    return Copying(*_COPY_IN.unpack_from(buffer, IN_HEADER_BYTES))


def new_xattr(buffer: bytearray, length: int) -> tuple[bytes, bytes, int]:
    """Return (name, value, flags) of a SETXATTR."""
    size, flags = _SETXATTR_IN.unpack_from(buffer, IN_HEADER_BYTES)
    name = names_of(buffer, length, _SETXATTR_IN.size)[0]
    start = IN_HEADER_BYTES + _SETXATTR_IN.size + len(name) + 1
    return name, bytes(buffer[start : start + size]), flags


def asked_xattr(buffer: bytearray, length: int) -> tuple[bytes, int]:
    """Return (name, room) of a GETXATTR; a LISTXATTR has no name."""
    return names_of(buffer, length, _GETXATTR_IN.size)[0], _GETXATTR_IN.unpack_from(buffer, IN_HEADER_BYTES)[0]


def xattr_out(size_bytes: int) -> bytes:
    """Return a struct fuse_getxattr_out: the answer to a GETXATTR or LISTXATTR without room."""
    return _GETXATTR_OUT.pack(size_bytes)


def forgotten(buffer: bytearray, opcode: int, ino: int) -> list[tuple[int, int]]:
    """Return (inode, count) of each that a FORGET or BATCH_FORGET names."""
    if opcode == FORGET:
        return [(ino, _FORGET_IN.unpack_from(buffer, IN_HEADER_BYTES)[0])]
    count, _ = _OWNER.unpack_from(buffer, IN_HEADER_BYTES)
    start = IN_HEADER_BYTES + 8
    return list(_FORGET_ONE.iter_unpack(memoryview(buffer)[start : start + count * _FORGET_ONE.size]))


def open_out(fh: int, flags: int = KEEP_CACHE, backing_id: int = 0) -> bytes:
    """Return a struct fuse_open_out."""
    return _OPEN_OUT.pack(fh, flags, backing_id)


def backing_map(fd: int) -> bytes:
    """Return a struct fuse_backing_map: the argument of `DEV_IOC_BACKING_OPEN`."""
    return _BACKING_MAP.pack(fd, 0)


def write_out(size_bytes: int) -> bytes:
    """Return a struct fuse_write_out."""
    return _WRITE_OUT.pack(size_bytes)


def copy_out(size_bytes: int) -> bytes:
    """Return a struct fuse_copy_file_range_out: the answer to COPY_FILE_RANGE_64."""
    return _COPY_OUT.pack(size_bytes)


def encode_forget_attributes(ino: int) -> bytes:
    """Return the notification that has the kernel forget the attributes of a file. It waits for nothing."""
    return _encode_forget(ino, offset=-1)


def encode_forget_pages(ino: int, offset: int = 0, size: int = 0) -> bytes:
    """Return the notification that has the kernel write what it has gathered of a file, or of a range of it, and forget
    its pages there and its attributes."""
    return _encode_forget(ino, offset, size)


def _encode_forget(ino: int, offset: int, size: int = 0) -> bytes:
    body = _NOTIFY_INODE.pack(ino, offset, size)
    return pack_out_header(OUT_HEADER_BYTES + len(body), NOTIFY_INVAL_INODE, 0) + body


def encode_forget_name(parent: int, name: bytes) -> bytes:
    """Return the notification that has the kernel forget a name."""
    body = _NOTIFY_ENTRY.pack(parent, len(name), 0) + name + b"\0"
    return pack_out_header(OUT_HEADER_BYTES + len(body), NOTIFY_INVAL_ENTRY, 0) + body


def encode_room(blocks: int, free: int, *, longest_name: int) -> bytes:
    """Return a struct fuse_statfs_out of a file system of so many blocks of 4 KiB, and any number of files."""
    return _STATFS.pack(blocks, free, free, 2**32, 2**32, 4096, longest_name, 4096, 0)


def encode_statfs(total_bytes: int, files: int) -> bytes:
    """Return a struct fuse_statfs_out of a full, read-only file system of this size."""
    return _STATFS.pack(-(-total_bytes // 4096), 0, 0, files, 0, 4096, 255, 4096, 0)
