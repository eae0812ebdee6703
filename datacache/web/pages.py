"""The pages: data sets, the versions of one, its images in a grid, one image. Each reads, and none writes.

A page asks the catalog itself each time; open snapshots and small pictures are kept (`opened`, `images`). Starlette
calls a page in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from datacache import api
from datacache.core.errors import PathNotFoundError, SnapshotNotFoundError, UsageError
from datacache.settings import Settings
from datacache.web.addresses import address, asked_of, filter_of, written
from datacache.web.images import SMALL, Thumbnails, whole
from datacache.web.opened import OpenSnapshots, Shown
from datacache.web.rendering import render

_TILES: Final = 48
_LISTED: Final = 100
_LISTED_CLASSES: Final = 300
_TILE_CHARACTERS, _IMAGE_CHARACTERS = 1_000, 40_000
"""Of SVG in a page; what is longer is loaded for itself, so that a page stays below 100 KB."""
_FOREVER: Final = {"cache-control": "private, max-age=31536000, immutable"}
_SVG: Final = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" preserveAspectRatio="none" {}>{}</svg>'
_STYLED: Final = 'fill="none" stroke-width="{}" stroke-linecap="round"'
_COVER_LOOKS_AT: Final = 2_000


class Pages:
    """All pages of one server."""

    def __init__(self, settings: Settings, catalog: api.Catalog, opened: OpenSnapshots) -> None:
        self._settings = settings
        self._catalog = catalog
        self._opened = opened
        self._thumbnails = Thumbnails()

    # --- data sets and versions -------------------------------------------------------------------------------------

    def datasets(self, request: Request) -> Response:
        """List the data sets, each with its newest version."""
        asked = dict(asked_of(request.scope["query_string"]))
        sought, behind = asked.get("q", "").casefold(), asked.get("after", "")
        found = (each for each in self._catalog.datasets() if each.name > behind and sought in each.name.casefold())
        listed = list(islice((each for each in found if self._may_see(each.name)), _LISTED + 1))
        rows = []
        for dataset in listed[:_LISTED]:
            record = self._catalog.snapshot(dataset.name, dataset.latest)
            if record is not None:
                access = api.access_of(self._catalog, dataset.name, default=self._settings.access)
                rows.append((dataset, record, access))
        after = listed[_LISTED - 1].name if len(listed) > _LISTED else ""
        return render(request, "datasets.html", rows=rows, q=asked.get("q", ""), after=after)

    def dataset(self, request: Request) -> Response:
        """List the versions of a data set, the newest first, and what each was made from."""
        name = request.path_params["name"]
        dataset = self._dataset(name)
        records = self._catalog.snapshots(name)[::-1]
        asked = dict(asked_of(request.scope["query_string"]))
        start = next((n for n, record in enumerate(records) if record.id == asked.get("from")), 0)
        tags: dict[str, list[str]] = {}
        for tag, id in sorted(dataset.tags.items()):
            tags.setdefault(id, []).append(tag)
        versions = [(record, tags.get(record.id, []), self._inputs(record)) for record in records[start:][:_LISTED]]
        older = records[start + _LISTED].id if len(records) > start + _LISTED else ""
        return render(request, "dataset.html", dataset=dataset, versions=versions, older=older, total=len(records))

    def cover(self, request: Request) -> Response:
        """Return a small picture of a data set's newest version."""
        with api.open_snapshot(self._record(request.path_params["name"]).ref, self._settings) as snapshot:
            paths = (entry.path for entry in islice(snapshot.manifest.entries(), _COVER_LOOKS_AT))
            path = next((path for path in paths if api.is_image_path(path)), None)
            if path is None:
                raise PathNotFoundError("there is no image", path="")
            data = self._thumbnails.get(snapshot, path.decode("utf-8", "surrogateescape"))
        return Response(data, media_type="image/jpeg", headers={"cache-control": "private, max-age=60"})

    # --- images -----------------------------------------------------------------------------------------------------

    def grid(self, request: Request) -> Response:
        """Show the images that a filter means, some at a time, with the number of images of each class."""
        record = self._record(request.path_params["ref"])
        shown = self._opened.get(record)
        asked = asked_of(request.scope["query_string"])
        values: dict[str, Any] = {"record": record, "table": shown.browser.table, "colours": shown.colours}
        values |= {"asked": dict(asked), "labels": [value for name, value in asked if name == "label"]}
        labels = values["labels"]
        values["listed"] = list(dict.fromkeys([*labels[:1], *islice(shown.browser.table.labels, _LISTED_CLASSES)]))
        values |= {"splits": shown.browser.split_names or (), "problem": "", "hint": "", "page": None, "tiles": []}
        try:
            wanted = filter_of(asked)
            matches = shown.browser.select(wanted)
        except UsageError as exc:
            return render(request, "grid.html", status=422, **values | {"problem": exc.message, "hint": exc.hint})
        place = dict(asked)
        page = shown.browser.page(matches, after=place.get("after", ""), before=place.get("before", ""), size=_TILES)
        pairs = written(wanted)
        tiles = [_Tile(shown, row, pairs) for row in page.rows]
        values |= {"matches": matches, "page": page, "tiles": tiles, "pairs": pairs}
        return render(request, "grid.html", **values)

    def image(self, request: Request) -> Response:
        """Show one image, all that is known of it, and the way to those before and behind it."""
        shown, row = self._row(request)
        asked = asked_of(request.scope["query_string"])
        wanted = filter_of(asked)
        matches = shown.browser.select(wanted)
        before, place, behind = shown.browser.neighbours(matches, row.path)
        tile = _Tile(shown, row, written(wanted), most=_IMAGE_CHARACTERS, whole=True)
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

    def having(self, request: Request) -> Response:
        """List the newest versions of the data set, and whether they have the image as it is here."""
        shown, row = self._row(request)
        here = shown.snapshot.manifest.entry(shown.snapshot.manifest.find(_encode(row.path)) or 0)
        found = api.versions_of_file(self._catalog, shown.snapshot.record.dataset, row.path)
        versions = [
            (record, "no" if each is None else "yes" if _content(each) == _content(here) else "other contents")
            for record, each in found
        ]
        return render(request, "having.html", versions=versions, path=row.path)

    def thumb(self, request: Request) -> Response:
        """Return the small picture of an image."""
        shown, row = self._row(request)
        return Response(self._thumbnails.get(shown.snapshot, row.path), media_type="image/jpeg", headers=_FOREVER)

    def whole(self, request: Request) -> Response:
        """Return an image."""
        shown, row = self._row(request)
        data, kind = whole(shown.snapshot, row.path)
        return Response(data, media_type=kind, headers=_FOREVER)

    def objects(self, request: Request) -> Response:
        """Return the objects of an image as a picture of their own, to lay over it."""
        shown, row = self._row(request)
        tile = _Tile(shown, row, (), most=2**62, whole="whole" in dict(asked_of(request.scope["query_string"])))
        return Response(tile.alone(), media_type="image/svg+xml", headers=_FOREVER)

    # --- what is asked for ------------------------------------------------------------------------------------------

    def _row(self, request: Request) -> tuple[Shown, api.Row]:
        shown = self._opened.get(self._record(request.path_params["ref"]))
        path = dict(asked_of(request.scope["query_string"])).get("path", "")
        row = shown.browser.table.row(path)
        if row is None:
            raise PathNotFoundError(f"{shown.ref} has no image {path!r}", path=path)
        return shown, row

    def _record(self, ref: str) -> api.SnapshotRecord:
        self._dataset(api.parse_ref(ref).dataset)
        return api.resolve(self._catalog, ref)

    def _dataset(self, name: str) -> api.DatasetRecord:
        """Return a data set. The error tells no others, which may not be seen."""
        dataset = self._catalog.dataset(name) if self._may_see(name) else None
        if dataset is None:
            raise SnapshotNotFoundError(f"there is no data set {name}", ref=name)
        return dataset

    def _may_see(self, dataset: str) -> bool:
        namespace, default = self._settings.ui_namespace, self._settings.access
        api.check_name(dataset)
        return not namespace or api.access_of(self._catalog, dataset, default=default).allows(namespace)

    def _inputs(self, record: api.SnapshotRecord) -> list[str]:
        """Return what a version was made from; of data sets that may not be seen, no name."""
        inputs = record.lineage.inputs if record.lineage else ()
        return [ref if self._may_see(ref.partition("@")[0]) else "" for ref in inputs]


class _Tile:
    """A picture with its objects, for a template."""

    def __init__(
        self,
        shown: Shown,
        row: api.Row,
        pairs: Iterable[tuple[str, str]],
        *,
        most: int = _TILE_CHARACTERS,
        whole: bool = False,
    ) -> None:
        self.row, self.annotation = row, row.annotation
        self.href = address("image", shown.ref, pairs, path=row.path)
        self.src = address("whole" if whole else "thumb", shown.ref, path=row.path)
        self.overlay = address("objects", shown.ref, path=row.path, whole="1" if whole else "")
        self.width, self.height = _fitting(row.annotation, whole=whole)
        self._drawn = self._whole = ""
        if row.annotation is not None and row.annotation.boxes:
            skeletons = shown.browser.table.skeletons
            self._drawn = api.svg_objects(
                row.annotation, shown.colours, self.width, self.height, skeletons=skeletons, digits=int(whole)
            )
        self.fits = len(self._drawn) <= most

    @property
    def svg(self) -> Markup:
        """Return the objects as elements of an SVG. They are numbers and colours alone."""
        return Markup(self._drawn)  # noqa: S704 - see svg_objects

    def alone(self) -> str:
        """Return the objects as a file, whose elements no style sheet reaches."""
        width = max(2, round(max(self.width, self.height) / 300))
        styled = self._drawn.replace('class="a"', 'fill-opacity=".3" fill-rule="evenodd"')
        styled = styled.replace('class="o d"', f'stroke-dasharray="{3 * width}"')
        styled = styled.replace('class="k d"', f'stroke-width="{3 * width}" stroke-opacity=".5"')
        styled = styled.replace('class="k"', f'stroke-width="{3 * width}"').replace(' class="o"', "")
        return _SVG.format(self.width, self.height, _STYLED.format(width), styled)


def _fitting(annotation: api.Annotation | None, *, whole: bool) -> tuple[int, int]:
    """Return the size of a picture on the page."""
    if annotation is None or not annotation.width:
        return SMALL
    if whole:
        return annotation.width, annotation.height
    scale = min(SMALL[0] / annotation.width, SMALL[1] / annotation.height, 4)
    return max(1, round(annotation.width * scale)), max(1, round(annotation.height * scale))


def _content(entry: api.Entry) -> tuple[int, str]:
    return entry.size_bytes, entry.etag


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
