"""Random reads of warm 110 KB objects inside one process: `snap.read(path)` against reading plain files.

The objects are in the cache's SSD tier and the copies on the same disk; both stay in the page cache, so this compares
the paths through the software: index look-up, checksum and copy against open, read and close. Rates are medians.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from statistics import median

from benchmarks.harness import OBJECT_BYTES, ResultTable, benchmark, make_files, ratio, rounds_of, timed


def read_open(path: str) -> bytes:
    """Read as a Python program does it."""
    with open(path, "rb") as file:
        return file.read()


def read_os_open(path: str, size_bytes: int) -> bytes:
    """Make the three system calls and nothing else."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, size_bytes)
    finally:
        os.close(fd)


def main() -> None:
    with benchmark(__doc__, files=(5000, 50), size=OBJECT_BYTES, reads=(20_000, 200), rounds=(5, 1)) as (args, work):
        folder = work.folder("images")
        names = make_files(folder, args.files, args.size)
        home = work.home("home", ssd_bytes=2 * args.files * args.size + 2**28)
        home.snapshot("images", f"file://{folder}", warm=True)
        with home.environment():
            from datacache import open_snapshot

            with open_snapshot("images@latest") as snap:
                if any(snap.read(name) != read_open(f"{folder}/{name}") for name in names[:100]):
                    raise SystemExit("the snapshot gives other bytes")

                def rate(read: Callable[[str], object], prefix: str, orders: random.Random) -> float:
                    paths = [prefix + path for path in orders.choices(names, k=args.reads)]
                    return args.reads / timed(lambda: [None for path in paths if not read(path)])

                ways: dict[str, Callable[[], float]] = {}
                for name, read, prefix in (
                    ("snap.read", snap.read, ""),
                    ("open().read()", read_open, f"{folder}/"),
                    ("os.open/read/close", lambda path: read_os_open(path, args.size), f"{folder}/"),
                ):
                    orders = random.Random(0)  # each draws the same paths in each round
                    ways[name] = partial(rate, read, prefix, orders)
                rates = {name: median(found) for name, found in rounds_of(ways, args.rounds, warm_up=1).items()}
        table = ResultTable(
            f"random reads of {args.files:,} warm objects of {args.size:,} bytes", "", "reads/s", "MB/s", "ours /"
        )
        for name, found in rates.items():
            table.row(name, found, found * args.size / 1e6, ratio(rates["snap.read"], found))
        table.print()


if __name__ == "__main__":
    main()
