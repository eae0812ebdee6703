"""Measure what readers lose while the cache's disk fails, and while the daemon is silent.

The store is `rclone serve s3` on the same machine with the files in the page cache.

1. *Disk.* Two processes and a mount read files of 100 KB, first with nothing in the cache, then from its disk, then
   while every read and write of that disk fails (a loop device over a file of a FUSE server that answers EIO). The RAM
   tier has room for a tenth of them.
2. *Silence.* The daemon is stopped (SIGSTOP) while `--readers` processes read files that the cache has not, one each
   20 ms: how long the first read of each waits, and the others, beside bare obstore (`--seconds`: how long).
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Sequence

import pytest

from benchmarks.harness import Home, ResultTable, Workspace, benchmark, make_files, ratio
from benchmarks.readers import Readers
from datacache.tiers.layout import cache_dir
from tests.failing_disk import failing_disk

FILE_BYTES = 100_000
PAUSE_S = 0.02


def main() -> None:
    with benchmark(__doc__, files=(4000, 100), readers=(8, 2), seconds=(58.0, 2.0)) as (args, work):
        server = work.s3()
        make_files(server.make_bucket("images"), args.files, FILE_BYTES)
        try:
            _disk(work, server.env(), args.files)
        except pytest.skip.Exception as exc:
            print(f"no disk can be made to fail here: {exc}")
        _silence(work, server.env(), args.readers, args.seconds)


# --- the disk ---


def _disk(workspace: Workspace, env: dict[str, str], files: int) -> None:
    size_bytes = files * FILE_BYTES
    home = workspace.home("disk", env, ram_bytes=size_bytes // 10, ssd_bytes=size_bytes + 2**27)
    mountpoint, cache = workspace.folder("mnt"), cache_dir(home.path)
    cache.mkdir(parents=True)
    table = ResultTable("Two processes and a mount", "cache", "files/s", "ratio")
    with failing_disk(cache, workspace.folder("device"), size_bytes=2 * size_bytes + 2**28) as disk:
        home.snapshot("images", "s3://images")
        home.dsctl("daemon", "start")
        pid = _daemon(home)
        home.dsctl("mount", "images@latest", mountpoint)
        ways = ("api", "api", str(mountpoint))
        cold = _rate(home, ways)
        home.dsctl("warm", "images@latest", "--wait")
        warm = _rate(home, ways)
        disk.fail("reads", "writes")
        failing = _rate(home, ways)
        again = _daemon(home) != pid
        disk.mend()
        home.dsctl("umount", mountpoint)
        home.dsctl("daemon", "stop")
    home.close()
    for name, rate in (("nothing in it", cold), ("on a disk that works", warm), ("on a disk that fails", failing)):
        table.row(name, rate, ratio(rate, cold))
    table.print()
    print(f"the daemon {'was started again' if again else 'went on'}, and all readers read to their end\n")


def _rate(home: Home, ways: Sequence[str]) -> float:
    """Return files a second; each way reads its part of all files once."""
    with Readers(home, "images", ways) as running:
        begun = time.perf_counter()
        running.begin()
        return sum(map(len, running.end())) / (time.perf_counter() - begun)


# --- the daemon ---


def _silence(workspace: Workspace, env: dict[str, str], readers: int, seconds: float) -> None:
    home = workspace.home("silence", env, prefetch=0)
    home.snapshot("images", "s3://images")
    home.dsctl("daemon", "start")
    pid = _daemon(home)
    took: dict[str, list[list[float]]] = {"bare": [], "api": []}
    for way in ("bare", "api", "bare"):
        with Readers(home, "images", [way] * readers, pause_s=PAUSE_S) as running:
            if way == "api":
                os.kill(pid, signal.SIGSTOP)
            try:
                running.begin()
                time.sleep(seconds if way == "api" else seconds / 2)
                took[way] += running.end()
            finally:
                os.kill(pid, signal.SIGCONT)
    home.close()
    bare, ours = ([each[0] for each in took[way]] for way in ("bare", "api"))
    bare_others, ours_others = ([one for each in took[way] for one in each[1:]] for way in ("bare", "api"))
    table = ResultTable(f"{readers} readers, the daemon stopped for {seconds:.0f} s", "ms", "bare obstore", "ours")
    for text, of, one, two in (
        ("first read, longest", max, bare, ours),
        ("others, median", statistics.median, bare_others, ours_others),
        ("others, longest", max, bare_others, ours_others),
    ):
        table.row(text, *(1000 * of(took) if took else None for took in (one, two)))
    table.row("reads", len(bare_others), len(ours_others))
    table.print()


def _daemon(home: Home) -> int:
    pid: int = json.loads(home.dsctl("daemon", "status", "--json"))["pid"]
    return pid


if __name__ == "__main__":
    main()
