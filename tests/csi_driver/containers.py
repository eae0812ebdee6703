"""A container as a kubelet keeps it: it ends with its first process, and starts again after a pause that grows."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
"""CrashLoopBackOff as a kubelet has it unless it is configured."""
SHIM = """
import ctypes, os, signal, sys

def parents():
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                found[int(name)] = int(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1])
            except OSError:
                pass
    return found

def descendants():
    mine, known = {os.getpid()}, parents()
    while True:
        more = {pid for pid, parent in known.items() if parent in mine} - mine
        if not more:
            return mine - {os.getpid()}
        mine |= more

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans of the container come here
first = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
print(first, flush=True)
signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGTERM))
code = None
while code is None:
    pid, status = os.wait()
    code = status if pid == first else None
while left := descendants():  # the container's control group is killed
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    while True:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                break
        except ChildProcessError:
            break
sys.exit(0)
"""


class KubeletContainer:
    """A command as a container. It runs from `start` until `close`, with the kubelet's pauses."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command, self.log = command, log
        self._ending = threading.Event()
        self._shim: subprocess.Popen[str]
        self._thread = threading.Thread(target=self._run, name=f"container {log.stem}")
        self.first_pid = 0
        """0 while it does not run."""
        self.restarts = 0
        self._up = threading.Condition()

    def start(self) -> None:
        """Start it, and wait until its first process is there."""
        self._thread.start()
        with self._up:
            assert self._up.wait_for(lambda: self.first_pid, 30)

    def close(self) -> None:
        """End it for good."""
        self._ending.set()
        if self._thread.is_alive():
            self._shim.terminate()
            try:
                self._shim.wait(30)
            except subprocess.TimeoutExpired:
                for pid in self.processes():
                    os.kill(pid, 9)
            self._thread.join()

    def processes(self) -> set[int]:
        """All of its processes, the first one among them."""
        parents = {int(name): _parent(int(name)) for name in os.listdir("/proc") if name.isdigit()}
        mine = {self._shim.pid}
        while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
            mine |= more
        return mine - {self._shim.pid}

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._ending.is_set():
            with self.log.open("ab") as log:
                self._shim = subprocess.Popen(
                    [sys.executable, "-c", SHIM, *self._command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            assert self._shim.stdout is not None
            with self._shim.stdout:
                said = self._shim.stdout.readline()
                with self._up:
                    self.first_pid = int(said or 0)
                    self._up.notify_all()
                self._shim.wait()
            self.first_pid = 0
            self.restarts += 1
            if self._ending.wait(pause_s):
                return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def until(ready: object, what: str, *, timeout_s: float = 60.0) -> None:
    """Wait until a call says yes. It looks at several processes, whose changes have no one event."""
    assert callable(ready)
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
