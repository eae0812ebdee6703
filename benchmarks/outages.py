"""Measure what readers lose while the cache's disk fails, and while the daemon is silent.

The store is `rclone serve s3` on the same machine with the files in the page cache.

1. *Disk.* Two processes and a mount read files of 100 KB, first with nothing in the cache, then from its disk, then
   while every read and write of that disk fails (a loop device over a file of a FUSE server that answers EIO). The RAM
   tier has room for a tenth of them.
2. *Silence.* The daemon is stopped (SIGSTOP) while eight processes read files that the cache has not, one each 20 ms:
   how long the first read of each waits, and the others, beside the same by bare obstore (`--seconds`: how long).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import obstore
import pytest

from benchmarks.harness import ROOT, Home, ResultTable, Workspace, benchmark, make_files, ratio, timed
from benchmarks.peers import bare_store
from datacache import api
from datacache.tiers.layout import cache_dir
from tests.failing_disk import failing_disk

FILE_BYTES = 100_000
SILENT_READERS = 8
PAUSE_S = 0.02


def main() -> None:
    if sys.argv[1:2] == ["--read"]:
        way, first, step, pause_s = sys.argv[2:]
        read_part(way, int(first), int(step), float(pause_s))
        return
    with benchmark(__doc__, files=(4000, 400), seconds=(58.0, 3.0)) as (args, work):
        server = work.s3()
        make_files(server.make_bucket("images"), args.files, FILE_BYTES)
        try:
            _disk(work, server.env(), args.files)
        except pytest.skip.Exception as exc:
            print(f"no disk can be made to fail here: {exc}")
        _silence(work, server.env(), args.seconds)


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
    """Files a second; each way reads its part of all files once."""
    with _readers(home, ways) as readers:
        begun = time.perf_counter()
        _tell(readers)
        return sum(len(took) for took in map(_end, readers)) / (time.perf_counter() - begun)


# --- the daemon ---


def _silence(workspace: Workspace, env: dict[str, str], seconds: float) -> None:
    home = workspace.home("silence", env, prefetch=0)
    home.snapshot("images", "s3://images")
    home.dsctl("daemon", "start")
    pid = _daemon(home)
    took: dict[str, list[list[float]]] = {"bare": [], "api": []}
    for way in ("bare", "api", "bare"):
        with _readers(home, [way] * SILENT_READERS, pause_s=PAUSE_S) as readers:
            if way == "api":
                os.kill(pid, signal.SIGSTOP)
            try:
                _tell(readers)
                time.sleep(seconds if way == "api" else seconds / 2)
                took[way] += [_end(reader) for reader in readers]
            finally:
                os.kill(pid, signal.SIGCONT)
    home.close()
    bare, ours = ([each[0] for each in took[way]] for way in ("bare", "api"))
    bare_others, ours_others = ([one for each in took[way] for one in each[1:]] for way in ("bare", "api"))
    table = ResultTable(
        f"{SILENT_READERS} readers, the daemon stopped for {seconds:.0f} s", "ms", "bare obstore", "ours"
    )
    for text, of, one, two in (
        ("first read, longest", max, bare, ours),
        ("others, median", statistics.median, bare_others, ours_others),
        ("others, longest", max, bare_others, ours_others),
    ):
        table.row(text, f"{1000 * of(one):.1f}", f"{1000 * of(two):.1f}")
    table.row("reads", len(bare_others), len(ours_others))
    table.print()


# --- readers ---


@contextmanager
def _readers(home: Home, ways: Sequence[str], *, pause_s: float = 0.0) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ready to read: all of their part once, or with pauses until their standard input ends."""
    readers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.outages", "--read", way, str(n), str(len(ways)), str(pause_s)],
            cwd=ROOT,
            env=home.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n, way in enumerate(ways)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            reader.stdout.readline()
        yield readers
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()


def _tell(readers: Sequence[subprocess.Popen[str]]) -> None:
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("\n")
        reader.stdin.flush()


def _end(reader: subprocess.Popen[str]) -> list[float]:
    """The seconds of each of its reads."""
    found: list[float] = json.loads(reader.communicate()[0])
    return found


def read_part(way: str, first: int, step: int, pause_s: float) -> None:
    """Read each `step`th file from the `first` on, in random order: `way` is "api", "bare" or a mount's folder."""
    with api.open_snapshot("images") as snapshot:
        names = sorted(snapshot.paths())[first::step]
        random.Random(first).shuffle(names)
        read: Callable[[str], object] = snapshot.read
        if way == "bare":
            store = bare_store("images")
            read = lambda name: obstore.get(store, name).bytes()  # noqa: E731
        elif way != "api":
            read = lambda name: Path(way, name).read_bytes()  # noqa: E731
        print("ready", flush=True)
        sys.stdin.readline()
        ended = threading.Event()
        if pause_s:
            threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        took = []
        for name in itertools.cycle(names) if pause_s else names:
            took.append(timed(lambda name=name: read(name)))
            if pause_s and ended.wait(pause_s):
                break
        print(json.dumps(took))


def _daemon(home: Home) -> int:
    pid: int = json.loads(home.dsctl("daemon", "status", "--json"))["pid"]
    return pid


if __name__ == "__main__":
    main()
