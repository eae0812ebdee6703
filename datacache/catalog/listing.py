"""List a prefix of a bucket by several processes side by side, its entries in order.

Used by `catalog/create.py`. The first pages come as they always did. If there are more, keys are looked for at which
the rest can be cut, by requests for the first key after another one (`branches`). Ranges of keys rather than
prefixes, because they cover every key once, wherever objects lie, and whatever is written or deleted meanwhile. A
process lists one range up to a number of keys and gives its entries as a part of the manifest, encoded and compressed,
so that the caller has little to do for each key and memory does not depend on their number. What is left of a range
follows as a range of its own, or as several while there are few.

Where a store cannot tell such a key, or gives a wrong one, one process lists all, as before. The processes are made by
`fork()` (`core/parallel.py`). One thread.
"""

from __future__ import annotations

import multiprocessing
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

from datacache.core.errors import StoreUnavailableError
from datacache.core.parallel import working_processes
from datacache.manifest.builder import ManifestPart, PartBuilder
from datacache.manifest.model import BlobId, Entry, Source
from datacache.store.base import ObjectInfo, ObjectStore
from datacache.store.retry import RetryingStore

_FIRST_PAGES = 4
"""So many are listed first: most prefixes end within, and where they do not, these tell where keys differ."""
_RANGE_PAGES = 16
"""The most that a process lists at a time."""
_MOST_BRANCHES = 16
_ENOUGH_BRANCHES = 4
_AHEAD = 3
"""Ranges in flight, or waiting for an earlier one, for each process."""
_MOST_BYTES = 128 * 2**20
"""Of parts that wait for an earlier one, and those that are on their way, as far as can be told. Beyond that only the
first range is listed. A range of keys of 100 bytes takes 2.6 MB, one of keys of 1,000 bytes 17 MB."""
_PROCESSES = (4, 16)
"""At least and at most; more than there are cores, since they wait for the store as well."""
_LAST_CHARACTER = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)

FirstKey = Callable[[str], str]
"""Returns the first key after another one; '' where there is none."""


@runtime_checkable
class ProbedStore(Protocol):
    """A store whose listing may be cut into ranges of keys."""

    def first_key(self, prefix: str, *, start_after: str) -> str:
        """Return the first key after another one, '' where there is none. One small request."""
        ...


class KeyRange(NamedTuple):
    """The keys after one, up to another and with that."""

    after: str
    to: str
    """'' for all that follow."""
    split: bool = False
    """True where a range that has too much is cut into several."""


def pages_and_parts(
    store: ObjectStore, prefix: str, source: Source, *, known: Collection[BlobId], processes: int | None = None
) -> Generator[list[ObjectInfo] | ManifestPart, None, None]:
    """Yield all under a prefix in order: pages of objects, then parts of the manifest if there is more. `known` as for
    `ManifestBuilder`."""
    inner = store.inner if isinstance(store, RetryingStore) else store
    lister = _Lister(store, inner, prefix, source, known) if isinstance(inner, ProbedStore) else None
    if lister is None or processes == 1 or multiprocessing.current_process().daemon:
        yield from store.list(prefix)
        return
    starts: list[str] = []
    ranges: list[KeyRange] = []
    pages = store.list(prefix)
    for page in pages:
        yield page
        starts.append(page[0].key)
        if len(starts) == _FIRST_PAGES:
            ranges = lister.cut(starts, KeyRange(page[-1].key, ""))
            if len(ranges) > 1:
                break
    del pages  # ends its thread, which asks for the next page: processes are about to be forked
    if len(ranges) > 1:
        count = processes or min(max(_PROCESSES[0], 2 * len(os.sched_getaffinity(0))), _PROCESSES[1])
        yield from _side_by_side(lister, ranges, count)


@dataclass
class _Begun:
    range: KeyRange
    future: Future[tuple[ManifestPart, list[KeyRange]]] | None = None
    part: ManifestPart | None = None


def _side_by_side(lister: _Lister, ranges: Iterable[KeyRange], processes: int) -> Iterator[ManifestPart]:
    ahead = processes * _AHEAD
    tasks = [_Begun(each) for each in ranges]
    with working_processes(lister, processes) as submit:
        while tasks:
            sizes = [task.part.size_bytes for task in tasks if task.part]
            under_way = sum(task.future is not None and not task.part for task in tasks)
            room = (_MOST_BYTES - sum(sizes)) // max([1, *sizes]) - under_way
            for task in tasks[:ahead]:
                if task.future is None and (room > 0 or task is tasks[0]):
                    room -= 1
                    # Cut further only while there are few, so that what waits for earlier ranges stays bounded.
                    task.future = submit(task.range._replace(split=len(tasks) < ahead))
            wait([task.future for task in tasks if task.future and not task.part], return_when=FIRST_COMPLETED)
            following: list[_Begun] = []
            for task in tasks:
                following.append(task)
                if task.future and task.future.done() and not task.part:
                    task.part, rest = task.future.result()
                    following += map(_Begun, rest)
            tasks = following
            while tasks and (part := tasks[0].part):
                del tasks[0]
                yield part


@dataclass(frozen=True)
class _Lister:
    """Lists ranges of keys, in any process."""

    store: ObjectStore
    probed: ProbedStore
    prefix: str
    source: Source
    known: Collection[BlobId]

    def work(self, task: KeyRange) -> tuple[ManifestPart, list[KeyRange]]:
        """Return a part with the entries of a range, and what is left of it."""
        builder = PartBuilder([self.source], known=self.known)
        starts: list[str] = []
        to = encode(task.to)
        for page in self.store.list(self.prefix, start_after=task.after):
            starts.append(page[0].key)
            last = page[-1].key
            ends = bool(to) and encode(last) >= to
            for info in page[: bisect_right(page, to, key=_encoded_key)] if ends else page:
                builder.add(entry_of(info, len(self.prefix)))
            if ends:
                break
            if len(starts) == _RANGE_PAGES:
                rest = task._replace(after=last)
                return builder.part(), self.cut(starts, rest) if task.split else [rest]
        return builder.part(), []

    def cut(self, starts: Sequence[str], rest: KeyRange) -> list[KeyRange]:
        """Return what is left of a range, cut where keys begin in another way than the pages of `starts` and the last
        key before it."""
        found: list[str] = []
        try:
            # From all that was seen to its last page: where a single file lies before a million of one folder, only
            # the latter tells where these differ.
            for first in (starts[0], starts[len(starts) // 2], starts[-1]):
                found = branches(self._first_key, first, rest.after, rest.to)
                if len(found) >= _ENOUGH_BRANCHES:
                    break
        except StoreUnavailableError:
            found = []  # listing the rest waits for the store
        edges = [rest.after, *found, rest.to]
        return [KeyRange(a, b) for a, b in pairwise(edges)]

    def _first_key(self, after: str) -> str:
        return self.probed.first_key(self.prefix, start_after=after)


def branches(first_key: FirstKey, first: str, last: str, to: str, *, most: int = _MOST_BRANCHES) -> list[str]:
    """Return keys, in order, to cut the range after `last` up to `to` at: something lies behind each of them.

    They are not keys of objects: each is the beginning of one, up to where `first` and `last` differ or before that,
    with the character that follows its last. `00120.jpg` and `00143.jpg` give `0015`, `0016`, … and then `003`, `004`,
    …. What is not there is skipped, whatever the alphabet is.
    """
    found: list[str] = []
    key, at = last, _differ_at(first, last)
    while first != last and len(found) < most:
        cut = _behind(key, at)
        following = first_key(cut) if cut else ""
        # A server that knows no `start-after` answers with the first of all.
        if not following or encode(following) <= encode(cut) or (to and encode(following) > encode(to)):
            break
        found.append(cut)
        at, key = min(at, _differ_at(key, following)), following
    return found


def _differ_at(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _behind(key: str, at: int) -> str:
    """Return what comes behind all keys that begin as this one, the character at `at` included; '' for nothing, or
    where that is a byte of no character. Nor behind U+D7FF: a server that sorts by UTF-16 has those above U+FFFF
    there, and they would be in no range."""
    number = ord(key[at])
    there = number < _LAST_CHARACTER and number not in _SURROGATES and number + 1 not in _SURROGATES
    return key[:at] + chr(number + 1) if there else ""


def entry_of(info: ObjectInfo, skip: int) -> Entry:
    """Return the entry of an object, `skip` characters of whose key are the prefix."""
    entry = Entry(encode(info.key[skip:]), info.size_bytes, info.mtime_ns, info.etag, info.version)
    if info.target or info.at or info.mode:
        entry = entry._replace(key=encode(info.at) or None, mode=info.mode, target=encode(info.target))
    return entry


def encode(text: str) -> bytes:
    """Return the bytes of a key."""
    return text.encode("utf-8", "surrogateescape")


def _encoded_key(info: ObjectInfo) -> bytes:
    return encode(info.key)
