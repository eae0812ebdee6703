"""Serve the page until the process is told to stop (`dsctl ui`). The main thread of a process, once."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from datacache.core.errors import UsageError
from datacache.settings import Settings
from datacache.web.access import LOOPBACK, OneTimeLinks, read_key
from datacache.web.app import make_app

_EVERY_ADDRESS = frozenset({"0.0.0.0", "::", ""})
_REQUESTS_AT_ONCE = 100
_SILENT_S = 15.0
"""A connection without a request is closed after one to two times this."""


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
            http=_Connection,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_REQUESTS_AT_ONCE,
            timeout_graceful_shutdown=3,
            ws="none",
        )
        server = uvicorn.Server(config)
        # The server raises a signal again that has ended it: that shall not be an interruption, but a good end.
        before = {each: signal.signal(each, server.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            server.run(sockets=[listening])
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


class _Connection(H11Protocol):
    """A connection that is closed when no request comes for a time, or never the end of its headers: each takes the
    place of a visitor."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in the class above
        """Begin to watch it. Where there are many, the oldest that is idle gives way."""
        super().connection_made(transport)
        self.made_s = time.monotonic()
        others = [each for each in self.connections if isinstance(each, _Connection) and each is not self]
        if len(others) >= _REQUESTS_AT_ONCE - 1 and (idle := [each for each in others if not each.is_answering()]):
            oldest = min(idle, key=lambda each: each.made_s)
            self.connections.discard(oldest)
            oldest.transport.close()
        self._idle_after: object = self
        self._watch()

    def is_answering(self) -> bool:
        """Tell whether a request is under way."""
        return not getattr(self.cycle, "response_complete", True)  # None before the first request

    def _watch(self) -> None:
        if not self.is_answering() and self._idle_after is self.cycle:
            self.transport.close()
        elif not self.transport.is_closing():
            self._idle_after = None if self.is_answering() else self.cycle
            self.loop.call_later(_SILENT_S, self._watch)


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
