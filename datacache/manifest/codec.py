"""Ranges and roots as bytes: columns, little-endian, compressed with zstd; named by a hash of the uncompressed bytes.

A range holds on average some 190 entries. Its boundaries depend on its paths alone (`ends_range`), so a change of one
entry rewrites one range, and an insertion moves no boundary but those beside it. The encoding is canonical: the same
entries give the same bytes, whatever the versions of the libraries.

Layout of a range: magic, rows (u32), then the columns path, size, mtime, etag, version, source, key; each column is a
mode (u8), a length (u32) and its bytes. Layout of a root: magic, length of a JSON header (u32), header, then blob ids,
row counts (u32) and first paths of its ranges.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

import zstandard
from xxhash import xxh3_64_intdigest

from datacache.core.errors import CorruptManifestError
from datacache.manifest.model import BlobId, Entry, RangeInfo, Root, Source

MIN_ROWS, MAX_ROWS, BOUNDARY_ONE_IN = 64, 1024, 128
_RANGE_MAGIC, _ROOT_MAGIC = b"DCR1", b"DCM1"
_COLUMN = struct.Struct("<BI")
_EMPTY, _HEX, _QUOTED_HEX, _TEXT, _NUMBERS = range(5)
_HEX_ETAG = re.compile(r"[0-9a-f]{32}")
_MAX_BLOB_BYTES = 256 * 2**20


def ends_range(path: bytes, rows: int) -> bool:
    """Whether a range of `rows` entries ends with the entry at `path`. Depends on paths only, never on contents."""
    return rows >= MAX_ROWS or (rows >= MIN_ROWS and xxh3_64_intdigest(path) % BOUNDARY_ONE_IN == 0)


def blob_id(raw: bytes) -> BlobId:
    """The content address of an uncompressed blob."""
    return BlobId(blake2b(raw, digest_size=16).digest())


def compress(raw: bytes) -> bytes:
    """What the catalog stores of an uncompressed blob."""
    return zstandard.compress(raw, 3)


def decompress(stored: bytes, expected: BlobId) -> bytes:
    """The uncompressed blob; `CorruptManifestError` if it is not what its id says."""
    try:
        raw = zstandard.decompress(stored, max_output_size=_MAX_BLOB_BYTES)
    except zstandard.ZstdError as exc:
        raise CorruptManifestError(f"manifest blob {expected.hex()} cannot be decompressed") from exc
    if blob_id(raw) != expected:
        raise CorruptManifestError(f"manifest blob {expected.hex()} holds other bytes than its id says")
    return raw


def encode_range(entries: Sequence[Entry]) -> bytes:
    """The canonical bytes of a range; entries in path order."""
    paths, sizes, mtimes, etags, versions, sources, keys = zip(*entries, strict=True)
    out = [_RANGE_MAGIC, struct.pack("<I", len(entries))]
    _put(out, _TEXT, _pack_strings(paths))
    _put(out, _NUMBERS, _pack_numbers("Q", sizes))
    _put(out, _NUMBERS, _pack_numbers("q", mtimes))
    _put(out, *_pack_text(etags))
    _put(out, *_pack_text(versions))
    if any(sources):
        _put(out, _NUMBERS, _pack_numbers("H", sources))
    else:
        _put(out, _EMPTY, b"")
    if any(key is not None for key in keys):
        # A key is never the empty string, so that stands for "none".
        _put(out, _TEXT, _pack_strings([key or b"" for key in keys]))
    else:
        _put(out, _EMPTY, b"")
    return b"".join(out)


class Range:
    """A decoded range. Paths are ready; the other columns are unpacked for the rows that are asked for."""

    __slots__ = ("_etags", "_keys", "_mtimes", "_sources", "_versions", "paths", "sizes")

    def __init__(self, raw: bytes) -> None:
        if raw[:4] != _RANGE_MAGIC:
            raise CorruptManifestError("a manifest range has another format", hint="It was made by a newer version.")
        (rows,) = struct.unpack_from("<I", raw, 4)
        columns, at = [], 8
        for _ in range(7):
            mode, length = _COLUMN.unpack_from(raw, at)
            at += _COLUMN.size
            columns.append((mode, raw[at : at + length]))
            at += length
        self.paths = _unpack_strings(columns[0][1], rows)
        self.sizes = _unpack_numbers("Q", columns[1][1])
        self._mtimes = _unpack_numbers("q", columns[2][1])
        self._etags = _Text(*columns[3], rows)
        self._versions = _Text(*columns[4], rows)
        self._sources = _unpack_numbers("H", columns[5][1]) if columns[5][0] else None
        self._keys = _unpack_strings(columns[6][1], rows) if columns[6][0] else None

    def entry(self, index: int) -> Entry:
        """The entry at a position of this range."""
        return Entry(
            self.paths[index],
            self.sizes[index],
            self._mtimes[index],
            self._etags[index],
            self._versions[index],
            self._sources[index] if self._sources is not None else 0,
            (self._keys[index] or None) if self._keys is not None else None,
        )

    def versions(self) -> list[tuple[bytes, int, str]]:
        """Path, size and ETag of all entries: what versions of a file are told apart by, much faster than entries."""
        return list(zip(self.paths, self.sizes, self._etags.all(), strict=True))

    def mtime_ns(self, index: int) -> int:
        """The modification time at a position, without building the entry."""
        return self._mtimes[index]


def encode_root(root: Root) -> bytes:
    """The canonical bytes of a root; `blob_id` of them is the snapshot's id."""
    header: dict[str, Any] = {
        # The flag is left out where it is false, packs where there are none: plain snapshots keep their ids.
        "sources": [list(source) if source.content_addressed else list(source[:2]) for source in root.sources],
        "files": root.files,
        "markers": root.markers,
        "bytes": root.total_bytes,
        "hidden": sorted(path.hex() for path in root.hidden),
    }
    if root.packs:
        header["packs"] = [pack.hex() for pack in root.packs]
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    first_paths, rows = [], []
    for info in root.ranges:
        first_paths.append(info.first_path)
        rows.append(info.rows)
    blobs = b"".join(info.blob for info in root.ranges)
    parts = [_ROOT_MAGIC, struct.pack("<II", len(text), len(root.ranges)), text, blobs]
    return b"".join([*parts, _pack_numbers("I", rows), _pack_strings(first_paths)])


def decode_root(raw: bytes) -> Root:
    """The root of these bytes."""
    if raw[:4] != _ROOT_MAGIC:
        raise CorruptManifestError("a manifest root has another format", hint="It was made by a newer version.")
    length, count = struct.unpack_from("<II", raw, 4)
    header = json.loads(raw[12 : 12 + length])
    at = 12 + length
    blobs = [BlobId(raw[at + 16 * i : at + 16 * i + 16]) for i in range(count)]
    at += 16 * count
    rows = _unpack_numbers("I", raw[at : at + 4 * count])
    first_paths = _unpack_strings(raw[at + 4 * count :], count)
    return Root(
        sources=tuple(Source(*source) for source in header["sources"]),
        ranges=tuple(RangeInfo(*info) for info in zip(blobs, first_paths, rows, strict=True)),
        files=header["files"],
        markers=header["markers"],
        total_bytes=header["bytes"],
        hidden=frozenset(bytes.fromhex(path) for path in header["hidden"]),
        packs=tuple(BlobId(bytes.fromhex(pack)) for pack in header.get("packs", ())),
    )


class _Text:
    """A column of strings, most often ETags: nothing, 32 hex digits each, the same in quotes, or any text."""

    __slots__ = ("_mode", "_rows", "_strings")

    def __init__(self, mode: int, data: bytes, rows: int) -> None:
        self._mode = mode
        self._rows = rows
        self._strings: Sequence[bytes] | bytes = _unpack_strings(data, rows) if mode == _TEXT else data

    def __getitem__(self, index: int) -> str:
        if self._mode == _EMPTY:
            return ""
        if self._mode == _TEXT:
            return self._strings[index].decode("utf-8", "surrogateescape")  # type: ignore[union-attr]
        digits = bytes(self._strings[16 * index : 16 * index + 16]).hex()  # type: ignore[arg-type]
        return digits if self._mode == _HEX else f'"{digits}"'

    def all(self) -> list[str]:
        """All of the column."""
        if self._mode in (_EMPTY, _TEXT):
            return [self[index] for index in range(self._rows)]
        digits = self._strings.hex()  # type: ignore[union-attr]
        values = [digits[at : at + 32] for at in range(0, len(digits), 32)]
        return values if self._mode == _HEX else [f'"{value}"' for value in values]


def _pack_text(values: Sequence[str]) -> tuple[int, bytes]:
    if not any(values):
        return _EMPTY, b""
    if all(map(_HEX_ETAG.fullmatch, values)):
        return _HEX, bytes.fromhex("".join(values))
    if all(v[:1] == v[-1:] == '"' and _HEX_ETAG.fullmatch(v[1:-1]) for v in values):
        return _QUOTED_HEX, bytes.fromhex("".join(v[1:-1] for v in values))
    return _TEXT, _pack_strings([value.encode("utf-8", "surrogateescape") for value in values])


def _put(out: list[bytes], mode: int, data: bytes) -> None:
    out += (_COLUMN.pack(mode, len(data)), data)


def _pack_numbers(code: str, values: Sequence[int]) -> bytes:
    numbers = array(code, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _unpack_numbers(code: str, data: bytes) -> array[int]:
    numbers = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _pack_strings(values: Sequence[bytes]) -> bytes:
    return _pack_numbers("H", [len(value) for value in values]) + b"".join(values)


def _unpack_strings(data: bytes, count: int) -> list[bytes]:
    ends = list(accumulate(_unpack_numbers("H", data[: 2 * count]), initial=2 * count))
    return [data[a:b] for a, b in pairwise(ends)]
