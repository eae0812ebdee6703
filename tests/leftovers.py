"""Cleaning up after a test, daemons of a home, mounts, files in shared memory; and keeping one test from another.

Works from what the kernel says (`/proc`), not from the product's own records, because the product may be what
is broken.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SESSION_VARIABLE = "DATACACHE_TEST_SESSION"
"""Set to the test run's process id for everything it starts; the product passes over names it does not
know."""

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_PREFIX = "datacache-test-"
_END_TIMEOUT_S = 30.0


def processes_with(variable: str, wanted: Callable[[str], bool]) -> list[int]:
    """Processes other than this one that were started with an environment variable of a wanted value."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:  # gone, or another user's
            continue
        for item in environ.split(b"\0"):
            name, _, value = item.partition(b"=")
            if name == variable.encode() and wanted(os.fsdecode(value)):
                found.append(int(entry.name))
    return found


def end_processes(find: Callable[[], list[int]]) -> None:
    """SIGKILL to what `find` finds, until it finds nothing: one may just have started another."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while pids := find():
        for pid in pids:
            _end(pid)
        assert time.monotonic() < deadline, f"processes do not end: {pids}"


def _end(pid: int) -> None:
    try:
        watched = os.pidfd_open(pid)
    except OSError:  # it has
        return
    try:
        signal.pidfd_send_signal(watched, signal.SIGKILL)
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll(1000)
    except ProcessLookupError:
        pass
    finally:
        os.close(watched)


def mounts_under(folder: Path) -> list[str]:
    """Mount points inside a folder, the deepest first."""
    prefix = os.path.realpath(folder) + "/"
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split(" ")[4])
        if point.startswith(prefix):
            points.append(point)
    return sorted(points, key=len, reverse=True)


def unmount_under(folder: Path) -> list[str]:
    """Detach every mount inside a folder. Returns what was mounted."""
    points = mounts_under(folder)
    for point in points:
        command = ["umount", "-l", point] if os.geteuid() == 0 else ["fusermount3", "-uz", point]
        subprocess.run(command, check=False, capture_output=True, timeout=30)
    return points


def descriptors_below(path: Path) -> int:
    """Count this process's descriptors of a file, or of all in a folder."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own, and what other threads close meanwhile
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link == str(path) or link.startswith(f"{path}/") for link in links)


def in_own_process(function: Callable[[], None]) -> None:
    """Call a function of a module of tests in a fresh process, for what threads of this one would disturb or be
    disturbed by: which descriptors are open, and signal handlers. Fails as it fails."""
    code = f"import {function.__module__} as module; module.{function.__name__}()"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def let_others_through(folder: Path) -> None:
    """Let other users get to a folder of a test: pytest makes its folders for their owner only."""
    for path in (folder, *folder.parents):
        mode = path.stat().st_mode
        if mode & stat.S_ISVTX:  # /tmp
            return
        path.chmod(mode | 0o011)
        if path.name.startswith("pytest-of-"):  # each run of pytest closes this one anew
            return


def clean_dead_sessions(temp_root: Path) -> None:
    """Hold what test runs left that were killed: processes, mounts below `temp_root` and shared memory."""
    end_processes(lambda: processes_with(SESSION_VARIABLE, _is_dead))
    for owner in (*temp_root.glob("*/owner.pid"), *temp_root.glob("*/popen-*/owner.pid")):
        with contextlib.suppress(FileNotFoundError):  # another run deletes old folders, too
            if _is_dead(owner.read_text()):
                unmount_under(owner.parent)
    for folder in SHARED_MEMORY.glob(f"{SHARED_MEMORY_PREFIX}*"):
        if _is_dead(folder.name.removeprefix(SHARED_MEMORY_PREFIX).partition("-")[0]):
            shutil.rmtree(folder, ignore_errors=True)


def _is_dead(pid: str) -> bool:
    return pid.isdigit() and not Path("/proc", pid).exists()
