"""From a bucket of annotated images to a trained detector, and back into the bucket. See README.md beside this file.

python examples/mask_detection/train.py                          # draws its data; about a minute
python examples/mask_detection/train.py --data ./BCCD            # a folder, bucket or snapshot with VOC annotations
python examples/mask_detection/train.py --bucket s3://mask --device cuda --seconds 120
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

import torch

from datacache import DatacacheError, api, load_settings
from datacache.core.errors import UsageError
from datacache.settings import Settings
from datacache.torch import ShardDataset
from dataset_cli.demo import story
from dataset_cli.demo.detector import MULTIPLE, Epoch, Score, look, score, train

TAG = "example"
"""All snapshots made here have it. Running the example again moves it."""


def main(options: argparse.Namespace) -> None:
    settings = load_settings()
    bucket = options.bucket.rstrip("/") if options.bucket else (options.out / "bucket").absolute().as_uri()
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if options.device == "auto" and torch.cuda.is_available() else options.device.replace("auto", "cpu")

    # 1. A version of the data: VOC as it lies in the bucket, under a name. Nothing is copied.
    source = snapshot(options, bucket, settings)
    name = source.partition("@")[0]

    # 2. YOLO labels beside the same images, which are dealt to two splits.
    yolo = api.convert(
        source,
        to="yolo",
        name=f"{name}-yolo",
        split=f"train={1 - options.test:g},test={options.test:g}",
        seed=options.seed,
        tags=[TAG],
        move_tags=True,
        settings=settings,
    )
    splits = ", ".join(f"{images:,} images to {split}" for split, images in sorted(yolo.report.splits.items()))
    say("convert", f"{yolo.record.ref}: {yolo.report.boxes:,} boxes; {splits}")

    # 3. Shards of each split, in the bucket. They are a snapshot, too, so that they are read through this node's cache.
    shards = {}
    for split in ("train", "test"):
        made = story.shards_of_split(
            yolo.record.ref, split, bucket, name=f"{name}-{split}", tags=[TAG], settings=settings
        )
        if made is None:
            raise UsageError(f"no image of {yolo.record.ref} is in {split}", hint="More images, or another --seed.")
        shards[split] = made.ref
        say("shard", f"{made.ref}: {made.origin}")

    # 4. A detector, trained from the shards.
    size = options.size or story.fitting_size(shards["train"], settings)
    training = ShardDataset(shards["train"], target="detection", decode="rgb", size=size, settings=settings)
    say("train", f"{len(training):,} images of {size[1]}x{size[0]} on {device}; classes: {', '.join(training.classes)}")
    begun = time.monotonic()
    network, epochs = train(
        training,
        epochs=options.epochs,
        seconds=options.seconds,
        batch_size=options.batch_size,
        device=device,
        workers=options.workers,
        seed=options.seed,
        on_epoch=show_epoch,
    )
    seconds = time.monotonic() - begun

    # 5. How good it is on images that it was not trained on.
    test = ShardDataset(shards["test"], target="detection", decode="rgb", size=size, settings=settings)
    found, targets = look(network, test, batch_size=options.batch_size)
    scores = score(found, targets, test.classes, story.LEAST)
    show_scores(scores)

    # 6. A picture of it.
    predictions = options.out / "predictions.png"
    predictions.write_bytes(story.picture(shards["test"], size, found, options.show, settings))
    say("picture", f"{predictions}: what was found in {min(options.show, len(test))} of {len(test):,} test images")

    # 7. The model goes into the bucket, with the names of all that it was made from; what comes back finds the same.
    about = {
        "classes": list(test.classes),
        "size": list(size),
        "snapshot": source,
        "labels": yolo.record.ref,
        "shards": shards,
        "losses": [epoch.loss for epoch in epochs],
        "scores": {each.label: each._asdict() for each in scores},
    }
    url = f"{bucket}/models/{name}-{shards['train'].partition('@')[2]}.pt"
    story.put_model(url, network, about, settings)
    again, _ = story.get_model(url, settings, device)
    same = story.same(found, look(again, test, batch_size=options.batch_size)[0])
    say("model", f"{url}; read back, it finds {'the same boxes' if same else 'OTHER BOXES'}")
    say("done", f"loss {epochs[0].loss:.2f} to {epochs[-1].loss:.2f}, F1 {scores[-1].f1:.3f}, {seconds:.0f} s training")


def snapshot(options: argparse.Namespace, bucket: str, settings: Settings) -> str:
    """The VOC data as a snapshot: drawn, listed, or one that there is."""
    url = options.data
    if url is None:
        url = f"{bucket}/drawn-faces-{options.count}-{options.seed}"
        drawn = story.draw_into(url, count=options.count, seed=options.seed, settings=settings)
        say("draw", f"{url}: {options.count} images" + ("" if drawn else ", which were there already"))
        name = "drawn-faces"
    elif "://" not in url and "/" not in url and not Path(url).is_dir():
        with api.open_snapshot(url, settings) as found:
            say("snapshot", f"{found.record.ref}: {found.record.files:,} files")
            return found.record.ref
    else:
        last = url.rstrip("/").rpartition("/")[2]
        name = re.sub(r"[^a-z0-9-]+", "-", os.path.basename(os.path.abspath(last)).lower()).strip("-") or "data"
    record = api.create_snapshot(name, url, tags=[TAG], move_tags=True, settings=settings)
    say("snapshot", f"{record.ref}: {record.files:,} files of {url}")
    return record.ref


def show_epoch(epoch: Epoch) -> None:
    speed = epoch.images / epoch.seconds
    say(
        "", f"epoch {epoch.number:>3}  loss {epoch.loss:7.3f}  data_time {epoch.data_share:4.0%}  {speed:,.0f} images/s"
    )


def show_scores(scores: list[Score]) -> None:
    say("test", f"{'':16} {'boxes':>6} {'AP at 0.5':>9} {'precision':>9} {'recall':>9} {'F1':>9}")
    for each in scores:
        values = each.average_precision, each.precision, each.recall, each.f1
        say("", f"{each.label:16} {each.boxes:>6,} " + " ".join(f"{value:9.3f}" for value in values))


def say(step: str, text: str) -> None:
    print(f"{step:9} {text}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small detector from a bucket of annotated images.")
    add = parser.add_argument
    add("--data", metavar="REF_OR_URL", help="VOC data: NAME@TAG, a folder (./BCCD) or a bucket (default: drawn faces)")
    add("--bucket", metavar="URL", help="where shards and the model go, such as s3://mask (default: a folder in --out)")
    add("--out", type=Path, default=Path("mask-detection"), help="where predictions.png goes (default: %(default)s)")
    add("--seconds", type=float, help="time for training (default: 60 where --epochs is not given)")
    add("--epochs", type=int, help="a number of epochs: the same seed then gives the same model on the same CPU")
    add("--batch-size", type=int, default=16)
    add("--size", type=parse_size, metavar="HxW", help=f"images are resized to this, multiples of {MULTIPLE}")
    add("--device", default="auto", help="cpu, cuda, or auto")
    add("--workers", type=int, help="processes that decode (default: measured)")
    add("--seed", type=int, default=0)
    add("--test", type=float, default=0.2, help="the share of images for the test (default: %(default)s)")
    add("--count", type=int, default=240, help="how many images to draw (default: %(default)s)")
    add("--show", type=int, default=12, help="how many test images are in the picture (default: %(default)s)")
    options = parser.parse_args()
    if options.epochs is None and options.seconds is None:
        options.seconds = 60.0
    return options


def parse_size(text: str) -> tuple[int, int]:
    high, wide = map(int, text.lower().split("x"))
    if high < 1 or wide < 1 or high % MULTIPLE or wide % MULTIPLE:
        raise ValueError
    return high, wide


if __name__ == "__main__":
    try:
        main(arguments())
    except DatacacheError as error:
        sys.exit(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
