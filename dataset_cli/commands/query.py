"""`dsctl query`: find images by what is annotated in them, or make a snapshot of those.

With `--json` it prints `{"ref", "images", "matches", "found": [{"path", "width", "height", "objects", "labels"}]}`,
where `labels` says of each label how many boxes have it (0: a label of the whole image); with `--paths` `found` are
paths; with `--count` there is no `found`. With `--as` it prints the new snapshot, as `snapshot show` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import click

from dataset_cli.annotated import open_annotations, reading_options
from dataset_cli.app import App, DatasetName, SnapshotRef, json_option, pass_app
from dataset_cli.output import printable

if TYPE_CHECKING:
    from datacache.api import ImageSummary, Query, Table

_ALIGNED = 1_000
"""Lines over which columns are aligned; what follows is printed as it comes."""


@click.command()
@click.argument("ref", type=SnapshotRef())
@click.option("--label", "labels", multiple=True, metavar="LABEL", help="Images with this label; several: with all.")
@click.option("--any-label", is_flag=True, help="With one of the labels.")
@click.option("--min-objects", type=click.IntRange(0), metavar="N", help="At least N boxes, of each --label if given.")
@click.option("--max-objects", type=click.IntRange(0), metavar="N", help="At most N boxes, counted so.")
@click.option("--where", default="", metavar="CONDITION", help='Such as: width >= 640 and count("no_mask") > 1')
@click.option("--count", "only_count", is_flag=True, help="Print how many there are.")
@click.option("--paths", "only_paths", is_flag=True, help="Print the paths alone.")
@click.option("--limit", type=click.IntRange(0), metavar="N", help="Print the first N.")
@click.option("--as", "name", type=DatasetName(), help="Make a snapshot of these images and their annotations.")
@click.option("--tag", "tags", multiple=True, help="With --as: tag it; may be given several times.")
@click.option("--move-tags", is_flag=True, help="With --as: move tags that name another snapshot.")
@click.option("--replace", is_flag=True, help="With --as: Make it the next version, even of something else.")
@click.option("--message", "-m", default="", help="With --as: a line on why it was made.")
@reading_options
@json_option
@pass_app
def query(
    app: App,
    /,
    *,
    ref: str,
    labels: tuple[str, ...],
    any_label: bool,
    min_objects: int | None,
    max_objects: int | None,
    where: str,
    only_count: bool,
    only_paths: bool,
    limit: int | None,
    name: str | None,
    tags: tuple[str, ...],
    move_tags: bool,
    replace: bool,
    message: str,
    **how: Any,
) -> None:
    """Find images by what is annotated in them.

    \b
    dsctl query mask@v3 --label no_mask --min-objects 2
    dsctl query mask@v3 --where 'width >= 640 and count("no_mask") > count("mask")'
    dsctl query mask@v3 --where 'min_side < 16 or like(path, "night/*")' --paths
    dsctl query mask@v3 --label no_mask --as mask-bare --tag v1

    A condition compares the fields path, folder, name, width, height, area, aspect, objects, difficult, truncated,
    occluded, annotated, min_side and max_side (of boxes, in pixels), min_area and max_area (of boxes, as a part of the
    image), with < <= > >= == != in, and or not, + - * / // %, and with count("label"), has("label"),
    "label" in labels and like(path, "pattern").
    """
    from datacache import api
    from datacache.core.errors import UsageError

    wanted = api.make_query(
        labels=labels, any_label=any_label, min_objects=min_objects, max_objects=max_objects, where=where
    )
    if name is not None:
        if only_count or only_paths or limit is not None:
            raise UsageError("--as makes a snapshot, and prints no images", hint="Leave out --count, --paths, --limit.")
        _subset(app, ref, name, wanted, how, tags=tags, move_tags=move_tags, replace=replace, message=message)
        return
    if tags or move_tags or replace or message:
        raise UsageError(
            "--tag, --move-tags, --replace and --message are for a new snapshot", hint="Name it with --as."
        )
    with open_annotations(app, ref, **how) as (snapshot, table):
        result: dict[str, Any] = {"ref": snapshot.record.ref, "images": table.images}
        if only_count:
            matches = api.count_images(table, wanted)
            app.out.result(result | {"matches": matches}, str(matches))
        elif app.out.json:
            listed = list(_found(table, wanted, only_paths, limit))
            matches = len(listed) if limit is None else api.count_images(table, wanted)
            app.out.result(result | {"matches": matches, "found": listed})
        elif only_paths:
            for path in islice(api.find_paths(table, wanted), limit):
                app.out.line(printable(path))
        else:
            shown = 0
            for shown, line in enumerate(_lines(islice(api.find_images(table, wanted), limit)), 1):  # noqa: B007
                app.out.line(line)
            matches = shown if limit is None else api.count_images(table, wanted)
            rest = f"; the first {shown:,} are shown" if shown < matches else ""
            app.out.line(f"{matches:,} of {table.images:,} images{rest}")


def _found(table: Table, wanted: Query, only_paths: bool, limit: int | None) -> Iterator[Any]:
    from datacache import api

    if only_paths:
        return islice(api.find_paths(table, wanted), limit)
    return (image._asdict() for image in islice(api.find_images(table, wanted), limit))


def _lines(found: Iterable[ImageSummary]) -> Iterator[str]:
    """Path, size and labels, in columns."""
    cells = ((printable(each.path), f"{each.width}x{each.height}", _labels(each.labels)) for each in found)
    first = list(islice(cells, _ALIGNED))
    widths = [max((len(row[n]) for row in first), default=0) for n in range(2)]
    for path, size, labels in chain(first, cells):
        yield f"{path:{widths[0]}}  {size:>{widths[1]}}  {labels}".rstrip()


def _labels(labels: dict[str, int]) -> str:
    """`mask 2, street`: how many boxes have a label, or that the whole image has it."""
    return ", ".join(printable(label) + (f" {boxes:,}" if boxes else "") for label, boxes in labels.items())


def _subset(
    app: App,
    ref: str,
    name: str,
    wanted: Query,
    how: dict[str, Any],
    *,
    tags: tuple[str, ...],
    move_tags: bool,
    replace: bool,
    message: str,
) -> None:
    from datacache import api
    from dataset_cli.commands.snapshot import as_json

    with open_annotations(app, ref, **how) as (snapshot, table):
        ref = snapshot.ref  # a tag that moves meanwhile does not matter
        images, of = list(api.find_paths(table, wanted)), table.images
    record = api.subset(
        ref,
        images,
        name=name,
        parameters=wanted.as_json(),
        tags=tags,
        move_tags=move_tags,
        replace=replace,
        message=message,
        settings=app.settings,
        **how,
    )
    with app.catalog() as catalog:
        value = as_json(record, catalog.dataset(name))
    app.out.result(value, f"{record.ref}  {len(images):,} of {of:,} images, {record.files:,} files")
