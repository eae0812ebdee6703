"""`dsctl query` over an annotated data set, the whole command timed: on SQLite, and on MongoDB with the annotations'
blobs cached on the node and without.

The first query of a snapshot reads all annotations and leaves them in the catalog; its time is shown beside. The
answer is compared with one computed from the boxes the data set was made from. Images are as small as JPEG files can
be: only their headers count here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import DSCTL, Home, ResultTable, Workspace, benchmark, size_of
from benchmarks.images import voc_images, write_voc
from benchmarks.usage import CommandUsage, measured, middle
from tests.servers import Mongod

LABEL, AT_LEAST, MIN_WIDTH = "no_mask", 2, 640


def main() -> None:
    with (
        benchmark(__doc__, images=(100_000, 200), boxes_per_image=10, rounds=(5, 1)) as (args, work),
        Mongod(work.path / "mongod") as mongod,
    ):
        boxes = args.images * args.boxes_per_image
        folder = work.folder("faces")
        write_voc(folder, voc_images(args.images, boxes), plain=True)
        expected = sum(
            image.width >= MIN_WIDTH and sum(box.label == LABEL for box in image.boxes) >= AT_LEAST
            for image in voc_images(args.images, boxes)
        )
        table = ResultTable(
            f"{args.images:,} images, {boxes:,} boxes: {expected:,} with {AT_LEAST} {LABEL}, {MIN_WIDTH} wide",
            "", "seconds", "CPU s", "peak MiB",
        )  # fmt: skip

        def row(name: str, runs: Sequence[CommandUsage]) -> None:
            for run in runs:
                if int(run.output) != expected:
                    raise SystemExit(f"{name}: the answer is {run.output.strip()} instead of {expected}")
            usage = middle(runs)
            table.row(name, usage.seconds, usage.cpu_s, usage.peak_mib)

        home = snapshot_home(work, "sqlite", folder)
        row("SQLite, the first, which reads the annotations", [query(home)])
        row("SQLite", [query(home) for _ in range(args.rounds)])
        home.close()
        url = mongod.database_url()
        home = snapshot_home(work, "mongodb", folder, catalog=url)
        row("MongoDB, the first, which reads the annotations", [query(home)])
        row("MongoDB, blobs cached on the node", [query(home) for _ in range(args.rounds)])
        home.close()
        row("MongoDB, on another node", [query_elsewhere(work, number, url) for number in range(args.rounds)])
        table.print()


def snapshot_home(work: Workspace, name: str, folder: Path, **settings: object) -> Home:
    """Make a home whose catalog has a snapshot `faces` of the folder."""
    home = work.home(name, ssd_bytes=2 * size_of(folder) + 2**28, **settings)
    home.snapshot("faces", f"file://{folder}")
    home.dsctl("daemon", "start")
    return home


def query(home: Home) -> CommandUsage:
    """Ask once; the answer is a number."""
    words = ("--label", LABEL, "--min-objects", str(AT_LEAST), "--where", f"width>={MIN_WIDTH}", "--count")
    return measured([DSCTL, "query", "faces@latest", *words], env=home.env, beside=home.processes)


def query_elsewhere(work: Workspace, number: int, url: str) -> CommandUsage:
    """Ask the same from a home that has nothing of the catalog yet."""
    home = work.home(f"elsewhere-{number}", catalog=url)
    usage = query(home)
    home.close()
    return usage


if __name__ == "__main__":
    main()
