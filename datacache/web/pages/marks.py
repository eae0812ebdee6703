"""Mark the images of a data set in a browser: the editor's page, and the drafts that it reads and saves as JSON.

A draft belongs to its author until somebody takes it over; `api.save_draft` says when that is, and nothing here keeps
marks. What the editor saves it saves on the version that it has read, so that numbers of objects mean the same to both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from datacache import api
from datacache.core.errors import DatacacheError, DraftConflictError, PathNotFoundError, UsageError
from datacache.core.ipc import parse_object
from datacache.web.addresses import address, asked_of, filter_of, written
from datacache.web.opened import Opening, Shown
from datacache.web.pages.queues import keep, path_now
from datacache.web.rendering import hint_of, render, status_of
from datacache.web.site import Site

_CLASSES: Final = 5_000
_TYPES: Final = ((int,), (str,), (int, float), (int, float), (int, float), (int, float), (bool,))
_LINES: Final = re.compile(r'class="o[^"]*" stroke="[^"]*" d="([^"]*)"')


def routes(site: Site) -> list[Route]:
    """Return the editor's page, and what it asks for."""
    return [
        site.get("/mark/{ref:path}", mark),
        site.get("/draft/{ref:path}", _answering(read)),
        site.post("/draft/{ref:path}", _answering(write)),
    ]


def mark(site: Site, request: Request) -> Response:
    """Show the editor, or lead to the first image where none is named."""
    record = site.record(request.path_params["ref"])
    shown = site.opened.get(record)
    asked = asked_of(request.scope["query_string"])
    matches = shown.browser.select(filter_of(asked))
    pairs = written(filter_of(asked))
    one = dict(asked)
    how = {name: one[name] for name in ("queue", "queued", "review") if name in one and "queue" in one}
    if not one.get("path"):
        first = shown.browser.page(matches, size=1).rows
        if not first:
            raise PathNotFoundError(f"{record.ref} has no such images", path="")
        return RedirectResponse(address("mark", record.dataset, pairs, path=first[0].path), 303)
    now = path_now(shown, one["path"])
    if now not in ("", one["path"]):
        return RedirectResponse(address("mark", record.dataset, [*pairs, *how.items()], path=now), 303)
    shown, row = site.row(request)
    before, place, behind = shown.browser.neighbours(matches, row.path)
    if how:
        how.setdefault("queued", row.path)

    def at(path: str) -> str:
        return address("mark", record.dataset, pairs, path=path) if path else ""

    return render(
        request,
        "mark.html",
        record=record,
        row=row,
        pairs=pairs,
        before=at(before),
        behind=at(behind),
        place=place,
        total=len(matches.rows),
        here=address("mark", record.dataset, [*pairs, *how.items()], path=row.path),
        queue=how.get("queue", ""),
        review="review" in how,
        how=how,
    )


def _answering(page: Callable[..., dict[str, Any]]) -> Callable[..., Response]:
    """Have a page answer in JSON, its errors, too."""

    def answer(site: Site, request: Request, *body: bytes) -> Response:
        try:
            return JSONResponse(page(site, request, *body))
        except Opening as exc:
            return JSONResponse({"error": f"the version is being opened: {exc}"}, 202)
        except DatacacheError as exc:
            status = status_of(exc)
            told: dict[str, Any] = {"error": exc.message, "hint": hint_of(request, exc)}
            if isinstance(exc, DraftConflictError):
                shown, row = site.row(request)
                told["draft"] = _draft(site, request, shown, row)
            return JSONResponse(told, status)

    return answer


def read(site: Site, request: Request) -> dict[str, Any]:
    """Return all that the editor needs to know of an image."""
    shown, row = site.row(request)
    return _state(site, request, shown, row)


def write(site: Site, request: Request, body: bytes) -> dict[str, Any]:
    """Save, discard or take over the draft of an image."""
    shown, row = site.row(request)
    author = request.scope["visitor"].user
    if not author:
        raise UsageError("nobody knows who marks this", hint="Say your name first.")
    asked = _checked(body)
    record, rev = shown.snapshot.record, asked["rev"]
    if not record.id.startswith(api.parse_ref(request.path_params["ref"]).version):
        # The newest one may be another than was read: its objects that the marks do not name would be deleted.
        raise UsageError("marks are saved on the version that was read", hint=f"Name it by its id: {record.ref}")
    if asked["discard"]:
        api.discard_draft(site.catalog, record.dataset, row.path, author=author, rev=rev)
        return _state(site, request, shown, row)
    saved = api.save_draft(
        site.catalog,
        row,
        record,
        asked["objects"],
        labels=asked["labels"],
        author=author,
        rev=rev,
        done=asked["done"],
        take_over=asked["take_over"],
    )
    if asked["take_over"]:
        return _state(site, request, shown, row)
    return {"draft": _told(saved, row, author), "colours": _colours(shown, saved), "lease": keep(site, request)}


def _state(site: Site, request: Request, shown: Shown, row: api.Row) -> dict[str, Any]:
    user, csrf = request.scope["visitor"].user, request.scope["visitor"].csrf
    annotation, table = row.annotation, shown.browser.table
    if annotation is None:
        raise UsageError("this image cannot be marked: it is none that can be read")
    draft = api.draft(site.catalog, shown.snapshot.record.dataset, row.path)
    told, why = "", ""
    if draft is not None and api.is_stale(row, draft):
        told = f"{draft.author} began to mark this image on another version, which says something else of it."
    elif draft is not None and draft.author != user:
        when = datetime.fromtimestamp(draft.saved_at, UTC)
        told = (
            f"{draft.author} marks this image, saved at {when:%Y-%m-%d %H:%M:%S} UTC{', done' if draft.done else ''}."
        )
    if site.read_only:
        why = "This page is for reading only"
    elif not user:
        why = "Say your name first: marks have one"
    counts = sorted(table.labels.values(), key=lambda each: (-each.boxes, -each.images, each.label))[:_CLASSES]
    drawn = draft if draft is not None and not api.is_stale(row, draft) else None
    return {
        "before": [_object(box, annotation, shown) for box in annotation.boxes],
        "labels": annotation.labels,
        "classes": [(each.label, api.hex_colour(shown.colours[each.label])) for each in counts],
        "whole": bool(annotation.labels) or any(each.images and not each.boxes for each in counts),
        "draft": None if draft is None else _told(draft, row, user),
        "colours": {} if drawn is None else _colours(shown, drawn),
        "told": told,
        "why": why,
        "may": not why,
        "csrf": csrf,
    }


def _draft(site: Site, request: Request, shown: Shown, row: api.Row) -> dict[str, Any] | None:
    draft = api.draft(site.catalog, shown.snapshot.record.dataset, row.path)
    return None if draft is None else _told(draft, row, request.scope["visitor"].user)


def _told(draft: api.Draft, row: api.Row, user: str) -> dict[str, Any]:
    return {
        "rev": draft.rev,
        "author": draft.author,
        "saved_at": draft.saved_at,
        "done": draft.done,
        "mine": draft.author == user,
        "stale": api.is_stale(row, draft),
        "objects": draft.objects,
        "labels": draft.labels,
    }


def _object(box: api.Box, annotation: api.Annotation, shown: Shown) -> dict[str, Any]:
    """Return an object of the version; of one that is more than a box, the lines that show it."""
    extra, shape = box.extra, []
    if extra is not None and (extra.outline is not None or extra.keypoints is not None):
        alone, size = annotation._replace(boxes=(box,)), (annotation.width, annotation.height)
        skeletons = shown.browser.table.skeletons
        shape = _LINES.findall(api.svg_objects(alone, shown.colours, *size, skeletons=skeletons, digits=1))
        shape = shape or [f"M{box.x1} {box.y1}H{box.x2}V{box.y2}H{box.x1}z"]
    return {
        "label": box.label,
        "x1": box.x1,
        "y1": box.y1,
        "x2": box.x2,
        "y2": box.y2,
        "score": None if extra is None else extra.score,
        "shape": shape,
    }


def _colours(shown: Shown, draft: api.Draft) -> dict[str, str]:
    """Return the colours of classes that the version does not have."""
    new = {each.label for each in draft.objects} - shown.colours.keys()
    return {label: api.hex_colour(api.colours_of([label])[label]) for label in sorted(new)}


def _checked(body: bytes) -> dict[str, Any]:
    """Return what was sent, with values of the right types. `UsageError` for all else."""
    try:
        sent = parse_object(body)
    except ValueError as exc:
        raise UsageError(f"what was sent is no JSON: {exc}") from exc
    labels, objects = sent.get("labels"), sent.get("objects", [])
    flags = {name: sent.get(name, False) for name in ("done", "take_over", "discard")}
    right = isinstance(sent.get("rev"), str) and all(isinstance(flag, bool) for flag in flags.values())
    right = right and (labels is None or (isinstance(labels, list) and all(isinstance(each, str) for each in labels)))
    if not right or not isinstance(objects, list):
        raise UsageError("what was sent is no draft")
    return {"rev": sent["rev"], "labels": labels, "objects": [*_objects(objects)], **flags}


def _objects(sent: list[Any]) -> Iterable[api.MarkedObject]:
    for each in sent:
        values = each if isinstance(each, list) and len(each) == len(_TYPES) else []
        if not values or any(type(value) not in kinds for value, kinds in zip(values, _TYPES, strict=True)):
            raise UsageError("an object is its number, label, left, top, right, bottom and whether it was accepted")
        yield api.MarkedObject(*values)
