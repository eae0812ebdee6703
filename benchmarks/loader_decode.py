"""Epochs of images decoded to 224×224: what `ShardDataset(decode="rgb", size=(224, 224))` costs beyond decoding.

"bare" is a plain loop over images that are in memory, in as many processes as the DataLoader has workers: the same
function decodes and resizes (`datacache/loaders/decode.py`), and nothing is read or handed over. The other rows give
shuffled batches of 64 as one tensor. For orientation the same function is called by a dataset over plain files and in
a WebDataset pipeline, both in our own environment. First the pixels' digests are compared. All is in the page cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.contenders import (
    Contender,
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
from benchmarks.loader_peers.bare_decode import pixels_digest
from benchmarks.loader_peers.plan import ReadPlan

BARE = "bare"


def main() -> None:
    with benchmark(__doc__, files=(4000, 20), size=224, workers=2, batch=(64, 16), rounds=(5, 1)) as (args, work):
        images = make_images(work.folder("images"), "photographs", args.files)
        pixels, count = pixels_digest(images.folder, args.size), images.count

        def start(one: RunningContender) -> Callable[[int], Pass]:
            if one.contender.name != BARE:
                one.check(pixels)
            return lambda number: one.epoch(number, count, count * args.size**2 * 3)

        plan = ReadPlan(workers=args.workers, batch_size=args.batch, size=args.size)
        found = list(contenders(work, images, plan))
        passes = epochs_of(found, start, rounds=args.rounds, logs=work.path, missing={})
        bare = passes[BARE]
        title = f"{args.files:,} JPEGs of 107 KB to {args.size}×{args.size}, {args.workers} workers"
        table = ResultTable(title, "", "samples/s", "/ bare", "CPU µs a sample", "CPU more than bare")
        for name, done in passes.items():
            more = f"{100 * (done.cpu_us / bare.cpu_us - 1):+.1f} %"
            table.row(name, done.samples_per_s, ratio(done.samples_per_s, bare.samples_per_s), done.cpu_us, more)
        table.print()


def contenders(work: Workspace, images: ImageSet, plan: ReadPlan) -> Iterator[Contender]:
    """Yield all of them, in this environment."""
    folder = work.folder("copies")
    home, shards = make_ours(work, images, folder)
    foreign = peers_environment(work.short_folder())
    bare = Contender(name=BARE, module="bare_decode", source=str(images.folder), plan=plan, env=foreign)
    yield bare
    shards_plan = replace(plan, options={"kind": "shards"})
    yield replace(bare, name="ShardDataset", module="ours", source=str(shards), env=home.env, plan=shards_plan)
    yield replace(bare, name="plain files", module="plain_files")
    if find_spec("webdataset") is not None:
        tars, log = folder / "webdataset", work.path / "write.log"
        write("webdataset_tars", Path(sys.executable), foreign, images.folder, tars, log)
        yield replace(bare, name="webdataset", module="webdataset_tars", source=str(tars))


if __name__ == "__main__":
    main()
