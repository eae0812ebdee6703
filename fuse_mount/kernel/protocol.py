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

UNANSWERED = frozenset((FORGET, BATCH_FORGET, INTERRUPT))
"""Requests that get no reply. INTERRUPT may be ignored: the reply to the request it means comes anyway."""

MODIFYING = frozenset((SETATTR, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, WRITE, SETXATTR,
REMOVEXATTR, CREATE, FALLOCATE, RENAME2, COPY_FILE_RANGE, TMPFILE))  # fmt: skip
"""Requests that would change something. The mount is read-only, so the kernel refuses most of them itself."""

# --- flags of INIT ------------------------------------------------------------------------------------------

ASYNC_READ = 1 << 0
DO_READDIRPLUS = 1 << 13
READDIRPLUS_AUTO = 1 << 14
ASYNC_DIO = 1 << 15
NO_OPEN_SUPPORT = 1 << 17
PARALLEL_DIROPS = 1 << 18
MAX_PAGES = 1 << 22
NO_OPENDIR_SUPPORT = 1 << 24
EXPLICIT_INVAL_DATA = 1 << 25

WANTED_FLAGS = ASYNC_READ | DO_READDIRPLUS | READDIRPLUS_AUTO | ASYNC_DIO | NO_OPEN_SUPPORT | PARALLEL_DIROPS
WANTED_FLAGS |= MAX_PAGES | NO_OPENDIR_SUPPORT | EXPLICIT_INVAL_DATA

# --- sizes and limits ---------------------------------------------------------------------------------------

MAX_READ_BYTES = 1024 * 1024
"""Largest READ: 256 pages, the kernel's limit unless `fs.fuse.max_pages_limit` was raised."""
MAX_READAHEAD_BYTES = 4 * 1024 * 1024
REQUEST_BUFFER_BYTES = 128 * 1024
"""A read of the device needs room for the largest request: a write of `_MAX_WRITE_BYTES`, or 64 KiB of xattr."""
_MAX_WRITE_BYTES = 4096
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

IN_HEADER_BYTES = 40
OUT_HEADER_BYTES = 16

_IN_START = struct.Struct("<IIQQ")  # len opcode unique nodeid; uid gid pid total_extlen padding follow
_OUT_HEADER = struct.Struct("<IiQ")  # len error unique
# ino size blocks a/m/ctime a/m/ctimensec mode nlink uid gid rdev blksize flags
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")  # nodeid generation entry_valid attr_valid entry_valid_nsec attr_valid_nsec
_ATTR_OUT = struct.Struct("<QII")  # attr_valid attr_valid_nsec dummy
_READ_IN = struct.Struct("<QQI")  # fh offset size …
_INIT_IN = struct.Struct("<IIII")  # major minor max_readahead flags …
_INIT_OUT = struct.Struct("<IIIIHHIIHHII24x")  # major … max_pages map_alignment flags2 max_stack_depth, unused
_STATFS = struct.Struct("<QQQQQIIII24x")  # blocks bfree bavail files ffree bsize namelen frsize padding spare
_NS = 1_000_000_000

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
    return InitRequest(unique, *_INIT_IN.unpack_from(buffer, IN_HEADER_BYTES))


def encode_init(request: InitRequest) -> bytes:
    """Return the whole reply to INIT. A newer kernel is told our minor; flags are those that both know."""
    minor, flags = min(KERNEL_MINOR, request.minor), WANTED_FLAGS & request.flags
    limits = (_MAX_BACKGROUND, _CONGESTION_THRESHOLD, _MAX_WRITE_BYTES)
    time_granularity_ns, max_pages = 1, MAX_READ_BYTES // 4096
    body = _INIT_OUT.pack(
        KERNEL_MAJOR, minor, MAX_READAHEAD_BYTES, flags, *limits, time_granularity_ns, max_pages, 0, 0, 0
    )
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


def encode_statfs(total_bytes: int, files: int) -> bytes:
    """Return a struct fuse_statfs_out of a full, read-only file system of this size."""
    return _STATFS.pack(-(-total_bytes // 4096), 0, 0, files, 0, 4096, 255, 4096, 0)
