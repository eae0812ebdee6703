"""COCO polygons → YOLO labels for segmentation: `dsctl convert` against a naive script, Datumaro, FiftyOne and
Supervision; and memory for a large set.

Ours starts from a snapshot of a folder. It opens every image for its size, checks every polygon, joins the rings of one
object, and ends in a snapshot. "again" is a second conversion of the same snapshot, whose annotations the catalog has
by then; with `--trust-sizes` it opens no image, as the script does. The script writes labels only, to a tmpfs. All run
in turn, each round in a fresh home; times are medians, memory the largest sum of the resident sets of all processes.

Peers do a tenth of it once, beside ours and the script: FiftyOne takes minutes for more, and Supervision makes a mask
of the whole image of each polygon and keeps all in memory. FiftyOne's CPU time is without its database's. Datumaro
writes boxes, as it has no YOLO segmentation.

Afterwards every label of one ring, of ours and of the script, is compared with the exact numbers; of peers those are
counted that are "exact". An object of several rings is one line or several. With `--large` the
annotations of more images are indexed, and it is told what each process takes when they take most together: `Pss`
(proc(5)), in which pages that processes share count once, and so do those of mapped cache files. The daemon is the
node's: it fills its cache meanwhile, and its buffers are bounded whatever is indexed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.coco_to_segment import FILE
from benchmarks.coco_to_segment import __file__ as script
from benchmarks.convert import AGAIN, HALF_A_DIGIT, NAIVE, OURS, snapshot_labels
from benchmarks.harness import DSCTL, Home, ResultTable, Workspace, benchmark, foreign_environment, ratio
from benchmarks.images import with_comment
from benchmarks.peers import DATUMARO, FIFTYONE, SUPERVISION, PeerUnavailableError, programs_of
from benchmarks.usage import SAMPLE_EVERY_S, CommandUsage, command_of, family, measured, memory_mib, middle

WIDTH, HEIGHT = 640, 480
CLASSES = 80
Ring = list[float]


def main() -> None:
    with benchmark(
        __doc__, images=(5_000, 60), polygons=(36_000, 400), rounds=(3, 1), large=False, many=(100_000, 200)
    ) as (args, work):
        folder = work.folder("coco")
        labels = write_coco(folder, args.images, args.polygons)
        runs: dict[str, list[CommandUsage]] = {}
        for number in range(args.rounds):
            home = work.home(f"home-{number}")
            home.snapshot("coco", folder)
            for name, usage in one_round(home, folder, labels):
                runs.setdefault(name, []).append(usage)
            home.close()
        title = f"COCO → YOLO labels for segmentation, {args.images:,} images, {args.polygons:,} polygons"
        report(title, runs)
        compare_peers(work, args)
        if args.large:
            report_memory(work, args.many, round(args.many * 8.6))


def one_round(home: Home, folder: Path, labels: dict[str, list[list[Ring]]]) -> Iterator[tuple[str, CommandUsage]]:
    """Run ours and the script once; yield the name and the cost."""
    out = Path(tempfile.mkdtemp(dir=home.ram_dir))
    yield NAIVE, measured([sys.executable, "-P", script, "naive", folder, out])
    check(labels, ((path.stem, path.read_text()) for path in out.iterdir()))
    shutil.rmtree(out)
    for name, made, options in (
        (OURS, "coco-yolo", []),
        (AGAIN, "coco-yolo-again", []),
        (f"{OURS} --trust-sizes", "coco-yolo-trusted", ["--trust-sizes"]),
    ):
        command = [DSCTL, "convert", "coco@latest", "--to", "yolo-segment", "--as", made, *options]
        yield name, measured(command, env=home.env, beside=home.processes)
        check(labels, snapshot_labels(home, made))


def compare_peers(work: Workspace, args: argparse.Namespace) -> None:
    """Give a tenth to all tools, once, and print the table."""
    folder, home = work.folder("tenth"), work.home("home-tenth")
    labels = write_coco(folder, args.images // 10, args.polygons // 10)
    home.snapshot("coco", folder)
    runs = dict(one_round(home, folder, labels))
    objects = sum(map(len, labels.values()))
    single = sum(len(rings) == 1 for its in labels.values() for rings in its)
    found = dict.fromkeys(runs, (objects, single))
    for peer in (DATUMARO, FIFTYONE, SUPERVISION):
        try:
            python = programs_of(peer, args) / "python"
        except PeerUnavailableError as exc:
            print(f"{peer} was not measured: {exc}")
            continue
        out = Path(tempfile.mkdtemp(dir=home.ram_dir))
        env = foreign_environment() | {"HOME": str(home.path), "FIFTYONE_DATABASE_DIR": str(home.path / "database")}
        runs[str(peer)] = measured([python, "-P", script, peer.name, folder, out], env=env)
        found[str(peer)] = count(labels, {path.stem: path.read_text() for path in out.rglob("0*.txt")})
    title = f"A tenth of it in all tools: {objects:,} polygons, {single:,} of one ring"
    table = ResultTable(title, "", "CPU s", "/ naive", "wall s", "peak MiB", "lines", "exact")
    for name, usage in runs.items():
        cost = (usage.cpu_s, ratio(usage.cpu_s, runs[NAIVE].cpu_s), usage.seconds, usage.peak_mib)
        table.row(name, *cost, *(f"{number:,}" for number in found[name]))
    table.print()


def count(labels: dict[str, list[list[Ring]]], files: dict[str, str]) -> tuple[int, int]:
    """Count the lines, and the objects of one ring that have all their points in one of them."""
    lines = exact = 0
    for name, objects in labels.items():
        rows: dict[int, list[list[float]]] = {}
        for line in files.get(name, "").splitlines():
            values = list(map(float, line.split()[1:]))
            rows.setdefault(len(values), []).append(values)
            lines += 1
        for ring, *more in objects:
            right = [value / (HEIGHT if n % 2 else WIDTH) for n, value in enumerate(ring)]
            near = (max(map(abs, map(float.__sub__, row, right))) <= HALF_A_DIGIT for row in rows.get(len(ring), ()))
            exact += not more and any(near)
    return lines, exact


def write_coco(folder: Path, images: int, polygons: int) -> dict[str, list[list[Ring]]]:
    """Write images of one colour and a file like COCO's own: 29 points a polygon, two decimals, and some objects of
    several rings. Return the rings of each image's objects."""
    chance = random.Random(1)
    (folder / "images").mkdir()
    (folder / FILE).parent.mkdir()
    plain = folder / "plain.jpg"
    Image.new("RGB", (WIDTH, HEIGHT), (90, 120, 150)).save(plain, quality=30)
    jpeg = plain.read_bytes()
    plain.unlink()
    entries: list[dict[str, Any]] = []
    labels: dict[str, list[list[Ring]]] = {}
    for id in range(1, images + 1):
        name = f"{id:012d}"
        (folder / "images" / f"{name}.jpg").write_bytes(with_comment(jpeg, name.encode()))
        entries.append({"id": id, "file_name": f"{name}.jpg", "width": WIDTH, "height": HEIGHT})
    with open(folder / FILE, "w") as file:
        file.write(f'{{"info": {{}}, "images": {json.dumps(entries)}, "annotations": [')
        for id in range(1, polygons + 1):
            several = chance.random() < 0.15
            rings = [_ring(chance) for _ in range(chance.randint(2, 4) if several else 1)]
            xs, ys = ([value for ring in rings for value in ring[n::2]] for n in range(2))
            side = (round(max(xs) - min(xs), 2), round(max(ys) - min(ys), 2))
            image = chance.randint(1, images)
            labels.setdefault(f"{image:012d}", []).append(rings)
            found = {"segmentation": rings, "iscrowd": 0, "image_id": image, "bbox": [min(xs), min(ys), *side]}
            found |= {"area": round(chance.uniform(10, 9000), 4), "category_id": chance.randint(1, CLASSES), "id": id}
            file.write(f"{', ' if id > 1 else ''}{json.dumps(found)}")
        categories = [{"id": id, "name": f"class {id:02}", "supercategory": ""} for id in range(1, CLASSES + 1)]
        file.write(f'], "categories": {json.dumps(categories)}}}')
    return labels


def _ring(chance: random.Random) -> Ring:
    count = max(4, min(300, int(chance.lognormvariate(2.9, 0.7))))
    x, y, radius = chance.uniform(40, 600), chance.uniform(40, 440), chance.uniform(3, 38)
    turns = [(2 * math.pi * n / count, radius * chance.uniform(0.7, 1)) for n in range(count)]
    points = ((x + away * math.cos(turn), y + away * math.sin(turn)) for turn, away in turns)
    return [round(value, 2) for point in points for value in point]


def check(labels: dict[str, list[list[Ring]]], found: Iterable[tuple[str, str]]) -> None:
    """End the benchmark where an object is missing, or one of a single ring is not exact to six decimals."""
    files = {name: text.splitlines() for name, text in found}
    for name, objects in labels.items():
        lines = files.get(name, [])
        if len(lines) != len(objects):
            raise SystemExit(f"{name}.txt has {len(lines)} objects instead of {len(objects)}")
        for line, rings in zip(lines, objects, strict=True):
            exact = [value / (HEIGHT if n % 2 else WIDTH) for n, value in enumerate(rings[0])]
            values = list(map(float, line.split()[1:]))
            if len(rings) == 1 and max(map(abs, map(float.__sub__, values, exact))) > HALF_A_DIGIT:
                raise SystemExit(f"{name}.txt says {line}, right is {exact}")


def report(title: str, runs: dict[str, list[CommandUsage]]) -> None:
    """Print the table."""
    naive = middle(runs[NAIVE])
    table = ResultTable(title, "", "CPU s", "/ naive", "wall s", "/ naive", "peak MiB", "anonymous MiB")
    for name, usages in runs.items():
        usage = middle(usages)
        times = (usage.cpu_s, ratio(usage.cpu_s, naive.cpu_s), usage.seconds, ratio(usage.seconds, naive.seconds))
        table.row(name, *times, usage.peak_mib, usage.anonymous_mib)
    table.print()


def report_memory(work: Workspace, images: int, polygons: int) -> None:
    """Index a large set and print what its processes take when they take most together."""
    folder, home = work.folder("large"), work.home("home-large")
    write_coco(folder, images, polygons)
    home.snapshot("large", folder)
    peak: dict[int, tuple[str, float]] = {}
    with subprocess.Popen([DSCTL, "stats", "large@latest"], env=home.env, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            now = {pid: (role(pid, process.pid), memory_mib(pid, "Pss")) for pid in family(process.pid)}
            peak = max(peak, now, key=lambda each: sum(mib for _, mib in each.values()))
            time.sleep(SAMPLE_EVERY_S)
    if process.returncode:
        raise SystemExit(f"dsctl stats failed with exit code {process.returncode}")
    table = ResultTable(f"Indexing {images:,} images, {polygons:,} polygons", "", "peak MiB (Pss)")
    for name, mib in peak.values():
        table.row(name, mib)
    table.row("all of them", sum(mib for _, mib in peak.values()))
    table.print()


def role(pid: int, command: int) -> str:
    """Return what a process is, among those that a command has started."""
    if pid == command:
        return "dsctl stats"
    return "the daemon" if "datacache.daemon" in command_of(pid) else "a worker of dsctl"


if __name__ == "__main__":
    main()
