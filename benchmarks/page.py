"""`dsctl ui` on a large data set, asked over HTTP, and FiftyOne on the same.

Each round starts a server: the first grid is there when 48 images are in a page with the number of images of each
class; what the server takes to start is part of it. The first filter follows at once. Filters after it are all
different, so none is answered from memory. FiftyOne is asked the same from Python, in a process that has imported the
data set before: to open it and list 48 images, which starts its database, and to filter by a label: the first 48, how
many there are, and with the numbers of boxes of each class. Its App asks its server for that, which takes longer.

`--images 1000000 --boxes 10000000 --made FOLDER` makes a data set once (half an hour) and measures it again and again;
FiftyOne is left out above 200,000 images. All images are one small JPEG.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import unescape
from http.cookiejar import CookieJar
from itertools import chain
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from benchmarks.harness import DSCTL, ROOT, Home, ResultTable, ToldProcess, Workspace, benchmark, foreign_environment
from benchmarks.peers import FIFTYONE, PeerUnavailableError, programs_of
from benchmarks.usage import cpu_of_families, family, measured, memory_mib
from tests import leftovers

WIDTH, HEIGHT, CLASSES, A_FOLDER = 640, 480, 80, 10_000
REF = "large@latest"
FIRST_TIME = "snapshot and annotations, the first time"
MOST_FOR_PEER = 200_000
PEER_TIMEOUT_S = 3_600
Cost = tuple[float | None, float | None]
"""Seconds, and CPU seconds."""
FILTERS = {
    "by a label": [f"label=class+{n:02}" for n in (3, 5, 8, 13)],
    "by a condition on numbers": [f"where=objects+>+{n}+and+count('class+01')+>+1" for n in (4, 6, 8, 9)],
    "by the side of boxes": [f"min_side={n}" for n in (10, 12, 20, 30)],
    "by a folder": [f"folder=images/{n:03}" for n in (1, 3, 5, 6)],
    "by a pattern in paths": [f"where=like(path,'*{n}?.jpg')" for n in (1, 2, 3, 14)],
}


def main() -> None:
    with benchmark(__doc__, images=(100_000, 500), boxes=(1_000_000, 5_000), rounds=(3, 1), made="") as (args, work):
        place = Path(args.made) if args.made else work.path
        folder = place / "set"
        if not folder.exists():
            folder.mkdir(parents=True)
            write_coco(folder, args.images, args.boxes)
        table = ResultTable(
            f"{args.images:,} images, {args.boxes:,} boxes, seconds", "", "dsctl ui", "CPU s", "FiftyOne", "/ ours"
        )
        with home_at(place / "home", work) as home:
            opening = snapshot(home, folder)
            rounds = [one_round(home, filters=number == 0) for number in range(args.rounds)]
        theirs: dict[str, float] = {}
        if args.images <= MOST_FOR_PEER:
            try:
                theirs = fiftyone(folder, programs_of(FIFTYONE, args) / "python")
            except PeerUnavailableError as exc:
                print(f"{FIFTYONE} was not measured: {exc}", file=sys.stderr)
        ours = {name: _median([each[name] for each in rounds if name in each]) for name in rounds[0]}
        for name in (FIRST_TIME, *ours):
            mine, cpu_s = ours.get(name, opening)
            other = theirs.get(name)
            table.row(name, mine, cpu_s, other, f"{other / mine:,.1f}×" if mine and other else None)
        table.print()


# --- ours ---


@contextmanager
def home_at(path: Path, work: Workspace) -> Iterator[Home]:
    """Make a home, or take one that is there already, and leave its catalog."""
    if path.parent == work.path:
        yield work.home(path.name)
        return
    path.mkdir(exist_ok=True)
    home = Home(path, {}, {})
    try:
        yield home
    finally:
        leftovers.end_processes(home.processes)
        shutil.rmtree(home.ram_dir, ignore_errors=True)


def snapshot(home: Home, folder: Path) -> Cost:
    """Make the snapshot and read its annotations, if that was not done before."""
    if json.loads(home.dsctl("snapshot", "list", "--json")):
        return None, None
    create = [DSCTL, "snapshot", "create", REF.partition("@")[0], "--from", folder.as_uri()]
    runs = [measured(each, env=home.env) for each in (create, [DSCTL, "stats", REF])]
    return sum(run.seconds for run in runs), sum(run.cpu_s for run in runs)


def one_round(home: Home, *, filters: bool) -> dict[str, Cost]:
    """Start a server and ask it; with `filters` also for pages after the first two."""
    start = time.perf_counter()
    server = ToldProcess(
        DSCTL, "ui", "--no-browser", "--read-only", "--port", "0", env=home.env, log=home.path / "ui.log"
    )
    try:
        browser = PageReader(server.answer(60).strip(), server.pid)
        first = browser.grid()
        found: dict[str, Cost] = {"the first grid after the start": (time.perf_counter() - start, browser.cpu_s())}
        found["the first filter"] = browser.cost("label=class+02")
        if filters:
            link = re.search(r'rel="next" href="/s/[^?"]*\?([^"]*)"', first)
            assert link
            found["the next page"] = browser.cost(unescape(link[1]))
            costs = {name: [browser.cost(each) for each in asked] for name, asked in FILTERS.items()}
            found |= {f"a filter {name}": _median(each) for name, each in costs.items()}
            found["the slowest of these filters"] = max(chain(*costs.values()))
            found["KB of a page without images"] = len(first.encode()) / 1000, None
            found["MiB of memory (Pss)"] = memory_mib(server.pid, "Pss"), None
    finally:
        os.kill(server.pid, signal.SIGINT)
        server.close()
    return found


def _median(costs: Sequence[Cost]) -> Cost:
    """Return the median of each number; None where there is none."""
    seconds, cpu_s = zip(*costs, strict=True)
    return median(seconds), None if None in cpu_s else median(cpu_s)


class PageReader:
    """Asks as a browser does that was given the link."""

    def __init__(self, link: str, pid: int) -> None:
        self._pid = pid
        self._site = link.partition("/?")[0]
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with self._opener.open(link) as answer:
            answer.read()

    def grid(self, asked: str = "") -> str:
        """Return a page of images, when it is there."""
        while True:
            with self._opener.open(f"{self._site}/s/{REF}?{asked}") as answer:
                text: str = answer.read().decode()
            if answer.status == 200:
                return text
            time.sleep(0.01)

    def cost(self, asked: str) -> Cost:
        """Return what a page with images costs; the CPU time is all that the server does meanwhile."""
        start, cpu_s = time.perf_counter(), self.cpu_s()
        if "/thumb/" not in self.grid(asked):
            raise SystemExit(f"{asked} found nothing")
        return time.perf_counter() - start, self.cpu_s() - cpu_s

    def cpu_s(self) -> float:
        return cpu_of_families([self._pid])


# --- FiftyOne ---


def fiftyone(folder: Path, python: Path) -> dict[str, float]:
    """Import the data set in one process, and look at it in another."""
    own = folder.parent / "fiftyone"
    own.mkdir(exist_ok=True)
    env = foreign_environment() | {"HOME": str(own), "FIFTYONE_DATABASE_DIR": str(own / "db")}
    env |= {"FIFTYONE_DEFAULT_DATASET_DIR": str(own / "data"), "FIFTYONE_DO_NOT_TRACK": "true"}
    found: dict[str, float] = {}
    for step in ("look",) if (own / "read").exists() else ("import", "look"):
        process = ToldProcess(python, "-P", ROOT / "benchmarks" / "page_fiftyone.py", env=env, log=own / "log")
        try:
            process.say(json.dumps([step, str(folder)]))
            line = process.answer(PEER_TIMEOUT_S)
            if not line:
                raise PeerUnavailableError((own / "log").read_text(errors="replace")[-500:])
            found |= json.loads(line)
            (own / "read").touch()
            found["MiB of memory (Pss)"] = sum(memory_mib(pid, "Pss") for pid in family(process.pid))
        finally:
            process.close()
    return found


# --- the data set ---


def write_coco(folder: Path, images: int, boxes: int) -> None:
    """Write `images/*/*.jpg` and `labels.json`. Some classes are frequent, and some are rare."""
    chance = np.random.default_rng(0)
    file = io.BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT), (90, 120, 150)).save(file, "JPEG", quality=30, optimize=True)
    names = [f"{n * 10 // images:03}/{n:07}.jpg" for n in range(images)]
    for name in names:
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "images" / name).write_bytes(file.getvalue())
    weights = 1 / np.arange(1, CLASSES + 1)
    labels = chance.choice(CLASSES, boxes, p=weights / weights.sum()) + 1
    owners = np.sort(chance.integers(0, images, boxes)) + 1
    wide, high = chance.integers(8, WIDTH // 3, boxes), chance.integers(8, HEIGHT // 3, boxes)
    left, top = chance.integers(0, WIDTH - wide), chance.integers(0, HEIGHT - high)
    categories = [{"id": n + 1, "name": f"class {n:02}"} for n in range(CLASSES)]
    with open(folder / "labels.json", "w") as out:
        out.write(json.dumps({"categories": categories})[:-1] + ', "images": [')
        out.writelines(
            f'{"," if n else ""}\n{{"id": {n + 1}, "file_name": "{name}", "width": {WIDTH}, "height": {HEIGHT}}}'
            for n, name in enumerate(names)
        )
        out.write('], "annotations": [')
        columns = (each.tolist() for each in (owners, labels, left, top, wide, high))
        out.writelines(
            f'{"," if n else ""}\n{{"id": {n + 1}, "image_id": {image}, "category_id": {label}, '
            f'"bbox": [{x}, {y}, {w}, {h}], "area": {w * h}, "iscrowd": 0}}'
            for n, (image, label, x, y, w, h) in enumerate(zip(*columns, strict=True))
        )
        out.write("]}\n")


if __name__ == "__main__":
    main()
