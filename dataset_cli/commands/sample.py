"""`dsctl sample`: a smaller data set, chosen by a hash. It prints the new snapshot, as `snapshot show` does.

The report has `snapshot`, and as `problems` why images cannot be used, from which none are chosen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from datacache import api
from datacache.core.counters import count
from dataset_cli.app import App, DatasetName, SnapshotRef, command, naming_options, reading_options
from dataset_cli.commands.convert import expect_writable, report_option, show_problems, usable_images, write_report
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
@report_option
def sample(app: App, /, *, ref: str, n: int, report: Path | None, **options: Any) -> None:
    """Make a snapshot of some images and their annotations.

    The same images are chosen each time, and images that are added change little. No image is copied.

    \b
    dsctl sample mask@v1 --n 1000 --by label --as mask-small
    """
    expect_writable(report)
    ref = app.resolve(ref).ref  # the result may be its next version
    with app.out.progress(f"reading annotations of {ref}") as bar:
        record = api.sample(
            ref,
            n,
            settings=app.settings,
            progress=lambda what, done, total: bar.update(f"{what} {done:,} images", done, total),
            **options,
        )
    usable, problems = usable_images(app, ref, options)
    shown = described(app, record)
    write_report(report, {"snapshot": shown, "problems": [problem._asdict() for problem in problems]})
    app.out.result(shown, f"{record.ref}  {min(n, usable):,} of {count(usable, 'image')}")
    show_problems(app, problems, report)
