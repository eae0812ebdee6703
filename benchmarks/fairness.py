"""The cost of one greedy data set for another one on the same node: time, memory of the daemon, and room in the cache.

The store is `rclone serve s3` on the same machine with the files in the page cache. Readers are threads of a few
processes; all of them read what the node does not have.

1. *Time.* One reader takes files of 100 KB one after the other, alone, then beside `--readers` readers of files of
   4 MiB of another data set. The same files by bare obstore, without the daemon, say what the load does to the machine
   and to its store: no daemon can do better than that.
2. *Memory.* The daemon's resident memory: idle, at most during 1, and 60 s after its end.
3. *Room* (not with `--no-room`). Two data sets have the same share of a cache with the policy `keep`. The greedy one
   fills it first and goes on reading all the time; how many blocks each epoch of the small one fetched.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing

import obstore

from benchmarks.harness import Home, ResultTable, Workspace, benchmark, make_files, timed
from benchmarks.peers import bare_store
from benchmarks.readers import Readers
from benchmarks.usage import memory_mib
from datacache import api
from datacache.core.ids import block_id
from datacache.daemon.warmer import snapshot_objects
from datacache.manifest.reader import Manifest
from datacache.settings import load_settings
from datacache.tiers.local import LocalBlocks

SMALL_BYTES, GREEDY_BYTES = 100_000, 4 * 2**20
PROCESSES = 4


def main() -> None:
    with benchmark(
        __doc__, readers=(200, 8), small_files=(600, 80), greedy_files=(250, 40), settle=(60.0, 1.0), no_room=False
    ) as (
        args,
        work,
    ):
        server = work.s3()
        make_files(server.make_bucket("small"), args.small_files, SMALL_BYTES)
        make_files(server.make_bucket("greedy"), args.greedy_files, GREEDY_BYTES)
        _time_and_memory(work, server.env(), args)
        if not args.no_room:
            _room(work, server.env(), args.small_files)


def _home(work: Workspace, name: str, env: Mapping[str, str], **settings: object) -> Home:
    home = work.home(name, env, prefetch=0, **settings)
    for dataset in ("small", "greedy"):
        home.snapshot(dataset, f"s3://{dataset}")
    home.dsctl("daemon", "start")
    return home


def _time_and_memory(work: Workspace, env: Mapping[str, str], args: argparse.Namespace) -> None:
    count, settle_s, half = args.readers, args.settle, args.small_files // 2
    # So small that nearly all is a miss, for both.
    home = _home(work, "time", env, ssd_bytes="40MB", ram_bytes="20MB")
    pid = json.loads(home.dsctl("daemon", "status", "--json"))["pid"]
    with home.environment(), api.open_snapshot("small") as snapshot:
        paths, bare = sorted(snapshot.paths()), bare_store("small", env)
        _times(snapshot.read, paths[:20])  # libraries are imported, connections made
        obstore.get(bare, paths[0]).bytes()

        def both(mine: Iterable[str]) -> tuple[list[float], list[float]]:
            ours = _times(snapshot.read, mine)
            return ours, _times(lambda path: obstore.get(bare, path).bytes(), paths[1:half])

        idle = memory_mib(pid, "VmRSS")
        alone = both(paths[20:half])
        peak, stop = [idle], threading.Event()

        def watch() -> None:
            while not stop.wait(0.05):
                peak.append(memory_mib(pid, "VmRSS"))

        with Readers(home, "greedy", ["api"] * PROCESSES, threads=count // PROCESSES, pause_s=0) as greedy:
            greedy.begin()
            time.sleep(min(5.0, settle_s))
            watching = threading.Thread(target=watch)
            watching.start()
            beside = both(paths[half:])
            read = sum(map(len, greedy.end()))
        stop.set()
        watching.join()
        time.sleep(settle_s)
        after = memory_mib(pid, "VmRSS")
    table = ResultTable("Time of a read", "a file of 100 KB", "median ms", "p99 ms", "bare median ms", "bare p99 ms")
    cells = [[1000 * of(took) for took in both for of in (statistics.median, _p99)] for both in (alone, beside)]
    for name, row in zip(("alone", f"beside {count} of 4 MiB"), cells, strict=True):
        table.row(name, *(f"{ms:.1f}" for ms in row))
    table.row("ratio", *(f"{two / one:.1f}" for one, two in zip(*cells, strict=True)))
    table.print()
    print(f"the others read {read} files meanwhile\n")
    table = ResultTable("The daemon's resident memory", "", "MiB")
    for name, mib in (("idle", idle), ("at most", max(peak)), (f"{settle_s:.0f} s after", after)):
        table.row(name, f"{mib:.0f}")
    table.print()


def _room(work: Workspace, env: Mapping[str, str], small_files: int) -> None:
    cache_bytes = small_files * SMALL_BYTES * 5 // 2  # the greedy one has more
    settings = {"ssd_bytes": cache_bytes, "ram_bytes": "20MB", "shares": "small=50,greedy=50", "eviction": "keep"}
    home = _home(work, "room", env, **settings)
    title = "Room: a small data set beside a greedy one, shares 50:50"
    table = ResultTable(title, "epoch", "blocks", "not here before it")
    with home.environment():
        greedy = work.stack.enter_context(Readers(home, "greedy", ["api"], threads=2, pause_s=0))
        greedy.begin()
        while _ssd_mb()["greedy"] < 0.8 * cache_bytes / 1e6:
            time.sleep(0.1)
        before = _ssd_mb()
        chosen = load_settings()
        local = LocalBlocks(chosen.home, chosen.ram_dir)
        with api.open_snapshot("small") as snapshot, closing(api.open_catalog(chosen)) as catalog:
            manifest = Manifest.open(snapshot.record.id, catalog.get_blobs)
            blocks = [block_id(id, 0) for _, id in snapshot_objects(manifest)]  # small files have one each
            for epoch in range(1, 5):
                table.row(str(epoch), str(len(blocks)), str(sum(not local.has(block) for block in blocks)))
                for path in snapshot.paths():
                    snapshot.read(path)
                time.sleep(1)  # until what was read is stored
        greedy.end()
        after = _ssd_mb()
    table.print()
    print(f"MB of {cache_bytes / 1e6:.0f}: before {before}, after {after}")


def _times(read: Callable[[str], object], paths: Iterable[str]) -> list[float]:
    return [timed(lambda path=path: read(path)) for path in paths]


def _ssd_mb() -> dict[str, int]:
    found = {each["name"]: each["ssd_bytes"] // 10**6 for each in api.connect().cache_status()["datasets"]}
    return {"small": 0, "greedy": 0} | found


def _p99(took: list[float]) -> float:
    return sorted(took)[int(0.99 * len(took))]


if __name__ == "__main__":
    main()
