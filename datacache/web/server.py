"""Serve the page until the process is told to stop (`dsctl ui`). The main thread of a process, once."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from datacache.core.errors import UsageError
from datacache.settings import Settings
from datacache.web.access import LOOPBACK, OneTimeLinks, read_key
from datacache.web.app import make_app

_EVERY_ADDRESS = frozenset({"0.0.0.0", "::", ""})
_REQUESTS_AT_ONCE = 100


def serve(
    settings: Settings,
    announce: Callable[[str], None],
    mounts: Callable[[], list[list[str]]] = list,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    read_only: bool = False,
) -> None:
    """Listen, and announce the address with a token: at once, and a new one each time one was used. `mounts` returns
    the lines that tell of each mount of this home.

    `UsageError` where nothing can listen there, and for an address of every network without the names by which browsers
    reach it (the setting `ui_hosts`)."""
    if host in _EVERY_ADDRESS and not settings.ui_hosts:
        raise UsageError(
            f"--host {host!r} is every network of this machine, and no setting says by which names browsers come",
            hint="Set DATACACHE_UI_HOSTS=data.example.org, or give one address.",
        )
    name = next(iter(settings.ui_hosts), host) if host in _EVERY_ADDRESS else host
    with _listen(host, port) as listening:
        port = listening.getsockname()[1]

        def tell(token: str) -> None:
            query = "" if settings.ui_user_header else f"?token={token}"
            announce(f"http://{f'[{name}]' if ':' in name else name}:{port}/{query}")

        cookie = f"datacache_ui_{port}"
        # A visit is good for as much as it was made for: not for what a page of other options shows or writes.
        site = f"{cookie} {settings.ui_namespace} {'reading' if read_only else 'writing'}"
        links = OneTimeLinks(tell, key=read_key(settings.home), site=site)
        hosts = {*LOOPBACK, *settings.ui_hosts, host}
        app = make_app(settings, links, hosts=hosts, cookie=cookie, read_only=read_only, mounts=mounts)
        tell(links.token)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_REQUESTS_AT_ONCE,
            timeout_graceful_shutdown=3,
            ws="none",
        )
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(where[:2], family=family)
    except (OSError, OverflowError) as exc:
        raise UsageError(
            f"nothing can listen on {host}:{port}: {exc}", hint="Choose another --port or --host."
        ) from exc
