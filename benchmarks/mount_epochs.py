"""Epochs over many small files through a mount: ours, rclone mount, s3fs-fuse, and a copy on the native disk.

5,000 files of 110 KB come from `rclone serve s3` on the same machine. For each number of reader processes and
each system, with its caches empty at first:
  cold          first epoch, everything comes from the server
  warm          the page cache is left as it is
  warm, dropped the page cache is dropped before the epoch: the files come from the system's own cache on disk
Every epoch has its own random order. Warm rows are the median of several epochs.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.harness import (
    OBJECT_BYTES,
    ResultTable,
    Workspace,
    drop_page_cache,
    make_files,
    parser,
    ratio,
    read_epoch,
)
from benchmarks.peers import rclone_mount, s3fs_mount
from tests.servers import RcloneS3

PHASES = ("cold", "warm", "warm, dropped")
SYSTEMS = ("datacache", "native", "rclone", "s3fs")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--files", type=int, default=5000)
    arguments.add_argument("--size", type=int, default=OBJECT_BYTES, help="bytes of a file")
    arguments.add_argument("--readers", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--rounds", type=int, default=3, help="warm epochs a phase")
    arguments.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    args = arguments.parse_args()
    if args.quick:
        args.files, args.rounds = 50, 1
    with Workspace(args.dir) as work:
        server = work.s3()
        names = make_files(server.make_bucket("images"), args.files, args.size)
        table = ResultTable(
            f"{args.files:,} files × {args.size:,} bytes, files/s",
            "readers, phase", *args.systems, *(f"/ {name}" for name in args.systems if name != "datacache"),
        )  # fmt: skip
        for readers in args.readers:
            rates = {system: _measure(system, work, server, names, readers, args) for system in args.systems}
            for phase in PHASES:
                ours = rates.get("datacache", {}).get(phase)
                table.row(
                    f"{readers}, {phase}",
                    *(rates[system].get(phase) for system in args.systems),
                    *(ratio(ours, rates[s].get(phase)) for s in args.systems if s != "datacache"),
                )
        table.print()


def _measure(
    system: str, work: Workspace, server: RcloneS3, names: list[str], readers: int, args: argparse.Namespace
) -> dict[str, float]:
    """Files a second by phase, on fresh caches."""
    rates: dict[str, float] = {}
    folder = work.folder(f"{system}-{readers}")
    seeds = iter(range(10_000))
    with _mounted(system, work, server, folder) as mount:
        paths = [str(mount / name) for name in names]

        def epoch() -> float:
            done = read_epoch(paths, readers=readers, seed=next(seeds), expected_bytes=len(paths) * args.size)
            return done.files_per_s

        if system != "native":
            drop_page_cache()
            rates["cold"] = epoch()
        epoch()
        rates["warm"] = median([epoch() for _ in range(args.rounds)])
        dropped = []
        for _ in range(args.rounds):
            drop_page_cache()
            dropped.append(epoch())
        rates["warm, dropped"] = median(dropped)
    shutil.rmtree(folder, ignore_errors=True)
    return rates


@contextmanager
def _mounted(system: str, work: Workspace, server: RcloneS3, folder: Path) -> Iterator[Path]:
    if system == "rclone":
        with rclone_mount(server, "images", folder) as mount:
            yield mount
    elif system == "s3fs":
        with s3fs_mount(server, "images", folder) as mount:
            yield mount
    elif system == "native":
        yield Path(shutil.copytree(server.root / "images", folder / "copy"))
    else:
        home = work.home(f"{folder.name}-home", server.env())
        mount = folder / "mount"
        mount.mkdir()
        home.dsctl("snapshot", "create", "images", "--from", "s3://images")
        home.dsctl("mount", "images@latest", mount)
        yield mount
        home.dsctl("umount", mount)
        home.close()


if __name__ == "__main__":
    main()
