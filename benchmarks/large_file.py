"""One big file, read from start to end through the mount, against the same file on the native disk.

The object is warm in the cache on disk and the page cache is dropped before each read, of the mount and of the native
file in turns; then once more with the page cache kept. Rates are medians in MB/s.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median

from benchmarks.harness import ResultTable, benchmark, drop_caches, ratio, rounds_of, timed
from benchmarks.written import write_large


def read_through(path: Path, read_bytes: int, size_bytes: int) -> None:
    """Read as `dd bs=…` does: one buffer, filled again and again."""
    buffer = bytearray(read_bytes)
    total = 0
    with open(path, "rb", buffering=0) as file:
        while count := os.readv(file.fileno(), [buffer]):
            total += count
    if total != size_bytes:
        raise SystemExit(f"{path}: {total:,} bytes instead of {size_bytes:,}")


def main() -> None:
    options = {"size": (2**31, 40 * 2**20), "read_size": ([2**17, 2**20], [2**20]), "rounds": (3, 1)}
    with benchmark(__doc__, **options) as (args, work):
        server = work.s3()
        native, mount = work.folder("native") / "big.bin", work.folder("mount")
        for path in (server.make_bucket("big") / "big.bin", native):
            write_large(path, args.size, 2**20, fsync=False)
        home = work.home("home", server.env(), ram_bytes=2**26, ssd_bytes=2 * args.size + 2**28)
        home.snapshot("big", "s3://big", warm=True)
        home.dsctl("mount", "big@latest", mount)
        title = f"a file of {args.size / 2**20:,.0f} MiB, MB/s"
        table = ResultTable(title, "read size, page cache", "mount", "native", "/ native")
        for read_size in args.read_size:
            for dropped in (True, False):

                def rate(path: Path, read_size: int = read_size, dropped: bool = dropped) -> float:
                    if dropped:
                        drop_caches()
                    return args.size / timed(lambda: read_through(path, read_size, args.size)) / 1e6

                found = rounds_of(
                    {"mount": lambda: rate(mount / "big.bin"), "native": lambda: rate(native)}, args.rounds
                )
                ours, theirs = map(median, found.values())
                label = f"{read_size // 1024} KiB, {'dropped' if dropped else 'kept'}"
                table.row(label, ours, theirs, ratio(ours, theirs))
        table.print()
        home.dsctl("umount", mount)


if __name__ == "__main__":
    main()
