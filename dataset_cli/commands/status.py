"""`dsctl status`: this home at a glance. It starts nothing and waits for nothing but the catalog.

With `--json`: `{"home", "catalog": {"url", "datasets", "error"}, "daemon": {…} | null, "cache": {…} | null,
"mounts": […]}`.
"""

from __future__ import annotations

from typing import Any

import click

from dataset_cli.app import App, json_option, pass_app
from dataset_cli.commands.cache import print_cache
from dataset_cli.commands.mount import as_json
from dataset_cli.output import format_seconds


@click.command()
@json_option
@pass_app
def status(app: App) -> None:
    """Show catalog, daemon, cache and mounts of this home."""
    from datacache import api
    from datacache.core.errors import CatalogError, DaemonError
    from fuse_mount import list_mounts

    catalog_state: dict[str, Any] = {"url": None, "datasets": None, "error": None}
    try:
        with app.catalog() as catalog:
            catalog_state |= {"url": catalog.url, "datasets": len(catalog.datasets())}
    except CatalogError as exc:
        catalog_state["error"] = exc.message
    daemon = cache = None
    client = api.running_daemon(app.settings)
    if client is not None:
        try:
            daemon, cache = client.health(), client.cache_status()
        except DaemonError as exc:
            app.out.warning(exc.message)
    mounts = [as_json(info) for info in list_mounts(app.settings)]
    home = str(app.settings.home)
    app.out.result({"home": home, "catalog": catalog_state, "daemon": daemon, "cache": cache, "mounts": mounts})
    if app.out.json:
        return
    app.out.line(f"home     {home}")
    known = catalog_state["error"] or f"{catalog_state['datasets']} datasets"
    app.out.line(f"catalog  {catalog_state['url']}: {known}" if catalog_state["url"] else f"catalog  {known}")
    running = f"pid {daemon['pid']}, up {format_seconds(daemon['uptime_s'])}" if daemon else "not running"
    app.out.line(f"daemon   {running}")
    for mount in mounts:
        app.out.line(f"mount    {mount['mountpoint']}  {mount['ref']}  {mount['files']:,} files")
    if cache is not None:
        app.out.line()
        print_cache(app.out, cache)
