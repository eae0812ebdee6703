"""Warm-up jobs and what ends them, with a fetcher that does what the test says."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from datacache.cluster.members import Member
from datacache.core.errors import ObjectChangedError, ObjectNotFoundError, StoreAccessError, StoreUnavailableError
from datacache.core.ids import BLOCK_BYTES, MAX_READABLE_BYTES, ObjectRef
from datacache.daemon import warmer as warmer_module
from datacache.daemon.warmer import Warmer
from tests.promises import promise

COUNT = 200


class Snapshot:
    """Objects of one block each."""

    root = SimpleNamespace(files=COUNT, total_bytes=COUNT * BLOCK_BYTES)

    def entries(self):
        return (SimpleNamespace(size_bytes=BLOCK_BYTES, number=number) for number in range(COUNT))

    def object_ref(self, entry):
        return ObjectRef("s3://b", str(entry.number), BLOCK_BYTES, "e", "")


class Fetches:
    def __init__(self, answer):
        self.answer = answer
        self.fills = 0
        self.here = set()
        self.lock = threading.Lock()
        self.landings = 0
        self.local = self

    def missing(self, ids):
        return [at for at, id in enumerate(ids) if id not in self.here]

    def present(self, id):
        return id in self.here

    def fill(self, id, ref, number, dataset, *, stored, looked, pass_on):
        with self.lock:
            self.fills += 1
        kept = self.answer(ref)
        if kept:
            self.here.add(id)
        stored(kept)


def warm(fetches, **options):
    background = options.pop("background", False)
    snapshot = options.pop("snapshot", None) or Snapshot()
    warmer = Warmer(fetches, options.pop("concurrency", 4), **options)
    job = warmer.start("d@1", "d", snapshot, background=background)
    end = time.monotonic() + 20
    while job.state == "running":
        assert time.monotonic() < end, job
        time.sleep(0.005)
    warmer.stop()
    return job


def failing(error):
    def answer(_):
        raise error

    return Fetches(answer)


def test_any_failure_ends_the_job_and_none_hangs_it():
    job = warm(failing(RuntimeError("unheard of")))
    assert job.state == "failed"
    assert "unheard of" in job.error


@pytest.mark.parametrize("left", range(3))
def test_a_warm_up_goes_on_with_the_threads_that_there_are_or_fails(monkeypatch, left):
    begin, begun = threading.Thread.start, []

    def start(thread):
        if len(begun) == left:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    job = warm(Fetches(lambda _: True))
    assert (job.state, job.error) == (("done", "") if left else ("failed", "can't start new thread"))


@pytest.mark.parametrize("kind", [StoreUnavailableError, StoreAccessError])
def test_a_store_that_is_away_or_refuses_ends_the_job_at_once(kind):
    fetches = failing(kind("it is so", hint="do this"))
    job = warm(fetches)
    assert (job.state, job.error, job.hint) == ("failed", "it is so", "do this")
    assert fetches.fills <= 4


def test_objects_that_are_gone_do_not_end_it():
    fetches = failing(ObjectNotFoundError("gone"))
    assert warm(fetches).errors == COUNT
    assert fetches.fills == COUNT


class Large(Snapshot):
    """Two objects of as many bytes as there can be, and one of three blocks."""

    sizes = (MAX_READABLE_BYTES, MAX_READABLE_BYTES, 3 * BLOCK_BYTES)
    root = SimpleNamespace(files=3, total_bytes=sum(sizes))

    def entries(self):
        return (SimpleNamespace(size_bytes=size, number=number) for number, size in enumerate(self.sizes))

    def object_ref(self, entry):
        return ObjectRef("s3://b", str(entry.number), entry.size_bytes, "e", "")


@promise("A missing or changed object is asked for until its first block says so")
@pytest.mark.parametrize("kind", [ObjectChangedError, ObjectNotFoundError])
def test_a_large_object_that_is_gone_or_changed_is_given_up_at_its_first_block(kind):
    def answer(ref):
        if ref.size_bytes == MAX_READABLE_BYTES:
            raise kind("lost")
        return True

    fetches = Fetches(answer)
    job = warm(fetches, snapshot=Large())
    assert (job.state, job.error) == ("failed", "lost")
    assert fetches.fills <= 2 * 4 + 3  # each of four threads may have begun a block of it
    assert len(fetches.here) == 3
    assert (job.bytes_done, job.bytes_total) == (3 * BLOCK_BYTES, Large.root.total_bytes)


@promise("A missing or changed object is asked for until its first block says so")
def test_what_comes_before_the_first_block_that_is_lost_counts():
    class One(Large):
        sizes = (5 * BLOCK_BYTES,)
        root = SimpleNamespace(files=1, total_bytes=5 * BLOCK_BYTES)

    taken = []

    def answer(_):
        taken.append(1)
        if len(taken) > 2:
            raise ObjectChangedError("changed")
        return True

    job = warm(Fetches(answer), snapshot=One(), concurrency=1)
    assert len(taken) == 3
    assert (job.state, job.bytes_done) == ("failed", 2 * BLOCK_BYTES)


@pytest.mark.parametrize(("background", "most"), [(False, 4 + 4), (True, 1 + 4)])
def test_full_tiers_end_it_soon_and_it_says_how_much_is_missing(background, most):
    fetches = Fetches(lambda ref: int(ref.key) < 10)
    job = warm(fetches, background=background)
    assert job.state == "incomplete"
    assert fetches.fills <= 10 + most
    assert f"{190 * BLOCK_BYTES:,} of" in job.error
    assert "full" in job.error


def test_with_lru_more_than_fits_does_not_push_out_its_own_beginning():
    fetches = Fetches(lambda ref: True)
    job = warm(fetches, lru_bytes=50 * BLOCK_BYTES)
    assert job.state == "incomplete"
    assert 50 <= fetches.fills < 50 + 4
    assert warm(Fetches(lambda ref: True), lru_bytes=COUNT * BLOCK_BYTES).state == "done"


def test_a_block_whose_file_is_lost_is_missed_in_the_last_look():
    fetches = Fetches(lambda ref: True)
    fetches.present = lambda id: False
    job = warm(fetches)
    assert job.state == "incomplete"
    assert "lost" in job.error


def test_stopping_does_not_wait_for_a_store_that_is_away(monkeypatch):
    monkeypatch.setattr(warmer_module, "_STOP_TIMEOUT_S", 0.1)
    back = threading.Event()
    warmer = Warmer(Fetches(lambda ref: back.wait(30)), 4)
    warmer.start("d@1", "d", Snapshot())
    begun = time.monotonic()
    warmer.stop()
    assert time.monotonic() - begun < 5
    back.set()


def test_in_the_background_a_node_warms_what_it_owns_of_parted_data_whatever_is_being_read():
    fetches = Fetches(lambda ref: True)
    fetches.not_on_disk = fetches.missing
    me, other = Member("me", "me:1", 1.0), Member("other", "other:1", 1.0)
    peers = SimpleNamespace(
        address=me.address,
        stats=SimpleNamespace(missed=0),
        partitions=lambda dataset: True,
        owners=lambda ids, without: {me: list(range(0, len(ids), 2)), other: list(range(1, len(ids), 2))},
        connect=pytest.fail,
    )
    job = warm(fetches, background=True, peers=peers, planned=lambda ref: True)
    assert (job.state, fetches.fills) == ("done", COUNT // 2)


@pytest.mark.parametrize(("unanswered", "state", "fills"), [(1, "done", COUNT + 1), (0, "incomplete", COUNT)])
def test_what_a_busy_owner_did_not_give_is_asked_for_once_more(unanswered, state, fills):
    me, other = Member("me", "me:1", 1.0), Member("other", "other:1", 1.0)
    fetches, asked, stats = Fetches(lambda ref: ref.key != "1" or "1" in asked), [], SimpleNamespace(missed=0)

    def fill(id, ref, number, dataset, *, stored, **more):
        kept = fetches.answer(ref)
        stats.missed += 0 if kept else unanswered
        Fetches.fill(fetches, id, ref, number, dataset, stored=lambda _: stored(True), **more)
        asked.append(ref.key)

    def lacks(_, body):
        ids = [body[at : at + len(body) // (COUNT // 2)] for at in range(0, len(body), len(body) // (COUNT // 2))]
        return bytes(id not in fetches.here for id in ids)

    fetches.not_on_disk, fetches.fill = fetches.missing, fill
    peers = SimpleNamespace(
        address=me.address,
        stats=stats,
        partitions=lambda dataset: True,
        owners=lambda ids, without: {me: list(range(0, len(ids), 2)), other: list(range(1, len(ids), 2))},
        connect=lambda owner: SimpleNamespace(call=lacks, close=lambda: None),
    )
    job = warm(fetches, peers=peers)
    assert (job.state, fetches.fills, job.bytes_done) == (state, fills, BLOCK_BYTES * (COUNT - (state != "done")))
