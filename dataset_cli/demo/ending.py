"""The end of `dsctl demo`: shards of the snapshot, a small detector trained from them, what it finds, and the model in
the bucket. `examples/mask_detection` is the same at more length, for any data.

Imports PyTorch when it is run, and does without where there is none.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datacache.core.errors import CacheError

if TYPE_CHECKING:
    from datacache.settings import Settings
    from dataset_cli.app import App

_SHOWN = 12


def train(app: App, ref: str, *, bucket: Path, picture: Path, seconds: float, settings: Settings) -> Any:
    """Train for some seconds on the split `train` of a YOLO snapshot and look at `val`. Return what was done, as JSON;
    None where it could not be, which is said."""
    name = ref.partition("@")[0]
    if find_spec("torch") is None:
        app.out.line("training  left out: it needs PyTorch (pip install 'dsctl[torch]')")
        return None
    with app.out.progress("training") as bar:
        bar.update("starting PyTorch")
        import torch

        from datacache.torch import ShardDataset
        from dataset_cli.demo import story
        from dataset_cli.demo.detector import score
        from dataset_cli.demo.training import Epoch, look
        from dataset_cli.demo.training import train as train_detector

        # Two that wait for each other are slower than one where others have the processors, too.
        torch.set_num_threads(1)
        bar.update("making shards")
        parts = {}
        for split in ("train", "val"):
            made = story.shards_of_split(ref, split, str(bucket), name=f"{name}-{split}", settings=settings)
            if made is None:
                app.out.line(f"training  left out: with so few images there is none in {split} (--count)")
                return None
            parts[split] = made.ref
        size = story.fitting_size(parts["train"], settings)
        training, test = (
            ShardDataset(ref, target="detection", decode="rgb", size=size, settings=settings) for ref in parts.values()
        )
        begun = time.monotonic()

        def show(epoch: Epoch) -> None:
            spent = time.monotonic() - begun
            bar.update(f"training, epoch {epoch.number}: loss {epoch.loss:.2f}", min(spent, seconds), seconds)

        network, epochs = train_detector(training, seconds=seconds, batch_size=8, workers=0, on_epoch=show)
        took = time.monotonic() - begun
        bar.update("looking at images it was not trained on")
        found, targets = look(network, test)
        result = score(found, targets, test.classes, story.LEAST)[-1]
        model = f"{bucket.as_uri()}/models/{name}.pt"
        story.put_model(model, network, {"classes": list(test.classes), "size": list(size), "shards": parts}, settings)
        if not story.same(found, look(story.get_model(model, settings)[0], test)[0]):
            text = "the model that was read back finds other boxes"
            raise CacheError(text, hint="This is a defect. Please report it.")
    losses = f"loss {epochs[0].loss:.2f}, then {epochs[-1].loss:.2f}"
    precision = f"average precision {result.average_precision:.2f}"
    app.out.lines(
        [
            f"training  a detector, {took:.0f} s, {len(epochs)} epochs of {len(training):,} images in shards: {losses}",
            f"test      {len(test):,} other images: F1 {result.f1:.2f}, {precision}",
            f"model     {model}; read back, it finds the same boxes",
        ]
    )
    shown = story.picture(parts["val"], size, found, _SHOWN, settings)
    return {
        "shards": parts,
        "images": len(training),
        "epochs": len(epochs),
        "seconds": took,
        "first_loss": epochs[0].loss,
        "loss": epochs[-1].loss,
        "test_images": len(test),
        "f1": result.f1,
        "average_precision": result.average_precision,
        "model": model,
        "predictions": write_picture(app, picture, shown, f"picture   {picture}: what it found, and what there is"),
    }


def write_picture(app: App, path: Path, data: bytes, text: str) -> str | None:
    """Write a picture, and say `text`. Return its path; None where it cannot be written, which is said."""
    try:
        path.write_bytes(data)
    except OSError as exc:
        app.out.warning(f"{path} cannot be written: {exc.strerror}")
        return None
    app.out.line(text)
    return str(path)
