"""Listings of several processes side by side give what one gives: every key once, in order, of any form."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from datacache.catalog import listing
from datacache.catalog.create import ListedPlace
from datacache.catalog.listing import branches, encode
from datacache.core.errors import CatalogError, DatacacheError, StoreAccessError
from datacache.manifest.builder import ManifestBuilder, ManifestPart
from datacache.manifest.model import BlobId, Source
from datacache.settings import Settings
from datacache.store.base import ObjectInfo, ObjectStore
from datacache.store.open import open_store
from tests import memory
from tests.conformance.faults import Answer, Fault, FaultProxy
from tests.conformance.store import BUCKET_KEYS, ODD_KEYS, PLAIN_KEYS
from tests.memory import MemoryStore
from tests.promises import promise
from tests.servers import RcloneS3

PAGE = 7


class ProbedMemory(MemoryStore):
    """A store in memory that tells first keys, as a bucket does."""

    def first_key(self, prefix: str, *, start_after: str) -> str:
        """See `listing.ProbedStore`."""
        return next((page[0].key for page in self.list(prefix, start_after=start_after)), "")


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PAGE_KEYS", PAGE)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> ProbedMemory:
    return ProbedMemory(f"memory://{request.node.name}")


def fill(store: ObjectStore, keys: Sequence[str]) -> None:
    for key in keys:
        store.put(key, b"" if key.endswith("/") else key.encode("utf-8", "surrogateescape"))


def built(store: ObjectStore, prefix: str = "p/", *, processes: int = 3) -> tuple[str, object, list[bytes]]:
    """Return a manifest's id and root, and the blobs that were put, of all under a prefix."""
    source, blobs = Source(store.url, prefix), dict[BlobId, bytes]()
    builder = ManifestBuilder([source], blobs.update)
    place = ListedPlace(store=store, prefix=prefix, origin="", processes=processes)
    place.fill(builder, source, frozenset())
    return *builder.finish(), sorted(blobs)


def parts_of(store: ObjectStore, prefix: str = "p/") -> int:
    """Return the number of parts that several processes have listed."""
    found = listing.pages_and_parts(store, prefix, Source(store.url, prefix), known=frozenset(), processes=3)
    return sum(isinstance(each, ManifestPart) for each in found)


def join_processes() -> None:
    """Wait until no process lists any more."""
    for child in multiprocessing.active_children():
        assert wait([child.sentinel], 60)  # join() would race for its exit code with the pool's own thread


def words(seed: int, count: int) -> list[str]:
    """Return keys that are short, deep, alike and unlike, with files where others have folders."""
    source = random.Random(seed)
    alphabet = source.choice(["ab/-", "0123456789/", "a/é\U0001f600\udcff \x01+%", "abcdef0123456789"])
    keys = {"p/" + "".join(source.choices(alphabet, k=source.randint(1, 9))) for _ in range(count)}
    return sorted(keys)


KINDS = {
    "odd keys": ["p/" + key for key in (*PLAIN_KEYS, *ODD_KEYS, *BUCKET_KEYS)] * 1,
    "folders": [f"p/{folder:02}/{number:03}" for folder in range(20) for number in range(40)],
    "one flat folder": [f"p/{number:05}.jpg" for number in range(1500)],
    "one file before a folder": ["p/A", *(f"p/data/{number:05}" for number in range(1500))],
    "a file, a marker and keys beside a folder": sorted(
        [f"p/a{tail}{number:03}" for tail in ("/", "-", "0", "/b/", "/b-") for number in range(200)]
        + ["p/a", "p/a/", "p/a/b", "p/a/b/", "p/", "p/a-", "p/zz"]
    ),
}


@promise("A bucket listed by several processes gives the same snapshot as by one")
@pytest.mark.parametrize("kind", KINDS)
def test_a_listing_side_by_side_is_the_same_for_keys_of_any_form(
    store: ProbedMemory, small_pages: None, kind: str
) -> None:
    fill(store, KINDS[kind])
    alone = MemoryStore(store.url)  # cannot be probed
    assert parts_of(store) > 3
    assert parts_of(alone) == 0
    assert built(store) == built(alone)
    assert built(store)[1].rows == len(set(KINDS[kind]) - {"p/"})  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(6))
def test_a_listing_side_by_side_is_the_same_for_random_keys(
    store: ProbedMemory, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(memory, "_PAGE_KEYS", 1 + seed)
    monkeypatch.setattr(listing, "_RANGE_PAGES", 3)
    fill(store, words(seed, 600))
    assert built(store) == built(MemoryStore(store.url))


def test_blobs_that_are_known_are_not_put_again(store: ProbedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PAGE_KEYS", 100)
    fill(store, [f"p/{number:05}" for number in range(3000)])
    _, root, _ = built(store)
    source, put = Source(store.url, "p/"), dict[BlobId, bytes]()
    known = {info.blob for info in root.ranges}  # type: ignore[attr-defined]
    builder = ManifestBuilder([source], put.update, known=known)
    ListedPlace(store=store, prefix="p/", origin="", processes=2).fill(builder, source, known)
    id, _ = builder.finish()
    assert [blob.hex() for blob in put] == [id]


def test_progress_counts_every_object_once(store: ProbedMemory, small_pages: None) -> None:
    fill(store, KINDS["folders"])
    source, told = Source(store.url, "p/"), list[tuple[int, int]]()
    place = ListedPlace(store=store, prefix="p/", origin="", processes=2, progress=lambda *done: told.append(done))
    place.fill(ManifestBuilder([source], lambda _: None), source, frozenset())
    assert told == sorted(told)
    assert told[-1] == (800, sum(len(key) for key in KINDS["folders"]))


# --- where a listing is cut ------------------------------------------------------------------------------------------


@given(
    st.sets(st.text(st.sampled_from("ab/\x01é\ud7ff\ue000\U0010ffff"), min_size=1, max_size=5), min_size=2), st.data()
)
def test_each_cut_lies_behind_the_one_before_and_has_a_key_behind_it(keys: set[str], data: st.DataObject) -> None:
    ordered = sorted(keys, key=encode)
    last = data.draw(st.integers(0, len(ordered) - 1))
    to = data.draw(st.sampled_from(["", *ordered[last:]]))
    first = ordered[data.draw(st.integers(0, last))]

    def first_key(after: str) -> str:
        return next((key for key in ordered if encode(key) > encode(after)), "")

    cuts = [ordered[last], *branches(first_key, first, ordered[last], to)]
    for one, other in pairwise(cuts):
        assert encode(one) < encode(other)
        assert not to or encode(other) < encode(to)
    assert not cuts[1:] or first_key(cuts[-1])


def test_a_listing_is_cut_where_its_keys_differ() -> None:
    keys = [f"p/{number:05}" for number in range(0, 30_000, 10)]

    def first_key(after: str) -> str:
        return next((key for key in keys if key > after), "")

    assert branches(first_key, "p/00120", "p/00143", "") == [
        *(f"p/001{digit}" for digit in "56789:"),  # behind which comes 002
        *(f"p/00{digit}" for digit in "3456789:"),
        "p/02",
        "p/03",
    ]
    assert branches(first_key, "p/00120", "p/00143", "p/0017") == ["p/0015", "p/0016"]
    assert branches(first_key, "p/29970", "p/29990", "") == []


# --- real stores -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(
    rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[FaultProxy]:
    """A bucket `many` of 5,000 objects behind a proxy, listed in ranges of a page."""
    folder = rclone_s3.root / "listed-many"
    if not folder.exists():
        for name in range(5):
            (folder / f"p/{name}").mkdir(parents=True)
            for number in range(1000):
                (folder / f"p/{name}/{number:04}.jpg").touch()
        (folder / "p/few").mkdir()
        (folder / "p/few/a.jpg").touch()
    with FaultProxy(rclone_s3.endpoint) as proxy:
        for name, value in rclone_s3.env().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setattr(listing, "_FIRST_PAGES", 1)
        monkeypatch.setattr(listing, "_RANGE_PAGES", 1)
        yield proxy
        join_processes()


URL = "s3://listed-many"


def test_a_bucket_is_listed_side_by_side_and_probed_little(bucket: FaultProxy, settings: Settings) -> None:
    store = open_store(URL, settings)
    several = built(store)
    requests = [path for path in bucket.requests if "list-type=2" in path]
    probes = [path for path in requests if "max-keys=1&" in path]
    assert 0 < len(probes) <= listing._MOST_BRANCHES + 3
    assert len(requests) - len(probes) <= 2 * (1 + listing._MOST_BRANCHES)
    assert several == built(store, processes=1)
    assert several[1].files == 5001  # type: ignore[attr-defined]


@pytest.mark.parametrize("prefix", ["p/few/", "p/0/", "nothing/"])
def test_a_small_prefix_costs_no_request_more(
    bucket: FaultProxy, settings: Settings, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_FIRST_PAGES", 4)
    parts_of(open_store(URL, settings), prefix)
    assert len([path for path in bucket.requests if "list-type=2" in path]) == 1


def test_a_listing_side_by_side_goes_on_where_it_broke(bucket: FaultProxy, settings: Settings) -> None:
    store = open_store(URL, settings)
    alone = built(store, processes=1)
    broken = [Fault(status=503), Fault(truncate_at=1000), Fault(reset_at=20_000)]
    bucket.add(*broken)
    assert built(store) == alone


def test_a_refusal_of_one_range_is_the_error_of_all(bucket: FaultProxy, settings: Settings) -> None:
    def refuse(answer: Answer) -> None:
        answer.status, answer.body = 403, b"<Error><Code>AccessDenied</Code></Error>"

    bucket.always(Fault(change=refuse, only=lambda _method, path: "start-after" in path and "max-keys" not in path))
    with pytest.raises(StoreAccessError):
        built(open_store(URL, settings))


def test_a_server_that_knows_no_place_to_start_is_listed_by_one(
    store: ProbedMemory, small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, KINDS["folders"])
    monkeypatch.setattr(store, "first_key", lambda prefix, *, start_after: "p/00/000")
    assert parts_of(store) == 0
    assert built(store) == built(MemoryStore(store.url))


def test_a_listing_that_comes_in_another_order_is_refused(store: ProbedMemory, small_pages: None) -> None:
    class Reversed(ProbedMemory):
        def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
            for page in super().list(prefix, start_after=start_after):
                yield page[::-1] if start_after else page

    fill(store, KINDS["folders"])
    with pytest.raises(CatalogError, match="twice or out of order"):
        built(Reversed(store.url))


@given(
    st.sets(
        st.text(st.sampled_from("ab/01\ud7ff\ue000\uff01\U0001f600\U0010ffff"), min_size=1, max_size=4), min_size=30
    )
)
@settings_of_hypothesis(max_examples=60, deadline=None)
def test_a_server_that_sorts_by_utf_16_hides_no_key(names: set[str]) -> None:
    """Wherever its listing is cut, a key out of order is seen and refused, as by one lister."""
    keys = sorted("p/" + name for name in names if "//" not in name)
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (
            (memory, "_order", lambda key: key.encode("utf-16-be")),
            (memory, "_PAGE_KEYS", 2),
            (memory, "_objects", {}),
            (listing, "_FIRST_PAGES", 2),
            (listing, "_RANGE_PAGES", 3),
            (listing, "working_processes", InTurn),
            (listing, "wait", InTurn.end_last),
        ):
            patch.setattr(module, name, value)
        store = ProbedMemory("memory://utf-16")
        fill(store, keys)
        alone, several = (outcome(store, processes=processes) for processes in (1, 3))
    assert several == alone
    assert alone == len(keys) or keys != sorted(keys, key=lambda key: key.encode("utf-16-be"))


def outcome(store: ObjectStore, *, processes: int) -> int | str:
    """Return how many keys a listing has, or the class of its error."""
    try:
        return sum(each.rows for each in built(store, processes=processes)[1].ranges)  # type: ignore[attr-defined]
    except CatalogError as exc:
        return type(exc).__name__


class InTurn:
    """Stands for processes. Of the ranges that are being listed, the last ends first."""

    under_way: ClassVar[list[tuple[Future[Any], Callable[[], Any]]]] = []

    def __init__(self, lister: Any, _processes: int) -> None:
        self._lister = lister

    def __enter__(self) -> Callable[[Any], Future[Any]]:
        self.under_way.clear()
        return self.submit

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, task: Any) -> Future[Any]:
        """Begin to list a range."""
        self.under_way.append((future := Future(), lambda: self._lister.work(task)))
        return future

    @classmethod
    def end_last(cls, _futures: object, *, return_when: str) -> None:
        """Wait for one."""
        future, work = cls.under_way.pop()
        try:
            future.set_result(work())
        except Exception as exc:  # noqa: BLE001 - for who asks for the result
            future.set_exception(exc)


def test_what_waits_for_a_slow_range_stays_bounded(
    store: ProbedMemory, small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, KINDS["one flat folder"])
    monkeypatch.setattr(listing, "_RANGE_PAGES", 2)
    monkeypatch.setattr(listing, "working_processes", InTurn)
    monkeypatch.setattr(listing, "wait", InTurn.end_last)

    def most_held(limit_bytes: int) -> tuple[int, int]:
        """Return how many bytes of parts were there at a time, at most, and how many rows in all."""
        monkeypatch.setattr(listing, "_MOST_BYTES", limit_bytes)
        held, most, rows = 0, 0, 0
        work = listing._Lister.work

        def count(lister: Any, task: Any) -> Any:
            nonlocal held, most
            found = work(lister, task)
            held += found[0].size_bytes
            most = max(most, held)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(listing._Lister, "work", count)
            source = Source(store.url, "p/")
            for each in listing.pages_and_parts(store, "p/", source, known=frozenset(), processes=3):
                if isinstance(each, ManifestPart):
                    held -= each.size_bytes
                    rows += sum(sealed.info.rows for sealed in each.ranges)
        return most, rows

    unbounded, rows = most_held(2**40)
    bounded, same_rows = most_held(unbounded // 3)
    assert same_rows == rows
    assert bounded <= unbounded // 3
    assert built(store) == built(MemoryStore(store.url))


def test_no_process_outlives_an_error_that_is_kept(store: ProbedMemory, small_pages: None) -> None:
    fill(store, KINDS["folders"])
    source = Source(store.url, "p/")
    builder = ManifestBuilder([source], lambda _: None)
    builder.add_part = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError) as kept:
        ListedPlace(store=store, prefix="p/", origin="", processes=3).fill(builder, source, frozenset())
    join_processes()
    assert kept.traceback


def test_a_process_that_is_killed_ends_the_listing(store: ProbedMemory, small_pages: None) -> None:
    mother = os.getpid()

    class Deadly(ProbedMemory):
        def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
            if os.getpid() != mother and "/1" in start_after:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().list(prefix, start_after=start_after)

    fill(store, KINDS["folders"])
    with pytest.raises(DatacacheError, match="a worker process was killed"):
        built(Deadly(store.url))
    join_processes()


def test_a_process_that_may_have_no_children_lists_alone(
    store: ProbedMemory, small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, KINDS["folders"])
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(daemon=True))
    assert parts_of(store) == 0
