"""One big file, read from start to end through the mount, against the same file on the native disk.

The object is warm in the cache on disk and the page cache is dropped before each read, of the mount and of
the native file in turns; then once more with the page cache kept. Rates are medians in MB/s.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import ResultTable, Workspace, drop_page_cache, make_file, parser, ratio, timed


def read_through(path: Path, read_bytes: int, size_bytes: int) -> None:
    """What `dd bs=…` does: one buffer, filled again and again."""
    buffer = bytearray(read_bytes)
    total = 0
    fd = os.open(path, os.O_RDONLY)
    try:
        while count := os.readv(fd, [buffer]):
            total += count
    finally:
        os.close(fd)
    if total != size_bytes:
        raise SystemExit(f"{path}: {total:,} bytes instead of {size_bytes:,}")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--size", type=int, default=2 * 2**30, help="bytes of the file")
    arguments.add_argument("--read-size", type=int, nargs="+", default=[128 * 1024, 1024 * 1024])
    arguments.add_argument("--rounds", type=int, default=3)
    args = arguments.parse_args()
    if args.quick:
        args.size, args.rounds = 40 * 2**20, 1
    with Workspace(args.dir) as work:
        server = work.s3()
        make_file(server.make_bucket("big") / "big.bin", args.size)
        native = work.folder("native") / "big.bin"
        make_file(native, args.size)
        home = work.home("home", server.env(), ram_bytes=2**26, ssd_bytes=2 * args.size + 2**28)
        mount = work.folder("mount")
        home.dsctl("snapshot", "create", "big", "--from", "s3://big")
        home.dsctl("warm", "big@latest", "--wait")
        home.dsctl("mount", "big@latest", mount)
        table = ResultTable(
            f"a file of {args.size / 2**20:,.0f} MiB, MB/s",
            "read size, page cache",
            "mount",
            "native",
            "/ native",
        )
        for read_size in args.read_size:
            for dropped in (True, False):
                rates: dict[Path, list[float]] = {mount / "big.bin": [], native: []}
                for _ in range(args.rounds):
                    for path, values in rates.items():
                        if dropped:
                            drop_page_cache()
                        seconds = timed(partial(read_through, path, read_size, args.size))
                        values.append(args.size / seconds / 1e6)
                ours, theirs = (median(values) for values in rates.values())
                label = f"{read_size // 1024} KiB, {'dropped' if dropped else 'kept'}"
                table.row(label, ours, theirs, ratio(ours, theirs))
        table.print()
        home.dsctl("umount", mount)


if __name__ == "__main__":
    main()
