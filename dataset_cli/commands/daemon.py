"""`dsctl daemon`: start, stop and look at the cache daemon of this home. Commands that need it start it
themselves.
"""

from __future__ import annotations

import logging

import click

from dataset_cli.app import App, json_option, pass_app
from dataset_cli.output import format_bytes, format_seconds
from dataset_cli.variables import differences


@click.group()
def daemon() -> None:
    """Start, stop and look at the cache daemon of this node."""


@daemon.command()
@click.option("--foreground", "-f", is_flag=True, help="Serve in this process until it is stopped.")
@json_option
@pass_app
def start(app: App, foreground: bool) -> None:
    """Start it, unless it runs already."""
    if foreground:
        from datacache.api import run_daemon as run

        app.out.log_to_stderr(logging.INFO)
        run(app.settings)
        return
    from datacache import api

    before = api.running_daemon(app.settings)
    health = (before or api.connect(app.settings)).health()
    for each in differences(app.settings, health) if before else []:
        app.out.warning(f"{each.message}. {each.hint}")
    for tier, lost in health["shrunk"].items() if not before else []:
        app.out.warning(
            f"the limit of {tier} is lower than what was cached: {format_bytes(lost)} went, read longest ago"
        )
    app.out.result(
        health | {"started": before is None},
        f"the daemon {'was running already' if before else 'is running'} (pid {health['pid']})",
    )


@daemon.command()
@json_option
@pass_app
def stop(app: App) -> None:
    """Stop it. Mounts keep serving what is on the node and start it again when they need it."""
    from datacache import api

    client = api.running_daemon(app.settings)
    if client is not None:
        client.stop()
    app.out.result(
        {"stopped": client is not None},
        "the daemon is stopped" if client is not None else "no daemon was running",
    )


@daemon.command()
@json_option
@pass_app
def status(app: App) -> None:
    """Show whether it runs and answers. Exit code 1 if it does not. It takes a few seconds at most."""
    from datacache import api
    from datacache.core.errors import DaemonSilentError, DaemonUnavailableError

    try:
        client = api.running_daemon(app.settings)
    except DaemonSilentError:
        if app.out.json:
            app.out.result({"running": True, "answers": False})
        raise
    if client is None:
        if app.out.json:
            app.out.result({"running": False})
        raise DaemonUnavailableError(
            f"no daemon runs for {app.settings.home}",
            hint="It starts when it is needed, or: dsctl daemon start",
        )
    health = client.health()
    app.out.result(
        {"running": True} | health,
        f"running (pid {health['pid']}) for {format_seconds(health['uptime_s'])}, home {health['home']}",
    )
    for problem in health["problems"]:
        app.out.warning(problem)
