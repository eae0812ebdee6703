"""The drafts of a data set: what is marked and in no version yet, and the commit that makes a version of it."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from datacache import api
from datacache.core.errors import UsageError
from datacache.web.addresses import address, asked_of
from datacache.web.jobs import Progress
from datacache.web.opened import Shown
from datacache.web.rendering import render
from datacache.web.site import Site, form_of
from datacache.web.tiles import TILE_CHARACTERS, Tile

_LISTED: Final = 24
_FORMATS: Final = ("yolo", "coco", "voc", "cvat", "labelme", "label-studio", "yolo-predictions")
_LEFT: Final = ("not done", "another author", "stale", "image gone", "saved again", "left out")


def routes(site: Site) -> list[Route]:
    """Return the page of drafts, and what its forms are sent to."""
    return [site.get("/drafts/{name:path}", drafts), site.post("/drafts/{name:path}", act)]


class Drawn(NamedTuple):
    """A draft as the page shows it."""

    draft: api.Draft
    tile: Tile | None
    """The picture with what the version says; None where the newest version has no such image."""
    svg: Markup
    """The objects as they would be."""
    state: str
    changes: str


def drafts(site: Site, request: Request) -> Response:
    """List the drafts, some at a time, each as a picture of what was and what would be."""
    name = request.path_params["name"]
    site.dataset(name)
    record = site.record(name)
    shown = site.opened.get(record)
    asked = dict(asked_of(request.scope["query_string"]))

    def counted(name: str) -> int | None:
        text = asked.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None

    found = api.drafts(site.catalog, name, after=asked.get("after", ""), limit=_LISTED + 1)
    counts = api.count_drafts(site.catalog, name)
    return render(
        request,
        "drafts.html",
        record=record,
        counts=counts,
        drawn=[_drawn(shown, draft) for draft in found[:_LISTED]],
        after=found[_LISTED - 1].key if len(found) > _LISTED else "",
        formats=_FORMATS,
        unannotated=shown.browser.table.meta.get("format") == "none",
        committed=counted("images"),
        left=[(why, times) for why in _LEFT if (times := counted(why))],
    )


def act(site: Site, request: Request, body: bytes) -> Response:
    """Discard a draft, or begin a commit."""
    name, pairs = request.path_params["name"], form_of(body)
    site.dataset(name)
    form, user = dict(pairs), request.scope["visitor"].user
    if "discard" in form:
        path = dict(asked_of(request.scope["query_string"])).get("path", "")
        api.discard_draft(site.catalog, name, path, author=user, rev=form.get("rev", ""))
        return RedirectResponse(address("drafts", name), 303)
    return _commit(site, name, pairs, user)


def _commit(site: Site, name: str, pairs: list[tuple[str, str]], user: str) -> Response:
    form = dict(pairs)
    authors = frozenset(unquote(value) for key, value in pairs if key == "author")
    if not authors:
        raise UsageError("nobody is chosen whose marks should go in")
    to = form.get("to") or None
    if to is not None and to not in _FORMATS:
        raise UsageError(f"{to!r} is no format that this page writes")
    how: dict[str, Any] = {
        "message": form.get("message", ""),
        "tags": [api.check_tag(tag) for tag in form.get("tags", "").replace(",", " ").split()],
        "to": to,
        "authors": authors,
        "only_done": "only_done" in form,
        "skip_predictions": "skip_predictions" in form,
    }

    def run(progress: Progress) -> str:
        # One process: this one has threads, whose locks a forked process would inherit.
        made = api.commit_marks(name, settings=site.settings, processes=1, progress=progress, **how)
        if made.images and not made.left:
            return address("s", made.record.ref)
        left = Counter(each.why for each in made.left)
        return address("drafts", name, sorted((why, str(times)) for why, times in left.items()), images=made.images)

    asked = "commit", name, user, tuple(pairs)
    job = site.jobs.start(asked, f"Marks become a version of {name}", run, user=user, datasets=[name])
    return RedirectResponse(address("job", job.id), 303)


def _drawn(shown: Shown, draft: api.Draft) -> Drawn:
    row = shown.browser.table.row(draft.path)
    if row is None or row.annotation is None:
        return Drawn(draft, None, Markup(), "the newest version has no such image", "")
    tile = Tile(shown, row, ())
    if api.is_stale(row, draft):
        return Drawn(draft, tile, Markup(), "another version has changed the image since; it is left out", "")
    after = api.marked(row, draft)
    new = {box.label for box in after.boxes} - shown.colours.keys()
    colours = shown.colours | api.colours_of(new)
    svg = api.svg_objects(after, colours, tile.width, tile.height, skeletons=shown.browser.table.skeletons)
    drawn = Markup(svg if len(svg) <= TILE_CHARACTERS else "")  # noqa: S704 - see svg_objects
    return Drawn(draft, tile, drawn, "done" if draft.done else "not done", _changes(row.annotation, after, draft))


def _changes(before: api.Annotation, after: api.Annotation, draft: api.Draft) -> str:
    kept = [(mark.of, box) for mark, box in zip(draft.objects, after.boxes, strict=True) if mark.of >= 0]
    changed = sum(1 for of, box in kept if box[:5] != before.boxes[of][:5])
    accepted = sum(1 for mark in draft.objects if mark.accepted)
    counts = {
        "new": len(after.boxes) - len(kept),
        "deleted": len(before.boxes) - len(kept),
        "changed": changed,
        "accepted": accepted,
        "labels changed": int(after.labels != before.labels),
    }
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "as it was"
