"""`dsctl daemon`: start, stop and look at the cache daemon of this home. Commands that need it start it themselves."""

from __future__ import annotations

import logging

import click

from datacache import api
from datacache.core.counters import format_seconds
from datacache.core.errors import DaemonSilentError, DaemonUnavailableError
from datacache.settings import format_bytes
from dataset_cli.app import App, command
from dataset_cli.variables import differences


@click.group()
def daemon() -> None:
    """Start, stop and look at the cache daemon of this node."""


@command(daemon)
@click.option("--foreground", "-f", is_flag=True, help="Serve in this process until it is stopped.")
def start(app: App, foreground: bool) -> None:
    """Start it, unless it runs already."""
    if foreground:
        app.out.log_to_stderr(logging.INFO)
        api.run_daemon(app.settings)
        return
    before = api.running_daemon(app.settings)
    with app.out.progress("starting the daemon"):  # it waits some seconds for a MongoDB that is away
        health = (before or api.connect(app.settings)).health()
    for each in differences(app.settings, health) if before else []:
        app.out.warning(f"{each.message}. {each.hint}")
    for tier, lost in health["shrunk"].items() if not before else []:
        app.out.warning(
            f"the limit of {tier} is lower than what was cached: {format_bytes(lost)} went, read longest ago"
        )
    for problem in health["problems"]:
        app.out.warning(problem)
    state = "was running already" if before else "is running"
    app.out.result(health | {"started": before is None}, f"the daemon {state} (pid {health['pid']})")


@command(daemon)
def stop(app: App) -> None:
    """Stop it. Mounts keep serving what is on the node and start it again when they need it."""
    client = api.running_daemon(app.settings)
    if client is not None:
        with app.out.progress("stopping the daemon"):
            client.stop()
    text = "the daemon is stopped" if client is not None else "no daemon was running"
    app.out.result({"stopped": client is not None}, text)


@command(daemon)
def status(app: App) -> None:
    """Show whether it runs and answers. Exit code 1 if it does not. It takes a few seconds at most."""
    try:
        client = api.running_daemon(app.settings)
    except DaemonSilentError:
        app.out.result({"running": True, "answers": False})
        raise
    if client is None:
        app.out.result({"running": False})
        failure = api.start_failure(app.settings)
        hint = "It starts when it is needed, or: dsctl daemon start"
        if failure is not None:
            hint = (
                f"Its last start failed {format_seconds(failure.ago_s)} ago: {failure.message}. {failure.hint}".rstrip()
            )
        raise DaemonUnavailableError(f"no daemon runs for {app.settings.home}", hint=hint)
    health = client.health()
    app.out.result(
        {"running": True} | health,
        f"running (pid {health['pid']}) for {format_seconds(health['uptime_s'])}, home {health['home']}",
    )
    for problem in health["problems"]:
        app.out.warning(problem)
