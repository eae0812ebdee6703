"""Ranges and roots as bytes: columns, little-endian, compressed with zstd; named by a hash of the uncompressed bytes.

A range holds on average some 190 entries. Its boundaries depend on its paths alone (`ends_range`), so a change of one
entry rewrites one range, and an insertion moves only the boundaries beside it. The encoding is canonical: the same
entries give the same bytes with every version of the libraries.

Layout of a range: magic, rows (u32), then the columns path, size, mtime, etag, version, source, key; each column is a
mode (u8), a length (u32) and its bytes. A range in which an entry has attributes has another magic and two columns
more: st_mode (u32) and the targets of links. Layout of a root: magic, length of a JSON header (u32), header, then blob
ids, row counts (u32) and first paths of its ranges.

Every other root that a catalog keeps beside a snapshot (`Catalog.derived`, such as annotation tables) is a blob of the
caller's own format behind a header that names all blobs it needs, so garbage collection can follow it:

    magic b"DCT1", count (u32, little-endian), count times 16 bytes (blob ids, in the order the format likes), payload

Marking calls `children` of a decompressed root. A writer begins with `encode_children`, and a reader calls `payload`. A
blob below such a root is a leaf: it names no others. Pure functions, any thread.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate, pairwise, repeat
from operator import lt
from typing import Any

from xxhash import xxh3_64_intdigest

from datacache.core.errors import CorruptManifestError
from datacache.core.ids import MAX_READABLE_BYTES
from datacache.core.packed import pack, unpack
from datacache.manifest.model import BlobId, Entry, RangeInfo, Root, Source

MIN_ROWS, MAX_ROWS, BOUNDARY_ONE_IN = 64, 1024, 128
_RANGE_MAGIC, _ROOT_MAGIC = b"DCR1", b"DCM1"
_ATTRIBUTES_MAGIC = b"DCR2"
_COLUMNS = {_RANGE_MAGIC: 7, _ATTRIBUTES_MAGIC: 9}
_COLUMN = struct.Struct("<BI")
_EMPTY, _HEX, _QUOTED_HEX, _TEXT, _NUMBERS = range(5)
_HEX_ETAG = re.compile(r"[0-9a-f]{32}")
_MOST_COUNTED = 2**63 - 1
REMAKE = "The snapshot cannot be read; make it again from its bucket: dsctl snapshot create"


def ends_range(path: bytes, rows: int) -> bool:
    """Tell whether a range of `rows` entries ends with the entry at `path`, whatever the content of its files."""
    return rows >= MAX_ROWS or (rows >= MIN_ROWS and xxh3_64_intdigest(path) % BOUNDARY_ONE_IN == 0)


def blob_id(raw: bytes) -> BlobId:
    """Return the content address of an uncompressed blob."""
    return BlobId(blake2b(raw, digest_size=16).digest())


def compress(raw: bytes) -> bytes:
    """Compress a blob to the bytes that the catalog stores."""
    return pack(raw)


def decompress(stored: bytes, expected: BlobId) -> bytes:
    """Return the uncompressed blob. Raise `CorruptManifestError` if its id says that it is another."""
    try:
        raw = unpack(stored)
    except ValueError as exc:
        raise CorruptManifestError(
            f"manifest blob {expected.hex()} cannot be decompressed: {exc}", hint=REMAKE
        ) from exc
    if blob_id(raw) != expected:
        raise CorruptManifestError(f"manifest blob {expected.hex()} holds other bytes than its id says")
    return raw


def encode_range(entries: Sequence[Entry]) -> bytes:
    """Return the canonical bytes of a range; entries in path order."""
    paths, sizes, mtimes, etags, versions, sources, keys, modes, targets = zip(*entries, strict=True)
    attributes = any(modes) or any(targets)
    out = [_ATTRIBUTES_MAGIC if attributes else _RANGE_MAGIC, struct.pack("<I", len(entries))]
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
    if attributes:
        _put(out, *((_NUMBERS, _pack_numbers("I", modes)) if any(modes) else (_EMPTY, b"")))
        _put(out, *((_TEXT, _pack_strings(targets)) if any(targets) else (_EMPTY, b"")))
    return b"".join(out)


class Range:
    """A decoded range. Paths are ready; other columns are unpacked for single rows on demand.

    Bytes that match their id may still have been written by anybody. So the constructor checks all that readers build
    on, or raises `CorruptManifestError`: every column has a value for every row, the paths ascend, and objects have
    possible sizes."""

    __slots__ = ("_etags", "_keys", "_modes", "_mtimes", "_sources", "_versions", "paths", "sizes", "targets")

    def __init__(self, raw: bytes) -> None:
        count = _COLUMNS.get(raw[:4])
        if count is None:
            raise CorruptManifestError("a manifest range has another format", hint="It was made by a newer version.")
        try:
            self._unpack(raw, count)
        except (struct.error, ValueError) as exc:
            raise _corrupt("range", raw, exc) from exc

    def _unpack(self, raw: bytes, count: int) -> None:
        (rows,) = struct.unpack_from("<I", raw, 4)
        columns, at = [], 8
        for _ in range(count):
            mode, length = _COLUMN.unpack_from(raw, at)
            at += _COLUMN.size
            columns.append((mode, raw[at : at + length]))
            at += length
        self.paths = _unpack_strings(columns[0][1], rows)
        if not all(map(lt, self.paths, self.paths[1:])):
            raise ValueError("its paths do not ascend")
        self.sizes = _unpack_numbers("Q", columns[1][1], rows)
        if max(self.sizes, default=0) > MAX_READABLE_BYTES:
            raise ValueError(f"it has an object of {max(self.sizes):,} bytes")
        self._mtimes = _unpack_numbers("q", columns[2][1], rows)
        self._etags = _Text(*columns[3], rows)
        self._versions = _Text(*columns[4], rows)
        self._sources = _unpack_numbers("H", columns[5][1], rows) if columns[5][0] else None
        self._keys = _unpack_strings(columns[6][1], rows) if columns[6][0] else None
        modes, targets = columns[7:] or (None, None)
        self._modes = _unpack_numbers("I", modes[1], rows) if modes and modes[0] else None
        # The targets of links, b'' for other files; None for a range without links.
        self.targets = _unpack_strings(targets[1], rows) if targets and targets[0] else None

    @property
    def sources(self) -> int:
        """The number of sources that a root must have for these entries."""
        return max(self._sources, default=0) + 1 if self._sources is not None else 0

    def entry(self, index: int) -> Entry:
        """Return the entry at a position of this range."""
        return Entry(
            self.paths[index],
            self.sizes[index],
            self._mtimes[index],
            self._etags[index],
            self._versions[index],
            self._sources[index] if self._sources is not None else 0,
            (self._keys[index] or None) if self._keys is not None else None,
            self._modes[index] if self._modes is not None else 0,
            self.targets[index] if self.targets is not None else b"",
        )

    def versions(self) -> list[tuple[bytes, int, str]]:
        """Return path, size and ETag of all entries, by which versions of a file differ, much faster than entries.
        Attributes of an entry, if it has any, follow its ETag here."""
        etags = self._etags.all()
        if self._modes is not None or self.targets is not None:
            modes, targets = self._modes or repeat(0), self.targets or repeat(b"")
            etags = [
                f"{etag}\0{mode}\0{target!r}" if etag and (mode or target) else etag
                for etag, mode, target in zip(etags, modes, targets, strict=False)
            ]
        return list(zip(self.paths, self.sizes, etags, strict=True))


def encode_root(root: Root) -> bytes:
    """Return the canonical bytes of a root; `blob_id` of them is the snapshot's id."""
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
    rows, first_paths = [info.rows for info in root.ranges], [info.first_path for info in root.ranges]
    blobs = b"".join(info.blob for info in root.ranges)
    parts = [_ROOT_MAGIC, struct.pack("<II", len(text), len(root.ranges)), text, blobs]
    return b"".join([*parts, _pack_numbers("I", rows), _pack_strings(first_paths)])


def decode_root(raw: bytes) -> Root:
    """Return the root of these bytes. Raise `CorruptManifestError` if they are none."""
    if raw[:4] != _ROOT_MAGIC:
        raise CorruptManifestError("a manifest root has another format", hint="It was made by a newer version.")
    try:
        return _unpack_root(raw)
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise _corrupt("root", raw, exc) from exc


def _unpack_root(raw: bytes) -> Root:
    length, count = struct.unpack_from("<II", raw, 4)
    at = 12 + length
    if at + 20 * count > len(raw):  # before anything is made for each of them
        raise ValueError("it is shorter than it says")
    header = json.loads(raw[12:at])
    blobs = [BlobId(raw[at + 16 * i : at + 16 * i + 16]) for i in range(count)]
    at += 16 * count
    rows = _unpack_numbers("I", raw[at : at + 4 * count], count)
    first_paths = _unpack_strings(raw[at + 4 * count :], count)
    for name in ("files", "markers", "bytes"):
        if type(header[name]) is not int or not 0 <= header[name] <= _MOST_COUNTED:
            raise ValueError(f"{name!r} of its header is no number of them")
    sources = tuple(Source(*source) for source in header["sources"])
    if not all(isinstance(text, str) for source in sources for text in source[:2]):
        raise ValueError("a source of its header is none")
    return Root(
        sources=sources,
        ranges=tuple(RangeInfo(*info) for info in zip(blobs, first_paths, rows, strict=True)),
        files=header["files"],
        markers=header["markers"],
        total_bytes=header["bytes"],
        hidden=frozenset(bytes.fromhex(path) for path in header["hidden"]),
        packs=tuple(BlobId(bytes.fromhex(pack)) for pack in header.get("packs", ())),
    )


def _corrupt(what: str, raw: bytes, why: Exception) -> CorruptManifestError:
    return CorruptManifestError(f"manifest blob {blob_id(raw).hex()} is no {what} of a manifest: {why}", hint=REMAKE)


class _Text:
    """A column of strings, most often ETags: nothing, 32 hex digits each, the same in quotes, or any text."""

    __slots__ = ("_mode", "_rows", "_strings")

    def __init__(self, mode: int, data: bytes, rows: int) -> None:
        self._mode = mode
        self._rows = rows
        self._strings: Sequence[bytes] | bytes = _unpack_strings(data, rows) if mode == _TEXT else data
        if mode in (_HEX, _QUOTED_HEX) and len(data) != 16 * rows:
            raise ValueError("a column of it has not a value for every row")

    def __getitem__(self, index: int) -> str:
        if self._mode == _EMPTY:
            return ""
        if self._mode == _TEXT:
            return self._strings[index].decode("utf-8", "surrogateescape")  # type: ignore[union-attr]
        digits = bytes(self._strings[16 * index : 16 * index + 16]).hex()  # type: ignore[arg-type]
        return digits if self._mode == _HEX else f'"{digits}"'

    def all(self) -> list[str]:
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


def _unpack_numbers(code: str, data: bytes, count: int) -> array[int]:
    numbers = array(code)
    numbers.frombytes(data)
    if len(numbers) != count:
        raise ValueError("a column of it has not a value for every row")
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _pack_strings(values: Sequence[bytes]) -> bytes:
    return _pack_numbers("H", [len(value) for value in values]) + b"".join(values)


def _unpack_strings(data: bytes, count: int) -> list[bytes]:
    ends = list(accumulate(_unpack_numbers("H", data[: 2 * count], count), initial=2 * count))
    if ends[-1] != len(data):
        raise ValueError("a column of it is longer or shorter than its strings")
    return [data[a:b] for a, b in pairwise(ends)]


MAGIC = b"DCT1"
_HEAD = struct.Struct("<4sI")
_ID_BYTES = 16


def encode_children(ids: Sequence[BlobId]) -> bytes:
    """Return the header of a derived root that needs these blobs; its payload comes after it."""
    return b"".join([_HEAD.pack(MAGIC, len(ids)), *ids])


def children(raw: bytes) -> list[BlobId]:
    """Return the blobs that a derived root needs. Raise `CorruptManifestError` if the bytes are no such root."""
    end = _payload_at(raw)
    return [BlobId(raw[at : at + _ID_BYTES]) for at in range(_HEAD.size, end, _ID_BYTES)]


def payload(raw: bytes) -> memoryview:
    """Return the bytes after the header, without a copy. Raise `CorruptManifestError` if the bytes are no such root."""
    return memoryview(raw)[_payload_at(raw) :]


def _payload_at(raw: bytes) -> int:
    if raw[:4] != MAGIC:
        raise CorruptManifestError("a derived root has another format", hint="It was made by a newer version.")
    if len(raw) >= _HEAD.size:
        end = _HEAD.size + _ID_BYTES * int(_HEAD.unpack_from(raw)[1])
        if end <= len(raw):
            return end
    raise CorruptManifestError("a derived root is shorter than it says")
