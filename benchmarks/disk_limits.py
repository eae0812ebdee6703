"""The disk below a staging area: syncs of a file that grows or is written over, and its speed beside busy processors.

No mount takes part. `docs/BENCHMARKS.md` draws on it to say what limits writing through one.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.harness import ResultTable, benchmark

RECORD_BYTES = 4096
PIECE = mmap.mmap(-1, 2**20)
"""Begins at a page, as O_DIRECT wants it."""


def main() -> None:
    with benchmark(__doc__, syncs=(600, 10), size=(2**29, 2**22), rounds=(3, 1)) as (args, work):
        path = work.folder("disk") / "file"
        times: dict[str, list[float]] = defaultdict(list)
        speeds: dict[str, list[float]] = defaultdict(list)
        for _ in range(args.rounds):
            times["4 KiB at the end of a file"].append(1e6 * sync_s(path, args.syncs, over_zeros=False))
            times["4 KiB over zeros"].append(1e6 * sync_s(path, args.syncs, over_zeros=True))
            for busy in range((os.cpu_count() or 1) + 1):
                name = f"O_DIRECT, processors that compute: {busy}"
                speeds[name].append(args.size / 1e6 / direct_s(path, args.size, busy=busy))
            for pause_ms in (0, 1):
                name = f"page cache, synced, computing between writes of 1 MiB: {pause_ms} ms"
                speeds[name].append(args.size / 1e6 / cached_s(path, args.size, pause_s=pause_ms / 1e3))
        table = ResultTable("a write and fdatasync", "", "µs")
        for name, found in times.items():
            table.row(name, median(found))
        table.print()
        table = ResultTable(f"a file of {args.size / 2**20:,.0f} MiB", "", "MB/s")
        for name, found in speeds.items():
            table.row(name, median(found))
        table.print()


def sync_s(path: Path, count: int, *, over_zeros: bool) -> float:
    """Return the median of seconds to write a record and sync it."""
    with path.open("wb", buffering=0) as file:
        if over_zeros:
            file.write(bytes(count * RECORD_BYTES))
            os.fsync(file.fileno())
        taken = []
        for number in range(count):
            began = time.perf_counter()
            os.pwrite(file.fileno(), b"x" * RECORD_BYTES, number * RECORD_BYTES)
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - began)
    return median(taken)


def direct_s(path: Path, size: int, *, busy: int) -> float:
    """Return the seconds of a file without the page cache, while so many processes compute."""
    with ExitStack() as stack:
        for _ in range(busy):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_DIRECT)
        stack.callback(os.close, fd)
        began = time.perf_counter()
        for offset in range(0, size, len(PIECE)):
            os.pwrite(fd, PIECE, offset)
        return time.perf_counter() - began


def cached_s(path: Path, size: int, *, pause_s: float) -> float:
    """Return the seconds of a file through the page cache, synced at its end, by a program that computes in between."""
    with path.open("wb", buffering=0) as file:
        began = time.perf_counter()
        for _ in range(0, size, len(PIECE)):
            file.write(PIECE)
            until = time.perf_counter() + pause_s
            while time.perf_counter() < until:
                pass
        os.fsync(file.fileno())
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
