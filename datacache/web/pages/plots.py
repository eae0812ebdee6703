"""Plots: the images of a version that a filter means, where a bar leads to its images; a data set over its versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from datacache import api
from datacache.core.errors import UsageError
from datacache.web import charts
from datacache.web.addresses import address, asked_of, filter_of, narrowing, written
from datacache.web.filter_bar import filter_values
from datacache.web.opened import Shown
from datacache.web.rendering import render
from datacache.web.site import Site

_MOST_VERSIONS: Final = 60
_MOST_CLASSES: Final = 60
_MOST_SPLIT: Final = 24
_LONG = 60
"""Characters of a condition, which each link repeats: a page stays below 100 KB."""
_TITLES: Final = {
    "objects": "Objects in an image",
    "width": "Width of images, px",
    "height": "Height of images, px",
    "aspect": "Width : height of images",
    "min_side": "Shortest side of the smallest box, px",
    "min_area": "Smallest object, part of the image",
    "max_area": "Largest object, part of the image",
}
_TITLES_OF_OBJECTS: Final = {
    "side": "Shorter side of boxes, px",
    "area": "Area of boxes, part of the image",
    "aspect": "Width : height of boxes",
}
_WHOLE: Final = ("objects", "width", "height")
_PARTS: Final = ("area", "min_area", "max_area")


def routes(site: Site) -> list[Route]:
    """Return the pages of plots."""
    return [site.get("/plots/{ref:path}", plots), site.get("/plots-of-objects/{ref:path}", plots_of_objects)]


def plots(site: Site, request: Request) -> Response:
    """Show numbers of images and objects by class, split and size; of a name alone, over its versions."""
    if "@" not in request.path_params["ref"]:
        return _over_versions(site, request)
    record = site.record(request.path_params["ref"])
    shown = site.opened.get(record)
    asked = asked_of(request.scope["query_string"])
    values = filter_values(shown, asked) | {"record": record, "colours": shown.colours, "problem": "", "hint": ""}
    try:
        wanted = filter_of(asked)
        matches = shown.browser.select(wanted)
    except UsageError as exc:
        return render(request, "plots.html", status=422, **values | {"problem": exc.message, "hint": exc.hint})
    narrowed = narrowing(record.ref, wanted)
    few = 3 if len(wanted.query.where) > _LONG else 1
    labels = sorted(matches.labels, key=lambda each: (-each.boxes, -each.images, each.label))
    held = [each for each in labels if each.images]
    values |= {
        "pairs": written(wanted),
        "leads": narrowed(""),
        "total": len(matches.rows),
        "classes": [(each, narrowed(f"has({each.label!r})")) for each in held[: _MOST_CLASSES // few]],
        "more_classes": len(held[_MOST_CLASSES // few :]),
        "most": max((each.boxes or each.images for each in held), default=1),
        "charts": [
            (_TITLES[each.field], _chart(each, narrowed))
            for each in api.image_histograms(shown.browser, matches)
            if each.bars
        ],
        "by_split": _by_split(shown, matches, [each.label for each in held[: _MOST_SPLIT // few]], narrowed),
    }
    values["names"] = shown.browser.split_names or ()
    return render(request, "plots.html", **values)


def plots_of_objects(site: Site, request: Request) -> Response:
    """Show where the objects on the images of a filter lie, and their sizes and shapes."""
    record = site.record(request.path_params["ref"])
    shown = site.opened.get(record)
    wanted = filter_of(asked_of(request.scope["query_string"]))
    matches = shown.browser.select(wanted)
    narrowed = narrowing(record.ref, wanted)
    found = api.object_plots(shown.browser, matches)
    drawn = []
    for measure, bars in found.bars.items():
        listed = [
            charts.Bar(
                _between(measure, each.low, each.high),
                _number(measure, each.low).replace(",", ""),
                each.objects,
                narrowed(each.condition),
                f"{each.objects:,} objects on {each.images:,} images",
            )
            for each in bars
        ]
        drawn.append((_TITLES_OF_OBJECTS[measure], charts.columns(listed, at_edges=True)))
    values: dict[str, Any] = {
        "record": record,
        "charts": drawn,
        "cells": charts.heat_map(found.cells),
        "numbers": found.cells,
    }
    return render(request, "plots_of_objects.html", **values, pairs=written(wanted))


def _over_versions(site: Site, request: Request) -> Response:
    """Show how the numbers of a data set have changed, the oldest version at the left."""
    name = request.path_params["ref"]
    site.dataset(name)
    records = site.catalog.snapshots(name)[::-1]
    begin = dict(asked_of(request.scope["query_string"])).get("from", "")
    start = next((n for n, record in enumerate(records) if begin and record.id.startswith(begin)), 0)
    shown = records[start : start + _MOST_VERSIONS]
    older = records[start + _MOST_VERSIONS].id if len(records) > start + _MOST_VERSIONS else ""
    versions = [(record, site.counts(record)) for record in shown]

    def chart(number: Callable[[api.SnapshotRecord, api.VersionCounts | None], int | None]) -> charts.Steps:
        numbers = [(record, number(record, counts)) for record, counts in reversed(versions)]
        return charts.steps(
            [
                None if n is None else charts.Bar(each.id[:12], each.created_at[:10], n, address("s", each.ref))
                for each, n in numbers
            ]
        )

    drawn = [
        ("Images", chart(lambda _, counts: counts.images if counts else None)),
        ("Objects", chart(lambda _, counts: counts.objects if counts else None)),
        ("Classes", chart(lambda _, counts: counts.classes if counts else None)),
        ("Files", chart(lambda record, _: record.files)),
        ("Bytes", chart(lambda record, _: record.total_bytes)),
    ]
    values = {"name": name, "versions": versions, "charts": drawn, "older": older, "total": len(records)}
    unread = sum(counts is None for _, counts in versions)
    return render(request, "over_versions.html", **values, start=start, unread=unread)


def _by_split(
    shown: Shown, matches: api.Matches, labels: Sequence[str], narrowed: Callable[..., str]
) -> list[tuple[str, list[tuple[int, str]]]]:
    """Return for all images, and for those of each label, the number in each split, and the address of these."""
    rows = []
    for label, numbers in api.split_counts(shown.browser, matches, labels).items():
        condition = f"has({label!r})" if label else ""
        names = shown.browser.split_names or ()
        addresses = [*(narrowed(condition, name) for name in names), ""]
        rows.append((label, list(zip(numbers, addresses, strict=True))))
    return rows


def _chart(found: api.Histogram, narrowed: Callable[..., str]) -> charts.Columns:
    bars = [
        charts.Bar(_name(found.field, each), _mark(found.field, each), each.images, narrowed(each.condition))
        for each in found.bars
    ]
    return charts.columns(bars, at_edges=any(each.high is not None for each in found.bars))


def _name(field: str, bar: api.HistogramBar) -> str:
    """Say which numbers a bar has."""
    if bar.high is None:
        return f"{bar.low:,.0f}"
    if field in _WHOLE and bar.high < float("inf"):
        return f"{bar.low:,} to {bar.high - 1:,}" if bar.high - bar.low > 1 else f"{bar.low:,}"
    return _between(field, bar.low, bar.high)


def _between(field: str, low: float, high: float) -> str:
    if high == float("inf"):
        return f"{_number(field, low)} and more"
    return f"{_number(field, low)} to less than {_number(field, high)}"


def _mark(field: str, bar: api.HistogramBar) -> str:
    return f"{bar.low:.0f}" if bar.high is None else _number(field, bar.low).replace(",", "")


def _number(field: str, number: float) -> str:
    return f"{100 * number:g} %" if field in _PARTS else f"{number:,g}"
