"""`dsctl sample`: a smaller data set, chosen by a hash. It prints the new snapshot, as `snapshot show` does."""

from __future__ import annotations

from typing import Any

import click

from datacache import api
from dataset_cli.app import App, DatasetName, SnapshotRef, command, naming_options, reading_options
from dataset_cli.commands.snapshot import described


@command()
@click.argument("ref", type=SnapshotRef())
@click.option("--n", type=click.IntRange(1), required=True, metavar="N", help="How many images.")
@click.option("--by", type=click.Choice(["label"]), help="Each label chooses in turn, the rarest first.")
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed chooses others.")
@click.option(
    "--as", "name", required=True, type=DatasetName(), help="Name of the new dataset, or of its next version."
)
@reading_options
@naming_options()
def sample(app: App, /, *, ref: str, **options: Any) -> None:
    """Make a snapshot of some images and their annotations.

    The same images are chosen each time, and images that are added change little. No image is copied.

    \b
    dsctl sample mask@v1 --n 1000 --by label --as mask-small
    """
    with app.out.progress(f"reading annotations of {ref}") as bar:
        record = api.sample(
            ref,
            settings=app.settings,
            progress=lambda what, count, total: bar.update(f"{what} {count:,} images", count, total),
            **options,
        )
    app.out.result(described(app, record), f"{record.ref}  {record.files:,} files")
