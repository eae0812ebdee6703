"""Epochs of raw bytes from a local disk: `ShardDataset` and `SnapshotDataset` against plain files, WebDataset, MosaicML
Streaming, LitData and ArrayRecord, and against the limit.

All read the same JPEG files, shuffled, in batches of 64, without decoding, out of the page cache. The limit is a tar of
all images read from its start to its end with `readinto`, into a buffer as large as a batch; how much faster it goes
with a small buffer, which stays in the processor's caches, is shown beside. Shards and chunks have 64 MB. Each
contender is a process with the library's own virtual environment and the same PyTorch, set up as its documentation
says; workers stay from epoch to epoch. "packed" is our `packed=True`: one tensor of bytes for a batch; the others give
a list of `bytes`, and so do we without it. Ours verify the checksum of every sample.

Each contender first goes through an epoch whose samples' digests are added up. CPU time is that of the process and its
workers. Ours have glibc keep freed memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.contenders import (
    Contender,
    ContenderError,
    ImageSet,
    Pass,
    RunningContender,
    epochs_of,
    make_images,
    make_ours,
    peers_environment,
    write,
)
from benchmarks.harness import ResultTable, Workspace, benchmark, ratio
from benchmarks.images import KINDS
from benchmarks.loader_peers.plan import ReadPlan
from benchmarks.peers import ARRAY_RECORD, LITDATA, MDS, WEBDATASET, Peer, PeerUnavailableError, programs_of

LIMIT, SMALL_BUFFER = "limit: readinto", "limit, 256 KiB at a time"
SHARDS, SNAPSHOT = "ShardDataset, packed", "SnapshotDataset, packed"
PEERS = {WEBDATASET: "webdataset_tars", MDS: "mds", LITDATA: "litdata_chunks", ARRAY_RECORD: "array_records"}
# Beside the default, what took less time for images of 107 KB.
OTHER_WAYS: dict[Peer, dict[str, dict[str, Any]]] = {
    LITDATA: {"batch_decode=1": {"batch_decode": 1}},
    ARRAY_RECORD: {"one by one": {"one_by_one": True}},
}


def main() -> None:
    with benchmark(
        __doc__,
        {"kinds": list(KINDS)},
        files=(10_000, 40),
        kinds=(["photographs", "thumbnails"], ["thumbnails"]),
        workers=([0, 2], [2]),
        batch=(64, 16),
        rounds=(7, 1),
        only=([], ["packed"]),
    ) as (args, work):
        missing: dict[str, str] = {}
        for kind in args.kinds:
            images = make_images(work.folder(kind), kind, args.files)
            found = list(contenders(work, work.folder(f"{kind}-copies"), images, args, missing))
            for workers in args.workers:
                chosen = [replace(c, plan=replace(c.plan, workers=workers)) for c in found]
                passes = epochs_of(chosen, started(images), rounds=args.rounds, logs=work.path, missing=missing)
                report(f"{args.files:,} JPEGs of {KINDS[kind].name}, {workers} workers", images, passes)
        for name, reason in missing.items():
            print(f"{name} was not measured: {reason}")


def contenders(
    work: Workspace, folder: Path, images: ImageSet, args: argparse.Namespace, missing: dict[str, str]
) -> Iterator[Contender]:
    """Yield all whose names have a word of `--only`, with their copies of the images; the limits always."""
    foreign = peers_environment(work.short_folder())

    def wanted(name: str) -> bool:
        return not args.only or any(word in name for word in args.only)

    def contender(name: str, module: str, source: Path | str, **options: object) -> Contender:
        plan = ReadPlan(batch_size=args.batch, options=options)
        return Contender(name=name, module=module, source=str(source), env=foreign, plan=plan)

    def copy(module: str, python: Path) -> Path:
        write(module, python, foreign, images.folder, folder / module, work.path / f"write-{module}.log")
        return folder / module

    tar = copy("tar_limit", Path(sys.executable))
    for name, buffer_bytes in ((LIMIT, images.size_bytes * args.batch // images.count), (SMALL_BUFFER, 2**18)):
        yield contender(name, "tar_limit", tar, samples=images.count, buffer_bytes=buffer_bytes)
    home, shards = make_ours(work, images, folder)
    for name in filter(wanted, (SHARDS, "ShardDataset", SNAPSHOT, "SnapshotDataset")):
        kind, source = ("shards", shards) if name.startswith("Shard") else ("snapshot", "images@latest")
        yield replace(contender(name, "ours", source, kind=kind, packed=name.endswith("packed")), env=home.env)
    if wanted("plain files"):
        yield contender("plain files", "plain_files", images.folder)
    for peer, module in PEERS.items():
        if wanted(str(peer)):
            try:
                python = programs_of(peer, args) / "python"
                source = copy(module, python)
            except (PeerUnavailableError, ContenderError) as exc:
                missing[str(peer)] = str(exc)
                continue
            yield replace(contender(str(peer), module, source), python=python)
            for way, options in OTHER_WAYS.get(peer, {}).items():
                yield replace(contender(f"{peer}, {way}", module, source, **options), python=python)


def started(images: ImageSet) -> Callable[[RunningContender], Callable[[int], Pass]]:
    """Return what checks a contender's first epoch; headers and padding come on top of the limit's bytes."""

    def start(one: RunningContender) -> Callable[[int], Pass]:
        limit = one.contender.module == "tar_limit"
        if not limit:
            one.check(images.digest)
        return lambda number: one.epoch(number, images.count, images.size_bytes, padded=limit)

    return start


def report(title: str, images: ImageSet, passes: dict[str, Pass]) -> None:
    """Print the table."""
    rates = {name: done.samples_per_s for name, done in passes.items()}
    columns = ("samples/s", "MB/s", "% of the limit", f"{SHARDS} /", f"{SNAPSHOT} /", "CPU µs a sample")
    table = ResultTable(title, "", *columns)
    for name, rate in rates.items():
        against = [None if name.startswith("limit") else ratio(rates.get(ours), rate) for ours in (SHARDS, SNAPSHOT)]
        mb_s = rate * images.size_bytes / images.count / 1e6
        table.row(name, rate, mb_s, f"{100 * rate / rates[LIMIT]:.0f}", *against, passes[name].cpu_us)
    table.print()


if __name__ == "__main__":
    main()
