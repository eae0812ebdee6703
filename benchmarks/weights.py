"""Weights in the safetensors format: `datacache.safetensors.load_file` against the library's own on the same disk, on a
mount, on mounts of peers, and against bare obstore.

Every byte is touched after a load, as a mapped one may have read nothing yet. Warm: the file is in the cache on disk,
and a copy beside it; the page cache is dropped before each load ("dropped") or full ("kept"). Cold: a fresh home each
round. Bare obstore gets the file as one stream into one buffer of its size: it takes no ranges from `rclone serve s3`,
whose answers to them say 200 and not 206. `comparing nothing` is without the MD5 that is that server's ETag. CPU
seconds a GiB are those of the process, and of the home's.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file as load_natively
from safetensors.torch import save_file

from benchmarks.harness import Home, ResultTable, benchmark, drop_caches, ratio, rounds_of, timed
from benchmarks.peers import bare_store, rclone_mount, s3fs_mount
from benchmarks.usage import cpu_of_families
from datacache.core.ids import BLOCK_BYTES

NAME = "model.safetensors"
Load = Callable[[], Any]


def write_weights(path: Path, size_bytes: int) -> None:
    """Write layers of 64 MiB, or of a quarter where they are few."""
    layer = min(2**26, size_bytes // 4)
    raw = torch.randint(0, 256, (layer,), dtype=torch.uint8)
    save_file({f"layer.{n}": raw.roll(n).view(torch.bfloat16) for n in range(size_bytes // layer)}, path)


def touch(tensors: dict[str, torch.Tensor]) -> None:
    """Have a word of each cache line of all tensors read."""
    for tensor in tensors.values():
        tensor.view(torch.int64)[::8].sum()


def measured(load: Load, size_bytes: int, beside: Callable[[], list[int]] = list) -> tuple[float, float]:
    """Return GB/s of a load and a touch, and the CPU seconds of a GiB."""
    before = time.process_time() + cpu_of_families(beside())
    seconds = timed(lambda: touch(load()))
    cpu_s = time.process_time() + cpu_of_families(beside()) - before
    return size_bytes / seconds / 1e9, cpu_s * 2**30 / size_bytes


def print_table(title: str, found: dict[str, list[tuple[float, float]]], reference: str) -> None:
    table = ResultTable(title, "", "GB/s", f"/ {reference}", "CPU s a GiB")
    middle = {name: [median(each) for each in zip(*some, strict=True)] for name, some in found.items()}
    for name, (rate, cpu_s) in middle.items():
        table.row(name, round(rate, 2), ratio(rate, middle[reference][0]), round(cpu_s, 2))
    table.print()


def load_by_obstore(store: Any, size_bytes: int) -> dict[str, torch.Tensor]:
    """Get a file as one stream into one buffer."""
    out, at = torch.empty(size_bytes, dtype=torch.uint8), 0
    for data in store.get(NAME).stream(min_chunk_size=BLOCK_BYTES):
        out[at : at + len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        at += len(data)
    return {"all": out[: size_bytes // 8 * 8]}


def main() -> None:
    options = {"size": (2**32, 24 * 2**20), "rounds": (3, 1), "warm_only": False, "cold_only": False}
    with benchmark(__doc__, **options) as (args, work):
        server = work.s3()
        bucket, native = server.make_bucket("weights"), work.folder("native") / NAME
        write_weights(bucket / NAME, args.size)
        size, homes = (bucket / NAME).stat().st_size, [0]

        def home(**settings: object) -> Home:
            homes[0] += 1
            made = work.home(f"home-{homes[0]}", server.env(), ram_bytes=2**26, ssd_bytes=2 * size + 2**28, **settings)
            made.snapshot("weights", "s3://weights")
            made.dsctl("daemon", "start")
            return made

        def ours(of: Home, **how: Any) -> Load:
            from datacache.safetensors import load_file

            def load() -> dict[str, torch.Tensor]:
                with of.environment():
                    return load_file(f"weights@latest/{NAME}", **how)

            return load

        if not args.cold_only:
            warm, mount = home(check_md5=0), work.folder("mount")
            warm.dsctl("warm", "weights@latest", "--wait")
            shutil.copyfile(bucket / NAME, native)
            warm.dsctl("mount", "weights@latest", mount)
            ways: dict[str, Load] = {
                "native": lambda: load_natively(native),
                "load_file": ours(warm),
                "mount, native": lambda: load_natively(mount / NAME),
                "native, pread": lambda: load_natively(native, backend="pread"),
                "load_file, pread": ours(warm, backend="pread"),
            }
            for dropped in (True, False):

                def rate(load: Load, dropped: bool = dropped) -> tuple[float, float]:
                    if dropped:
                        drop_caches()
                    return measured(load, size, warm.processes)

                found = rounds_of(
                    {name: lambda load=load: rate(load) for name, load in ways.items()},
                    args.rounds,
                    warm_up=0 if dropped else 1,
                )
                print_table(f"{size / 2**20:,.0f} MiB, page cache {'dropped' if dropped else 'kept'}", found, "native")
            warm.dsctl("umount", mount)
            warm.close()
        if args.warm_only:
            return

        def cold(**settings: object) -> tuple[float, float]:
            made = home(**settings)
            try:
                return measured(ours(made), size, made.processes)
            finally:
                made.close()

        def peer(mounted: Any) -> tuple[float, float]:
            folder = work.folder(f"peer-{time.monotonic_ns()}")
            with ExitStack() as stack:
                mount = stack.enter_context(mounted(server, "weights", folder))
                return measured(lambda: load_natively(mount / NAME), size)

        store = bare_store("weights", server.env())
        found = rounds_of(
            {
                "obstore": lambda: measured(lambda: load_by_obstore(store, size), size),
                "load_file, comparing nothing": lambda: cold(check_md5=0),
                "load_file": cold,
                "rclone mount, native": lambda: peer(rclone_mount),
                "s3fs-fuse, native": lambda: peer(s3fs_mount),
            },
            args.rounds,
        )
        print_table(f"{size / 2**20:,.0f} MiB, cold", found, "obstore")


if __name__ == "__main__":
    main()
