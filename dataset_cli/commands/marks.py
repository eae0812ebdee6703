"""`dsctl marks`: what people have marked on the images of a data set and not committed yet; the commit of it.

With `--json`: `{"ref", "drafts": [{"path", "author", "state", "objects", "saved_at"}], "authors": [{"author", "drafts",
"done"}], "queues": [{"name", "dataset", "review", "to_mark", "marking", "to_review", "reviewing", "done"}]}`. A state
is `done`, `not done`, `stale` or `image gone`. With `--commit`: `{"snapshot": {…as snapshot show…}, "images", "left":
[{"path", "author", "why"}], "problems": [{"code", "action", "file", "line", "message"}]}`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from datacache import api
from datacache.core.counters import count
from datacache.core.errors import UsageError
from dataset_cli.app import App, SnapshotRef, command, listing_options, most_listed
from dataset_cli.commands.convert import FORMATS, expect_writable, report_option, show_problems, write_report
from dataset_cli.commands.snapshot import described
from dataset_cli.output import format_time, printable


@command()
@click.argument("ref", metavar="NAME", type=SnapshotRef())
@click.option("--commit", is_flag=True, help="Make the next version of what is done.")
@click.option("--message", "-m", default="", help="With --commit: a line on why it was made.")
@click.option("--tag", "tags", multiple=True, help="With --commit: tag it; may be given several times.")
@click.option("--author", "authors", multiple=True, help="Only this person's; may be given several times.")
@click.option("--unfinished", is_flag=True, help="With --commit: also what is not done.")
@click.option("--to", type=click.Choice(FORMATS), help="With --commit: another format than the data set has.")
@click.option("--skip-predictions", is_flag=True, help="With --commit: leave out predictions that nobody has accepted.")
@report_option
@listing_options("drafts")
def marks(
    app: App,
    /,
    *,
    ref: str,
    commit: bool,
    authors: tuple[str, ...],
    limit: int | None,
    everything: bool,
    report: Path | None,
    **how: Any,
) -> None:
    """List what people have marked and not committed, or commit it.

    Marks are drafts until then (dsctl ui). A draft is stale once another version says something else of its image: it
    is not committed, and whoever marked it has to look again.

    \b
    dsctl marks mask
    dsctl marks mask --commit -m "Masks of the night shift" --tag v4
    """
    if not commit:
        if report is not None or any(how.values()):
            raise UsageError("--message, --tag, --unfinished, --to and others are for --commit", hint="Add --commit.")
        _list(app, ref, authors, most_listed(app, limit, everything))
        return
    name = api.parse_ref(ref).dataset
    if app.resolve(ref).id != app.resolve(name).id:
        raise UsageError(f"{ref} is not the newest version, and a commit follows that one", hint=f"Name {name}.")
    expect_writable(report)
    only_done = not how.pop("unfinished")
    with app.out.progress(f"committing marks of {name}") as bar:
        done = api.commit_marks(
            name,
            authors=authors or None,
            only_done=only_done,
            settings=app.settings,
            progress=lambda what, done, total: bar.update(f"{what} {done:,} images", done, total),
            **how,
        )
    shown = {
        "snapshot": described(app, done.record) if done.images else None,
        "images": done.images,
        "left": [each._asdict() for each in done.left],
        "problems": [problem._asdict() for problem in done.problems],
    }
    write_report(report, shown)
    made = f"{done.record.ref}  {count(done.images, 'image')} marked" if done.images else "nothing to commit"
    app.out.result(shown, made)
    for left in done.left[: most_listed(app, limit, everything)]:
        app.out.line(f"  left, {left.why}: {printable(left.path)} ({printable(left.author)})")
    if done.images:
        show_problems(app, done.problems, report)


def _list(app: App, ref: str, authors: tuple[str, ...], most: int | None) -> None:
    name = api.parse_ref(ref).dataset
    with app.catalog() as catalog, app.annotations(ref) as (snapshot, table):
        drafts = [each for each in api.all_drafts(catalog, name) if not authors or each.author in authors]
        drafts.sort(key=lambda each: each.path.encode("utf-8", "surrogateescape"))
        listed = [(each, _state(table.row(each.path), each)) for each in drafts]
        counts = api.count_drafts(catalog, name)
    queues = api.marking_queues(name, app.settings)
    app.out.result(
        {
            "ref": snapshot.record.ref,
            "drafts": [
                {
                    "path": each.path,
                    "author": each.author,
                    "state": state,
                    "objects": len(each.objects),
                    "saved_at": each.saved_at,
                }
                for each, state in listed
            ],
            "authors": [each._asdict() for each in counts],
            "queues": [each._asdict() for each in queues],
        }
    )
    if app.out.json:
        return
    rows = [
        [printable(each.author), state, f"{len(each.objects):,}", _time(each.saved_at), printable(each.path)]
        for each, state in listed[:most]
    ]
    if rows:
        app.out.table(["AUTHOR", "STATE", "OBJECTS", "SAVED", "IMAGE"], rows, right=(2,))
        if len(rows) < len(listed):
            app.out.line(f"… and {len(listed) - len(rows):,} more: --all")
    else:
        app.out.line(f"Nobody has marked anything in {name} that is not committed. See: dsctl ui")
    for queue in queues:
        review = f", {queue.to_review + queue.reviewing:,} to review" if queue.review else ""
        marking = f", {sum(queue.marking.values()):,} being marked" if queue.marking else ""
        app.out.line(f"queue {queue.name}: {queue.to_mark:,} to mark{marking}{review}, {queue.done:,} done")


def _state(row: api.Row | None, draft: api.Draft) -> str:
    if row is None or row.annotation is None:
        return "image gone"
    return "stale" if api.is_stale(row, draft) else "done" if draft.done else "not done"


def _time(seconds: float) -> str:
    return format_time(datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
