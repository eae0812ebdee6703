"""The daemon's gets, with a store, tiers and a disk that do what the test says."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from datacache.core.errors import DaemonError
from datacache.core.objects import BLOCK_BYTES, ObjectRef, block_id, object_id
from datacache.daemon import fetcher as fetcher_module
from datacache.daemon.fetcher import Fetcher

LARGE = ObjectRef("s3://b", "large", 8 * BLOCK_BYTES, "e", "")


def small(number: int) -> ObjectRef:
    return ObjectRef("s3://b", f"small/{number}", 10, "e", "")


class Tiers:
    """The writer and the local blocks in one."""

    def __init__(self, *, keep: bool = True) -> None:
        self.keep = keep
        self.here: dict[bytes, bytes] = {}
        self.look = lambda: None

    def put(self, block, stored):
        if self.keep:
            self.here[block.id] = bytes(block.data)
        stored(self.keep)

    def has(self, id):
        return id in self.here

    def view(self, id, start, stop):
        self.look()
        return (memoryview(self.here[id]), 1) if id in self.here else None


class Store:
    def __init__(self) -> None:
        self.reads: list[int] = []
        self.wait = lambda: None

    def read(self, ref, start, stop):
        self.reads.append(start)
        self.wait()
        return b"x" * (stop - start)


@pytest.fixture
def store():
    return Store()


def fetcher_of(store, tiers, concurrency=8):
    return Fetcher(tiers, tiers, lambda _: store, concurrency)


def test_a_block_that_was_not_kept_is_not_fetched_again_for_its_next_piece_and_nothing_is_read_ahead(store):
    fetcher = fetcher_of(store, Tiers(keep=False))
    fetcher.fill(block_id(object_id(small(0)), 0), small(0), 0, "d", stored=lambda kept: None)
    store.reads.clear()
    for _ in range(4):
        assert len(fetcher.read(LARGE, 2, "d").result(10)) == BLOCK_BYTES
    fetcher.close()
    assert store.reads == [2 * BLOCK_BYTES]


def test_what_was_not_kept_is_held_up_to_a_number_of_bytes(store, monkeypatch):
    monkeypatch.setattr(fetcher_module, "_HELD_BYTES", 25)
    monkeypatch.setattr(fetcher_module, "_ONE_READ_BYTES", 0)
    fetcher = fetcher_of(store, Tiers(keep=False))
    for number in (0, 1, 0, 2, 0, 1):  # 1 went for 2
        fetcher.read(small(number), 0, "d").result(10)
    fetcher.close()
    assert len(store.reads) == 4


def test_a_failure_to_look_at_the_disk_reaches_the_reader_and_ends_the_flight(store):
    tiers = Tiers()
    fetcher = fetcher_of(store, tiers)

    def fail():
        raise OSError("the disk")

    tiers.look = fail
    with pytest.raises(OSError, match="the disk"):
        fetcher.read(small(0), 0, "d").result(10)
    tiers.look = lambda: None
    assert fetcher.under_way == 0
    assert fetcher.read(small(0), 0, "d").result(10) == b"x" * 10


def test_a_fill_fetches_nothing_that_landed_after_its_caller_looked(store):
    tiers = Tiers()
    id = block_id(object_id(small(0)), 0)
    tiers.here[id] = b"y" * 10
    kept = []
    fetcher_of(store, tiers).fill(id, small(0), 0, "d", stored=kept.append)
    assert (kept, store.reads) == ([True], [])


def test_fills_of_all_jobs_together_are_no_more_than_the_concurrency(store):
    together = threading.Barrier(3)

    def meet():
        with pytest.raises(threading.BrokenBarrierError):
            together.wait(0.2)

    store.wait = meet
    fetcher = fetcher_of(store, Tiers(), concurrency=2)
    with ThreadPoolExecutor(6) as pool:
        fills = [
            pool.submit(fetcher.fill, block_id(object_id(small(n)), 0), small(n), 0, "d", stored=lambda kept: None)
            for n in range(6)
        ]
        for fill in fills:
            fill.result(10)


def test_a_read_does_not_wait_for_the_bytes_of_a_warm_up(store, monkeypatch):
    monkeypatch.setattr(fetcher_module, "_FILL_BYTES", 10)
    tiers = Tiers()
    landing = []
    tiers.put = lambda block, stored: landing.append(stored)  # the disk is slow
    fetcher = fetcher_of(store, tiers)
    fetcher.fill(block_id(object_id(small(0)), 0), small(0), 0, "d", stored=lambda kept: None)
    assert len(fetcher.read(small(1), 0, "d").result(10)) == 10


def test_closing_does_not_wait_for_a_store_that_is_away(store, monkeypatch):
    monkeypatch.setattr(fetcher_module, "_CLOSE_TIMEOUT_S", 0.1)
    back = threading.Event()
    store.wait = lambda: back.wait(30)
    fetcher = fetcher_of(store, Tiers())
    waiting = fetcher.read(small(0), 0, "d")
    begun = time.monotonic()
    fetcher.close()
    assert time.monotonic() - begun < 5
    back.set()
    waiting.result(10)


def test_what_has_not_begun_when_it_closes_fails(store):
    back, begun = threading.Event(), threading.Event()
    store.wait = lambda: (begun.set(), back.wait(30))
    fetcher = fetcher_of(store, Tiers(), concurrency=1)
    first, second = fetcher.read(small(0), 0, "d"), fetcher.read(small(1), 0, "d")
    assert begun.wait(10)
    closing = threading.Thread(target=fetcher.close)
    closing.start()
    while not fetcher._closing:
        pass
    back.set()
    closing.join(10)
    assert len(first.result(10)) == 10
    with pytest.raises(DaemonError, match="stopping"):
        second.result(10)
