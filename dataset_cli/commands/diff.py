"""`dsctl snapshot diff`: what changed from one snapshot to another.

With `--json`: `{"a": REF, "b": REF, "added": {"files", "bytes"}, "removed": {"files", "bytes"}, "changed": {"files",
"bytes_before", "bytes_after"}, "unchanged": {"files"}, "changes": [{"kind", "path", "before", "after"}]}`; `before` and
`after` are `{"bytes", "mtime_ns", "etag", "version"}` or null. All changes are there unless `--limit` or `--stat` says
otherwise. Exit code 0 whether they differ or not.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from dataset_cli.app import App, SnapshotRef, json_option, pass_app
from dataset_cli.output import Lines, format_bytes, printable

if TYPE_CHECKING:
    from datacache.api import Change, Entry

SHOWN = 50


@click.command()
@click.argument("a", type=SnapshotRef())
@click.argument("b", type=SnapshotRef(), required=False)
@click.option("--stat", is_flag=True, help="Only how many files and bytes.")
@click.option("--limit", type=click.IntRange(min=0), help=f"List so many changes (default: {SHOWN}; all with --json).")
@click.option("--all", "everything", is_flag=True, help="List all changes.")
@json_option
@pass_app
def diff(app: App, *, a: str, b: str | None, stat: bool, limit: int | None, everything: bool) -> None:
    """Show what changed from snapshot A to snapshot B, or to A from its parent.

    \b
    dsctl snapshot diff mask@v1 mask@v2
    dsctl snapshot diff mask                     the latest, with the one before it
    """
    from datacache.api import compare_snapshots as compare

    most = 0 if stat else limit_of(app, limit, everything)
    files: Counter[str] = Counter()
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    with app.catalog() as catalog, Lines() as lines:
        old, new, changes = compare(catalog, a, b or "")
        for change in changes:
            files[change.kind] += 1
            before[change.kind] += change.before.size_bytes if change.before else 0
            after[change.kind] += change.after.size_bytes if change.after else 0
            if most is None or len(lines) < most:
                lines.add(_as_json(change) if app.out.json else _as_line(change))
        value = {
            "a": old.ref,
            "b": new.ref,
            "added": {"files": files["added"], "bytes": after["added"]},
            "removed": {"files": files["removed"], "bytes": before["removed"]},
            "changed": {
                "files": files["changed"],
                "bytes_before": before["changed"],
                "bytes_after": after["changed"],
            },
            "unchanged": {"files": old.files - files["removed"] - files["changed"]},
        }
        if app.out.json:
            app.out.result_with(value, "changes", None if stat else lines)
            return
        _for_people(app, value)
        if files and not stat:
            app.out.line()
            app.out.lines(lines)
            if rest := files.total() - len(lines):
                app.out.line(f"… and {rest:,} more: --all")


def limit_of(app: App, limit: int | None, everything: bool) -> int | None:
    """How many lines `--limit` and `--all` ask for; None for all of them."""
    if everything and limit is not None:
        raise click.UsageError("--all and --limit exclude each other")
    return limit if limit is not None else None if everything or app.out.json else SHOWN


def _for_people(app: App, value: dict[str, Any]) -> None:
    app.out.line(f"{value['a']} → {value['b']}")
    changed = value["changed"]
    sizes = f"{format_bytes(changed['bytes_before'])} → {format_bytes(changed['bytes_after'])}"
    rows = [[kind, _files(value[kind]["files"]), format_bytes(value[kind]["bytes"])] for kind in ("added", "removed")]
    rows += [["changed", _files(changed["files"]), sizes], ["unchanged", _files(value["unchanged"]["files"]), ""]]
    if not any(value[kind]["files"] for kind in ("added", "removed", "changed")):
        app.out.line(f"no difference: {_files(value['unchanged']['files'])} in both")
        return
    for label, files, size in rows:
        app.out.line(f"{label:<10}{files:>16}  {size}".rstrip())


def _files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def _as_line(change: Change) -> str:
    path = printable(change.path.decode("utf-8", "surrogateescape"))
    if change.before is None:
        assert change.after is not None
        return f"+ {path}  {format_bytes(change.after.size_bytes)}"
    if change.after is None:
        return f"- {path}"
    return f"~ {path}  {format_bytes(change.before.size_bytes)} → {format_bytes(change.after.size_bytes)}"


def _as_json(change: Change) -> str:
    path = change.path.decode("utf-8", "surrogateescape")
    before, after = _entry(change.before), _entry(change.after)
    return json.dumps({"kind": change.kind, "path": path, "before": before, "after": after})


def _entry(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {"bytes": entry.size_bytes, "mtime_ns": entry.mtime_ns, "etag": entry.etag, "version": entry.version}
