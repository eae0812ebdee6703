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
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import monotonic

from benchmarks import write_memory, write_upload
from benchmarks.harness import ResultTable, Workspace, drop_page_cache, parser, ratio
from benchmarks.write_systems import OURS, SYSTEMS, System, system
from benchmarks.written import digest_of_blocks, write_large, write_small
from tests import leftovers
from tests.servers import CephRgw, RcloneS3

PHASES = ("large", "small", "upload", "memory")
DEFAULT_SYSTEMS = tuple(name for name in SYSTEMS if not name.endswith("uploaded"))
Measure = Callable[[System], tuple[float, float | None]]
"""Seconds until close returned and until all was in the bucket."""
Times = dict[str, list[tuple[float, float | None]]]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--server", choices=("rclone", "ceph"), default="rclone")
    arguments.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    arguments.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(DEFAULT_SYSTEMS))
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--size", type=int, default=2**30, help="bytes of the large file")
    arguments.add_argument("--write-size", type=int, nargs="+", default=[2**20, 2**16])
    arguments.add_argument("--files", type=int, default=2000)
    arguments.add_argument("--file-size", type=int, nargs="+", default=[4096, 100_000])
    arguments.add_argument("--writers", type=int, nargs="+", default=[1, 8])
    arguments.add_argument("--uploads", type=int, default=8, help="requests at a time in the phase upload")
    arguments.add_argument("--dirty-files", type=int, default=100_000, help="of the phase memory, 4 KiB each")
    arguments.add_argument("--large-gib", type=float, default=10, help="the file being written in the phase memory")
    arguments.add_argument("--drain", action="store_true", help="have the phase memory upload it all in the end")
    args = arguments.parse_args()
    if args.quick:
        args.rounds, args.size, args.files, args.dirty_files, args.large_gib = 1, 2**23, 20, 50, 2**-6
        args.write_size, args.file_size, args.writers, args.drain = [2**20], [4096], [2], True
        args.systems = [name for name in args.systems if name in ("disk, fsync", OURS, "rclone")]
        os.environ["RCLONE_VFS_WRITE_BACK"] = "100ms"
    with ExitStack() as stack:
        work = stack.enter_context(Workspace(args.dir))
        server = _server(args, work, stack)
        if "large" in args.phases:
            for write_size in args.write_size:
                _large(args, work, server, write_size)
        if "small" in args.phases:
            for file_size in args.file_size:
                for writers in args.writers:
                    _small(args, work, server, file_size, writers)
        if "upload" in args.phases:
            write_upload.run(args, work, server)
        if "memory" in args.phases:
            write_memory.run(args, work, server)


def _server(args: argparse.Namespace, work: Workspace, stack: ExitStack) -> RcloneS3 | CephRgw:
    """With its objects in memory: it is not the disk that is measured."""
    if args.server == "ceph":
        return work.ceph(8 * 2**30)
    root = stack.enter_context(
        tempfile.TemporaryDirectory(prefix=leftovers.SHARED_MEMORY_PREFIX, dir=leftovers.SHARED_MEMORY)
    )
    server = RcloneS3(work.path / "s3", root=Path(root), live=False, log_requests=False)
    stack.callback(server.close)
    return server


def _large(args: argparse.Namespace, work: Workspace, server: RcloneS3 | CephRgw, write_size: int) -> None:
    digest = digest_of_blocks(args.size, write_size)

    def measure(target: System) -> tuple[float, float | None]:
        start = monotonic()
        write_large(target.folder / "large.bin", args.size, write_size, fsync=target.fsync)
        closed = monotonic() - start
        if target.view is None:
            return closed, None
        target.view.wait_for_one("large.bin", args.size)
        arrived = monotonic() - start
        target.view.check_large("large.bin", digest)
        return closed, arrived

    times = _rounds(args, work, server, measure)
    _print(
        f"a file of {args.size / 2**20:,.0f} MiB in writes of {write_size // 1024:,} KiB, MB/s", times, args.size / 1e6
    )


def _small(args: argparse.Namespace, work: Workspace, server: RcloneS3 | CephRgw, file_size: int, writers: int) -> None:
    names = [f"small-{number:06d}.bin" for number in range(args.files)]

    def measure(target: System) -> tuple[float, float | None]:
        start = monotonic()
        closed = write_small([target.folder / n for n in names], file_size, writers=writers, fsync=target.fsync)
        if target.view is None:
            return closed, None
        target.view.wait_for_all("small-", args.files, file_size)
        arrived = monotonic() - start
        target.view.check_small(names, file_size)
        return closed, arrived

    times = _rounds(args, work, server, measure)
    _print(f"{args.files:,} files × {file_size:,} bytes, writers: {writers}, files/s", times, args.files)


def _rounds(args: argparse.Namespace, work: Workspace, server: RcloneS3 | CephRgw, measure: Measure) -> Times:
    times: Times = defaultdict(list)
    for _ in range(args.rounds):
        for name in args.systems:
            with system(name, work, server) as target:
                drop_page_cache()
                times[name].append(measure(target))
    return times


def _print(title: str, times: Times, amount: float) -> None:
    """Rates of both, ours over each, and each over the disk with fsync."""
    closed = {name: amount / median(closed for closed, _ in found) for name, found in times.items()}
    arrived = {
        name: amount / median(arrived for _, arrived in found if arrived is not None)
        for name, found in times.items()
        if found[0][1] is not None
    }
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
