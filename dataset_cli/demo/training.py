"""`python -m dataset_cli.demo.training DATA --model URL`: train the demo's detector, as a container of a pipeline does.

The step `train` of `deploy/examples/argo` and `deploy/examples/kubeflow`: put your own training in its place. It reads
shards from a folder, such as a volume, or by reference, and stores the model for `dsctl predict --model
dataset_cli.demo.story:Trained`. One thread beside PyTorch's and the loader's workers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from datacache.core.errors import DatacacheError
from datacache.settings import load_settings
from datacache.torch import ShardDataset
from dataset_cli.demo import story
from dataset_cli.demo.detector import Epoch, train


def main(arguments: Sequence[str]) -> None:
    """Train and store a detector. Raises `DatacacheError`."""
    options = parse(arguments)
    settings = load_settings()
    size = options.size or story.fitting_size(options.data, settings)
    dataset = ShardDataset(options.data, target="detection", decode="rgb", size=size, settings=settings)
    print(f"{len(dataset):,} images, classes: {', '.join(dataset.classes)}", flush=True)
    network, _ = train(
        dataset,
        epochs=options.epochs,
        seconds=None,
        device=options.device,
        workers=options.workers,
        on_epoch=show,
    )
    story.put_model(options.model, network, {"classes": list(dataset.classes), "size": list(size)}, settings)
    print(f"the model is at {options.model}", flush=True)
    if options.output_url is not None:
        options.output_url.parent.mkdir(parents=True, exist_ok=True)
        options.output_url.write_text(options.model, encoding="utf-8")


def show(epoch: Epoch) -> None:
    """Print a line about an epoch."""
    print(f"epoch {epoch.number}: loss {epoch.loss:.3f}, {epoch.images / epoch.seconds:,.0f} images/s", flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; exits with 2 for wrong ones."""
    parser = argparse.ArgumentParser(prog="training", description="Train a small detector from shards.")
    add = parser.add_argument
    add("data", metavar="DATA", help="shards with boxes: a folder, a URL or NAME@REF")
    add("--model", required=True, metavar="URL", help="where the model goes")
    add("--epochs", type=int, default=10, help="(default: %(default)s)")
    add("--size", type=int, nargs=2, metavar=("H", "W"), help="images are resized to it (default: half, at most 320)")
    add("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--workers", type=int, help="processes that decode (default: measured)")
    add("--output-url", type=Path, metavar="FILE", help="write the model's URL into this file, for the next step")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DatacacheError as error:
        sys.exit(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
