"""Calls in threads: order, bounds, errors."""

from __future__ import annotations

import itertools
import threading

import pytest

from datacache.core.concurrency import map_in_threads


def test_results_come_in_the_order_of_the_items():
    turn = threading.Barrier(4)

    def call(number):
        turn.wait(10)  # passes only when four are under way at once
        return number * 2

    assert list(map_in_threads(call, range(40), threads=4)) == [n * 2 for n in range(40)]


def test_the_sizes_under_way_stay_within_the_limit_and_a_larger_one_is_alone():
    lock, under_way, most = threading.Lock(), [], []

    def call(size):
        with lock:
            under_way.append(size)
            most.append(list(under_way))
        with lock:
            under_way.remove(size)

    sizes = [3, 4, 5, 50, 1, 2, 3] * 20
    list(map_in_threads(call, sizes, threads=8, size_bytes=lambda size: size, limit_bytes=10))
    assert all(sum(held) <= 10 or held == [50] for held in most)


def test_the_first_error_is_raised_and_no_more_items_are_taken():
    taken = []

    def items():
        for number in itertools.count():
            taken.append(number)
            yield number

    def call(number):
        if number == 5:
            raise ValueError("five")

    with pytest.raises(ValueError, match="five"):
        for _ in map_in_threads(call, items(), threads=3):
            pass
    assert len(taken) < 5000


def test_an_error_is_noticed_while_an_earlier_call_is_still_under_way():
    failed = threading.Event()

    def items():
        yield "slow"
        yield "bad"
        for number in range(100):
            failed.wait(10)
            yield str(number)

    def call(item):
        if item == "slow":
            failed.wait(10)
        if item == "bad":
            failed.set()
            raise ValueError(item)

    with pytest.raises(ValueError, match="bad"):
        list(map_in_threads(call, items(), threads=2))


def test_a_caller_that_stops_leaves_no_thread():
    before = threading.active_count()
    results = map_in_threads(lambda number: number, itertools.count(), threads=4)
    assert next(results) == 0
    results.close()
    assert threading.active_count() == before


def test_few_results_wait_for_a_slow_first_call():
    release, taken = threading.Event(), []

    def items():
        for number in range(10_000):
            taken.append(number)
            yield number

    def call(number):
        if number == 0:
            release.wait(10)
        elif number == 2 * 64 - 1:  # the last that is begun before the first result is taken
            release.set()
        return number

    results = map_in_threads(call, items(), threads=2)
    assert next(results) == 0
    assert len(taken) == 2 * 64
    results.close()
