"""`dsctl evaluate`: measure predictions by labels of the same images.

With `--json` it prints `{"predicted", "against", "kind": "objects" or "labels", "images", "left_out": [{"reason",
"images", "first"}], "objects", "predictions", "iou", "score", "score_is_best", "precision", "recall", "f1", "classes":
[{"label", "objects", "predictions", "precision", "recall", "f1", "ap", "ap_50", "ap_75", "ar", "best"}], "confusion":
[{"label", "predicted", "times"}], "worst": [{"path", "wrong", "hits", "misses", "false_alarms", "other_class"}],
"wrong_images", "coco": {"map", "map_50", "map_75", "map_small", "map_medium", "map_large", "mar_1", "mar_10",
"mar_100", "mar_small", "mar_medium", "mar_large"}, "best": {"score", "precision", "recall", "f1"}, "accuracy",
"top_5", "warnings", "snapshot"}`. `null` is what cannot be said, '' in a confusion is nothing, and `snapshot` is the
one of `--as`, as `snapshot show` has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from datacache import api
from datacache.core.counters import count
from datacache.core.errors import UsageError
from dataset_cli.app import (
    FILE,
    App,
    DatasetName,
    SnapshotRef,
    command,
    expect_no_naming,
    naming_options,
    plot_format,
    reading_options,
)
from dataset_cli.commands.convert import expect_writable, report_option, write_report
from dataset_cli.commands.snapshot import described, summary
from dataset_cli.output import printable, write_file

_CLASSES, _CONFUSIONS = 50, 10


@command()
@click.argument("predicted", type=SnapshotRef())
@click.option("--against", required=True, type=SnapshotRef(), help="The snapshot with the labels of these images.")
@click.option("--score", type=click.FloatRange(0), metavar="S", help="Predictions count from S on (default: best F1).")
@click.option(
    "--iou",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.5,
    show_default=True,
    help="The least overlap of a prediction and its object.",
)
@click.option(
    "--worst",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    metavar="N",
    help="List the N worst images; with --as, these.",
)
@click.option("--as", "name", type=DatasetName(), help="Make a snapshot of the worst images and their labels.")
@click.option(
    "--keep-unannotated", is_flag=True, help="Nothing is on images without annotation: do not leave them out."
)
@click.option("--plot", "picture", type=FILE, help="Draw curves and confusions: a .png, .svg or .pdf file.")
@naming_options("--as")
@report_option
@reading_options
def evaluate(
    app: App,
    /,
    *,
    predicted: str,
    against: str,
    score: float | None,
    iou: float,
    worst: int,
    name: str | None,
    keep_unannotated: bool,
    picture: Path | None,
    report: Path | None,
    **options: Any,
) -> None:
    """Measure predictions by labels of the same images.

    Average precision and recall are COCO's, as pycocotools computes them. Precision, recall, confusions and the worst
    images are of predictions from --score on; without it, from the score on that has the largest F1.

    \b
    dsctl evaluate mask-predicted --against mask@v3
    dsctl evaluate mask-predicted --against mask@v3 --plot curves.png
    dsctl evaluate mask-predicted --against mask@v3 --worst 200 --as mask-worst
    """
    naming = api.take(options, api.NamingOptions)
    if name is None:
        expect_no_naming(app, naming)
    if name is not None and not worst:
        raise UsageError("--as makes a snapshot of the worst images, and --worst 0 asks for none")
    format = plot_format(picture)
    expect_writable(report)
    with app.out.progress(f"evaluating {predicted}") as bar:
        found = api.evaluate(
            predicted,
            against,
            iou=iou,
            score=score,
            worst=worst,
            keep_unannotated=keep_unannotated,
            settings=app.settings,
            progress=lambda what, done, total: bar.update(f"{what} {done:,} images", done, total),
            **options,
        )
    if picture is not None:
        write_file(picture, api.plot_evaluation(found, format=format), "--plot")
    for warning in found.warnings:
        app.out.warning(warning)
    made = None
    if name is not None:
        made = described(app, api.keep_worst(found, name=name, settings=app.settings, **naming, **options))
    shown = found.as_json() | {"snapshot": made}
    write_report(report, shown)
    app.out.result(shown)
    _print(app, found)
    if picture is not None:
        app.out.line(f"\n{printable(str(picture))} shows it")
    if made is not None:
        app.out.line(f"\n{summary(made)}")


def _print(app: App, found: api.Evaluation) -> None:
    out = app.out
    out.line(f"{found.predicted} against {found.against}  {count(found.images, 'image')}")
    if found.kind == "labels":
        _print_numbers(app, {"accuracy": found.accuracy, "top 5": found.top_5})
    else:
        coco = {"mAP@50:95": "map", "mAP@50": "map_50", "mAP@75": "map_75", "AR@100": "mar_100"}
        _print_numbers(app, {name: found.coco.get(key) for name, key in coco.items()})
        sizes = {f"mAP {size}": found.coco.get(f"map_{size}") for size in ("small", "medium", "large")}
        _print_numbers(app, sizes)
    _print_numbers(app, {"precision": found.precision, "recall": found.recall, "F1": found.f1})
    if found.kind == "objects":
        why = ", which has the largest F1" if found.score_is_best else ""
        out.line(f"  of predictions from score {found.score:.4g} on{why}, and overlap {found.iou:g}")
    _print_classes(app, found)
    wrong = [each for each in found.confusion if each.label != each.predicted]
    if wrong:
        out.line()
        rows = [
            [each.label or "(nothing)", each.predicted or "(nothing)", f"{each.times:,}"]
            for each in wrong[:_CONFUSIONS]
        ]
        out.table(["LABELLED", "PREDICTED", "TIMES"], rows, right=(2,))
    if found.worst:
        out.line()
        rows = [
            [each.path, *(f"{number:,}" for number in (each.misses, each.false_alarms, each.other_class, each.hits))]
            for each in found.worst
        ]
        out.table(["WORST IMAGES", "MISSED", "FALSE ALARMS", "OTHER CLASS", "HITS"], rows, right=(1, 2, 3, 4))
        if found.wrong_images > len(found.worst):
            out.line(f"… of {found.wrong_images:,} on which something is wrong; --worst N lists more")


def _print_numbers(app: App, numbers: dict[str, float | None]) -> None:
    texts = [f"{name} {value:.4f}" for name, value in numbers.items() if value is not None]
    if texts:
        app.out.line(f"  {'   '.join(texts)}")


def _print_classes(app: App, found: api.Evaluation) -> None:
    app.out.line()
    what = "OBJECTS" if found.kind == "objects" else "IMAGES"
    headers = ["CLASS", what, "PREDICTED", "PRECISION", "RECALL", "F1"]
    rows = [
        [each.label, f"{each.objects:,}", f"{each.predictions:,}", *map(_shown, (each.precision, each.recall, each.f1))]
        for each in found.classes[:_CLASSES]
    ]
    if found.coco:
        headers += ["AP@50:95", "AP@50", "BEST SCORE"]
        for row, each in zip(rows, found.classes, strict=False):
            row += [_shown(each.ap), _shown(each.ap_50), _shown(each.best and each.best.score)]
    app.out.table(headers, rows, right=range(1, len(headers)))
    if len(found.classes) > _CLASSES:
        app.out.line(f"… and {len(found.classes) - _CLASSES:,} more; --json lists all")


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
