"""Two versions beside each other, and predictions beside labels: numbers, classes, and the images that differ."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from datacache import api
from datacache.core.errors import PathNotFoundError, SnapshotNotFoundError, UsageError
from datacache.web.addresses import address, asked_of
from datacache.web.comparisons import COLOURS, GREY, Comparing, Comparisons, Limits, Pair
from datacache.web.opened import Shown
from datacache.web.rendering import kept_for, render
from datacache.web.site import Site, tags_of
from datacache.web.tiles import IMAGE_CHARACTERS, TILE_CHARACTERS

_TILES: Final = 30
_CLASSES: Final = 30
_LISTED: Final = 100
_CHOICES: Final = 40
_NAMES: Final = {
    "image-added": "images added",
    "image-gone": "images gone",
    "image-changed": "images with other bytes",
    "annotated": "images annotated otherwise",
    "added": "objects added",
    "moved": "objects moved",
    "removed": "objects removed",
    "relabelled": "objects of another class",
    "edited": "objects with other attributes",
    "hit": "hits",
    "miss": "misses",
    "false-alarm": "false alarms",
    "other-class": "other class",
}


class _Both(NamedTuple):
    """Two versions, and what an address asks of them. With `limits`, `after` has predictions, `before` the labels."""

    before: Shown
    after: Shown
    found: api.Compared
    limits: Limits | None
    asked: api.WantedImages
    pairs: list[tuple[str, str]]
    """What the address of a page beside this one has."""
    colours: dict[str, tuple[int, int, int]]


class Compare:
    """The pages of one site."""

    def __init__(self) -> None:
        self._comparisons = Comparisons()

    def routes(self, site: Site) -> list[Route]:
        return [
            site.get("/compare/{ref:path}", self.versions),
            site.get("/match/{ref:path}", self.predictions),
            site.get("/compared/{ref:path}", self.image),
            site.get("/matched/{ref:path}", self.image),
            site.get("/overlay/{ref:path}", self.overlay),
        ]

    def versions(self, site: Site, request: Request) -> Response:
        """Show how a version differs from another one: the one before it, if the address does not say."""
        record = site.record(request.path_params["ref"])
        asked = dict(asked_of(request.scope["query_string"]))
        if not asked.get("with") and _parent(site, record) is None:
            if (images := _predicted_on(site, record)) is not None:
                return RedirectResponse(address("match", record.ref, [("with", images.ref)]), 303)
            values: dict[str, Any] = {"record": record, "choices": _choices(site, record), "asked": asked}
            return render(request, "compare_with.html", **values)
        return self._page(site, request, record, "compare")

    def predictions(self, site: Site, request: Request) -> Response:
        """Show how predictions fit the labels of another version or data set."""
        return self._page(site, request, site.record(request.path_params["ref"]), "match")

    def _page(self, site: Site, request: Request, record: api.SnapshotRecord, page: str) -> Response:
        try:
            both = self._both(site, request, record, page)
        except Comparing as exc:
            return RedirectResponse(address("job", exc.job.id), 303)
        found, tables = both.found, (both.before.browser.table, both.after.browser.table)
        asked = dict(asked_of(request.scope["query_string"]))
        numbers = found.select(both.asked)
        start = _start(numbers, asked)
        part = numbers[start : start + _TILES].tolist()
        pairs = [
            Pair(rows, (both.before, both.after), both.colours, both.limits) for rows in found.pairs(part, *tables)
        ]
        classes = found.classes()
        values: dict[str, Any] = {
            "record": record,
            "old": both.before.snapshot.record,
            "page": page,
            "images": found.images(),
            "objects": _by_kind(found),
            "classes": classes[:_CLASSES],
            "more_classes": len(classes) - _CLASSES,
            "most": max((max(each.before, each.after) for each in classes), default=1) or 1,
            "listed": found.labels[:300],
            "quality": api.prediction_quality(found) if page == "match" else [],
            "scored": page == "compare" and any(map(api.has_scores, tables)),
            "tiles": [(pair, found.kinds_of(number)) for pair, number in zip(pairs, part, strict=True)],
            "start": start,
            "total": len(numbers),
            "after": part[-1] if start + len(part) < len(numbers) else None,
            "before": int(numbers[max(0, start - _TILES)]) if start else None,
            "choices": _choices(site, record),
            "most_characters": TILE_CHARACTERS,
        }
        return render(request, "compare.html", **self._shared(both, record), **values)

    def image(self, site: Site, request: Request) -> Response:
        """Show one image of a comparison, and what differs on it."""
        record = site.record(request.path_params["ref"])
        page = "match" if request.url.path.startswith("/matched") else "compare"
        try:
            both = self._both(site, request, record, page)
        except Comparing as exc:
            return RedirectResponse(address("job", exc.job.id), 303)
        path = dict(asked_of(request.scope["query_string"])).get("path", "")
        tables = both.before.browser.table, both.after.browser.table
        number = both.found.find(path, *tables)
        if number < 0:
            raise PathNotFoundError(f"{path!r} is the same in both, or in none", path=path)
        numbers = both.found.select(both.asked)
        places = np.flatnonzero(numbers == number)
        place = int(places[0]) if len(places) else -1
        near = [numbers[n] if place >= 0 and 0 <= n < len(numbers) else -1 for n in (place - 1, place + 1)]
        before, behind = (_path(both, int(n)) for n in near)
        [rows] = both.found.pairs([number], *tables)
        shown = both.before, both.after
        pair = Pair(rows, shown, both.colours, both.limits, whole=True)
        kinds = both.found.kinds_of(number)
        other_bytes = "image-changed" in kinds
        values: dict[str, Any] = {
            "record": record,
            "old": both.before.snapshot.record,
            "page": page,
            "pair": pair,
            "kinds": kinds,
            "before": before,
            "behind": behind,
            "place": place,
            "total": len(numbers),
            "listed": pair.differences[:_LISTED],
            "most_characters": IMAGE_CHARACTERS,
            "old_src": address("whole", both.before.ref, path=path) if other_bytes else "",
            "score_of": api.score_of,
        }
        return render(request, "compared.html", **self._shared(both, record), **values)

    def overlay(self, site: Site, request: Request) -> Response:
        """Return the drawing of one image as a file."""
        record = site.record(request.path_params["ref"])
        asked = dict(asked_of(request.scope["query_string"]))
        other = site.record(asked.get("with", ""))
        shown = self._comparisons.open(site, other, record)
        rows = [each.browser.table.row(asked.get("path", "")) for each in shown]
        if rows == [None, None]:
            raise PathNotFoundError("there is no such image", path=asked.get("path", ""))
        limits = _limits(asked) if "overlap" in asked else None
        pair = Pair((rows[0], rows[1]), shown, _colours(shown), limits, whole="whole" in asked)
        kept = kept_for((request.path_params["ref"], record), (asked["with"], other))
        return Response(pair.alone(asked.get("side", "")), media_type="image/svg+xml", headers=kept)

    def _both(self, site: Site, request: Request, record: api.SnapshotRecord, page: str) -> _Both:
        asked = dict(asked_of(request.scope["query_string"]))
        old = site.record(asked["with"]) if asked.get("with") else _parent(site, record)
        if old is None:
            raise UsageError(f"what is {record.ref} to be compared with?", hint="Name a version: NAME@ID or NAME@TAG.")
        shown = self._comparisons.open(site, old, record)
        limits = _limits(asked) if page == "match" else None
        pairs = [("with", old.ref)]
        if limits is not None:
            pairs += [("overlap", f"{limits.overlap:g}"), ("score", f"{limits.score:g}")]
        wanted = api.WantedImages(*(asked.get(name, "") for name in ("kind", "label", "was", "now")))
        chosen = [(name, value) for name, value in zip(wanted._fields, wanted, strict=True) if value]
        here = address(request.url.path.split("/")[1], record.ref, [*pairs, *chosen], path=asked.get("path", ""))
        found = self._comparisons.get(site, *shown, limits, here)
        return _Both(*shown, found, limits, wanted, pairs, _colours(shown))

    def _shared(self, both: _Both, record: api.SnapshotRecord) -> dict[str, Any]:
        chosen = [(name, value) for name, value in zip(both.asked._fields, both.asked, strict=True) if value]
        return {
            "asked": both.asked,
            "pairs": both.pairs,
            "chosen": [*both.pairs, *chosen],
            "limits": both.limits,
            "colours": both.colours,
            "names": _NAMES,
            "kind_colours": COLOURS | {"was": GREY},
            "object_kinds": both.found.object_kinds,
            "kinds_there": (*both.found.image_kinds, *both.found.object_kinds),
        }


def routes(site: Site) -> list[Route]:
    """Return the pages that compare."""
    return Compare().routes(site)


def _parent(site: Site, record: api.SnapshotRecord) -> api.SnapshotRecord | None:
    """Return the version before one, if it is still there."""
    return site.catalog.snapshot(record.dataset, record.parent) if record.parent else None


def _predicted_on(site: Site, record: api.SnapshotRecord) -> api.SnapshotRecord | None:
    """Return the version on whose images a model has predicted this one, if it is still there and may be seen."""
    made = record.lineage
    if made is None or made.command != "predict" or "model" not in made.parameters:
        return None
    with suppress(SnapshotNotFoundError):
        return site.record(made.inputs[0])
    return None


def _colours(shown: tuple[Shown, Shown]) -> dict[str, tuple[int, int, int]]:
    """Return the colours of the newer side, and of classes that only the older one has."""
    return shown[0].colours | shown[1].colours


def _by_kind(found: api.Compared) -> dict[str, int]:
    counts = dict.fromkeys(found.object_kinds, 0)
    for (kind, _, _), count in found.objects().items():
        counts[kind] += count
    return counts


def _start(numbers: Any, asked: dict[str, str]) -> int:
    """Return the place where a page of images begins."""
    for name, behind in (("after", 1), ("from", 0)):
        text = asked.get(name, "")
        if text:
            if not (text.isascii() and text.isdigit() and len(text) < 10):
                raise UsageError(f"{name}: {text!r} is no number of an image")
            places = np.flatnonzero(numbers == int(text))
            return int(places[0]) + behind if len(places) else 0
    return 0


def _path(both: _Both, number: int) -> str:
    if number < 0:
        return ""
    rows = both.found.rows[:, number].tolist()
    table = both.after.browser.table if rows[1] >= 0 else both.before.browser.table
    return table.path_at(rows[1] if rows[1] >= 0 else rows[0])


def _limits(asked: dict[str, str]) -> Limits:
    found = []
    for name, least, standard in (("overlap", 0.01, 0.5), ("score", 0.0, 0.0)):
        text = asked.get(name, "")
        try:
            number = round(float(text), 4) if text else standard
        except ValueError:
            number = -1
        if not least <= number <= 1:
            raise UsageError(f"{name}: {text!r} is no number from {least:g} to 1")
        found.append(number)
    return Limits(*found)


def _choices(site: Site, record: api.SnapshotRecord) -> list[tuple[str, str]]:
    """Return references of other versions of the data set, with what is said of them, the newest first."""
    tags = tags_of(site.dataset(record.dataset))
    records = (each for each in site.catalog.snapshots(record.dataset)[::-1] if each.id != record.id)
    found = []
    for each in islice(records, _CHOICES):
        words = [*tags.get(each.id, []), each.created_at[:10], each.message[:60]]
        found.append((each.ref, ", ".join(filter(None, words))))
    return found
