"""The memory of a peer that does not answer, and who shares it."""

from __future__ import annotations

import threading
import time

from datacache.core.breaker import DOUBT, LATE_S, Breaker
from tests.promises import promise

NEVER = 1e6
ERROR = ConnectionError("away")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def breaker_in_doubt(patience_s: float = 30.0) -> tuple[Breaker[ConnectionError], Clock]:
    clock = Clock()
    breaker: Breaker[ConnectionError] = Breaker(patience_s, clock=clock, jitter=lambda: 1.0)
    for _ in range(DOUBT):
        assert breaker.enter(clock.now, NEVER, late=False) is None
        breaker.failed(ERROR)
    return breaker, clock


def test_few_failures_hold_nobody_up() -> None:
    breaker: Breaker[ConnectionError] = Breaker(30.0)
    for _ in range(DOUBT - 1):
        assert not breaker.failed(ERROR)
    for _ in range(10):
        assert breaker.enter(time.monotonic(), NEVER, late=False) is None
    breaker.answered()
    assert not breaker.failed(ERROR)  # counted anew


def test_in_doubt_one_asks_and_the_others_go_when_it_was_answered() -> None:
    breaker, clock = breaker_in_doubt()
    clock.now += 10
    assert breaker.enter(clock.now, NEVER, late=False) is None  # the probe
    went = []
    waiting = [
        threading.Thread(target=lambda: went.append(breaker.enter(clock.now, NEVER, late=False))) for _ in range(8)
    ]
    for thread in waiting:
        thread.start()
    assert went == []
    breaker.answered()
    for thread in waiting:
        thread.join(30)
    assert went == [None] * 8


def test_after_a_probe_that_failed_there_is_a_pause_before_the_next_and_it_grows() -> None:
    breaker, clock = breaker_in_doubt()
    pauses = []
    for _ in range(8):
        before = clock.now
        while breaker.enter(clock.now, clock.now, late=False) is ERROR:  # its deadline is now
            clock.now += 0.01
        pauses.append(round(clock.now - before, 1))
        breaker.failed(ERROR)
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1] < LATE_S


@promise("While a store does not answer, one call asks and the others wait for it")
def test_who_waits_in_doubt_is_given_its_own_deadline() -> None:
    breaker, clock = breaker_in_doubt()
    assert breaker.enter(clock.now, clock.now, late=False) is ERROR
    clock.now += 100  # silent by now: who did not come late asks all the same
    assert breaker.silent
    assert breaker.enter(clock.now - 20, NEVER, late=False) is None


@promise("After an outage as long as the deadline, readers are told soon")
def test_who_comes_in_silence_fails_by_a_probe_that_began_after_it_came_and_not_from_memory() -> None:
    breaker, clock = breaker_in_doubt()
    clock.now += 100
    came = clock.now
    assert breaker.enter(came, NEVER, late=True) is None  # a probe itself
    breaker.failed(ERROR)
    assert breaker.enter(came - 1, NEVER, late=True) is ERROR  # without waiting
    clock.now += 10
    assert breaker.enter(clock.now, NEVER, late=True) is None  # nobody has asked since


@promise("After an outage as long as the deadline, readers are told soon")
def test_an_answer_ends_the_silence_for_all() -> None:
    breaker, clock = breaker_in_doubt()
    clock.now += 100
    assert breaker.silent
    assert breaker.silent_s() == 100
    breaker.answered()
    assert not breaker.silent
    assert breaker.silent_s() == 0
    assert breaker.enter(clock.now, clock.now, late=False) is None
