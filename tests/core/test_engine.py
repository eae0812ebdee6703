"""Tasks on an executor of the user's: order, errors, what is lost, and what a second start finds done."""

from __future__ import annotations

import copyreg
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from datacache.core import engine as engines
from datacache.core.engine import Engine
from datacache.core.errors import CatalogUnavailableError, DatacacheError, UsageError
from datacache.core.parallel import ordered_map


class Note:
    """Notes in a folder which tasks were done, and how often."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def work(self, number: int) -> int:
        with open(self.folder / str(number), "ab") as file:
            file.write(b".")
        return number * number

    def counts(self) -> dict[int, int]:
        return {int(path.name): path.stat().st_size for path in self.folder.iterdir()}


class NoteUntil(Note):
    """Fails at a number while a file is not there."""

    def work(self, number: int) -> int:
        if number == 7 and not (self.folder.parent / "mended").exists():
            raise UsageError("seven")
        return super().work(number)


class NoteLater(Note):
    """Meets at first that the catalog is away: when it is unpickled, and at each number."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._meet("opened")

    def work(self, number: int) -> int:
        self._meet(str(number))
        return super().work(number)

    def _meet(self, what: str) -> None:
        met = self.folder.with_name(f"met {what}")
        if not met.exists():
            met.touch()
            raise CatalogUnavailableError("away")


class Inline(ProcessPoolExecutor):
    """Does calls at once, where they are made; loses the first few."""

    def __init__(self, *, losses: int = 0) -> None:
        self.losses = losses

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.losses:
            self.losses -= 1
            future.set_exception(ConnectionError("the worker has left"))
        else:
            future.set_result(fn(*args, **kwargs))
        return future


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    folder = tmp_path / "noted"
    folder.mkdir()
    return folder


@pytest.fixture
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def open_engine(executor: Any, folder: Path) -> Engine:
    return Engine(executor, width=lambda: 2, folder=folder / "jobs")


def test_processes_that_only_have_what_was_pickled_give_results_in_order(
    pool: ProcessPoolExecutor, tmp_path: Path, noted: Path
) -> None:
    with open_engine(pool, tmp_path) as engine:
        assert list(ordered_map(Note(noted), range(300), processes=engine)) == [n * n for n in range(300)]
    assert Note(noted).counts() == dict.fromkeys(range(300), 1)
    assert not list((tmp_path / "jobs").iterdir())


def test_a_second_start_does_only_what_the_first_did_not(tmp_path: Path, noted: Path) -> None:
    worker = NoteUntil(noted)
    with pytest.raises(UsageError, match="seven"), open_engine(Inline(), tmp_path) as engine:
        list(ordered_map(worker, range(20), processes=engine))
    before = worker.counts()
    assert set(range(7)) <= set(before)
    (tmp_path / "mended").touch()
    with open_engine(Inline(), tmp_path) as engine:
        assert list(ordered_map(worker, range(20), processes=engine)) == [n * n for n in range(20)]
    assert {number: count for number, count in worker.counts().items() if number < 7} == dict.fromkeys(range(7), 1)


class Patient(Future[Any]):
    """Cannot be waited for without an end, nor too often."""

    waits = 0

    def result(self, timeout: float | None = None) -> Any:
        self.waits += 1
        assert timeout is not None or self.done()
        assert self.waits < 100
        return super().result(timeout)


def test_an_engine_is_asked_for_its_processes_while_a_result_is_waited_for(
    tmp_path: Path, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have died when it is asked the second time. One is started after the warning, and the call is done."""
    monkeypatch.setattr(engines, "_LOOK_S", 0.01)
    sent: list[tuple[Future[Any], Callable[[], Any]]] = []
    asked: list[int] = []

    class Dying(Inline):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            sent.append((future := Patient(), lambda: fn(*args, **kwargs)))
            return future

    def width() -> int:
        asked.append(len(sent))
        if len(asked) == 2:
            raise ConnectionError("does not answer now")
        if len(asked) == 3:
            for future, call in sent:
                future.set_result(call())
        return 1

    with Engine(Dying(), width=width, folder=tmp_path / "jobs") as engine:
        assert list(ordered_map(Note(noted), [2], processes=engine)) == [4]
    assert asked[:3] == [0, 1, 1]


@pytest.mark.parametrize("what", ["width", "submit"])
def test_an_engine_that_fails_between_two_results_is_named_and_what_is_done_stays(
    tmp_path: Path, noted: Path, what: str
) -> None:
    worker, alive = Note(noted), True

    class Ending(Inline):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if not alive and what == "submit":
                raise RuntimeError("it was shut down")
            return super().submit(fn, *args, **kwargs)

    def width() -> int:
        if not alive and what == "width":
            raise ConnectionError("nobody listens")
        return 1

    def run() -> None:
        nonlocal alive
        with Engine(Ending(), named="dask://head:1", width=width, folder=tmp_path / "jobs") as engine:
            for _result in ordered_map(worker, range(100), processes=engine):
                alive = False

    with pytest.raises(DatacacheError, match=r"^dask://head:1 has failed: (Connection|Runtime)Error: ") as raised:
        run()
    assert "Run it again" in (raised.value.hint or "")
    assert worker.counts()
    with open_engine(Inline(), tmp_path) as engine:
        assert list(ordered_map(worker, range(100), processes=engine)) == [n * n for n in range(100)]
    assert worker.counts() == dict.fromkeys(range(100), 1)


class OutOfTime(Inline):
    """Its calls end with an error that a wait raises as well."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(TimeoutError("too slow there"))
        return future


def test_calls_that_ran_out_of_time_are_lost_and_not_waited_for(tmp_path: Path, noted: Path) -> None:
    with (
        pytest.raises(DatacacheError, match="lost 4 times: TimeoutError: too slow there"),
        open_engine(OutOfTime(), tmp_path) as engine,
    ):
        list(ordered_map(Note(noted), [1], processes=engine))


class FirstInterrupted(Inline):
    """Is interrupted while it waits for what it was given first; all else is done by then."""

    waited = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.waited:
            return super().submit(fn, *args, **kwargs)
        self.waited = True
        future: Future[Any] = Future()
        future.set_exception(KeyboardInterrupt())
        return future


def test_what_came_before_its_turn_is_not_done_again(tmp_path: Path, noted: Path) -> None:
    worker = Note(noted)
    with pytest.raises(KeyboardInterrupt), open_engine(FirstInterrupted(), tmp_path) as engine:
        list(ordered_map(worker, range(20), processes=engine))
    before = worker.counts()
    assert before
    assert 0 not in before
    with open_engine(Inline(), tmp_path) as engine:
        assert list(ordered_map(worker, range(20), processes=engine)) == [n * n for n in range(20)]
    assert worker.counts() == dict.fromkeys(range(20), 1)


def test_errors_travel_by_no_pickler_that_others_have_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, UsageError, lambda _error: (print, ()))
    travelled = pickle.loads(engines.pickled(UsageError("wrong", hint="Mend it.")))
    assert (type(travelled), travelled.message, travelled.hint) == (UsageError, "wrong", "Mend it.")


def test_what_an_engine_lost_is_sent_again(tmp_path: Path, noted: Path) -> None:
    with open_engine(Inline(losses=3), tmp_path) as engine:
        assert list(ordered_map(Note(noted), range(9), processes=engine)) == [n * n for n in range(9)]


def test_an_engine_that_loses_all_it_is_given_is_named(tmp_path: Path, noted: Path) -> None:
    lost = pytest.raises(DatacacheError, match="lost 4 times: ConnectionError: the worker has left")
    with lost, open_engine(Inline(losses=99), tmp_path) as engine:
        list(ordered_map(Note(noted), range(9), processes=engine))


def test_two_clients_with_the_same_work_are_told_apart(tmp_path: Path, noted: Path) -> None:
    with open_engine(Inline(), tmp_path) as engine:
        first = ordered_map(Note(noted), range(9), processes=engine)
        next(first)
        with open_engine(Inline(), tmp_path) as other, pytest.raises(DatacacheError, match="another process has"):
            list(ordered_map(Note(noted), range(9), processes=other))
        assert list(first) == [n * n for n in range(1, 9)]


def test_a_catalog_that_is_away_is_waited_for_where_tasks_are_done(
    tmp_path: Path, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_AWAY_S", 0.001)
    with open_engine(Inline(), tmp_path) as engine:
        assert list(ordered_map(NoteLater(noted), range(9), processes=engine)) == [n * n for n in range(9)]
    monkeypatch.setattr(engines, "PATIENCE_S", 0.0)
    with pytest.raises(CatalogUnavailableError), open_engine(Inline(), tmp_path) as engine:
        list(ordered_map(NoteLater(noted), range(9, 12), processes=engine))


def test_a_process_with_another_version_does_nothing(
    tmp_path: Path, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere(Inline):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            with monkeypatch.context() as there:
                there.setattr(engines, "_VERSION", "9.9")
                return super().submit(fn, *args, **kwargs)

    with pytest.raises(UsageError, match=r"has datacache 9\.9, and this one"), open_engine(Elsewhere(), tmp_path) as on:
        list(ordered_map(Note(noted), range(9), processes=on))
    assert Note(noted).counts() == {}
