"""The phase `memory` of `write_path`: what the processes of our mount hold while nothing can be uploaded."""

from __future__ import annotations

import argparse
import os
import random
import threading
from collections import defaultdict
from pathlib import Path

from benchmarks.gate import Gate
from benchmarks.harness import Home, ResultTable, Workspace, timed
from benchmarks.usage import command_of, memory_mib
from benchmarks.written import blocks, digest_of, ours, pieces_of, small, write_large, write_small
from tests.servers import CephRgw, RcloneS3

FILE_BYTES = 4096
BLOCK_BYTES = 2**20
SAMPLE_EVERY_S = 0.2


class MemoryWatch:
    """Memory of a home's processes: the peak of each one's resident set since it started, as the kernel has it, and
    the largest proportional set (shared pages divided) since the last `lap()`, which is sampled."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._end = threading.Event()
        self._lock = threading.Lock()  # guards the two
        self._largest: dict[int, float] = defaultdict(float)
        self._together = 0.0
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def lap(self, what: str, table: ResultTable) -> None:
        """Add a row for each process and one for all together, and begin anew."""
        self._look()
        with self._lock:
            for pid, pss in sorted(self._largest.items()):
                words = [Path(word).name for word in command_of(pid) if word and not word.startswith("-")]
                name = " ".join(words)[:40] or str(pid)
                table.row(f"{what}: {name}", memory_mib(pid, "VmHWM"), memory_mib(pid, "VmRSS"), pss)
            table.row(f"{what}: together", None, None, self._together)
            self._largest.clear()
            self._together = 0.0

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(SAMPLE_EVERY_S):
            self._look()

    def _look(self) -> None:
        now = {pid: pss for pid in self._home.processes() if (pss := memory_mib(pid, "Pss"))}
        with self._lock:
            for pid, pss in now.items():
                self._largest[pid] = max(pss, self._largest[pid])
            self._together = max(self._together, sum(now.values()))


def run(args: argparse.Namespace, work: Workspace, server: RcloneS3 | CephRgw) -> None:
    """Print the table."""
    names = [f"dirty-{number:06d}.bin" for number in range(args.dirty_files)]
    large_bytes = int(args.large_gib * 2**30)
    table = ResultTable(
        f"MiB of memory: {len(names):,} files that cannot be uploaded, then one of {args.large_gib:g} GiB",
        "", "RSS peak", "RSS at the end", "PSS",
    )  # fmt: skip
    with Gate(server.endpoint) as gate:
        gate.open()
        with ours(work, server, endpoint=gate.endpoint) as target:
            assert target.home is not None
            assert target.view is not None
            watch = MemoryWatch(target.home)
            watch.lap("mounted", table)
            os.listdir(target.folder)  # names are made without the store only where it is known which there are
            gate.shut()
            seconds = write_small([target.folder / name for name in names], FILE_BYTES, writers=4, fsync=False)
            watch.lap("files", table)
            large = target.folder / "large.bin"
            large_s = timed(lambda: write_large(large, large_bytes, BLOCK_BYTES, fsync=False))
            watch.lap("large", table)
            _check(target.folder, names, large_bytes)
            watch.lap("read", table)
            if args.drain:
                gate.open()
                target.home.dsctl("flush", target.folder)
                watch.lap("flush", table)
                target.view.check_large("large.bin", large_bytes, BLOCK_BYTES)
                target.view.check_small(names, FILE_BYTES)
            watch.close()
            table.print()
            print(f"{len(names) / seconds:,.0f} files/s, {large_bytes / large_s / 1e6:,.0f} MB/s written")
            if not args.drain:
                target.home.close()


def _check(mount: Path, names: list[str], large_bytes: int) -> None:
    """Compare everything that is there through the mount, and of the small files a thousand, with what was written."""
    if missing := set(names) - set(os.listdir(mount)):
        raise SystemExit(f"{len(missing):,} files are missing")
    for number in random.Random(0).sample(range(len(names)), min(1000, len(names))):
        if (mount / names[number]).read_bytes() != small(number, FILE_BYTES):
            raise SystemExit(f"{names[number]} is not what was written")
    if digest_of(pieces_of(mount / "large.bin")) != digest_of(blocks(large_bytes, BLOCK_BYTES)):
        raise SystemExit("the large file is not what was written")
