"""Test what is tried again, for how long, and that a broken listing goes on where it broke."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from datacache.core.errors import (
    ObjectChangedError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreUnavailableError,
    StoreUnreachableError,
)
from datacache.core.ids import ObjectRef
from datacache.settings import Settings, StoreOptions
from datacache.store.base import ObjectInfo
from datacache.store.open import open_store
from datacache.store.retry import LONGEST_WAIT_S, TELL_AFTER_S, AskedAt, Backoff, MetAddresses, RetryingStore, retry
from tests.memory import MemoryStore
from tests.promises import promise
from tests.servers import free_port

_names = itertools.count()


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Flaky(MemoryStore):
    """A store that is unavailable for the next `failures` calls, or after `break_after` pages of a
    listing."""

    def __init__(self) -> None:
        super().__init__(f"memory://flaky-{next(_names)}")
        self.failures = 0
        self.error: Exception = StoreUnavailableError("down")
        self.calls = 0
        self.break_after: list[int] = []
        self.starts: list[str] = []

    def _maybe(self) -> None:
        self.calls += 1
        if self.failures:
            self.failures -= 1
            raise self.error

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[list[ObjectInfo]]:
        self.starts.append(start_after)
        self._maybe()
        pages = self.break_after.pop(0) if self.break_after else -1
        for number, page in enumerate(super().list(prefix, start_after=start_after)):
            if number == pages:
                raise self.error
            yield page

    def head(self, key: str) -> ObjectInfo:
        self._maybe()
        return super().head(key)

    def read(self, ref: ObjectRef, start: int, stop: int) -> bytes:
        self._maybe()
        return super().read(ref, start, stop)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        self._maybe()
        return super().put(key, data)

    def delete(self, key: str) -> None:
        self._maybe()
        super().delete(key)


@pytest.fixture
def flaky() -> Flaky:
    return Flaky()


@pytest.fixture
def store(flaky: Flaky) -> RetryingStore:
    return RetryingStore(flaky, 60.0, sleep=lambda _seconds: None)


def test_every_operation_is_tried_again_while_the_store_is_unavailable(flaky: Flaky, store: RetryingStore) -> None:
    flaky.failures = 3
    ref = store.put("a", b"hello").ref(store.url)
    flaky.failures = 3
    assert store.head("a").size_bytes == 5
    flaky.failures = 3
    assert store.read(ref, 0, 5) == b"hello"
    flaky.failures = 3
    assert [o.key for page in store.list("") for o in page] == ["a"]
    flaky.failures = 3
    store.delete("a")
    assert [o.key for page in store.list("") for o in page] == []


@pytest.mark.parametrize("error", [ObjectChangedError("changed"), StoreAccessError("denied"), ValueError("bug")])
def test_an_answer_is_not_asked_for_twice(flaky: Flaky, store: RetryingStore, error: Exception) -> None:
    flaky.failures, flaky.error = 1, error
    with pytest.raises(type(error)):
        store.head("a")
    assert flaky.calls == 1


def test_the_last_error_is_raised_once_the_deadline_is_over() -> None:
    clock = Clock()
    backoff = Backoff(60.0, clock=clock, jitter=lambda: 1.0)
    error = StoreUnavailableError("down")

    def wait_for_ever() -> None:
        while True:
            clock.sleep(backoff.wait_s(error))

    with pytest.raises(StoreUnavailableError) as caught:
        wait_for_ever()
    assert caught.value is error
    assert clock.now == pytest.approx(60.0)  # the last try was right at the deadline
    assert clock.slept[:-1] == sorted(clock.slept[:-1])
    assert max(clock.slept) == LONGEST_WAIT_S


def test_waits_are_drawn_from_the_whole_interval() -> None:
    for share in (0.0, 0.25, 1.0):
        backoff = Backoff(60.0, clock=Clock(), jitter=lambda share=share: share)  # type: ignore[misc]
        waits = [backoff.wait_s(StoreUnavailableError("down")) for _ in range(3)]
        assert waits == [0.05 * share, 0.1 * share, 0.2 * share]


def test_a_call_is_made_until_it_is_answered() -> None:
    outcomes = iter(["fail", "fail", "fail", "fail", "done"])
    slept: list[float] = []

    def call() -> str:
        outcome = next(outcomes)
        if outcome == "fail":
            raise StoreUnavailableError("down")
        return outcome

    assert retry(call, 60.0, sleep=slept.append) == "done"
    assert len(slept) == 4


def test_a_call_that_takes_long_tells_once_why_and_how_much_longer() -> None:
    clock = Clock()
    told: list[tuple[str, float, float]] = []
    backoff = Backoff(
        30.0, clock=clock, jitter=lambda: 1.0, tell=lambda exc, left: told.append((exc.message, left, clock.now))
    )
    with suppress(StoreUnavailableError):
        while True:
            clock.sleep(backoff.wait_s(StoreUnavailableError("down")))
    [(message, left, when)] = told
    assert message == "down"
    assert when <= TELL_AFTER_S
    assert left == 30.0 - when


@promise("A caller that waits for a silent store is told after two seconds, once")
def test_an_outage_is_logged_once_and_the_next_one_again(
    flaky: Flaky, store: RetryingStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datacache.store.retry.TELL_AFTER_S", 0.0)
    flaky.error = StoreUnavailableError("it refuses connections")
    flaky.put("a", b"")
    for _ in range(2):
        caplog.clear()
        flaky.failures = 4
        store.head("a")
        assert [record.getMessage() for record in caplog.records] == [
            "it refuses connections; it is asked again for 60 s"
        ]
    caplog.clear()
    store.head("a")
    assert caplog.records == []


def test_a_broken_listing_goes_on_after_the_last_key_it_gave(flaky: Flaky, store: RetryingStore) -> None:
    for number in range(4500):
        flaky.put(f"{number:05d}", b"")
    flaky.break_after = [2, 0, 1]
    keys = [o.key for page in store.list("") for o in page]
    assert keys == [f"{number:05d}" for number in range(4500)]
    assert flaky.starts == ["", "01999", "01999", "02999"]


def test_an_unsorted_listing_that_breaks_is_not_stitched_together(flaky: Flaky) -> None:
    for number in range(2500):
        flaky.put(f"{number:05d}", b"")
    flaky.sorted_listing = False
    store = RetryingStore(flaky, 60.0, sleep=lambda _seconds: None)
    flaky.break_after = [0]
    assert sum(len(page) for page in store.list("")) == 2500
    flaky.break_after = [1]
    with pytest.raises(StoreUnavailableError):
        list(store.list(""))


@promise("While a store does not answer, one call asks and the others wait for it")
def test_an_outage_is_asked_about_by_one_of_many(flaky: Flaky) -> None:
    """Each of 40 threads that asked for itself would make some tries a second."""
    ref = flaky.put("a", b"hello").ref(flaky.url)
    store = RetryingStore(flaky, 60.0)
    flaky.calls, flaky.failures = 0, 10**9
    with ThreadPoolExecutor(40) as pool:
        reads = [pool.submit(store.read, ref, 0, 5) for _ in range(40)]
        while flaky.calls < 10:
            time.sleep(0.01)
        at, until = flaky.calls, time.monotonic() + 1.0
        while time.monotonic() < until:
            time.sleep(0.01)
        assert flaky.calls - at < 10
        flaky.failures = 0
        assert [bytes(read.result(60)) for read in reads] == [b"hello"] * 40


@promise("After an outage as long as the deadline, readers are told soon")
def test_once_an_outage_has_lasted_for_the_deadline_nobody_waits_that_long_again(flaky: Flaky) -> None:
    ref = flaky.put("a", b"hello").ref(flaky.url)
    store = RetryingStore(flaky, 4.0)
    flaky.failures = 10**9
    with pytest.raises(StoreUnavailableError):
        store.read(ref, 0, 5)
    flaky.calls = 0
    begun = time.monotonic()
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            store.read(ref, 0, 5)
    assert time.monotonic() - begun < 2 * 4.0  # each waiting for the deadline: 12 s
    assert flaky.calls <= 3
    with AskedAt(time.monotonic() - 60), pytest.raises(StoreUnavailableError, match="has not answered for"):
        store.read(ref, 0, 5)
    flaky.failures = 0
    assert store.read(ref, 0, 5) == b"hello"  # back: not refused from memory


def unreachable(flaky: Flaky) -> None:
    flaky.error, flaky.failures, flaky.calls = StoreUnreachableError("refused"), 10**9, 0


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where nobody was met is given up after 0.2 s."""
    monkeypatch.setattr("datacache.store.retry.UNREACHED_S", 0.2)


@promise("An unreachable endpoint that the home never met is named after 3 s with its setting, however many ask")
@pytest.mark.usefixtures("soon")
def test_an_address_where_nobody_was_ever_met_is_given_up_soon_however_many_ask(flaky: Flaky, tmp_path: Path) -> None:
    unreachable(flaky)
    store, begun = RetryingStore(flaky, 60.0, met=MetAddresses(tmp_path)), time.monotonic()
    with ThreadPoolExecutor(20) as pool:
        errors = [call.exception() for call in [pool.submit(store.head, "a") for _ in range(20)]]
    assert {type(error) for error in errors} == {StoreUnreachableError}
    with pytest.raises(StoreUnreachableError):
        list(store.list(""))
    assert time.monotonic() - begun < 30
    assert flaky.calls < 120


@promise("An unreachable endpoint that the home never met is named after 3 s with its setting, however many ask")
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    "met", ["answered", "refused something", "broke off", "by another process of the home", "before a fork"]
)
def test_a_store_that_was_met_once_is_waited_for(flaky: Flaky, met: str, tmp_path: Path) -> None:
    flaky.put("a", b"hello")
    store = RetryingStore(flaky, 60.0, met=MetAddresses(tmp_path))
    if met == "refused something":
        with pytest.raises(ObjectNotFoundError):
            store.head("b")
    elif met == "broke off":
        flaky.error, flaky.failures = StoreUnavailableError("HTTP 503"), 1
        store.head("a")
    else:
        store.head("a")
    if met == "by another process of the home":
        store = RetryingStore(flaky, 60.0, met=MetAddresses(tmp_path))
    unreachable(flaky)
    timer = threading.Timer(1.0, lambda: setattr(flaky, "failures", 0))
    timer.start()
    if met == "before a fork":
        child = os.fork()
        if not child:
            threading.Timer(1.0, lambda: setattr(flaky, "failures", 0)).start()
            size_bytes = -1
            with suppress(StoreUnavailableError):
                size_bytes = store.head("a").size_bytes
            os._exit(size_bytes)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert store.head("a").size_bytes == 5
    timer.join()


@promise("An unreachable endpoint that the home never met is named after 3 s with its setting, however many ask")
@pytest.mark.usefixtures("soon")
def test_what_a_node_reads_for_others_waits_for_a_store_that_nobody_has_met_yet(settings: Settings) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    options = StoreOptions(name="away", url="s3://away", endpoint_url=endpoint, anonymous=True, region="us-east-1")
    away = replace(settings, stores=(options,), store_timeout_s=4.0)
    for daemon, waits in (("external", True), ("auto", False)):  # the first one loads what both need
        begun = time.monotonic()
        store = open_store("s3://away", replace(away, daemon=daemon))
        with closing(store), pytest.raises(StoreUnreachableError):
            store.head("a")
        assert (time.monotonic() - begun >= 4.0) is waits


@pytest.mark.usefixtures("soon")
def test_who_waits_for_an_address_that_begins_to_answer_badly_has_the_whole_time(flaky: Flaky) -> None:
    flaky.put("a", b"hello")
    errors = [StoreUnreachableError("refused")] * 2 + [StoreUnavailableError("HTTP 503")] * 6
    store = RetryingStore(flaky, 60.0, met=MetAddresses())
    head = flaky.head

    def answer(key: str) -> ObjectInfo:
        if errors:
            raise errors.pop(0)
        return head(key)

    flaky.head = answer  # type: ignore[method-assign]
    assert store.head("a").size_bytes == 5
