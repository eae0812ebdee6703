"""The cost of commands and processes: seconds, CPU time and memory, with all that they start.

CPU time is what the kernel accounted to the process and the children it waited for (wait4(2)). Memory is sampled:
resident sets of the process and its descendants are added up (proc(5)), pages they share counted once for each.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
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
    """The cost of one run of a command."""

    seconds: float
    cpu_s: float
    """User and system time, all threads and processes."""
    peak_mib: float
    """The largest sum of resident sets."""
    anonymous_mib: float
    """The largest sum of what is not backed by files: without libraries and mapped cache."""
    output: str = ""


def measured(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    beside: Callable[[], Iterable[int]] = tuple,
) -> CommandUsage:
    """Run a command to its end, with the CPU time of processes `beside` it (a daemon). A failing one is fatal."""
    others = {pid: cpu_of(pid) for pid in beside()}
    ended, peaks = threading.Event(), [0.0, 0.0]

    def watch(pid: int) -> None:
        while not ended.wait(SAMPLE_EVERY_S):
            sizes = [(memory_mib(one, "VmRSS"), memory_mib(one, "RssAnon")) for one in family(pid)]
            for which, column in enumerate(zip(*sizes, strict=True)):
                peaks[which] = max(peaks[which], sum(column))

    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [str(word) for word in command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        watcher = threading.Thread(target=watch, args=(process.pid,))
        watcher.start()
        assert process.stdout is not None
        with process.stdout:
            output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        ended.set()
        watcher.join()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            words = " ".join(map(str, command))
            raise SystemExit(f"{words} failed with exit code {process.returncode}:\n{errors.read()[-2000:]}")
    cpu_s = usage.ru_utime + usage.ru_stime + sum(cpu_of(pid) - others.get(pid, 0.0) for pid in beside())
    return CommandUsage(seconds=seconds, cpu_s=cpu_s, peak_mib=peaks[0], anonymous_mib=peaks[1], output=output)


def middle(runs: Sequence[CommandUsage]) -> CommandUsage:
    """Return each number's median, and the largest memory."""
    return CommandUsage(
        seconds=median(run.seconds for run in runs),
        cpu_s=median(run.cpu_s for run in runs),
        peak_mib=max(run.peak_mib for run in runs),
        anonymous_mib=max(run.anonymous_mib for run in runs),
    )


def cpu_of(pid: int) -> float:
    """Return CPU seconds of a process and the children it has waited for; 0 for one that is gone (proc(5), stat)."""
    with suppress(OSError):
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])) / _TICKS_PER_S
    return 0.0


def cpu_of_families(pids: Iterable[int]) -> float:
    """Return CPU seconds of processes, their descendants, and the children that each has waited for; to the nanosecond
    for those that are alive (clock_getcpuclockid(3)), to the clock tick for the others."""
    total = 0.0
    for member in {member for pid in pids for member in family(pid)}:
        with suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            total += time.clock_gettime((~member << 3) | 2) + sum(map(int, fields[13:15])) / _TICKS_PER_S
    return total


def memory_mib(pid: int, field: str) -> float:
    """Return `VmRSS`, `VmHWM`, `RssAnon` or `Pss` of a process (proc(5)); 0 for one that is gone."""
    with suppress(OSError), open(f"/proc/{pid}/{'smaps_rollup' if field == 'Pss' else 'status'}") as file:
        return next((int(line.split()[1]) / 1024 for line in file if line.startswith(f"{field}:")), 0.0)
    return 0.0


def command_of(pid: int) -> list[str]:
    """Return a process's command line; nothing for one that is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for parent in found:  # grows while it is walked
        with suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    found += map(int, file.read().split())
    return found
