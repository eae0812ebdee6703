"""The numbers of pycocotools for objects and predictions, as a user of COCO's own code gets them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import NamedTuple

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from datacache.annotations.comparing.matching import CROWD, score_of
from datacache.annotations.model import Box

NAMES = (
    *("map", "map_50", "map_75", "map_small", "map_medium", "map_large"),
    *("mar_1", "mar_10", "mar_100", "mar_small", "mar_medium", "mar_large"),
)


class CocoNumbers(NamedTuple):
    summary: dict[str, float | None]
    classes: dict[str, tuple[float, float] | None]
    """AP at 0.50:0.95 and at 0.50; None for a class without objects."""


def coco_numbers(labels: Mapping[str, Sequence[Box]], predictions: Mapping[str, Sequence[Box]]) -> CocoNumbers:
    """Ask pycocotools; images are numbered in the order of their paths."""
    paths = sorted(labels)
    names = sorted({box.label for boxes in (*labels.values(), *predictions.values()) for box in boxes})
    ids = {name: n for n, name in enumerate(names, 1)}
    objects, guesses = [], []
    for number, path in enumerate(paths, 1):
        for box in labels[path]:
            given = None if box.extra is None else box.extra.area
            found = _entry(box, number, ids) | {"id": len(objects) + 1, "iscrowd": int(CROWD in box.attributes)}
            sides = found["bbox"][2] * found["bbox"][3]
            objects.append(found | {"area": sides if given is None else given})
        guesses += [_entry(box, number, ids) | {"score": score_of(box)} for box in predictions.get(path, ())]
    if not guesses or not objects:
        raise ValueError("pycocotools takes no empty lists")
    truth = {
        "images": [{"id": n} for n in range(1, len(paths) + 1)],
        "annotations": objects,
        "categories": [{"id": n, "name": name} for name, n in ids.items()],
    }
    return numbers_of(truth, guesses)


def numbers_of(truth: dict, guesses: list[dict]) -> CocoNumbers:
    """Ask pycocotools about lists as COCO's JSON has them."""
    with redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        found = COCOeval(coco, coco.loadRes(guesses), "bbox")
        found.evaluate()
        found.accumulate()
        found.summarize()
    precision = found.eval["precision"][:, :, :, 0, 2]
    names = [each["name"] for each in sorted(truth["categories"], key=lambda each: each["id"])]
    classes = {
        name: None if (precision[:, :, n] < 0).all() else (precision[:, :, n].mean(), precision[0, :, n].mean())
        for n, name in enumerate(names)
    }
    return CocoNumbers(
        {name: None if value < 0 else float(value) for name, value in zip(NAMES, found.stats, strict=True)}, classes
    )


def _entry(box: Box, image: int, ids: Mapping[str, int]) -> dict:
    x1, y1, x2, y2 = map(float, box[1:5])
    return {"image_id": image, "category_id": ids[box.label], "bbox": [x1, y1, x2 - x1, y2 - y1]}


def drawn_set(seed: int, images: int = 12) -> tuple[dict[str, list[Box]], dict[str, list[Box]]]:
    """Labels and predictions of some images: objects of all sizes, crowds, jittered, missed, invented, of another
    class, at any place and on grids (where overlaps are equal), with scores that are often equal, images and classes
    without either."""
    from datacache.annotations.shapes.outline import Extra

    rng = np.random.default_rng(seed)
    names = [f"c{n}" for n in range(int(rng.integers(1, 4)))]
    grid, steps = rng.choice([0, 1, 16]), int(rng.choice([3, 10, 10**6]))
    labels, guesses = {}, {}

    def box(label: str, corner: np.ndarray, size: np.ndarray, **more) -> Box:
        size = np.maximum(size, max(1, grid))
        edges = np.concatenate((corner, corner + size))
        return Box(label, *(np.rint(edges / grid) * grid if grid else edges).tolist(), **more)

    def score() -> Extra:
        return Extra(score=float(np.ceil(rng.random() * steps) / steps))

    for n in range(images):
        mine, found = [], []
        for _ in range(int(rng.choice([0, 1, 4, 12]))):
            label, corner = str(rng.choice(names)), rng.random(2) * (96 if grid > 1 else 300)
            size = np.full(2, 48.0) if grid > 1 else 2 ** (rng.random(2) * 6 + 2)
            attributes = (CROWD,) if rng.random() < 0.1 else ()
            area = Extra(area=float(size.prod() * rng.random())) if rng.random() < 0.2 else None
            mine.append(box(label, corner, size, attributes=attributes, extra=area))
            for _ in range(int(rng.choice([0, 1, 1, 2, 5]))):
                moved = corner + rng.normal(size=2) * size * rng.choice([0, 0.02, 0.3] if grid > 1 else [0, 0.02, 0.15])
                other = str(rng.choice(names)) if rng.random() < 0.1 else label
                found.append(box(other, moved, size * rng.choice([1, 1, 0.5, 1.3], 2), extra=score()))
        for _ in range(int(rng.choice([0, 0, 2]))):
            label = "unlabelled" if rng.random() < 0.2 else names[0]
            found.append(box(label, rng.random(2) * 300, rng.random(2) * 90, extra=score()))
        if n == 0 and seed % 50 == 0:  # more than COCO looks at
            corners = rng.random((104, 2)) * 400
            mine += [box(names[0], corner, np.full(2, 9.0)) for corner in corners]
            found += [box(names[0], corner, np.full(2, 9.0), extra=score()) for corner in corners]
        order = rng.permutation(len(found))
        labels[f"{n:04d}.jpg"], guesses[f"{n:04d}.jpg"] = mine, [found[place] for place in order]
    return labels, guesses
