"""Where a reading process gets a block from: this node's tiers, then the daemon, then the store itself.

Safe from several threads and across `fork()`. What comes out is verified: by its checksum (tiers), by ETag and length
(store), and in a block that is all of an object by the checksum that the store gives along with it, if it gives one.
What cannot be had so is an error.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from datacache.catalog.packs import stores_with_packs
from datacache.core.concurrency import PerProcess
from datacache.core.counters import BROKEN_BLOCKS, DIRECT_READS, counters_of
from datacache.core.errors import CorruptManifestError, DaemonError, StoreAccessError
from datacache.core.ids import BLOCK_BYTES, BlockId, ObjectRef, block_count, block_id, object_id
from datacache.core.last_loaded import LastLoaded
from datacache.daemon.client import DaemonClient
from datacache.manifest.reader import LoadBlobs
from datacache.settings import Settings
from datacache.store.open import Stores
from datacache.store.sources import source_rules
from datacache.store.urls import split_url
from datacache.tiers.local import LocalBlocks
from datacache.tiers.memory import counters_dir, make_shared

log = logging.getLogger(__name__)

_DIRECT_BYTES = 32 * 2**20
"""Of whole objects that a process holds because somebody reads them in pieces, past the daemon."""


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


_shared: WeakValueDictionary[tuple[Path, Path], LocalBlocks] = WeakValueDictionary()


_direct: PerProcess[LastLoaded[tuple[object, BlockId], bytes | memoryview]] = PerProcess(
    lambda: LastLoaded(_DIRECT_BYTES)
)
"""One bound for all that a process reads. By who asked, too: what one may read is not for another."""


def _local_blocks(home: Path, ram_dir: Path) -> LocalBlocks:
    """Return the tiers of a home as this process sees them, shared by all snapshots that it reads.

    A process that serves many mounts maps each container once, and remembers places of blocks up to one bound.
    """
    found = _shared.get((home, ram_dir))
    if found is None:
        found = _shared[home, ram_dir] = LocalBlocks(home, ram_dir)
    return found


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
        """`direct`: every read asks the store, with the credentials of `settings`. `snapshot` is '' for what was listed
        under a URL that the caller names: that is read wherever it is, and snapshots where `settings.sources` says."""
        rules = None if snapshot else source_rules(settings)
        if rules is not None and not rules.allow(*split_url(dataset)):
            direct = True  # the daemon does not read it: it cannot tell on whose word it is asked
        self._direct = direct
        self._bypass = settings.bypass_local or direct
        self._client = client
        self._dataset, self._snapshot = dataset, snapshot
        self._local = _local_blocks(settings.home, settings.ram_dir)
        self._counters = counters_of(counters_dir(settings.home, settings.ram_dir), make_shared)
        self._stores = stores_with_packs(settings, load_blobs) if snapshot else Stores(settings)
        self._warned = False
        self._me = object()
        client.prepare = _import_clients
        if not self._bypass and not client.beats() and self._local.any_unchecked():
            with contextlib.suppress(DaemonError):
                client.start_soon()  # to check what a killed one left: it may all be here, so that no read starts one

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
        broken = not self._bypass and self._local.failed(block)
        if not broken and not self._bypass and self._local.has(block):
            # It came this very moment, or what is here is broken.
            view = self.view_here(block, start, stop)
            if view is not None:
                return view
            broken = True
        if broken:
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

    def close(self) -> None:
        """Give back connections, and what was read past the daemon; a later read connects again."""
        me, direct = self._me, _direct.peek()
        if direct is not None:
            direct.forget(lambda key: key[0] is me)
        self._stores.close()

    def _read_direct(self, ref: ObjectRef, number: int, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a block from the store. No store has a checksum of a part: an object of one block is read
        whole, so that it is checked, and held for the other pieces that a mount asks for."""
        self._counters.count(DIRECT_READS)
        store, first = self._stores.get(ref.store), number * BLOCK_BYTES
        if block_count(ref.size_bytes) > 1 or (start, stop) == (0, ref.size_bytes):
            return store.read(ref, first + start, first + stop)
        key = self._me, block_id(object_id(ref), number)
        whole = _direct.get().get(key, lambda: store.read(ref, 0, ref.size_bytes))
        return memoryview(whole)[start:stop]


def _import_clients() -> None:
    """Import what reading from a store itself needs, while there is nothing else to do: it takes some tenths of a
    second, and the daemon that does not answer keeps all readers of a node waiting at the same time."""
    import datacache.store.s3.clients  # noqa: F401
