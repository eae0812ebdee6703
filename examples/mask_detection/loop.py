"""Once around the loop: train, predict, look at what went worst, correct it, train again. See README.md beside this
file.

python examples/mask_detection/loop.py                           # draws its data; some minutes on a processor
python examples/mask_detection/loop.py --seeds 5 --control       # five times, and beside it: correct images by chance

The data was labelled in haste: on many images a label is wrong, a face is missing, or its box is beside it. A detector
learns from that, and predicts on the same images. Where labels and predictions differ most, somebody looks again. Here
a script plays that person: it knows what was drawn, and saves it as marks, as the page of `dsctl ui` does.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from datacache import DatacacheError, api, load_settings
from datacache.settings import Settings
from datacache.torch import SnapshotDataset
from dataset_cli.demo import story
from dataset_cli.demo.detector import MULTIPLE, train
from dataset_cli.demo.faces import BARE, MASKED

HASTY, PERSON = "somebody in haste", "somebody"
"""The authors of marks."""
OTHER = {MASKED: BARE, BARE: MASKED}


class Turn(NamedTuple):
    """How good detectors are on the test images: of the labels in haste, of those whose worst images are corrected, and
    of those where as many images chosen by chance are."""

    before: api.Evaluation
    after: api.Evaluation
    control: api.Evaluation | None


def main(options: argparse.Namespace) -> None:
    settings = load_settings()
    turns = []
    for seed in range(options.seed, options.seed + options.seeds):
        turn = once_around(seed, options, settings)
        turns.append(turn)
        say("done", f"seed {seed}: {scores(turn.before)} before, {scores(turn.after)} after")
        if turn.control:
            say("control", f"seed {seed}: {scores(turn.control)} with images chosen by chance")
    say("gain", gains("before", [(turn.before, turn.after) for turn in turns]))
    if options.control:
        say("", gains("by chance", [(turn.control, turn.after) for turn in turns if turn.control]))


def once_around(seed: int, options: argparse.Namespace, settings: Settings) -> Turn:
    """Go once around: return how good the detectors are before and after."""
    # 1. Images for the test, images as they were drawn, which only the person sees, and the same labelled in haste.
    test = snapshot("test", options.test, seed + 1_000_000, options, settings)
    truth = snapshot("truth", options.count, seed, options, settings)
    faces, wrong = hurry(truth, f"loop-faces-{seed}", seed, options, settings)

    # 2. A detector of these labels, and how good it is.
    weights = learn(faces, seed, options, settings)
    before = measure(weights, test, options, settings)

    # 3. What it finds in the images it was trained on, and where the labels say something else.
    found = predict(weights, faces, options, settings)
    compared = api.evaluate(found, faces, worst=round(options.count * options.correct), settings=settings)
    worst = [image.path for image in compared.worst]
    text = f"{len(worst)} of {compared.wrong_images} images on which labels and predictions differ"
    say("worst", f"{text}; {len(wrong.intersection(worst))} of these are labelled wrongly")

    # 4. Somebody corrects these, the worst first. On the page it is the address below.
    say("page", f"dsctl ui, and there /match/{found}?with={faces}&score={compared.score:.2g}")
    corrected = correct(faces, truth, worst, settings)

    # 5. A detector of the corrected labels: all else is as it was.
    after = measure(learn(corrected, seed, options, settings), test, options, settings)
    if not options.control:
        return Turn(before, after, None)
    by_chance = correct_by_chance(truth, test, count=len(worst), seed=seed, options=options, settings=settings)
    return Turn(before, after, by_chance)


def correct_by_chance(
    truth: str, test: str, *, count: int, seed: int, options: argparse.Namespace, settings: Settings
) -> api.Evaluation:
    """Correct so many images chosen by chance of the same labels in haste, train in the same way, and measure that."""
    faces, wrong = hurry(truth, f"loop-chance-{seed}", seed, options, settings)
    with api.open_snapshot(faces, settings) as snapshot:
        images = [path for path in snapshot.paths() if path.endswith(".jpg")]
    chosen = random.Random(f"chance {seed}").sample(images, count)
    say("chance", f"{count} of {len(images)} images; {len(wrong.intersection(chosen))} of these are labelled wrongly")
    return measure(learn(correct(faces, truth, chosen, settings), seed, options, settings), test, options, settings)


def snapshot(kind: str, count: int, seed: int, options: argparse.Namespace, settings: Settings) -> str:
    """Draw images into a folder, and make a snapshot of them."""
    url = f"{options.out.absolute().as_uri()}/{kind}-{count}-{seed}"
    story.draw_into(url, count=count, seed=seed, settings=settings)
    record = api.create_snapshot(f"loop-{kind}", url, replace=True, settings=settings)
    say("snapshot", f"{record.ref}: {count} images")
    return record.ref


def hurry(truth: str, name: str, seed: int, options: argparse.Namespace, settings: Settings) -> tuple[str, set[str]]:
    """Make a data set of the same images, and label many of them wrongly. Return it, and these."""
    chance = random.Random(seed)
    with api.open_snapshot(truth, settings) as drawn:
        api.create_snapshot(name, drawn.record.origin, replace=True, settings=settings)
        images = [path for path in drawn.paths() if path.endswith(".jpg")]
    chosen = chance.sample(images, round(len(images) * options.wrong))
    with api.open_snapshot(name, settings) as snapshot:
        for path in chosen:
            marks = snapshot.marks(path)
            for at, mark in reversed(list(enumerate(marks))):
                match chance.choice(("label", "missing", "beside")):
                    case "label":
                        marks[at] = mark._replace(label=OTHER[mark.label])
                    case "missing":
                        del marks[at]
                    case "beside":
                        half = (mark.x2 - mark.x1) / 2
                        by = half if mark.x1 < half else -half
                        marks[at] = mark._replace(x1=mark.x1 + by, x2=mark.x2 + by)
            marks.save(author=HASTY)
    ref = commit(name, HASTY, "Label in haste", settings)
    say("snapshot", f"{ref}: the same images, {len(chosen)} of them labelled wrongly")
    return ref, set(chosen)


def learn(ref: str, seed: int, options: argparse.Namespace, settings: Settings) -> str:
    """Train a detector on a snapshot, store it, and return its URL."""
    dataset = SnapshotDataset(ref, target="detection", decode="rgb", size=options.size, settings=settings)
    network, epochs = train(
        dataset,
        epochs=options.epochs,
        seconds=None,
        batch_size=8,
        device=options.device,
        workers=options.workers,
        seed=seed,
    )
    url = f"{options.out.absolute().as_uri()}/models/{ref.replace('@', '-')}.pt"
    about = {"classes": list(dataset.classes), "size": list(options.size), "snapshot": ref}
    story.put_model(url, network, about, settings)
    seconds = sum(epoch.seconds for epoch in epochs)
    say("train", f"{ref}: loss {epochs[0].loss:.2f} to {epochs[-1].loss:.2f}, {seconds:.0f} s")
    return url


def predict(weights: str, ref: str, options: argparse.Namespace, settings: Settings) -> str:
    """Return a snapshot of what a detector finds."""
    name = f"{ref.partition('@')[0]}-found"
    devices = [options.device]
    done = api.predict(ref, story.Trained, weights=weights, devices=devices, name=name, replace=True, settings=settings)
    say("predict", f"{done.record.ref}: {done.report.objects:,} objects in {done.report.images:,} images")
    return done.record.ref


def measure(weights: str, test: str, options: argparse.Namespace, settings: Settings) -> api.Evaluation:
    """Return how good a detector is on images it was not trained on."""
    measured = api.evaluate(predict(weights, test, options, settings), test, settings=settings)
    say("evaluate", scores(measured))
    return measured


def correct(ref: str, truth: str, paths: list[str], settings: Settings) -> str:
    """Mark these images as they were drawn, and commit that as the next version, as somebody does on the page."""
    with api.open_annotations(truth, settings=settings) as (_, drawn), api.open_snapshot(ref, settings) as snapshot:
        for path in paths:
            marks = snapshot.marks(path)
            marks.clear()
            row = drawn.row(path)
            assert row
            assert row.annotation
            for box in row.annotation.boxes:
                marks.add(box.label, box.x1, box.y1, box.x2, box.y2)
            marks.save(author=PERSON)
    corrected = commit(ref.partition("@")[0], PERSON, "Correct the worst images", settings)
    say("correct", f"{corrected}: {len(paths)} images marked")
    return corrected


def commit(dataset: str, author: str, message: str, settings: Settings) -> str:
    """Make what somebody has marked the next version."""
    return api.commit_marks(dataset, message=message, authors=[author], settings=settings).record.ref


def scores(measured: api.Evaluation) -> str:
    return f"mAP {measured.map or 0:.3f} (at overlap 0.5: {measured.map_50 or 0:.3f})"


def gains(what: str, pairs: Sequence[tuple[api.Evaluation, api.Evaluation]]) -> str:
    found = [(after.map or 0) - (before.map or 0) for before, after in pairs]
    better = f"{sum(gain > 0 for gain in found)} of {len(found)} better"
    return f"mAP against {what}: {min(found):+.3f} to {max(found):+.3f}, mean {fmean(found):+.3f}; {better}"


def say(step: str, text: str) -> None:
    print(f"{step:9} {text}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, predict, correct what went worst, and train again.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("mask-loop"), help="where images and models go (default: %(default)s)")
    add("--count", type=int, default=120, help="how many images to train on (default: %(default)s)")
    add("--test", type=int, default=80, help="how many images to measure with (default: %(default)s)")
    add("--wrong", type=float, default=0.4, help="the share of images labelled wrongly (default: %(default)s)")
    add("--correct", type=float, default=0.4, help="the share of images to correct, the worst (default: %(default)s)")
    add("--control", action="store_true", help="also correct as many images chosen by chance, and compare")
    add("--epochs", type=int, default=16, help="of each training (default: %(default)s)")
    add("--size", type=int, nargs=2, default=(128, 160), metavar=("H", "W"), help=f"multiples of {MULTIPLE}")
    add("--device", default="cpu", help="cpu or cuda")
    add("--workers", type=int, default=0, help="processes that decode for the training (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the data and of the networks (default: %(default)s)")
    add("--seeds", type=int, default=1, help="how many times, each with the next seed (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(arguments())
    except DatacacheError as error:
        sys.exit(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
