"""Weights in the safetensors format: `datacache.safetensors.load_file` against the library's own on the same disk, on
mounts, on mounts of peers, and against bare obstore.

Every byte is used after a load, as a mapped file may have been read by nobody yet: "GB/s" is of load and use together.
Warm: the file is in the cache on disk, and a copy beside it; the page cache is dropped before each load ("dropped") or
full ("kept"). `page cache, read` reads the copy into one buffer of 4 MiB again and again, and uses nothing else: what
the page cache has to give to those who cannot map it. `passed` is a mount of large files that was opened before.

Cold: a fresh home each round, whose daemon has answered a first request. A server that answers ranges by sendfile(2)
(`--server ranges`), or Ceph's gateway (`ceph`); bare obstore gets ranges of 4 MiB, eight at a time, into one buffer of
the file's size. CPU seconds a GiB are those of the process and of what runs for the home; cold, of a peer's mount, too.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file as load_natively
from safetensors.torch import save_file

from benchmarks.harness import Home, ResultTable, Workspace, benchmark, drop_caches, ratio, rounds_of, timed
from benchmarks.peers import bare_store, rclone_mount, s3fs_mount
from benchmarks.ranges_s3 import ranges_s3
from benchmarks.usage import cpu_of_families
from datacache.core.errors import WeightsError
from datacache.core.ids import BLOCK_BYTES

NAME, SMALL = "model.safetensors", "small.safetensors"
URL = f"s3://weights/{NAME}"
_AT_ONCE = 8
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
    """Get ranges of a file into one buffer."""
    out = torch.empty(size_bytes, dtype=torch.uint8)
    array = out.numpy()

    def get(start: int) -> None:
        stop = min(start + BLOCK_BYTES, size_bytes)
        array[start:stop] = np.frombuffer(store.get_range(NAME, start=start, end=stop), np.uint8)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(get, range(0, size_bytes, BLOCK_BYTES)))
    return {"all": out[: size_bytes // 8 * 8]}


def read_page_cache(path: Path) -> dict[str, torch.Tensor]:
    """Read a file into one buffer again and again, and return nothing that would have to be used."""
    buffer = bytearray(BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while os.readv(file.fileno(), [buffer]):
            pass
    return {}


@contextmanager
def serving(kind: str, work: Workspace, size_bytes: int) -> Iterator[tuple[Any, dict[str, str]]]:
    """Serve a bucket with the weights and a small file; yield the server, if it is one for peers, and the variables."""
    folder = work.folder("served") / "weights"
    folder.mkdir()
    write_weights(folder / NAME, size_bytes)
    (folder / SMALL).write_bytes(b"no weights")
    if kind == "ranges":
        with ranges_s3(folder.parent) as env:
            yield None, env
        return
    server = work.ceph(3 * size_bytes + 2**29)
    server.make_bucket("weights")
    for path in folder.iterdir():
        server.client().upload_file(str(path), "weights", path.name)
    yield server, server.env()


def cold(args: Any, work: Workspace) -> None:
    """Print how fast each way gets a file that is nowhere on this machine."""
    with serving(args.server, work, args.size) as (server, env):
        size, homes = (work.path / "served" / "weights" / NAME).stat().st_size, iter(range(1000))

        def ours(**settings: object) -> tuple[float, float]:
            from datacache.safetensors import load_file

            made = work.home(f"cold-{next(homes)}", env, ram_bytes=2**26, ssd_bytes=2 * size + 2**28, **settings)
            made.dsctl("daemon", "start")
            try:
                with made.environment():
                    with suppress(WeightsError):
                        load_file(f"s3://weights/{SMALL}")
                    return measured(lambda: load_file(URL), size, made.processes)
            finally:
                made.close()

        def peer(mounted: Any) -> tuple[float, float]:
            with mounted(server, "weights", work.folder(f"peer-{next(homes)}")) as mount:
                return measured(lambda: load_natively(mount / NAME), size, lambda: peers_of(mount))

        store = bare_store("weights", env)
        ways: dict[str, Callable[[], tuple[float, float]]] = {
            "obstore": lambda: measured(lambda: load_by_obstore(store, size), size),
            "load_file": ours,
            "load_file, comparing nothing": lambda: ours(check_md5=0),
        }
        if server is not None:
            ways["rclone mount, native"] = lambda: peer(rclone_mount)
            ways["s3fs-fuse, native"] = lambda: peer(s3fs_mount)
        else:
            del ways["load_file, comparing nothing"]  # there is nothing to compare
        print_table(f"{size / 2**20:,.0f} MiB, cold, from {args.server}", rounds_of(ways, args.rounds), "obstore")


def peers_of(mount: Path) -> list[int]:
    """Return the process that serves a mount of a peer."""
    return [
        int(each.parent.name)
        for each in Path("/proc").glob("[0-9]*/cmdline")
        if str(mount).encode() in each.read_bytes().split(b"\0")
    ]


def warm(args: Any, work: Workspace) -> None:
    """Print how fast each way loads a file that is on this machine."""
    server = work.s3()
    bucket, native = server.make_bucket("weights"), work.folder("native") / NAME
    write_weights(bucket / NAME, args.size)
    size = (bucket / NAME).stat().st_size
    home = work.home("warm", server.env(), ram_bytes=2**26, ssd_bytes=2 * size + 2**28, check_md5=0)
    home.snapshot("weights", "s3://weights", warm=True)
    shutil.copyfile(bucket / NAME, native)
    mount, passed = work.folder("mount"), work.folder("passed")
    home.dsctl("mount", "weights@latest", passed, "--large-files")

    def ours(of: Home, **how: Any) -> Load:
        from datacache.safetensors import load_file

        def load() -> dict[str, torch.Tensor]:
            with of.environment():
                return load_file(f"weights@latest/{NAME}", **how)

        return load

    ways: dict[str, Load] = {
        "native": lambda: load_natively(native),
        "load_file": ours(home),
        "page cache, read": lambda: read_page_cache(native),
        "mount, native": lambda: load_natively(mount / NAME),
        "passed, native": lambda: load_natively(passed / NAME),
        "native, pread": lambda: load_natively(native, backend="pread"),
        "load_file, pread": ours(home, backend="pread"),
    }
    if not args.no_peers:
        for name, mounted in (("rclone", rclone_mount), ("s3fs-fuse", s3fs_mount)):
            place = work.stack.enter_context(mounted(server, "weights", work.folder(name)))
            ways[f"{name} mount, native"] = lambda place=place: load_natively(place / NAME)
    os.close(os.open(passed / NAME, os.O_RDONLY))  # verifies it
    for dropped in (True, False):

        def rate(name: str, load: Load, dropped: bool = dropped) -> tuple[float, float]:
            usual = name.startswith("mount")
            if usual:
                home.dsctl("mount", "weights@latest", mount)
            if dropped:
                drop_caches()
            elif usual:
                touch(load())
            found = measured(load, size, home.processes)
            if usual:
                home.dsctl("umount", mount)  # the kernel drops no page of the cached file that its workers have mapped
            return found

        of = {name: lambda name=name, load=load: rate(name, load) for name, load in ways.items()}
        found = rounds_of(of, args.rounds, warm_up=0 if dropped else 1)
        print_table(f"{size / 2**20:,.0f} MiB, page cache {'dropped' if dropped else 'kept'}", found, "native")


def main() -> None:
    options = {"size": (2**30, 24 * 2**20), "rounds": (3, 1), "server": "ranges"}
    flags = {"warm_only": False, "cold_only": False, "no_peers": False}
    with benchmark(__doc__, {"server": ("ranges", "ceph")}, **options, **flags) as (args, work):
        if not args.cold_only:
            warm(args, work)
        if not args.warm_only:
            cold(args, work)


if __name__ == "__main__":
    main()
