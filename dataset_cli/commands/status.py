"""`dsctl status`: this home at a glance. It starts nothing and waits for nothing but the catalog.

With `--json`: `{"home", "catalog": {"url", "datasets", "error"}, "daemon": {…} | null,
"daemon_error": why one that is there does not answer | null,
"differing": [{"name", "daemon", "shell"}] (settings of the daemon that are not this shell's), "cache": {…} | null,
"mounts": [{…, "lost", "errors": [{"path", "reason", "hint", "errno", "at", "count"}]}], "read_write": [{…, "mounted",
"supervised", "live": {…, "errors"} | null, "error", "hint"}], "staged": [{"folder", "url", "files", "bytes", "problem",
"endpoint"}]}`. With `--metrics` it is text for Prometheus: of the daemon, if it runs, and of the read-write mounts.
"""

from __future__ import annotations

import shlex
from typing import Any

import click

from datacache.core.counters import count
from dataset_cli.app import App, json_option, pass_app
from dataset_cli.commands.cache import print_cache
from dataset_cli.commands.mount import as_json
from dataset_cli.commands.writes import error_lines, left_lines, left_state, read_write_lines, read_write_state
from dataset_cli.output import format_seconds, printable
from dataset_cli.variables import differences


@click.command()
@click.option("--metrics", is_flag=True, help="Print the daemon's and the read-write mounts' metrics for Prometheus.")
@json_option
@pass_app
def status(app: App, metrics: bool) -> None:
    """Show catalog, daemon, cache and mounts of this home.

    Exits with 1 if the catalog cannot be reached.
    """
    from datacache import api
    from datacache.core.errors import CatalogError, DaemonError
    from fuse_mount import is_lost, list_bucket_mounts, list_mounts

    if metrics:
        _print_metrics(app)
        return
    catalog_state: dict[str, Any] = {"url": None, "datasets": None, "error": None}
    try:
        with app.catalog() as catalog:
            catalog_state |= {"url": catalog.url, "datasets": len(catalog.datasets())}
    except CatalogError as exc:
        catalog_state["error"] = exc.message
    daemon = cache = daemon_error = None
    try:
        client = api.running_daemon(app.settings)
        if client is not None:
            daemon, cache = client.health(), client.cache_status()
    except DaemonError as exc:
        daemon_error = exc.message
        app.out.warning(f"{exc.message}. {exc.hint}".rstrip())
    differing = differences(app.settings, daemon) if daemon is not None else []
    for each in differing:
        app.out.warning(f"{each.message}. {each.hint}")
    mounts = [as_json(info) | {"lost": is_lost(info, app.settings)} for info in list_mounts(app.settings)]
    home = str(app.settings.home)
    read_write = [read_write_state(info) for info in list_bucket_mounts(app.settings, ending=True)]
    staged = left_state(app.settings)
    shown: dict[str, Any] = {
        "home": home,
        "catalog": catalog_state,
        "daemon": daemon,
        "daemon_error": daemon_error,
        "differing": [each._asdict() for each in differing],
        "cache": cache,
        "mounts": mounts,
    }
    app.out.result(shown | {"read_write": read_write, "staged": staged})
    if not app.out.json:
        _print(app, shown, read_write, staged)
    if catalog_state["error"]:
        raise click.exceptions.Exit(1)


def _print(app: App, shown: dict[str, Any], read_write: list[dict[str, Any]], staged: list[dict[str, Any]]) -> None:
    catalog_state, daemon, cache = shown["catalog"], shown["daemon"], shown["cache"]
    app.out.line(f"home     {shown['home']}")
    known = catalog_state["error"] or count(catalog_state["datasets"] or 0, "dataset")
    app.out.line(f"catalog  {catalog_state['url']}: {known}" if catalog_state["url"] else f"catalog  {known}")
    running = (
        f"pid {daemon['pid']}, up {format_seconds(daemon['uptime_s'])}"
        if daemon
        else "not running; it starts when it is needed"
    )
    if shown["daemon_error"]:
        running = "does not answer"
    app.out.line(f"daemon   {running}")
    for mount in shown["mounts"]:
        app.out.line(f"mount    {mount['mountpoint']}  {mount['ref']}  {mount['files']:,} files")
        if mount["lost"]:
            again = f"dsctl mount {mount['ref']} {shlex.quote(mount['mountpoint'])}"
            app.out.line(f"         error: its processes have died, nobody serves it → Mount it again: {again}")
        app.out.lines(printable(line) for line in error_lines(mount["errors"]))
    for state in read_write:
        app.out.lines(printable(line) for line in read_write_lines(state))
    for area in staged:
        app.out.lines(printable(line) for line in left_lines(area))
    if cache is not None:
        app.out.line()
        print_cache(app.out, cache)


def _print_metrics(app: App) -> None:
    from datacache import api
    from datacache.core.errors import DatacacheError
    from fuse_mount import bucket_status, list_bucket_mounts, render_metrics

    client = api.running_daemon(app.settings)
    if client is not None:
        print(client.metrics(), end="")
    found = []
    for info in list_bucket_mounts(app.settings):
        try:
            found.append((info, bucket_status(info)))
        except DatacacheError as exc:
            app.out.warning(exc.message)
    if found:
        print(render_metrics(found, app.settings.home), end="")
