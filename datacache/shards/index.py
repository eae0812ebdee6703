"""A shard's sidecar (the position and hash of each sample and each of its members), and `shards.json`, the list of a
set.

The builder writes it; readers take samples out of a shard by it. A sidecar names its one shard file and knows the
file's size and hash. It is one blob, read at once and used in place: columns of numbers behind a JSON header, so that
loading a million samples takes only the time to hash their bytes. docs/SHARDS.md has the layout.

`shards.json` describes a set and is written last: a set without it is not finished. It has the hash of every shard and
every sidecar, and of itself, so that readers notice a set in which files were swapped, lost or edited. Both are
immutable; any thread, and after `fork()`."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from datacache.core.errors import ShardError

MAGIC: Final = b"DCSHARD1"
SUFFIX: Final = ".index"
NO_CLASS: Final = -1
FORMATS: Final = ("webdataset", "tfrecord")
_HEAD = struct.Struct("<8sQI")
"""Magic, length of the whole sidecar, length of the header."""
_DIGEST_BYTES = 16
_ALIGN = 8
_COLUMNS: Final = {
    "offset": "Q",
    "size": "IQ",
    "digest": "Q",
    "extension": "BH",
    "class": "i",
    "key_end": "I",
    "keys": "B",
    "more_end": "I",
    "more_offset": "IQ",
    "more_size": "IQ",
    "more_digest": "Q",
    "more_extension": "BH",
}
"""The columns in their order, each with its possible types, of which it has the first that holds its values. Columns
before `key_end` have one value for each sample and are of its first member."""
_DTYPES: Final = {"B": "<u1", "H": "<u2", "I": "<u4", "Q": "<u8", "i": "<i4"}
_Column = NDArray[Any]


def index_name(shard: str) -> str:
    """Return the name of a shard's sidecar: `shard-000000.index` for `shard-000000.tar`."""
    return shard.rpartition(".")[0] + SUFFIX


class Member(NamedTuple):
    """A file of a sample."""

    extension: str
    """Without the dot in front: `jpg`, `seg.png`."""
    offset: int
    """Of its first byte in the shard."""
    size_bytes: int
    digest: int
    """xxh3-64 of its bytes."""


class ShardIndex:
    """One shard's samples, numbered in the order in which they lie in it."""

    def __init__(self, header: Mapping[str, Any], columns: Mapping[str, _Column]) -> None:
        self._columns = columns
        self.shard: str = header["shard"]
        """The shard's file name."""
        self.size_bytes: int = header["size_bytes"]
        self.digest: str = header["digest"]
        """xxh3-128 of the whole file, in hex."""
        self.format: str = header["format"]
        self.plan: str = header["plan"]
        """A hash of the shard's planned content, by which a builder that was stopped recognizes finished shards."""
        self.extensions: tuple[str, ...] = tuple(header["extensions"])
        """All extensions in the shard, sorted."""
        self.offsets: NDArray[np.uint64] = columns["offset"]
        """The offset of each sample's first member (the image)."""
        self.sizes: NDArray[np.uint32 | np.uint64] = columns["size"]
        self.digests: NDArray[np.uint64] = columns["digest"]
        self.classes: NDArray[np.int32] = columns["class"]
        """The sample's class id, `NO_CLASS` for none."""
        self._key_ends, self._keys = columns["key_end"], columns["keys"]
        self._more_ends = columns["more_end"]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.offsets)

    def __repr__(self) -> str:
        return f"<ShardIndex of {self.shard}: {len(self):,} samples, {self.size_bytes:,} bytes>"

    def key(self, sample: int) -> str:
        """Return a sample's key, which is unique in its shard set."""
        sample = self._number(sample)
        first = int(self._key_ends[sample - 1]) if sample else 0
        return str(self._keys[first : int(self._key_ends[sample])].tobytes(), "utf-8", "replace")

    def members(self, sample: int) -> list[Member]:
        """Return a sample's files in the order in which they lie in the shard."""
        sample = self._number(sample)
        first = int(self._more_ends[sample - 1]) if sample else 0
        return [
            self._member("", sample),
            *(self._member("more_", at) for at in range(first, int(self._more_ends[sample]))),
        ]

    def sharing(
        self, offsets: NDArray[Any], sizes: NDArray[Any], digests: NDArray[Any], classes: NDArray[Any]
    ) -> ShardIndex:
        """Return the same index on the caller's columns of the same numbers, in other types. It lets go of the
        sidecar's bytes, and must not be encoded."""
        others = {"offset": offsets, "size": sizes, "digest": digests, "class": classes}
        columns = {name: others[name] if name in others else column.copy() for name, column in self._columns.items()}
        names = ("shard", "size_bytes", "digest", "format", "plan", "extensions")
        return ShardIndex({name: getattr(self, name) for name in names}, columns)

    def encode(self) -> bytes:
        """Return the sidecar. The same index gives the same bytes."""
        header = {
            "shard": self.shard,
            "size_bytes": self.size_bytes,
            "digest": self.digest,
            "format": self.format,
            "plan": self.plan,
            "extensions": list(self.extensions),
            "columns": {name: [column.dtype.str, len(column)] for name, column in self._columns.items()},
        }
        raw = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
        parts = [raw, _padding(_HEAD.size + len(raw))]
        for column in self._columns.values():
            parts += [column.tobytes(), _padding(column.nbytes)]
        length = _HEAD.size + sum(map(len, parts)) + _DIGEST_BYTES
        body = b"".join([_HEAD.pack(MAGIC, length, len(raw)), *parts])
        return body + xxh3_128_digest(body)

    @classmethod
    def decode(cls, raw: bytes | memoryview, name: str) -> ShardIndex:
        """Read the sidecar of the shard with this file name. Raise `ShardError`, which names the shard, if it is
        damaged, cut short, another shard's, or no sidecar. The index holds on to `raw` and copies nothing."""
        raw = memoryview(raw)
        if len(raw) < _HEAD.size + _DIGEST_BYTES or bytes(raw[: len(MAGIC)]) != MAGIC:
            raise _wrong(name, "is no sidecar of a shard")
        _, length, header_bytes = _HEAD.unpack_from(raw)
        if length != len(raw):
            raise _wrong(name, f"has {len(raw):,} bytes and should have {length:,}")
        if xxh3_128_digest(raw[:-_DIGEST_BYTES]) != bytes(raw[-_DIGEST_BYTES:]):
            raise _wrong(name, "is damaged: its bytes are not those that were written")
        try:
            header, columns = _parse(raw[:-_DIGEST_BYTES], header_bytes)
            index = cls(header, columns)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise _wrong(name, f"cannot be understood ({exc})") from exc
        if index.shard != name:
            raise _wrong(name, f"is the one of {index.shard}")
        return index

    def _number(self, sample: int) -> int:
        if not 0 <= sample < len(self):
            raise IndexError(f"{self.shard} has {len(self):,} samples, and no sample {sample}")
        return sample

    def _member(self, kind: str, at: int) -> Member:
        columns = self._columns
        return Member(
            self.extensions[int(columns[kind + "extension"][at])],
            int(columns[kind + "offset"][at]),
            int(columns[kind + "size"][at]),
            int(columns[kind + "digest"][at]),
        )


class IndexWriter:
    """Takes a shard's samples in their order; `finish` returns the index. One thread."""

    def __init__(self) -> None:
        self._extensions: dict[str, int] = {}
        self._columns = {name: array("i" if name == "class" else "Q") for name in _COLUMNS if name != "keys"}
        self._keys = bytearray()

    def __len__(self) -> int:
        return len(self._columns["offset"])

    def add(self, key: str, members: Sequence[Member], class_id: int = NO_CLASS) -> None:
        """Add the next sample, which has at least one member."""
        columns = self._columns
        for kind, member in zip(["", *["more_"] * (len(members) - 1)], members, strict=True):
            columns[kind + "offset"].append(member.offset)
            columns[kind + "size"].append(member.size_bytes)
            columns[kind + "digest"].append(member.digest)
            columns[kind + "extension"].append(self._extensions.setdefault(member.extension, len(self._extensions)))
        columns["class"].append(class_id)
        self._keys += key.encode()
        columns["key_end"].append(len(self._keys))
        columns["more_end"].append(len(columns["more_offset"]))

    def finish(self, shard: str, *, size_bytes: int, digest: str, format: str, plan: str = "") -> ShardIndex:
        """Return the index of the shard file with this name, size and hash."""
        extensions = sorted(self._extensions)
        renumbered = np.zeros(len(extensions), np.uint64)
        for at, extension in enumerate(extensions):
            renumbered[self._extensions[extension]] = at
        columns: dict[str, _Column] = {}
        for name, types in _COLUMNS.items():
            values = np.frombuffer(self._keys, np.uint8) if name == "keys" else np.array(self._columns[name])
            if name.endswith("extension") and len(values):
                values = renumbered[values]
            largest = int(values.max(initial=0))
            dtypes = [_DTYPES[type] for type in types]
            columns[name] = values.astype(next((d for d in dtypes if largest <= np.iinfo(d).max), dtypes[-1]))
        header = {"shard": shard, "size_bytes": size_bytes, "digest": digest, "format": format, "plan": plan}
        return ShardIndex(header | {"extensions": extensions}, columns)


def _padding(size: int) -> bytes:
    return bytes(-size % _ALIGN)


def _wrong(shard: str, what: str) -> ShardError:
    return ShardError(
        f"the sidecar {index_name(shard)} of {shard} {what}",
        shard=shard,
        hint="Build the shards again with --overwrite, or copy the file again from where it came.",
    )


def _parse(body: memoryview, header_bytes: int) -> tuple[dict[str, Any], dict[str, _Column]]:
    """Return header and columns of a body whose hash is right. Raise `ValueError`, `KeyError` or `TypeError` where
    another program wrote something else into it."""
    at = _HEAD.size + header_bytes
    if at > len(body):
        raise ValueError("its header is longer than it")
    header = json.loads(bytes(body[_HEAD.size : at]))
    if header["format"] not in FORMATS:
        raise ValueError(f"it knows a format {header['format']!r}")
    if set(header["columns"]) != set(_COLUMNS):
        raise ValueError("it has other columns")
    at += -at % _ALIGN
    columns: dict[str, _Column] = {}
    for name, types in _COLUMNS.items():
        dtype, count = header["columns"][name]
        if dtype.replace("|", "<") not in [_DTYPES[type] for type in types]:
            raise ValueError(f"its column {name} has the type {dtype}")
        columns[name] = np.frombuffer(body, dtype, count, at)
        at += columns[name].nbytes
        at += -at % _ALIGN
    if at != len(body):
        raise ValueError("there is more in it than columns")
    _check(header, columns)
    return header, columns


def _check(header: Mapping[str, Any], columns: Mapping[str, _Column]) -> None:
    samples, more = len(columns["offset"]), len(columns["more_offset"])
    for name, column in columns.items():
        if name != "keys" and len(column) != (more if name.startswith("more_") and name != "more_end" else samples):
            raise ValueError(f"its column {name} has another length")
    for ends, last in (("key_end", len(columns["keys"])), ("more_end", more)):
        column = columns[ends]
        if (int(column[-1]) if samples else 0) != last or bool(np.any(column[1:] < column[:-1])):
            raise ValueError(f"its column {ends} is not in order")
    size_bytes = header["size_bytes"]
    if not isinstance(size_bytes, int) or not 0 <= size_bytes < 2**63:
        raise ValueError(f"its shard has {size_bytes!r} bytes")
    for kind in ("", "more_"):
        offsets, sizes = columns[kind + "offset"], columns[kind + "size"]
        # Sums of numbers near 2**64 would wrap around.
        if len(offsets) and (int(offsets.max()) > size_bytes or bool(np.any(sizes > np.uint64(size_bytes) - offsets))):
            raise ValueError("a sample lies behind the shard's end")
        if int(columns[kind + "extension"].max(initial=0)) >= max(1, len(header["extensions"])):
            raise ValueError("a member has an extension that is not listed")


SHARDS_JSON: Final = "shards.json"
_SET_VERSION: Final = 1


class ShardInfo(NamedTuple):
    """One shard."""

    name: str
    """Its file name, beside `shards.json`."""
    size_bytes: int
    digest: str
    """xxh3-128 of the file, in hex."""
    samples: int
    index_digest: str
    """xxh3-128 of its sidecar, in hex."""


@dataclass(frozen=True)
class ShardSet:
    """The content of `shards.json`. Samples are numbered over all shards in their order."""

    format: str
    """`webdataset` or `tfrecord`."""
    classes: tuple[str, ...]
    """The names of class ids, in their order."""
    source: str
    """The snapshot that the shards were made from, `dataset@id`."""
    parameters: Mapping[str, Any]
    """The options that differ from the default."""
    shards: tuple[ShardInfo, ...]
    plan: str = field(default="", kw_only=True)
    """A hash of all that decides the content of the set: the same plan gives the same bytes."""

    @cached_property
    def samples(self) -> int:
        """The number of samples in all shards."""
        return sum(shard.samples for shard in self.shards)

    @cached_property
    def size_bytes(self) -> int:
        """The size of all shards, without sidecars."""
        return sum(shard.size_bytes for shard in self.shards)

    def encode(self) -> bytes:
        """Return the file: JSON, sorted, each shard on a line."""
        shards = ",\n".join(f"  {_compact(shard._asdict())}" for shard in self.shards)
        lines = [f" {_compact(name)}: {_compact(value)}" for name, value in self._fields().items()]
        lines.append(f' "shards": [\n{shards}\n ]')
        lines.append(f' "digest": {_compact(self._digest())}')
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    @classmethod
    def decode(cls, raw: bytes | memoryview, url: str = "") -> ShardSet:
        """Read the file; `url` says in messages where it came from. Raise `ShardError` if it is damaged or something
        else."""
        try:
            value = json.loads(bytes(raw))
            if value["version"] != _SET_VERSION:
                raise _wrong_set(url, f"has the version {value['version']!r}, and only {_SET_VERSION} is known")
            found = cls(
                value["format"],
                tuple(value["classes"]),
                value["source"],
                value["parameters"],
                tuple(ShardInfo(**shard) for shard in value["shards"]),
                plan=value["plan"],
            )
            if found.format not in FORMATS or any("/" in shard.name for shard in found.shards):
                raise ValueError("no such format, or a shard elsewhere")
            if value["digest"] != found._digest() or value["samples"] != found.samples:
                raise _wrong_set(url, "is damaged, or was edited: it is not what was written")
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as exc:
            raise _wrong_set(url, "is not the list of a shard set") from exc
        return found

    def _fields(self) -> dict[str, Any]:
        return {
            "version": _SET_VERSION,
            "format": self.format,
            "source": self.source,
            "parameters": dict(self.parameters),
            "classes": list(self.classes),
            "plan": self.plan,
            "samples": self.samples,
        }

    def _digest(self) -> str:
        whole = self._fields() | {"shards": [list(shard) for shard in self.shards]}
        return xxh3_128_hexdigest(_compact(whole).encode())


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _wrong_set(url: str, what: str) -> ShardError:
    where = f"{url.rstrip('/')}/{SHARDS_JSON}" if url else SHARDS_JSON
    return ShardError(
        f"{where} {what}", shard=SHARDS_JSON, hint="Build the shards again with --overwrite, or copy them again."
    )
