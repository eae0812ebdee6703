"""Publishing an order: what it costs the training, what forked workers may do with it, and that nothing of it fails."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time

import numpy as np
import pytest

from datacache import connect
from datacache.core.ids import ObjectRef, block_id, object_id
from datacache.daemon.orders.plan_file import PlanFile
from datacache.loaders.lookahead import PlanSource, publish
from datacache.tiers.local import LocalBlocks
from datacache.tiers.memory import lookahead_dir
from tests.promises import promise

SIZE = 10_000


class Objects:
    """A data set of objects without a snapshot: a sample is an object."""

    def __init__(self, folder, count: int) -> None:
        self.refs = []
        folder.mkdir()
        for number in range(count):
            path = folder / str(number)
            path.write_bytes(number.to_bytes(4, "little") * (SIZE // 4))
            status = path.stat()
            etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
            self.refs.append(ObjectRef("file://", str(path)[1:], SIZE, etag))

    def plan_source(self) -> PlanSource | None:
        return PlanSource("objects", refs=tuple(self.refs))

    def plan_items(self, samples):
        return samples.reshape(-1, 1).astype(np.uint32)


class Chunked:
    """An order that is made when it is asked for."""

    def __init__(self, places: np.ndarray) -> None:
        self.places = places
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.places)

    def take(self, start: int, stop: int) -> np.ndarray:
        self.asked.append(stop - start)
        return self.places[start:stop]


@pytest.fixture
def objects(tmp_path):
    return Objects(tmp_path / "objects", 20)


def wait_for(condition, timeout_s: float = 20.0):
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def position(settings) -> int:
    (path,) = lookahead_dir(settings.home, settings.ram_dir).iterdir()
    return PlanFile(path).position


def all_here(settings, objects) -> bool:
    local = LocalBlocks(settings.home, settings.ram_dir)
    return all(local.has(block_id(object_id(ref), 0)) for ref in objects.refs)


def test_what_was_published_is_fetched_before_anybody_reads(settings, objects):
    with publish(settings, objects, np.arange(20)):
        wait_for(lambda: all_here(settings, objects))


def test_the_position_is_what_was_advanced_to_and_begins_where_it_starts(settings, objects):
    with publish(settings, objects, np.arange(20), start=7) as ahead:
        assert position(settings) == 7
        ahead.advance(12)
        assert position(settings) == 12
        assert ahead.wait_sent()
        (plan,) = connect(settings).cache_status()["plans"]
        assert (plan["position"], plan["items"], plan["next_items"]) == (12, 20, 0)


def test_long_orders_are_made_and_sent_in_pieces(settings, objects):
    order, following = (Chunked(np.arange(count) % 20) for count in (300_000, 250_000))
    with publish(settings, objects, order, next_order=following) as ahead:
        assert ahead.wait_sent(60)
        (plan,) = connect(settings).cache_status()["plans"]
        assert (plan["items"], plan["next_items"]) == (300_000, 250_000)
    assert max(order.asked) <= 1 << 16
    assert sum(following.asked) == 250_000


@promise("An order ends with the process that published it")
def test_a_forked_child_neither_moves_nor_ends_its_parents_plan(settings, objects):
    with publish(settings, objects, np.arange(20)) as ahead:
        assert ahead.wait_sent()
        ahead.advance(3)
        pid = os.fork()
        if pid == 0:
            ahead.advance(9)
            ahead.close()
            del ahead
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert position(settings) == 3
        ahead.advance(4)
        assert position(settings) == 4
        assert connect(settings).cache_status()["plans"]


@promise("An order ends with the process that published it")
def test_workers_of_a_dataloader_leave_the_plan_alone(settings, objects):
    torch_data = pytest.importorskip("torch.utils.data")
    ahead = publish(settings, objects, np.arange(20))

    class Sampler(torch_data.Sampler):
        def __iter__(self):
            for place in range(20):
                ahead.advance(place)
                yield place
            ahead.advance(20)

        def __len__(self):
            return 20

    class Numbers(torch_data.Dataset):
        kept = ahead  # inherited by each worker

        def __getitem__(self, sample):
            return sample

    loader = torch_data.DataLoader(Numbers(), sampler=Sampler(), num_workers=2, multiprocessing_context="fork")
    assert sorted(int(sample) for sample in loader) == list(range(20))
    del loader
    assert position(settings) == 20
    ahead.close()
    assert not list(lookahead_dir(settings.home, settings.ram_dir).iterdir())


@promise("Publishing an order never fails a training or makes it wait")
def test_a_plan_that_the_daemon_does_not_know_is_published_again_without_waiting(settings, objects, monkeypatch):
    with publish(settings, objects, np.arange(20)) as ahead:
        assert ahead.wait_sent()
        (path,) = lookahead_dir(settings.home, settings.ram_dir).iterdir()
        file = PlanFile(path)
        held = threading.Event()
        items = objects.plan_items
        monkeypatch.setattr(objects, "plan_items", lambda samples: held.wait(20) and items(samples))
        file.marked = False  # what a new daemon does
        wait_for(lambda: ahead.advance(5) or ahead._sender.locked())
        ahead.advance(6)
        assert file.position == 6
        assert not file.marked
        held.set()
        wait_for(lambda: file.marked)


def test_closing_ends_the_sending(settings, objects, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    items = objects.plan_items

    def slowly(samples):
        if len(samples) > 1:
            begun.set()
            assert go_on.wait(20)
        return items(samples)

    monkeypatch.setattr(objects, "plan_items", slowly)
    ahead = publish(settings, objects, np.arange(200_000) % 20)
    assert begun.wait(20)
    ahead.close()
    go_on.set()
    assert not ahead.wait_sent()
    assert not connect(settings).cache_status()["plans"]


@promise("Publishing an order never fails a training or makes it wait")
def test_a_home_that_cannot_be_written_or_a_data_set_that_cannot_be_planned_costs_nothing(settings, objects, caplog):
    (settings.home / "run").write_text("in the way")
    with publish(settings, objects, np.arange(20)) as ahead:
        ahead.advance(1)
        assert not ahead.wait_sent()
    other = dataclasses.replace(settings, prefetch=False)
    with publish(other, objects, np.arange(20)) as ahead:
        ahead.advance(1)
        assert not ahead.wait_sent()


def test_a_data_set_that_fails_to_plan_is_said_and_does_not_fail_the_training(settings, objects, caplog, monkeypatch):
    monkeypatch.setattr(objects, "plan_items", lambda samples: samples[1000])
    with caplog.at_level(logging.WARNING), publish(settings, objects, np.arange(20)) as ahead:
        ahead.advance(1)
        assert not ahead.wait_sent()
        ahead.advance(2)
    assert "not published" in caplog.text


def test_local_files_are_not_published(settings, objects, monkeypatch):
    monkeypatch.setattr(objects, "plan_source", lambda: None)
    with publish(settings, objects, np.arange(20)) as ahead:
        ahead.advance(1)
    assert not lookahead_dir(settings.home, settings.ram_dir).exists()
