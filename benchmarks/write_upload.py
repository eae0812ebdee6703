"""The phase `upload` of `write_path`: what was staged is flushed, and read before and after that."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.gate import Gate
from benchmarks.harness import ResultTable, Workspace, drop_caches, ratio, read_epoch, timed
from benchmarks.large_file import read_through
from benchmarks.written import BucketView, ours, write_large, write_small
from tests.servers import CephRgw, RcloneS3

BLOCK_BYTES = 2**20
PART_BYTES = 2**24
"""Of obstore's uploads in parts."""


@dataclass(frozen=True)
class Shape:
    """Files of one size."""

    count: int
    size_bytes: int
    large: bool

    @property
    def names(self) -> list[str]:
        return [f"file-{number:06d}.bin" for number in range(self.count)]

    def __str__(self) -> str:
        one = f"{self.size_bytes / 2**20:,.0f} MiB" if self.large else f"{self.size_bytes:,} bytes"
        return f"{self.count:,} × {one}"

    def write(self, folder: Path) -> None:
        if self.large:
            for name in self.names:
                write_large(folder / name, self.size_bytes, BLOCK_BYTES, fsync=False)
        else:
            write_small([folder / name for name in self.names], self.size_bytes, writers=2, fsync=False)

    def read(self, folder: Path, seed: int) -> float:
        """Return seconds to read all of it."""
        if self.large:
            return timed(lambda: [read_through(folder / name, BLOCK_BYTES, self.size_bytes) for name in self.names])
        paths = [str(folder / name) for name in self.names]
        return read_epoch(paths, readers=1, seed=seed, expected_bytes=self.count * self.size_bytes)

    def check(self, view: BucketView, prefix: str) -> None:
        if self.large:
            for name in self.names:
                view.check_large(prefix + name, self.size_bytes, BLOCK_BYTES)
        else:
            view.check_small([prefix + name for name in self.names], self.size_bytes)


@dataclass
class _Times:
    flush: float
    nothing: float
    obstore: float
    reads: dict[tuple[str, str], tuple[float, float]]
    """(staged or uploaded, page cache) to seconds of the mount and of the disk."""


def run(args: argparse.Namespace, work: Workspace, server: RcloneS3 | CephRgw) -> None:
    """Print both tables."""
    shapes = [Shape(1, args.size, True)] + ([] if args.quick else [Shape(8, args.size // 8, True)])
    shapes += [Shape(args.files, size, False) for size in args.file_size]
    found: dict[Shape, list[_Times]] = defaultdict(list)
    for number in range(args.rounds):
        for shape in shapes:
            found[shape].append(_measure(shape, args.uploads, work, server, bare_first=number % 2 == 1))
    uploads = ResultTable(
        f"what was staged goes up, {args.uploads} requests at a time",
        "", "dsctl flush, MB/s", "obstore, MB/s", "ours /", "objects/s", "flush of nothing, s",
    )  # fmt: skip
    reads = ResultTable("reading what was just written, MB/s", "", "mount", "disk", "/ disk")
    for shape, times in found.items():
        amount = shape.count * shape.size_bytes / 1e6
        flush, obstore = (amount / median(getattr(one, name) for one in times) for name in ("flush", "obstore"))
        nothing = median(one.nothing for one in times)
        uploads.row(str(shape), flush, obstore, ratio(flush, obstore), flush / amount * shape.count, nothing)
        for state in times[0].reads:
            mount, disk = (amount / median(one.reads[state][side] for one in times) for side in (0, 1))
            reads.row(f"{shape}, {state[0]}, page cache {state[1]}", mount, disk, ratio(mount, disk))
    uploads.print()
    reads.print()


def _measure(shape: Shape, uploads: int, work: Workspace, server: RcloneS3 | CephRgw, *, bare_first: bool) -> _Times:
    # They take turns in going first: the server's memory is new to the first one.
    disk = work.folder("disk")
    with Gate(server.endpoint) as gate:
        gate.open()
        with ours(work, server, endpoint=gate.endpoint, uploads=uploads) as target:
            assert target.home is not None
            assert target.view is not None
            home, folder = target.home, target.folder
            nothing = timed(lambda: home.dsctl("flush", folder))
            os.listdir(target.folder)  # names are made without the store only where it is known which there are
            shape.write(disk)
            through = BucketView(server, target.view.bucket, endpoint=gate.endpoint)

            def put_bare() -> float:
                drop_caches()
                return timed(lambda: asyncio.run(_put_all(through, disk, shape, uploads)))

            bare = put_bare() if bare_first else 0.0
            gate.shut()
            shape.write(target.folder)
            folders = (target.folder, disk)
            reads = _read(shape, folders, "staged")
            if any(found["path"] in shape.names for page in target.view.store.list() for found in page):
                raise SystemExit("something went up while the server could not be reached")
            drop_caches()
            gate.open()
            flushed = timed(lambda: home.dsctl("flush", folder))
            shape.check(target.view, "")
            reads |= _read(shape, folders, "uploaded")
            bare = bare or put_bare()
            shape.check(target.view, "bare/")
    shutil.rmtree(disk)
    return _Times(flushed, nothing, bare, reads)


def _read(shape: Shape, folders: tuple[Path, Path], state: str) -> dict[tuple[str, str], tuple[float, float]]:
    found = {}
    for cache in ("kept", "dropped"):
        seconds = []
        for number, folder in enumerate(folders):
            if cache == "dropped":
                drop_caches()
            else:
                shape.read(folder, 0)
            seconds.append(shape.read(folder, 1 + number))
        found[state, cache] = (seconds[0], seconds[1])
    return found


async def _put_all(view: BucketView, folder: Path, shape: Shape, concurrency: int) -> None:
    waiting = iter(shape.names)
    files_at_a_time = min(concurrency, shape.count)

    async def putter() -> None:
        for name in waiting:
            await view.store.put_async(
                f"bare/{name}",
                folder / name,
                chunk_size=PART_BYTES,
                max_concurrency=max(1, concurrency // files_at_a_time),
            )

    await asyncio.gather(*(putter() for _ in range(files_at_a_time)))
