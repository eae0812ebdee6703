"""Draws the data of the example, makes shards of it and a queue of tasks. See README.md beside this file.

python examples/elastic_training/prepare.py --out ./elastic --name run1 --epochs 8
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from datacache import DatacacheError, api, load_settings
from datacache.torch import ShardDataset

CLASSES = ("circle", "cross", "square", "triangle")
SIDE = 32
WRONG = 0.1
"""The share of labels that are wrong: the loss then has a floor, as with labels that people made."""


def main(options: argparse.Namespace) -> None:
    settings = load_settings()
    for name, count, seed in (("train", options.count, 0), ("test", options.test, 1)):
        folder = options.out / "images" / name
        if not (options.out / name / "shards.json").exists():
            draw(folder, count, seed)
            ref = api.create_snapshot(f"shapes-{name}", str(folder), replace=True, settings=settings).ref
            api.shard(ref, to=str(options.out / name), classes_from_folders=True, shuffle=True, max_size_bytes=2**20)
    dataset = ShardDataset(options.out / "train")
    queue = api.create_tasks(
        options.name, dataset, records=options.records, epochs=options.epochs, seed=options.seed, lease_s=10.0
    )
    parameters = queue.parameters
    print(f"{queue.name}: {parameters.epochs} epochs of {parameters.tasks} tasks, {parameters.samples:,} records each")


def draw(folder: Path, count: int, seed: int) -> None:
    """Draw `count` images of one shape each, in a folder for each class."""
    chance = random.Random(seed)
    for label in CLASSES:
        (folder / label).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        kind = chance.choice(CLASSES)
        label = chance.choice(CLASSES) if chance.random() < WRONG else kind
        draw_one(kind, chance).save(folder / label / f"{number:05}.png")


def draw_one(kind: str, chance: random.Random) -> Image.Image:
    colours = [tuple(chance.randrange(low, low + 100) for _ in range(3)) for low in (10, 145)]
    image = Image.new("RGB", (SIDE, SIDE), colours[0])
    pen = ImageDraw.Draw(image)
    half = chance.uniform(7, 11)
    x, y = (chance.uniform(half, SIDE - half) for _ in range(2))
    box = (x - half, y - half, x + half, y + half)
    match kind:
        case "circle":
            pen.ellipse(box, fill=colours[1])
        case "square":
            pen.rectangle(box, fill=colours[1])
        case "triangle":
            pen.polygon([(x, y - half), (x + half, y + half), (x - half, y + half)], fill=colours[1])
        case "cross":
            pen.line((x - half, y, x + half, y), fill=colours[1], width=4)
            pen.line((x, y - half, x, y + half), fill=colours[1], width=4)
    noise = Image.frombytes("RGB", image.size, chance.randbytes(SIDE * SIDE * 3))
    return Image.blend(image, noise, 0.15)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draw data, make shards of it and a queue of tasks.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("elastic"), help="where images and shards go (default: %(default)s)")
    add("--name", default="run1", help="of the queue (default: %(default)s)")
    add("--count", type=int, default=8192, help="images to draw for the training (default: %(default)s)")
    add("--test", type=int, default=4096, help="images to draw for the test (default: %(default)s)")
    add("--records", type=int, default=64, help="the most of one task (default: %(default)s)")
    add("--epochs", type=int, default=4)
    add("--seed", type=int, default=0, help="of the order of the tasks")
    return parser.parse_args(given)


if __name__ == "__main__":
    try:
        main(arguments())
    except DatacacheError as error:
        sys.exit(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
