"""`dsctl warm`: bring all of a snapshot to this node.

With `--json` it prints the job as the daemon describes it. Exit code 1 unless every byte is here in the end:
a warm-up of a part is not called done.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from dataset_cli.app import App, SnapshotRef, json_option, pass_app
from dataset_cli.output import format_bytes, format_seconds

if TYPE_CHECKING:
    from datacache.daemon.client import DaemonClient
    from dataset_cli.output import Progress

_POLL_S = 0.05
_RESTARTS = 5


@click.command()
@click.argument("ref", type=SnapshotRef())
@click.option("--wait/--no-wait", default=True, help="Whether to wait until it is here (default: wait).")
@json_option
@pass_app
def warm(app: App, ref: str, wait: bool) -> None:
    """Fetch all of a snapshot that is not on this node yet."""
    from datacache import api
    from datacache.core.errors import CacheError

    client = api.connect(app.settings)
    if not wait:
        job = client.job(client.warm(ref))
        app.out.result(job, f"warming {job['ref']} in the background; see: dsctl cache status")
        return
    started = time.monotonic()
    with app.out.progress(f"warming {ref}") as bar:
        job = _follow(client, ref, bar)
    took_s = time.monotonic() - started
    if job["state"] != "done":
        if app.out.json:
            app.out.result(job)
        done = f"{format_bytes(job['bytes_done'])} of {format_bytes(job['bytes_total'])} are here"
        raise CacheError(f"{job['ref']} is not warm: {job['error']} ({done})", hint=job.get("hint", ""))
    all_bytes, fetched = format_bytes(job["bytes_total"]), format_bytes(job["bytes_fetched"])
    app.out.result(
        job, f"{job['ref']} is warm: {all_bytes}, of which {fetched} were fetched in {format_seconds(took_s)}"
    )


def _follow(client: DaemonClient, ref: str, bar: Progress) -> dict[str, Any]:
    """Poll the job to its end; asked for again if the daemon was restarted, which costs nothing."""
    from datacache.core.errors import SnapshotNotFoundError

    id = client.warm(ref)
    restarts = 0
    while True:
        try:
            job = client.job(id)
        except SnapshotNotFoundError:
            restarts += 1
            if restarts > _RESTARTS:
                raise
            id = client.warm(ref)
            continue
        if job["state"] != "running":
            return job
        done, total = job["bytes_done"], job["bytes_total"]
        bar.update(f"{job['ref']}  {format_bytes(done)} of {format_bytes(total)}", done, total)
        time.sleep(_POLL_S)
