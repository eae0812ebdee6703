"""Archives made by hand, byte by byte where no tool would make them so."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MTIME = (2024, 5, 6, 7, 8, 10)


def make_zip(files: Mapping[str, bytes], *, method: int = zipfile.ZIP_DEFLATED, comment: bytes = b"") -> bytes:
    """A zip as Python's own module writes it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.comment = comment
        for name, data in files.items():
            info = zipfile.ZipInfo(name, MTIME)
            info.compress_type = method
            archive.writestr(info, data)
    return out.getvalue()


class Raw(NamedTuple):
    """A zip entry that says whatever it is told to."""

    name: bytes
    data: bytes = b""
    flags: int = 0
    method: int = 8
    mode: int = 0
    crc: int | None = None
    size_bytes: int | None = None
    local_name: bytes | None = None
    extra: bytes = b""
    at: int | None = None
    """Offset of the local header of another entry, to share its bytes."""
    packed_bytes: int | None = None
    date: int = (2024 - 1980) << 9 | 5 << 5 | 6
    time: int = 7 << 11 | 8 << 5 | 5


def raw_zip(*entries: Raw, count: int | None = None, before: bytes = b"", zip64: bool = False) -> bytes:
    """A zip of these entries."""
    body, directory = b"", b""
    for entry in entries:
        packed = entry.data
        if entry.method == 8:
            stream = zlib.compressobj(9, zlib.DEFLATED, -15)
            packed = stream.compress(entry.data) + stream.flush()
        crc = zlib.crc32(entry.data) if entry.crc is None else entry.crc
        size = len(entry.data) if entry.size_bytes is None else entry.size_bytes
        packed_size = len(packed) if entry.packed_bytes is None else entry.packed_bytes
        offset = len(body) if entry.at is None else entry.at
        local = entry.name if entry.local_name is None else entry.local_name
        if entry.at is None:
            body += struct.pack(
                "<4s5H3L2H", b"PK\x03\x04", 20, entry.flags, entry.method, entry.time, entry.date, crc, packed_size,
                size & 0xFFFFFFFF, len(local), 0,
            ) + local + packed  # fmt: skip
        extra = entry.extra
        sizes = (packed_size, size, offset)
        if zip64:
            extra += struct.pack("<2H3Q", 1, 24, size, packed_size, offset)
            sizes = (0xFFFFFFFF,) * 3
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\x01\x02", 3 << 8 | 20, 20, entry.flags, entry.method, entry.time, entry.date, crc,
            sizes[0], sizes[1], len(entry.name), len(extra), 0, 0, 0, entry.mode << 16, sizes[2],
        ) + entry.name + extra  # fmt: skip
    entries_count = len(entries) if count is None else count
    end = b""
    if zip64:
        end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, entries_count, entries_count, len(directory),
                          len(body))  # fmt: skip
        end += struct.pack("<4sLQL", b"PK\x06\x07", 0, len(body) + len(directory), 1)
    end += struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, entries_count & 0xFFFF, entries_count & 0xFFFF, len(directory),
                       len(body), 0)  # fmt: skip
    return before + body + directory + end


def make_tar(files: Mapping[str, bytes], *, mode: str = "w", format: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar as Python's own module writes it; `mode` as `tarfile.open` takes it."""
    return tar_of([(_info(name, len(data)), data) for name, data in files.items()], mode=mode, format=format)


def tar_of(
    members: Sequence[tuple[tarfile.TarInfo, bytes]], *, mode: str = "w", format: int = tarfile.PAX_FORMAT
) -> bytes:
    """A tar of any members."""
    out = io.BytesIO()
    options = {"compresslevel": 6} if mode.endswith(":gz") else {}
    with tarfile.open(fileobj=out, mode=mode, format=format, **options) as archive:  # type: ignore[call-overload]
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _info(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    info.mtime = 1_700_000_000
    return info


def tar_member(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    """A member that is no file."""
    info = _info(name, 0)
    info.type = kind
    info.linkname = link
    return info
