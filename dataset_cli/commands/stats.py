"""`dsctl stats`: what a data set looks like, as text and as a picture.

With `--json` it prints `{"ref", "images", "with_objects", "empty", "unannotated", "unusable", "boxes", "difficult",
"truncated", "occluded", "shapes": {"polygons", "masks", "rotated", "vertices", "keypoints"}, "classes": [{"label",
"images", "boxes", "share", "difficult"}], "boxes_per_image": [{"boxes", "images"}], "image_sizes": [{"width", "height",
"images"}], "box_sizes", "coco_sizes", "box_areas": {"edges", "boxes"}, "box_aspects": {"edges", "boxes"}, "problems":
[{"code", "action", "times"}]}`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from datacache import api
from datacache.core.errors import UsageError
from dataset_cli.app import FILE, App, SnapshotRef, command, reading_options
from dataset_cli.output import printable, write_file

_BAR, _CLASSES, _SIZES, _COUNTS = 24, 50, 8, 12
_SHAPES = {"rotated": "turned boxes", "vertices": "points of polygons and turned boxes"}


@command()
@click.argument("ref", type=SnapshotRef())
@click.option("--plot", "picture", type=FILE, help="Draw it: a .png, .svg or .pdf file.")
@reading_options
def stats(app: App, /, *, ref: str, picture: Path | None, **how: Any) -> None:
    """Show a data set's classes, sizes and problems.

    Classes, boxes per image, sizes of images and boxes, and what is wrong in the annotations.

    \b
    dsctl stats mask@v3
    dsctl stats mask@v3 --plot mask.png
    """
    format = picture.suffix.lower().removeprefix(".") if picture is not None else ""
    if picture is not None and format not in api.PLOT_FORMATS:
        raise UsageError(f"--plot: {picture} is not named as a picture", hint="Name it .png, .svg or .pdf.")
    name, found = collect(app, ref, **how)
    if picture is not None:
        write_file(picture, api.plot_statistics(found, name, format=format), "--plot")
    app.out.result({"ref": name, **found.as_json()})
    print_statistics(app, found, name)
    if picture is not None:
        app.out.line(f"\n{printable(str(picture))} shows it")


def collect(app: App, ref: str, **how: Any) -> tuple[str, api.Statistics]:
    """Return a snapshot's reference by its id, and its statistics."""
    with app.annotations(ref, **how) as (snapshot, table):
        return snapshot.record.ref, api.collect_statistics(table)


def print_statistics(app: App, found: api.Statistics, name: str) -> None:
    """Print statistics for people; nothing with `--json`."""
    if app.out.json:
        return
    line = app.out.line
    line(f"{name}  {found.images:,} images, {found.boxes:,} boxes, {len(found.classes):,} classes")
    for number, what in (
        (found.with_objects, "with objects"),
        (found.empty, "annotated, without objects"),
        (found.unannotated, "without annotation"),
        (found.unusable, "cannot be used"),
    ):
        if number:
            line(f"  {number:>10,}  images {what}")
    for number, what in ((found.difficult, "difficult"), (found.truncated, "truncated"), (found.occluded, "occluded")):
        if number:
            line(f"  {number:>10,}  boxes {what}")
    for what, number in found.shapes.items():
        if number:
            line(f"  {number:>10,}  {_SHAPES.get(what, what)}")
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
        (f"{n * step}" if step == 1 else f"{n * step} to {(n + 1) * step - 1}", count) for n, count in enumerate(rows)
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
