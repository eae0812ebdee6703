"""A snapshot from JSON lines: every line's object is fetched or referenced, and only then is anything committed.

Used by `api.import_jsonl`. Three passes, each in bounded memory for files of any length:

1. The file is read, every line checked, and what can be tried is sorted by path (`plan`).
2. In the order of the paths, threads look objects up or copy them (`ordered`). What is done is noted (`journal`), so
   that an import that was killed goes on where it was. Every line is tried, whatever became of the others.
3. If none failed, or those that did are to be left out, the manifest is built and committed.

A copy that an earlier run made is taken as there while it is younger than the age up to which garbage collection spares
what no snapshot names (`catalog.objects.REFRESH_AFTER_S`); an older one is read and stored again first. References are
looked up by every run: the object may have changed since.

The threads are daemons, so a command that is interrupted ends at once, without waiting for servers that do not answer;
otherwise they have ended when `ordered` has.
"""

from __future__ import annotations

import heapq
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack, closing
from dataclasses import dataclass
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from datacache.catalog.base import Catalog
from datacache.catalog.commit import commit_manifest
from datacache.catalog.objects import MAX_OBJECT_BYTES, REFRESH_AFTER_S, SMALL_BYTES, NewFiles, ObjectWriter, Stored
from datacache.core.addresses import parse_network_rules
from datacache.core.concurrency import ByteBudget
from datacache.core.errors import DatacacheError, ImportFailedError, StoreError, UsageError
from datacache.core.ids import BLOCK_BYTES, ObjectRef
from datacache.imports.failures import Failure, Failures, TooLargeError, code_of
from datacache.imports.journal import Done, Journal, origin_of
from datacache.imports.lines import METADATA, Line, LinesFile, Plan
from datacache.imports.places import WEB, Allowance, Places, check_import
from datacache.imports.web import Request, Web
from datacache.manifest.builder import ManifestBuilder, Sorter
from datacache.manifest.model import Entry, Lineage, Naming, SnapshotRecord, Source
from datacache.settings import Settings
from datacache.store.base import ObjectStore
from datacache.store.bodies import read_whole
from datacache.store.open import Stores
from datacache.store.urls import join_url

COMMAND = "import-jsonl"
IN_FLIGHT_BYTES = 256 << 20
"""Bytes that all threads together may hold of objects being copied; a larger object is copied alone."""
_PAGES = (".html", ".htm", ".xhtml")
MAX_CONCURRENCY = 256
"""More would run into the usual limit of 1,024 open files, and help no server."""
_by_path = attrgetter("path")


@dataclass(frozen=True, kw_only=True)
class JsonlOptions:
    """How lines are imported."""

    copy: bool = False
    """Copy objects of stores, too, instead of naming them."""
    objects: str = ""
    """URL of the storage for copies, in place of the setting."""
    concurrency: int = 0
    """Lines at a time, at most `MAX_CONCURRENCY`; 0 for the setting."""
    max_object_bytes: int = MAX_OBJECT_BYTES
    """The most bytes of an object that is copied. A reference costs nothing, so its size is not limited."""
    object_timeout_s: float = 300.0
    skip_failed: bool = False
    """Commit without the lines that fail."""
    allow_local: tuple[str | os.PathLike[str], ...] = ()
    """Folders besides the list's own whose files it may name."""
    allow_network: tuple[str, ...] = ()
    """Hosts and networks besides those of the setting that it may name, see `core.addresses.parse_network_rule`."""


class JsonlProgress(NamedTuple):
    """How far an import is."""

    done: int
    """Lines that were tried, of `total`."""
    total: int
    failed: int
    """Those and the ones that could not even be tried."""
    resumed: int
    """Lines whose copies an earlier run had made."""
    total_bytes: int


class ImportedLines(NamedTuple):
    """The result of an import."""

    record: SnapshotRecord
    lines: int
    """All lines that were not blank."""
    left_out: int
    resumed: int


Progress = Callable[[JsonlProgress], None]


def import_jsonl(
    catalog: Catalog,
    settings: Settings,
    file: LinesFile,
    naming: Naming,
    *,
    options: JsonlOptions,
    progress: Progress | None = None,
    on_failure: Callable[[Failure], None] | None = None,
) -> ImportedLines:
    """Import `file` and commit it as the snapshot that `naming` names.

    `on_failure` is called for each line that failed, in the order of the lines, once all were tried. Then, unless they
    are to be left out, nothing is committed and `ImportFailedError` is raised. `UsageError` for a file that holds no
    lines and for wrong options; `TagExistsError`; the errors of the storage for copies.
    """
    if not 0 < options.max_object_bytes <= MAX_OBJECT_BYTES:
        raise UsageError(f"the size limit of an object must be above 0 and at most {MAX_OBJECT_BYTES:,} bytes")
    parameters: dict[str, Any] = {"file": os.path.basename(file.name), "content": file.content, "pin": options.copy}
    check_import(catalog, naming, Lineage(COMMAND, parameters))
    with ExitStack() as stack:
        failures = stack.enter_context(closing(Failures()))
        hosts = (*settings.allow_network, *parse_allowed(options.allow_network))
        places = Places(file.base, allow_local=options.allow_local, allow_network=hosts)
        plan = stack.enter_context(closing(Plan(file, failures, places)))
        run = _Run(catalog, settings, plan, options, stack)
        journal = stack.enter_context(closing(Journal(settings.home / "imports", run.identity(naming.name, file))))
        run.fetch_all(journal, failures, progress)
        if on_failure is not None:
            for failure in failures.sorted():
                on_failure(failure)
        failed, of = failures.count, f"{failures.count:,} of {plan.lines:,} lines"
        if failed and (not options.skip_failed or failed == plan.lines):
            hint = (
                "What could be had is kept: run it again once the lines are mended, or leave them out: --skip-failed."
            )
            raise ImportFailedError(
                f"{of} cannot be imported, so nothing was", failures=failed, hint=hint if failed < plan.lines else ""
            )
        parameters |= {"objects": run.objects_url, "lines": plan.lines, "left_out": failed}
        record = run.commit(
            naming,
            origin="-" if file.name == "-" else join_url("file://", file.name[1:]),
            lineage=Lineage(COMMAND, parameters),
            warnings=[f"{of} were left out"] if failed else [],
        )
        journal.remove()
        return ImportedLines(record, plan.lines, failed, run.resumed)


def parse_allowed(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return hosts and networks, checked. `UsageError`."""
    try:
        return parse_network_rules(hosts)
    except ValueError as exc:
        raise UsageError(f"what the list may read from: {exc}") from exc


class _DestinationError(DatacacheError):
    """The storage for copies failed: no line's fault, so the import ends. `error` says how."""

    def __init__(self, error: StoreError) -> None:
        super().__init__(error.message, hint=error.hint)
        self.error = error


class _Run:
    """The fetching and the commit of one import; what it opens is closed by `stack`. An object of a store is looked at
    or copied, one from the web is copied. What fetches is called in threads."""

    def __init__(
        self, catalog: Catalog, settings: Settings, plan: Plan, options: JsonlOptions, stack: ExitStack
    ) -> None:
        self._catalog, self._settings, self._plan, self._options = catalog, settings, plan, options
        self._stack = stack
        self._threads = min(options.concurrency or settings.concurrency, MAX_CONCURRENCY)
        large = bool(plan.fields_bytes) and plan.metadata_bytes > SMALL_BYTES
        copies = options.copy or WEB in plan.stores or large
        self._objects = self._open_objects() if copies else None
        stores = [] if options.copy else sorted(plan.stores - {WEB})
        self._sources = [Source(store, "") for store in stores]
        self._copies_source = len(stores)
        if self._objects is not None:
            self._sources.append(self._objects.source)
        self._numbers = {store: number for number, store in enumerate(stores)}
        self._stopped = threading.Event()
        stack.callback(self._stopped.set)
        self._stores = stack.enter_context(closing(Stores(settings)))
        web = Web(request_timeout_s=settings.store_timeout_s, connections=self._threads, rule=plan.places.rule)
        self._web = stack.enter_context(closing(web))
        self._budget = ByteBudget(IN_FLIGHT_BYTES)
        self._entries: Sorter[Entry] = stack.enter_context(Sorter(_by_path))
        self._metadata = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        self.resumed = 0

    @property
    def objects_url(self) -> str:
        """Return where copies go, or ''."""
        return "" if self._objects is None else join_url(self._objects.source.store, self._objects.source.prefix)

    def identity(self, dataset: str, file: LinesFile) -> dict[str, Any]:
        """Return what must be the same for a later run to go on where this one was."""
        return {
            "dataset": dataset,
            "content": file.content,
            "base": file.base,
            "sources": self._sources,
            "pin": self._options.copy,
            "max_object_bytes": self._options.max_object_bytes,
        }

    def fetch_all(self, journal: Journal, failures: Failures, progress: Progress | None) -> None:
        """Try every line: entries, metadata and failures."""
        done = total_bytes = 0

        def report() -> None:
            if progress is not None:
                progress(JsonlProgress(done, self._plan.tried, failures.count, self.resumed, total_bytes))

        def work(item: tuple[Line, Done | None]) -> tuple[Line, Entry | Failure, bool]:
            return self._work(item, journal)

        with journal.done() as before:
            lines = _joined(self._plan.by_path(), before.sorted())
            try:
                for line, outcome, resumed in ordered(work, lines, threads=self._threads, meanwhile=report):
                    done += 1
                    self.resumed += resumed
                    if isinstance(outcome, Failure):
                        failures.add(outcome)
                    else:
                        total_bytes += outcome.size_bytes
                        self._entries.add(outcome)
                        if self._plan.fields_bytes:
                            self._metadata.write(self._plan.metadata(line))
                    report()
            except _DestinationError as exc:
                raise exc.error from exc

    def _work(self, item: tuple[Line, Done | None], journal: Journal) -> tuple[Line, Entry | Failure, bool]:
        line, before = item
        if before is not None and before.entry.source != self._copies_source:
            before = None
        try:
            if before is not None and 0 <= time.time() - before.at_s < REFRESH_AFTER_S:
                return line, before.entry, True
            resumed = before is not None and self._renew(before.entry)
            entry = before.entry if before is not None and resumed else self._fetch(line)
        except (StoreError, UsageError) as exc:
            code = "url" if isinstance(exc, UsageError) else code_of(exc)
            return line, Failure(line.number, line.shown, line.path.decode(), code, exc.message), False
        if entry.source == self._copies_source:
            journal.add(origin_of(line.origin), entry)
        return line, entry, resumed

    def _fetch(self, line: Line) -> Entry:
        """Return the entry of a line."""
        if line.url:
            return self._from_web(line)
        store = self._stores.get(line.store)
        if self._options.copy:
            return self._copied(line, store)
        info = store.head(line.key)
        key = None if line.key.encode("utf-8", "surrogateescape") == line.path else _raw(line.key)
        return Entry(line.path, info.size_bytes, info.mtime_ns, info.etag, info.version, self._numbers[line.store], key)

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
            most = self._options.max_object_bytes
            body = self._web.get(Request(line.url, shown, allowed, most, self._stopped.is_set))
            if body.is_page and not line.path.decode().lower().endswith(_PAGES):
                raise StoreError(f"{shown}: the server sent a web page in place of the file", url=shown)
            stored = self._put(body.data)
        # No time: Last-Modified may differ between a server's machines, and the snapshot's id must not.
        return Entry(line.path, stored.size_bytes, 0, stored.hex, "", self._copies_source, _raw(stored.key))

    def _copied(self, line: Line, store: ObjectStore) -> Entry:
        info = store.head(line.key)
        ref = info.ref(store.url)
        if info.size_bytes > self._options.max_object_bytes:
            most = f"the {self._options.max_object_bytes:,} bytes that one object may have"
            raise TooLargeError(f"{ref.url}: it has {info.size_bytes:,} bytes, more than {most}", url=ref.url)
        with self._allowance(ref.url) as allowed:
            allowed.take(info.size_bytes)
            stored = self._put(self._read(store, ref, allowed))
        # The original's ETag and time: a copy of what did not change is no change.
        etag, key = info.etag or stored.hex, _raw(stored.key)
        return Entry(line.path, stored.size_bytes, info.mtime_ns, etag, "", self._copies_source, key)

    def _allowance(self, shown: str) -> Allowance:
        return Allowance(shown, self._options.object_timeout_s, self._budget)

    @property
    def _writer(self) -> ObjectWriter:
        assert self._objects is not None, "lines that are copied need a place to go"
        return self._objects

    def _put(self, data: bytes) -> Stored:
        try:
            return self._writer.put(data)
        except StoreError as exc:
            raise _DestinationError(exc) from exc

    def _read(self, store: ObjectStore, ref: ObjectRef, allowed: Allowance) -> bytes:
        def expect_time() -> None:
            allowed.check()
            if self._stopped.is_set():
                raise StoreError(f"{ref.url}: the import was stopped", url=ref.url)

        return read_whole(store, ref, BLOCK_BYTES, before_part=expect_time)

    def commit(self, naming: Naming, *, origin: str, lineage: Lineage, warnings: Sequence[str]) -> SnapshotRecord:
        """Build the manifest and make it visible."""
        files = NewFiles(self._sources, self._catalog.put_blobs, lambda: self._objects or self._open_objects())
        builder = ManifestBuilder(self._sources, self._catalog.put_blobs)
        extra: list[Entry] = []
        if self._metadata.tell():
            self._metadata.seek(0)
            extra = [*files.add(METADATA, self._metadata.read(), 0), *files.end_pack()]
        for entry in heapq.merge(self._entries.sorted(), extra, key=_by_path):
            builder.add(entry)
        return commit_manifest(
            self._catalog,
            builder,
            naming,
            origin=origin,
            lineage=lineage,
            packs=files.packs,
            objects=self._objects or files.opened_objects,
            warnings=warnings,
        )

    def _open_objects(self) -> ObjectWriter:
        writer = ObjectWriter(self._catalog, self._settings, url=self._options.objects)
        return self._stack.enter_context(closing(writer))


def _joined(lines: Iterator[Line], before: Iterator[Done]) -> Iterator[tuple[Line, Done | None]]:
    """Yield each line with what an earlier run noted of it; both are in the order of the paths."""
    noted = next(before, None)
    for line in lines:
        newest = None
        while noted is not None and noted.path <= line.path:
            newest, noted = noted, next(before, None)
        same = newest is not None and newest.path == line.path and newest.origin == origin_of(line.origin)
        yield line, newest if same else None


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
