"""`dsctl status`: this home at a glance. It starts nothing and waits for nothing but the catalog.

With `--json`: `{"home", "catalog": {"url", "datasets", "error"}, "daemon": {…} | null,
"daemon_error": why one that is there does not answer | null,
"differing": [{"name", "daemon", "shell"}] (settings of the daemon that are not this shell's), "cache": {…} | null,
"mounts": [{…, "lost", "errors": [{"path", "reason", "hint", "errno", "at", "count"}]}], "read_write": [{…, "mounted",
"supervised", "live": {…, "errors"} | null, "error", "hint"}], "staged": [{"folder", "url", "files", "bytes", "problem",
"endpoint"}]}`. With `--metrics` it is text for Prometheus: of the daemon, if it runs, and of the read-write mounts.
"""

from __future__ import annotations

from typing import Any

import click

import fuse_mount
from datacache import api
from datacache.core.counters import count, format_seconds
from datacache.core.errors import CatalogError, DatacacheError
from dataset_cli.app import App, command
from dataset_cli.commands.cache import print_cache
from dataset_cli.commands.writes import lines_of_mounts, state_of_mounts
from dataset_cli.output import printable
from dataset_cli.variables import differences


@command()
@click.option("--metrics", is_flag=True, help="Print the daemon's and the read-write mounts' metrics for Prometheus.")
def status(app: App, metrics: bool) -> None:
    """Show catalog, daemon, cache and mounts of this home.

    Exits with 1 if the catalog cannot be reached.
    """
    if metrics:
        _print_metrics(app)
        return
    catalog = _catalog_state(app)
    node = api.look_at_node(app.settings)
    daemon, cache = node["daemon"], node["cache"]
    if node["error"]:
        app.out.warning(f"{node['error']}. {node['hint']}".rstrip())
    differing = differences(app.settings, daemon) if daemon is not None else []
    for each in differing:
        app.out.warning(f"{each.message}. {each.hint}")
    writes = state_of_mounts(app.settings)
    home = str(app.settings.home)
    app.out.result(
        {
            "home": home,
            "catalog": catalog,
            "daemon": daemon,
            "daemon_error": node["error"],
            "differing": [each._asdict() for each in differing],
            "cache": cache,
            **writes,
        },
        f"home     {home}",
    )
    known = catalog["error"] or f"{catalog['url']}: {count(catalog['datasets'], 'dataset')}"
    app.out.line(f"catalog  {known}")
    has_mounts = writes["mounts"] or writes["read_write"]
    if daemon is not None:
        running = f"pid {daemon['pid']}, up {format_seconds(daemon['uptime_s'])}"
    else:
        running = "does not answer" if node["error"] else _not_running(app, has_mounts=bool(has_mounts))
    app.out.line(f"daemon   {running}")
    for lines in lines_of_mounts(writes):
        app.out.lines(map(printable, lines))
    if cache is not None and not app.out.json:
        app.out.line()
        print_cache(app.out, cache)
    if catalog["error"]:
        raise click.exceptions.Exit(1)


def _not_running(app: App, *, has_mounts: bool) -> str:
    failure = api.start_failure(app.settings)
    if failure is None and has_mounts:
        return "not running; a mount whose processes all die now is lost → Start it: dsctl daemon start"
    if failure is None:
        return "not running; it starts when it is needed"
    app.out.warning(f"{failure.message}. {failure.hint}".rstrip())
    return f"not running; its last start failed {format_seconds(failure.ago_s)} ago"


def _catalog_state(app: App) -> dict[str, Any]:
    try:
        with app.catalog() as catalog:
            return {"url": catalog.url, "datasets": len(catalog.datasets()), "error": None}
    except CatalogError as exc:
        return {"url": None, "datasets": None, "error": exc.message}


def _print_metrics(app: App) -> None:
    client = api.running_daemon(app.settings)
    if client is not None:
        print(client.metrics(names=True), end="")
    found = []
    for info in fuse_mount.list_bucket_mounts(app.settings):
        try:
            found.append((info, fuse_mount.bucket_status(info)))
        except DatacacheError as exc:
            app.out.warning(exc.message)
    if found:
        print(fuse_mount.render_metrics(found, app.settings.home), end="")
