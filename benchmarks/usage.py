"""What a command costs: seconds, CPU time and memory of its process and all that it starts.

CPU time is what the kernel accounted to the process and the children it waited for (wait4(2)), so nothing that ran
for a millisecond is missed. Memory is sampled: every few milliseconds the resident sets of the process and its
descendants are added up (proc(5), `status`), pages they share counted once for each.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

SAMPLE_EVERY_S = 0.01
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class CommandUsage:
    """What one run of a command cost."""

    seconds: float
    cpu_s: float
    """User and system time, all threads and processes."""
    peak_mib: float
    """The largest sum of resident sets."""
    anonymous_mib: float
    """The largest sum of what is not backed by files: without libraries, and without cached data that is mapped."""
    output: str = ""
    """What it printed."""


def measured(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    beside: Callable[[], Iterable[int]] = tuple,
) -> CommandUsage:
    """Run a command to its end. The CPU time of the processes `beside` it (a daemon that works for it) is added.

    A failing one ends the benchmark with what it printed to standard error.
    """
    others = {pid: cpu_of(pid) for pid in beside()}
    start = time.perf_counter()
    process = subprocess.Popen(
        [str(word) for word in command],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    peak = _Peak(process.pid)
    watcher = threading.Thread(target=peak.watch)
    watcher.start()
    errors: list[str] = []
    assert process.stderr is not None
    stderr = process.stderr
    reader = threading.Thread(target=lambda: errors.append(stderr.read()))
    reader.start()
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    peak.ended.set()
    watcher.join()
    reader.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    stderr.close()
    if process.returncode:
        words = " ".join(map(str, command))
        raise SystemExit(f"{words} failed with exit code {process.returncode}:\n{''.join(errors)[-2000:]}")
    cpu_s = usage.ru_utime + usage.ru_stime
    for pid in beside():
        cpu_s += cpu_of(pid) - others.get(pid, 0.0)
    return CommandUsage(
        seconds=seconds, cpu_s=cpu_s, peak_mib=peak.all_mib, anonymous_mib=peak.anonymous_mib, output=output
    )


def middle(runs: Sequence[CommandUsage]) -> CommandUsage:
    """Each number's median; the largest memory."""
    return CommandUsage(
        seconds=median(run.seconds for run in runs),
        cpu_s=median(run.cpu_s for run in runs),
        peak_mib=max(run.peak_mib for run in runs),
        anonymous_mib=max(run.anonymous_mib for run in runs),
    )


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and the children it has waited for; 0 for one that is gone (proc(5), stat)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def cpu_of_families(pids: Iterable[int]) -> float:
    """CPU seconds of processes, their descendants, and the children that each of them has waited for; to the nanosecond
    for those that are alive (clock_getcpuclockid(3)), to the clock tick for the others."""
    total = 0.0
    for member in {member for pid in pids for member in _family(pid)}:
        with suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            total += time.clock_gettime((~member << 3) | 2) + sum(map(int, fields[13:15])) / _TICKS_PER_S
    return total


class _Peak:
    """Samples the memory of a process and its descendants until `ended`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.ended = threading.Event()
        self.all_mib = self.anonymous_mib = 0.0

    def watch(self) -> None:
        while not self.ended.wait(SAMPLE_EVERY_S):
            sums = [sum(column) / 1024 for column in zip(*map(_resident_kib, _family(self._pid)), strict=True)]
            if sums:
                self.all_mib = max(self.all_mib, sums[0])
                self.anonymous_mib = max(self.anonymous_mib, sums[1])


def _family(pid: int) -> list[int]:
    found = [pid]
    for parent in found:  # grows while it is walked
        with suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    found += map(int, file.read().split())
    return found


def _resident_kib(pid: int) -> tuple[int, int]:
    """All, and anonymous."""
    values = {"VmRSS": 0, "RssAnon": 0}
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in values:
                values[name] = int(value.split()[0])
    return values["VmRSS"], values["RssAnon"]
