"""`dsctl convert`: the same images with their annotations in another format, as a snapshot of its own.

With `--json`: `{"snapshot": {…as snapshot show…}, "report": {"images", "written", "boxes", "empty", "emptied",
"difficult_left_out", "classes", "splits", "problem_counts", "problems": [{"code", "action", "file", "line",
"message"}]}}`. Under `--strict` a failing conversion prints its report, too, and exits with 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dataset_cli.app import App, DatasetName, SnapshotRef, json_option, pass_app
from dataset_cli.commands.snapshot import as_json
from dataset_cli.output import format_bytes, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datacache.api import AnnotationProblem as Problem

FORMATS = ("yolo", "darknet", "coco", "keras-yolo3", "voc")
_SHOWN = 20


@click.command()
@click.argument("ref", type=SnapshotRef())
@click.option("--to", "to", required=True, type=click.Choice(FORMATS), help="The format of the annotations.")
@click.option(
    "--as", "name", required=True, type=DatasetName(), help="Name of the new dataset, or of its next version."
)
@click.option("--split", metavar="SHARES", help="train=0.8,val=0.2: by a hash of the path; 'none': no splits.")
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed deals the splits anew.")
@click.option(
    "--classes", type=click.Path(dir_okay=False, path_type=Path), help="These classes in this order: a name a line."
)
@click.option("--skip-difficult", is_flag=True, help="Leave out objects marked difficult.")
@click.option("--keep-unannotated", is_flag=True, help="Take images without annotation as background images.")
@click.option("--strict", is_flag=True, help="What would be repaired or left out is an error: make nothing.")
@click.option("--format", "format", metavar="FORMAT", help="What the annotations are in, where that cannot be told.")
@click.option(
    "--voc-origin", type=click.IntRange(0, 1), default=0, show_default=True, help="1: VOC pixels count from 1."
)
@click.option("--trust-sizes", is_flag=True, help="Take images' sizes from the annotations: no image is opened.")
@click.option("--decode", is_flag=True, help="Decode every image: finds JPEGs cut in their middle; some ms an image.")
@click.option("--reencode-broken", is_flag=True, help="Store JPEGs with bytes behind their end anew, without these.")
@click.option("--resize", metavar="WxH", help="Scale images to this width x height.")
@click.option("--letterbox", is_flag=True, help="With --resize: keep the aspect and pad with grey.")
@click.option("--crop", metavar="X,Y,W,H", help="Cut this part out; or center:WxH.")
@click.option("--rotate", metavar="DEG", type=float, help="Turn counter-clockwise by any angle.")
@click.option("--flip", type=click.Choice(["h", "v"]), help="Mirror left-right (h) or top-bottom (v).")
@click.option(
    "--quality", type=click.IntRange(1, 100), default=95, show_default=True, help="Of JPEGs that are written."
)
@click.option("--min-visible", type=float, default=0.0, metavar="SHARE", help="Drop boxes of which a crop leaves less.")
@click.option("--objects", metavar="URL", help="Where images that operations make go (default: DATACACHE_OBJECTS).")
@click.option("--tag", "tags", multiple=True, help="Tag it; may be given several times.")
@click.option("--move-tags", is_flag=True, help="Move tags that name another snapshot.")
@click.option("--replace", is_flag=True, help="Make it the next version, even of something else.")
@click.option("--message", "-m", default="", help="A line on why it was made.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write the whole report here, as JSON.")
@click.option("--processes", type=click.IntRange(1), help="How many (default: one a processor).")
@json_option
@pass_app
def convert(app: App, /, *, ref: str, name: str, report: Path | None, **options: Any) -> None:
    """Make a snapshot with the same images and converted annotations.

    No image is copied, unless --resize, --crop, --rotate or --flip ask for new ones. Everything that is wrong in the
    annotations is repaired or left out, and listed.

    \b
    dsctl convert mask@v1 --to yolo --as mask-yolo --split train=0.8,val=0.2
    dsctl mount mask-yolo /mnt/mask-yolo && yolo train data=/mnt/mask-yolo/data.yaml
    """
    from datacache import api
    from datacache.core.errors import ConversionError

    options["classes"] = api.read_classes(options["classes"]) if options["classes"] else None
    if report is not None:
        _expect_writable(report)
    with app.out.progress(f"converting {ref}") as bar:
        try:
            done = api.convert(
                ref,
                name=name,
                settings=app.settings,
                progress=lambda what, count, total: bar.update(f"{what} {count:,} images", count, total),
                **options,
            )
        except ConversionError as exc:
            problems: Sequence[Problem] = exc.problems
            if report is not None:
                _write(report, {"problems": [problem._asdict() for problem in problems]})
            if app.out.json:
                app.out.result({"snapshot": None, "report": {"problems": [problem._asdict() for problem in problems]}})
            else:
                show_problems(app, problems, report)
            raise
    with app.catalog() as catalog:
        shown = {"snapshot": as_json(done.record, catalog.dataset(name)), "report": done.report.as_json()}
    if report is not None:
        _write(report, shown)
    app.out.result(shown)
    if app.out.json:
        return
    record, counts = done.record, done.report
    tags = ", ".join(shown["snapshot"]["tags"])
    size = f"{record.files:,} files, {format_bytes(record.total_bytes)}"
    app.out.line(f"{record.ref}  {size}" + (f"  tags: {tags}" if tags else ""))
    app.out.line(f"images    {counts.written:,} of {counts.images:,}" + _listed(counts.splits))
    app.out.line(f"boxes     {counts.boxes:,}" + _listed(counts.classes))
    if counts.empty:
        app.out.line(f"empty     {counts.empty:,} images have an annotation without objects: an empty label file")
    if counts.emptied:
        app.out.line(
            f"emptied   {counts.emptied:,} images had objects, and what was asked for left none: an empty label file"
        )
    if counts.difficult_left_out:
        app.out.line(f"left out  {counts.difficult_left_out:,} difficult objects")
    show_problems(app, counts.problems, report)


def show_problems(app: App, problems: Sequence[Problem], report: Path | None) -> None:
    """What was wrong: a line each, the first of them; nothing where all was well."""
    if not problems:
        return
    actions = [sum(problem.action == action for problem in problems) for action in ("repaired", "skipped", "noted")]
    app.out.line(f"problems  {actions[0]:,} repaired, {actions[1]:,} left out, {actions[2]:,} noted")
    order = {"skipped": 0, "repaired": 1, "noted": 2}
    for problem in sorted(problems, key=lambda problem: order[problem.action])[:_SHOWN]:
        place = f"{problem.file}:{problem.line}" if problem.line else problem.file
        app.out.line(f"  {problem.action:8}  {problem.code:18}  {printable(place)}  {printable(problem.message)}")
    if len(problems) > _SHOWN:
        where = f"all are in {report}" if report is not None else "--report FILE or --json lists all"
        app.out.line(f"  … and {len(problems) - _SHOWN:,} more: {where}")


def _listed(counts: dict[str, int]) -> str:
    listed = ", ".join(f"{printable(name)} {count:,}" for name, count in sorted(counts.items())[:_SHOWN])
    return f": {listed}" + (" …" if len(counts) > _SHOWN else "") if listed else ""


def _expect_writable(path: Path) -> None:
    """Before any work: a report that cannot be written would be lost, and the snapshot made all the same."""
    from datacache.core.errors import UsageError

    there = path.exists()
    try:
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as exc:
        raise UsageError(f"--report: {path} cannot be written: {exc.strerror}") from exc


def _write(path: Path, value: Any) -> None:
    from datacache.core.errors import UsageError

    try:
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"--report: {path} cannot be written: {exc.strerror}") from exc
