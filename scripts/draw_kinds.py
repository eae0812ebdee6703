"""Draws `docs/images/kinds.png`: an object of each kind that annotations have, on drawn images, as `preview` shows it.

python scripts/draw_kinds.py [FILE]
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from datacache import api
from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes import mask
from datacache.annotations.shapes.outline import (
    Extra,
    Keypoints,
    Polygon,
    Rotated,
    Skeleton,
    bounds,
    pack,
    polygon_of,
)

OUT = Path(__file__).resolve().parent.parent / "docs" / "images" / "kinds.png"
SIZE = WIDTH, HEIGHT = 360, 240
SKY, GRASS, DARK, LIGHT = (196, 214, 226), (150, 176, 140), (70, 76, 84), (226, 220, 208)
Points = Sequence[tuple[float, float]]

RING = [(180 + 90 * math.cos(n * math.pi / 8), 125 + 80 * math.sin(n * math.pi / 8)) for n in range(16)]
HOLE = [(180 + 42 * math.cos(n * math.pi / 5), 125 + 36 * math.sin(n * math.pi / 5)) for n in range(10)]
SHIP = [(82, 148), (250, 58), (276, 106), (108, 196)]
PERSON = {
    "head": (180, 48),
    "neck": (180, 84),
    "left_hand": (244, 96),
    "right_hand": (118, 104),
    "hip": (182, 142),
    "left_foot": (220, 212),
    "right_foot": (150, 214),
}
LIMBS = ((0, 1), (1, 2), (1, 3), (1, 4), (4, 5), (4, 6))
HIDDEN = "right_hand"


def main() -> None:
    """Draw it."""
    names = [*PERSON]
    keypoints = Keypoints(_packed([*PERSON.values()]), bytes(1 if name == HIDDEN else 2 for name in names))
    cloud = np.array(_cloud()) > 0
    tiles = [
        _tile("box", _scene(lambda pen: pen.rectangle((98, 88, 262, 190), DARK)), Box("bus", 96, 86, 264, 192)),
        _tile("rotated box", _scene(lambda pen: pen.polygon(SHIP, DARK)), _object("ship", Rotated(_packed(SHIP)))),
        _tile(
            "polygon with a hole",
            _scene(lambda pen: (pen.polygon(RING, DARK), pen.polygon(HOLE, GRASS))),
            _object("tyre", polygon_of([_packed(RING), _packed(HOLE)], 0b10)),
        ),
        _tile(
            "mask",
            _scene(lambda pen: pen.bitmap((0, 0), _cloud(), LIGHT)),
            _object("cloud", mask.encode(cloud, 0, 0, *SIZE)),
        ),
        _tile(
            "keypoints with a skeleton",
            _scene(_draw_person),
            Box("person", 108, 22, 254, 222, extra=Extra(keypoints=keypoints)),
        ),
        _tile("label of the image", _scene(lambda _pen: None), labels=("meadow",)),
    ]
    skeletons = {"person": Skeleton(tuple(names), LIMBS)}
    picture = api.draw_pictures(tiles, columns=3, skeletons=skeletons)
    (Path(sys.argv[1]) if sys.argv[1:] else OUT).write_bytes(picture)


def _packed(points: Points) -> bytes:
    return pack(chain.from_iterable(points))


def _object(label: str, outline: Polygon | Rotated | mask.Mask) -> Box:
    around = mask.bounds(outline) if isinstance(outline, mask.Mask) else bounds(outline[0])
    assert around is not None
    return Box(label, *map(float, around), extra=Extra(outline))


def _scene(draw: object) -> bytes:
    """Draw something on a meadow, and return the PNG."""
    image = Image.new("RGB", SIZE, SKY)
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 110, WIDTH, HEIGHT), GRASS)
    assert callable(draw)
    draw(pen)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _cloud() -> Image.Image:
    found = Image.new("L", SIZE)
    pen = ImageDraw.Draw(found)
    for x, y, radius in ((120, 92, 34), (170, 70, 46), (226, 86, 40), (262, 104, 24), (150, 108, 30), (205, 110, 30)):
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), 255)
    return found


def _draw_person(pen: ImageDraw.ImageDraw) -> None:
    points = [*PERSON.values()]
    for a, b in LIMBS:
        pen.line((points[a], points[b]), DARK, 13)
    x, y = PERSON["head"]
    pen.ellipse((x - 24, y - 24, x + 24, y + 24), DARK)


def _tile(title: str, data: bytes, *boxes: Box, labels: tuple[str, ...] = ()) -> api.Picture:
    return api.Picture(title, data, Annotation(title, *SIZE, boxes, labels))


if __name__ == "__main__":
    main()
