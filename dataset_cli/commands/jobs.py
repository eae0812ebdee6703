"""`dsctl jobs`: the warm-ups of this node's daemon, asked for or begun by a first read, and their end.

With `--json`: `{"jobs": [{…}]}`, each as `dsctl warm --json` prints it; `cancel` prints the one.
"""

from __future__ import annotations

import click

from dataset_cli.app import App, json_option, pass_app
from dataset_cli.commands.cache import warn_of_silent_stores
from dataset_cli.output import format_bytes


@click.group(invoke_without_command=True)
@json_option
@pass_app
@click.pass_context
def jobs(context: click.Context, app: App) -> None:
    """List the warm-ups of this node's daemon, or cancel one."""
    if context.invoked_subcommand is not None:
        return
    from datacache import api

    client = api.running_daemon(app.settings)
    found = client.jobs() if client is not None else []
    app.out.result({"jobs": found})
    for job in found:
        done = f"{format_bytes(job['bytes_done'])} of {format_bytes(job['bytes_total'])}"
        kind = "  (begun by a read)" if job["background"] else ""
        app.out.line(f"{job['id']}  {job['state']:10}  {job['ref']}  {done}{kind}")
        for words in filter(None, (job["error"], job["hint"])):
            app.out.line(f"    {words}")
    if client is not None:
        warn_of_silent_stores(app.out, client.silent_stores())
    if not found:
        app.out.line("no jobs")


@jobs.command()
@click.argument("id")
@json_option
@pass_app
def cancel(app: App, id: str) -> None:
    """End a warm-up. What it has fetched stays in the cache."""
    from datacache import api
    from datacache.core.errors import SnapshotNotFoundError

    client = api.running_daemon(app.settings)
    if client is None:
        raise SnapshotNotFoundError("there is no such job: no daemon runs")
    job = client.cancel(id)
    is_ending = job["state"] == "running"
    text = f"cancelling {job['ref']}" if is_ending else f"{job['ref']} has ended already: {job['state']}"
    app.out.result(job, text)
