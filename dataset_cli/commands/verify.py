"""`dsctl snapshot verify`: whether every object of a snapshot is still what the snapshot says.

With `--json`: `{"ref", "id", "files", "bytes", "read", "ok", "missing", "changed", "unreadable", "problems": [{"kind",
"path", "url", "message"}]}`. Exit code 1 if there is a problem.
"""

from __future__ import annotations

import json
from collections import Counter

import click

from datacache import api
from datacache.core.errors import UsageError
from datacache.settings import format_bytes
from dataset_cli.app import App, SnapshotRef, command, listing_options, most_listed, on_option
from dataset_cli.output import Lines, printable

KINDS = ("missing", "changed", "damaged", "unreadable")


@command()
@click.argument("ref", type=SnapshotRef())
@click.option("--read", is_flag=True, help="Read every byte, and compare it with the store's checksum.")
@on_option
@listing_options("problems")
def verify(app: App, *, ref: str, read: bool, on: str | None, limit: int | None, everything: bool) -> int:
    """Check that every object is still what the snapshot says.

    Asks the stores, not the cache: sizes, ETags and versions, or with --read all bytes. Exit code 1 if an object is
    missing, changed, damaged or unreadable. Some stores have no checksum of some objects: it says how many there are.
    """
    if on not in (None, "local") and not read:
        raise UsageError("--on is for --read", hint="Without --read objects are listed, which one process does.")
    most = most_listed(app, limit, everything)
    record = app.resolve(ref)
    counts: Counter[str] = Counter()
    unchecked: list[int] = []
    with Lines() as lines:
        with app.out.progress(f"verifying {record.ref}") as bar:

            def show(done: int, files: int) -> None:
                bad = f", {counts.total():,} bad" if counts else ""
                bar.update(f"verifying {record.ref}  {done:,} of {files:,}{bad}", done, files)

            exact = f"{record.dataset}@{record.id}"
            for kind, raw, url, message in api.verify_snapshot(
                exact, read=read, on=on, settings=app.settings, progress=show, unchecked=unchecked.append
            ):
                counts[kind] += 1
                path = raw.decode("utf-8", "surrogateescape")
                if most is None or len(lines) < most:
                    value = {"kind": kind, "path": path, "url": url, "message": message}
                    lines.add(json.dumps(value) if app.out.json else f"{kind}: {printable(f'{path}: {message}')}")
        result = {"ref": record.ref, "id": record.id, "files": record.files, "bytes": record.total_bytes, "read": read}
        result |= {"ok": not counts, **{kind: counts[kind] for kind in KINDS}}
        app.out.result_with(result | ({"unchecked": sum(unchecked)} if read else {}), "problems", lines)
        if counts:
            app.out.lines(lines)
            if rest := counts.total() - len(lines):
                app.out.line(f"… and {rest:,} more: --all")
            found = ", ".join(f"{counts[kind]:,} {kind}" for kind in KINDS if counts[kind])
            app.out.line(f"{record.ref} is not whole: {found}, of {record.files:,} files")
        else:
            how = "every byte was read" if read else "sizes and ETags were compared"
            found = "has all its files" if sum(unchecked) else "is whole"
            app.out.line(f"{record.ref} {found}: {record.files:,} files, {format_bytes(record.total_bytes)}; {how}")
    if number := sum(unchecked):
        why = "the store has no checksum of the whole object"
        app.out.line(f"{number:,} of {record.files:,} files could not be checked: {why}")
    if counts and record.lineage is not None and "copied_to" in record.lineage.parameters:
        again = f"dsctl snapshot create {record.dataset} --from {printable(record.origin)} --copy --check-copies"
        app.out.line(f"Copies of what is unchanged in its place are made again by: {again}")
    return 1 if counts else 0
