"""What a fork does to a value, and how bytes in flight are bounded."""

from __future__ import annotations

import asyncio
import os

from datacache.core.concurrency import PerProcess
from datacache.daemon.budget import ByteBudget


def test_a_child_makes_its_own_value_and_the_parent_keeps_its():
    value = PerProcess(lambda: os.getpid())
    assert value.get() == os.getpid()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if value.peek() is None and value.get() == os.getpid() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert value.get() == os.getpid()
    assert value.take() == os.getpid()
    assert value.peek() is None


def test_bytes_in_flight_stay_under_the_limit_and_nobody_starves():
    async def main():
        budget, held, most, served = ByteBudget(100), 0, 0, []

        async def use(number, size):
            nonlocal held, most
            await budget.take(size)
            held += size
            most = max(most, held if size <= 100 else 0)
            await asyncio.sleep(0)
            held -= size
            budget.give(size)
            served.append(number)

        await asyncio.gather(*(use(n, 30 if n % 3 else 500 if n == 9 else 90) for n in range(30)))
        assert sorted(served) == list(range(30))
        assert most <= 100

    asyncio.run(main())


def test_a_waiter_that_gives_up_takes_nothing():
    async def main():
        budget = ByteBudget(10)
        await budget.take(10)
        waiter = asyncio.create_task(budget.take(10))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        budget.give(10)
        await asyncio.wait_for(budget.take(10), 5)

    asyncio.run(main())
