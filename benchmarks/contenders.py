"""Ways to read a training set, each in a process of its own that stays, so that they can be measured in turns.

The processes are `benchmarks/loader_peers/__main__.py`, each started with the Python that has its library. A contender
that fails, or takes longer than `TIMEOUT_S` for an answer, raises `ContenderError` with the end of its log.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.loader_peers.plan import ReadPlan
from benchmarks.usage import cpu_of_families
from tests.servers import program

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 180.0
RAISED_THRESHOLDS = {"MALLOC_TRIM_THRESHOLD_": str(2**28), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
"""With these glibc keeps freed memory instead of giving it back and faulting it in again (mallopt(3); a larger
threshold than 32 MiB for mmap is refused)."""


class ContenderError(RuntimeError):
    """A contender failed; the end of what it wrote."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to read, and what of."""

    name: str
    module: str
    """In `benchmarks.loader_peers`."""
    source: str
    python: Path
    env: Mapping[str, str]
    plan: ReadPlan
    beside: Callable[[], Iterable[int]] = tuple
    """Processes that work for it and are not its descendants."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One epoch."""

    seconds: float
    cpu_s: float
    """Of the process, its workers, and what works for it beside."""
    samples: int
    size_bytes: int

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    @property
    def cpu_us(self) -> float:
        """Microseconds of CPU time a sample."""
        return self.cpu_s / self.samples * 1e6


def middle(passes: Sequence[Pass]) -> Pass:
    """Each number's median."""
    return Pass(
        seconds=median(done.seconds for done in passes),
        cpu_s=median(done.cpu_s for done in passes),
        samples=passes[0].samples,
        size_bytes=passes[0].size_bytes,
    )


class RunningContender:
    """A contender's process, with its library imported and nothing opened. Close it."""

    def __init__(self, contender: Contender, log: Path) -> None:
        self.contender = contender
        self._log = log
        self._process = _start(
            contender.python, contender.env, log, "read", contender.module, contender.source,
            json.dumps(asdict(contender.plan)),
        )  # fmt: skip
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def open(self) -> Pass:
        """Make its loader: what that cost, with no samples."""
        return self._do("open")

    def epoch(self, number: int) -> Pass:
        """Go through an epoch."""
        return self._do(f"epoch {number}")

    def digest(self, number: int) -> int:
        """Go through an epoch, and the sum of its samples' digests."""
        return int(self._ask(f"digest {number}")["digest"])

    def close(self) -> None:
        """End it. Idempotent."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> RunningContender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _do(self, command: str) -> Pass:
        before = self._cpu()
        answer = self._ask(command)
        return Pass(
            seconds=answer["seconds"],
            cpu_s=self._cpu() - before,
            samples=answer.get("samples", 0),
            size_bytes=answer.get("size_bytes", 0),
        )

    def _cpu(self) -> float:
        return cpu_of_families([self._process.pid, *self.contender.beside()])

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(TIMEOUT_S) else b""
        if not line:
            self._process.kill()
            raise ContenderError(f"{self.contender.name}: {_end_of(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def write(module: str, python: Path, env: Mapping[str, str], images: Path, target: Path, log: Path) -> None:
    """Write the images in a library's own format."""
    process = _start(python, env, log, "write", module, str(images), str(target))
    process.communicate()
    if process.returncode:
        raise ContenderError(f"writing for {module}: {_end_of(log)}")


def foreign_environment(folder: Path) -> dict[str, str]:
    """The environment for other people's libraries: nothing of ours, and their temporary files in `folder`, where
    PyTorch makes sockets: its path has to be short."""
    ours = {name for name in os.environ if name.startswith(("DATACACHE_", "AWS_", "PYTHON", "MALLOC_"))}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"TMPDIR": str(folder), "LITDATA_CACHE_DIR": str(folder)}


def _start(python: Path, env: Mapping[str, str], log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    # It dies with us: setpriv becomes the program, so the process id is its own.
    guard = [program("setpriv", package="util-linux"), "--pdeathsig", "KILL", "--"]
    with open(log, "ab") as errors:
        return subprocess.Popen(
            [*guard, str(python), "-m", "benchmarks.loader_peers", *arguments],
            env=dict(env),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )


def _end_of(log: Path) -> str:
    text = log.read_text(errors="replace").strip()
    return text[-1500:] or "it ended without a word"
