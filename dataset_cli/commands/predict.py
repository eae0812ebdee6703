"""`dsctl predict`: make a snapshot of what a model finds in the images of another one; or labels of predictions.

With `--json`: `{"snapshot": {…as snapshot show…}, "report": {"images", "predicted", "resumed", "objects", "classes",
"problems": [{"code", "action", "file", "line", "message"}], "seconds", "busy"}}`; with `--accept` the report is
`{"images", "labelled", "accepted", "left_out", "classes"}`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from datacache import api
from datacache.core.counters import count
from dataset_cli.app import FILE, App, DatasetName, ImageSize, SnapshotRef, command, naming_options, on_option
from dataset_cli.commands.convert import expect_writable, show_problems, write_report
from dataset_cli.commands.snapshot import described, summary
from dataset_cli.output import printable

_SHOWN = 20


@command()
@click.argument("ref", type=SnapshotRef())
@click.option("--model", metavar="MODEL", help="MODULE:CALLABLE, or a file: *.onnx, *.torchscript, *.ts, *.pt.")
@click.option("--weights", metavar="PATH|REF", help="Weights for it: a path, a URL, or NAME@REF/PATH of a snapshot.")
@click.option(
    "--as", "name", required=True, type=DatasetName(), help="Name of the new dataset, or of its next version."
)
@click.option(
    "--accept", type=click.FloatRange(0, 1), metavar="SCORE", help="Make labels of predictions with this score or more."
)
@click.option("--least-score", type=click.FloatRange(0, 1), help="Leave out objects below it (default: 0.05).")
@click.option("--classes", type=FILE, help="The model's classes, a name a line, where it does not say them.")
@click.option("--size", type=ImageSize(), metavar="WxH", help="Resize images for a model that names no size.")
@click.option("--split", metavar="NAME", help="Only the images of this split.")
@click.option("--batch", "batch_size", type=click.IntRange(1), help="Images for the model at a time (default: 16).")
@click.option("--device", "devices", multiple=True, help="cpu, cuda:0, …; several, for a process on each.")
@click.option("--processes", type=click.IntRange(1), help="Processes with the model on each device (default: 1).")
@click.option("--decoders", type=click.IntRange(0), help="Processes that decode for each of these (default: the rest).")
@click.option("--threads", type=click.IntRange(1), help="Threads of PyTorch or ONNX Runtime in each of these.")
@click.option("--objects", metavar="URL", help="Where a large file of predictions goes (default: DATACACHE_OBJECTS).")
@on_option
@naming_options()
@click.option("--report", type=FILE, help="Write the whole report here, as JSON.")
def predict(
    app: App,
    /,
    *,
    ref: str,
    name: str,
    model: str | None,
    accept: float | None,
    objects: str | None,
    report: Path | None,
    **options: Any,
) -> None:
    """Make a snapshot of what a model finds; or labels of predictions.

    The images are there by reference. Processes decode while the model works, and what is done is kept: a command that
    was killed goes on where it was. Images that cannot be decoded are listed and left out.

    \b
    dsctl predict mask@v1 --model detect:load --weights best.pt --as mask-predicted
    dsctl predict mask-predicted --accept 0.8 --as mask-labelled
    """
    expect_writable(report)
    naming = api.take(options, api.NamingOptions)
    given = {key: value for key, value in options.items() if value not in (None, ())}
    if (model is None) == (accept is None):
        raise click.UsageError("give either --model MODEL, or --accept SCORE for a snapshot of predictions")
    if accept is not None:
        if given:
            raise click.UsageError(f"--{_option(next(iter(given)))} is for --model")
        with app.out.progress(f"reading {ref}") as bar:
            accepted = api.accept_predictions(
                ref,
                name=name,
                least_score=accept,
                objects=objects,
                settings=app.settings,
                progress=lambda what, done, total: bar.update(f"{what} {done:,} images", done, total),
                **naming,
            )
        shown = {"snapshot": described(app, accepted.record), "report": accepted.as_json()}
        write_report(report, shown)
        app.out.result(shown, summary(shown["snapshot"]))
        app.out.line(f"labels    {accepted.accepted:,}{_listed(accepted.classes)}")
        app.out.line(f"images    {accepted.labelled:,} of {accepted.images:,} have labels")
        app.out.line(f"left out  {count(accepted.left_out, 'prediction')} below {accept:g}")
        return
    if "classes" in given:
        given["classes"] = api.read_classes(given["classes"])
    with app.out.progress(ref) as bar:
        done = api.predict(
            ref,
            model or "",
            name=name,
            objects=objects,
            settings=app.settings,
            progress=lambda what, done, total: bar.update(f"{what} {done:,} images", done, total),
            **given,
            **naming,
        )
    shown = {"snapshot": described(app, done.record), "report": done.report.as_json()}
    write_report(report, shown)
    app.out.result(shown, summary(shown["snapshot"]))
    counts = done.report
    before = f", {counts.resumed:,} done before" if counts.resumed else ""
    app.out.line(f"images    {counts.predicted:,} of {counts.images:,}{before}")
    app.out.line(f"found     {sum(counts.classes.values()):,}{_listed(counts.classes)}")
    if counts.seconds:
        rate = (counts.images - counts.resumed) / counts.seconds
        app.out.line(f"speed     {rate:,.1f} images a second; the model was at work {counts.busy:.0%} of the time")
    show_problems(app, counts.problems, report)


def _option(keyword: str) -> str:
    return {"batch_size": "batch", "devices": "device"}.get(keyword, keyword.replace("_", "-"))


def _listed(counts: dict[str, int]) -> str:
    listed = ", ".join(f"{printable(label)} {number:,}" for label, number in sorted(counts.items())[:_SHOWN])
    return f": {listed}" + (" …" if len(counts) > _SHOWN else "") if listed else ""
