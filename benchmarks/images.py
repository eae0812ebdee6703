"""Images to read and to convert: JPEG files that cost what photographs cost, and Pascal VOC data sets of known boxes.

A few dozen are drawn and used over and over, each file with a comment of its own inside, so no two files are the same.
The same arguments give the same files (with the same libjpeg-turbo).
"""

from __future__ import annotations

import io
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

from dataset_cli.demo.faces import draw_faces

if TYPE_CHECKING:
    from numpy.typing import NDArray


# --- photographs: textures whose spectrum falls with frequency as that of natural images does (about as 1/f) ---

_SLOPE = 1.2
_DRAWN = 64
"""Textures; a file's size and decoding time depend on its texture's contrast."""


class PhotographKind(NamedTuple):
    """The kind of images that are drawn; its name is about the mean size of their files."""

    name: str
    width: int
    height: int
    quality: int


KINDS = {
    "photographs": PhotographKind("107 KB", 640, 480, 81),
    "thumbnails": PhotographKind("1.6 KB", 48, 48, 75),
}


def write_photographs(folder: Path, count: int, kind: PhotographKind) -> int:
    """Write `count` files `0000000.jpg` … into `folder`; return their bytes."""
    drawn = [_draw(number, kind) for number in range(min(count, _DRAWN))]
    total = 0
    for number in range(count):
        name, jpeg = f"{number:07d}", drawn[number % _DRAWN]
        total += (folder / f"{name}.jpg").write_bytes(with_comment(jpeg, name.encode()))
    return total


def with_comment(jpeg: bytes, text: bytes) -> bytes:
    """Put a COM segment behind the APP0 segment that follows SOI (ITU T.81, B.1.1.3 and B.2.4.5)."""
    end = 4 + int.from_bytes(jpeg[4:6], "big")
    return jpeg[:end] + b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text + jpeg[end:]


def _draw(seed: int, kind: PhotographKind) -> bytes:
    chance = np.random.default_rng(seed)
    shape = kind.height, kind.width
    luma = 118 + chance.uniform(35, 65) * _texture(chance, shape)
    blue, red = 18 * _texture(chance, shape), 18 * _texture(chance, shape)
    # ITU-R BT.601, as JFIF has it.
    colours = np.stack([luma + 1.402 * red, luma - 0.344 * blue - 0.714 * red, luma + 1.772 * blue], axis=-1)
    pixels = np.ascontiguousarray(colours.clip(0, 255).astype(np.uint8))
    jpeg: bytes = simplejpeg.encode_jpeg(pixels, quality=kind.quality, colorspace="RGB", colorsubsampling="420")
    return jpeg


def _texture(chance: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Return noise of mean 0 and deviation 1 whose amplitude falls as frequency to the power `_SLOPE`."""
    height, width = shape
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = np.inf
    half = height, width // 2 + 1
    spectrum = (chance.standard_normal(half) + 1j * chance.standard_normal(half)) / frequency**_SLOPE
    texture: NDArray[np.float64] = np.fft.irfft2(spectrum, s=shape)
    return texture / texture.std()


# --- Pascal VOC: files as LabelImg writes them; boxes are random and have nothing to do with what is drawn ---

LABELS = ("glasses", "hat", "mask", "no_mask", "scarf")
_WEIGHTS = (2, 1, 6, 3, 1)
_SIZES = ((640, 480), (480, 640), (800, 600), (500, 375))


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


def voc_images(count: int, boxes: int) -> Iterator[VocImage]:
    """Yield `count` images with `boxes` boxes in all, at least one on each."""
    chance = random.Random(0)
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
    """Write `JPEGImages/*.jpg`, `Annotations/*.xml` and `ImageSets/Main/{train,val}.txt` (every fifth image) below
    `folder`. JPEG files of 25 to 70 KB; with `plain` of one colour and 1 to 4 KB."""
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    drawn = (
        {size: [_jpeg(Image.new("RGB", size, (90, 120, 150)), quality=30)] for size in _SIZES} if plain else _faces()
    )
    lists: tuple[list[str], list[str]] = ([], [])
    for number, image in enumerate(images):
        variants = drawn[image.width, image.height]
        jpeg = with_comment(variants[number % len(variants)], image.name.encode())
        (folder / "JPEGImages" / f"{image.name}.jpg").write_bytes(jpeg)
        (folder / "Annotations" / f"{image.name}.xml").write_text(_xml(image), encoding="utf-8")
        lists[number % 5 == 4].append(f"{image.name}\n")
    for name, lines in zip(("train", "val"), lists, strict=True):
        (folder / "ImageSets/Main" / f"{name}.txt").write_text("".join(lines), encoding="utf-8")


def _faces() -> dict[tuple[int, int], list[bytes]]:
    """Draw five of each size. Large even areas get grain, so that files have the size of photographs'."""
    drawn = {}
    with tempfile.TemporaryDirectory() as folder:
        for width, height in _SIZES:
            path = Path(folder, f"{width}x{height}")
            draw_faces(path, count=5, seed=width, width=width, height=height)
            drawn[width, height] = []
            for file in sorted(path.glob("JPEGImages/*.jpg")):
                with Image.open(file) as image:
                    grain = Image.frombytes("L", image.size, random.Random(0).randbytes(image.width * image.height))
                    grainy = Image.blend(image, grain.convert("RGB"), 0.08)
                drawn[width, height].append(_jpeg(grainy, quality=80))
    return drawn


def _jpeg(image: Image.Image, *, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, optimize=True)
    return file.getvalue()


def _xml(image: VocImage) -> str:
    objects = "".join(
        f"\t<object>\n\t\t<name>{box.label}</name>\n\t\t<pose>Unspecified</pose>\n\t\t<truncated>0</truncated>\n"
        f"\t\t<difficult>0</difficult>\n\t\t<bndbox>\n\t\t\t<xmin>{box.xmin}</xmin>\n\t\t\t<ymin>{box.ymin}</ymin>\n"
        f"\t\t\t<xmax>{box.xmax}</xmax>\n\t\t\t<ymax>{box.ymax}</ymax>\n\t\t</bndbox>\n\t</object>\n"
        for box in image.boxes
    )
    return (
        f"<annotation>\n\t<folder>JPEGImages</folder>\n\t<filename>{image.name}.jpg</filename>\n"
        f"\t<path>/home/annotator/faces/JPEGImages/{image.name}.jpg</path>\n"
        "\t<source>\n\t\t<database>Unknown</database>\n\t</source>\n"
        f"\t<size>\n\t\t<width>{image.width}</width>\n\t\t<height>{image.height}</height>\n\t\t<depth>3</depth>\n\t</size>\n"
        f"\t<segmented>0</segmented>\n{objects}</annotation>\n"
    )
