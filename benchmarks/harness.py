"""Shared by benchmarks: options, a workspace that cleans up, files, rounds, the product behind its CLI, tables.

Every benchmark is a script whose tables have columns of one run, in rounds that alternate. Run one at a time on a quiet
machine, as root (the page cache is dropped). Where a number depends on the machine, look at the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests import leftovers
from tests.servers import CephRgw, RcloneS3, program

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "BENCHMARKS.md"
OBJECT_BYTES = 110_000
"""About a JPEG of 640×480: the size the design's numbers were measured with."""
T = TypeVar("T")
DSCTL = Path(sys.executable).with_name("dsctl")


@contextlib.contextmanager
def benchmark(
    doc: str | None, choices: Mapping[str, Sequence[str]] | None = None, **options: Any
) -> Iterator[tuple[argparse.Namespace, Workspace]]:
    """Parse a script's options and make its workspace; with `--write` put its tables into docs/BENCHMARKS.md.

    An option is given by its default, or by a pair: the default, and what `--quick` takes.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where to work: a folder on the disk to be measured")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that the script works")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/BENCHMARKS.md")
    parser.add_argument("--peers-dir", type=Path, help="where the virtual environments of peers are, or are made")
    for name, value in options.items():
        default = value[0] if isinstance(value, tuple) else value
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            kind = type(default[0]) if isinstance(default, list) and default else str
            many: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {}
            kind = kind if many else type(default)
            parser.add_argument(flag, type=kind, default=default, choices=(choices or {}).get(name), **many)
    args = parser.parse_args()
    if args.quick:
        vars(args).update({name: value[1] for name, value in options.items() if isinstance(value, tuple)})
    with Workspace(args.dir) as work:
        yield args, work
    if args.write:
        write_results(RESULTS, Path(sys.argv[0]).stem, ResultTable.printed)


class Workspace:
    """A temporary folder; mounts below it, homes in it and processes of those homes end with it."""

    def __init__(self, parent: Path | None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="datacache-bench-", dir=parent))
        self.stack = contextlib.ExitStack()
        """Everything to be closed at the end."""
        self._homes: list[Home] = []

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *exc: object) -> None:
        leftovers.unmount_under(self.path)
        for home in self._homes:
            home.close()
        self.stack.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def folder(self, name: str) -> Path:
        """Make a new empty folder."""
        path = self.path / name
        path.mkdir(parents=True)
        return path

    def short_folder(self, **where: Any) -> Path:
        """Make a folder with a path short enough for sockets in it (unix(7): 107 bytes), outside of `--dir`."""
        return Path(self.stack.enter_context(tempfile.TemporaryDirectory(**({"prefix": "dcb-"} | where))))

    def s3(self, *, log_requests: bool = False, root: Path | None = None) -> RcloneS3:
        """Start an S3 server whose buckets are the folders in `.root`, empty at first."""
        server = RcloneS3(self.path / "s3", root=root, live=False, log_requests=log_requests)
        self.stack.callback(server.close)
        return server

    def ceph(self, memory_bytes: int) -> CephRgw:
        """Start a Ceph cluster of one node with its S3 gateway, all data in memory."""
        server = CephRgw(self.path / "ceph", memory_bytes=memory_bytes)
        self.stack.callback(server.close)
        return server

    def home(self, name: str, env: Mapping[str, str] | None = None, **settings: object) -> Home:
        """Make a fresh `DATACACHE_HOME` with these settings (`ram_bytes=…`, `eviction=…`)."""
        home = Home(self.folder(name), env or {}, settings)
        self._homes.append(home)
        return home


class Home:
    """The product as a user has it: `dsctl` and the Python package, in one home."""

    def __init__(
        self, path: Path, env: Mapping[str, str], settings: dict[str, object], *, enter: Sequence[str] = ()
    ) -> None:
        self.path = path
        self.enter = enter
        """The words before each command: they take it to where the home is, such as a node."""
        self.ram_dir = Path(tempfile.mkdtemp(prefix=leftovers.SHARED_MEMORY_PREFIX, dir=leftovers.SHARED_MEMORY))
        chosen = {"DATACACHE_HOME": path, "DATACACHE_RAM_DIR": self.ram_dir}
        chosen |= {f"DATACACHE_{name.upper()}": value for name, value in settings.items()}
        chosen["PYTHONPATH"] = ROOT  # what is measured is the tree that the benchmark is of, wherever it is installed
        self.env = {**foreign_environment(), **env} | {name: str(value) for name, value in chosen.items()}

    def dsctl(self, *arguments: str | Path) -> str:
        """Run a command to its end and return what it printed. A failing one ends the benchmark."""
        done = subprocess.run(
            [*self.enter, DSCTL, *map(str, arguments)], env=self.env, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"dsctl {arguments[0]} failed with exit code {done.returncode}")
        return done.stdout

    def snapshot(self, name: str, source: str | Path, *, warm: bool = False) -> None:
        """Create a snapshot, and fetch all of it."""
        self.dsctl("snapshot", "create", name, "--from", source)
        if warm:
            self.dsctl("warm", f"{name}@latest", "--wait")

    def processes(self) -> list[int]:
        """Return what runs for this home: daemon, supervisors, workers."""
        return leftovers.processes_with("DATACACHE_HOME", lambda value: value == str(self.path))

    def close(self) -> None:
        """End its processes and delete its files."""
        leftovers.unmount_under(self.path)
        leftovers.end_processes(self.processes)
        shutil.rmtree(self.ram_dir, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Make this process one of the home's, for benchmarks of the Python API."""
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update(self.env)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def foreign_environment() -> dict[str, str]:
    """Return the environment without anything of ours, of Python and of malloc."""
    # Without PYTHONDONTWRITEBYTECODE: a program that compiles itself at every start is not what anybody uses.
    ours = ("DATACACHE_", "AWS_", "PYTHON", "MALLOC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


class ToldProcess:
    """A child that does what lines say and answers with lines. It dies with us. Close it."""

    def __init__(self, *command: str | Path, env: Mapping[str, str] | None = None, log: Path | None = None) -> None:
        guard = [program("setpriv", package="util-linux"), "--pdeathsig", "KILL", "--"]  # becomes the program
        with contextlib.nullcontext() if log is None else open(log, "ab") as errors:
            self._process = subprocess.Popen(
                [*guard, *map(str, command)],
                env=env,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self.pid = self._process.pid

    @property
    def ended(self) -> bool:
        """True once it has come to an end."""
        return self._process.poll() is not None

    def say(self, line: str) -> None:
        """Tell it something; where it has ended there will be no answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def hang_up(self) -> None:
        """Tell it that nothing more comes. Idempotent."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def answer(self, timeout_s: float | None = None) -> str:
        """Return its next line; nothing if it has ended or takes longer, and then it is killed."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(timeout_s) else b""
        if not line:
            self._process.kill()
        return line.decode()

    def wait(self) -> int:
        """Return its exit code when it has ended."""
        self.hang_up()
        return self._process.wait()

    def close(self) -> None:
        """End it. Idempotent."""
        self.hang_up()
        assert self._process.stdout is not None
        self._process.stdout.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# --- files ---


def make_files(folder: Path, count: int, size_bytes: int = OBJECT_BYTES) -> list[str]:
    """Write files of random bytes into one flat folder; return their names."""
    names = [f"{number:07d}.jpg" for number in range(count)]
    source = random.Random(0)
    for name in names:
        (folder / name).write_bytes(source.randbytes(size_bytes))
    return names


def size_of(folder: Path) -> int:
    """Return the bytes of all files of a tree."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def drop_caches(what: int = 1) -> None:
    """Write everything down and drop pages, or with 3 directory entries and inodes, too (proc(5), drop_caches)."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text(str(what))
    except PermissionError:
        raise SystemExit("dropping the page cache needs root: run the benchmark with sudo") from None


# --- measuring ---


def timed(action: Callable[[], object]) -> float:
    """Return how many seconds it takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def rounds_of(ways: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 0) -> dict[str, list[T]]:
    """Do each in turns; another one is first in each round. What the first `warm_up` rounds gave is left out."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds + warm_up):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            result = ways[name]()
            if number >= warm_up:
                found[name].append(result)
    return found


def forked(count: int, prepare: Callable[[int], Callable[[], int]]) -> tuple[float, list[int]]:
    """Prepare in this many processes, then act in all. Return the seconds from the first start to the last end and
    what they returned."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(count), context.SimpleQueue()

    def one(number: int) -> None:
        act = prepare(number)
        barrier.wait()
        start = time.monotonic()
        results.put((act(), start, time.monotonic()))

    workers = [context.Process(target=one, args=(number,)) for number in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a process failed")
    found, starts, ends = zip(*(results.get() for _ in workers), strict=True)
    return max(ends) - min(starts), list(found)


def read_epoch(paths: Sequence[str], *, readers: int, seed: int, expected_bytes: int) -> float:
    """Open, read and close every file once, in a fresh random order, from this many processes; return the seconds.
    Fewer or more bytes end the benchmark."""
    order = list(paths)
    random.Random(seed).shuffle(order)

    def read(mine: list[str]) -> int:
        total = 0
        for path in mine:
            with open(path, "rb", buffering=0) as file:
                total += len(file.read())
        return total

    seconds, sizes = forked(readers, lambda number: lambda: read(order[number::readers]))
    if sum(sizes) != expected_bytes:
        raise SystemExit(f"read {sum(sizes):,} bytes instead of {expected_bytes:,}")
    return seconds


# --- tables ---


class ResultTable:
    """Rows of text and numbers, printed aligned."""

    printed: list[ResultTable] = []  # noqa: RUF012

    def __init__(self, title: str, *columns: str) -> None:
        self._title = title
        self._rows: list[tuple[str, ...]] = [columns]

    def row(self, *cells: str | float | None) -> None:
        """Add a row: numbers get thousands separators, None (not measured) a dash."""
        self._rows.append(tuple(_cell(cell) for cell in cells))

    def print(self) -> None:
        """Print it, and keep it for `--write`."""
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        print(f"\n{self._title}")
        for number, (first, *rest) in enumerate(self._rows):
            cells = [first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))]
            print("  ".join(cells).rstrip())
            if number == 0:
                print("  ".join("-" * width for width in widths))
        sys.stdout.flush()
        self.printed.append(self)

    def markdown(self) -> str:
        """Return it as a table of Markdown below its title."""
        head, *rows = (f"| {' | '.join(row)} |" for row in self._rows)
        return "\n".join([f"{self._title}:", "", head, f"|---|{'---:|' * (len(self._rows[0]) - 1)}", *rows])


def write_results(page: Path, name: str, tables: Sequence[ResultTable]) -> None:
    """Put tables between the page's markers of a benchmark, in place of what is there."""
    text = page.read_text(encoding="utf-8")
    place = re.compile(rf"(<!-- benchmark: {name} -->).*?(<!-- end -->)", re.DOTALL)
    if not place.search(text):
        raise SystemExit(f"{page} has no place for {name}")
    results = "\n\n".join(table.markdown() for table in tables)
    page.write_text(place.sub(lambda found: f"{found[1]}\n{results}\n{found[2]}", text), encoding="utf-8")


def ratio(ours: float | None, other: float | None) -> str | None:
    """Return ours over theirs, as a cell."""
    return f"{ours / other:.2f}×" if ours and other else None


def _cell(value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or ("–" if value is None else "")
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.2f}"
