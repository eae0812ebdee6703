"""A small VOC data set that is drawn: cartoon faces, some with a mask and some without.

Used by `dsctl demo`, tests and examples, so that nobody has to download anything. Needs Pillow. The same seed
gives the same bytes (with the same Pillow). No threads.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw

MASKED, BARE = "with_mask", "without_mask"
_SCALE = 2
"""Drawn so much larger and then reduced, for smooth edges."""
_SKINS = ((255, 224, 196), (241, 194, 151), (198, 134, 92), (141, 85, 54), (92, 56, 38))
_HAIRS = ((40, 26, 20), (92, 60, 32), (180, 130, 60), (120, 120, 124), (150, 50, 30))
_MASKS = ((120, 180, 230), (240, 240, 245), (60, 70, 90), (150, 210, 180), (230, 150, 170))
_Colour = tuple[int, int, int]


class Faces(NamedTuple):
    """The folder that was drawn into, and what is in it."""

    folder: Path
    images: int
    masked: int
    bare: int


class _Box(NamedTuple):
    left: int
    top: int
    right: int
    bottom: int
    masked: bool


def draw_faces(folder: Path, *, count: int = 200, seed: int = 0, width: int = 320, height: int = 240) -> Faces:
    """Write `JPEGImages/*.jpg`, `Annotations/*.xml` and `ImageSets/Main/{train,val,trainval,test}.txt` under
    `folder`.

    Names are `000001` and so on. Boxes are in pixels, one-based and inclusive as VOC has them. Splits are
    70/15/15.
    """
    chance = random.Random(seed)
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    masked = bare = 0
    for number in range(1, count + 1):
        image, boxes = _draw(chance, width, height)
        name = f"{number:06}"
        image.save(folder / "JPEGImages" / f"{name}.jpg", quality=88)
        (folder / "Annotations" / f"{name}.xml").write_text(_xml(name, width, height, boxes), encoding="utf-8")
        masked += sum(box.masked for box in boxes)
        bare += sum(not box.masked for box in boxes)
    names = [f"{number:06}" for number in range(1, count + 1)]
    chance.shuffle(names)
    train, val = round(count * 0.7), round(count * 0.85)
    splits = {"train": names[:train], "val": names[train:val], "trainval": names[:val], "test": names[val:]}
    for split, members in splits.items():
        text = "".join(f"{name}\n" for name in sorted(members))
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text(text, encoding="utf-8")
    return Faces(folder, count, masked, bare)


def _draw(chance: random.Random, width: int, height: int) -> tuple[Image.Image, list[_Box]]:
    sky = tuple(chance.randrange(120, 235) for _ in range(3))
    image = Image.new("RGB", (width * _SCALE, height * _SCALE), sky)
    pen = ImageDraw.Draw(image)
    for _ in range(chance.randrange(4, 10)):  # something behind them
        x, y = chance.randrange(width * _SCALE), chance.randrange(height * _SCALE)
        size = chance.randrange(20, 160)
        shade = tuple(min(255, max(0, channel + chance.randrange(-30, 31))) for channel in sky)
        pen.rectangle((x, y, x + size, y + size // 2), fill=shade)
    boxes: list[_Box] = []
    for _ in range(chance.randrange(1, 5)):
        box = _place(chance, width, height, boxes)
        if box is not None:
            _draw_face(pen, chance, box)
            boxes.append(box)
    return image.resize((width, height), Image.Resampling.LANCZOS), boxes


def _place(chance: random.Random, width: int, height: int, taken: list[_Box]) -> _Box | None:
    """Find a place where no other face is; the first one always finds one."""
    for _ in range(20):
        wide = chance.randrange(width // 8, width // 4)
        high = round(wide * chance.uniform(1.15, 1.35))
        left, top = chance.randrange(1, width - wide), chance.randrange(1, height - high)
        box = _Box(left, top, left + wide, top + high, chance.random() < 0.5)
        if all(
            box.right < other.left or other.right < box.left or box.bottom < other.top or other.bottom < box.top
            for other in taken
        ):
            return box
    return None


def _draw_face(pen: ImageDraw.ImageDraw, chance: random.Random, box: _Box) -> None:
    left, top, right, bottom = (side * _SCALE for side in box[:4])
    wide, high = right - left, bottom - top
    skin, hair, dark = chance.choice(_SKINS), chance.choice(_HAIRS), (30, 20, 20)

    def oval(x: float, y: float, half_x: float, half_y: float, colour: _Colour) -> None:
        centre_x, centre_y, x, y = left + x * wide, top + y * high, half_x * wide, half_y * high
        pen.ellipse((centre_x - x, centre_y - y, centre_x + x, centre_y + y), fill=colour)

    oval(0.5, 0.42, 0.5, 0.42, hair)
    oval(0.5, 0.56, 0.43, 0.44, skin)
    for x in (0.33, 0.67):
        oval(x, 0.48, 0.09, 0.06, (255, 255, 255))
        oval(x + chance.uniform(-0.03, 0.03), 0.48, 0.045, 0.05, dark)
    if box.masked:
        colour = chance.choice(_MASKS)
        y = top + 0.58 * high
        for edge, inward in ((left, wide), (right, -wide)):
            line = (edge + 0.16 * inward, y + 0.04 * high, edge + 0.05 * inward, top + 0.5 * high)
            pen.line(line, fill=colour, width=max(1, wide // 40))
        pen.polygon(
            [
                (left + 0.13 * wide, y),
                (left + 0.5 * wide, y - 0.05 * high),
                (right - 0.13 * wide, y),
                (right - 0.17 * wide, y + 0.25 * high),
                (left + 0.5 * wide, y + 0.37 * high),
                (left + 0.17 * wide, y + 0.25 * high),
            ],
            fill=colour,
        )
    else:
        oval(0.5, 0.62, 0.05, 0.06, tuple(max(0, channel - 30) for channel in skin))  # type: ignore[arg-type]
        oval(0.5, 0.79, 0.17, chance.uniform(0.02, 0.07), (170, 50, 60))


def _xml(name: str, width: int, height: int, boxes: list[_Box]) -> str:
    objects = "".join(
        f"""  <object>
    <name>{MASKED if box.masked else BARE}</name>
    <pose>Unspecified</pose>
    <truncated>0</truncated>
    <difficult>0</difficult>
    <bndbox>
      <xmin>{box.left + 1}</xmin>
      <ymin>{box.top + 1}</ymin>
      <xmax>{box.right}</xmax>
      <ymax>{box.bottom}</ymax>
    </bndbox>
  </object>
"""
        for box in boxes
    )
    return f"""<annotation>
  <folder>JPEGImages</folder>
  <filename>{name}.jpg</filename>
  <size>
    <width>{width}</width>
    <height>{height}</height>
    <depth>3</depth>
  </size>
  <segmented>0</segmented>
{objects}</annotation>
"""
