"""The daemon's gets, with a store, tiers and a disk that do what the test says."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from datacache.core.errors import DaemonError
from datacache.core.ids import BLOCK_BYTES, ObjectRef, block_id, object_id
from datacache.daemon import fetcher as fetcher_module
from datacache.daemon import whole_objects
from datacache.daemon.fetcher import Fetcher
from datacache.daemon.whole_objects import WholeObjects
from datacache.exchange.wire import Mode
from datacache.store.checksums import Checksum, Tally, compute
from tests.daemon.test_turns import held_bytes
from tests.promises import promise

LARGE = ObjectRef("s3://b", "large", 8 * BLOCK_BYTES, "e", "")


def small(number: int) -> ObjectRef:
    return ObjectRef("s3://b", f"small/{number}", 10, "e", "")


class Tiers:
    """The writer and the local blocks in one."""

    tiers = (SimpleNamespace(budget_bytes=2**20),) * 2

    def __init__(self, *, keep: bool = True) -> None:
        self.keep = keep
        self.here: dict[bytes, bytes] = {}
        self.look = lambda: None

    def put(self, block, stored):
        if self.keep:
            self.here[block.id] = bytes(block.data)
        stored(self.keep)

    def call(self, action):
        done = Future()
        done.set_result(action())
        return done

    def unchecked(self):
        return []

    def mark_checked(self, id):
        pass

    def drop_object(self, blocks):
        for id in blocks:
            self.here.pop(id, None)

    def sweep(self):
        pass

    def has(self, id):
        return id in self.here

    def view(self, id, start, stop):
        self.look()
        return memoryview(self.here[id]) if id in self.here else None


class Store:
    def __init__(self) -> None:
        self.reads: list[int] = []
        self.wait = lambda: None

    def read(self, ref, start, stop):
        self.reads.append(start)
        self.wait()
        return b"x" * (stop - start)


def until(true):
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def store():
    return Store()


def fetcher_of(store, tiers, concurrency=8):
    return Fetcher(tiers, tiers, lambda _: store, concurrency)


def read(fetcher, ref, number, dataset):
    """The future bytes of a block, for a reader that lets go of them at once."""
    reading = fetcher.read(ref, number, dataset)
    reading.data.add_done_callback(lambda _: reading.close())
    return reading.data


def test_a_block_that_was_not_kept_is_not_fetched_again_for_its_next_piece_and_nothing_is_read_ahead(store):
    fetcher = fetcher_of(store, Tiers(keep=False))
    fetcher.fill(block_id(object_id(small(0)), 0), small(0), 0, "d", stored=lambda kept: None)
    store.reads.clear()
    for _ in range(4):
        assert len(read(fetcher, LARGE, 2, "d").result(10)) == BLOCK_BYTES
    fetcher.close()
    assert store.reads == [2 * BLOCK_BYTES]


@pytest.mark.parametrize(
    ("asked", "planned", "got"),
    [([0], False, [0, 1, 2, 3, 4]), ([5], False, [5]), ([5, 6], False, [5, 6, 7, 8, 9]), ([0, 1], True, [0, 1])],
    ids=["from the beginning", "somewhere", "on from there", "in a published order"],
)
def test_blocks_are_read_ahead_for_those_who_go_through_an_object(store, asked, planned, got):
    fetcher = fetcher_of(store, Tiers())
    fetcher.planned = lambda dataset: planned and dataset == "d"
    ref = ObjectRef("file:///s", "far.bin", 10 * BLOCK_BYTES, "1")
    for number in asked:
        read(fetcher, ref, number, "d").result(10)
        until(lambda: not fetcher.under_way)
    fetcher.close()
    assert sorted(store.reads) == [number * BLOCK_BYTES for number in got]


def test_what_was_not_kept_is_held_up_to_a_number_of_bytes(store, monkeypatch):
    monkeypatch.setattr(fetcher_module, "_HELD_BYTES", 25)
    monkeypatch.setattr(fetcher_module, "_ONE_READ_BYTES", 0)
    fetcher = fetcher_of(store, Tiers(keep=False))
    for number in (0, 1, 0, 2, 0, 1):  # 1 went for 2
        read(fetcher, small(number), 0, "d").result(10)
    fetcher.close()
    assert len(store.reads) == 4


def test_a_failure_to_look_at_the_disk_reaches_the_reader_and_ends_the_flight(store):
    tiers = Tiers()
    fetcher = fetcher_of(store, tiers)

    def fail():
        raise OSError("the disk")

    tiers.look = fail
    with pytest.raises(OSError, match="the disk"):
        read(fetcher, small(0), 0, "d").result(10)
    tiers.look = lambda: None
    assert fetcher.under_way == 0
    assert read(fetcher, small(0), 0, "d").result(10) == b"x" * 10


def test_a_fill_fetches_nothing_that_landed_after_its_caller_looked(store):
    tiers = Tiers()
    id = block_id(object_id(small(0)), 0)
    tiers.here[id] = b"y" * 10
    kept = []
    fetcher_of(store, tiers).fill(id, small(0), 0, "d", stored=kept.append)
    assert (kept, store.reads) == ([True], [])


def test_a_fill_whose_caller_looked_in_time_looks_at_no_index(store):
    tiers = Tiers()
    fetcher = fetcher_of(store, tiers)
    tiers.has = pytest.fail
    fetcher.fill(block_id(object_id(small(0)), 0), small(0), 0, "d", stored=lambda kept: None, looked=fetcher.landings)
    assert store.reads == [0]


@pytest.mark.parametrize("remembered", [0, 1, 2, 1000])
def test_a_fill_fetches_nothing_that_landed_since_its_caller_looked(store, monkeypatch, remembered):
    monkeypatch.setattr(fetcher_module, "_LANDED", remembered)
    fetcher = fetcher_of(store, Tiers())
    looked = fetcher.landings
    for number in (0, 1, 1, 2):
        read(fetcher, small(number), 0, "d").result(10)
    store.reads.clear()
    for number in range(3):
        kept = []
        fetcher.fill(block_id(object_id(small(number)), 0), small(number), 0, "d", stored=kept.append, looked=looked)
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
    assert len(read(fetcher, small(1), 0, "d").result(10)) == 10


def test_closing_does_not_wait_for_a_store_that_is_away(store, monkeypatch):
    monkeypatch.setattr(fetcher_module, "_CLOSE_TIMEOUT_S", 0.1)
    back = threading.Event()
    store.wait = lambda: back.wait(30)
    fetcher = fetcher_of(store, Tiers())
    waiting = read(fetcher, small(0), 0, "d")
    begun = time.monotonic()
    fetcher.close()
    assert time.monotonic() - begun < 5
    back.set()
    waiting.result(10)


def test_what_has_not_begun_when_it_closes_fails(store):
    back, begun = threading.Event(), threading.Event()
    store.wait = lambda: (begun.set(), back.wait(30))
    fetcher = fetcher_of(store, Tiers(), concurrency=1)
    first, second = read(fetcher, small(0), 0, "d"), read(fetcher, small(1), 0, "d")
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


@promise("Data sets take turns in bytes, however many readers one has")
def test_a_read_of_another_data_set_waits_for_one_block_and_not_for_all_readers_of_one(store):
    go_on, begun, get = threading.Semaphore(0), [], store.read

    def read_in_turn(ref, start, stop):
        begun.append(ref.store)
        return get(ref, start, stop)

    store.read = read_in_turn
    store.wait = lambda: go_on.acquire(timeout=30)
    fetcher = fetcher_of(store, Tiers(), concurrency=1)  # so that gets begin one after the other
    greedy = [read(fetcher, ObjectRef("s3://b", f"greedy/{n}", 10, "e", ""), 0, "greedy") for n in range(50)]
    small = read(fetcher, small_of("other"), 0, "other")
    for _ in range(51):
        go_on.release()
    for one in (*greedy, small):
        one.result(30)
    assert begun.index("s3://other") < 10
    fetcher.close()


def small_of(key: str) -> ObjectRef:
    return ObjectRef("s3://other", key, 10, "e", "")


@promise("Bytes in the daemon are bounded from the fetch until they were stored and sent")
def test_no_more_bytes_are_under_way_than_fit_until_they_were_stored_and_sent(store, monkeypatch):
    monkeypatch.setattr(fetcher_module, "_READ_BYTES", 40)
    fetcher = fetcher_of(store, Tiers())
    readings = [fetcher.read(small(n), 0, "d") for n in range(10)]
    for reading in readings[:4]:
        reading.data.result(30)
    assert len(store.reads) == 4
    assert held_bytes(fetcher.turns) == 40
    readings[0].close()
    readings[4].data.result(30)
    assert len(store.reads) == 5
    for reading in readings[1:]:
        reading.data.result(30)
        reading.close()
    assert held_bytes(fetcher.turns) == 0


def test_what_is_read_ahead_and_asked_for_by_now_does_not_wait_behind_what_nobody_asked_for(store):
    go_on = threading.Event()
    store.wait = lambda: go_on.wait(30)
    fetcher = fetcher_of(store, Tiers(), concurrency=1)
    first = read(fetcher, LARGE, 0, "d")  # 1 to 4 are read ahead, some of them queued
    fourth = read(fetcher, LARGE, 4, "d")
    go_on.set()
    assert len(first.result(30)) == len(fourth.result(30)) == BLOCK_BYTES
    while fetcher.under_way:
        time.sleep(0.01)
    assert sorted(store.reads) == sorted(set(store.reads))  # each once
    assert held_bytes(fetcher.turns) == 0
    fetcher.close()


@promise("Bytes in the daemon are bounded from the fetch until they were stored and sent")
def test_a_block_goes_with_the_last_who_needs_it_and_waits_for_no_garbage_collection(store):
    class Bytes(bytearray):
        """Bytes that can be referred to weakly."""

    seen = []

    def read(ref, start, stop):
        data = Bytes(stop - start)
        seen.append(weakref.ref(data))
        return data

    store.read = read
    fetcher = fetcher_of(store, Tiers())
    gc.disable()
    try:
        for number in range(5):
            reading = fetcher.read(small(number), 0, "d")
            reading.data.result(30)
            reading.close()
        del reading
        fetcher.close()
        end = time.monotonic() + 10
        while any(ref() is not None for ref in seen):
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        gc.enable()


class Odd(Store):
    """Says something that is no checksum."""

    def checksum(self, ref):
        raise ValueError("no header of this world")


@promise("A check that breaks off is counted, logged once, and tried again")
def test_an_object_whose_check_breaks_is_logged_and_counts_as_not_checked(caplog, monkeypatch):
    tally = Tally()
    monkeypatch.setattr(whole_objects, "TALLY", tally)
    tiers, odd = Tiers(), Odd()
    whole = WholeObjects(tiers, tiers, lambda _: odd)
    fetcher = Fetcher(tiers, tiers, lambda _: odd, 8, whole=whole)
    for number in range(8):
        read(fetcher, LARGE, number, "d").result(10)
    until(lambda: tally.counts() == ({"none": 1}, {}))
    assert LARGE.url in caplog.text
    assert "no header of this world" in caplog.text
    fetcher.close()


def test_what_lands_after_the_close_is_nothing_to_check_any_more():
    tiers, odd = Tiers(), Odd()
    whole = WholeObjects(tiers, tiers, lambda _: odd)
    whole.close()
    whole.fetched(LARGE, 0, b"x")
    whole.landed(LARGE, 0)


def test_reads_go_on_with_the_threads_that_there_are_when_no_more_can_be_started(store, monkeypatch):
    tiers, go_on = Tiers(), threading.Event()
    store.wait = lambda: go_on.wait(30) and None
    fetcher = Fetcher(tiers, tiers, lambda _: store, 1)
    readings = [fetcher.read(small(number), 0, "d") for number in range(3)]
    until(lambda: store.reads)

    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    go_on.set()
    assert [reading.data.result(10) for reading in readings] == [b"x" * 10] * 3


class Owner:
    """The other nodes: one owner, which gives nothing."""

    def __init__(self) -> None:
        self.members = ["owner"]
        self.asked = lambda: None
        self.partitioned = False

    def ranked_before_this(self, id, dataset):
        return self.members

    def ranked_across(self, id, dataset):
        return []

    def get(self, members, ref, number, dataset, patience):
        self.asked()

    def get_earlier(self, id, ref, number, dataset, patience):
        return None

    def partitions(self, dataset):
        return self.partitioned


def test_a_node_that_asks_for_a_block_waits_for_the_store_with_this_one_and_for_no_other_node(store):
    owner, answers = Owner(), []
    fetcher = Fetcher(Tiers(), Tiers(), lambda _: store, 8, peers=owner)

    def ask():
        reading = fetcher.read_for_node(small(0), 0, "d")
        answers.append(reading)
        if reading is not None:
            reading.data.add_done_callback(lambda _: reading.close())

    owner.asked = store.wait = ask
    assert read(fetcher, small(0), 0, "d").result(10) == b"x" * 10
    busy, joined = answers
    assert busy is None
    assert joined.data.result(10) == b"x" * 10
    assert store.reads == [0]
    assert fetcher.stats.fetched == 1
    until(lambda: held_bytes(fetcher.turns) == 0)


def test_an_owner_fetches_once_what_its_reader_and_another_node_ask_for(store):
    owner, joined = Owner(), []
    owner.members = []
    owner.asked = pytest.fail
    fetcher = Fetcher(Tiers(), Tiers(), lambda _: store, 8, peers=owner)
    store.wait = lambda: joined.append(fetcher.read_for_node(small(0), 0, "d"))
    assert read(fetcher, small(0), 0, "d").result(10) == b"x" * 10
    assert joined[0].data.result(10) == b"x" * 10
    joined[0].close()
    assert store.reads == [0]


def test_only_the_owner_in_a_zone_waits_for_the_one_among_all_zones_and_no_circle_closes(store):
    peers, asked, answers = Owner(), [], []
    peers.members, peers.ranked_across = [], lambda id, dataset: ["across"]
    fetcher = Fetcher(Tiers(), Tiers(), lambda _: store, 8, peers=peers)

    def get(members, ref, number, dataset, patience, *, mode):
        asked.append((members, mode))
        answers.extend(fetcher.read_for_node(ref, number, dataset, zone=zone) for zone in (True, False))
        return memoryview(b"y" * 10)

    peers.get = get
    reading = fetcher.read_for_node(small(0), 0, "d")
    assert bytes(reading.data.result(30)) == b"y" * 10
    assert asked == [(["across"], Mode.ZONE)]
    refused, joined = answers
    assert refused is None  # it may wait for that node
    assert bytes(joined.data.result(30)) == b"y" * 10
    other = fetcher.read_for_node(small(1), 0, "d", zone=True)
    assert other.data.result(30) == b"x" * 10
    assert len(asked) == 1
    for each in (reading, joined, other):
        each.close()


class Others:
    """The other nodes of a cluster, each of which owns every block and answers when the test says so."""

    def __init__(self) -> None:
        self.asked, self.go_on, self.partitioned = [], threading.Event(), False

    def ranked_before_this(self, id, dataset):
        return ["owner"]

    def ranked_across(self, id, dataset):
        return []

    def get(self, members, ref, number, dataset, patience):
        self.asked.append(ref)
        assert self.go_on.wait(30)
        return memoryview(b"y" * 10)

    def get_earlier(self, id, ref, number, dataset, patience):
        return None

    def partitions(self, dataset):
        return self.partitioned


def test_nodes_that_all_wait_for_each_other_get_what_the_other_waits_for(store):
    others = Others()
    fetcher = Fetcher(Tiers(), Tiers(keep=False), lambda _: store, 2, peers=others)
    waiting = [read(fetcher, small(number), 0, f"d{number % 9}") for number in range(30)]
    until(lambda: len(others.asked) > 2)  # all turns for reads, and some of the reserve
    for number in range(50, 55):
        reading = fetcher.read_for_node(small(number), 0, "d")
        assert reading.data.result(30) == b"x" * 10
        reading.close()
    [queued] = [n for n in (29,) if small(n) not in others.asked]
    assert fetcher.read_for_node(small(queued), 0, "d").data.result(30) == b"x" * 10
    others.go_on.set()
    assert [each.result(30) for each in waiting[:29]] == [b"y" * 10] * 29
    fetcher.close()


def test_a_block_of_which_a_new_owner_has_a_copy_in_ram_goes_on_its_disk_without_a_get(store):
    others, tiers, blocks = Others(), Tiers(), []
    others.partitioned, others.ranked_before_this = True, lambda id, dataset: []
    id = block_id(object_id(small(0)), 0)
    tiers.here[id] = b"y" * 10
    tiers.missing = lambda ids, *, on_disk: [0] if on_disk else []
    tiers.put = lambda block, stored: (blocks.append(block), stored(True))
    fetcher = Fetcher(tiers, tiers, lambda _: store, 8, peers=others)
    fetcher.fill(id, small(0), 0, "d", stored=lambda kept: None, pass_on=True)
    assert [(bytes(block.data), block.in_ram_only) for block in blocks] == [(b"y" * 10, False)]
    assert store.reads == []


def test_what_is_passed_on_to_its_owner_takes_no_memory_here_unless_it_is_read(store):
    others, tiers = Others(), Tiers()
    others.partitioned = True
    fetcher = Fetcher(tiers, tiers, lambda _: store, 8, peers=others)
    read_meanwhile = []
    with ThreadPoolExecutor(2) as pool:
        ids = [block_id(object_id(small(number)), 0) for number in range(2)]
        kept = []
        fills = [
            pool.submit(fetcher.fill, id, small(n), 0, "d", stored=kept.append, pass_on=True)
            for n, id in enumerate(ids)
        ]
        until(lambda: len(others.asked) == 2)
        read_meanwhile.append(read(fetcher, small(1), 0, "d"))
        others.go_on.set()
        for fill in fills:
            fill.result(30)
    assert bytes(read_meanwhile[0].result(30)) == b"y" * 10
    assert kept == [True, True]
    assert list(tiers.here) == [ids[1]]


def test_a_node_that_passes_a_block_on_does_not_ask_the_store_for_the_checksum_of_the_whole(store):
    others, tiers = Others(), Tiers()
    others.partitioned = True
    others.go_on.set()
    whole = WholeObjects(tiers, tiers, lambda _: store)
    fetcher = Fetcher(tiers, tiers, lambda _: store, 8, whole=whole, peers=others)
    fetcher.fill(block_id(object_id(LARGE), 0), LARGE, 0, "d", stored=lambda kept: None, pass_on=True)
    assert not whole._objects
    fetcher.close()


def test_what_the_disk_of_another_node_keeps_counts_as_kept_though_no_tier_here_has_room(store):
    others, kept = Others(), []
    others.partitioned = True
    others.go_on.set()
    fetcher = Fetcher(Tiers(keep=False), Tiers(keep=False), lambda _: store, 8, peers=others)
    id = block_id(object_id(small(0)), 0)
    fetcher.fill(id, small(0), 0, "d", stored=kept.append)
    assert kept == [True]
    assert fetcher.kept_elsewhere(id, "d")
    read(fetcher, LARGE, 0, "d").result(30)
    until(lambda: len(others.asked) > 2)  # read ahead as ever
    fetcher.close()


@promise("With the mode `partition` a node keeps on its disk what it owns")
@pytest.mark.parametrize(
    ("case", "kept"),
    [
        ("the owner, which another node gives what it had from before", "on disk"),
        ("the owner, which gets it from the store", "on disk"),
        ("a node that another one asks in place of the owner", "on disk"),
        ("a reader's node, which the owner gives it", "in RAM"),
        ("a reader's node, which gets it from the store as the owner is away", "in RAM"),
        ("a reader's node, which the owner gives it, and says busy to another one", "in RAM"),
    ],
)
def test_whose_disk_keeps_a_block_of_a_data_set_that_is_parted(store, case, kept):
    others, tiers, blocks, refused = Others(), Tiers(), [], []
    others.partitioned = True
    others.go_on.set()
    tiers.put = lambda block, stored: (blocks.append(block), stored(True))
    tiers.missing = lambda ids, *, on_disk: [0]
    if case.startswith("the owner"):
        others.ranked_before_this = lambda id, dataset: []
    if "from before" in case:
        others.get_earlier = lambda *_: memoryview(b"y" * 10)
    if "away" in case:
        others.get = lambda *_: None
    fetcher = Fetcher(tiers, tiers, lambda _: store, 8, peers=others)
    if "busy" in case:
        give = others.get

        def get(*asked):
            refused.append(fetcher.read_for_node(small(0), 0, "d"))
            return give(*asked)

        others.get = get
    if "in place of" in case:
        reading = fetcher.read_for_node(small(0), 0, "d")
        reading.data.result(30)
        reading.close()
    else:
        read(fetcher, small(0), 0, "d").result(30)
    [block] = blocks
    assert refused in ([], [None])
    assert ("in RAM" if block.in_ram_only else "on disk") == kept


@promise("A large object that other nodes give with wrong bytes comes from the store the next time")
def test_a_large_object_that_other_nodes_have_damaged_is_got_from_the_store(store):
    expected = Checksum("sha256", compute("sha256", b"x" * LARGE.size_bytes))
    store.checksum = lambda _: expected
    others, tiers = Others(), Tiers()
    others.get = lambda *_: memoryview(b"y" * BLOCK_BYTES)
    whole = WholeObjects(tiers, tiers, lambda _: store)
    fetcher = Fetcher(tiers, tiers, lambda _: store, 8, whole=whole, peers=others)

    def read_all():
        return {bytes(read(fetcher, LARGE, number, "d").result(30)[:1]) for number in range(8)}

    assert read_all() == {b"y"}
    until(lambda: not tiers.here)  # it leaves the cache
    assert read_all() == {b"x"}
    fetcher.close()
