"""`dsctl snapshot verify`: whether every object of a snapshot is still what the snapshot says.

With `--json`: `{"ref", "id", "files", "bytes", "read", "ok", "missing", "changed", "unreadable", "problems": [{"kind",
"path", "url", "message"}]}`. Exit code 1 if there is a problem.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import click

from dataset_cli.app import App, SnapshotRef, json_option, pass_app
from dataset_cli.commands.diff import SHOWN, limit_of
from dataset_cli.output import Lines, format_bytes, printable

if TYPE_CHECKING:
    from datacache.api import ObjectProblem as Problem

KINDS = ("missing", "changed", "damaged", "unreadable")


@click.command()
@click.argument("ref", type=SnapshotRef())
@click.option("--read", is_flag=True, help="Read every byte, and compare it with the store's checksum.")
@click.option("--limit", type=click.IntRange(min=0), help=f"List so many problems (default: {SHOWN}; all with --json).")
@click.option("--all", "everything", is_flag=True, help="List all problems.")
@json_option
@pass_app
def verify(app: App, *, ref: str, read: bool, limit: int | None, everything: bool) -> int:
    """Check that every object is still what the snapshot says.

    Asks the stores, not the cache: sizes, ETags and versions, or with --read all bytes. Exit code 1 if an object is
    missing, changed, damaged or unreadable. Some stores have no checksum of some objects: it says how many there are.
    """
    from datacache import api
    from datacache.api import resolve

    most = limit_of(app, limit, everything)
    with app.catalog() as catalog:
        record = resolve(catalog, ref)
    counts: Counter[str] = Counter()
    unchecked: list[int] = []
    with Lines() as lines:
        with app.out.progress(f"verifying {record.ref}") as bar:

            def show(done: int, files: int) -> None:
                bad = f", {counts.total():,} bad" if counts else ""
                bar.update(f"verifying {record.ref}  {done:,} of {files:,}{bad}", done, files)

            exact = f"{record.dataset}@{record.id}"
            for problem in api.verify_snapshot(
                exact, read=read, settings=app.settings, progress=show, unchecked=unchecked.append
            ):
                counts[problem.kind] += 1
                if most is None or len(lines) < most:
                    lines.add(_as_json(problem) if app.out.json else f"{problem.kind}: {_described(problem)}")
        value = {"ref": record.ref, "id": record.id, "files": record.files, "bytes": record.total_bytes, "read": read}
        value |= {"ok": not counts, **{kind: counts[kind] for kind in KINDS}}
        if read:
            value["unchecked"] = sum(unchecked)
        app.out.result_with(value, "problems", lines)
        if not counts:
            how = "every byte was read" if read else "sizes and ETags were compared"
            app.out.line(f"{record.ref} is whole: {record.files:,} files, {format_bytes(record.total_bytes)}; {how}")
            _tell_unchecked(app, record.files, sum(unchecked))
            return 0
        app.out.lines(lines)
        if rest := counts.total() - len(lines):
            app.out.line(f"… and {rest:,} more: --all")
        found = ", ".join(f"{counts[kind]:,} {kind}" for kind in KINDS if counts[kind])
        app.out.line(f"{record.ref} is not whole: {found}, of {record.files:,} files")
        _tell_unchecked(app, record.files, sum(unchecked))
        if record.lineage is not None and "copied_to" in record.lineage.parameters:
            again = f"dsctl snapshot create {record.dataset} --from {printable(record.origin)} --copy --check-copies"
            app.out.line(f"Copies of what is unchanged in its place are made again by: {again}")
    return 1


def _tell_unchecked(app: App, files: int, unchecked: int) -> None:
    if unchecked:
        app.out.line(
            f"{unchecked:,} of {files:,} files could not be checked: the store has no checksum of the whole object"
        )


def _described(problem: Problem) -> str:
    path, message = problem.path.decode("utf-8", "surrogateescape"), problem.message
    return printable(f"{path}: {message}")


def _as_json(problem: Problem) -> str:
    path = problem.path.decode("utf-8", "surrogateescape")
    return json.dumps({"kind": problem.kind, "path": path, "url": problem.url, "message": problem.message})
