"""`dsctl dedupe`: a data set without images that repeat others.

With `--json`: `{"snapshot": {…as snapshot show…}, "left_out": [{"path", "kept", "similar"}], "problems": [{"code",
"action", "file", "line", "message"}]}`; the problems are those of images that cannot be used, and are left out as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from datacache import api
from datacache.core.counters import count
from dataset_cli.app import App, DatasetName, SnapshotRef, command, naming_options, reading_options, workers_options
from dataset_cli.commands.convert import expect_writable, report_option, show_problems, usable_images, write_report
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
@report_option
@workers_options
def dedupe(app: App, /, *, ref: str, report: Path | None, **options: Any) -> None:
    """Make a snapshot without the images that repeat others.

    Images of the same bytes repeat each other; with --similar those that look alike, too. The one with the most objects
    is kept, of several the first path. No image is copied.

    \b
    dsctl dedupe mask@v1 --as mask-once
    dsctl dedupe mask@v1 --similar 3 --as mask-once
    """
    expect_writable(report)
    ref = app.resolve(ref).ref  # the result may be its next version
    with app.out.progress(f"comparing images of {ref}") as bar:
        record, left_out = api.dedupe(
            ref,
            settings=app.settings,
            progress=lambda what, done, total: bar.update(f"{what} {done:,} images", done, total),
            **options,
        )
    usable, problems = usable_images(app, ref, options)
    shown = {
        "snapshot": described(app, record),
        "left_out": [each._asdict() for each in left_out],
        "problems": [problem._asdict() for problem in problems],
    }
    write_report(report, shown)
    app.out.result(shown, f"{record.ref}  {count(usable - len(left_out), 'image')}, {len(left_out):,} left out")
    for each in left_out:
        app.out.line(f"  {printable(each.path)}  {'looks like' if each.similar else 'repeats'} {printable(each.kept)}")
    show_problems(app, problems, report)
