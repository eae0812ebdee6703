"""What is tried again, for how long, and that a broken listing goes on where it broke."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress

import pytest

from datacache.core.errors import ObjectChangedError, StoreAccessError, StoreUnavailableError
from datacache.core.objects import ObjectRef
from datacache.store.base import ObjectInfo
from datacache.store.memory import MemoryStore
from datacache.store.retry import LONGEST_WAIT_S, TELL_AFTER_S, Backoff, RetryingStore, retry

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
