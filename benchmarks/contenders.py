"""Ways to read a training set, each in a process of its own that stays, so that they can be measured in turns.

The processes are `benchmarks/loader_peers/__main__.py`, each started with the Python that has its library. A contender
that fails, or takes longer than `TIMEOUT_S` for an answer, raises `ContenderError` with the end of its log.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Home, ToldProcess, Workspace, foreign_environment, rounds_of
from benchmarks.images import KINDS, write_photographs
from benchmarks.loader_peers.plan import ReadPlan, digest, image_files, total
from benchmarks.usage import cpu_of_families

TIMEOUT_S = 180.0
OURS = ("ours", "bare_obstore", "bare_decode")
"""Modules whose failure ends the benchmark."""


class ContenderError(RuntimeError):
    """A contender failed; the end of what it wrote."""


@dataclass(frozen=True)
class ImageSet:
    """The data set all read."""

    folder: Path
    count: int
    size_bytes: int
    digest: int


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to read, and what of."""

    name: str
    module: str
    """In `benchmarks.loader_peers`."""
    source: str
    env: Mapping[str, str]
    plan: ReadPlan
    python: Path = Path(sys.executable)
    beside: Callable[[], Iterable[int]] = tuple
    """Processes that work for it and are not its descendants."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One epoch, or the opening before it."""

    seconds: float
    cpu_s: float
    """Of the process, its workers, and what works for it beside."""
    samples: int
    size_bytes: int
    beside_s: float = 0.0
    """Of `cpu_s`, the part of what works for it beside."""
    server_s: float = 0.0
    """CPU time of the server, where somebody looks at it."""

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    @property
    def cpu_us(self) -> float:
        """Return microseconds of CPU time a sample."""
        return self.cpu_s / self.samples * 1e6


def middle(passes: Sequence[Pass]) -> Pass:
    """Return each number's median."""
    medians = {
        name: median(getattr(done, name) for done in passes) for name in ("seconds", "cpu_s", "beside_s", "server_s")
    }
    return replace(passes[0], **medians)


class RunningContender:
    """A contender's process, with its library imported and nothing opened. Close it."""

    def __init__(self, contender: Contender, log: Path) -> None:
        self.contender, self._log = contender, log
        arguments = ("read", contender.module, contender.source, json.dumps(asdict(contender.plan)))
        self._child = _start(contender.python, contender.env, log, *arguments)
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def do(self, command: str) -> Pass:
        """Have it `open` its loader, or go through `epoch N`."""
        own, beside = self._cpu()
        answer = self.ask(command)
        own_after, beside_after = self._cpu()
        return Pass(
            seconds=answer["seconds"], cpu_s=own_after - own + beside_after - beside, beside_s=beside_after - beside,
            samples=answer.get("samples", 0), size_bytes=answer.get("size_bytes", 0),
        )  # fmt: skip

    def epoch(self, number: int, count: int, size_bytes: int, *, padded: bool = False) -> Pass:
        """Go through an epoch; other numbers than these end the benchmark. With `padded` more bytes may come."""
        done = self.do(f"epoch {number}")
        got = min(done.size_bytes, size_bytes) if padded else done.size_bytes
        if (done.samples, got) != (count, size_bytes):
            raise SystemExit(f"{self.contender.name} gave {done.samples:,} samples with {done.size_bytes:,} bytes")
        return done

    def check(self, wanted: int) -> None:
        """Go through epoch 0; if the sum of its samples' digests is another one, the benchmark ends."""
        if int(self.ask("digest 0")["digest"]) != wanted:
            raise SystemExit(f"{self.contender.name} gave wrong bytes")

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and return the answer."""
        self._child.say(command)
        return self._answer()

    def close(self) -> None:
        """End it. Idempotent."""
        self._child.close()

    def __enter__(self) -> RunningContender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _cpu(self) -> tuple[float, float]:
        return cpu_of_families([self._child.pid]), cpu_of_families(self.contender.beside())

    def _answer(self) -> dict[str, Any]:
        line = self._child.answer(TIMEOUT_S)
        if not line:
            raise ContenderError(f"{self.contender.name}: {_end_of(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def epochs_of(
    contenders: Sequence[Contender],
    start: Callable[[RunningContender], Callable[[int], Pass]],
    *,
    rounds: int,
    logs: Path,
    missing: dict[str, str],
) -> dict[str, Pass]:
    """Run all contenders' epochs in turns, and return medians. `start` checks an open one and returns what goes through
    an epoch. One that fails there is left out and named in `missing`, unless it is ours."""
    with ExitStack() as stack:
        ways: dict[str, Callable[[], Pass]] = {}
        for number, contender in enumerate(contenders):
            try:
                one = stack.enter_context(RunningContender(contender, logs / f"read-{number}.log"))
                one.do("open")
                epoch = start(one)
            except ContenderError as exc:
                if contender.module in OURS:
                    raise SystemExit(str(exc)) from exc
                missing[contender.name] = str(exc)
                continue
            numbers = iter(range(1, 10**9))
            ways[contender.name] = lambda epoch=epoch, numbers=numbers: epoch(next(numbers))
        return {name: middle(found) for name, found in rounds_of(ways, rounds, warm_up=1).items()}


def make_images(folder: Path, kind: str, count: int) -> ImageSet:
    """Draw them, and add up their digests."""
    size_bytes = write_photographs(folder, count, KINDS[kind])
    return ImageSet(folder, count, size_bytes, total(digest(path.read_bytes()) for path in image_files(folder)))


def make_ours(work: Workspace, images: ImageSet, folder: Path) -> tuple[Home, Path]:
    """Make a home whose cache has the snapshot `images`, and a folder with the shards of it."""
    home = work.home(f"home-{images.folder.name}", ssd_bytes=2 * images.size_bytes + 2**28)
    home.snapshot("images", f"file://{images.folder}", warm=True)
    shards = folder / "shards"
    home.dsctl("shard", "images@latest", "--to", shards, "--format", "webdataset", "--max-size", "64000000")
    return home, shards


def write(module: str, python: Path, env: Mapping[str, str], images: Path, target: Path, log: Path) -> None:
    """Write the images in a library's own format."""
    target.mkdir(exist_ok=True)
    if _start(python, env, log, "write", module, str(images), str(target)).wait():
        raise ContenderError(f"writing for {module}: {_end_of(log)}")


def peers_environment(folder: Path) -> dict[str, str]:
    """Return the environment for other people's libraries: nothing of ours, and their temporary files and PyTorch's
    sockets in `folder`, whose path has to be short."""
    return foreign_environment() | {"TMPDIR": str(folder), "LITDATA_CACHE_DIR": str(folder)}


def _start(python: Path, env: Mapping[str, str], log: Path, *arguments: str) -> ToldProcess:
    return ToldProcess(python, "-m", "benchmarks.loader_peers", *arguments, env=env, log=log)


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-1500:] or "it ended without a word"
