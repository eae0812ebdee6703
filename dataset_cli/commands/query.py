"""`dsctl query`: find images by what is annotated in them, or make a snapshot of those.

With `--json` it prints `{"ref", "images", "matches", "found": [{"path", "width", "height", "objects", "labels"}]}`,
where `labels` says of each label how many boxes have it (0: a label of the whole image); with `--paths` `found` are
paths; with `--count` there is no `found`. With `--as` it prints the new snapshot, as `snapshot show` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import click

from datacache import api
from datacache.core.errors import UsageError
from dataset_cli.app import (
    App,
    DatasetName,
    SnapshotRef,
    command,
    expect_no_naming,
    naming_options,
    query_options,
    reading_options,
    workers_options,
)
from dataset_cli.commands.snapshot import described
from dataset_cli.output import printable

_ALIGNED = 1_000
"""Lines over which columns are aligned; what follows is printed as it comes."""


@command()
@click.argument("ref", type=SnapshotRef())
@query_options
@click.option("--count", "only_count", is_flag=True, help="Print how many there are.")
@click.option("--paths", "only_paths", is_flag=True, help="Print the paths alone.")
@click.option("--limit", type=click.IntRange(0), metavar="N", help="Print the first N.")
@click.option("--as", "name", type=DatasetName(), help="Make a snapshot of these images and their annotations.")
@naming_options("--as")
@reading_options
@workers_options
def query(
    app: App, /, *, ref: str, only_count: bool, only_paths: bool, limit: int | None, name: str | None, **options: Any
) -> None:
    """Find images by what is annotated in them.

    \b
    dsctl query mask@v3 --label no_mask --min-objects 2
    dsctl query mask@v3 --where 'width >= 640 and count("no_mask") > count("mask")'
    dsctl query mask@v3 --where 'min_side < 16 or like(path, "night/*")' --paths
    dsctl query mask@v3 --label no_mask --as mask-bare --tag v1

    A condition compares the fields path, folder, name, width, height, area, aspect, objects, difficult, truncated,
    occluded, annotated, polygons, masks, rotated, vertices, keypoints, min_side and max_side (of boxes, in pixels),
    min_area and max_area (of outlines, else boxes, as a part of the image), with < <= > >= == != in, and or not,
    + - * / // %, and with count("label"), has("label"), "label" in labels, attribute("colour", "red") (how many objects
    have it), boxes("side", 8, 16) (how many boxes have a shorter side from 8 to below 16 pixels; "area" is their part
    of the image, "aspect" their width / height) and like(path, "pattern").
    """
    wanted = api.make_query(**api.take(options, api.QueryOptions))
    naming = api.take(options, api.NamingOptions)
    if name is not None and (only_count or only_paths or limit is not None):
        raise UsageError("--as makes a snapshot, and prints no images", hint="Leave out --count, --paths, --limit.")
    if name is None:
        expect_no_naming(app, naming)
    with app.annotations(ref, **options) as (snapshot, table):
        images = table.images
        if name is not None:
            ref, paths = snapshot.ref, list(api.find_paths(table, wanted))  # a tag that moves now does not matter
        else:
            _print(app, snapshot.record.ref, table, wanted, only_count=only_count, only_paths=only_paths, limit=limit)
            return
    parameters = wanted.as_json()
    record = api.subset(ref, paths, name=name, parameters=parameters, settings=app.settings, **naming, **options)
    found = f"{record.ref}  {len(paths):,} of {images:,} images, {record.files:,} files"
    app.out.result(described(app, record), found)


def _print(
    app: App, ref: str, table: api.Table, wanted: api.Query, *, only_count: bool, only_paths: bool, limit: int | None
) -> None:
    def matches(shown: int) -> int:
        return shown if limit is None else api.count_images(table, wanted)

    result: dict[str, Any] = {"ref": ref, "images": table.images}
    if only_count:
        number = api.count_images(table, wanted)
        app.out.result(result | {"matches": number}, str(number))
        return
    if only_paths:
        paths = islice(api.find_paths(table, wanted), limit)
        found: list[Any] = list(paths) if app.out.json else []
        app.out.lines(map(printable, paths))
    else:
        images = islice(api.find_images(table, wanted), limit)
        found = [image._asdict() for image in images] if app.out.json else []
        shown = 0
        for shown, line in enumerate(_lines(images), 1):  # noqa: B007
            app.out.line(line)
        if not app.out.json:
            number = matches(shown)
            rest = f"; the first {shown:,} are shown" if shown < number else ""
            app.out.line(f"{number:,} of {table.images:,} images{rest}")
    if app.out.json:
        app.out.result(result | {"matches": matches(len(found)), "found": found})


def _lines(found: Iterable[api.ImageSummary]) -> Iterator[str]:
    """Yield path, size and labels, in columns."""
    cells = ((printable(each.path), f"{each.width}x{each.height}", _labels(each.labels)) for each in found)
    first = list(islice(cells, _ALIGNED))
    widths = [max((len(row[n]) for row in first), default=0) for n in range(2)]
    for path, size, labels in chain(first, cells):
        yield f"{path:{widths[0]}}  {size:>{widths[1]}}  {labels}".rstrip()


def _labels(labels: dict[str, int]) -> str:
    """Return `mask 2, street`: how many boxes have a label, or that the whole image has it."""
    return ", ".join(printable(label) + (f" {boxes:,}" if boxes else "") for label, boxes in labels.items())
