"""`dsctl convert`: the same images with their annotations in another format, as a snapshot of its own.

With `--json`: `{"snapshot": {…as snapshot show…}, "report": {"images", "written", "boxes", "empty", "emptied",
"difficult_left_out", "classes", "splits", "problem_counts", "problems": [{"code", "action", "file", "line",
"message"}]}}`. Under `--strict` a failing conversion prints its report, too, and exits with 1.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from datacache import api
from datacache.core.counters import count
from datacache.core.errors import ConversionError, UsageError
from dataset_cli.app import (
    FILE,
    App,
    DatasetName,
    SnapshotRef,
    command,
    naming_options,
    options,
    reading_options,
    workers_options,
)
from dataset_cli.commands.snapshot import described, summary
from dataset_cli.output import printable

FORMATS = (
    "yolo",
    "yolo-segment",
    "yolo-pose",
    "yolo-obb",
    "yolo-predictions",
    "yolo-classify",
    "darknet",
    "coco",
    "cvat",
    "cvat-video",
    "folders",
    "imagefolder",
    "keras-yolo3",
    "label-studio",
    "labelme",
    "open-images",
    "voc",
)
_SHOWN = 20
image_options = options(
    click.option("--resize", metavar="WxH", help="Scale images to this width x height."),
    click.option("--letterbox", is_flag=True, help="With --resize: keep the aspect and pad with grey."),
    click.option("--crop", metavar="X,Y,W,H", help="Cut this part out; or center:WxH."),
    click.option("--tile", metavar="WxH", help="Cut images into tiles of this size."),
    click.option("--overlap", type=int, default=0, metavar="PIXELS", help="What a tile has in common with the next."),
    click.option("--drop-empty", is_flag=True, help="Leave out tiles without objects."),
    click.option("--rotate", metavar="DEG", type=float, help="Turn counter-clockwise by any angle."),
    click.option("--flip", type=click.Choice(["h", "v"]), help="Mirror left-right (h) or top-bottom (v)."),
    click.option(
        "--quality", type=click.IntRange(1, 100), default=95, show_default=True, help="Of JPEGs that are written."
    ),
    click.option(
        "--min-visible", type=float, default=0.0, metavar="SHARE", help="Drop objects with less of their area left."
    ),
)
"""See `api.options.ImageOptions`."""

split_options = options(
    click.option(
        "--split", metavar="SHARES", help="train=0.8,val=0.2: about so much, by a hash of the path; 'none': no splits."
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Another seed deals the splits anew."),
    click.option("--stratify", is_flag=True, help="With --split: the share of each class, too, in each split."),
)
report_option = click.option("--report", type=FILE, help="Write the whole report here, as JSON.")
class_options = options(
    click.option("--classes", type=FILE, help="These classes in this order: a name a line."),
    click.option(
        "--map", "rename", metavar="OLD=NEW", multiple=True, help="Call a class so; several may become one. Repeatable."
    ),
    click.option("--skip-difficult", is_flag=True, help="Leave out objects marked difficult."),
)


@command()
@click.argument("ref", type=SnapshotRef())
@click.option("--to", "to", required=True, type=click.Choice(FORMATS), help="The format of the annotations.")
@click.option(
    "--as", "name", required=True, type=DatasetName(), help="Name of the new dataset, or of its next version."
)
@split_options
@class_options
@click.option("--keep-unannotated", is_flag=True, help="Take images without annotation as background images.")
@click.option("--strict", is_flag=True, help="What would be repaired or left out is an error: make nothing.")
@reading_options
@click.option("--reencode-broken", is_flag=True, help="Store JPEGs with bytes behind their end anew, without these.")
@image_options
@click.option("--objects", metavar="URL", help="Where images that operations make go (default: DATACACHE_OBJECTS).")
@naming_options()
@report_option
@workers_options
def convert(app: App, /, *, ref: str, name: str, report: Path | None, **options: Any) -> None:
    """Make a snapshot with the same images and converted annotations.

    No image is copied, unless --resize, --crop, --tile, --rotate or --flip ask for new ones. Everything that is wrong
    in the annotations is repaired or left out, and listed.

    \b
    dsctl convert mask@v1 --to yolo --as mask-yolo --split train=0.8,val=0.2
    dsctl mount mask-yolo /mnt/mask-yolo && yolo train data=/mnt/mask-yolo/data.yaml
    """
    read_class_options(options)
    make = partial(api.convert, ref, name=name, settings=app.settings, **options)
    run_conversion(app, f"converting {ref}", make, report)


def run_conversion(app: App, what: str, make: Callable[..., api.Conversion], report: Path | None) -> None:
    """Make a snapshot, given a function of `progress`, and print what was done; all of it goes into `report`."""
    expect_writable(report)
    with app.out.progress(what) as bar:
        try:
            done = make(progress=lambda what, done, total: bar.update(f"{what} {done:,} images", done, total))
        except ConversionError as exc:
            problems = {"problems": [problem._asdict() for problem in exc.problems]}
            write_report(report, problems)
            app.out.result({"snapshot": None, "report": problems})
            show_problems(app, exc.problems, report)
            raise
    show_conversion(app, done, report)


def usable_images(app: App, ref: str, options: Mapping[str, Any]) -> tuple[int, list[api.AnnotationProblem]]:
    """Return the number of a snapshot's images that can be used, and why others cannot; `options` say how it is read,
    besides other things."""
    with app.annotations(ref, **api.take(dict(options), api.ReadingOptions)) as (_, table):
        usable = api.count_images(table, api.Query())
        others = (row for row in table.rows() if row.annotation is None) if usable < table.images else ()
        return usable, [problem for row in others for problem in row.problems]


def show_conversion(app: App, done: api.Conversion, report: Path | None = None) -> None:
    """Print the snapshot that was made and what was done, and write it to `report`."""
    shown = {"snapshot": described(app, done.record), "report": done.report.as_json()}
    write_report(report, shown)
    app.out.result(shown, summary(shown["snapshot"]))
    counts = done.report
    of = "of" if counts.written <= counts.images else "from"  # tiles
    app.out.line(f"images    {counts.written:,} {of} {counts.images:,}" + _listed(counts.splits))
    app.out.line(f"boxes     {counts.boxes:,}" + _listed(counts.classes))
    if counts.empty:
        have = "image has" if counts.empty == 1 else "images have"
        app.out.line(f"empty     {counts.empty:,} {have} an annotation without objects")
    if counts.emptied:
        left = "had objects, and what was asked for left none"
        app.out.line(f"emptied   {count(counts.emptied, 'image')} {left}")
    if counts.difficult_left_out:
        app.out.line(f"left out  {count(counts.difficult_left_out, 'difficult object')}")
    show_problems(app, counts.problems, report)


def read_class_options(given: dict[str, Any]) -> None:
    """Read what `--classes` and `--map` say, in their places."""
    given["classes"] = api.read_classes(given["classes"]) if given["classes"] else None
    given["rename"] = _renaming(given["rename"])


def _renaming(given: Sequence[str]) -> dict[str, str]:
    """Return what `--map OLD=NEW`, several times, calls classes."""
    found: dict[str, str] = {}
    for text in given:
        old, _, new = text.partition("=")
        if not old or not new.strip():
            raise UsageError(f"--map: {text!r} does not say which class becomes which", hint="Write --map cat=animal.")
        if found.setdefault(old, new) != new:
            raise UsageError(f"--map: {old!r} cannot become both {found[old]!r} and {new!r}")
    return found


def show_problems(app: App, problems: Sequence[api.AnnotationProblem], report: Path | None) -> None:
    """Print what was wrong: a line each, the first of each code; nothing where all was well."""
    if not problems:
        return
    app.out.line(f"problems  {counted_problems(Counter(problem.action for problem in problems))}")
    order, times, ranked = ("skipped", "changed", "repaired", "noted"), Counter[str](), []
    for number, problem in enumerate(problems):
        times[problem.code] += 1
        ranked.append((times[problem.code], order.index(problem.action), number, problem))
    width = max(18, *map(len, times))
    ranked.sort()  # one of each code, before a second of any
    for *_, problem in sorted(ranked[:_SHOWN], key=lambda each: each[1:3]):
        app.out.line(f"  {problem.action:8}  {problem.code:{width}}  {place(problem)}  {printable(problem.message)}")
    if len(problems) > _SHOWN:
        where = f"all are in {report}" if report is not None else "--report FILE or --json lists all"
        rest = Counter(problem.code for *_, problem in ranked[_SHOWN:])
        app.out.line(f"  … and {rest.total():,} more{_listed(rest)}; {where}")


def place(problem: api.AnnotationProblem) -> str:
    """Return file and line of a problem."""
    return printable(f"{problem.file}:{problem.line}" if problem.line else problem.file)


def counted_problems(times: Mapping[str, int]) -> str:
    """Say how often what was done about problems."""
    words = {"repaired": "repaired", "skipped": "left out", "changed": "changed", "noted": "noted"}
    counts = {word: times.get(action, 0) for action, word in words.items()}
    return ", ".join(f"{number:,} {word}" for word, number in counts.items() if number or word != "changed")


def _listed(counts: dict[str, int]) -> str:
    listed = ", ".join(f"{printable(name)} {number:,}" for name, number in sorted(counts.items())[:_SHOWN])
    return f": {listed}" + (" …" if len(counts) > _SHOWN else "") if listed else ""


def expect_writable(path: Path | None) -> None:
    """Try before any work: a report that cannot be written would be lost, and the snapshot made all the same."""
    if path is None:
        return
    there = path.exists()
    try:
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as exc:
        raise UsageError(f"--report: {path} cannot be written: {exc.strerror}") from exc


def write_report(path: Path | None, value: Mapping[str, Any]) -> None:
    """Write what was done, if it is asked for."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as exc:
        made = value.get("snapshot")
        hint = f"{made['ref']} is made all the same. See what was wrong: dsctl stats REF --problems" if made else ""
        raise UsageError(f"--report: {path} cannot be written: {exc.strerror}", hint=hint) from exc
