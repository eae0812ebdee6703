"""The parts of a node's cache, of each of which one process is the only writer.

All parts share the index (LMDB has one writer at a time, of whatever process) and the folders, so that readers need not
know of them, and blocks stay where they are when the number of parts changes. What is divided: an object belongs to the
part that gets its blocks and writes them; a region to the part that its number says, an object's file to its object's.
"""

from __future__ import annotations

from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from datacache.core.cores import cores
from datacache.core.ids import ObjectId
from datacache.tiers.layout import OBJECT_FILE

_SEED = 1
_CORES = 8
"""A process for so many."""
_MOST = 8


class Part(NamedTuple):
    """Part `number`, from 0, of so many."""

    number: int = 0
    of: int = 1

    def has(self, object_id: ObjectId | bytes) -> bool:
        """Tell whether an object is of this part; the id of one of its blocks will do."""
        return self.of == 1 or part_of(object_id[:16], self.of) == self.number

    def has_container(self, container: int, object_id: bytes | memoryview) -> bool:
        """Tell whether a container is of this part; see `part_of_container`."""
        return part_of_container(container, object_id, self.of) == self.number

    def has_number(self, container: int) -> bool:
        """Tell whether this part may give a new container this number."""
        return (container & ~OBJECT_FILE) % self.of == self.number


def part_of(id: bytes | memoryview, parts: int) -> int:
    """Return which of so many parts an object belongs to: from 0, independent of which node of a cluster owns it.

    Jump consistent hashing (Lamping and Veach, "A Fast, Minimal Memory, Consistent Hash Algorithm", 2014): from P to Q
    parts only the objects move that have to.
    """
    key, found, following = xxh3_64_intdigest(id, seed=_SEED), -1, 0
    while following < parts:
        found = following
        key = (key * 2862933555777941757 + 1) & 0xFFFFFFFFFFFFFFFF
        following = int((found + 1) * (2.0**31 / ((key >> 33) + 1)))
    return found


def part_of_container(container: int, object_id: bytes | memoryview, parts: int) -> int:
    """Return which of so many parts a container belongs to. `object_id`: whose file it is, or whose block is in it."""
    return part_of(object_id[:16], parts) if container & OBJECT_FILE else container % parts


def parts_by_cores() -> int:
    """Return the number of parts for this process's cores."""
    return max(1, min(_MOST, cores() // _CORES))
