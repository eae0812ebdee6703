"""A Pascal VOC data set of any size whose boxes are known: files as LabelImg writes them, and what is in them.

The images are a few drawn ones over and over, each with a comment of its own inside, so that no two files are the
same and drawing takes a second. The boxes are random and have nothing to do with what is drawn. The same arguments
give the same data.
"""

from __future__ import annotations

import io
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from dataset_cli.demo.faces import draw_faces

LABELS = ("glasses", "hat", "mask", "no_mask", "scarf")
_WEIGHTS = (2, 1, 6, 3, 1)
_SIZES = ((640, 480), (480, 640), (800, 600), (500, 375))
_DRAWN_OF_A_SIZE = 5
_GRAIN = 0.08


class VocBox(NamedTuple):
    """One object, with the numbers its file says."""

    label: str
    xmin: int
    ymin: int
    xmax: int
    ymax: int


class VocImage(NamedTuple):
    """One image and what its file says is on it."""

    name: str
    width: int
    height: int
    boxes: tuple[VocBox, ...]


def voc_images(count: int, boxes: int, *, seed: int = 0) -> Iterator[VocImage]:
    """`count` images with `boxes` boxes in all, at least one on each."""
    chance = random.Random(seed)
    more = Counter(chance.choices(range(count), k=boxes - count))
    for number in range(count):
        width, height = chance.choice(_SIZES)
        found = []
        for label in chance.choices(LABELS, _WEIGHTS, k=1 + more[number]):
            wide, high = chance.randrange(8, width // 3), chance.randrange(8, height // 3)
            left, top = chance.randrange(width - wide), chance.randrange(height - high)
            found.append(VocBox(label, left, top, left + wide, top + high))
        yield VocImage(f"{number:06}", width, height, tuple(found))


def write_voc(folder: Path, images: Iterable[VocImage], *, plain: bool = False) -> None:
    """`JPEGImages/*.jpg`, `Annotations/*.xml` and `ImageSets/Main/{train,val}.txt` (every fifth image) under
    `folder`. JPEG files of 25 to 70 KB; with `plain` of one colour and 1 to 4 KB."""
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    drawn = _plain() if plain else _drawn()
    with (
        open(folder / "ImageSets/Main/train.txt", "w", encoding="utf-8") as train,
        open(folder / "ImageSets/Main/val.txt", "w", encoding="utf-8") as val,
    ):
        for number, image in enumerate(images):
            variants = drawn[image.width, image.height]
            jpeg = _with_comment(variants[number % len(variants)], image.name.encode())
            (folder / "JPEGImages" / f"{image.name}.jpg").write_bytes(jpeg)
            (folder / "Annotations" / f"{image.name}.xml").write_text(_xml(image), encoding="utf-8")
            (val if number % 5 == 4 else train).write(f"{image.name}\n")


def _drawn() -> dict[tuple[int, int], list[bytes]]:
    drawn = {}
    with tempfile.TemporaryDirectory() as folder:
        for width, height in _SIZES:
            path = Path(folder, f"{width}x{height}")
            draw_faces(path, count=_DRAWN_OF_A_SIZE, seed=width, width=width, height=height)
            drawn[width, height] = [_grainy(file) for file in sorted(path.glob("JPEGImages/*.jpg"))]
    return drawn


def _grainy(path: Path) -> bytes:
    """A drawing has large even areas; with grain it has the size of a photograph's file."""
    with Image.open(path) as image:
        grain = Image.frombytes("L", image.size, random.Random(0).randbytes(image.width * image.height))
        return _jpeg(Image.blend(image, grain.convert("RGB"), _GRAIN), quality=80)


def _plain() -> dict[tuple[int, int], list[bytes]]:
    return {size: [_jpeg(Image.new("RGB", size, (90, 120, 150)), quality=30)] for size in _SIZES}


def _jpeg(image: Image.Image, *, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, optimize=True)
    return file.getvalue()


def _with_comment(jpeg: bytes, text: bytes) -> bytes:
    """A COM segment behind the APP0 segment that follows SOI (ITU T.81, B.1.1.3 and B.2.4.5)."""
    end = 4 + int.from_bytes(jpeg[4:6], "big")
    return jpeg[:end] + b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text + jpeg[end:]


def _xml(image: VocImage) -> str:
    objects = "".join(
        f"""\t<object>
\t\t<name>{box.label}</name>
\t\t<pose>Unspecified</pose>
\t\t<truncated>0</truncated>
\t\t<difficult>0</difficult>
\t\t<bndbox>
\t\t\t<xmin>{box.xmin}</xmin>
\t\t\t<ymin>{box.ymin}</ymin>
\t\t\t<xmax>{box.xmax}</xmax>
\t\t\t<ymax>{box.ymax}</ymax>
\t\t</bndbox>
\t</object>
"""
        for box in image.boxes
    )
    return f"""<annotation>
\t<folder>JPEGImages</folder>
\t<filename>{image.name}.jpg</filename>
\t<path>/home/annotator/faces/JPEGImages/{image.name}.jpg</path>
\t<source>
\t\t<database>Unknown</database>
\t</source>
\t<size>
\t\t<width>{image.width}</width>
\t\t<height>{image.height}</height>
\t\t<depth>3</depth>
\t</size>
\t<segmented>0</segmented>
{objects}</annotation>
"""
