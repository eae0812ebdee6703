"""Epochs of raw bytes from a local disk: `ShardDataset` and `SnapshotDataset` against plain files, WebDataset, MosaicML
Streaming, LitData and ArrayRecord, and against the limit.

All read the same JPEG files, shuffled, in batches of 64, without decoding, out of the page cache. The limit is a tar of
all images read from its start to its end with `readinto`, into a buffer as large as a batch; how much faster it goes
with a small buffer, which stays in the processor's caches, is shown beside. Shards and chunks have 64 MB. Each
contender is a process with the library's own virtual environment and the same PyTorch, set up as its documentation
says; workers stay from epoch to epoch. "packed" is our `packed=True`: one tensor of bytes for a batch; the others give
a list of `bytes`, and so do we without it. Ours verify the checksum of every sample.

Before anything is measured, each contender goes through an epoch in which the samples' digests are added up: a wrong
sum ends the benchmark. Then rounds alternate, in an order that moves on with every round; numbers are medians. CPU time
is that of the process and its workers. With `--malloc` each contender runs a second time with glibc told to keep freed
memory (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`), which is not how anybody starts a training but shows what
of a difference is due to malloc. Ours do so themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.contenders import (
    RAISED_THRESHOLDS,
    Contender,
    ContenderError,
    Pass,
    RunningContender,
    foreign_environment,
    middle,
    write,
)
from benchmarks.environments import (
    ARRAY_RECORD,
    LITDATA,
    MDS,
    WEBDATASET,
    Peer,
    PeerEnvironments,
    PeerUnavailableError,
    add_peers_option,
    environments,
)
from benchmarks.harness import Home, ResultTable, Workspace, parser, ratio
from benchmarks.loader_peers.plan import ReadPlan, digest, image_files, total
from benchmarks.photographs import KINDS, write_images

LIMIT, SMALL_BUFFER = "limit: readinto", "limit, 256 KiB at a time"
SHARDS, SNAPSHOT = "ShardDataset, packed", "SnapshotDataset, packed"
PLAIN = "plain files"
MALLOC = ", malloc keeps"
PEERS = {WEBDATASET: "webdataset_tars", MDS: "mds", LITDATA: "litdata_chunks", ARRAY_RECORD: "array_records"}
# Beside the default, what took less time for images of 107 KB.
OTHER_WAYS: dict[Peer, dict[str, dict[str, Any]]] = {
    LITDATA: {"batch_decode=1": {"batch_decode": 1}},
    ARRAY_RECORD: {"one by one": {"one_by_one": True}},
}
SHARD_BYTES = 64 * 10**6


@dataclass(frozen=True)
class ImageSet:
    """The data set all read."""

    folder: Path
    count: int
    size_bytes: int
    digest: int


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--files", type=int, default=10_000)
    arguments.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["photographs", "thumbnails"])
    arguments.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument(
        "--malloc", action="store_true", help="run each contender with malloc's thresholds raised, too"
    )
    arguments.add_argument("--only", nargs="+", default=[], help="contenders whose names contain one of these words")
    add_peers_option(arguments)
    args = arguments.parse_args()
    if args.quick:
        args.files, args.batch, args.rounds, args.kinds, args.workers = 40, 16, 1, ["thumbnails"], [2]
    missing: dict[str, str] = {}
    with Workspace(args.dir) as work:
        for kind in args.kinds:
            images = make_images(work.folder(kind), kind, args.files)
            contenders = Cast(work, work.folder(f"{kind}-copies"), images, args).all(missing)
            for workers in args.workers:
                measured = [replace(c, plan=replace(c.plan, workers=workers)) for c in contenders]
                passes = measure(measured, images, rounds=args.rounds, logs=work.path, missing=missing)
                report(f"{args.files:,} JPEGs of {KINDS[kind].name}, {workers} workers", images, passes)
        for name, reason in missing.items():
            print(f"{name} was not measured: {reason}")


def make_images(folder: Path, kind: str, count: int) -> ImageSet:
    """Draw them, and what their digests come to."""
    size_bytes = write_images(folder, count, KINDS[kind])
    return ImageSet(folder, count, size_bytes, total(digest(path.read_bytes()) for path in image_files(folder)))


class Cast:
    """All contenders, with their copies of the images."""

    def __init__(self, work: Workspace, folder: Path, images: ImageSet, args: argparse.Namespace) -> None:
        self._work, self._folder, self._images, self._only = work, folder, images, args.only
        self._raised: bool = args.malloc
        self._environments: PeerEnvironments = environments(args)
        self._foreign = foreign_environment(work.short_folder())
        self._plan = ReadPlan(batch_size=args.batch)

    def all(self, missing: dict[str, str]) -> list[Contender]:
        """Them; why others are not among them goes to `missing`."""
        found = [*self._limits(), *self._ours()]
        if self._wanted(PLAIN):
            plain = self._contender(PLAIN, "plain_files", self._images.folder)
            found.append(plain)
        for peer, module in PEERS.items():
            if self._wanted(str(peer)):
                try:
                    found += self._peer(peer, module)
                except (PeerUnavailableError, ContenderError) as exc:
                    missing[str(peer)] = str(exc)
        if self._raised:
            found += [
                replace(c, name=c.name + MALLOC, env={**c.env, **RAISED_THRESHOLDS})
                for c in found
                if c.module not in ("tar_limit", "ours")
            ]
        return found

    def _limits(self) -> Iterator[Contender]:
        """Not in `--only`'s choice: all is measured by them."""
        folder = self._copy("tar_limit", Path(sys.executable))
        batch_bytes = self._images.size_bytes * self._plan.batch_size // self._images.count
        for name, buffer_bytes in ((LIMIT, batch_bytes), (SMALL_BUFFER, 2**18)):
            options = {"samples": self._images.count, "buffer_bytes": buffer_bytes}
            yield self._contender(name, "tar_limit", folder, **options)

    def _ours(self) -> Iterator[Contender]:
        names: dict[str, dict[str, Any]] = {
            SHARDS: {"kind": "shards", "packed": True},
            "ShardDataset": {"kind": "shards"},
            SNAPSHOT: {"kind": "snapshot", "packed": True},
            "SnapshotDataset": {"kind": "snapshot"},
        }
        wanted = {name: options for name, options in names.items() if self._wanted(name)}
        if wanted:
            home, shards = make_ours(self._work, self._images, self._folder)
            for name, options in wanted.items():
                source = shards if options["kind"] == "shards" else "images@latest"
                yield replace(self._contender(name, "ours", source, **options), env=home.env)

    def _peer(self, peer: Peer, module: str) -> Iterator[Contender]:
        python = self._environments.bin(peer) / "python"
        folder = self._copy(module, python)
        yield replace(self._contender(str(peer), module, folder), python=python)
        for way, options in OTHER_WAYS.get(peer, {}).items():
            yield replace(self._contender(f"{peer}, {way}", module, folder, **options), python=python)

    def _contender(self, name: str, module: str, source: Path | str, **options: object) -> Contender:
        return Contender(
            name=name,
            module=module,
            source=str(source),
            python=Path(sys.executable),
            env=self._foreign,
            plan=replace(self._plan, options=options),
        )

    def _copy(self, module: str, python: Path) -> Path:
        target = self._folder / module
        target.mkdir()
        write(module, python, self._foreign, self._images.folder, target, self._work.path / f"write-{module}.log")
        return target

    def _wanted(self, name: str) -> bool:
        return not self._only or any(word in name for word in self._only)


def make_ours(work: Workspace, images: ImageSet, folder: Path) -> tuple[Home, Path]:
    """A home whose cache has the snapshot `images`, and a folder with the shards of it."""
    home = work.home(f"home-{images.folder.name}", ssd_bytes=2 * images.size_bytes + 2**28)
    shards = folder / "shards"
    home.dsctl("snapshot", "create", "images", "--from", f"file://{images.folder}")
    home.dsctl("warm", "images@latest", "--wait")
    home.dsctl("shard", "images@latest", "--to", shards, "--format", "webdataset", "--max-size", str(SHARD_BYTES))
    return home, shards


def measure(
    contenders: Sequence[Contender], images: ImageSet, *, rounds: int, logs: Path, missing: dict[str, str]
) -> dict[str, list[Pass]]:
    """The epochs of each. One that fails is left out, and the reason goes to `missing`, unless it is ours."""
    with ExitStack() as stack:
        running: list[RunningContender] = []
        for number, contender in enumerate(contenders):
            try:
                running.append(stack.enter_context(_started(contender, images, logs / f"read-{number}.log")))
            except ContenderError as exc:
                if contender.module == "ours":
                    raise SystemExit(str(exc)) from exc
                missing[contender.name] = str(exc)
        passes: dict[str, list[Pass]] = {one.contender.name: [] for one in running}
        for number in range(rounds):
            for one in running[number % len(running) :] + running[: number % len(running)]:
                passes[one.contender.name].append(_checked(one, images, number + 2))
    return passes


def _started(contender: Contender, images: ImageSet, log: Path) -> RunningContender:
    """Its process, after a first epoch that was checked, and a second one that warmed up what the first did not."""
    one = RunningContender(contender, log)
    try:
        one.open()
        if contender.module != "tar_limit" and one.digest(0) != images.digest:
            raise SystemExit(f"{contender.name} gave wrong bytes")
        _checked(one, images, 1)
    except BaseException:
        one.close()
        raise
    return one


def _checked(one: RunningContender, images: ImageSet, number: int) -> Pass:
    done = one.epoch(number)
    got = done.samples, done.size_bytes
    if one.contender.module == "tar_limit":
        got = done.samples, min(done.size_bytes, images.size_bytes)  # headers and padding come on top
    if got != (images.count, images.size_bytes):
        raise SystemExit(
            f"{one.contender.name} gave {got[0]:,} samples with {got[1]:,} bytes instead of {images.count:,} with"
            f" {images.size_bytes:,}"
        )
    return done


def report(title: str, images: ImageSet, passes: dict[str, list[Pass]]) -> None:
    """The table."""
    middles = {name: middle(found) for name, found in passes.items()}
    rates = {name: done.samples_per_s for name, done in middles.items()}
    table = ResultTable(
        title, "", "samples/s", "MB/s", "% of the limit", f"{SHARDS} /", f"{SNAPSHOT} /", "CPU µs a sample",
    )  # fmt: skip
    for name, done in middles.items():
        rate = rates[name]
        against = [
            None if name in (LIMIT, SMALL_BUFFER) else ratio(rates.get(ours), rate) for ours in (SHARDS, SNAPSHOT)
        ]
        table.row(
            name, rate, rate * images.size_bytes / images.count / 1e6, f"{100 * rate / rates[LIMIT]:.0f}", *against,
            done.cpu_us,
        )  # fmt: skip
    table.print()


if __name__ == "__main__":
    main()
