"""The engine `queue` on both databases: what is done where, who may die, and what is not unpickled."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import operator
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datacache import api
from datacache.catalog.base import Catalog
from datacache.catalog.open import open_catalog_url, open_task_store
from datacache.catalog.tasks.base import NewTask, TaskStore
from datacache.core import engine as engines
from datacache.core.engine import Engine, _array, do_tasks, pickled
from datacache.core.errors import CatalogUnavailableError, DatacacheError, TasksError, UsageError
from datacache.core.parallel import ordered_map
from datacache.executors.open import open_engine
from datacache.executors.queue import client, processes, records, trusted, worker
from datacache.executors.queue.client import QueueExecutor
from datacache.executors.queue.processes import run_workers
from datacache.executors.queue.worker import Ended, ParcelDone, QueueWorker, WorkPlan
from datacache.settings import Settings
from dataset_cli.demo.faces import draw_faces
from tests.imports.conftest import Request, WebServer
from tests.promises import promise
from tests.servers import Mongod

ROOT = Path(__file__).resolve().parents[2]
_fork = multiprocessing.get_context("fork")


class Square:
    def work(self, number: int) -> int:
        return number * number


class Waits:
    """Waits for a file, and makes another one as it begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def work(self, number: int) -> int:
        (self.folder / "begun").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        return number


class Raises:
    def work(self, number: int) -> int:
        raise UsageError(f"not {number}", hint="another")


@pytest.fixture(params=["sqlite", "mongodb"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a catalog that is new."""
    if request.param == "mongodb":
        url: str = request.getfixturevalue("mongod").database_url()
        return url
    return f"sqlite:///{tmp_path}/shared/catalog.db"


@pytest.fixture
def shared(place: str, settings: Settings, tmp_path: Path) -> Settings:
    return replace(settings, catalog=place, objects=f"file://{tmp_path}/objects")


@pytest.fixture(autouse=True)
def _our_classes_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {f"{kind.__module__}.{kind.__name__}" for kind in (Square, Waits, Raises)}
    monkeypatch.setattr(trusted, "_OURS", trusted._OURS | ours)


@pytest.fixture
def catalog(place: str) -> Iterator[Catalog]:
    with contextlib.closing(open_catalog_url(place)) as opened:
        yield opened


@pytest.fixture
def store(place: str) -> Iterator[TaskStore]:
    with contextlib.closing(open_task_store(place)) as opened:
        yield opened


@pytest.fixture
def executor(place: str) -> Iterator[QueueExecutor]:
    made = QueueExecutor(open_catalog_url(place), open_task_store(place), "job")
    yield made
    made.close(done=True)


@pytest.fixture
def work(catalog: Catalog, store: TaskStore) -> Iterator[Callable[..., QueueWorker]]:
    """Has a thread work as a process would."""
    threads: list[tuple[threading.Thread, QueueWorker]] = []

    def start(**plan: Any) -> QueueWorker:
        made = QueueWorker(catalog, store, f"w{len(threads)}", WorkPlan(**plan))
        thread = threading.Thread(target=made.run, args=(lambda _done: None,))
        thread.start()
        threads.append((thread, made))
        return made

    yield start
    for thread, made in threads:
        made.stop.set()
        thread.join()


def engine_of(executor: QueueExecutor, folder: Path) -> Engine:
    return Engine(executor, width=executor.width, folder=folder / "jobs", loads=trusted.loads)


def send(executor: QueueExecutor, code: object, *tasks: object) -> Any:
    """The results of tasks, which are one parcel, or their error."""
    return take(submit(executor, code, *tasks))


def submit(executor: QueueExecutor, code: object, *tasks: object) -> Any:
    packed = pickle.dumps(code)
    return executor.submit(do_tasks, key_of(packed), packed, [pickle.dumps(task) for task in tasks])


def key_of(packed: bytes) -> str:
    from datacache import __version__

    return f"{__version__} {worker.xxh3_128_hexdigest(packed)}"


def take(future: Any) -> Any:
    results, error, _took_s = trusted.loads(future.result(60))
    if error is not None:
        raise error
    return [trusted.loads(result) for result in results]


def test_tasks_are_done_by_workers_and_come_back_in_order(
    executor: QueueExecutor, catalog: Catalog, store: TaskStore, work: Callable[..., QueueWorker], tmp_path: Path
) -> None:
    for _ in range(2):
        work()
    with engine_of(executor, tmp_path) as engine:
        assert list(ordered_map(Square(), range(500), processes=engine)) == [n * n for n in range(500)]
    assert executor.width() == 2
    with pytest.raises(UsageError, match="not 3") as failed:
        send(executor, Raises(), 3)
    assert failed.value.hint == "another"
    executor.shutdown()  # what was taken is removed by now
    queue = store.queue("work:job")
    assert queue is not None
    assert store.progress(queue) == []
    kept = [key for key, _text in catalog.documents(records.BYTES)]
    assert all(key.startswith("job/code/") for key in kept), kept


def test_large_parcels_travel_in_pieces(catalog: Catalog) -> None:
    data = os.urandom(7 * 2**20)
    for _again in range(2):
        records.put_bytes(catalog, "job/large", data)
    assert len(catalog.documents(records.BYTES)) == 3
    assert records.get_bytes(catalog, "job/large") == data
    catalog.remove_document(records.BYTES, "job/large/1")
    assert records.get_bytes(catalog, "job/large") is None


class Evil:
    """Pickled as a call."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


def evils(mark: Path) -> dict[str, bytes]:
    """Pickles that would make a file, or do worse."""
    touch = f"touch {mark}"
    dotted = b"\x80\x04\x8c\x13datacache.core.disk\x8c\x09os.system\x93\x8c" + bytes([len(touch)])
    return {
        "posix.system": pickle.dumps(Evil(os.system, touch)),
        "builtins.eval": pickle.dumps(Evil(eval, f"open({str(mark)!r}, 'w')")),
        "functools.partial": pickle.dumps(functools.partial(os.system, touch)),
        "subprocess.Popen": pickle.dumps(Evil(subprocess.Popen, ["touch", str(mark)])),
        "operator.attrgetter": pickle.dumps(operator.attrgetter("x")),
        "builtins.getattr": pickle.dumps(Evil(getattr, Path("x"), "touch")),
        "datacache.core.disk.os.system": dotted + touch.encode() + b"\x85R.",
        "datacache.settings.load_settings": pickle.dumps(Evil(api.convert.__globals__["load_settings"])),
        "datacache.settings.Settings": pickle.dumps(Evil(Settings)),
        "datacache.executors.queue.worker.Enum": b"cdatacache.executors.queue.worker\nEnum\n.",
        "datacache.executors.queue.worker.QueueWorker": pickle.dumps(QueueWorker),
        "numpy._core.numeric._frombuffer": _named("numpy._core.numeric", "_frombuffer"),
        "numpy.dtype": _named("numpy", "dtype"),
    }


def _word(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _named(module: str, name: str, then: bytes = b"") -> bytes:
    """A pickle that names something, and does what `then` says with it."""
    return b"\x80\x04" + _word(module) + _word(name) + b"\x93" + then + b"."


_CHANGE = b"N}" + _word("mark") + b"K\x01s\x86b"
"""Sets an attribute of what is named before it, by `setattr`."""
_UPDATE = b"}" + _word("mark") + b"K\x01sb"
"""Adds to its `__dict__`."""


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("module", "name", "then"),
    [
        *((f"datacache.{module}", name, change) for module, name in (
            ("core.concurrency", "PerProcess"),
            ("core.errors", "UsageError"),
            ("core.errors", "_rebuild"),
            ("executors.queue.worker", "Ended"),
            ("executors.queue.worker", "WorkPlan"),
            ("settings", "_elsewhere"),
        ) for change in (_CHANGE, _UPDATE)),
        ("pathlib", "Path", _CHANGE),
        ("collections", "Counter", _CHANGE),
        ("datacache.executors.queue.worker", "Ended", _word("idle") + b"\x85R" + _UPDATE),
        ("datacache.settings", "_elsewhere", _word("") * 2 + b"\x86R" + _UPDATE),
        ("datacache.core.concurrency", "PerProcess", b"N\x85R}" + _word("get") + b"Nsb"),
        ("datacache.core.concurrency", "PerProcess", b"N\x85R)R"),
    ],
)  # fmt: skip
def test_a_pickle_that_changes_what_it_names_is_refused(
    module: str, name: str, then: bytes, shared: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATACACHE_CATALOG", shared.catalog)
    named = getattr(importlib.import_module(module), name)
    with pytest.raises(trusted.UntrustedPickleError):
        trusted.loads(_named(module, name, then))
    assert "mark" not in vars(named)
    assert not hasattr(Ended.IDLE, "mark")


def test_arrays_and_their_numbers_travel_as_bytes() -> None:
    for value in (
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        np.zeros((0, 4), np.float32),
        np.array(["a", "bc"]),
        np.float32(1.5),
        np.datetime64("2026-01-31"),
    ):
        found = trusted.loads(pickled(value))
        assert type(found) is type(value)
        np.testing.assert_array_equal(found, value)
        assert found.dtype == value.dtype
    for refused in (np.array([object()]), pickle.dumps(np.zeros(3))):
        with pytest.raises(trusted.UntrustedPickleError):
            trusted.loads(refused if isinstance(refused, bytes) else pickled(refused))
    with pytest.raises(trusted.UntrustedPickleError):
        trusted.loads(pickle.dumps(Evil(_array, "O", (1,), b"12345678")))


def test_values_come_back_as_they_were() -> None:
    for value in (Ended.IDLE, WorkPlan("a", max_idle_s=1.5), Path("a/b"), Counter("aab"), OrderedDict(a=1), {1: {2}}):
        found = trusted.loads(pickled(value))
        assert found == value
        assert type(found) is type(value)
    failed = trusted.loads(pickled([UsageError("no", hint="so"), KeyError("a")]))
    assert [(type(each), str(each)) for each in failed] == [
        (UsageError, str(UsageError("no", hint="so"))),
        (KeyError, "'a'"),
    ]


@promise("Workers of the queue unpickle values, and never code")
@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_pickle_that_would_run_code_is_refused_and_named_and_the_worker_lives(
    executor: QueueExecutor, catalog: Catalog, work: Callable[..., QueueWorker], tmp_path: Path
) -> None:
    mark = tmp_path / "pwned"
    work()
    for name, evil in evils(mark).items():
        refused = pytest.raises(trusted.UntrustedPickleError, match=rf"names {name}, which may not travel")
        with refused:  # as code
            take(executor.submit(do_tasks, key_of(evil), evil, [pickle.dumps(1)]))
        square = pickle.dumps(Square())
        with refused:  # as a task
            take(executor.submit(do_tasks, key_of(square), square, [evil]))
        with refused:  # as an answer
            trusted.loads(evil)
    for number, packed in enumerate(
        [*evils(mark).values(), b"", b"nonsense", pickle.dumps([1]), pickle.dumps(("k", 1))]
    ):
        future = executor._send("key", b"code", [str(number).encode()])
        (waiting,) = executor._futures
        records.remove_bytes(catalog, f"job/{waiting}/tasks")  # as the parcel itself
        records.put_bytes(catalog, f"job/{waiting}/tasks", packed)
        with pytest.raises(DatacacheError):
            take(future)
    assert send(executor, Square(), 4) == [16]
    assert not mark.exists()


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_wrong_answer_is_refused_by_the_client_and_not_kept(
    executor: QueueExecutor, work: Callable[..., QueueWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "pwned"
    evil = evils(mark)["posix.system"]
    monkeypatch.setattr(worker, "do_tasks", lambda *_arguments: pickle.dumps(([evil], None, 0.0)))
    work()
    with pytest.raises(trusted.UntrustedPickleError), engine_of(executor, tmp_path) as engine:
        list(ordered_map(Square(), range(3), processes=engine))
    monkeypatch.undo()
    assert not mark.exists()
    assert all(b"posix" not in path.read_bytes() for path in (tmp_path / "jobs").iterdir())


def test_what_a_dead_worker_has_is_done_by_another(
    place: str, store: TaskStore, work: Callable[..., QueueWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LEASE_S", 0.2)
    with contextlib.closing(_Closing(place)) as opened:
        future = submit(opened.executor, Square(), 5)
        queue = store.queue("work:job")
        assert queue is not None
        assert store.lease(queue, "dead", "claim", lease_s=0.2, max_lost=9) is not None
        work()
        assert take(future) == [25]


@pytest.mark.slow
def test_a_database_that_is_away_for_a_while_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LEASE_S", 1.0)
    with Mongod(tmp_path / "own") as server:
        url = server.database_url()
        catalog, store = open_catalog_url(url), open_task_store(url)
        working = QueueWorker(catalog, store, "w", WorkPlan(job="job"))
        ended: list[Ended] = []
        thread = threading.Thread(target=lambda: ended.append(working.run(lambda _done: None)))
        thread.start()
        with contextlib.closing(_Closing(url)) as opened:
            assert send(opened.executor, Square(), 1) == [1]
            with server.away(stopped=False):
                later: list[Any] = []
                sender = threading.Thread(target=lambda: later.append(send(opened.executor, Square(), 2)))
                sender.start()
                sender.join(1)  # it has met that nobody answers
            sender.join(60)
            assert later == [[4]]
        thread.join(60)
        assert ended == [Ended.FAILED]
        store.close()
        catalog.close()


def test_tasks_at_which_workers_die_fail_and_say_so(
    place: str, store: TaskStore, work: Callable[..., QueueWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LEASE_S", 0.05)
    with contextlib.closing(_Closing(place)) as opened:
        future = submit(opened.executor, Square(), 5)
        queue = store.queue("work:job")
        assert queue is not None
        for number in range(client.MAX_LOST):
            while store.lease(queue, "dead", f"{number}", lease_s=0.05, max_lost=client.MAX_LOST) is None:
                if store.tasks(queue, "doing") == []:
                    break
        work()
        with pytest.raises(DatacacheError, match="tasks failed on the queue: the lease of dead expired"):
            take(future)


class _Closing:
    """An executor that ends with its test."""

    def __init__(self, place: str, name: str = "job") -> None:
        self.executor = QueueExecutor(open_catalog_url(place), open_task_store(place), name)

    def close(self) -> None:
        self.executor.close(done=False)


def test_a_job_has_one_client_and_the_next_finds_what_was_done_after_it_died(
    place: str, catalog: Catalog, store: TaskStore, work: Callable[..., QueueWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LOOK_S", 0.1)
    monkeypatch.setattr(records, "_TAKE_S", 0.3)
    with contextlib.closing(_Closing(place)) as first:
        with pytest.raises(TasksError, match="does the job job now"):
            QueueExecutor(catalog, store, "job")
        first.executor.shutdown()  # as if killed: its lease is not renewed
        submit(first.executor, Square(), 7)
        submit(first.executor, Square(), 8)
        once = QueueWorker(catalog, store, "w", WorkPlan(once=True))
        assert once.run(lambda _done: None) is Ended.ONCE
        monkeypatch.setattr(records, "JOB_LEASE_S", 0.3)
        first.executor._look()
        submit(first.executor, Square(), 9)  # nobody asks for it again
        second = _Closing(place)
        with contextlib.closing(second):
            queue = store.queue("work:job")
            assert queue is not None
            assert [task.state for task in store.progress(queue)] == ["done"]
            assert send(second.executor, Square(), 7) == [49]
            future = submit(second.executor, Square(), 8)
            work(job="job")
            assert take(future) == [64]
            with pytest.raises(TasksError, match="taken over or removed"):
                first.executor._look()
            first.close()
            assert store.queue("work:job") == queue  # it is the second's


def test_clients_and_workers_from_before_the_clock_was_set_back_are_gone(catalog: Catalog, store: TaskStore) -> None:
    late_s = catalog.now_s() + 1e6
    text = json.dumps({"job": "", "token": "t", "by": "b", "state": "running", "until_s": late_s})
    for kind, name in ((records.JOBS, "job"), (records.JOBS, "other"), (records.WORKERS, "w")):
        assert catalog.set_document(kind, name, text, old=None)
    assert records.running(catalog) == []
    assert records.count_workers(catalog, "job") == 0
    records.take_job(catalog, "job", "me", "1")
    records.forget_old(catalog, store)
    assert records.running(catalog) == list(records.jobs(catalog)) == ["job"]
    assert catalog.documents(records.WORKERS) == []


def test_parcels_of_a_client_that_is_gone_are_not_done_and_then_removed(
    place: str, catalog: Catalog, store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "JOB_LEASE_S", -1.0)
    gone = QueueExecutor(open_catalog_url(place), open_task_store(place), "gone")
    gone.shutdown()
    submit(gone, Square(), 7)
    done: list[ParcelDone] = []
    for _again in range(2):
        assert QueueWorker(catalog, store, "w", WorkPlan(max_idle_s=0.0)).run(done.append) is Ended.IDLE
        assert not done
        assert (store.queue("work:gone") is None) == bool(_again)
        assert (catalog.documents(records.BYTES) == []) == bool(_again)
        monkeypatch.setattr(records, "KEPT_S", 0.0)
    assert catalog.documents(records.JOBS) == []


def test_a_client_that_is_cut_off_as_it_takes_its_job_has_it(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_AWAY_S", 0.001)
    monkeypatch.setattr(records, "_TAKE_S", -1.0)  # an error: it waits for nobody
    catalog, store = open_catalog_url(place), open_task_store(place)
    lost: list[str] = []

    def cut_off(owner: object, name: str) -> None:
        call = getattr(owner, name)

        def once(*arguments: Any, **options: Any) -> Any:
            done = call(*arguments, **options)
            if name not in lost:
                lost.append(name)
                raise CatalogUnavailableError("the answer was lost")
            return done

        monkeypatch.setattr(owner, name, once)

    for name in ("create", "make", "drop"):
        cut_off(store, name)
    cut_off(catalog, "set_document")
    QueueExecutor(catalog, store, "job").close(done=True)
    assert sorted(lost) == ["create", "drop", "make", "set_document"]


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_client_that_was_stopped_for_long_waits_when_it_then_finds_the_database_away(
    executor: QueueExecutor, work: Callable[..., QueueWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PATIENCE_S", 0.05)
    monkeypatch.setattr(engines, "PATIENCE_S", 0.05)
    monkeypatch.setattr(engines, "_AWAY_S", 0.001)
    settle, stopped = executor._settle, ["watching", "calling"]

    def meet(what: str) -> bool:
        if what in stopped:
            stopped.remove(what)
            time.sleep(0.2)
            raise CatalogUnavailableError("the connection was closed meanwhile")
        return True

    monkeypatch.setattr(executor, "_settle", lambda: meet("watching") and settle())
    engines.patiently(lambda: meet("calling"))
    work()
    assert send(executor, Square(), 5) == [25]
    assert not stopped


def test_a_job_ends_also_where_the_database_is_away_at_that_moment(
    place: str, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_AWAY_S", 0.01)
    forget, away = records.forget_job, [CatalogUnavailableError("away"), CatalogUnavailableError("still away")]

    def forget_later(*arguments: Any) -> None:
        if away:
            raise away.pop()
        forget(*arguments)

    monkeypatch.setattr(records, "forget_job", forget_later)
    _Closing(place).close()
    assert not away
    assert records.jobs(catalog)["job"].state == records.FAILED


def test_workers_of_a_job_that_nobody_takes_up_end(
    place: str, catalog: Catalog, store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = _Closing(place, "gone")
    gone.executor.shutdown()
    working = QueueWorker(catalog, store, "w", WorkPlan(job="gone"))
    ended: list[Ended] = []
    thread = threading.Thread(target=lambda: ended.append(working.run(lambda _done: None)))
    thread.start()
    try:
        while not working._seen:
            assert thread.is_alive()
            time.sleep(0.01)
        monkeypatch.setattr(records, "KEPT_S", -2 * records.JOB_LEASE_S)
        records.forget_old(catalog, store)
        thread.join(60)
        assert ended == [Ended.FAILED]
    finally:
        working.stop.set()
        thread.join()
        gone.close()


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_queue_that_no_client_has_written_keeps_no_worker_from_others(
    executor: QueueExecutor, catalog: Catalog, store: TaskStore, work: Callable[..., QueueWorker]
) -> None:
    for number, parameters in enumerate(("", "[]", "{}", '{"lease_s": NaN, "max_lost": 1}', '{"lease_s": 1e999}')):
        records.take_job(catalog, f"odd{number}", "somebody", f"{number}")
        made = store.create(records.queue_name(f"odd{number}"), 1 << 61, parameters, b"")
        store.make(made, "claim", list)
        store.add(made, [NewTask(0, 1, 1, "a task", 0, 1)])
    for until in ("1" + 400 * "0", "NaN", "[]"):
        text = f'{{"job": "", "token": "t", "by": "b", "state": "running", "until_s": {until}}}'
        for kind in (records.JOBS, records.WORKERS):
            assert catalog.set_document(kind, f"odd-{until[:3]}", text, old=None)
    work()
    for value in range(5):
        assert send(executor, Square(), value) == [value * value]


def test_a_worker_until_idle_waits_for_the_next_parcels_of_a_command_that_goes_on(
    executor: QueueExecutor, catalog: Catalog, store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_JOBS_S", 0.0)
    done: list[ParcelDone] = []
    runner = QueueWorker(catalog, store, "w", WorkPlan(max_idle_s=0.0))
    sent = [submit(executor, Square(), 2)]

    def wait(_pause_s: float) -> bool:
        if len(done) == len(sent) == 1:
            sent.append(submit(executor, Square(), 3))
        elif all(each.done() for each in sent):
            executor.shutdown()
            records.renew_job(catalog, executor._job, records.DONE)
        else:
            time.sleep(0.01)
        return False

    monkeypatch.setattr(runner.stop, "wait", wait)
    assert runner.run(done.append) is Ended.IDLE
    assert [take(each) for each in sent] == [[4], [9]]


def test_a_job_that_was_removed_ends_its_client(place: str, store: TaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LOOK_S", 0.05)
    with contextlib.closing(_Closing(place)) as opened:
        future = submit(opened.executor, Square(), 5)
        store.remove("work:job")
        with pytest.raises(TasksError, match="was removed"):
            future.result(60)
        with pytest.raises(TasksError, match="was removed"):
            submit(opened.executor, Square(), 6)


def test_a_parcel_that_is_gone_is_reported_as_lost(
    place: str, store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LOOK_S", 0.05)
    with contextlib.closing(_Closing(place)) as opened:
        future = submit(opened.executor, Square(), 5)
        queue = store.queue("work:job")
        assert queue is not None
        store.drop(queue, [task.number for task in store.progress(queue)])
        with pytest.raises(TasksError, match="gone from the queue"):
            future.result(60)


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_job_without_workers_is_named_with_the_way_to_start_some(
    shared: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with open_engine("queue://job", shared) as engine:
        assert engine.width() == 1
    assert (
        f"queue://job has no worker; the command waits until one is there: dsctl tasks work"
        f" (with the catalog {shared.catalog})"
    ) in caplog.text


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_worker_that_is_told_to_stop_gives_back_what_takes_too_long(
    executor: QueueExecutor,
    shared: Settings,
    store: TaskStore,
    work: Callable[..., QueueWorker],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(worker, "FINISH_S", 0.1)
    future = submit(executor, Waits(tmp_path), 3)
    parent = _fork.Process(target=lambda: sys.exit(_run(shared)))
    parent.start()
    try:
        while not (tmp_path / "begun").exists():
            assert parent.is_alive()
            time.sleep(0.01)
        assert parent.pid is not None
        os.kill(parent.pid, signal.SIGTERM)
        parent.join(60)
        assert parent.exitcode == 7
    finally:
        parent.kill()
        parent.join()
    queue = store.queue("work:job")
    assert queue is not None
    assert [task.state for task in store.progress(queue)] == ["todo"]
    (tmp_path / "go").touch()
    work()
    assert take(future) == [3]


def _run(settings: Settings) -> int:
    return 7 if run_workers(settings, WorkPlan(), 1, lambda _done: None) is Ended.STOPPED else 8


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_worker_process_that_is_killed_is_followed_by_another(
    shared: Settings, executor: QueueExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "_AGAIN_S", 0.01)
    parent = _fork.Process(target=lambda: sys.exit(_run(shared)))
    parent.start()
    try:
        future = submit(executor, Waits(tmp_path), 3)
        queue = executor._store.queue("work:job")
        assert queue is not None
        while not (doing := executor._store.tasks(queue, "doing")):
            assert parent.is_alive()
            time.sleep(0.01)
        (tmp_path / "go").touch()
        os.kill(int(doing[0].owner.split(":")[1]), signal.SIGKILL)
        assert parent.pid is not None
        if executor._store.tasks(queue, "doing"):  # else it was done before it was killed
            lease = doing[0]
            executor._store.drop(queue, [lease.number])  # do not wait for the lease to end
            submit(executor, Waits(tmp_path), 3)
        assert take(future) == [3]
        os.kill(parent.pid, signal.SIGTERM)
        parent.join(60)
        assert parent.exitcode == 7
    finally:
        parent.kill()
        parent.join()


# --- real processes -------------------------------------------------------------------------------------------------


class Processes:
    """Commands and scripts as processes of their own, which end with the test."""

    def __init__(self, settings: Settings) -> None:
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "DATACACHE_HOME": str(settings.home),
            "DATACACHE_CATALOG": settings.catalog,
            "DATACACHE_OBJECTS": settings.objects,
        }
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, *arguments: str) -> subprocess.Popen[str]:
        words = (
            [sys.executable, *arguments] if arguments[0] == "-c" else [sys.executable, "-m", "dataset_cli", *arguments]
        )
        process = subprocess.Popen(words, env=self.environment, text=True, stdout=-1, stderr=-1, start_new_session=True)
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def run(shared: Settings) -> Iterator[Processes]:
    with contextlib.closing(Processes(shared)) as started:
        yield started


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faces")
    draw_faces(folder, count=150)
    return folder


def convert(settings: Settings, name: str, on: str | None) -> str:
    how: dict[str, Any] = {"processes": 1} if on is None else {"on": on}
    done = api.convert(
        "faces", to="yolo", name=name, split="train=0.5,val=0.5", resize="32x32", settings=settings, **how
    )
    return done.record.id


@promise("A conversion on the queue gives the same snapshot, and its workers end with it")
def test_a_conversion_on_the_queue_gives_the_same_snapshot_and_its_workers_end_with_it(
    shared: Settings, faces: Path, run: Processes
) -> None:
    api.create_snapshot("faces", faces.as_uri(), settings=shared)
    workers = [run("tasks", "work", "--job", "night", "--json") for _ in range(2)]
    there = convert(shared, "there", "queue://night")
    assert there == convert(shared, "here", None)
    for each in workers:
        out, err = each.communicate(timeout=60)
        assert each.returncode == 0, err
        assert '"ended": "done"' in out
    failed = run("tasks", "work", "--job", "morning")
    QueueExecutor(open_catalog_url(shared.catalog), open_task_store(shared.catalog), "morning").close(done=False)
    out, err = failed.communicate(timeout=60)
    assert (failed.returncode, out) == (1, "the job has failed: 0 tasks in 0 parcels\n"), err
    with pytest.raises(UsageError, match="cannot name a job"):
        convert(shared, "x", "queue://a/b")


CLIENT = """
from datacache import api
from datacache.executors.open import open_engine
from datacache.executors.queue import client, records
client.LEASE_S, records.JOB_LEASE_S, client._LOOK_S = 1.0, 1.5, 0.3
done = api.convert("faces", to="yolo", name="there", split="train=0.5,val=0.5", resize="32x32", on="queue://night")
print(done.record.id)
"""


@promise("Workers and the client of the queue may be killed at any time: a second start goes on and gives the same")
def test_workers_and_the_client_are_killed_and_a_second_start_gives_the_same(
    shared: Settings, faces: Path, run: Processes, store: TaskStore
) -> None:
    api.create_snapshot("faces", faces.as_uri(), settings=shared)
    here = convert(shared, "here", None)
    first = run("-c", CLIENT)
    once = run("tasks", "work", "--once")  # something is done, and not all
    assert once.wait(60) == 0
    doomed = [run("tasks", "work") for _ in range(2)]
    assert api.list_tasks(shared) == []
    queue = store.queue("work:night")
    assert queue is not None
    while not store.tasks(queue, "doing") and first.poll() is None:
        time.sleep(0.005)
    for each in (*doomed, first):
        os.kill(each.pid, signal.SIGKILL)
        each.wait()
    again, worker_again = run("-c", CLIENT), run("tasks", "work", "--processes", "2")
    out, err = again.communicate(timeout=120)
    assert out.strip() == here, err
    worker_again.terminate()
    assert worker_again.wait(60) == 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_workers_and_clients_that_are_killed_all_the_time_give_the_same(
    shared: Settings, faces: Path, run: Processes, seed: int
) -> None:
    draw = random.Random(seed)
    api.create_snapshot("faces", faces.as_uri(), settings=shared)
    here = convert(shared, "here", None)
    working, sent, kills, found = run("tasks", "work"), run("-c", CLIENT), 0, ""
    while not found:
        try:
            out, err = sent.communicate(timeout=draw.uniform(0.2, 4.0))
            assert sent.returncode == 0, err
            found = out.strip()
        except subprocess.TimeoutExpired:
            dies = draw.choice((sent, working) if kills < 10 else (working,))
            if kills < 15:
                os.killpg(dies.pid, signal.SIGKILL)
                dies.communicate()
                kills += 1
                if dies is sent:
                    sent = run("-c", CLIENT)
                else:
                    working = run("tasks", "work", "--processes", "2")
    assert found == here


@promise("An import of JSON lines gives the same snapshot, and names the same failures, wherever they are fetched")
def test_a_worker_that_is_killed_as_it_fetches_costs_an_import_nothing(
    shared: Settings, run: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LEASE_S", 3.0)
    monkeypatch.setattr(client, "_LOOK_S", 0.3)
    run.environment["DATACACHE_ALLOW_NETWORK"] = "127.0.0.0/8"
    here = replace(shared, allow_network=("127.0.0.0/8",))
    with contextlib.closing(WebServer()) as web:
        urls = [web.add(f"/{n}.jpg", b"%d" % n) for n in range(600)]
        file = tmp_path / "lines.jsonl"
        file.write_text("".join(f'{{"url": "{url}", "label": "x"}}\n' for url in urls))
        expected = api.import_jsonl("here", file, settings=here).record.id
        doomed = run("tasks", "work")

        def kill(request: Request) -> None:
            if web.odd.pop("/300.jpg", None):
                os.kill(doomed.pid, signal.SIGKILL)
                run("tasks", "work")
            request.close_connection = True

        web.on("/300.jpg", kill)
        assert api.import_jsonl("there", file, on="queue", settings=here).record.id == expected
    assert doomed.wait(60) == -signal.SIGKILL


def test_a_worker_of_one_job_that_is_stopped_has_not_done_its_part(run: Processes, catalog: Catalog) -> None:
    stopped = run("tasks", "work", "--job", "night")
    while not records.count_workers(catalog, "night"):
        assert stopped.poll() is None, stopped.communicate()
        time.sleep(0.05)
    stopped.terminate()
    assert stopped.wait(60) == 143  # SIGTERM's: Kubernetes has another pod do it
    assert run("tasks", "work", "--job", "night", "--until-idle").wait(60) == 1  # no client came
