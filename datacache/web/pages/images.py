"""The images of a version: in a grid, and one by one."""

from __future__ import annotations

from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from datacache import api
from datacache.core.errors import UsageError
from datacache.web.addresses import asked_of, filter_of, with_class, written
from datacache.web.filter_bar import filter_values
from datacache.web.images import whole as whole_image
from datacache.web.opened import Shown
from datacache.web.rendering import kept_for, render
from datacache.web.site import Site
from datacache.web.tiles import IMAGE_CHARACTERS, Tile

_TILES: Final = 48


def routes(site: Site) -> list[Route]:
    """Return the pages of images, and their pictures."""
    return [
        site.get("/s/{ref:path}", grid),
        site.get("/image/{ref:path}", image),
        site.get("/having/{ref:path}", having),
        site.get("/thumb/{ref:path}", thumb, decodes=True),
        site.get("/whole/{ref:path}", whole, decodes=True),
        site.get("/objects/{ref:path}", objects, decodes=True),
    ]


def grid(site: Site, request: Request) -> Response:
    """Show the images that a filter means, some at a time, with the number of images of each class."""
    record = site.record(request.path_params["ref"])
    shown = site.opened.get(record)
    asked = asked_of(request.scope["query_string"])
    values = filter_values(shown, asked) | {"record": record, "colours": shown.colours}
    values |= {"problem": "", "hint": "", "page": None, "tiles": []}
    try:
        wanted = filter_of(asked)
        matches = shown.browser.select(wanted)
    except UsageError as exc:
        return render(request, "grid.html", status=422, **values | {"problem": exc.message, "hint": exc.hint})
    place = dict(asked)
    page = shown.browser.page(matches, after=place.get("after", ""), before=place.get("before", ""), size=_TILES)
    pairs = written(wanted)
    tiles = [Tile(shown, row, pairs) for row in page.rows]
    values |= {"matches": matches, "page": page, "tiles": tiles, "pairs": pairs}
    values["with_class"] = partial(with_class, record.ref, wanted)
    return render(request, "grid.html", **values)


def image(site: Site, request: Request) -> Response:
    """Show one image, all that is known of it, and the way to those before and behind it."""
    shown, row = site.row(request)
    asked = asked_of(request.scope["query_string"])
    wanted = filter_of(asked)
    matches = shown.browser.select(wanted)
    before, place, behind = shown.browser.neighbours(matches, row.path)
    tile = Tile(shown, row, written(wanted), most=IMAGE_CHARACTERS, whole=True)
    return render(
        request,
        "image.html",
        record=shown.snapshot.record,
        row=row,
        tile=tile,
        stat=shown.snapshot.stat(row.path),
        colours=shown.colours,
        before=before,
        behind=behind,
        place=place,
        total=len(matches.rows),
        pairs=written(wanted),
    )


def having(site: Site, request: Request) -> Response:
    """List the newest versions of the data set, and whether they have the image as it is here."""
    shown, row = site.row(request)
    here = shown.snapshot.manifest.entry(shown.snapshot.manifest.find(row.path.encode("utf-8", "surrogateescape")) or 0)
    found = api.versions_of_file(site.catalog, shown.snapshot.record.dataset, row.path)
    versions = [
        (record, "no" if each is None else "yes" if _content(each) == _content(here) else "other contents")
        for record, each in found
    ]
    return render(request, "having.html", versions=versions, path=row.path)


def thumb(site: Site, request: Request) -> Response:
    """Return the small picture of an image."""
    shown, row = site.row(request)
    return Response(
        site.thumbnails.get(shown.snapshot, row.path), media_type="image/jpeg", headers=_kept(request, shown)
    )


def whole(site: Site, request: Request) -> Response:
    """Return an image."""
    shown, row = site.row(request)
    data, kind = whole_image(shown.snapshot, row.path)
    return Response(data, media_type=kind, headers=_kept(request, shown))


def objects(site: Site, request: Request) -> Response:
    """Return the objects of an image as a picture of their own, to lay over it."""
    shown, row = site.row(request)
    tile = Tile(shown, row, (), most=2**62, whole="whole" in dict(asked_of(request.scope["query_string"])))
    return Response(tile.alone(), media_type="image/svg+xml", headers=_kept(request, shown))


def _kept(request: Request, shown: Shown) -> dict[str, str]:
    return kept_for((request.path_params["ref"], shown.snapshot.record))


def _content(entry: api.Entry) -> tuple[int, str]:
    return entry.size_bytes, entry.etag
