"""Fetch what lines of an import name: look objects of stores up, or copy them; copy those of web servers.

Used by `jsonl`. Threads of one process call `fetch`; a process of an engine does tasks of many lines (`work`), with
threads and settings of its own. What fetches knows nothing of the journal and of the commit.

Tasks of the queue come from anybody who may write into the catalog. So a process of an engine trusts no line: it reads
what its own setting `sources` lets snapshots be read from, and its own `allow_network` says which hosts it may ask.

The threads are daemons, so a command that is interrupted ends at once, without waiting for servers that do not answer;
otherwise they have ended when `ordered` has.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

from datacache.catalog.objects import REFRESH_AFTER_S, ObjectWriter, Stored
from datacache.core.addresses import AddressRule
from datacache.core.concurrency import ByteBudget
from datacache.core.errors import AddressRefusedError, DatacacheError, StoreError, UsageError
from datacache.core.ids import BLOCK_BYTES, ObjectRef
from datacache.imports.failures import Failure, TooLargeError, code_of
from datacache.imports.lines import Line
from datacache.imports.places import Allowance, ClosedPlaceError, Places
from datacache.imports.web import OWN_SETTING, Request, Web
from datacache.manifest.model import Entry
from datacache.settings import Settings, load_settings
from datacache.store.base import ObjectStore
from datacache.store.bodies import read_whole
from datacache.store.open import Stores
from datacache.store.sources import source_rules

IN_FLIGHT_BYTES = 256 << 20
"""Bytes that all threads of a process together may hold of objects being copied; a larger object is copied alone."""
MAX_CONCURRENCY = 256
"""More would run into the usual limit of 1,024 open files, and help no server."""
_PAGES = (".html", ".htm", ".xhtml")


class FetchRules(NamedTuple):
    """How the lines of a list are fetched."""

    content: str
    """The hash of the list: what an engine has done of one list is kept apart from another's."""
    copy: bool
    """Copy objects of stores, too."""
    max_object_bytes: int
    """The most bytes of an object that is copied."""
    object_timeout_s: float
    concurrency: int
    """Lines at a time, of each process; 0 for its setting."""
    hosts: tuple[str, ...]
    """Hosts and networks that are no public ones and may be asked."""
    numbers: Mapping[str, int]
    """Of each store that is named, its number among the manifest's sources."""
    copies_source: int
    """The number of the storage for copies."""


class FetchedLine(NamedTuple):
    """The result of a line."""

    outcome: Entry | Failure
    resumed: bool
    """Tell whether an earlier run had made the copy."""


class FetchedLines(NamedTuple):
    """The results of a task's lines, in their order."""

    lines: list[FetchedLine]
    at_s: int
    """When the first was begun, in seconds of the epoch."""


class DestinationError(DatacacheError):
    """The storage for copies failed: no line's fault, so the import ends. `error` says how."""

    def __init__(self, error: StoreError) -> None:
        super().__init__(error.message, hint=error.hint)
        self.error = error


class LineFetcher:
    """Fetches lines. Safe from several threads, and pickled for a process of an engine. Close it."""

    def __init__(
        self, settings: Settings, objects: ObjectWriter | None, rules: FetchRules, *, elsewhere: bool = False
    ) -> None:
        """`objects` is where copies go. `elsewhere`: this is a process of an engine, and `settings` are its own."""
        self._objects, self._rules = objects, rules
        self.threads = min(rules.concurrency or settings.concurrency, MAX_CONCURRENCY)
        """How many lines are fetched at a time."""
        self._own = Places("/", allow_network=settings.allow_network) if elsewhere else None
        self._stores = Stores(settings, rules=source_rules(settings) if elsewhere else None)
        rule = AddressRule(rules.hosts, within=self._own.rule if self._own is not None else None)
        self._web = Web(request_timeout_s=settings.store_timeout_s, connections=self.threads, rule=rule)
        self._stopped = threading.Event()
        self._budget = ByteBudget(IN_FLIGHT_BYTES)
        self.kept = 0
        """Lines whose copies an earlier run had had made by an engine."""

    def reduce_elsewhere(self) -> tuple[object, ...]:
        """Return what a process of an engine fetches lines with."""
        return _elsewhere, (self._objects, self._rules)

    def fetch(self, line: Line, before: Entry | None) -> FetchedLine:
        """Return the entry of a line, or why there is none. `before` is of a copy that an earlier run made, too long
        ago to be taken as there. `DestinationError`."""
        try:
            resumed = before is not None and self._renew(before)
            return FetchedLine(before if before is not None and resumed else self._fetch(line), resumed)
        except (StoreError, UsageError) as exc:
            code = "url" if isinstance(exc, UsageError) else code_of(exc)
            return FetchedLine(Failure(line.number, line.shown, line.path.decode(), code, exc.message), False)

    def work(self, task: Sequence[tuple[Line, Entry | None]]) -> FetchedLines:
        """Fetch some lines, each as `fetch` does."""
        at_s = int(time.time())
        threads = min(self.threads, len(task))
        return FetchedLines(list(ordered(lambda item: self.fetch(*item), task, threads=threads)), at_s)

    def lasts(self, result: FetchedLines) -> bool:
        """Tell whether all of what an earlier run has fetched is copies that are still there, by their age. Lines that
        failed are tried again, and references looked up."""
        copies = all(
            isinstance(line.outcome, Entry) and line.outcome.source == self._rules.copies_source
            for line in result.lines
        )
        lasts = copies and is_young(result.at_s, time.time())
        self.kept += len(result.lines) if lasts else 0
        return lasts

    def close(self) -> None:
        """Close connections, and stop what is under way."""
        self._stopped.set()
        self._stores.close()
        self._web.close()

    def _fetch(self, line: Line) -> Entry:
        """Return the entry of a line."""
        if line.url:
            return self._from_web(line)
        if self._own is not None:
            try:
                self._own.check_store(line.store)
            except ClosedPlaceError as exc:
                raise AddressRefusedError(f"{line.shown}: {exc}{OWN_SETTING}", url=line.shown) from exc
        store = self._stores.get(line.store)
        if self._rules.copy:
            return self._copied(line, store)
        info = store.head(line.key)
        key = None if line.key.encode("utf-8", "surrogateescape") == line.path else _raw(line.key)
        return Entry(
            line.path, info.size_bytes, info.mtime_ns, info.etag, info.version, self._rules.numbers[line.store], key
        )

    def _renew(self, entry: Entry) -> bool:
        """Store a copy again, so that garbage collection takes it for new. Tell whether it was still there and
        whole."""
        key = (entry.key or b"").decode("utf-8", "surrogateescape")
        with self._allowance(key) as allowed:
            allowed.take(entry.size_bytes)
            try:
                ref = ObjectRef(self._writer.source.store, key, entry.size_bytes)
                data = self._read(self._stores.get(ref.store), ref, allowed)
            except StoreError:
                return False
            return self._put(data).key == key

    def _from_web(self, line: Line) -> Entry:
        shown = line.shown
        with self._allowance(shown) as allowed:
            most = self._rules.max_object_bytes
            body = self._web.get(Request(line.url, shown, allowed, most, self._stopped.is_set))
            if body.is_page and not line.path.decode().lower().endswith(_PAGES):
                raise StoreError(f"{shown}: the server sent a web page in place of the file", url=shown)
            stored = self._put(body.data)
        # No time: Last-Modified may differ between a server's machines, and the snapshot's id must not.
        return Entry(line.path, stored.size_bytes, 0, stored.hex, "", self._rules.copies_source, _raw(stored.key))

    def _copied(self, line: Line, store: ObjectStore) -> Entry:
        info = store.head(line.key)
        ref = info.ref(store.url)
        if info.size_bytes > self._rules.max_object_bytes:
            most = f"the {self._rules.max_object_bytes:,} bytes that one object may have"
            raise TooLargeError(f"{ref.url}: it has {info.size_bytes:,} bytes, more than {most}", url=ref.url)
        with self._allowance(ref.url) as allowed:
            allowed.take(info.size_bytes)
            stored = self._put(self._read(store, ref, allowed))
        # The original's ETag and time: a copy of what did not change is no change.
        etag, key = info.etag or stored.hex, _raw(stored.key)
        return Entry(line.path, stored.size_bytes, info.mtime_ns, etag, "", self._rules.copies_source, key)

    def _allowance(self, shown: str) -> Allowance:
        return Allowance(shown, self._rules.object_timeout_s, self._budget)

    @property
    def _writer(self) -> ObjectWriter:
        assert self._objects is not None, "lines that are copied need a place to go"
        return self._objects

    def _put(self, data: bytes) -> Stored:
        try:
            return self._writer.put(data)
        except StoreError as exc:
            raise DestinationError(exc) from exc

    def _read(self, store: ObjectStore, ref: ObjectRef, allowed: Allowance) -> bytes:
        def expect_time() -> None:
            allowed.check()
            if self._stopped.is_set():
                raise StoreError(f"{ref.url}: the import was stopped", url=ref.url)

        return read_whole(store, ref, BLOCK_BYTES, before_part=expect_time)


def _elsewhere(objects: ObjectWriter | None, rules: FetchRules) -> LineFetcher:
    return LineFetcher(load_settings(), objects, rules, elsewhere=True)


def _raw(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def is_young(at_s: float, now_s: float) -> bool:
    """Tell whether a copy that was made then is there still, whatever snapshots name it."""
    return 0 <= now_s - at_s < REFRESH_AFTER_S


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
