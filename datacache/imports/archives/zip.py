"""Zip archives, read by own code, so that nothing in them is believed (PKWARE's APPNOTE 6.3.10).

`zipfile` has the whole directory in memory before one can ask how large it is, believes its sizes, and takes entries
that overlap (https://www.bamsoftware.com/hacks/zipbomb/). Here the directory is read as a stream, and every entry must
have bytes of its own. Stored and deflated members are read; annotation tools write nothing else. Names are UTF-8 where
the entry says so; else UTF-8 if all of them are, GBK if all of them look like it (Windows in China), or CP437. One
thread.
"""

from __future__ import annotations

import re
import stat
import struct
import zlib
from calendar import timegm
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple

from datacache.core.errors import ImportFailedError, UsageError
from datacache.imports.archives.members import RATIO_FROM_BYTES, Export, Member, UnpackLimits

_END = struct.Struct("<4s4H2LH")  # 4.3.16, end of the central directory
_LOCATOR = struct.Struct("<4sLQL")  # 4.3.15
_END64 = struct.Struct("<4sQ2H2L4Q")  # 4.3.14
_ENTRY = struct.Struct("<4s6H3L5H2L")  # 4.3.12, central directory header
_LOCAL = struct.Struct("<4s5H3L2H")  # 4.3.7
_ENCRYPTED, _UTF8 = 0x0001 | 0x0040 | 0x2000, 0x0800
_STORED, _DEFLATED = 0, 8
_METHODS = {9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard", 95: "XZ", 98: "PPMd", 99: "AES encryption"}
_MAX_COMMENT = 65_535
_PART = 1 << 18
_ZIP64, _UNIX_TIME, _UNICODE_PATH = 0x0001, 0x5455, 0x7075
_LOOKS_GBK = re.compile(rb"(?:[\x00-\x7f]|[\xa1-\xa9\xb0-\xf7][\xa1-\xfe])*")
"""Names in which every character of two bytes is of GB2312: the 6,763 common hanzi, and punctuation."""


class _Entry(NamedTuple):
    raw_name: bytes
    extra: dict[int, bytes]
    flags: int
    method: int
    crc: int
    packed_bytes: int
    size_bytes: int
    mode: int
    """Of Unix; 0 where the archive says none."""
    mtime_ns: int
    offset: int
    """Of its local header, not yet shifted."""


def is_zip(head: bytes) -> bool:
    """Tell from a file's first bytes whether it is a zip."""
    return head.startswith((b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08"))


class ZipExport(Export):
    """An open zip."""

    def __init__(self, path: Path, limits: UnpackLimits) -> None:
        super().__init__(path.name, limits)
        try:
            self._file: IO[bytes] = open(path, "rb")  # noqa: SIM115 - closed by close()
        except OSError as exc:
            raise UsageError(f"{path} cannot be opened: {exc.strerror}") from exc
        try:
            self._look_through()
        except BaseException:
            self._file.close()
            raise
        self.sort()

    def read(self) -> Iterator[tuple[Member, bytes]]:
        """Yield the members by path."""
        for member in self.members:
            yield member, self._unpack(member.name, *member.at)

    def close(self) -> None:
        """Close the archive's file."""
        self._file.close()

    # --- the directory ---------------------------------------------------------------------------------------------

    def _look_through(self) -> None:
        start, size, count, shift = self._find_directory()
        entries: list[_Entry] = []
        for entry in self._entries(start, size):
            self.count(repr(entry.raw_name)[1:])
            entries.append(entry)
        if len(entries) % 65_536 != count % 65_536:  # old tools let the number wrap
            raise self.damaged("", f"its directory has {len(entries):,} entries and should have {count:,}")
        encoding = _encoding(entries)
        taken = [(start, start + size, "")]
        for entry in entries:
            name = self._decoded(entry, encoding)
            data_at = self._data_at(name, entry, shift)
            taken.append((entry.offset + shift, data_at + entry.packed_bytes, name))
            if self._is_file(name, entry):
                if RATIO_FROM_BYTES < entry.size_bytes > self._limits.ratio * entry.packed_bytes:
                    times = entry.size_bytes // max(entry.packed_bytes, 1)
                    what = f"{name!r} unpacks to {times:,} times its size, more than {self._limits.ratio:,}"
                    raise self.over("ratio", what)
                self.add(name, entry.size_bytes, entry.mtime_ns, (entry, data_at))
        taken.sort()
        for (_, end, name), (begin, _, other) in pairwise(taken):
            if end > begin:
                both = f"{other!r}, as in a zip bomb" if name and other else "the directory"
                raise self.refused(name or other, f"its bytes are also those of {both}")

    def _find_directory(self) -> tuple[int, int, int, int]:
        """Return where the directory begins, its length, its number of entries, and by how much all offsets are off,
        because something was put before the archive."""
        length = self._file.seek(0, 2)
        tail = self._read(max(0, length - _END.size - _MAX_COMMENT), min(length, _END.size + _MAX_COMMENT))
        at = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - _END.size + 4))
        if at < 0:
            raise self.damaged("", "its end is missing")
        _, disk, first_disk, _, count, size, offset, _ = _END.unpack_from(tail, at)
        end = length - len(tail) + at
        locator = self._read(max(0, end - _LOCATOR.size), _LOCATOR.size)
        if end >= _LOCATOR.size + _END64.size and locator.startswith(b"PK\x06\x07"):
            end -= _LOCATOR.size + _END64.size
            signature, _, _, _, disk, first_disk, _, count, size, offset = _END64.unpack(self._read(end, _END64.size))
            if signature != b"PK\x06\x06":
                raise self.damaged("", "the end of its directory (zip64) is not where it should be")
        if disk or first_disk:
            raise ImportFailedError(f"{self.shown} is one part of an archive in several files")
        shift = end - size - offset
        if shift < 0:
            raise self.damaged("", "its directory is not where it should be")
        return offset + shift, size, count, shift

    def _entries(self, start: int, size: int) -> Iterator[_Entry]:
        self._file.seek(start)
        left = size
        while left:
            head = self._file.read(_ENTRY.size)
            if left < _ENTRY.size or len(head) < _ENTRY.size or not head.startswith(b"PK\x01\x02"):
                raise self.damaged("", "its directory is not whole")
            fields = _ENTRY.unpack(head)
            lengths = fields[10:13]  # name, extra, comment
            left -= _ENTRY.size + sum(lengths)
            name, extra, comment = (self._file.read(length) for length in lengths)
            if left < 0 or len(name) + len(extra) + len(comment) < sum(lengths):
                raise self.damaged("", "its directory is not whole")
            yield self._entry(fields, name, extra)

    def _entry(self, fields: tuple[int, ...], name: bytes, extra: bytes) -> _Entry:
        _, _, _, flags, method, time, date, crc, packed, size, _, _, _, _, _, attributes, offset = fields
        extras = _extras(extra)
        long = extras.get(_ZIP64, b"")
        sizes = [size, packed, offset]
        for number, value in enumerate(sizes):
            if value == 0xFFFFFFFF:
                if len(long) < 8:
                    raise self.damaged(repr(name)[2:-1], "its size or place is missing")
                sizes[number], long = int.from_bytes(long[:8], "little"), long[8:]
        size, packed, offset = sizes
        mtime_ns = _mtime_ns(date, time, extras.get(_UNIX_TIME, b""))
        return _Entry(name, extras, flags, method, crc, packed, size, attributes >> 16, mtime_ns, offset)

    def _decoded(self, entry: _Entry, encoding: str) -> str:
        unicode = entry.extra.get(_UNICODE_PATH, b"")
        try:
            if len(unicode) > 5 and unicode[1:5] == struct.pack("<L", zlib.crc32(entry.raw_name)):
                return unicode[5:].decode()
            return entry.raw_name.decode("utf-8" if entry.flags & _UTF8 else encoding)
        except UnicodeDecodeError as exc:
            why = "its name is not the UTF-8 it is said to be"
            raise self.damaged(repr(entry.raw_name)[2:-1], why) from exc

    def _is_file(self, name: str, entry: _Entry) -> bool:
        """Return False for folders; raise for what is neither file nor folder, or cannot be unpacked."""
        kind = stat.S_IFMT(entry.mode)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise self.refused(name, "it is a symbolic link" if stat.S_ISLNK(kind) else "it is no file or folder")
        if kind == stat.S_IFDIR or name.endswith(("/", "\\")):
            return False
        if entry.flags & _ENCRYPTED:
            raise self.refused(name, "it is encrypted", hint="Export it without a password.")
        if entry.method not in (_STORED, _DEFLATED):
            how = _METHODS.get(entry.method, f"method {entry.method}")
            raise self.refused(name, f"it is packed with {how}", hint="Pack it again with any ordinary tool.")
        return True

    def _data_at(self, name: str, entry: _Entry, shift: int) -> int:
        """Return where its bytes begin: behind the local header, which must be that of the same entry."""
        at = entry.offset + shift
        head = self._read(at, _LOCAL.size)
        if len(head) < _LOCAL.size or not head.startswith(b"PK\x03\x04"):
            raise self.damaged(name, "it is not where the directory says")
        *_, name_length, extra_length = _LOCAL.unpack(head)
        if self._read(at + _LOCAL.size, name_length) != entry.raw_name:
            raise self.damaged(name, "it has another name there than in the directory")
        return at + _LOCAL.size + int(name_length) + int(extra_length)

    # --- the bytes -------------------------------------------------------------------------------------------------

    def _unpack(self, name: str, entry: _Entry, at: int) -> bytes:
        stream = zlib.decompressobj(-zlib.MAX_WBITS) if entry.method == _DEFLATED else None
        parts: list[bytes] = []
        size, left = 0, entry.packed_bytes
        while left:
            packed = self._read(at, min(left, _PART))
            if not packed:
                raise self.damaged(name, "the archive ends in the middle of it")
            at, left = at + len(packed), left - len(packed)
            more = False  # a full part may not be all that the bytes so far unpack to
            while packed or more:
                try:
                    part = packed if stream is None else stream.decompress(packed, _PART)
                except zlib.error as exc:
                    raise self.damaged(name, f"it cannot be unpacked ({exc})") from exc
                packed = b"" if stream is None else stream.unconsumed_tail
                more = stream is not None and not stream.eof and len(part) == _PART
                size += len(part)
                if size > entry.size_bytes:
                    raise self.damaged(name, "it unpacks to more than the directory says")
                parts.append(part)
        data = b"".join(parts)
        if size != entry.size_bytes or (stream is not None and not stream.eof):
            raise self.damaged(name, f"it unpacks to {size:,} of {entry.size_bytes:,} bytes")
        if zlib.crc32(data) != entry.crc:
            raise self.damaged(name, "its checksum (CRC-32) is wrong")
        return data

    def _read(self, at: int, length: int) -> bytes:
        try:
            self._file.seek(at)
            return self._file.read(length)
        except (OSError, OverflowError, ValueError) as exc:  # an offset that no file has
            raise self.damaged("", f"it cannot be read at {at:,}") from exc


def _encoding(entries: list[_Entry]) -> str:
    """Return the encoding of all names whose entries do not say it."""
    raw_names = [entry.raw_name for entry in entries if not entry.flags & _UTF8 and not entry.raw_name.isascii()]
    try:
        for raw in raw_names:
            raw.decode()
    except UnicodeDecodeError:
        return "gbk" if all(map(_LOOKS_GBK.fullmatch, raw_names)) else "cp437"
    return "utf-8"


def _extras(data: bytes) -> dict[int, bytes]:
    """Read the extra fields (4.5), the first of each kind."""
    found: dict[int, bytes] = {}
    while len(data) >= 4:
        kind, length = struct.unpack_from("<HH", data)
        found.setdefault(kind, data[4 : 4 + length])
        data = data[4 + length :]
    return found


def _mtime_ns(date: int, time: int, unix_time: bytes) -> int:
    """Return the time in UTC if there is one; else the packer's local time as if it were UTC; 0 for none."""
    if len(unix_time) >= 5 and unix_time[0] & 1:
        return max(0, int.from_bytes(unix_time[1:5], "little", signed=True)) * 10**9
    day = (1980 + (date >> 9), date >> 5 & 15, date & 31)
    if not 1 <= day[1] <= 12 or not day[2]:
        return 0
    return timegm((*day, time >> 11, time >> 5 & 63, (time & 31) * 2)) * 10**9
