"""How bytes in flight are bounded."""

from __future__ import annotations

import concurrent.futures
import threading

from datacache.core.concurrency import ByteBudget


def test_bytes_in_flight_stay_under_the_limit_and_everybody_is_served():
    budget, two, three = ByteBudget(100), threading.Barrier(2), threading.Barrier(3)

    def use(barrier):
        budget.take(40)
        try:
            barrier.wait(0.2 if barrier is three else 10)
        except threading.BrokenBarrierError:
            return False
        finally:
            budget.give(40)
        return True

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(use, [two] * 6))  # two hold theirs at a time
        assert not any(pool.map(use, [three] * 6))  # and never three


def test_a_request_larger_than_the_budget_goes_alone():
    budget = ByteBudget(10)
    budget.take(5)
    taken = threading.Event()
    thread = threading.Thread(target=lambda: (budget.take(50), taken.set()))
    thread.start()
    assert not taken.is_set()
    budget.give(5)
    thread.join(10)
    assert taken.is_set()
