"""Render templates: everything of a data set is text, whatever it holds.

Jinja escapes what is put into HTML. Before that, characters that are not seen (control characters, marks of direction,
bytes that are no text) become escapes such as `\\x1b`: a name must not look like another one, nor end a line. One
environment for the process; any thread.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from datacache import api
from datacache.core.counters import format_seconds
from datacache.core.errors import (
    BrokenImageError,
    DatacacheError,
    DraftConflictError,
    PathNotFoundError,
    SnapshotNotFoundError,
    TasksError,
    UsageError,
)
from datacache.core.html import visible
from datacache.settings import format_bytes
from datacache.web.access import INVITE, LEAVE, MOST_NAME, NAME
from datacache.web.addresses import address

_STATUS: Final[tuple[tuple[type[DatacacheError], int], ...]] = (
    (SnapshotNotFoundError, 404),
    (PathNotFoundError, 404),
    (UsageError, 422),
    (DraftConflictError, 409),
    (TasksError, 409),
    (BrokenImageError, 415),
    (DatacacheError, 502),
)
"""The first that fits counts."""
_FOREVER: Final = {"cache-control": "private, max-age=31536000, immutable"}


def kept_for(*named: tuple[str, api.SnapshotRecord]) -> dict[str, str]:
    """Return the headers of a picture by the references in its address and what they mean: a browser keeps it for good,
    unless one of these is a tag, which may mean another version tomorrow."""
    return _FOREVER if all(ref == record.ref for ref, record in named) else {}


def as_text(value: Any) -> Any:
    """Return a text as it can be shown. All else, HTML that templates made among it, stays as it is."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("datacache.web"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=as_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": format_bytes,
        "duration": format_seconds,
        "count": lambda number: f"{number:,}",
        "time": lambda stamp: stamp.replace("T", " ").removesuffix("Z"),
        "name": lambda path: path.rpartition("/")[2],
        "pretty": lambda value: json.dumps(value, ensure_ascii=False, sort_keys=True),
        "colour": api.hex_colour,
    }
    environment.globals |= {
        "address": address,
        "leave": LEAVE,
        "name_page": NAME,
        "invite_page": INVITE,
        "most_name": MOST_NAME,
    }
    return environment


def render(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page."""
    visitor = request.scope["visitor"]
    values |= request.app.state.for_templates
    html = _environment().get_template(template).render(visitor=visitor, **values)
    return HTMLResponse(html, status)


def status_of(exc: DatacacheError) -> int:
    """Return the status of HTTP that stands for an error."""
    return next(status for kind, status in _STATUS if isinstance(exc, kind))


def hint_of(request: Request, exc: DatacacheError) -> str:
    """Return the hint of an error. Of what is not there hints name all data sets, which a page of one namespace may
    not: one may go away between the look at its list and its use."""
    one_namespace = not request.app.state.for_templates["has_node"]
    return "" if one_namespace and isinstance(exc, SnapshotNotFoundError) else exc.hint
