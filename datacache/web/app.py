"""Put the page together: routes to pages, answers for errors, the guard before it all."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from datacache.core.errors import DatacacheError
from datacache.core.html import visible
from datacache.settings import Settings
from datacache.web.access import LOOPBACK, Guard, OneTimeLinks
from datacache.web.opened import Opening
from datacache.web.pages import (
    compare,
    datasets,
    drafts,
    images,
    jobs,
    lineage,
    marks,
    node,
    plots,
    queues,
    selecting,
    visitors,
)
from datacache.web.rendering import hint_of, render, status_of
from datacache.web.site import Site

_log = logging.getLogger(__name__)
_PAGES: Final = (compare, datasets, drafts, images, jobs, lineage, marks, node, plots, queues, selecting, visitors)
_SCRIPTS: Final = (
    "compare.js",
    "htmx.min.js",
    "mark.js",
    "node.js",
    "page.js",
    "save.js",
    "select.js",
    "zoom.js",
)
_STATIC: Final = {"style.css": "text/css", "icon.svg": "image/svg+xml", **dict.fromkeys(_SCRIPTS, "text/javascript")}


def make_app(
    settings: Settings,
    links: OneTimeLinks,
    *,
    hosts: Collection[str] = LOOPBACK,
    cookie: str = "datacache_ui",
    read_only: bool = False,
    mounts: Callable[[], list[list[str]]] = list,
) -> Guard:
    """Return the ASGI application. What it opens is closed when the server ends its lifespan."""
    site = Site(settings, links, cookie, mounts=mounts, read_only=read_only)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        site.close()

    routes = [route for page in _PAGES for route in page.routes(site)]
    routes += [Route("/static/{name}", _static), Route("/favicon.ico", _icon)]
    handlers: dict[Any, Any] = {DatacacheError: _failed, Opening: _opening, HTTPException: _http_error}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.state.for_templates = {"has_node": node.is_shown(settings), "read_only": read_only}
    return Guard(app, links=links, hosts=hosts, cookie=cookie, user_header=settings.ui_user_header, read_only=read_only)


def _static(request: Request) -> Response:
    return _file(request.path_params["name"])


def _icon(_request: Request) -> Response:
    return _file("icon.svg")


def _file(name: str) -> Response:
    if name not in _STATIC:
        raise HTTPException(404)
    data = files("datacache.web").joinpath("static", name).read_bytes()
    return Response(data, media_type=_STATIC[name], headers={"cache-control": "private, max-age=300"})


def _failed(request: Request, exc: DatacacheError) -> Response:
    status = status_of(exc)
    _log.log(logging.WARNING if status >= 500 else logging.INFO, "%r: %s", request.url.path, visible(exc.message))
    return render(request, "error.html", status=status, title=exc.message, hint=hint_of(request, exc))


def _opening(request: Request, exc: Opening) -> Response:
    return render(request, "opening.html", status=202, ref=exc.ref, progress=str(exc))


def _http_error(request: Request, exc: HTTPException) -> Response:
    return render(request, "error.html", status=exc.status_code, title="There is no such page.", hint="")
