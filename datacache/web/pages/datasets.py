"""The data sets, and a picture of each."""

from __future__ import annotations

from itertools import islice
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from datacache import api
from datacache.core.errors import PathNotFoundError
from datacache.web.addresses import asked_of
from datacache.web.rendering import render
from datacache.web.site import Site

_LISTED: Final = 100
_COVER_LOOKS_AT: Final = 2_000
"""Files of a folder among which a cover is sought; what lies behind them there is passed over."""
_COVER_FOLDERS: Final = 16
_AFTER_SLASH: Final = b"0"


def routes(site: Site) -> list[Route]:
    """Return the pages of data sets."""
    return [
        site.get("/", datasets),
        site.get("/cover/{name:path}", cover, decodes=True),
    ]


def datasets(site: Site, request: Request) -> Response:
    """List the data sets, each with its newest version."""
    asked = dict(asked_of(request.scope["query_string"]))
    sought, behind = asked.get("q", "").casefold(), asked.get("after", "")
    found = (each for each in site.catalog.datasets() if each.name > behind and sought in each.name.casefold())
    listed = list(islice((each for each in found if site.may_see(each.name)), _LISTED + 1))
    rows = []
    for dataset in listed[:_LISTED]:
        record = site.catalog.snapshot(dataset.name, dataset.latest)
        if record is not None:
            rows.append((dataset, record, site.access(dataset.name)))
    after = listed[_LISTED - 1].name if len(listed) > _LISTED else ""
    return render(request, "datasets.html", rows=rows, q=asked.get("q", ""), after=after)


def cover(site: Site, request: Request) -> Response:
    """Return a small picture of a data set's newest version."""
    with api.open_snapshot(site.record(request.path_params["name"]).ref, site.settings) as snapshot:
        path = _first_image(snapshot)
        if path is None:
            raise PathNotFoundError("there is no image", path="")
        data = site.thumbnails.get(snapshot, path.decode("utf-8", "surrogateescape"))
    return Response(data, media_type="image/jpeg", headers={"cache-control": "private, max-age=60"})


def _first_image(snapshot: api.Snapshot) -> bytes | None:
    """Return an image of a snapshot without going through all of a folder of annotations, which often comes first."""
    manifest, row = snapshot.manifest, 0
    for _ in range(_COVER_FOLDERS):
        path = b""
        for entry in islice(manifest.entries(row), _COVER_LOOKS_AT):
            path = entry.path
            if api.is_image_path(path):
                return path
        folder, slash, _name = path.rpartition(b"/")
        if not path:
            return None
        row = manifest.seek(folder + _AFTER_SLASH) if slash else row + _COVER_LOOKS_AT
    return None
