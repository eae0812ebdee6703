"""`shards.json`: the description of a shard set and the list of its shards, written last.

A set without it is not finished. It has the hash of every shard and every sidecar, and of itself, so that readers
notice a set in which files were swapped, lost or edited. Pure functions, any thread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

from xxhash import xxh3_128_hexdigest

from datacache.core.errors import ShardError
from datacache.shards.index import FORMATS

SHARDS_JSON: Final = "shards.json"
VERSION: Final = 1


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
            if value["version"] != VERSION:
                raise _wrong(url, f"has the version {value['version']!r}, and only {VERSION} is known")
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
                raise _wrong(url, "is damaged, or was edited: it is not what was written")
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as exc:
            raise _wrong(url, "is not the list of a shard set") from exc
        return found

    def _fields(self) -> dict[str, Any]:
        return {
            "version": VERSION,
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


def _wrong(url: str, what: str) -> ShardError:
    where = f"{url.rstrip('/')}/{SHARDS_JSON}" if url else SHARDS_JSON
    return ShardError(
        f"{where} {what}", shard=SHARDS_JSON, hint="Build the shards again with --overwrite, or copy them again."
    )
