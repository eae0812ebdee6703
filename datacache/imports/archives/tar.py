"""Tar archives (ustar, pax and GNU; plain or packed with gzip, bzip2 or xz), read as streams by own code.

`tarfile` takes headers of any length into memory and seeks where it is told to. Here an archive is read forwards only,
with all it unpacks to counted: once for the names, and again for the bytes. Files and folders are taken; links, devices
and sparse files are refused. The format is that of pax in POSIX.1-2017. One thread.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import IO, Any, NamedTuple

from datacache.core.errors import UsageError
from datacache.imports.archives.archive import RATIO_FROM_BYTES, Member, Members, UnpackLimits, damaged

_BLOCK = 512
_MAX_HEADER_BYTES = 1 << 20
"""Of a long name or a pax header."""
_PART = 1 << 18
_FILE, _FOLDER, _OTHER = "file", "folder", "other"
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}
_PACKERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}


class _Header(NamedTuple):
    name: str
    is_file: bool
    size_bytes: int
    mtime_ns: int


def is_tar(head: bytes) -> bool:
    """Whether a file that begins so is a tar, or packed so that it may be one."""
    return any(map(head.startswith, _PACKERS)) or (len(head) >= _BLOCK and _has_checksum(head[:_BLOCK]))


class TarExport:
    """A tar that was looked through once. Close it."""

    def __init__(self, path: Path, limits: UnpackLimits) -> None:
        self._path, self._shown, self._limits = path, path.name, limits
        members = Members(self._shown, limits)
        with self._open(members) as stream:
            for number, header in enumerate(_headers(stream, members)):
                if header.is_file:
                    members.add(header.name, header.size_bytes, header.mtime_ns, number)
                stream.skip(header.size_bytes, header.name)
            stream.drain()
        self.members = members.sorted()
        self.passed_over = members.passed_over

    def read(self) -> Iterator[tuple[Member, bytes]]:
        """See `Export`: in the order of the archive."""
        wanted = {member.at: member for member in self.members}
        members = Members(self._shown, self._limits)
        with self._open(members) as stream:
            for number, header in enumerate(_headers(stream, members)):
                member = wanted.get(number)
                if member is None:
                    stream.skip(header.size_bytes, header.name)
                else:
                    yield member, stream.data(header.size_bytes, header.name)

    def close(self) -> None:
        """See `Export`: nothing is open between calls."""

    @contextmanager
    def _open(self, members: Members) -> Iterator[_Stream]:
        with ExitStack() as stack:
            try:
                file: IO[bytes] = stack.enter_context(open(self._path, "rb"))
                magic = file.read(6)
                packed_bytes = file.seek(0, 2)
                file.seek(0)
            except OSError as exc:
                raise UsageError(f"{self._path} cannot be read: {exc.strerror}") from exc
            most_bytes = packed_bytes
            for start, opener in _PACKERS.items():
                if magic.startswith(start):
                    most_bytes = max(RATIO_FROM_BYTES, packed_bytes * self._limits.ratio)
                    file = stack.enter_context(opener(file, "rb"))
            yield _Stream(file, self._shown, members, most_bytes)


class _Stream:
    """What the archive unpacks to, forwards."""

    def __init__(self, file: IO[bytes], shown: str, members: Members, most_bytes: int) -> None:
        self._file, self.shown, self._members, self._most_bytes = file, shown, members, most_bytes
        self._given = 0

    def block(self) -> bytes:
        """The next block of 512 bytes, which must be there."""
        return self._read(_BLOCK, "")

    def data(self, size_bytes: int, name: str) -> bytes:
        """A member's bytes."""
        parts = list(self._parts(size_bytes, name))
        parts.append(self._read(-size_bytes % _BLOCK, name)[:0])
        return b"".join(parts)

    def skip(self, size_bytes: int, name: str) -> None:
        """Pass over a member's bytes."""
        for _ in self._parts(size_bytes + -size_bytes % _BLOCK, name):
            pass

    def drain(self) -> None:
        """Read what follows the end mark: only then has the packer compared its checksum. Zeros may follow, as writers
        fill up their last record; another archive is refused, since readers differ on whether it counts."""
        while rest := self._some(_PART, ""):
            if any(rest):
                why = "it goes on after its end: it is several archives, one after the other"
                hint = (
                    "Unpack it with `tar --ignore-zeros -xf` and import the folder, or import each archive by itself."
                )
                raise UsageError(f"{self.shown}: {why}", hint=hint)

    def _parts(self, size_bytes: int, name: str) -> Iterator[bytes]:
        left = size_bytes
        while left:
            part = self._read(min(left, _PART), name)
            left -= len(part)
            yield part

    def _read(self, length: int, name: str) -> bytes:
        data = self._some(length, name)
        if len(data) < length:
            raise damaged(self.shown, name, "the archive ends in the middle of it" if name else "its end is missing")
        return data

    def _some(self, length: int, name: str) -> bytes:
        try:
            data = self._file.read(length)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as exc:
            raise damaged(self.shown, name, f"it cannot be unpacked ({exc})") from exc
        self._given += len(data)
        if self._given > self._most_bytes:
            raise self._members.over("ratio", f"at {name!r} it has unpacked to {self._given:,} bytes")
        return data


def _headers(stream: _Stream, members: Members) -> Iterator[_Header]:
    """One header after the other; the caller reads or skips the bytes that follow each."""
    extra: dict[str, bytes] = {}
    while any(block := stream.block()):
        if not _has_checksum(block):
            raise damaged(stream.shown, "", "the checksum of a header is wrong")
        kind, size = block[156:157], _number(block[124:136])
        if size is None:
            raise damaged(stream.shown, "", "a header has no size")
        if kind in (b"x", b"X", b"g", b"L", b"K"):
            extra |= _extra(stream, members, kind, size)
            continue
        name = _text(extra.get("path") or _name(block))
        members.count(name)
        if any(key.startswith("GNU.sparse") for key in extra):
            raise members.refused(name, "it is a sparse file")
        if kind not in (b"0", b"\0", b"7", b"5"):
            raise members.refused(name, f"it is {_KINDS.get(kind, f'a member of kind {kind!r}')}")
        is_file = kind != b"5" and not name.endswith("/")
        mtime_ns = _time_ns(extra["mtime"]) if "mtime" in extra else (_number(block[136:148]) or 0) * 10**9
        size = _decimal(extra["size"]) if "size" in extra else size
        if size is None:
            raise damaged(stream.shown, name, "its size is no number")
        yield _Header(name, is_file, size, max(0, min(mtime_ns, 2**62)))
        extra = {}


def _extra(stream: _Stream, members: Members, kind: bytes, size: int) -> dict[str, bytes]:
    """What a header that only adds to the next one says."""
    if size > _MAX_HEADER_BYTES:
        raise members.refused("", f"a header of {size:,} bytes")
    data = stream.data(size, "")
    if kind in (b"L", b"K"):
        return {"path": data.partition(b"\0")[0]} if kind == b"L" else {}
    found: dict[str, bytes] = {}
    while data.strip(b"\0"):
        length = _decimal(data.partition(b" ")[0]) or 0
        record, data = data[:length], data[length:]
        key, equals, value = record.partition(b" ")[2].partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise damaged(stream.shown, "", "a pax header is not whole")
        found[key.decode("utf-8", "replace")] = value[:-1]
    if kind == b"g":  # for all that follows: what nobody writes who wants to be understood
        return {}
    return found


def _name(block: bytes) -> bytes:
    name, prefix = block[:100].partition(b"\0")[0], block[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _has_checksum(block: bytes) -> bool:
    noted = _number(block[148:156])
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    signed = total - 256 * sum(byte > 127 for byte in block[:148] + block[156:])
    return noted in (total, signed) and any(block)


def _number(field: bytes) -> int | None:
    """Octal digits, or bytes from a first byte with its highest bit set (GNU)."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big") if field[0] == 0x80 else None
    digits = field.replace(b"\0", b" ").strip()
    try:
        return int(digits or b"0", 8)
    except ValueError:
        return None


def _decimal(digits: bytes) -> int | None:
    return int(digits) if digits.isdigit() and len(digits) < 20 else None


def _time_ns(text: bytes) -> int:
    try:
        return int(Decimal(text.decode("ascii")) * 10**9)
    except (InvalidOperation, UnicodeDecodeError, OverflowError, ValueError):
        return 0
