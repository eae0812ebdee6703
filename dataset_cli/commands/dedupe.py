"""`dsctl dedupe`: a data set without images that repeat others.

With `--json`: `{"snapshot": {…as snapshot show…}, "left_out": [{"path", "kept", "similar"}]}`.
"""

from __future__ import annotations

from typing import Any

import click

from datacache import api
from dataset_cli.app import App, DatasetName, SnapshotRef, command, naming_options, reading_options
from dataset_cli.commands.snapshot import described
from dataset_cli.output import printable


@command()
@click.argument("ref", type=SnapshotRef())
@click.option(
    "--as", "name", required=True, type=DatasetName(), help="Name of the new dataset, or of its next version."
)
@click.option(
    "--similar", type=click.IntRange(0, 8), metavar="BITS", help="Also those that look alike: hashes differ so little."
)
@reading_options
@naming_options()
@click.option("--processes", type=click.IntRange(1), help="How many (default: one a processor).")
def dedupe(app: App, /, *, ref: str, **options: Any) -> None:
    """Make a snapshot without the images that repeat others.

    Images of the same bytes repeat each other; with --similar those that look alike, too. The one with the most objects
    is kept, of several the first path. No image is copied.

    \b
    dsctl dedupe mask@v1 --as mask-once
    dsctl dedupe mask@v1 --similar 3 --as mask-once
    """
    with app.out.progress(f"comparing images of {ref}") as bar:
        record, left_out = api.dedupe(
            ref,
            settings=app.settings,
            progress=lambda what, count, total: bar.update(f"{what} {count:,} images", count, total),
            **options,
        )
    found = f"{record.ref}  {record.files:,} files, {len(left_out):,} images left out"
    app.out.result({"snapshot": described(app, record), "left_out": [each._asdict() for each in left_out]}, found)
    for each in left_out:
        app.out.line(f"  {printable(each.path)}  {'looks like' if each.similar else 'repeats'} {printable(each.kept)}")
