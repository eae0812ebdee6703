"""`dsctl export`: a snapshot's files as a plain folder.

With `--json` it prints `{"ref", "directory", "files", "bytes", "kept", "cloned", "linked", "copied", "left_out"}`.
"""

from __future__ import annotations

from pathlib import Path

import click

from datacache import api
from datacache.settings import format_bytes
from dataset_cli.app import App, SnapshotRef, command
from dataset_cli.output import printable


@command()
@click.argument("ref", type=SnapshotRef())
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--link",
    type=click.Choice(["auto", "hard", "none"]),
    default="auto",
    show_default=True,
    help="How files of this machine get there. auto: as clones that share their blocks, where the file system can. "
    "hard: as hard links; whoever changes one in DIR changes the bucket (what datacache stored is not linked). "
    "none: as copies.",
)
def export(app: App, *, ref: str, directory: Path, link: str) -> None:
    """Write a snapshot's files into DIR, for tools that want a plain folder.

    DIR is not there yet, is empty, or holds an export of the same snapshot: what is there is kept, so that an
    export that was killed can be run again. The file .datacache-exported in it says which snapshot it is.
    """
    record = app.resolve(ref)
    with app.out.progress(f"exporting {ref}") as bar:
        done = api.export_snapshot(
            f"{record.dataset}@{record.id}",
            directory,
            link=link,
            settings=app.settings,
            progress=lambda files, size: bar.update(
                f"{files:,} of {record.files:,} files, {format_bytes(size)}", size, record.total_bytes
            ),
        )
    for path in done.left_out:
        app.out.warning(f"left out, because no folder can hold it: {path!r}")
    kinds = {"copied": done.copied, "cloned": done.cloned, "hard links": done.linked, "there already": done.kept}
    parts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items() if number)
    counts = f"{done.files:,} files, {format_bytes(done.bytes)}" + (f" ({parts})" if parts else "")
    app.out.result(done.as_json(), f"{record.ref} is in {printable(str(done.directory))}: {counts}")
