"""How bytes in flight are bounded."""

from __future__ import annotations

import concurrent.futures
import threading

from datacache.daemon.budget import ByteBudget


def test_bytes_in_flight_stay_under_the_limit_and_everybody_is_served():
    budget, lock, held, most = ByteBudget(100), threading.Lock(), 0, 0

    def use(size):
        nonlocal held, most
        budget.take(size)
        with lock:
            held += size
            most = max(most, held)
        with lock:
            held -= size
        budget.give(size)
        return size

    sizes = [30, 60, 90] * 50
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, sizes)) == sizes
    assert most <= 100


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
