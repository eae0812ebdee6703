"""Work in several processes, in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from datacache.core.errors import DatacacheError, UsageError
from datacache.core.parallel import ordered_map


class Add:
    def __init__(self, value: int) -> None:
        self.value = value

    def work(self, number: int) -> int:
        return self.value + number


class Pid:
    def work(self, _number: int) -> int:
        return os.getpid()


class FailAtThree:
    def work(self, number: int) -> int:
        if number == 3:
            raise UsageError("three")
        return number


class KilledAtThree:
    def work(self, number: int) -> int:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return number


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_results_come_in_the_order_of_their_tasks(processes: int) -> None:
    assert list(ordered_map(Add(5), range(100), processes=processes)) == list(range(5, 105))


def test_one_task_is_done_here_and_several_elsewhere() -> None:
    assert list(ordered_map(Pid(), [1], processes=2)) == [os.getpid()]
    assert os.getpid() not in list(ordered_map(Pid(), [1, 2, 3], processes=2))


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_of_a_task_is_raised_after_what_came_before(processes: int) -> None:
    results = ordered_map(FailAtThree(), range(9), processes=processes)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UsageError, match="three"):
        next(results)


def test_a_killed_worker_is_an_error_and_no_endless_wait() -> None:
    with pytest.raises(DatacacheError, match="worker process was killed"):
        list(ordered_map(KilledAtThree(), range(9), processes=2))


def test_tasks_are_not_taken_far_ahead_of_their_results() -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for number in range(1000):
            taken += 1
            yield number

    results = ordered_map(Add(0), tasks(), processes=2)
    next(results)
    assert taken < 20
    results.close()  # type: ignore[attr-defined]


def test_threads_that_work_in_this_process_do_not_mix() -> None:
    with ThreadPoolExecutor(8) as threads:
        maps = [threads.submit(list, ordered_map(Add(n), range(2000), processes=1)) for n in range(8)]
        assert [found.result() for found in maps] == [list(range(n, n + 2000)) for n in range(8)]


def test_a_process_that_may_have_no_children_does_the_work_itself() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(list(ordered_map(Add(1), range(5), processes=2))), daemon=True)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert queue.get() == [1, 2, 3, 4, 5]


def test_a_killed_parent_leaves_no_workers_behind(tmp_path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, time, pathlib\n"
        "from datacache.core.parallel import ordered_map\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "class Sleep:\n"
        "    def work(self, n):\n"
        "        (folder / f'pid{os.getpid()}').touch()\n"
        "        time.sleep(600)\n"
        "list(ordered_map(Sleep(), range(9), processes=2))\n"
    )
    parent = subprocess.Popen([sys.executable, script], env=os.environ | {"PYTHONPATH": os.getcwd()})
    deadline = time.monotonic() + 30
    while len(pids := [int(p.name[3:]) for p in tmp_path.glob("pid*")]) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    assert len(pids) == 2
    while any(_alive(p) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_alive(p) for p in pids)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
