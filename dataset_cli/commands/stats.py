"""`dsctl stats`: what a data set looks like, as text and as a picture; its problems, listed and mended.

With `--json` it prints `{"ref", "images", "with_objects", "empty", "unannotated", "unusable", "boxes", "difficult",
"truncated", "occluded", "shapes": {"polygons", "masks", "rotated", "vertices", "keypoints"}, "kinds": [{"kind",
"points", "objects"}], "classes": [{"label", "images", "boxes", "share", "difficult"}], "boxes_per_image": [{"boxes",
"images"}], "image_sizes": [{"width", "height", "images"}], "box_sizes", "coco_sizes", "box_areas": {"edges", "boxes"},
"box_aspects": {"edges", "boxes"}, "problems": [{"code", "action", "times"}]}`. With `--problems`: `{"ref",
"problems": [{"code", "action", "file", "line", "message"}]}`; with `--fix` what `dsctl convert` prints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
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
    naming_options,
    plot_format,
    reading_options,
    workers_options,
)
from dataset_cli.commands.convert import place, report_option, run_conversion
from dataset_cli.output import Progress, printable, write_file

_BAR, _CLASSES, _SIZES, _COUNTS = 24, 50, 8, 12
_SHAPES = {
    "polygons": ("polygon", "polygons"),
    "masks": ("mask", "masks"),
    "rotated": ("rotated box", "rotated boxes"),
    "vertices": ("point of polygons and rotated boxes", "points of polygons and rotated boxes"),
    "keypoints": ("keypoint", "keypoints"),
}


@command()
@click.argument("ref", type=SnapshotRef())
@click.option("--plot", "picture", type=FILE, help="Draw it: a .png, .svg or .pdf file.")
@click.option("--problems", is_flag=True, help="List all problems, each with its place; looks closer than reading.")
@click.option("--predictions", type=SnapshotRef(), help="With --problems: objects that these predictions doubt, too.")
@click.option("--fix", is_flag=True, help="Mend what can be mended, as a snapshot of its own.")
@click.option("--as", "name", type=DatasetName(), help="With --fix: its name.")
@naming_options("--fix")
@report_option
@reading_options
@workers_options
def stats(
    app: App,
    /,
    *,
    ref: str,
    picture: Path | None,
    problems: bool,
    predictions: str | None,
    fix: bool,
    name: str | None,
    report: Path | None,
    **how: Any,
) -> None:
    """Show a data set's classes, sizes and problems.

    Classes, boxes per image, sizes of images and boxes, and what is wrong in the annotations.

    --problems lists it with file and line, and looks for outlines that cross themselves, objects that are there twice,
    a class in two spellings, and images that several splits have. --fix makes a snapshot without them.

    \b
    dsctl stats mask@v3
    dsctl stats mask@v3 --plot mask.png
    dsctl stats mask@v3 --problems
    dsctl stats mask@v3 --fix --as mask-mended
    """
    naming = api.take(how, api.NamingOptions)
    if fix != (name is not None) or ((any(naming.values()) or app.output_ref) and not fix):
        raise UsageError("--fix makes a snapshot that is named with --as", hint="Give both, or neither.")
    if predictions is not None and (fix or not problems):
        raise UsageError("--predictions is for --problems", hint="What predictions doubt is listed, and not mended.")
    if name is not None:
        make = partial(api.fix_problems, ref, name=name, settings=app.settings, **naming, **how)
        run_conversion(app, f"mending {ref}", make, report)
        return
    if report is not None:
        raise UsageError("--report is of what --fix does", hint="--problems --json lists all problems.")
    if problems:
        with api.open_snapshot(ref, app.settings) as snapshot:
            ref = snapshot.record.ref
        with app.out.progress(f"looking at {ref}") as bar:
            found = api.problems(ref, predictions=predictions, settings=app.settings, progress=_shown_on(bar), **how)
        app.out.result({"ref": ref, "problems": [problem._asdict() for problem in found]})
        app.out.lines(f"{place(problem)}  {problem.code}  {printable(problem.message)}" for problem in found)
        if not found:
            app.out.line("no problems")
        return
    format = plot_format(picture)
    ref, collected = collect(app, ref, **how)
    if picture is not None:
        write_file(picture, api.plot_statistics(collected, ref, format=format), "--plot")
    app.out.result({"ref": ref, **collected.as_json()})
    print_statistics(app, collected, ref)
    if picture is not None:
        app.out.line(f"\n{printable(str(picture))} shows it")


def _shown_on(bar: Progress) -> Callable[[str, int, int], None]:
    return lambda what, done, total: bar.update(f"{what} {done:,} images", done, total)


def collect(app: App, ref: str, **how: Any) -> tuple[str, api.Statistics]:
    """Return a snapshot's reference by its id, and its statistics."""
    with app.annotations(ref, **how) as (snapshot, table):
        return snapshot.record.ref, api.collect_statistics(table)


def print_statistics(app: App, found: api.Statistics, name: str) -> None:
    """Print statistics for people; nothing with `--json`."""
    if app.out.json:
        return
    line = app.out.line
    classes = count(len(found.classes), "class", "classes")
    line(f"{name}  {count(found.images, 'image')}, {count(found.boxes, 'box', 'boxes')}, {classes}")
    for number, what in (
        (found.with_objects, "with objects"),
        (found.empty, "annotated, without objects"),
        (found.unannotated, "without annotation"),
        (found.unusable, "cannot be used"),
    ):
        if number:
            line(f"  {number:>10,}  {'image' if number == 1 else 'images'} {what}")
    for number, what in ((found.difficult, "difficult"), (found.truncated, "truncated"), (found.occluded, "occluded")):
        if number:
            line(f"  {number:>10,}  {'box' if number == 1 else 'boxes'} {what}")
    for what, number in found.shapes.items():
        if number:
            one, many = _SHAPES[what]
            line(f"  {number:>10,}  {one if number == 1 else many}")
    if found.classes:
        line()
        rows = [
            [each.label, f"{each.images:,}", f"{each.boxes:,}", f"{100 * each.share:.1f} %", f"{each.difficult:,}"]
            for each in found.classes[:_CLASSES]
        ]
        app.out.table(["CLASS", "IMAGES", "BOXES", "SHARE", "DIFFICULT"], rows, right=(1, 2, 3, 4))
        if len(found.classes) > _CLASSES:
            line(f"… and {len(found.classes) - _CLASSES:,} more; --json lists all")
    _histogram(app, "BOXES PER IMAGE", "IMAGES", _boxes_per_image(found))
    sizes = [(f"{width}x{height}", images) for (width, height), images in found.image_sizes.items()]
    if len(sizes) > _SIZES:
        rest = sizes[_SIZES - 1 :]
        sizes[_SIZES - 1 :] = [(f"{len(rest):,} other sizes", sum(images for _, images in rest))]
    _histogram(app, "IMAGE SIZE", "IMAGES", sizes)
    bounds = {"small": "small, below 1 % of the image", "medium": "medium", "large": "large, from 10 %"}
    _histogram(app, "BOX SIZE", "BOXES", [(bounds[size], boxes) for size, boxes in found.box_sizes.items()])
    if found.problems:
        line()
        problems = [[each.code, each.action, f"{each.times:,}"] for each in found.problems]
        app.out.table(["PROBLEM", "WAS", "TIMES"], problems, right=(2,))


def _boxes_per_image(found: api.Statistics) -> list[tuple[str, int]]:
    """Return a row for each number while they are few, else for equally many numbers each."""
    most = max(found.boxes_per_image, default=0)
    step = -(-(most + 1) // _COUNTS)
    rows = [0] * (most // step + 1)
    for boxes, images in found.boxes_per_image.items():
        rows[boxes // step] += images
    return [
        (f"{n * step}" if step == 1 else f"{n * step} to {(n + 1) * step - 1}", images) for n, images in enumerate(rows)
    ]


def _histogram(app: App, what: str, of: str, rows: Sequence[tuple[str, int]]) -> None:
    total = sum(number for _, number in rows)
    if not total:
        return
    block = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    top = max(number for _, number in rows)
    app.out.line()
    app.out.table(
        [what, of, "SHARE", ""],
        [
            [name, f"{number:,}", f"{100 * number / total:.1f} %", block * -(-_BAR * number // top)]
            for name, number in rows
        ],
        right=(1, 2),
    )
