"""Paths on disk and in memory, and the packing of index values and region records. No I/O. Any thread.

<home>/cache/FORMAT            version of this layout
<home>/cache/pins.json         pinned refs → data sets
<home>/cache/tenants.json      namespaces of Kubernetes, their limits and data sets
<home>/cache/BOOT              the boot (of the machine) in which the index was last opened for writing
<home>/cache/CLEAN             which index was closed cleanly, and its copy
<home>/cache/index.saved       a copy of the index as it was closed, for after a restart of the machine
<home>/cache/memory            a link to the folder in memory, where it is not at its usual place
<home>/cache/ssd/r-<id>        a region: records of header, payload
<home>/cache/ssd/o-<id>        an object file: sparse, block n at n × BLOCK_BYTES
<ram_dir>/datacache-<uid>-<hash of home>/     the folder in memory (`memory`):
    home.json                  whose it is; the daemon has the folder locked
    index.<n>/                 LMDB: block → location per tier, containers; n grows when it is made again
    access.bin                 last read of each container (float64 seconds, by container id modulo the slots)
    counters/, lookahead/      what readers count, and published orders
    r-<id>, o-<id>             the RAM tier
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from datacache.core.ids import GRANULE_BYTES, BlockId

FORMAT_VERSION = 1
OBJECT_FILE = 1 << 31
"""Set in the id of a container that is an object file. Ids are never used twice, so a stale one finds nothing."""

LOCATION = struct.Struct("<IQI")
_SUM = struct.Struct("<Q")
RECORD = struct.Struct("<4s20sII")
RECORD_MAGIC = b"DCB1"
RECORD_ALIGN = 8
REGION_HEADER_BYTES = 512
DISK_BLOCK = 4096


class Location(NamedTuple):
    """The place of a block's bytes: `length` bytes at `offset` of a container, one xxh3-64 a granule."""

    container: int
    offset: int
    length: int
    sums: bytes


def pack_location(location: Location) -> bytes:
    """Return the index value of a location."""
    return LOCATION.pack(location.container, location.offset, location.length) + location.sums


def unpack_location(value: bytes | memoryview) -> Location:
    """Return the location of an index value; `ValueError` if it cannot be one."""
    try:
        container, offset, length = LOCATION.unpack_from(value)
    except struct.error as exc:
        raise ValueError("an index value is too short") from exc
    sums = bytes(value[LOCATION.size :])
    if len(sums) != 8 * granules(length):
        raise ValueError("an index value has the wrong number of checksums")
    return Location(container, offset, length, sums)


def granules(length: int) -> int:
    """Return how many checksums a block of this length has."""
    return -(-length // GRANULE_BYTES)


def checksums(data: bytes | memoryview) -> bytes:
    """Return one little-endian xxh3-64 for each granule of a block, joined."""
    if len(data) <= GRANULE_BYTES:
        return _SUM.pack(xxh3_64_intdigest(data)) if len(data) else b""
    view = memoryview(data)
    return b"".join(
        _SUM.pack(xxh3_64_intdigest(view[at : at + GRANULE_BYTES])) for at in range(0, len(view), GRANULE_BYTES)
    )


def intact(block: memoryview, sums: bytes, start: int, stop: int) -> bool:
    """Tell whether the granules that `start:stop` of a whole block touches have their checksums."""
    if len(block) <= GRANULE_BYTES:
        return xxh3_64_intdigest(block).to_bytes(8, "little") == sums
    for granule in range(start // GRANULE_BYTES, -(-stop // GRANULE_BYTES)):
        at = granule * GRANULE_BYTES
        digest = xxh3_64_intdigest(block[at : at + GRANULE_BYTES]).to_bytes(8, "little")
        if digest != sums[8 * granule : 8 * granule + 8]:
            return False
    return True


def record_header(block: BlockId, length: int, sums: bytes) -> bytes:
    """Return the bytes before a payload in a region, from which a lost index can be made again."""
    head = RECORD.pack(RECORD_MAGIC, block, length, len(sums)) + sums
    return head + bytes(-len(head) % RECORD_ALIGN)


def aligned(length: int, to: int = RECORD_ALIGN) -> int:
    """Return `length` rounded up."""
    return -(-length // to) * to


def container_name(container: int) -> str:
    """Return a container's file name in its tier's folder."""
    kind = "o" if container & OBJECT_FILE else "r"
    return f"{kind}-{container & ~OBJECT_FILE:08x}"


def container_of(name: str) -> int | None:
    """Return the id in a container's file name; None for any other name."""
    kind, _, digits = name.partition("-")
    try:
        number = int(digits, 16)
    except ValueError:
        return None
    return {"r": number, "o": number | OBJECT_FILE}.get(kind)


def cache_dir(home: Path) -> Path:
    """Return the folder of the SSD tier and the index."""
    return home / "cache"


def index_dir(memory: Path) -> Path:
    """Return the folder of the newest index in a home's folder in memory, or of the first one if there is none yet."""
    return memory / f"index.{max(index_generations(memory), default=0)}"


def pins_file(home: Path) -> Path:
    """Return the file of the pinned refs."""
    return cache_dir(home) / "pins.json"


def tenants_file(home: Path) -> Path:
    """Return the file of the namespaces that have data sets on this node."""
    return cache_dir(home) / "tenants.json"


def saved_index(home: Path) -> Path:
    """Return the copy of the index on disk."""
    return cache_dir(home) / "index.saved"


def index_generations(folder: Path) -> list[int]:
    """Return the numbers of the indexes that are there. There are several only while a rebuilt one replaces another."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [int(n.removeprefix("index.")) for n in names if n.startswith("index.") and n[6:].isdigit()]


def ssd_dir(home: Path) -> Path:
    """Return the folder of the SSD tier's containers."""
    return cache_dir(home) / "ssd"
