"""Random reads of warm 110 KB objects inside one process: `snap.read(path)` against reading plain files.

The objects are in the cache's SSD tier and the copies on the same disk; both stay in the page cache, so this
compares the paths through the software: index look-up, checksum and copy against open, read and close. Rounds
alternate; the rates are medians.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from statistics import median

from benchmarks.harness import OBJECT_BYTES, ResultTable, Workspace, make_files, parser, ratio, timed


def read_open(path: str) -> bytes:
    """As a Python program does it."""
    with open(path, "rb") as file:
        return file.read()


def read_os_open(path: str, size_bytes: int) -> bytes:
    """The three system calls and nothing else."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, size_bytes)
    finally:
        os.close(fd)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--files", type=int, default=5000)
    arguments.add_argument("--size", type=int, default=OBJECT_BYTES, help="bytes of an object, at most 4 MiB")
    arguments.add_argument("--reads", type=int, default=20_000, help="reads a round")
    arguments.add_argument("--rounds", type=int, default=5)
    args = arguments.parse_args()
    if args.quick:
        args.files, args.reads, args.rounds = 50, 200, 2
    with Workspace(args.dir) as work:
        folder = work.folder("images")
        names = make_files(folder, args.files, args.size)
        home = work.home("home")
        home.dsctl("snapshot", "create", "images", "--from", f"file://{folder}")
        home.dsctl("warm", "images@latest", "--wait")
        with home.environment():
            from datacache import open_snapshot

            with open_snapshot("images@latest") as snap:
                ways: dict[str, tuple[Callable[[str], bytes], str]] = {
                    "snap.read": (snap.read, ""),
                    "open().read()": (read_open, f"{folder}/"),
                    "os.open/read/close": (partial(read_os_open, size_bytes=args.size), f"{folder}/"),
                }
                for name in names[:100]:
                    if snap.read(name) != read_open(f"{folder}/{name}"):
                        raise SystemExit(f"{name} differs")
                rates = measure(ways, names, reads=args.reads, rounds=args.rounds)
        table = ResultTable(
            f"random reads of {args.files:,} warm objects of {args.size:,} bytes",
            "",
            "reads/s",
            "MB/s",
            "ours /",
        )
        for name, rate in rates.items():
            table.row(name, rate, rate * args.size / 1e6, ratio(rates["snap.read"], rate))
        table.print()


def measure(
    ways: dict[str, tuple[Callable[[str], bytes], str]], names: list[str], *, reads: int, rounds: int
) -> dict[str, float]:
    """Reads a second of every way, in turns over the same paths."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        order = random.Random(number).choices(names, k=reads)
        for name, (read, prefix) in ways.items():
            paths = [prefix + path for path in order]
            rate = reads / timed(lambda read=read, paths=paths: [None for path in paths if not read(path)])
            if number:  # the first round warms up
                rates[name].append(rate)
    return {name: median(values) for name, values in rates.items()}


if __name__ == "__main__":
    main()
