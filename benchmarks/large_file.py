"""One large file, as of a model's weights, read through mounts, against the same file on the native disk.

`mount` is a usual one, `passed` is one of large files (`dsctl mount --large-files`). The file is warm in the cache on
disk. It is read in pieces of 1 MiB; as a mapped file, of which each page is touched; and by `safetensors.load_file`.
With the page cache kept each has read it before. With the page cache dropped it has not: the usual mount is made anew
before that, since the kernel drops no page that its workers have mapped, and ends before the others are read. `first`
is a mount of large files that is made anew as well: its first opening verifies the file. Rates are medians in MB/s; the
ways take turns.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.harness import ResultTable, benchmark, drop_caches, ratio, rounds_of, timed
from benchmarks.written import blocks

_TENSOR_BYTES = 2**24
_NAME = "model.safetensors"


def write_weights(path: Path, size_bytes: int) -> None:
    """Write a file of tensors of 16 MiB each (format: 8 bytes with the length of a JSON header, which follows)."""
    ends = range(_TENSOR_BYTES, size_bytes + 1, _TENSOR_BYTES)
    tensors = {
        f"layer{end // _TENSOR_BYTES}": {
            "dtype": "F32",
            "shape": [_TENSOR_BYTES // 4],
            "data_offsets": [end - _TENSOR_BYTES, end],
        }
        for end in ends
    }
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for block in blocks(size_bytes, 2**20):
            file.write(block)


def read_through(path: Path, read_bytes: int, size_bytes: int) -> None:
    """Read as `dd bs=…` does: one buffer, filled again and again."""
    buffer = bytearray(read_bytes)
    total = 0
    with open(path, "rb", buffering=0) as file:
        while count := os.readv(file.fileno(), [buffer]):
            total += count
    if total != size_bytes:
        raise SystemExit(f"{path}: {total:,} bytes instead of {size_bytes:,}")


def read_pieces(path: Path) -> None:
    """Read pieces of 1 MiB."""
    read_through(path, 2**20, path.stat().st_size)


def touch_pages(path: Path) -> None:
    """Read one byte of each page of the mapped file."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        sum(mapped[:: mmap.PAGESIZE])


def load_tensors(path: Path) -> None:
    """Load all tensors, and use each."""
    from safetensors.torch import load_file

    for tensor in load_file(path).values():
        tensor.sum()


WAYS: dict[str, Callable[[Path], None]] = {
    "pieces of 1 MiB": read_pieces,
    "mapped pages": touch_pages,
    "safetensors": load_tensors,
}


def main() -> None:
    options = {"size": (2**31, 2**25), "rounds": (3, 1)}
    with benchmark(__doc__, **options) as (args, work):
        server = work.s3()
        mount, passed = work.folder("mount"), work.folder("passed")
        native = work.folder("native") / _NAME
        for path in (server.make_bucket("big") / _NAME, native):
            write_weights(path, args.size)
        home = work.home("home", server.env(), ram_bytes=2**26, ssd_bytes=2 * args.size + 2**28)
        home.snapshot("big", "s3://big", warm=True)

        def mount_anew(folder: Path, *, large_files: bool) -> None:
            if folder.is_mount():
                home.dsctl("umount", folder)
            home.dsctl("mount", "big@latest", folder, *(["--large-files"] if large_files else []))

        title = f"a file of {args.size / 2**20:,.0f} MiB, MB/s"
        columns = ("mount", "/ native", "passed", "/ native", "first", "/ native", "native")
        table = ResultTable(title, "read, page cache", *columns)
        for name, read in WAYS.items():
            for dropped in (False, True):

                def rate(
                    path: Path,
                    *,
                    anew: bool | None = None,
                    read: Callable[[Path], None] = read,
                    dropped: bool = dropped,
                ) -> float:
                    if anew is not None and dropped:
                        mount_anew(path.parent, large_files=anew)
                    if dropped:
                        drop_caches()
                    found = args.size / timed(lambda: read(path)) / 1e6
                    if dropped and path.parent == mount:
                        home.dsctl("umount", mount)  # its workers map the file, for the others as well
                    return found

                ways = {
                    "mount": lambda rate=rate: rate(mount / _NAME, anew=False),
                    "first": lambda rate=rate: rate(passed / _NAME, anew=True),
                    "passed": lambda rate=rate: rate(passed / _NAME),
                    "native": lambda rate=rate: rate(native),
                }
                if not dropped:
                    mount_anew(mount, large_files=False)
                    mount_anew(passed, large_files=True)
                    del ways["first"]
                found = rounds_of(ways, args.rounds, warm_up=0 if dropped else 1)
                rates = {way: median(values) for way, values in found.items()}
                theirs = rates["native"]
                cells: list[str | float | None] = []
                for way in ("mount", "passed", "first"):
                    cells += [rates.get(way), ratio(rates.get(way), theirs)]
                table.row(f"{name}, {'dropped' if dropped else 'kept'}", *cells, theirs)
        table.print()


if __name__ == "__main__":
    main()
