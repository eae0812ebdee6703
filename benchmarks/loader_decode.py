"""Epochs of images decoded to 224×224: what `ShardDataset(decode="rgb", size=(224, 224))` costs beyond decoding.

"bare" is a plain loop over images that are in memory, in as many processes as the DataLoader has workers: the same
function decodes and resizes (`datacache/loaders/decode.py`), and nothing is read or handed over. The other rows give
shuffled batches of 64 as one tensor. For orientation the same function is called by a dataset over plain files and in
a WebDataset pipeline, both in our own environment. Before anything is measured the pixels' digests are compared; then
rounds alternate, and numbers are medians. All is in the page cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.contenders import Contender, ContenderError, Pass, RunningContender, foreign_environment, middle, write
from benchmarks.harness import ResultTable, Workspace, parser, ratio
from benchmarks.loader_peers.bare_decode import pixels_digest
from benchmarks.loader_peers.plan import ReadPlan
from benchmarks.loaders import ImageSet, make_images, make_ours

BARE = "bare"
OURS = "ShardDataset"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--files", type=int, default=4000)
    arguments.add_argument("--size", type=int, default=224, help="height and width in pixels")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=5)
    args = arguments.parse_args()
    if args.quick:
        args.files, args.batch, args.rounds = 40, 16, 1
    with Workspace(args.dir) as work:
        images = make_images(work.folder("images"), "photographs", args.files)
        plan = ReadPlan(workers=args.workers, batch_size=args.batch, size=args.size)
        passes = measure(list(contenders(work, images, plan)), images, rounds=args.rounds, logs=work.path)
        report(f"{args.files:,} JPEGs of 107 KB to {args.size}×{args.size}, {args.workers} workers", passes)


def contenders(work: Workspace, images: ImageSet, plan: ReadPlan) -> Iterator[Contender]:
    """All of them, in this environment."""
    folder, python = work.folder("copies"), Path(sys.executable)
    home, shards = make_ours(work, images, folder)
    bare = Contender(
        name=BARE, module="bare_decode", source=str(images.folder), python=python, plan=plan,
        env=foreign_environment(work.short_folder()),
    )  # fmt: skip
    yield bare
    yield replace(
        bare, name=OURS, module="ours", source=str(shards), env=home.env, plan=replace(plan, options={"kind": "shards"})
    )
    yield replace(bare, name="plain files", module="plain_files")
    if find_spec("webdataset") is not None:
        tars = folder / "webdataset"
        tars.mkdir()
        write("webdataset_tars", python, bare.env, images.folder, tars, work.path / "write.log")
        yield replace(bare, name="webdataset", module="webdataset_tars", source=str(tars))


def measure(found: list[Contender], images: ImageSet, *, rounds: int, logs: Path) -> dict[str, list[Pass]]:
    """The epochs of each; the first one warms up."""
    size = found[0].plan.size
    wanted = pixels_digest(images.folder, size)
    passes: dict[str, list[Pass]] = {contender.name: [] for contender in found}
    with ExitStack() as stack:
        running = []
        for contender in found:
            try:
                one = stack.enter_context(RunningContender(contender, logs / f"{contender.module}.log"))
                one.open()
                if contender.name != BARE and one.digest(0) != wanted:
                    raise SystemExit(f"{contender.name} gave other pixels")
            except ContenderError as exc:
                raise SystemExit(str(exc)) from exc
            running.append(one)
        for number in range(rounds + 1):
            for one in running[number % len(running) :] + running[: number % len(running)]:
                done = one.epoch(number + 1)
                if (done.samples, done.size_bytes) != (images.count, images.count * size * size * 3):
                    raise SystemExit(f"{one.contender.name} gave {done.samples:,} samples, {done.size_bytes:,} bytes")
                if number:
                    passes[one.contender.name].append(done)
    return passes


def report(title: str, passes: dict[str, list[Pass]]) -> None:
    """The table."""
    bare = middle(passes[BARE])
    table = ResultTable(title, "", "samples/s", "/ bare", "CPU µs a sample", "CPU more than bare")
    for name, found in passes.items():
        done = middle(found)
        more = 100 * (done.cpu_us / bare.cpu_us - 1)
        table.row(
            name, done.samples_per_s, ratio(done.samples_per_s, bare.samples_per_s), done.cpu_us, f"{more:+.1f} %"
        )
    table.print()


if __name__ == "__main__":
    main()
