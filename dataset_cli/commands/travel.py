"""`dsctl snapshot push` and `pull`: copy snapshots to catalogs in buckets and from there. `dsctl lock`: lock a version.

With `--json` push and pull print the snapshot (see `dsctl snapshot`) as the other catalog has it, without tags, and
`"blobs"`, all that it needs, `"moved"`, those that were copied now, `"moved_bytes"`, and `"local"`, an array of folders
of this machine in which files of it lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from datacache import api
from datacache.core.counters import count
from datacache.settings import format_bytes
from dataset_cli.app import App, SnapshotRef, command, options

_options = options(
    click.argument("ref", type=SnapshotRef()),
    click.argument("url"),
    click.option("--tag", "tags", multiple=True, help="Tag the copy; may be given several times."),
    click.option(
        "--move-tags", is_flag=True, help="Move tags that name another snapshot in the catalog that it goes to."
    ),
    click.option(
        "--replace",
        is_flag=True,
        help="Make it the next version in the catalog that it goes to, even of something else.",
    ),
)


@command()
@_options
def push(app: App, /, *, ref: str, url: str, **how: Any) -> None:
    """Copy a snapshot to the catalog in a bucket, which the first push makes.

    Record, manifest, labels and the annotations that were read go there; images stay in their own bucket. What is there
    already is not sent again. Whoever can read the bucket reads the snapshot: DATACACHE_CATALOG=URL, or pull.

    \b
    dsctl snapshot push mask@v3 s3://faces/catalog
    DATACACHE_CATALOG=s3://faces/catalog dsctl ls mask@v3
    """
    with app.out.progress(f"pushing {ref}") as bar:
        copied = api.push_snapshot(ref, url, settings=app.settings, progress=_drawn(bar), **how)
    _print(app, "pushed", copied)
    for folder in copied.local:
        app.out.warning(
            f"files of {copied.record.ref} lie on this machine, in {folder}: elsewhere they are found only where that"
            " folder is the same"
        )


@command()
@_options
def pull(app: App, /, *, ref: str, url: str, **how: Any) -> None:
    """Copy a snapshot from the catalog in a bucket into your own.

    \b
    dsctl snapshot pull mask@v3 s3://faces/catalog
    """
    with app.out.progress(f"pulling {ref}") as bar:
        copied = api.pull_snapshot(ref, url, settings=app.settings, progress=_drawn(bar), **how)
    _print(app, "pulled", copied)


@command(has_json=False)
@click.argument("ref", type=SnapshotRef())
@click.option(
    "--catalog", metavar="URL", default="", help="A catalog in a bucket that has it, for those without yours."
)
def lock(app: App, /, *, ref: str, catalog: str) -> None:
    """Print a lock file: a data set's version for a commit of code.

    Its name is a reference from then on, in commands and in open_snapshot("data.lock"), wherever tags move.

    \b
    dsctl lock mask@v3 > data.lock
    git add data.lock
    dsctl mount data.lock /mnt/mask
    """
    print(api.lock_snapshot(ref, catalog=catalog, settings=app.settings).encode())


def _drawn(bar: Any) -> Callable[[int, int, int], None]:
    return lambda done, total, size: bar.update(f"{done:,} of {total:,} blobs, {format_bytes(size)}", done, total)


def _print(app: App, what: str, copied: api.SnapshotCopy) -> None:
    from dataset_cli.commands.snapshot import as_json

    value = as_json(copied.record, None)
    counts = {"blobs": copied.blobs, "moved": copied.moved, "moved_bytes": copied.moved_bytes}
    text = f"{what} {copied.record.ref}: {count(copied.moved, 'blob')} of {copied.blobs:,} moved"
    app.out.result(value | counts | {"local": list(copied.local)}, f"{text}, {format_bytes(copied.moved_bytes)}")
