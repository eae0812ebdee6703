"""The check of large objects as a whole, with a store and tiers that do what the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from datacache.core.errors import ObjectNotFoundError, StoreUnavailableError
from datacache.core.ids import BLOCK_BYTES, ObjectId, ObjectRef, block_id, object_id
from datacache.daemon import whole_objects
from datacache.daemon.whole_objects import WholeObjects
from datacache.store.checksums import Checksum, Tally, compute
from tests.promises import promise

DATA = b"q" * 100
RIGHT = Checksum("sha256", compute("sha256", DATA + DATA))


def large(number: int) -> ObjectRef:
    return ObjectRef("s3://b", f"large/{number}", BLOCK_BYTES + 5, "e", "")


class Tiers:
    """The writer, with its marks, and the local blocks in one."""

    def __init__(self) -> None:
        self.here: set[bytes] = set()
        self.marked: dict[ObjectId, ObjectRef] = {}
        self.dropped = 0

    def call(self, action: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(action())
        return done

    def unchecked(self) -> Iterator[list[ObjectRef]]:
        yield list(self.marked.values())

    def is_unchecked(self, id: ObjectId) -> bool:
        return id in self.marked

    def mark_checked(self, id: ObjectId) -> None:
        self.marked.pop(id, None)

    def drop_object(self, blocks: list[bytes]) -> None:
        self.here.difference_update(blocks)
        self.marked.pop(ObjectId(blocks[0][:16]), None)
        self.dropped += 1  # last: tests wait for it

    def has(self, id: bytes) -> bool:
        return id in self.here

    def view(self, id: bytes, start: int, stop: int | None) -> memoryview | None:
        return memoryview(DATA) if id in self.here else None

    def sweep(self) -> None:
        pass


class Store:
    def __init__(self) -> None:
        self.says: Callable[[ObjectRef], Checksum | None] = lambda _ref: RIGHT
        self.heads = 0

    def checksum(self, ref: ObjectRef) -> Checksum | None:
        self.heads += 1
        return self.says(ref)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    tally = Tally()
    monkeypatch.setattr(whole_objects, "TALLY", tally)
    for name, value in {
        "_REMEMBERED": 8,
        "_MOST_WAITING": 4,
        "_PATIENCE_S": 0.05,
        "_LOOK_EVERY_S": 0.05,
        "_AGAIN_S": 0.2,
    }.items():
        monkeypatch.setattr(whole_objects, name, value, raising=False)
    return tally


@pytest.fixture
def tiers() -> Tiers:
    return Tiers()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def whole(tally: Tally, tiers: Tiers, store: Store) -> Iterator[WholeObjects]:
    checks = WholeObjects(tiers, tiers, lambda _url: store)  # type: ignore[arg-type]
    yield checks
    checks.close()


def come(whole: WholeObjects, tiers: Tiers, ref: ObjectRef, *numbers: int) -> None:
    """Do what the fetcher and the writer do with blocks."""
    for number in numbers or (0, 1):
        whole.fetched(ref, number, DATA)
        tiers.marked[object_id(ref)] = ref
        tiers.here.add(block_id(object_id(ref), number))
        whole.landed(ref, number)


@promise("Every large object is checked, however many come at once")
@pytest.mark.parametrize("head_s", [0.0, 0.01, 0.1])
def test_of_a_flood_of_wrong_objects_every_one_leaves_the_cache(
    whole: WholeObjects, tiers: Tiers, store: Store, tally: Tally, head_s: float
) -> None:
    def say(_ref: ObjectRef) -> Checksum:
        time.sleep(head_s)
        return Checksum("sha256", bytes(32))

    store.says = say
    for number in range(100):
        come(whole, tiers, large(number))
    until(lambda: tiers.dropped == 100)
    assert not tiers.here
    assert tally.counts() == ({}, {"sha256": 100})


@promise("Every large object is checked, however many come at once")
def test_objects_whose_other_blocks_come_much_later_are_checked(
    whole: WholeObjects, tiers: Tiers, tally: Tally
) -> None:
    for number in range(50):
        come(whole, tiers, large(number), 0)
    for number in range(50):
        come(whole, tiers, large(number), 1)
    until(lambda: not tiers.marked)
    assert tally.counts() == ({"sha256": 50}, {})
    assert len(whole._objects) <= 8


@promise("Every large object is checked, however many come at once")
def test_a_store_that_does_not_say_checksums_holds_up_a_fetch_for_a_moment_and_nothing_is_forgotten(
    whole: WholeObjects, tiers: Tiers, store: Store, tally: Tally
) -> None:
    answer = threading.Event()

    def say(_ref: ObjectRef) -> Checksum:
        answer.wait(30)
        return RIGHT

    store.says = say
    for number in range(20):
        come(whole, tiers, large(number))
    assert len(tiers.marked) == 20
    answer.set()
    until(lambda: not tiers.marked)
    assert tally.counts() == ({"sha256": 20}, {})


@promise("A check that breaks off is counted, logged once, and tried again")
def test_what_an_earlier_daemon_left_is_checked_where_all_of_it_is_here(
    tally: Tally, tiers: Tiers, store: Store
) -> None:
    for number in range(20):
        ref = large(number)
        tiers.marked[object_id(ref)] = ref
        tiers.here.update(block_id(object_id(ref), n) for n in range(2 if number % 2 else 1))
    whole = WholeObjects(tiers, tiers, lambda _url: store)  # type: ignore[arg-type]
    until(lambda: len(tiers.marked) == 10)
    assert store.heads == 10
    for number in range(0, 20, 2):
        come(whole, tiers, large(number), 1)
    until(lambda: not tiers.marked)
    assert tally.counts() == ({"sha256": 20}, {})
    whole.close()


@promise("A check that breaks off is counted, logged once, and tried again")
def test_an_object_that_could_not_be_checked_counts_once_and_is_checked_when_the_store_is_back(
    whole: WholeObjects, tiers: Tiers, store: Store, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    def away(ref: ObjectRef) -> Checksum:
        raise StoreUnavailableError("nobody answers", url=ref.url)

    store.says = away
    come(whole, tiers, large(1))
    until(lambda: store.heads >= 6)
    assert tally.counts() == ({"none": 1}, {})
    assert caplog.text.count("is not checked") == 1
    store.says = lambda _ref: RIGHT
    until(lambda: not tiers.marked)
    assert tally.counts() == ({"none": 1, "sha256": 1}, {})


@promise("A check that breaks off is counted, logged once, and tried again")
def test_an_object_that_is_gone_from_the_store_counts_as_not_checked_and_is_not_asked_for_again(
    whole: WholeObjects, tiers: Tiers, store: Store, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(ref: ObjectRef) -> Checksum:
        raise ObjectNotFoundError("it is not there", url=ref.url)

    store.says = gone
    come(whole, tiers, large(1))
    until(lambda: not tiers.marked)
    assert tally.counts() == ({"none": 1}, {})
    assert large(1).url in caplog.text


def test_a_block_that_comes_again_during_the_check_is_checked_as_well(
    whole: WholeObjects, tiers: Tiers, store: Store, tally: Tally
) -> None:
    asked, answer = threading.Event(), threading.Event()
    view = tiers.view

    def slow(id: bytes, start: int, stop: int | None) -> memoryview | None:
        if not asked.is_set():
            asked.set()
            answer.wait(30)
        return view(id, start, stop)

    tiers.view = slow  # type: ignore[method-assign]
    come(whole, tiers, large(1))
    assert asked.wait(30)
    store.says = lambda _ref: Checksum("sha256", bytes(32))  # for the check to come
    come(whole, tiers, large(1), 1)
    until(lambda: tiers.dropped == 1)
    answer.set()  # what the first check reads is gone, and no concern of its
    until(lambda: whole._waiting == 0)
    assert tally.counts() == ({}, {"sha256": 1})
    assert not whole._not_checked


@promise("Every large object is checked, however many come at once")
def test_objects_are_checked_with_the_thread_that_there_is_when_no_more_can_be_started(
    whole: WholeObjects, tiers: Tiers, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    for number in range(8):  # twice as many as may wait
        come(whole, tiers, large(number))
    until(lambda: not tiers.marked)
    until(lambda: whole._waiting == 0)
    assert tally.counts() == ({"sha256": 8}, {})
