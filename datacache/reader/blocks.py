"""Block sources: this node's tiers, the daemon, the store itself, and the chain of them that every process reads.

Several threads may read, and a child of `fork()` may go on. All bytes are verified: by the block's checksum (tiers), by
ETag and length (store), and a block that is a whole object by the store's checksum, if it has one. Anything else is an
error.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast
from weakref import WeakValueDictionary

from datacache.catalog.packs import stores_with_packs
from datacache.core.concurrency import LastLoaded, PerProcess, gather
from datacache.core.counters import BROKEN_BLOCKS, DIRECT_READS
from datacache.core.errors import (
    CorruptManifestError,
    DaemonError,
    DatacacheError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreAccessError,
)
from datacache.core.ids import BLOCK_BYTES, BlockId, ObjectRef, block_count, block_id, block_length, object_id
from datacache.daemon.client import AskedBlock, DaemonClient, import_store_clients
from datacache.exchange.wire import MOST_BLOCKS
from datacache.manifest.reader import LoadBlobs
from datacache.settings import Settings
from datacache.store.local.store import LocalStore
from datacache.store.open import Stores
from datacache.store.sources import source_rules
from datacache.store.urls import split_url
from datacache.tiers.local import BypassedBlocks, LocalBlocks

log = logging.getLogger(__name__)

_DIRECT_BYTES = 32 * 2**20
"""The bytes of whole objects that a process holds because somebody reads them in pieces, past the daemon."""


class BlockSource(Protocol):
    """A place to read blocks from."""

    def read(self, ref: ObjectRef, number: int, start: int, stop: int) -> memoryview | bytes | None:
        """Return bytes `start:stop` of a block of an object; None if another source has to give them. Raises
        `core.errors` if no source can."""
        ...


class DaemonBlocks:
    """Blocks of one data set's snapshot that the daemon fetches."""

    def __init__(self, client: DaemonClient, local: LocalBlocks, dataset: str, snapshot: str) -> None:
        self._client, self._local = client, local
        self._dataset, self._snapshot = dataset, snapshot
        self._warned = False

    def read(
        self, ref: ObjectRef, number: int, start: int, stop: int, into: memoryview | None = None
    ) -> memoryview | None:
        """See `BlockSource`. None also if the daemon is away or may not read the store. What it sends is received
        `into` a buffer, if there is one, and the result a view of that."""
        if ref.store.startswith("memory://"):  # only this process has it
            return None
        local, block = self._local, block_id(object_id(ref), number)
        broken = local.failed(block)
        if not broken and local.has(block):
            # The block came this very moment, or the copy here is broken.
            view = local.view(block, start, stop)
            if view is not None:
                return view
            broken = True
        if broken:
            local.counters.count(BROKEN_BLOCKS)
        local.counters_for(self._dataset).miss(stop - start)
        try:
            data = self._client.block(
                ref, number, self._dataset, self._snapshot, span=(start, stop), broken=broken, into=into
            )
        except (StoreAccessError, CorruptManifestError):
            # The daemon may have been started without the credentials, or with another catalog, than this process has.
            return None
        except DaemonError as exc:
            if not self._warned:
                log.warning("reading past the cache: %s", f"{exc}. {exc.hint}".rstrip())
                self._warned = True
            return None
        local.refresh()
        return data

    def ask(self, block: BlockId, ref: ObjectRef, number: int, span: tuple[int, int]) -> AskedBlock | None:
        """Ask for a span of a block that the tiers' `view` has just not given, and do not wait for it. None where only
        `read` can get it, such as what is broken here."""
        if ref.store.startswith("memory://") or self._local.unread(block):
            return None
        asked = self._client.ask_block(ref, number, span, self._dataset, self._snapshot)
        if asked is not None:
            self._local.counters_for(self._dataset).miss(span[1] - span[0])
        return asked

    def read_whole(self, wanted: Sequence[tuple[ObjectRef, int]]) -> list[memoryview | None]:
        """Return whole blocks that are not on this node, asked for together; None for each that `read` is to give, or
        to raise the error of: what came this moment, or is broken here, is among them."""
        found: list[memoryview | None] = [None] * len(wanted)
        plain = [
            at
            for at, (ref, number) in enumerate(wanted)
            if not (ref.store.startswith("memory://") or self._local.has(block_id(object_id(ref), number)))
        ]
        for first in range(0, len(plain), MOST_BLOCKS):
            some = plain[first : first + MOST_BLOCKS]
            try:
                came = self._client.blocks_or_errors([wanted[at] for at in some], self._dataset, self._snapshot)
            except DatacacheError:
                break  # `read` says so
            for at, data in zip(some, came, strict=True):
                if isinstance(data, memoryview):
                    found[at] = data
                    self._local.counters_for(self._dataset).miss(len(data))
        self._local.refresh()
        return found


_direct: PerProcess[LastLoaded[tuple[object, BlockId], bytes | memoryview]] = PerProcess(
    lambda: LastLoaded(_DIRECT_BYTES)
)
"""The objects that all `StoreBlocks` of a process hold, within one bound. The key has the `StoreBlocks`, too: another
one may not have the right to read the object."""


class StoreBlocks:
    """Blocks that this process gets from the stores itself."""

    def __init__(self, stores: Stores, local: LocalBlocks) -> None:
        self._stores, self._local = stores, local

    def read(self, ref: ObjectRef, number: int, start: int, stop: int) -> memoryview | bytes:
        """See `BlockSource`. No store has a checksum of a part: an object of one block is read whole, so that it is
        checked, and held for the other pieces that a mount asks for."""
        self._local.counters.count(DIRECT_READS)
        store, first = self._stores.get(ref.store), number * BLOCK_BYTES
        if block_count(ref.size_bytes) > 1 or (start, stop) == (0, ref.size_bytes):
            return store.read(ref, first + start, first + stop)
        key = self, block_id(object_id(ref), number)
        whole = _direct.get().get(key, lambda: store.read(ref, 0, ref.size_bytes))
        return memoryview(whole)[start:stop]

    def read_file(self, ref: ObjectRef, start: int, stop: int) -> bytes | memoryview | None:
        """Return bytes of an object that is a file of this machine; None for any other, for one that this process
        cannot read or that is another by now, and for copies, which the daemon checks."""
        if ref.store != LocalStore.url or not ref.etag:
            return None
        try:
            return self._stores.get(ref.store).read(ref, start, stop)
        except (ObjectNotFoundError, ObjectChangedError, StoreAccessError):
            return None

    def close(self) -> None:
        """Give back connections and held objects; a later read connects again."""
        direct = _direct.peek()
        if direct is not None:
            direct.forget(lambda key: key[0] is self)
        self._stores.close()


_shared: WeakValueDictionary[tuple[Path, Path], LocalBlocks] = WeakValueDictionary()
"""The tiers of each home, shared by all snapshots: a process that serves many mounts maps each container once."""


class NodeBlocks:
    """The blocks of one data set's snapshot: from the tiers, else the daemon, else the store."""

    def __init__(
        self, settings: Settings, load_blobs: LoadBlobs, *, dataset: str, snapshot: str, direct: bool = False
    ) -> None:
        """`direct`: every read asks the store, with the credentials of `settings`. `snapshot` is '' for a listing of a
        URL that the caller names: that is read from anywhere, a snapshot only from where `settings.sources` allows."""
        rules = None if snapshot else source_rules(settings)
        if rules is not None and not rules.allow(*split_url(dataset)):
            direct = True  # the daemon does not read it: it cannot tell who asks
        home, ram_dir = settings.home, settings.ram_dir
        if settings.bypass_local or direct:
            self.local: LocalBlocks = BypassedBlocks(home, ram_dir)
        else:
            self.local = _shared.get((home, ram_dir)) or LocalBlocks(home, ram_dir, count_hits=True)
            _shared[home, ram_dir] = self.local
        stores = stores_with_packs(settings, load_blobs) if snapshot else Stores(settings)
        self._store = StoreBlocks(stores, self.local)
        self._daemon: DaemonBlocks | None = None
        if not direct:
            client = DaemonClient(settings, prepare=import_store_clients)
            self._daemon = DaemonBlocks(client, self.local, dataset, snapshot)
            if not settings.bypass_local and not client.beats() and self.local.any_unchecked():
                with contextlib.suppress(DaemonError):
                    client.start_soon()  # to check what a killed one left: where all is here no read starts one

    def read(
        self, ref: ObjectRef, number: int, start: int, stop: int, into: memoryview | None = None
    ) -> memoryview | bytes:
        """See `BlockSource`; the store's answer is the last. `into`: see `DaemonBlocks.read`."""
        data: memoryview | bytes | None = self.local.read(ref, number, start, stop)
        if data is None and self._daemon is not None:
            data = self._daemon.read(ref, number, start, stop, into)
        return self._store.read(ref, number, start, stop) if data is None else data

    def read_file(self, ref: ObjectRef, start: int, stop: int) -> bytes | memoryview | None:
        """See `StoreBlocks.read_file`."""
        return self._store.read_file(ref, start, stop)

    def ask(self, block: BlockId, ref: ObjectRef, number: int, span: tuple[int, int]) -> AskedBlock | None:
        """See `DaemonBlocks.ask`."""
        return self._daemon.ask(block, ref, number, span) if self._daemon is not None else None

    def read_whole(self, wanted: Sequence[tuple[ObjectRef, int]]) -> list[memoryview | bytes | DatacacheError]:
        """Return whole blocks, or what `read` raises of each; those that are not on this node come together."""
        found: list[memoryview | bytes | DatacacheError | None] = [None] * len(wanted)
        if self._daemon is not None:
            found[:] = self._daemon.read_whole(wanted)
        left = [at for at, data in enumerate(found) if data is None]

        def read(at: int) -> memoryview | bytes:
            ref, number = wanted[at]
            return self.read(ref, number, 0, block_length(ref.size_bytes, number))

        for at, came in zip(left, gather(read, left), strict=True):
            found[at] = came
        return cast("list[memoryview | bytes | DatacacheError]", found)

    def close(self) -> None:
        """Give back connections and what was read past the daemon; a later read connects again."""
        self._store.close()
