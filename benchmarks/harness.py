"""What the benchmarks share: a workspace that cleans up, data sets, epochs of reads, the product behind its
CLI, and tables.

Every benchmark is a script that prints tables whose columns were measured in the same run, alternating where
the machine's mood could favour one side. Run them one at a time on a quiet machine, as root (they drop the
page cache). Where a number depends on the machine, look at the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import leftovers
from tests.servers import CephRgw, RcloneS3

OBJECT_BYTES = 110_000
"""About a JPEG of 640×480: the size the design's numbers were measured with."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Arguments every benchmark has; the description is the script's docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dir", type=Path, help="where to work: a folder on the disk to be measured")
    made.add_argument("--quick", action="store_true", help="tiny sizes: only shows that the script works")
    return made


class Workspace:
    """A temporary folder; mounts below it, homes in it and processes of those homes end with it."""

    def __init__(self, parent: Path | None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="datacache-bench-", dir=parent))
        self._stack = contextlib.ExitStack()
        self._homes: list[Home] = []

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *exc: object) -> None:
        leftovers.unmount_under(self.path)
        for home in self._homes:
            home.close()
        self._stack.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def folder(self, name: str) -> Path:
        """A new empty folder."""
        path = self.path / name
        path.mkdir(parents=True)
        return path

    def short_folder(self) -> Path:
        """A new empty folder with a path short enough for sockets in it (unix(7): 107 bytes); not in `--dir`."""
        path = Path(tempfile.mkdtemp(prefix="dcb-"))
        self._stack.callback(shutil.rmtree, path, ignore_errors=True)
        return path

    def s3(self, *, log_requests: bool = False) -> RcloneS3:
        """An S3 server whose buckets are the folders in `.root`, empty at first."""
        server = RcloneS3(self.path / "s3", live=False, log_requests=log_requests)
        self._stack.callback(server.close)
        return server

    def ceph(self, memory_bytes: int) -> CephRgw:
        """A Ceph cluster of one node with its S3 gateway, all data in memory."""
        server = CephRgw(self.path / "ceph", memory_bytes=memory_bytes)
        self._stack.callback(server.close)
        return server

    def home(self, name: str, env: dict[str, str] | None = None, **settings: object) -> Home:
        """A fresh `DATACACHE_HOME` with these settings (`ram_bytes=…`, `eviction=…`)."""
        home = Home(self.folder(name), env or {}, settings)
        self._homes.append(home)
        return home


class Home:
    """The product as a user has it: `dsctl` and the Python package, in one home."""

    def __init__(self, path: Path, env: dict[str, str], settings: dict[str, object]) -> None:
        self.path = path
        self.ram_dir = Path(tempfile.mkdtemp(prefix=leftovers.SHARED_MEMORY_PREFIX, dir=leftovers.SHARED_MEMORY))
        chosen = {"DATACACHE_HOME": path, "DATACACHE_RAM_DIR": self.ram_dir}
        chosen |= {f"DATACACHE_{name.upper()}": value for name, value in settings.items()}
        # PYTHONDONTWRITEBYTECODE: a program that compiles itself anew at every start is not what anybody uses.
        foreign = {name for name in os.environ if name.startswith(("DATACACHE_", "AWS_", "PYTHON"))}
        kept = {name: value for name, value in os.environ.items() if name not in foreign}
        self.env = kept | env | {name: str(value) for name, value in chosen.items()}

    def dsctl(self, *arguments: str | Path) -> str:
        """Run a command to its end; what it printed. A failing one ends the benchmark with its message."""
        program = str(Path(sys.executable).with_name("dsctl"))
        done = subprocess.run(
            [program, *map(str, arguments)], env=self.env, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"dsctl {arguments[0]} failed with exit code {done.returncode}")
        return done.stdout

    def processes(self) -> list[int]:
        """What runs for this home: daemon, supervisors, workers."""
        return leftovers.processes_with("DATACACHE_HOME", lambda value: value == str(self.path))

    def close(self) -> None:
        """End its processes and delete its files."""
        leftovers.unmount_under(self.path)
        leftovers.end_processes(self.processes)
        shutil.rmtree(self.ram_dir, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """This process as one of the home's, for benchmarks of the Python API."""
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update(self.env)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def make_files(folder: Path, count: int, size_bytes: int = OBJECT_BYTES) -> list[str]:
    """Files of random bytes in one flat folder; their names."""
    names = [f"{number:07d}.jpg" for number in range(count)]
    source = random.Random(0)
    for name in names:
        (folder / name).write_bytes(source.randbytes(size_bytes))
    return names


def make_file(path: Path, size_bytes: int) -> None:
    """One file of random bytes."""
    source = random.Random(0)
    with open(path, "wb") as file:
        for start in range(0, size_bytes, 2**24):
            file.write(source.randbytes(min(2**24, size_bytes - start)))


def drop_page_cache() -> None:
    """Everything written down, and no file data left in memory (proc(5), drop_caches; directory entries
    stay)."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except PermissionError:
        raise SystemExit("dropping the page cache needs root: run the benchmark with sudo") from None


@dataclass(frozen=True, kw_only=True)
class EpochReads:
    """One pass over a data set."""

    seconds: float
    files: int
    size_bytes: int

    @property
    def files_per_s(self) -> float:
        return self.files / self.seconds


def read_epoch(paths: Sequence[str], *, readers: int, seed: int, expected_bytes: int) -> EpochReads:
    """Open, read and close every file once, in a fresh random order, from this many processes.

    The clock runs from the first reader's start to the last one's end, after all are ready. A wrong number of
    bytes ends the benchmark: a fast wrong answer is none.
    """
    order = list(paths)
    random.Random(seed).shuffle(order)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(readers), context.SimpleQueue()
    workers = [
        context.Process(target=_read_all, args=(order[number::readers], barrier, results)) for number in range(readers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a reader failed")
    answers: list[tuple[float, float, int]] = [results.get() for _ in workers]
    total = sum(size for _, _, size in answers)
    if total != expected_bytes:
        raise SystemExit(f"read {total:,} bytes instead of {expected_bytes:,}")
    seconds = max(end for _, end, _ in answers) - min(start for start, _, _ in answers)
    return EpochReads(seconds=seconds, files=len(order), size_bytes=total)


def _read_all(paths: list[str], barrier: Any, results: Any) -> None:
    barrier.wait()
    start, total = time.monotonic(), 0
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            total += len(file.read())
    results.put((start, time.monotonic(), total))


def timed(action: Callable[[], object]) -> float:
    """How many seconds it takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class ResultTable:
    """Rows of text and numbers, printed aligned; a ratio is written with an ×."""

    def __init__(self, title: str, *columns: str) -> None:
        self._title = title
        self._rows: list[tuple[str, ...]] = [columns]

    def row(self, *cells: str | float | None) -> None:
        """Add a row: numbers get thousands separators, None (not measured) a dash."""
        self._rows.append(tuple(_cell(cell) for cell in cells))

    def print(self) -> None:
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        print(f"\n{self._title}")
        for number, row in enumerate(self._rows):
            first, *rest = zip(row, widths, strict=True)
            cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]
            print("  ".join(cells).rstrip())
            if number == 0:
                print("  ".join("-" * width for width in widths))
        sys.stdout.flush()


def ratio(ours: float | None, other: float | None) -> str | None:
    """Ours over theirs, as a cell."""
    return f"{ours / other:.2f}×" if ours and other else None


def _cell(value: str | float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.2f}"
