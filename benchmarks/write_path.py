"""Writing through a directory into a bucket: our read-write mount, rclone mount (`--vfs-cache-mode writes`), s3fs-fuse
with `use_cache` and without, and the disk that all of them stage on.

The S3 server keeps its objects in memory on the same machine. Every system gets a bucket and caches of its own, which
are empty; what is in the bucket at the end is compared with what was written. Phases:
  large    one file, in writes of 1 MiB and of 64 KiB: until close returns, until it is in the bucket
  small    many files by one writer and by eight (processes): the same
  upload   what was staged while the server refused every connection goes up: `dsctl flush` against bare obstore putting
           the same files with as many requests at a time. Both through the gate that refused. Before and after that it
           is read through the mount and, in turns, from the disk.
  memory   of our mount's processes with many files that cannot be uploaded, and with a large one being written
Rates are medians of the rounds, in which systems take turns. "In the bucket" counts from the first write. rclone mount
begins an upload 5 s after the close, which is its default.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from time import monotonic

from benchmarks import write_memory, write_upload
from benchmarks.harness import ResultTable, Workspace, benchmark, drop_caches, ratio
from benchmarks.written import OURS, SYSTEMS, System, system, write_large, write_small
from tests import leftovers
from tests.servers import CephRgw, RcloneS3

PHASES = ("large", "small", "upload", "memory")
Measure = Callable[[System], tuple[float, float | None]]
"""Seconds until close returned and until all was in the bucket."""
Times = dict[str, list[tuple[float, float | None]]]


def main() -> None:
    with benchmark(
        __doc__,
        {"server": ("rclone", "ceph"), "phases": PHASES, "systems": SYSTEMS},
        server="rclone",
        phases=list(PHASES),
        systems=(
            [name for name in SYSTEMS if not name.endswith("uploaded")],
            ["disk, fsync", OURS, "rclone"],
        ),
        rounds=(3, 1),
        size=(2**30, 2**23),
        write_size=([2**20, 2**16], [2**20]),
        files=(2000, 20),
        file_size=([4096, 100_000], [4096]),
        writers=([1, 8], [2]),
        uploads=8,
        dirty_files=(100_000, 50),
        large_gib=(10.0, 2**-6),
        drain=(False, True),
    ) as (args, work):
        if args.quick:
            os.environ["RCLONE_VFS_WRITE_BACK"] = "100ms"
        server: RcloneS3 | CephRgw
        if args.server == "ceph":
            server = work.ceph(8 * 2**30)
        else:  # with its objects in memory: it is not the disk that is measured
            memory = work.short_folder(prefix=leftovers.SHARED_MEMORY_PREFIX, dir=leftovers.SHARED_MEMORY)
            server = work.s3(root=memory)
        for write_size in args.write_size if "large" in args.phases else ():
            times = _rounds(args, work, server, partial(_large, args.size, write_size))
            title = f"a file of {args.size / 2**20:,.0f} MiB in writes of {write_size // 1024:,} KiB, MB/s"
            _print(title, times, args.size / 1e6)
        for file_size, writers in product(args.file_size, args.writers) if "small" in args.phases else ():
            times = _rounds(args, work, server, partial(_small, args.files, file_size, writers))
            _print(f"{args.files:,} files × {file_size:,} bytes, writers: {writers}, files/s", times, args.files)
        if "upload" in args.phases:
            write_upload.run(args, work, server)
        if "memory" in args.phases:
            write_memory.run(args, work, server)


def _large(size_bytes: int, write_size: int, target: System) -> tuple[float, float | None]:
    start = monotonic()
    write_large(target.folder / "large.bin", size_bytes, write_size, fsync=target.fsync)
    closed = monotonic() - start
    if target.view is None:
        return closed, None
    target.view.wait_for("large.bin", 1, size_bytes)
    arrived = monotonic() - start
    target.view.check_large("large.bin", size_bytes, write_size)
    return closed, arrived


def _small(count: int, file_size: int, writers: int, target: System) -> tuple[float, float | None]:
    names = [f"small-{number:06d}.bin" for number in range(count)]
    start = monotonic()
    closed = write_small([target.folder / n for n in names], file_size, writers=writers, fsync=target.fsync)
    if target.view is None:
        return closed, None
    target.view.wait_for("small-", count, file_size)
    arrived = monotonic() - start
    target.view.check_small(names, file_size)
    return closed, arrived


def _rounds(args: argparse.Namespace, work: Workspace, server: RcloneS3 | CephRgw, measure: Measure) -> Times:
    times: Times = defaultdict(list)
    for _ in range(args.rounds):
        for name in args.systems:
            with system(name, work, server) as target:
                drop_caches()
                times[name].append(measure(target))
    return times


def _print(title: str, times: Times, amount: float) -> None:
    """Print rates of both, ours over each, and each over the disk with fsync."""
    closed = {name: amount / median(closed for closed, _ in found) for name, found in times.items()}
    there = {name: [arrived for _, arrived in found if arrived is not None] for name, found in times.items()}
    arrived = {name: amount / median(found) for name, found in there.items() if found}
    table = ResultTable(title, "", "until close", "ours /", "/ disk, fsync", "until in the bucket", "ours /")
    for name in times:
        table.row(
            name,
            closed[name],
            ratio(closed.get(OURS), closed[name]) if name != OURS else None,
            ratio(closed[name], closed.get("disk, fsync")) if name != "disk, fsync" else None,
            arrived.get(name),
            ratio(arrived.get(OURS), arrived.get(name)) if name != OURS else None,
        )
    table.print()


if __name__ == "__main__":
    main()
