"""`dsctl ui`: the web page."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from datacache.core.errors import UsageError
from dataset_cli.app import App, command

if TYPE_CHECKING:
    from datacache.settings import Settings

_NEEDS = ("starlette", "uvicorn", "jinja2")


@command(has_json=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="0: any that is free.")
@click.option("--read-only", is_flag=True, help="Refuse everything that writes.")
@click.option("--no-browser", is_flag=True, help="Print the link, and open no browser.")
def ui(app: App, /, *, host: str, port: int, read_only: bool, no_browser: bool) -> None:
    """Look at data sets and their versions in a browser, and mark images.

    \b
    dsctl ui
    dsctl ui --read-only --no-browser --port 9000

    Prints a link that lets one visitor in, and a new one each time it was used. It goes on until Ctrl-C. Beyond this
    machine, DATACACHE_UI_HOSTS says by which names browsers come, and DATACACHE_UI_USER_HEADER which header of a proxy
    names the user: then there is no link.
    """
    if not page_is_installed():
        raise UsageError("the page needs more packages", hint="Install them: pip install 'dsctl[ui]'")
    serve_page(app, app.settings, host=host, port=port, read_only=read_only, browser=not no_browser)


def page_is_installed() -> bool:
    """Tell whether the extra `ui` is there."""
    return all(find_spec(name) is not None for name in _NEEDS)


def serve_page(app: App, settings: Settings, *, browser: bool, **where: Any) -> None:
    """Serve the page until Ctrl-C, and print its links; on a terminal, a `browser` opens the first. `where` are the
    options of `serve`."""
    from datacache.web.server import serve
    from dataset_cli.commands.writes import lines_of_mounts, state_of_mounts

    opened = not browser or not sys.stdout.isatty()

    def announce(url: str) -> None:
        nonlocal opened
        app.out.lines([url])
        sys.stdout.flush()
        if not opened:
            opened = True
            import webbrowser

            webbrowser.open(url)

    def mounts() -> list[list[str]]:
        return [*lines_of_mounts(state_of_mounts(settings))]

    # The page says how far it is; the terminal has its links and what was refused.
    serve(replace(settings, progress=False), announce, mounts, **where)
