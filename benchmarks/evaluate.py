"""COCO's numbers of drawn predictions: computed by `DetectionCounter` from arrays, and by pycocotools from its lists.

Each way is a process of its own, from objects in memory to the twelve numbers, which must be equal to nine decimals.
The memory is what the process has more at its peak than after it has read the objects.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import ResultTable, benchmark, ratio
from benchmarks.usage import measured

if TYPE_CHECKING:
    from numpy.typing import NDArray

OBJECTS = 7
"""An image."""


def main() -> None:
    with benchmark(__doc__, images=([10_000, 100_000], [200]), classes=(5, 5)) as (args, work):
        table = ResultTable(
            f"average precision of boxes of {args.classes} classes, {OBJECTS} objects an image",
            "", "CPU s", "MiB", "CPU s, pycocotools", "MiB", "CPU s, ours / theirs",
        )  # fmt: skip
        for images in args.images:
            file = work.folder(f"drawn-{images}") / "objects.npz"
            draw(file, images, args.classes)
            ours, theirs = (run(way, file) for way in ("ours", "pycocotools"))
            for name, number in theirs["numbers"].items():
                if abs(number - ours["numbers"][name]) > 1e-9:
                    raise SystemExit(f"{name} is {ours['numbers'][name]}, and {number} by pycocotools")
            cells = ours["cpu_s"], ours["mib"], theirs["cpu_s"], theirs["mib"], ratio(ours["cpu_s"], theirs["cpu_s"])
            table.row(f"{images:,} images, {ours['predictions']:,} predictions", *cells)
        table.print()


def draw(file: Path, images: int, classes: int) -> None:
    """Draw labels of all sizes, a fiftieth of them crowds, and up to three predictions of each, some far off."""
    import numpy as np

    rng = np.random.default_rng(7)
    count = images * OBJECTS
    corners, sizes = rng.random((2, count)) * 500, 2 ** (rng.random((2, count)) * 5 + 3)
    of = np.repeat(np.arange(count), rng.integers(0, 4, count))
    moved = corners[:, of] + rng.normal(size=(2, len(of))) * sizes[:, of] * 0.1
    ends = moved + sizes[:, of] * rng.uniform(0.8, 1.2, (2, len(of)))
    np.savez(
        file,
        images=np.array(images),
        classes=rng.integers(0, classes, count),
        edges=np.concatenate((corners, corners + sizes)),
        crowds=rng.random(count) < 0.02,
        predicted_of=of,
        predicted=np.concatenate((moved, ends)),
        scores=np.round(rng.random(len(of)), 3),
    )


def run(way: str, file: Path) -> dict[str, Any]:
    """Run a way in a process of its own."""
    done = measured([sys.executable, "-c", f"from benchmarks.evaluate import show; show({way!r}, {str(file)!r})"])
    found: dict[str, Any] = json.loads(done.output)
    return found


def show(way: str, file: str) -> None:
    """Print what a way finds, and what it costs."""
    import numpy as np

    with np.load(file) as loaded:
        drawn = dict(loaded)
    before = resource.getrusage(resource.RUSAGE_SELF)
    numbers = {"ours": ours, "pycocotools": theirs}[way](drawn)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    mib = (after.ru_maxrss - before.ru_maxrss) / 1024
    print(json.dumps({"numbers": numbers, "cpu_s": cpu_s, "mib": mib, "predictions": len(drawn["scores"])}))


def ours(drawn: dict[str, NDArray[Any]]) -> dict[str, float | None]:
    import numpy as np

    from datacache.annotations.comparing.matching import ObjectArrays
    from datacache.models.average_precision import DetectionCounter

    at_once = 200  # as many images as a range of a table has
    counter = DetectionCounter(int(drawn["classes"].max()) + 1)
    areas = (drawn["edges"][2:] - drawn["edges"][:2]).prod(axis=0)
    for start in range(0, int(drawn["images"]), at_once):
        mine = slice(start * OBJECTS, (start + at_once) * OBJECTS)
        images = np.arange(mine.start, mine.stop) // OBJECTS - start
        zeros = np.zeros(len(images))
        one = ObjectArrays(images, drawn["edges"][:, mine], drawn["classes"][mine], drawn["crowds"][mine], zeros)
        found = slice(*np.searchsorted(drawn["predicted_of"], (mine.start, mine.stop)))
        of = drawn["predicted_of"][found]
        edges, none = drawn["predicted"][:, found], np.zeros(len(of), bool)
        two = ObjectArrays(of // OBJECTS - start, edges, drawn["classes"][of], none, drawn["scores"][found])
        counter.add(one, areas[mine], two, at_once)
    return counter.finish().summary()


def theirs(drawn: dict[str, NDArray[Any]]) -> dict[str, float | None]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    of = drawn["predicted_of"]
    objects = entries(drawn["edges"], range(len(drawn["classes"])), drawn["classes"].tolist())
    for entry, crowd in zip(objects, drawn["crowds"].tolist(), strict=True):
        entry |= {"id": entry["id"] + 1, "iscrowd": int(crowd), "area": entry["bbox"][2] * entry["bbox"][3]}
    found = entries(drawn["predicted"], of.tolist(), drawn["classes"][of].tolist())
    for entry, score in zip(found, drawn["scores"].tolist(), strict=True):
        entry["score"] = score
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        names = [{"id": n, "name": str(n)} for n in range(int(drawn["classes"].max()) + 1)]
        images = [{"id": n} for n in range(int(drawn["images"]))]
        truth.dataset = {"images": images, "annotations": objects, "categories": names}
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    kinds = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")
    recalls = ("mar_1", "mar_10", "mar_100", "mar_small", "mar_medium", "mar_large")
    return dict(zip((*kinds, *recalls), evaluation.stats.tolist(), strict=True))


def entries(edges: NDArray[Any], of: Any, classes: list[int]) -> list[dict[str, Any]]:
    """Return objects as COCO's JSON has them. `of` are the objects they belong to, by which one knows their image."""
    boxes = zip(*edges.tolist(), strict=True)
    return [
        {"id": n, "image_id": n // OBJECTS, "category_id": label, "bbox": [x1, y1, x2 - x1, y2 - y1]}
        for n, label, (x1, y1, x2, y2) in zip(of, classes, boxes, strict=True)
    ]


if __name__ == "__main__":
    main()
