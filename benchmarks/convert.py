"""VOC → YOLO labels: `dsctl convert` against a naive script, Datumaro, Supervision and pylabel.

Ours starts from a snapshot whose objects are on the node: the object server is stopped before. It opens every image
for its size, checks every box, and ends in a snapshot; its CPU time includes what the daemon does for it. "again"
is a second conversion of the same snapshot, whose annotations the catalog has by then. The others read the same
files from the page cache and write labels only, no images; and to a tmpfs, because the time a disk's file system
takes to create a file varies tenfold. What the naive script takes on the disk of `--dir`, where ours writes its
catalog, is shown beside. Memory is the sum of the resident sets of all processes of a tool, without the daemon;
what of it is not anonymous is libraries and mapped cache, which the kernel takes back when it likes. All run in
turn, each round in a fresh home; times are medians, memory the largest.

Afterwards every label of ours, and of the naive script, is compared with one computed from the boxes the data set
was made from. "off by" is the largest distance of a number from that, in pixels: conventions (is the first pixel 0
or 1?) and digits. Peers are installed on first use, each in a virtual environment of its own.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import DSCTL, Home, ResultTable, Workspace, benchmark, ratio, size_of
from benchmarks.images import LABELS, VocImage, voc_images, write_voc
from benchmarks.peers import DATUMARO, PYLABEL, SUPERVISION, Peer, PeerUnavailableError, programs_of
from benchmarks.usage import CommandUsage, measured, middle
from benchmarks.voc_to_yolo import __file__ as script

OURS, AGAIN = "dsctl convert", "dsctl convert, again"
NAIVE, NAIVE_ON_DISK = "naive script", "naive script, to the disk"
PEERS = (DATUMARO, SUPERVISION, PYLABEL)
HALF_A_DIGIT = 0.5e-6 + 1e-9
"""How far a number written with 6 decimals may be from the exact one."""


class FoundLabels(NamedTuple):
    """Compare a tool's label files with the right ones."""

    files: int
    boxes: int
    off_by_px: float


def main() -> None:
    with benchmark(__doc__, images=(5_000, 60), boxes=(52_000, 600), rounds=(3, 1)) as (args, work):
        pythons, missing = {}, {}
        for peer in PEERS:
            try:
                pythons[peer] = programs_of(peer, args) / "python"
            except PeerUnavailableError as exc:
                missing[peer] = str(exc)
        images = {image.name: image for image in voc_images(args.images, args.boxes)}
        server = work.s3()
        folder = server.make_bucket("faces")
        write_voc(folder, images.values())
        homes = []
        for number in range(args.rounds):
            homes.append(work.home(f"home-{number}", server.env(), ssd_bytes=2 * size_of(folder) + 2**28))
            homes[-1].snapshot("faces", "s3://faces", warm=True)
        voc = work.path / "voc"
        folder.rename(voc)  # whoever asks the server now, fails
        server.close()
        # Datumaro wants classes other than Pascal's declared in the folder.
        rows = [f"{label}:{number * 20},0,0::\n" for number, label in enumerate(("background", *LABELS))]
        (voc / "labelmap.txt").write_text("".join(["# label:color_rgb:parts:actions\n", *rows]))
        runs: dict[str, list[CommandUsage]] = {}
        labels: dict[str, FoundLabels] = {}
        for home in homes:
            for name, usage, found in one_round(work, home, voc, images, pythons):
                runs.setdefault(name, []).append(usage)
                labels[name] = found
            home.close()
        report(f"VOC → YOLO labels, {args.images:,} images, {args.boxes:,} boxes", runs, labels, missing)


def one_round(
    work: Workspace, home: Home, voc: Path, images: dict[str, VocImage], pythons: dict[Peer, Path]
) -> Iterator[tuple[str, CommandUsage, FoundLabels]]:
    """Run each tool once; yield its name, what it cost, what it wrote."""

    def by_script(tool: str, python: str | Path, parent: Path) -> tuple[CommandUsage, FoundLabels]:
        out = Path(tempfile.mkdtemp(prefix=f"labels-{tool}-", dir=parent))
        usage = measured([python, "-P", script, tool, voc, out])
        found = check(images, ((path.stem, path.read_text()) for path in out.rglob("*.txt")), strict=tool == "naive")
        shutil.rmtree(out)
        return usage, found

    def by_us(name: str) -> tuple[CommandUsage, FoundLabels]:
        command = [DSCTL, "convert", "faces@latest", "--to", "yolo", "--as", name]
        usage = measured(command, env=home.env, beside=home.processes)
        return usage, check(images, snapshot_labels(home, name), strict=True)

    yield NAIVE, *by_script("naive", sys.executable, home.ram_dir)
    yield NAIVE_ON_DISK, *by_script("naive", sys.executable, work.path)
    yield OURS, *by_us("faces-yolo")
    yield AGAIN, *by_us("faces-yolo-again")
    for peer, python in pythons.items():
        yield str(peer), *by_script(peer.name, python, home.ram_dir)


def snapshot_labels(home: Home, name: str) -> Iterator[tuple[str, str]]:
    """Yield name and content of the label files of a snapshot."""
    with home.environment():
        from datacache import open_snapshot

        with open_snapshot(name) as snapshot:
            for path in snapshot.paths():
                if path.startswith("labels/"):
                    yield Path(path).stem, snapshot.read(path).decode()


def check(images: dict[str, VocImage], found: Iterable[tuple[str, str]], *, strict: bool) -> FoundLabels:
    """Compare label files with the images' boxes. With `strict` anything but the exact numbers to 6 decimals, every box
    in its place and with its class, ends the benchmark."""
    files = boxes = 0
    off_by_px = 0.0
    for name, text in found:
        image = images.get(name)
        if image is None:
            continue  # a list of images, not labels
        rows = [[float(word) for word in line.split()] for line in text.splitlines()]
        files += 1
        boxes += len(rows)
        if strict and len(rows) != len(image.boxes):
            raise SystemExit(f"{name}.txt has {len(rows)} boxes instead of {len(image.boxes)}")
        for row, box in zip(rows, image.boxes, strict=False):
            wide, high = image.width, image.height
            exact = (
                (box.xmin + box.xmax) / 2 / wide, (box.ymin + box.ymax) / 2 / high,
                (box.xmax - box.xmin) / wide, (box.ymax - box.ymin) / high,
            )  # fmt: skip
            off_by = [abs(number - right) for number, right in zip(row[1:], exact, strict=True)]
            if strict and (row[0] != LABELS.index(box.label) or max(off_by) > HALF_A_DIGIT):
                raise SystemExit(f"{name}.txt says {row}, right is {LABELS.index(box.label)} {exact}")
            off_by_px = max(off_by_px, off_by[0] * wide, off_by[1] * high, off_by[2] * wide, off_by[3] * high)
    if strict and files != len(images):
        raise SystemExit(f"{files} label files instead of {len(images)}")
    return FoundLabels(files, boxes, off_by_px)


def report(
    title: str, runs: dict[str, list[CommandUsage]], labels: dict[str, FoundLabels], missing: dict[Peer, str]
) -> None:
    """Print the table."""
    naive = middle(runs[NAIVE])
    columns = (
        "CPU s",
        "/ naive",
        "wall s",
        "/ naive",
        "peak MiB",
        "anonymous MiB",
        "label files",
        "boxes",
        "off by, px",
    )
    table = ResultTable(title, "", *columns)
    for name, usages in runs.items():
        usage, found = middle(usages), labels[name]
        times = (usage.cpu_s, ratio(usage.cpu_s, naive.cpu_s), usage.seconds, ratio(usage.seconds, naive.seconds))
        written = (f"{found.files:,}", f"{found.boxes:,}", f"{found.off_by_px:.6f}")
        table.row(name, *times, usage.peak_mib, usage.anonymous_mib, *written)
    table.print()
    for peer, reason in missing.items():
        print(f"{peer} was not measured: {reason}")


if __name__ == "__main__":
    main()
