"""A snapshot from JSON lines: every line's object is fetched or referenced, and only then is anything committed.

Used by `api.import_jsonl`. Three passes, each in bounded memory for files of any length:

1. The file is read, every line checked, and what can be tried is sorted by path (`plan`).
2. In the order of the paths, threads or an engine's processes look objects up or copy them (`fetching`). What is done
   is noted (`journal`), so that an import that was killed goes on where it was. Every line is tried, whatever became of
   the others.
3. If none failed, or those that did are to be left out, the manifest is built and committed.

A copy that an earlier run made is taken as there while it is younger than the age up to which garbage collection spares
what no snapshot names (`fetching.is_young`); an older one is read and stored again first. References are looked up by
every run: the object may have changed since.
"""

from __future__ import annotations

import heapq
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

from datacache.catalog.base import Catalog
from datacache.catalog.commit import commit_manifest
from datacache.catalog.objects import MAX_OBJECT_BYTES, SMALL_BYTES, NewFiles, ObjectWriter
from datacache.core.addresses import parse_network_rules
from datacache.core.engine import Engine
from datacache.core.errors import ImportFailedError, UsageError
from datacache.core.parallel import ordered_map
from datacache.imports.failures import Failure, Failures
from datacache.imports.fetching import DestinationError, FetchedLine, FetchRules, LineFetcher, is_young, ordered
from datacache.imports.journal import Done, Journal, origin_of
from datacache.imports.lines import METADATA, Line, LinesFile, Plan
from datacache.imports.places import WEB, Places, check_import
from datacache.manifest.builder import ManifestBuilder, Sorter
from datacache.manifest.model import Entry, Lineage, Naming, SnapshotRecord, Source
from datacache.settings import Settings
from datacache.store.urls import join_url

COMMAND = "import-jsonl"
_by_path = attrgetter("path")
_LINES_OF_A_TASK = 256


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
    engine: Engine | None = None,
    progress: Progress | None = None,
    on_failure: Callable[[Failure], None] | None = None,
) -> ImportedLines:
    """Import `file` and commit it as the snapshot that `naming` names. Processes of an engine fetch, where one is
    given.

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
        run.fetch_all(journal, failures, progress, engine=engine)
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


class _Run:
    """The fetching and the commit of one import; what it opens is closed by `stack`."""

    def __init__(
        self, catalog: Catalog, settings: Settings, plan: Plan, options: JsonlOptions, stack: ExitStack
    ) -> None:
        self._catalog, self._settings, self._plan, self._options = catalog, settings, plan, options
        self._stack = stack
        large = bool(plan.fields_bytes) and plan.metadata_bytes > SMALL_BYTES
        copies = options.copy or WEB in plan.stores or large
        self._objects = self._open_objects() if copies else None
        stores = [] if options.copy else sorted(plan.stores - {WEB})
        self._sources = [Source(store, "") for store in stores]
        self._copies_source = len(stores)
        if self._objects is not None:
            self._sources.append(self._objects.source)
        rules = FetchRules(
            content=plan.content,
            copy=options.copy,
            max_object_bytes=options.max_object_bytes,
            object_timeout_s=options.object_timeout_s,
            concurrency=options.concurrency,
            hosts=plan.places.hosts,
            numbers={store: number for number, store in enumerate(stores)},
            copies_source=self._copies_source,
        )
        self._fetcher = stack.enter_context(closing(LineFetcher(settings, self._objects, rules)))
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

    def fetch_all(
        self, journal: Journal, failures: Failures, progress: Progress | None, *, engine: Engine | None
    ) -> None:
        """Try every line: entries, metadata and failures."""
        done = total_bytes = 0

        def report() -> None:
            if progress is not None:
                resumed = self.resumed + self._fetcher.kept
                progress(JsonlProgress(done, self._plan.tried, failures.count, resumed, total_bytes))

        with journal.done() as before:
            try:
                if engine is None:
                    fetched = self._here(before, journal, meanwhile=report)
                else:
                    fetched = self._on(engine, before, journal)
                for line, (outcome, resumed) in fetched:
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
            except DestinationError as exc:
                raise exc.error from exc
        self.resumed += self._fetcher.kept

    def _here(
        self, before: Sorter[Done], journal: Journal, *, meanwhile: Callable[[], None]
    ) -> Iterator[tuple[Line, FetchedLine]]:
        def work(item: tuple[Line, Done | None]) -> tuple[Line, FetchedLine]:
            line, noted = item
            if noted is not None and is_young(noted.at_s, time.time()):
                return line, FetchedLine(noted.entry, resumed=True)
            fetched = self._fetcher.fetch(line, None if noted is None else noted.entry)
            self._note(journal, line, fetched.outcome, int(time.time()))
            return line, fetched

        return ordered(work, self._lines(before), threads=self._fetcher.threads, meanwhile=meanwhile)

    def _on(self, engine: Engine, before: Sorter[Done], journal: Journal) -> Iterator[tuple[Line, FetchedLine]]:
        """Have an engine fetch what the journal does not have. The lines are gone through twice, once for tasks and
        once for results, so that memory is bounded however many lie between."""
        now_s = time.time()

        def is_noted(noted: Done | None) -> bool:
            return noted is not None and is_young(noted.at_s, now_s)

        def tasks() -> Iterator[list[tuple[Line, Entry | None]]]:
            lines = self._lines(before)
            # Cut before what is noted is left out: else all tasks behind it would be others than those of the first
            # start, whose results are kept.
            while cut := list(islice(lines, _LINES_OF_A_TASK)):
                task = [
                    (line._replace(aside=(0, 0)), None if noted is None else noted.entry)
                    for line, noted in cut
                    if not is_noted(noted)
                ]
                if task:
                    yield task

        results = ordered_map(self._fetcher, tasks(), processes=engine)
        fetched = ((line, result.at_s) for result in results for line in result.lines)
        for line, noted in self._lines(before, again=True):
            if noted is not None and is_noted(noted):
                yield line, FetchedLine(noted.entry, resumed=True)
                continue
            result, at_s = next(fetched)
            self._note(journal, line, result.outcome, at_s)
            yield line, result

    def _note(self, journal: Journal, line: Line, outcome: Entry | Failure, at_s: int) -> None:
        if isinstance(outcome, Entry) and outcome.source == self._copies_source:
            journal.add(origin_of(line.origin), outcome, at_s)

    def _lines(self, before: Sorter[Done], *, again: bool = False) -> Iterator[tuple[Line, Done | None]]:
        """Yield each line with what an earlier run noted of its copy; both are in the order of the paths."""
        done = before.sorted()
        noted = next(done, None)
        for line in self._plan.by_path(again=again):
            newest = None
            while noted is not None and noted.path <= line.path:
                newest, noted = noted, next(done, None)
            same = newest is not None and newest.path == line.path and newest.origin == origin_of(line.origin)
            copied = same and newest is not None and newest.entry.source == self._copies_source
            yield line, newest if copied else None

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
