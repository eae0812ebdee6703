"""Reads that nobody fetched ahead: ours, in a process and through the mount, against bare obstore with as many requests
at a time.

All read objects of one size in random order, each once, from `rclone serve s3` on the same machine with its files in
the page cache; prefetch is off, and every round is on an empty cache. Ours checks, stores and indexes what it fetches.
Its bytes are compared with the MD5 that the ETag is; obstore's are so in rows of their own, and there is a ratio to
each. CPU time is that of one process an object: the daemon's beside the reader's (our process, or the mount's workers);
obstore has one process that does both.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import obstore

from benchmarks.harness import OBJECT_BYTES, Home, ResultTable, Workspace, benchmark, make_files, ratio, rounds_of
from benchmarks.peers import bare_store
from benchmarks.usage import command_of, cpu_of_families


class MissPass(NamedTuple):
    """One pass over all objects: objects a second, and CPU µs an object of the daemon and of the reader."""

    rate: float
    daemon_us: float | None
    reader_us: float


def main() -> None:
    with benchmark(__doc__, files=(4_000, 60), size=OBJECT_BYTES, threads=16, rounds=(3, 1)) as (args, work):
        server = work.s3()
        names = make_files(server.make_bucket("images"), args.files, args.size)
        env = server.env()
        few = names[: max(1, args.files // 4)]

        def shuffled(some: Sequence[str]) -> list[str]:
            return random.sample(some, len(some))

        def bare(some: Sequence[str], threads: int, *, md5: bool = False) -> MissPass:
            store = bare_store("images", env)

            def read(name: str) -> int:
                data = obstore.get(store, name).bytes()
                if md5:
                    hashlib.md5(data, usedforsecurity=False).digest()
                return len(data)

            return _pass(shuffled(some), threads, read, args.size)

        def ours(some: Sequence[str], threads: int) -> MissPass:
            with ExitStack() as stack:
                home = _home(work, stack, env)
                stack.enter_context(home.environment())
                from datacache import open_snapshot

                snap = stack.enter_context(open_snapshot("images@latest"))
                order = shuffled(some)
                snap.read(names[0])
                return _pass(order, threads, lambda name: len(snap.read(name)), args.size, home)

        def mounted(some: Sequence[str], threads: int) -> MissPass:
            with ExitStack() as stack:
                home = _home(work, stack, env)
                mount = home.path / "mnt"
                mount.mkdir()
                home.dsctl("mount", "images@latest", mount)
                stack.callback(home.dsctl, "umount", mount)
                order = shuffled(some)
                return _pass(order, threads, lambda name: len((mount / name).read_bytes()), args.size, home, mount)

        ways: dict[str, Callable[[], MissPass]] = {}
        against: dict[str, str] = {}
        for kind, read, some, threads in (
            ("in process", ours, names, args.threads),
            *(("mount", mounted, few, readers) for readers in (1, 2)),
        ):
            other, way = f"obstore, {threads}", f"{kind}, {threads}"
            ways[other] = partial(bare, some, threads)
            ways[f"{other}, and MD5"] = partial(bare, some, threads, md5=True)
            ways[way] = partial(read, some, threads)
            against |= dict.fromkeys((other, f"{other}, and MD5", way), other)
        found = rounds_of(ways, args.rounds)
        table = ResultTable(
            f"{args.files:,} objects × {args.size:,} bytes",
            "",
            "objects/s",
            "/ obstore",
            "/ and MD5",
            "daemon µs",
            "/ obstore",
            "/ and MD5",
            "reader µs",
        )
        middle = {
            name: MissPass(*(None if None in each else median(each) for each in zip(*passes, strict=True)))
            for name, passes in found.items()
        }
        for name, one in middle.items():
            plain, md5 = middle[against[name]], middle[f"{against[name]}, and MD5"]
            rates = ratio(one.rate, plain.rate), ratio(one.rate, md5.rate)
            costs = ratio(one.daemon_us, plain.reader_us), ratio(one.daemon_us, md5.reader_us)
            table.row(name, one.rate, *rates, one.daemon_us, *costs, one.reader_us)
        table.print()


def _home(work: Workspace, stack: ExitStack, env: dict[str, str]) -> Home:
    home = work.home(f"home-{time.monotonic_ns()}", env, prefetch=0, ssd_bytes=2**32)
    stack.callback(home.close)
    home.snapshot("images", "s3://images")
    home.dsctl("daemon", "start")
    return home


def _pass(
    order: Sequence[str],
    threads: int,
    read: Callable[[str], int],
    size: int,
    home: Home | None = None,
    mount: Path | None = None,
) -> MissPass:
    """Read all names from this many threads."""
    daemon, workers = [], []
    for pid in home.processes() if home is not None else ():
        words = command_of(pid)
        (daemon if "datacache.daemon" in words else workers).append(pid)
    wrong: list[str] = []
    waiting = iter(order)

    def one() -> None:
        wrong.extend(name for name in waiting if read(name) != size)

    def reader_s() -> float:
        return sum(map(_own_cpu, workers)) if mount is not None else time.process_time()

    runners = [threading.Thread(target=one) for _ in range(threads)]
    before, begun, start = cpu_of_families(daemon), reader_s(), time.perf_counter()
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    seconds = time.perf_counter() - start
    daemon_us = 1e6 * (cpu_of_families(daemon) - before) / len(order) if home is not None else None
    if wrong:
        raise SystemExit(f"{wrong[0]} was not read whole")
    return MissPass(len(order) / seconds, daemon_us, 1e6 * (reader_s() - begun) / len(order))


def _own_cpu(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)


if __name__ == "__main__":
    main()
