"""Epochs over many small files through a mount: ours, rclone mount, s3fs-fuse, and a copy on the native disk.

5,000 files of 110 KB come from `rclone serve s3` on the same machine. For each number of reader processes and each
system, with its caches empty at first:
  cold          first epoch, everything comes from the server
  warm          the page cache is left as it is
  warm, dropped the page cache is dropped before the epoch: the files come from the system's own cache on disk
Every epoch has its own random order. Warm rows are the median of several epochs.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.harness import (
    OBJECT_BYTES,
    ResultTable,
    Workspace,
    benchmark,
    drop_caches,
    make_files,
    ratio,
    read_epoch,
)
from benchmarks.peers import rclone_mount, s3fs_mount
from tests.servers import RcloneS3

PHASES = ("cold", "warm", "warm, dropped")
SYSTEMS = ["datacache", "native", "rclone", "s3fs"]


def main() -> None:
    with benchmark(
        __doc__,
        {"systems": SYSTEMS},
        files=(5000, 50),
        size=OBJECT_BYTES,
        readers=([1, 2], [2]),
        rounds=(3, 1),
        systems=SYSTEMS,
    ) as (args, work):
        server = work.s3()
        names = make_files(server.make_bucket("images"), args.files, args.size)
        others = [name for name in args.systems if name != "datacache"]
        title = f"{args.files:,} files × {args.size:,} bytes, files/s"
        table = ResultTable(title, "readers, phase", *args.systems, *(f"/ {name}" for name in others))
        for readers in args.readers:
            rates = {system: _measure(system, work, server, names, readers, args) for system in args.systems}
            for phase in PHASES:
                ours = rates.get("datacache", {}).get(phase)
                ratios = [ratio(ours, rates[name].get(phase)) for name in others]
                table.row(f"{readers}, {phase}", *(rates[name].get(phase) for name in args.systems), *ratios)
        table.print()


def _measure(
    system: str, work: Workspace, server: RcloneS3, names: list[str], readers: int, args: argparse.Namespace
) -> dict[str, float]:
    """Return files a second by phase, on fresh caches."""
    rates: dict[str, float] = {}
    folder = work.folder(f"{system}-{readers}")
    seeds = itertools.count()
    with _mounted(system, work, server, folder) as mount:
        paths = [str(mount / name) for name in names]

        def epoch(*, dropped: bool) -> float:
            if dropped:
                drop_caches()
            size_bytes = len(paths) * args.size
            return len(paths) / read_epoch(paths, readers=readers, seed=next(seeds), expected_bytes=size_bytes)

        if system != "native":
            rates["cold"] = epoch(dropped=True)
        epoch(dropped=False)
        for phase in PHASES[1:]:
            rates[phase] = median([epoch(dropped=phase.endswith("dropped")) for _ in range(args.rounds)])
    shutil.rmtree(folder, ignore_errors=True)
    return rates


@contextmanager
def _mounted(system: str, work: Workspace, server: RcloneS3, folder: Path) -> Iterator[Path]:
    if system in ("rclone", "s3fs"):
        with (rclone_mount if system == "rclone" else s3fs_mount)(server, "images", folder) as mount:
            yield mount
    elif system == "native":
        yield Path(shutil.copytree(server.root / "images", folder / "copy"))
    else:
        home = work.home(f"{folder.name}-home", server.env())
        mount = work.folder(f"{folder.name}/mount")
        home.snapshot("images", "s3://images")
        home.dsctl("mount", "images@latest", mount)
        yield mount
        home.dsctl("umount", mount)
        home.close()


if __name__ == "__main__":
    main()
