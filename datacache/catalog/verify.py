"""Check that every object of a snapshot is still as the snapshot recorded it.

Used by `dsctl snapshot verify` and `api.verify_snapshot`. Listed objects are compared with a new listing, one request
for 1,000 of them; others are asked for one by one; files in packs are read. With `read`, all bytes are read and
compared with the hash that is their name, with the store's checksum, or with an ETag that is their MD5; objects with
none of these are counted. It asks the stores, not the cache. One thread, which has others at work; memory does not grow
with the snapshot. An engine reads as well: its tasks are ranges of the manifest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from operator import attrgetter
from typing import Literal, NamedTuple

from xxhash import xxh3_128

from datacache.catalog.objects import parse_object_key
from datacache.catalog.open import open_catalog_url
from datacache.catalog.packs import stores_with_packs
from datacache.core.concurrency import map_in_threads
from datacache.core.engine import Engine
from datacache.core.errors import (
    ChecksumError,
    CorruptManifestError,
    DatacacheError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
)
from datacache.core.ids import ObjectRef
from datacache.core.parallel import ordered_map
from datacache.manifest.builder import Sorter
from datacache.manifest.model import PACKS, Entry
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.store.base import ObjectInfo, ObjectStore
from datacache.store.bodies import digest_of
from datacache.store.checksums import md5_etags, mismatch
from datacache.store.errors import expect_same
from datacache.store.open import Stores
from datacache.store.retry import DAMAGED_AGAIN

_log = logging.getLogger(__name__)
THREADS = 32
_PART_BYTES = 8 * 2**20
_IN_FLIGHT_BYTES = 256 * 2**20
_FEW = 100
"""At most so many objects are asked for one by one."""
_SPARSE = 100
"""A listing costs more than asking for each object if fewer than one in so many is wanted."""
_LISTED_FIRST = 5_000
"""Listed objects before that is decided."""
_DOWN = 20
"""A store that does not answer for so many objects in a row is away."""

ProblemKind = Literal["missing", "changed", "damaged", "unreadable"]
_KINDS: dict[type[Exception], ProblemKind] = {
    ObjectNotFoundError: "missing",
    ObjectChangedError: "changed",
    ChecksumError: "damaged",
}


class Problem(NamedTuple):
    """A file whose object is not as the snapshot recorded it."""

    kind: ProblemKind
    path: bytes
    url: str
    message: str


class _Item(NamedTuple):
    key: bytes
    entry: Entry
    ref: ObjectRef


def verify(
    manifest: Manifest,
    stores: Stores,
    *,
    read: bool = False,
    threads: int = THREADS,
    progress: Callable[[int, int], None] | None = None,
    unchecked: Callable[[int], None] | None = None,
) -> Iterator[Problem]:
    """Yield the files that can no longer be read as the snapshot recorded them, in no particular order.

    Call `progress(done, files)` now and then; at the end, with `read`, call `unchecked(files)` with the number of files
    whose bytes could not be compared with anything. `stores` must have the catalog's packs, and best leave MD5s to this
    function (`check_md5`): it looks at all ETags of a store before it calls an object damaged. Raise what is more than
    a problem of one object: `StoreUnavailableError` where a store is away, `CorruptManifestError` for the snapshot's
    own ranges."""
    verifier = _Verifier(manifest, stores, read=read, threads=threads)
    for found in verifier.all():
        if found is not None:
            yield found
        if progress is not None:
            progress(verifier.done, manifest.root.files)
    if read and unchecked is not None:
        unchecked(verifier.unchecked)


class Verified(NamedTuple):
    """The result of reading the objects of a range of a manifest."""

    problems: list[Problem]
    done: int
    unchecked: int
    suspects: list[tuple[str, Problem]]
    """Store URLs and objects with another MD5 than their ETag."""
    proven: list[str]
    """Stores of which an object has the MD5 that its ETag says."""


class RangesReader:
    """Reads all objects of ranges of a snapshot's manifest, in a process of an engine."""

    def __init__(self, settings: Settings, id: str) -> None:
        """`id` is the snapshot's. `settings` leave MD5s to this module, as in `verify`."""
        self._settings, self._id = settings, id

    def lasts(self, _verified: Verified) -> bool:
        """Tell a second start to look anew: objects may have changed since."""
        return False

    def work(self, number: int) -> Verified:
        """Return what is wrong with the objects of a range. Raise what is more than a problem of one object."""
        settings = replace(self._settings, check_md5=False)
        with closing(open_catalog_url(settings.catalog, settings=settings, blob_cache_dir=settings.home)) as catalog:
            manifest = Manifest.open(self._id, catalog.get_blobs)
            with closing(stores_with_packs(settings, catalog.get_blobs)) as stores:
                threads = min(THREADS, settings.concurrency)
                verifier = _Verifier(manifest, stores, read=True, threads=threads, numbers=[number])
                problems = [found for found in verifier.checked() if found is not None]
                proven = [source.store for source in manifest.root.sources if md5_etags(source.store).proven]
        return Verified(problems, verifier.done, verifier.unchecked, verifier.suspects, proven)


def verify_on(
    engine: Engine,
    settings: Settings,
    id: str,
    manifest: Manifest,
    *,
    progress: Callable[[int, int], None] | None = None,
    unchecked: Callable[[int], None] | None = None,
) -> Iterator[Problem]:
    """Do what `verify` does with `read` for the snapshot `id`, by processes of an engine with settings of their own."""
    done = bare = 0
    suspects: list[tuple[str, Problem]] = []
    proven: set[str] = set()
    tasks = range(len(manifest.root.ranges))
    for found in ordered_map(RangesReader(settings, id), tasks, processes=engine):
        yield from found.problems
        done, bare = done + found.done, bare + found.unchecked
        suspects += found.suspects
        proven.update(found.proven)
        if progress is not None:
            progress(done, manifest.root.files)
    yield from (problem for store, problem in suspects if store in proven)
    if unchecked is not None:
        unchecked(bare + sum(store not in proven for store, _ in suspects))


class _Verifier:
    """One run. Its generators yield None for each file that is fine."""

    def __init__(
        self, manifest: Manifest, stores: Stores, *, read: bool, threads: int, numbers: Sequence[int] | None = None
    ) -> None:
        """`numbers` are of the ranges to look at, None of all."""
        self._manifest, self._stores = manifest, stores
        self._numbers = range(len(manifest.root.ranges)) if numbers is None else numbers
        self._read_all, self._threads = read, threads
        self._lock = threading.Lock()  # guards all but `done`
        self._unanswered = 0
        self.suspects: list[tuple[str, Problem]] = []
        """Store URLs and objects with another MD5 than their ETag, which need not be an MD5."""
        self.unchecked = 0
        self.done = 0

    def all(self) -> Iterator[Problem | None]:
        yield from self.checked()
        for store_url, suspect in self.suspects:
            if md5_etags(store_url).proven:
                yield suspect
            else:
                self.unchecked += 1

    def checked(self) -> Iterator[Problem | None]:
        for number, source in enumerate(self._manifest.root.sources):
            store = self._stores.get(source.store)
            if self._read_all or source == PACKS:
                found = self._each(store, self._items(number), self._read)
            elif source.content_addressed:
                found = self._each(store, self._items(number), _head)
            else:
                found = self._listed(store, source.prefix, self._items(number))
            for problem in found:
                self.done += 1
                yield problem

    def _items(self, number: int) -> Iterator[_Item]:
        for held in self._manifest.ranges(self._numbers):
            for entry in map(held.entry, range(len(held.paths))):
                if entry.source == number and entry.has_object:
                    ref = self._manifest.object_ref(entry)
                    yield _Item(ref.key.encode("utf-8", "surrogateescape"), entry, ref)

    def _listed(self, store: ObjectStore, prefix: str, items: Iterator[_Item]) -> Iterator[Problem | None]:
        """Compare objects that a listing can show with one, in the order of keys; ask for the others."""
        by_key = attrgetter("key")
        base = prefix.encode("utf-8", "surrogateescape")
        with Sorter[_Item](by_key) as renamed, Sorter[_Item](by_key) as others:

            def in_order() -> Iterator[_Item]:
                for item in items:
                    if item.ref.version or not item.key.startswith(base):
                        others.add(item)
                    elif item.entry.key is not None:
                        renamed.add(item)
                    else:
                        yield item

            yield from self._merge(store, prefix, in_order())
            yield from self._merge(store, prefix, renamed.sorted())
            yield from self._each(store, others.sorted(), _head)

    def _merge(self, store: ObjectStore, prefix: str, items: Iterator[_Item]) -> Iterator[Problem | None]:
        """Compare objects, in the order of keys, with a listing, or ask for each where that takes fewer requests."""
        first = list(islice(items, _FEW + 1))
        items = chain(first, items)
        if len(first) <= _FEW:
            yield from self._each(store, items, _head)
            return
        item = next(items, None)
        listed = wanted = 0
        ask = False
        try:
            with closing(_pages(store, prefix)) as pages:
                for page in pages:
                    for info in page:
                        key = info.key.encode("utf-8", "surrogateescape")
                        while item is not None and item.key <= key:
                            wanted += item.key == key
                            yield _compared(store, item, info) if item.key == key else _missing(item)
                            item = next(items, None)
                    listed += len(page)
                    ask = listed >= _LISTED_FIRST and wanted * _SPARSE < listed
                    if ask or item is None:
                        break
        except StoreAccessError:  # an account that may not list may still read
            ask = True
        except ObjectNotFoundError:  # no such bucket or folder
            pass
        rest = items if item is None else chain([item], items)
        yield from self._each(store, rest, _head) if ask else map(_missing, rest)

    def _each(
        self, store: ObjectStore, items: Iterable[_Item], check: Callable[[ObjectStore, _Item], None]
    ) -> Iterator[Problem | None]:
        return map_in_threads(
            lambda item: self._checked(store, item, check),
            items,
            threads=self._threads,
            size_bytes=lambda item: min(item.ref.size_bytes, _PART_BYTES),
            limit_bytes=_IN_FLIGHT_BYTES,
        )

    def _checked(self, store: ObjectStore, item: _Item, check: Callable[[ObjectStore, _Item], None]) -> Problem | None:
        """Runs in any thread."""
        problem = None
        try:
            check(store, item)
        except StoreUnavailableError as exc:
            with self._lock:
                self._unanswered += 1
                if self._unanswered >= _DOWN:
                    raise
            return _problem(item, exc)
        except (StoreError, CorruptManifestError) as exc:
            problem = _problem(item, exc)
        with self._lock:
            self._unanswered = 0
        return problem

    def _read(self, store: ObjectStore, item: _Item) -> None:
        """Read a whole object; an error says what is wrong."""
        ref, entry = item.ref, item.entry
        source = self._manifest.root.sources[entry.source]
        if not ref.size_bytes and source != PACKS:
            _head(store, item)  # reading nothing makes no request
        if source.content_addressed:
            digest = xxh3_128()
            digest_of(store, ref, _PART_BYTES, None, digest.update)
            named = parse_object_key(ref.key)
            if digest.hexdigest() != (named[0] if named else entry.etag):
                raise ObjectChangedError(f"{ref.url} holds other bytes than its name says", url=ref.url)
        elif ref.size_bytes:
            self._compare(store, item)

    def _compare(self, store: ObjectStore, item: _Item) -> None:
        """Read an object and compare it with its store's checksum. Read one that differs again: the bytes may have
        changed on the way."""
        ref = item.ref
        expected = store.checksum(ref)
        found = digest_of(store, ref, _PART_BYTES, expected, lambda _: None)
        with self._lock:
            self.unchecked += expected is None
        if expected is None:
            return
        md5 = expected.algorithm == "md5"
        for _ in range(DAMAGED_AGAIN):
            if found == expected.value:
                break
            _log.warning("%s (it is read again)", mismatch(ref, expected, found).message)
            before, found = found, digest_of(store, ref, _PART_BYTES, expected, lambda _: None)
            if before == found:
                break
        if found == expected.value:
            if md5:
                md5_etags(ref.store).proven = True
        elif md5:
            with self._lock:
                self.suspects.append((ref.store, _problem(item, mismatch(ref, expected, found))))
        else:
            raise mismatch(ref, expected, found)


def _pages(store: ObjectStore, prefix: str) -> Generator[list[ObjectInfo], None, None]:
    if store.sorted_listing:
        yield from store.list(prefix)
        return
    with Sorter[ObjectInfo](lambda info: info.key.encode("utf-8", "surrogateescape")) as sorter:
        for page in store.list(prefix):
            for info in page:
                sorter.add(info)
        for info in sorter.sorted():
            yield [info]


def _head(store: ObjectStore, item: _Item) -> None:
    """Ask for one object; an error says what is wrong with it."""
    ref = item.ref
    if ref.version:  # a HEAD would be answered for the newest version
        store.read(ref, 0, min(1, ref.size_bytes))
        return
    info = store.head(ref.key)
    expect_same(ref, etag=info.etag, size_bytes=info.size_bytes)


def _compared(store: ObjectStore, item: _Item, info: ObjectInfo) -> Problem | None:
    try:
        if item.ref.etag and not info.etag:  # some servers list none
            _head(store, item)
        else:
            expect_same(item.ref, etag=info.etag, size_bytes=info.size_bytes)
    except ObjectNotFoundError:
        return _missing(item)
    except ObjectChangedError as exc:
        return _problem(item, exc)
    return None


def _missing(item: _Item) -> Problem:
    return Problem("missing", item.entry.path, item.ref.url, f"{item.ref.url} is not there")


def _problem(item: _Item, exc: DatacacheError) -> Problem:
    kinds = [kind for error, kind in _KINDS.items() if isinstance(exc, error)]
    return Problem(kinds[0] if kinds else "unreadable", item.entry.path, item.ref.url, exc.message)
