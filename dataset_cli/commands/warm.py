"""`dsctl warm`: bring all of a snapshot to this node.

With `--json` it prints the job as the daemon describes it. Exit code 1 unless every byte is here in the end:
a warm-up of a part is not called done.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import click

from datacache.core.counters import count
from dataset_cli.app import App, SnapshotRef, json_option, pass_app
from dataset_cli.commands.cache import warn_of_silent_stores
from dataset_cli.output import format_bytes, format_seconds

if TYPE_CHECKING:
    from datacache.daemon.client import DaemonClient
    from dataset_cli.output import Progress

_POLL_S = 0.05
_RESTARTS = 5
_STILL_S = 5.0
"""When a store is suspected of which nothing comes."""
_SILENCE_S = 60.0
"""How long a daemon may be silent: a busy machine is no reason to give up a job that goes on."""


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
        app.out.result(job, f"warming {job['ref']} in the background; see: dsctl jobs")
        return
    started = time.monotonic()
    with app.out.progress(f"warming {ref}") as bar:
        job = _follow(app, client, ref, bar)
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


def _follow(app: App, client: DaemonClient, ref: str, bar: Progress) -> dict[str, Any]:
    """Poll the job to its end; asked for again if the daemon was restarted, which costs nothing."""
    from datacache.core.errors import DaemonSilentError, SnapshotNotFoundError

    id = client.warm(ref)
    restarts = 0
    silent_since: float | None = None
    last_bytes, came_at = -1, time.monotonic()
    while True:
        try:
            job = client.job(id)
            silent_since = None
            if job["state"] != "running":
                return job
            done, total = job["bytes_done"], job["bytes_total"]
            if done != last_bytes:
                last_bytes, came_at = done, time.monotonic()
            elif time.monotonic() - came_at > _STILL_S:
                came_at = math.inf  # told once, until something comes again
                if not warn_of_silent_stores(app.out, client.silent_stores()):
                    app.out.warning(f"nothing has come for {_STILL_S:.0f} s; it is waited for")
            bar.update(f"{job['ref']}  {format_bytes(done)} of {format_bytes(total)}", done, total)
            time.sleep(_POLL_S)
        except KeyboardInterrupt:
            app.out.warning(f"the warm-up goes on in the daemon; to end it: dsctl jobs cancel {id}")
            raise
        except DaemonSilentError as exc:
            now = time.monotonic()
            if silent_since is None:
                silent_since = now
                app.out.warning(f"{exc.message}; the warm-up is waited for. {exc.hint}")
            if now - silent_since > _SILENCE_S:
                raise
            time.sleep(10 * _POLL_S)
        except SnapshotNotFoundError:
            restarts += 1
            if restarts > _RESTARTS:
                raise
            id = client.warm(ref)
