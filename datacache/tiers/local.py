"""Read blocks straight from this node's tiers: index lookup, mapping, checksum. No other process is asked.

Used by every reading process (a training script, a DataLoader worker, a mount worker, the daemon). Safe from several
threads; after `fork()` a child opens the index anew and keeps the mappings, which are read-only. A broken container or
index is a miss, never an error and never other bytes: whoever reads then asks the daemon, which repairs it.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import struct
import time
from pathlib import Path

import lmdb

from datacache.core.concurrency import PerProcess
from datacache.core.errors import CacheError
from datacache.core.objects import BlockId
from datacache.tiers import layout
from datacache.tiers.access import AccessTable
from datacache.tiers.index import Index, open_index
from datacache.tiers.layout import LOCATION, Location, container_name, intact, unpack_location

log = logging.getLogger(__name__)
_MAX_MAPS = 512
_SWEEP_EVERY_S = 1.0


class _Mapped:
    """A container's file, open and mapped."""

    __slots__ = ("bytes", "fd", "map", "view")

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.bytes = os.fstat(self.fd).st_size
        self.map = mmap.mmap(self.fd, self.bytes, prot=mmap.PROT_READ)
        self.view = memoryview(self.map)

    def __del__(self) -> None:
        # The mapping goes when the last view of it goes; the descriptor can go now.
        if hasattr(self, "fd"):
            os.close(self.fd)


class LocalTier:
    """One tier's containers, as a reader sees them."""

    def __init__(self, name: str, folder: Path, access: AccessTable | None) -> None:
        self.name = name
        self._folder = folder
        self._access = access
        self._maps: dict[int, _Mapped] = {}
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_maps = max(16, min(_MAX_MAPS, limit // 8))

    def view(self, value: bytes, start: int, stop: int) -> memoryview | None:
        """Verified bytes `start:stop` of the block an index value locates, no copy; None if not there intact.

        The view stays readable when its region is evicted meanwhile. Do not keep it for long: it keeps the region's
        disk space."""
        try:
            container, offset, length = LOCATION.unpack_from(value)
        except struct.error:
            return None
        mapped = self._maps.get(container)
        if mapped is None:
            mapped = self._open(container)
            if mapped is None:
                return None
        # Touching a mapping behind the end of its file is fatal (SIGBUS), so its size is looked at every time.
        end = offset + length
        if os.fstat(mapped.fd).st_size < end or mapped.bytes < end or stop > length:
            log.warning("container %s/%s is truncated", self._folder, container_name(container))
            self._maps.pop(container, None)
            return None
        block = mapped.view[offset:end]
        if not intact(block, value[LOCATION.size :], start, stop):
            log.warning(
                "a block in %s/%s at %d does not have its checksum", self._folder, container_name(container), offset
            )
            return None
        if self._access is not None:
            self._access.touch(container)
        return block if stop - start == length else block[start:stop]

    def drop_pages(self, location: Location) -> None:
        """The kernel keeps these bytes elsewhere (as a mount's pages): let go of the container's own."""
        mapped = self._maps.get(location.container)
        if mapped is not None:
            os.posix_fadvise(mapped.fd, location.offset, location.length, os.POSIX_FADV_DONTNEED)

    def drop_evicted(self) -> None:
        """Close containers that were evicted, so that their disk space comes free."""
        for container, mapped in list(self._maps.items()):
            if os.fstat(mapped.fd).st_nlink == 0:
                self._maps.pop(container, None)

    def _open(self, container: int) -> _Mapped | None:
        if len(self._maps) >= self._max_maps:
            self.drop_evicted()
            while len(self._maps) >= self._max_maps:
                try:
                    self._maps.pop(next(iter(self._maps)), None)
                except (StopIteration, RuntimeError):  # another thread is at it
                    break
        try:
            mapped = _Mapped(self._folder / container_name(container))
        except (OSError, ValueError) as exc:  # evicted meanwhile, deleted by hand, or empty
            log.debug("container %s/%s: %s", self._folder, container_name(container), exc)
            return None
        self._maps[container] = mapped
        return mapped


class LocalBlocks:
    """All tiers of a node, fastest first, as one place to look for a block."""

    def __init__(self, home: Path, ram_dir: Path) -> None:
        self._home = home
        self._index: PerProcess[list[Index]] = PerProcess(list)  # at most one: empty until there is an index
        self._swept_s = time.monotonic()
        try:
            access = AccessTable(layout.cache_dir(home) / "access.bin")
        except OSError:  # no cache yet, or not ours to write: eviction knows less, reading goes on
            access = None
        self.tiers = (
            LocalTier("ram", layout.ram_tier_dir(home, ram_dir), access),
            LocalTier("ssd", layout.ssd_dir(home), access),
        )

    def view(self, block: BlockId, start: int, stop: int) -> tuple[memoryview, int] | None:
        """Verified bytes `start:stop` of a block and the number of the tier that had them; None for a miss."""
        for number, value in self._values(block):
            view = self.tiers[number].view(value, start, stop)
            if view is not None:
                return view, number
        return None

    def locate(self, block: BlockId) -> tuple[LocalTier, Location] | None:
        """The fastest tier that has a block by the index, bytes unseen."""
        for number, value in self._values(block):
            try:
                return self.tiers[number], unpack_location(value)
            except ValueError as exc:
                log.warning("the index of %s: %s", self._home, exc)
        return None

    def refresh(self) -> None:
        """Look again whether there is an index, and whether it is still the one in use. Called after a miss."""
        held = self._index.get()
        if held and not held[0].current():
            held.clear()
        if time.monotonic() - self._swept_s > _SWEEP_EVERY_S:
            self._swept_s = time.monotonic()
            for tier in self.tiers:
                tier.drop_evicted()

    def _values(self, block: BlockId) -> list[tuple[int, bytes]]:
        """The index values of a block, by tier."""
        held = self._index.get()
        try:
            if not held:
                held.append(open_index(layout.index_dir(self._home)))
            index = held[0]
            if not index.whole():
                log.warning("the index %s is truncated", index.folder)
                held.clear()
                return []
            return index.find(block)
        except CacheError as exc:  # before the daemon's first start there is none
            log.debug("%s", exc)
        except (lmdb.Error, OSError, IndexError) as exc:
            log.warning("the index of %s cannot be read: %s", self._home, exc)
            held.clear()
        return []
