"""Work in several processes, in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from datacache.conversion.parallel import ordered_map
from datacache.core.errors import DatacacheError, UsageError

_begun = 0


def begin(value: int) -> None:
    global _begun
    _begun = value


def add(number: int) -> int:
    return _begun + number


def pid(_number: int) -> int:
    return os.getpid()


def fail_at_three(number: int) -> int:
    if number == 3:
        raise UsageError("three")
    return number


def killed_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_results_come_in_the_order_of_their_tasks(processes: int) -> None:
    assert list(ordered_map(add, range(100), begin=begin, arguments=(5,), processes=processes)) == list(range(5, 105))


def test_one_task_is_done_here_and_several_elsewhere() -> None:
    assert list(ordered_map(pid, [1], begin=begin, arguments=(0,), processes=2)) == [os.getpid()]
    assert os.getpid() not in list(ordered_map(pid, [1, 2, 3], begin=begin, arguments=(0,), processes=2))


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_of_a_task_is_raised_after_what_came_before(processes: int) -> None:
    results = ordered_map(fail_at_three, range(9), begin=begin, arguments=(0,), processes=processes)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UsageError, match="three"):
        next(results)


def test_a_killed_worker_is_an_error_and_no_endless_wait() -> None:
    with pytest.raises(DatacacheError, match="worker process was killed"):
        list(ordered_map(killed_at_three, range(9), begin=begin, arguments=(0,), processes=2))


def test_tasks_are_not_taken_far_ahead_of_their_results() -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for number in range(1000):
            taken += 1
            yield number

    results = ordered_map(add, tasks(), begin=begin, arguments=(0,), processes=2)
    next(results)
    assert taken < 20
    results.close()  # type: ignore[attr-defined]


def test_a_killed_parent_leaves_no_workers_behind(tmp_path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, time, pathlib\n"
        "from datacache.conversion.parallel import ordered_map\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def work(n):\n"
        "    (folder / f'pid{os.getpid()}').touch()\n"
        "    time.sleep(600)\n"
        "list(ordered_map(work, range(9), begin=lambda: None, processes=2))\n"
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
