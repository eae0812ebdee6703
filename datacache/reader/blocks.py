"""Where a reading process gets a block from: this node's tiers, then the daemon, then the store itself.

Safe from several threads and across `fork()`. What comes out is verified by its checksum (tiers), by ETag and length
(store), or not at all: then it is an error.
"""

from __future__ import annotations

import logging
from typing import Protocol

from datacache.catalog.packs import stores_with_packs
from datacache.core.counters import BROKEN_BLOCKS, DIRECT_READS, counters_of
from datacache.core.errors import CorruptManifestError, DaemonError, StoreAccessError
from datacache.core.objects import BLOCK_BYTES, BlockId, ObjectRef, block_id, object_id
from datacache.daemon import paths
from datacache.daemon.client import DaemonClient
from datacache.manifest.reader import LoadBlobs
from datacache.settings import Settings
from datacache.tiers.local import LocalBlocks

log = logging.getLogger(__name__)


class BlockSource(Protocol):
    """What a reader knows of where blocks come from. Ranges are within one block."""

    def copy_here(self, block: BlockId) -> bytes | None:
        """All bytes of a block if they can be had without waiting for anybody."""
        ...

    def copy_into_here(self, block: BlockId, out: memoryview) -> bool:
        """The same to where the caller wants them; of false, `out` may hold anything."""
        ...

    def view_here(self, block: BlockId, start: int, stop: int) -> memoryview | None:
        """The same for a part of it, without a copy. Not to be kept for long."""
        ...

    def peek_here(self, block: BlockId, start: int, stop: int) -> memoryview | None:
        """As `view_here`, but perhaps not verified: for who compares what he copies with a checksum of his own."""
        ...

    def read(self, ref: ObjectRef, number: int, start: int, stop: int) -> memoryview | bytes:
        """The bytes, wherever they are. Raises `core.errors` when they cannot be had."""
        ...

    def release(self, block: BlockId) -> None:
        """A hint that the caller keeps a block's bytes elsewhere now."""
        ...

    def sweep(self) -> None:
        """Let go of what was evicted and is held open still."""
        ...

    def unmap_pages(self) -> None:
        """A hint that what was viewed is not needed soon: it should not count as this process's memory."""
        ...


class NodeBlocks:
    """The blocks of one data set's snapshot, as any process of a node reads them."""

    def __init__(
        self,
        settings: Settings,
        client: DaemonClient,
        load_blobs: LoadBlobs,
        *,
        dataset: str,
        snapshot: str,
        direct: bool = False,
    ) -> None:
        """`direct`: every read asks the store, with the credentials of `settings`."""
        self._direct = direct
        self._bypass = settings.bypass_local or direct
        self._client = client
        self._dataset, self._snapshot = dataset, snapshot
        self._local = LocalBlocks(settings.home, settings.ram_dir)
        self._counters = counters_of(paths.counters_dir(settings.home))
        self._stores = stores_with_packs(settings, load_blobs)
        self._warned = False

    def copy_here(self, block: BlockId) -> bytes | None:
        """See `BlockSource`: verified by its checksum."""
        if self._bypass:
            return None
        found = self._local.copy(block)
        if found is None:
            return None
        data, tier = found
        self._counters.hit(tier, len(data))
        return data

    def copy_into_here(self, block: BlockId, out: memoryview) -> bool:
        """See `BlockSource`: verified by its checksum."""
        tier = None if self._bypass else self._local.copy_into(block, out)
        if tier is None:
            return False
        self._counters.hit(tier, len(out))
        return True

    def view_here(self, block: BlockId, start: int, stop: int) -> memoryview | None:
        """See `BlockSource`: verified by its checksum, straight from a tier."""
        if self._bypass:
            return None
        found = self._local.view(block, start, stop)
        if found is None:
            return None
        view, tier = found
        self._counters.hit(tier, stop - start)
        return view

    def peek_here(self, block: BlockId, start: int, stop: int) -> memoryview | None:
        """See `BlockSource`."""
        if self._bypass:
            return None
        found = self._local.peek(block, start, stop)
        if found is None:
            return None
        view, tier = found
        self._counters.hit(tier, stop - start)
        return view

    def read(self, ref: ObjectRef, number: int, start: int, stop: int) -> memoryview | bytes:
        """See `BlockSource`."""
        block = block_id(object_id(ref), number)
        view = self.view_here(block, start, stop)
        if view is not None:
            return view
        if self._direct or ref.store.startswith("memory://"):  # only this process has it
            return self._read_direct(ref, number, start, stop)
        broken = False
        if not self._bypass and self._local.has(block):
            # It came this very moment, or what is here is broken.
            view = self.view_here(block, start, stop)
            if view is not None:
                return view
            broken = True
            self._counters.count(BROKEN_BLOCKS)
        self._counters.miss(stop - start)
        try:
            data = self._client.block(ref, number, self._dataset, self._snapshot, broken=broken)
        except (StoreAccessError, CorruptManifestError):
            # The daemon may have been started without the credentials, or with another catalog, than this process has.
            return self._read_direct(ref, number, start, stop)
        except DaemonError as exc:
            if not self._warned:
                log.warning("reading past the cache: %s", exc)
                self._warned = True
            return self._read_direct(ref, number, start, stop)
        self._local.refresh()
        return memoryview(data)[start:stop]

    def release(self, block: BlockId) -> None:
        """See `BlockSource`: lets go of the page cache of the SSD's copy."""
        self._local.drop_pages(block)

    def sweep(self) -> None:
        """See `BlockSource`."""
        self._local.sweep()

    def unmap_pages(self) -> None:
        """See `BlockSource`."""
        self._local.unmap_pages()

    def _read_direct(self, ref: ObjectRef, number: int, start: int, stop: int) -> bytes | memoryview:
        self._counters.count(DIRECT_READS)
        first = number * BLOCK_BYTES
        return self._stores.get(ref.store).read(ref, first + start, first + stop)
