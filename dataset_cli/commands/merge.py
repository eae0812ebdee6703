"""`dsctl merge`: several data sets as one, with their classes brought together.

`--json` and reports are as those of `dsctl convert`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from datacache import api
from dataset_cli.app import App, DatasetName, SnapshotRef, command, naming_options, reading_options, workers_options
from dataset_cli.commands.convert import (
    FORMATS,
    class_options,
    read_class_options,
    report_option,
    run_conversion,
    split_options,
)


@command()
@click.argument("refs", metavar="REF REF...", type=SnapshotRef(), nargs=-1, required=True)
@click.option(
    "--as", "name", required=True, type=DatasetName(), help="Name of the new dataset, or of its next version."
)
@click.option("--to", "to", type=click.Choice(FORMATS), help="The format of the annotations (default: theirs).")
@split_options
@class_options
@click.option("--strict", is_flag=True, help="What would be repaired or left out is an error: make nothing.")
@reading_options
@naming_options()
@report_option
@workers_options
def merge(app: App, /, *, refs: tuple[str, ...], report: Path | None, **options: Any) -> None:
    """Make one snapshot of several, with their images and annotations.

    No image is copied. An image that several have is there once, with all its objects. Classes of one name are one
    class; those that differ in spelling alone are listed, and --map brings them together.

    \b
    dsctl merge mask@v1 street@v3 --as faces --map No_Mask=no_mask
    """
    read_class_options(options)
    make = partial(api.merge, refs, settings=app.settings, **options)
    run_conversion(app, f"merging {', '.join(refs)}", make, report)
