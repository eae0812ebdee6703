"""`dsctl preview`: a picture of some images with their boxes and labels, or of those that changed.

With `--json` it prints `{"ref", "against", "out", "width", "height", "images", "shown": [{"path", "note"}]}`; `images`
are those there are to choose from. Exit code 0 also where images cannot be decoded: the picture says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from heapq import nsmallest
from pathlib import Path
from typing import Any, NamedTuple

import click

from datacache import api
from datacache.core.errors import DatacacheError, UsageError
from dataset_cli.app import FILE, App, SnapshotRef, command, query_options, reading_options
from dataset_cli.output import write_file


class _Choice(NamedTuple):
    """An image to show."""

    path: str
    note: str = ""


@command()
@click.argument("ref", type=SnapshotRef())
@click.option("--out", required=True, type=FILE, help="The picture: a .png file.")
@click.option("--n", "most", type=click.IntRange(1, 400), default=16, show_default=True, help="So many images.")
@query_options
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed chooses other images.")
@click.option("--against", type=SnapshotRef(), help="Images that are not the same there; its boxes are thin and grey.")
@click.option("--columns", type=click.IntRange(1, 40), help="Images in a row (default: as many as rows).")
@reading_options
def preview(
    app: App,
    /,
    *,
    ref: str,
    out: Path,
    most: int,
    seed: int,
    against: str | None,
    columns: int | None,
    **options: Any,
) -> None:
    """Draw images with their boxes and labels, a colour for each class.

    Images are chosen at random; the same seed chooses the same, as far as they are still there.

    \b
    dsctl preview mask@v3 --out mask.png
    dsctl preview mask@v3 --out bare.png --label no_mask --where 'min_side < 32' --n 25
    dsctl preview mask@v3 --out changed.png --against mask@v2
    """
    if out.suffix.lower() != ".png":
        raise UsageError(f"--out: {out} is not named as a picture", hint="Name it .png.")
    query = api.make_query(**api.take(options, api.QueryOptions))
    with ExitStack() as stack:
        snapshot, table = stack.enter_context(app.annotations(ref, **options))
        name, old = snapshot.record.ref, None
        choices: Iterator[_Choice]
        if against is None:
            choices = map(_Choice, _paths(table, query))
        else:
            old = stack.enter_context(app.annotations(against, **options))
            choices = _changed(snapshot, table, *old, query)
        images, chosen = _choose(choices, most, seed)
        if not chosen:
            what = "has changed" if old else "fits"
            raise UsageError(f"no image of {name} {what}: there is nothing to draw", hint="Ask for less.")
        pictures = [_picture(choice, snapshot, table, old) for choice in chosen]
        everything = f"{len(chosen):,} of {images:,} images" + (f" that differ from {old[0].record.ref}" if old else "")
        known = {**table.labels, **(old[1].labels if old else {})}
        data = api.draw_pictures(
            pictures,
            title=name,
            subtitle=everything,
            colours=api.colours_of(known),
            columns=columns,
            skeletons=table.skeletons,
        )
    write_file(out, data, "--out")
    width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))  # of a PNG's first chunk
    app.out.result(
        {
            "ref": name,
            "against": old[0].record.ref if old else None,
            "out": str(out),
            "width": width,
            "height": height,
            "images": images,
            "shown": [choice._asdict() for choice in chosen],
        },
        f"{out}  {width}x{height}, {everything}",
    )


def _paths(table: api.Table, query: api.Query) -> Iterator[str]:
    """Yield the images that are asked for. If nothing special is, those that cannot be used are among them."""
    if query.as_json():
        return api.find_paths(table, query)
    return (path for _, summary in table.summaries() for path in summary.paths())


def _changed(
    snapshot: api.Snapshot, table: api.Table, before: api.Snapshot, old: api.Table, query: api.Query
) -> Iterator[_Choice]:
    """Yield the images whose bytes or annotations are not the same in both; a query asks for how they are now."""
    contents = {
        change.path.decode("utf-8", "surrogateescape")
        for change in api.diff_manifests(before.manifest, snapshot.manifest)
        if change.kind == "changed"
    }
    wanted = set(_paths(table, query)) if query.as_json() else None
    for change in api.compare_annotations(old, table):
        if change.before is None or change.after is None:
            note = "added" if change.before is None else "removed"
        else:
            note = "image and boxes changed" if change.path in contents else "boxes changed"
        contents.discard(change.path)
        if wanted is None or change.path in wanted:
            yield _Choice(change.path, note)
    for path in sorted(contents):
        if (path in wanted) if wanted is not None else (table.row(path) is not None):
            yield _Choice(path, "image changed")


def _choose(choices: Iterator[_Choice], most: int, seed: int) -> tuple[int, list[_Choice]]:
    """Return how many there are, and some of them in the order of their paths. Each image has a number that only its
    path and the seed make, and the lowest are taken: images that are added push out few of those that were chosen."""
    from xxhash import xxh3_64_intdigest

    total = 0

    def numbered() -> Iterator[tuple[int, _Choice]]:
        nonlocal total
        for choice in choices:
            total += 1
            yield xxh3_64_intdigest(choice.path.encode("utf-8", "surrogateescape"), seed=seed & (2**64 - 1)), choice

    chosen = [choice for _, choice in nsmallest(most, numbered())]
    return total, sorted(chosen)


def _picture(
    choice: _Choice, snapshot: api.Snapshot, table: api.Table, old: tuple[api.Snapshot, api.Table] | None
) -> api.Picture:
    row = table.row(choice.path)
    before = old[1].row(choice.path) if old is not None else None
    holder = snapshot if row is not None or old is None else old[0]
    notes, data = [choice.note] if choice.note else [], None
    try:
        data = holder.read(choice.path)
    except DatacacheError as exc:
        notes = [exc.message]
    if row is not None and row.annotation is None:
        notes += [problem.code for problem in row.problems]
    now, then = (found.annotation if found is not None else None for found in (row, before))
    return api.Picture(choice.path, data, now, then, ", ".join(notes))
