"""Tar archives (ustar, pax and GNU; plain or packed with gzip, bzip2 or xz), read as streams by own code.

`tarfile` takes headers of any length into memory, ends quietly where an archive is cut between members, and seeks
wherever a header says; and it refuses headers for fields that nobody needs. Here an archive is read forwards only, and
all it unpacks to is counted: once for the names, and again for the bytes. Files and folders are taken; links, devices
and sparse files are refused. The format is pax of POSIX.1-2017. One thread.
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
from datacache.imports.archives.members import RATIO_FROM_BYTES, Export, Member, UnpackLimits

_BLOCK = 512
_MAX_HEADER_BYTES = 1 << 20
"""Of a long name or a pax header."""
_PART = 1 << 18
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}
_PACKERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}


class _Header(NamedTuple):
    name: str
    is_file: bool
    size_bytes: int
    mtime_ns: int


def is_tar(head: bytes) -> bool:
    """Tell from a file's first bytes whether it is a tar, or packed and so perhaps one."""
    return any(map(head.startswith, _PACKERS)) or (len(head) >= _BLOCK and _has_checksum(head[:_BLOCK]))


class TarExport(Export):
    """A tar that was looked through once. No file is open between calls."""

    def __init__(self, path: Path, limits: UnpackLimits) -> None:
        super().__init__(path.name, limits)
        self._path = path
        with self._open() as stream:
            for number, header in enumerate(self._headers(stream)):
                if header.is_file:
                    self.add(header.name, header.size_bytes, header.mtime_ns, number)
                stream.skip(header.size_bytes, header.name)
            stream.drain()
        self.sort()

    def read(self) -> Iterator[tuple[Member, bytes]]:
        """Yield the members in the order of the archive."""
        wanted = {member.at: member for member in self.members}
        with self._open() as stream:
            for number, header in enumerate(self._headers(stream)):
                if number in wanted:
                    yield wanted[number], stream.data(header.size_bytes, header.name)
                else:
                    stream.skip(header.size_bytes, header.name)

    @contextmanager
    def _open(self) -> Iterator[_Stream]:
        self._counted = 0
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
            yield _Stream(file, self, most_bytes)

    def _headers(self, stream: _Stream) -> Iterator[_Header]:
        """Yield one header after the other; the caller reads or skips the bytes that follow each."""
        extra: dict[str, bytes] = {}
        while any(block := stream.data(_BLOCK, "")):
            if not _has_checksum(block):
                raise self.damaged("", "the checksum of a header is wrong")
            kind, size = block[156:157], _number(block[124:136])
            if size is None:
                raise self.damaged("", "a header has no size")
            if kind in (b"x", b"X", b"g", b"L", b"K"):
                extra |= self._extra(stream, kind, size)
                continue
            name = (extra.get("path") or _name(block)).decode("utf-8", "surrogateescape")
            self.count(name)
            if any(key.startswith("GNU.sparse") for key in extra):
                raise self.refused(name, "it is a sparse file")
            if kind not in (b"0", b"\0", b"7", b"5"):
                raise self.refused(name, f"it is {_KINDS.get(kind, f'a member of kind {kind!r}')}")
            is_file = kind != b"5" and not name.endswith("/")
            mtime_ns = _time_ns(extra["mtime"]) if "mtime" in extra else (_number(block[136:148]) or 0) * 10**9
            size = _decimal(extra["size"]) if "size" in extra else size
            if size is None:
                raise self.damaged(name, "its size is no number")
            yield _Header(name, is_file, size, max(0, min(mtime_ns, 2**62)))
            extra = {}

    def _extra(self, stream: _Stream, kind: bytes, size: int) -> dict[str, bytes]:
        """Read a header that only adds to the next one."""
        if size > _MAX_HEADER_BYTES:
            raise self.refused("", f"a header of {size:,} bytes")
        data = stream.data(size, "")
        if kind in (b"L", b"K"):
            return {"path": data.partition(b"\0")[0]} if kind == b"L" else {}
        found: dict[str, bytes] = {}
        while data.strip(b"\0"):
            length = _decimal(data.partition(b" ")[0]) or 0
            record, data = data[:length], data[length:]
            key, equals, value = record.partition(b" ")[2].partition(b"=")
            if not equals or not value.endswith(b"\n"):
                raise self.damaged("", "a pax header is not whole")
            found[key.decode("utf-8", "replace")] = value[:-1]
        return {} if kind == b"g" else found  # tools write nothing in global headers that matters here


class _Stream:
    """The unpacked archive, forwards."""

    def __init__(self, file: IO[bytes], export: Export, most_bytes: int) -> None:
        self._file, self._export, self._most_bytes = file, export, most_bytes
        self._given = 0

    def data(self, size_bytes: int, name: str) -> bytes:
        """Read a member's bytes ('' for a header's), and pass over what fills up their last block."""
        data = b"".join(self._parts(size_bytes, name))
        for _ in self._parts(-size_bytes % _BLOCK, name):
            pass
        return data

    def skip(self, size_bytes: int, name: str) -> None:
        """Pass over a member's bytes, and what fills up their last block."""
        for _ in self._parts(size_bytes + -size_bytes % _BLOCK, name):
            pass

    def drain(self) -> None:
        """Read what follows the end mark: only then has the packer compared its checksum. Zeros may follow, as writers
        fill up their last record. Another archive is refused, since readers differ on whether it counts."""
        while rest := self._some(_PART, ""):
            if any(rest):
                raise UsageError(
                    f"{self._export.shown}: it goes on after its end: it is several archives, one after the other",
                    hint="Unpack it with `tar --ignore-zeros -xf` and import the folder, or import each archive by "
                    "itself.",
                )

    def _parts(self, size_bytes: int, name: str) -> Iterator[bytes]:
        while size_bytes:
            wanted = min(size_bytes, _PART)
            part = self._some(wanted, name)
            if len(part) < wanted:
                why = "the archive ends in the middle of it" if name else "its end is missing"
                raise self._export.damaged(name, why)
            size_bytes -= wanted
            yield part

    def _some(self, length: int, name: str) -> bytes:
        try:
            data = self._file.read(length)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as exc:
            raise self._export.damaged(name, f"it cannot be unpacked ({exc})") from exc
        self._given += len(data)
        if self._given > self._most_bytes:
            raise self._export.over("ratio", f"at {name!r} it has unpacked to {self._given:,} bytes")
        return data


def _name(block: bytes) -> bytes:
    name, prefix = block[:100].partition(b"\0")[0], block[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name


def _has_checksum(block: bytes) -> bool:
    noted = _number(block[148:156])
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    signed = total - 256 * sum(byte > 127 for byte in block[:148] + block[156:])
    return noted in (total, signed) and any(block)


def _number(field: bytes) -> int | None:
    """Read octal digits, or bytes after a first byte with its highest bit set (GNU)."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big") if field[0] == 0x80 else None
    digits = field.replace(b"\0", b" ").strip() or b"0"
    return None if digits.strip(b"01234567") else int(digits, 8)


def _decimal(digits: bytes) -> int | None:
    return int(digits) if digits.isdigit() and len(digits) < 20 else None


def _time_ns(text: bytes) -> int:
    try:
        return int(Decimal(text.decode("ascii")) * 10**9)
    except (InvalidOperation, UnicodeDecodeError, OverflowError, ValueError):
        return 0
