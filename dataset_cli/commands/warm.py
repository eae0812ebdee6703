"""`dsctl warm`: bring all of a snapshot to this node.

With `--json` it prints the job as the daemon describes it. Exit code 1 unless every byte is here in the end:
a warm-up of a part is not called done.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from datacache.core.counters import count
from dataset_cli.app import App, SnapshotRef, json_option, pass_app
from dataset_cli.commands.cache import warn_of_silent_stores
from dataset_cli.output import format_bytes, format_seconds

if TYPE_CHECKING:
    from dataset_cli.output import Progress


@click.command()
@click.argument("ref", type=SnapshotRef())
@click.option("--wait/--no-wait", default=True, help="Whether to wait until it is here (default: wait).")
@json_option
@pass_app
def warm(app: App, ref: str, wait: bool) -> None:
    """Fetch all of a snapshot that is not on this node yet."""
    from datacache import api
    from datacache.core.errors import CacheError

    if not wait:
        job = api.warm(ref, wait=False, settings=app.settings)
        app.out.result(job, f"warming {job['ref']} in the background; see: dsctl jobs")
        return
    started = time.monotonic()
    with app.out.progress(f"warming {ref}") as bar:
        job = _follow(app, ref, bar)
    took_s = time.monotonic() - started
    if job["state"] != "done":
        if app.out.json:
            app.out.result(job)
        done = f"{format_bytes(job['bytes_done'])} of {format_bytes(job['bytes_total'])} are here"
        more = f", and {count(job['errors'] - 1, 'more error')}" if job["errors"] > 1 else ""
        raise CacheError(f"{job['ref']} is not warm: {job['error']}{more} ({done})", hint=job.get("hint", ""))
    all_bytes, fetched = format_bytes(job["bytes_total"]), format_bytes(job["bytes_fetched"])
    app.out.result(
        job, f"{job['ref']} is warm: {all_bytes}, of which {fetched} were fetched in {format_seconds(took_s)}"
    )


def _follow(app: App, ref: str, bar: Progress) -> dict[str, Any]:
    """Show the warm-up until it has ended, and return its job."""
    from datacache import api

    def still(seconds: float, silent_stores: list[dict[str, Any]]) -> None:
        if not warn_of_silent_stores(app.out, silent_stores):
            app.out.warning(f"nothing has come for {seconds:.0f} s; it is waited for")

    job: dict[str, Any] = {}
    try:
        for job in api.follow_warm_up(
            ref,
            settings=app.settings,
            on_still=still,
            on_silence=lambda exc: app.out.warning(f"{exc.message}; the warm-up is waited for. {exc.hint}"),
        ):
            done, total = job["bytes_done"], job["bytes_total"]
            bar.update(f"{job['ref']}  {format_bytes(done)} of {format_bytes(total)}", done, total)
    except KeyboardInterrupt:
        if job:
            app.out.warning(f"the warm-up goes on in the daemon; to end it: dsctl jobs cancel {job['id']}")
        raise
    return job
