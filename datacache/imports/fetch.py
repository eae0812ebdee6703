"""Turn checked lines into entries, in threads whose results come in order.

Used by `jsonl`. An object of a store is looked at or copied, one from the web is copied. The threads are daemons, so a
command that is interrupted ends at once, without waiting for servers that do not answer; otherwise they have ended when
`ordered` has. The consumer can show progress meanwhile, however long one item takes. `Fetcher` is safe from several
threads and raises the store's errors.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from datacache.catalog.objects import MAX_OBJECT_BYTES, ObjectWriter, Stored
from datacache.core.concurrency import ByteBudget
from datacache.core.errors import DatacacheError, StoreError
from datacache.core.ids import BLOCK_BYTES, ObjectRef
from datacache.imports.failures import TooLargeError
from datacache.imports.lines import Line
from datacache.imports.places import Clock, Room
from datacache.imports.web import Request, Web
from datacache.manifest.model import Entry
from datacache.store.base import ObjectStore
from datacache.store.bodies import read_whole
from datacache.store.open import Stores

IN_FLIGHT_BYTES = 256 << 20
"""What all threads together may hold of objects that are being copied; a larger object is copied alone."""
_PAGES = (".html", ".htm", ".xhtml")


class DestinationError(DatacacheError):
    """The storage for copies failed: no line's fault, so the import ends. `error` says how."""

    def __init__(self, error: StoreError) -> None:
        super().__init__(error.message, hint=error.hint)
        self.error = error


@dataclass(frozen=True, kw_only=True)
class JsonlOptions:
    """How lines are imported."""

    copy: bool = False
    """Copy objects of stores, too, instead of naming them."""
    objects: str = ""
    """URL of the storage for copies, in place of the setting."""
    concurrency: int = 0
    """Lines at a time, at most `jsonl.MAX_CONCURRENCY`; 0 for the setting."""
    max_object_bytes: int = MAX_OBJECT_BYTES
    """What an object may have that is copied. A reference costs nothing, so its size is not limited."""
    object_timeout_s: float = 300.0
    skip_failed: bool = False
    """Commit without the lines that fail."""
    allow_local: tuple[str | os.PathLike[str], ...] = ()
    """Folders besides the list's own whose files it may name."""
    allow_network: tuple[str, ...] = ()
    """Hosts and networks besides those of the setting that it may name, see `core.addresses.parse_network_rule`."""


class Fetcher:
    """Fetches lines.

    `sources` are the numbers of stores' URLs in the manifest, `objects_source` that of the storage that copies go to.
    `stop` says whether to give up.
    """

    def __init__(
        self,
        stores: Stores,
        web: Web,
        objects: ObjectWriter | None,
        options: JsonlOptions,
        *,
        sources: Mapping[str, int],
        objects_source: int,
        stop: Callable[[], bool],
    ) -> None:
        self._stores, self._web, self._objects, self._options = stores, web, objects, options
        self._sources, self._objects_source, self._stop = sources, objects_source, stop
        self._budget = ByteBudget(IN_FLIGHT_BYTES)

    def fetch(self, line: Line) -> Entry:
        """Return the entry of a line."""
        if line.url:
            return self._from_web(line)
        store = self._stores.get(line.store)
        if self._options.copy:
            return self._copied(line, store)
        info = store.head(line.key)
        key = None if line.key.encode("utf-8", "surrogateescape") == line.path else _raw(line.key)
        return Entry(line.path, info.size_bytes, info.mtime_ns, info.etag, info.version, self._sources[line.store], key)

    def renew(self, entry: Entry) -> bool:
        """Store a copy again, so that garbage collection takes it for new. Tell whether it was still there and
        whole."""
        key = (entry.key or b"").decode("utf-8", "surrogateescape")
        clock = Clock(key, self._options.object_timeout_s)
        with Room(self._budget) as room:
            room.take(entry.size_bytes, clock)
            try:
                ref = ObjectRef(self._writer.source.store, key, entry.size_bytes)
                data = self._read(self._stores.get(ref.store), ref, clock)
            except StoreError:
                return False
            return self._put(data).key == key

    def _from_web(self, line: Line) -> Entry:
        shown = line.shown
        with Room(self._budget) as room:
            clock = Clock(shown, self._options.object_timeout_s)
            body = self._web.get(Request(line.url, shown, room, clock, self._options.max_object_bytes, self._stop))
            if body.is_page and not line.path.decode().lower().endswith(_PAGES):
                raise StoreError(f"{shown}: the server sent a web page in place of the file", url=shown)
            stored = self._put(body.data)
        # No time: Last-Modified may differ between a server's machines, and the snapshot's id must not.
        return Entry(line.path, stored.size_bytes, 0, stored.hex, "", self._objects_source, _raw(stored.key))

    def _copied(self, line: Line, store: ObjectStore) -> Entry:
        info = store.head(line.key)
        ref = info.ref(store.url)
        if info.size_bytes > self._options.max_object_bytes:
            most = f"the {self._options.max_object_bytes:,} bytes that one object may have"
            raise TooLargeError(f"{ref.url}: it has {info.size_bytes:,} bytes, more than {most}", url=ref.url)
        clock = Clock(ref.url, self._options.object_timeout_s)
        with Room(self._budget) as room:
            room.take(info.size_bytes, clock)
            stored = self._put(self._read(store, ref, clock))
        # The original's ETag and time: a copy of what did not change is no change.
        etag, key = info.etag or stored.hex, _raw(stored.key)
        return Entry(line.path, stored.size_bytes, info.mtime_ns, etag, "", self._objects_source, key)

    @property
    def _writer(self) -> ObjectWriter:
        assert self._objects is not None, "lines that are copied need a place to go"
        return self._objects

    def _put(self, data: bytes) -> Stored:
        try:
            return self._writer.put(data)
        except StoreError as exc:
            raise DestinationError(exc) from exc

    def _read(self, store: ObjectStore, ref: ObjectRef, clock: Clock) -> bytes:
        def expect_time() -> None:
            clock.check()
            if self._stop():
                raise StoreError(f"{ref.url}: the import was stopped", url=ref.url)

        return read_whole(store, ref, BLOCK_BYTES, before_part=expect_time)


def _raw(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


_T = TypeVar("_T")
_R = TypeVar("_R")
_LOOK_EVERY_S = 0.2
_AHEAD = 16
"""Items for each thread that may be begun before the first of them is done: one that is slow stops no other for
long."""


def ordered(
    work: Callable[[_T], _R], items: Iterable[_T], *, threads: int, meanwhile: Callable[[], None] | None = None
) -> Iterator[_R]:
    """Yield `work(item)` for each item. Errors of `work` are raised here, in their turn.

    `meanwhile` is called here a few times a second while nothing else happens. What is under way when the caller stops
    early is left to itself.
    """
    queue: SimpleQueue[tuple[Future[_R], _T] | None] = SimpleQueue()
    stopped = threading.Event()

    def run() -> None:
        while (task := queue.get()) is not None:
            future, item = task
            if stopped.is_set():
                continue
            try:
                future.set_result(work(item))
            except BaseException as exc:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(exc)

    pool = [threading.Thread(target=run, name=f"import-{number}", daemon=True) for number in range(threads)]
    for thread in pool:
        thread.start()
    waiting: deque[Future[_R]] = deque()
    finished = False
    try:
        for item in items:
            future: Future[_R] = Future()
            queue.put((future, item))
            waiting.append(future)
            while waiting and (waiting[0].done() or len(waiting) >= threads * _AHEAD):
                yield _result(waiting.popleft(), meanwhile)
        while waiting:
            yield _result(waiting.popleft(), meanwhile)
        finished = True
    finally:
        stopped.set()
        for _ in pool:
            queue.put(None)
        if finished:
            for thread in pool:
                thread.join()


def _result(future: Future[_R], meanwhile: Callable[[], None] | None) -> _R:
    while True:
        try:
            return future.result(_LOOK_EVERY_S)
        except NotYet:
            if future.done():  # the work itself timed out
                raise
            if meanwhile is not None:
                meanwhile()
