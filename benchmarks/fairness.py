"""The cost of one greedy data set for another one on the same node: time, memory of the daemon, and room in the cache.

The store is `rclone serve s3` on the same machine with the files in the page cache. Readers are threads of a few
processes; all of them read what the node does not have.

1. *Time.* One reader takes files of 100 KB one after the other, alone, then beside `--readers` readers of files of
   4 MiB of another data set. The same files by bare obstore, without the daemon, say what the load does to the machine
   and to its store: no daemon can do better than that.
2. *Memory.* The daemon's resident memory: idle, at most during 1, and 60 s after its end.
3. *Room.* Two data sets have the same share of a cache with the policy `keep`. The greedy one fills it first and goes
   on reading all the time; how many blocks each epoch of the small one fetched.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import obstore
from obstore.store import S3Store

from benchmarks.harness import Home, ResultTable, Workspace, make_files, parser
from datacache import api
from datacache.core.ids import block_id
from datacache.daemon.warmer import snapshot_objects
from datacache.manifest.reader import Manifest
from datacache.settings import load_settings
from datacache.tiers.local import LocalBlocks

SMALL_BYTES, GREEDY_BYTES = 100_000, 4 * 2**20
SMALL_FILES = 600
PROCESSES = 4
SETTLE_S = 60.0


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--readers", type=int, default=200)
    arguments.add_argument("--greedy-files", type=int, default=250)
    arguments.add_argument("--no-room", action="store_true", help="time and memory only")
    arguments.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.read:
        _reader(*options.read)
        return
    greedy_files, readers = (40, 8) if options.quick else (options.greedy_files, options.readers)
    with Workspace(options.dir) as workspace:
        server = workspace.s3()
        make_files(server.make_bucket("small"), SMALL_FILES, SMALL_BYTES)
        make_files(server.make_bucket("greedy"), greedy_files, GREEDY_BYTES)
        _time_and_memory(workspace, server.env(), readers, quick=options.quick)
        if not options.no_room:
            _room(workspace, server.env())


def _home(workspace: Workspace, name: str, env: dict[str, str], **settings: object) -> Home:
    home = workspace.home(name, env, prefetch=0, **settings)
    for dataset in ("small", "greedy"):
        home.dsctl("snapshot", "create", dataset, "--from", f"s3://{dataset}")
    home.dsctl("daemon", "start")
    return home


def _time_and_memory(workspace: Workspace, env: dict[str, str], readers: int, *, quick: bool) -> None:
    # So small that nearly all is a miss, for both.
    home = _home(workspace, "time", env, ssd_bytes="40MB", ram_bytes="20MB")
    pid = json.loads(home.dsctl("daemon", "status", "--json"))["pid"]
    with home.environment():
        _read_small(0, 20)  # libraries are imported, connections made
        idle = _resident(pid)
        alone = _read_small(20, SMALL_FILES // 2)
        bare = bare_store("small", env)
        bare_alone = _read_bare(bare)
        greedy = [_start(home, "greedy", readers // PROCESSES, seed) for seed in range(PROCESSES)]
        time.sleep(1 if quick else 5)
        peak, stop = [idle], threading.Event()

        def watch() -> None:
            while not stop.wait(0.05):
                peak.append(_resident(pid))

        watching = threading.Thread(target=watch)
        watching.start()
        beside = _read_small(SMALL_FILES // 2, SMALL_FILES)
        bare_beside = _read_bare(bare)
        read = [_end(process) for process in greedy]
        stop.set()
        watching.join()
        time.sleep(1 if quick else SETTLE_S)
        after = _resident(pid)
    table = ResultTable("Time of a read", "a file of 100 KB", "median ms", "p99 ms", "bare median ms", "bare p99 ms")
    rows = (("alone", alone, bare_alone), (f"beside {readers} of 4 MiB", beside, bare_beside))
    for name, *took in rows:
        table.row(name, *(f"{1000 * s:.1f}" for times in took for s in (statistics.median(times), _p99(times))))
    pairs = ((beside, alone), (bare_beside, bare_alone))
    table.row("ratio", *(f"{of(two) / of(one):.1f}" for two, one in pairs for of in (statistics.median, _p99)))
    table.print()
    print(f"the others read {sum(read)} files meanwhile\n")
    table = ResultTable("The daemon's resident memory", "", "MiB")
    for name, size in (("idle", idle), ("at most", max(peak)), (f"{SETTLE_S:.0f} s after", after)):
        table.row(name, f"{size / 2**20:.0f}")
    table.print()


def _room(workspace: Workspace, env: dict[str, str]) -> None:
    cache_bytes = 150_000_000  # the small one has 60 MB, the greedy one more than the cache
    home = _home(
        workspace, "room", env, ssd_bytes=cache_bytes, ram_bytes="20MB", shares="small=50,greedy=50", eviction="keep"
    )
    table = ResultTable(
        "Room: a small data set beside a greedy one, shares 50:50", "epoch", "blocks", "not here before it"
    )
    with home.environment():
        greedy = _start(home, "greedy", 2, 0)
        while _ssd()["greedy"] < 0.8 * cache_bytes:
            time.sleep(0.1)
        before = _ssd()
        settings = load_settings()
        local = LocalBlocks(settings.home, settings.ram_dir)
        with api.open_snapshot("small") as snapshot, closing(api.open_catalog(settings)) as catalog:
            manifest = Manifest.open(snapshot.record.id, catalog.get_blobs)
            blocks = [block_id(id, 0) for _, id in snapshot_objects(manifest)]  # small files have one each
            for epoch in range(1, 5):
                table.row(str(epoch), str(len(blocks)), str(sum(not local.has(block) for block in blocks)))
                for path in snapshot.paths():
                    snapshot.read(path)
                time.sleep(1)  # until what was read is stored
        _end(greedy)
        after = _ssd()
    table.print()
    print(f"MB of {cache_bytes / 1e6:.0f}: before {_mb(before)}, after {_mb(after)}")


def _reader(dataset: str, threads: str, seed: str) -> None:
    """Read files in random order in some threads until stdin ends; print how many."""
    done = threading.Event()
    with api.open_snapshot(dataset) as snapshot:
        paths = list(snapshot.paths())

        def read(number: int) -> int:
            rng, count = random.Random(int(seed) * 1000 + number), 0
            while not done.is_set():
                snapshot.read(rng.choice(paths))
                count += 1
            return count

        with ThreadPoolExecutor(int(threads)) as pool:
            counts = [pool.submit(read, number) for number in range(int(threads))]
            sys.stdin.read()
            done.set()
            print(sum(count.result() for count in counts))


def _read_small(start: int, stop: int) -> list[float]:
    took = []
    with api.open_snapshot("small") as snapshot:
        for path in sorted(snapshot.paths())[start:stop]:
            begun = time.perf_counter()
            snapshot.read(path)
            took.append(time.perf_counter() - begun)
    return took


def bare_store(bucket: str, env: dict[str, str]) -> S3Store:
    """A bucket by obstore alone."""
    return S3Store(
        bucket, endpoint=env["AWS_ENDPOINT_URL"], access_key_id=env["AWS_ACCESS_KEY_ID"],
        secret_access_key=env["AWS_SECRET_ACCESS_KEY"], region=env["AWS_REGION"],
        virtual_hosted_style_request=False, client_options={"allow_http": True},
    )  # fmt: skip


def _read_bare(store: S3Store) -> list[float]:
    keys = sorted(each["path"] for page in store.list() for each in page)
    obstore.get(store, keys[0]).bytes()  # the connection is made
    took = []
    for key in keys[1 : SMALL_FILES // 2]:
        begun = time.perf_counter()
        obstore.get(store, key).bytes()
        took.append(time.perf_counter() - begun)
    return took


def _start(home: Home, dataset: str, threads: int, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.fairness", "--read", dataset, str(threads), str(seed)]
    return subprocess.Popen(
        command, env=home.env | {"PYTHONPATH": "."}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _end(process: subprocess.Popen[str]) -> int:
    return int(process.communicate()[0])


def _ssd() -> dict[str, int]:
    found = {each["name"]: each["ssd_bytes"] for each in api.connect().cache_status()["datasets"]}
    return {"small": 0, "greedy": 0} | found


def _mb(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / 1e6:.0f}" for name, size in sizes.items())


def _p99(took: list[float]) -> float:
    return sorted(took)[int(0.99 * len(took))]


def _resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
