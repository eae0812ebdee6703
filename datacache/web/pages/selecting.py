"""Work with images that were selected in a grid: make a version of them, or a queue. And the tags of versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from datacache import api
from datacache.core.errors import TagExistsError, UsageError
from datacache.web.addresses import address, asked_of, filter_of, written
from datacache.web.jobs import Progress
from datacache.web.pages import queues
from datacache.web.rendering import render
from datacache.web.site import Site, form_of

_MOST_SELECTED: Final = 5_000
_ROWS_AT_ONCE: Final = 2_000
_LISTED_VERSIONS: Final = 100


def routes(site: Site) -> list[Route]:
    """Return the page of tags, and what forms are sent to."""
    return [
        site.post("/select/{ref:path}", select),
        site.get("/tags/{name:path}", tags),
        site.post("/tags/{name:path}", set_tags),
    ]


def select(site: Site, request: Request, body: bytes) -> Response:
    """Begin to make a version or a queue of the images that a form names, or of all that its filter means."""
    pairs = form_of(body)
    form = dict(pairs)
    record = site.record(request.path_params["ref"])
    if form.get("do") == "queue":
        return _queue(site, request, record, pairs)
    name = api.check_name(form.get("name", ""))
    if not site.may_see(name):
        raise UsageError(f"this page may not make {name}: nobody it is for may see that")
    tags = [api.check_tag(tag) for tag in form.get("tags", "").replace(",", " ").split()]
    images, chosen_by = _meant(site, record, pairs)
    message = form.get("message", "")
    user = request.scope["visitor"].user

    def run(progress: Progress) -> str:
        progress("Images", 0, 0)
        chosen = list(images)
        progress("Images", len(chosen), len(chosen))
        # One process: this one has threads, whose locks a forked process would inherit.
        how: dict[str, Any] = {"parameters": chosen_by, "processes": 1, "progress": progress}
        made = api.subset(record.ref, chosen, name=name, tags=tags, message=message, settings=site.settings, **how)
        return address("s", made.ref)

    asked = "select", record.id, user, tuple(pairs)
    datasets = name, record.dataset
    job = site.jobs.start(asked, f"A version of {name} from {record.ref}", run, user=user, datasets=datasets)
    return RedirectResponse(address("job", job.id), 303)


def _queue(site: Site, request: Request, record: api.SnapshotRecord, pairs: list[tuple[str, str]]) -> Response:
    form, user = dict(pairs), request.scope["visitor"].user
    name = api.check_name(form.get("name", ""))
    images, _ = _meant(site, record, pairs)

    def run(progress: Progress) -> str:
        progress("Images", 0, 0)
        chosen = list(images)
        if "all" not in form:
            _check(site, record, chosen)
        progress("Images", 0, len(chosen))
        return queues.make(site, record.dataset, name, chosen, review="review" in form)

    asked = "queue", record.id, user, tuple(pairs)
    title = f"The queue {name} of {record.dataset}"
    job = site.jobs.start(asked, title, run, user=user, datasets=[record.dataset])
    return RedirectResponse(address("job", job.id), 303)


def _check(site: Site, record: api.SnapshotRecord, paths: list[str]) -> None:
    """Raise `UsageError` for a path that is no image which can be used."""
    with api.open_annotations(record.ref, processes=1, settings=site.settings) as (_, table):
        for path in sorted(paths):
            row = table.row(path)
            if row is None or row.annotation is None:
                raise UsageError(f"{path!r}: no image of {record.ref}, or one that cannot be used")


def _meant(
    site: Site, record: api.SnapshotRecord, pairs: list[tuple[str, str]]
) -> tuple[Iterator[str], dict[str, Any]]:
    """Return the paths that a form means, and how they were chosen."""
    form = dict(pairs)
    if "all" not in form:
        paths = list(dict.fromkeys(value for name, value in pairs if name == "path"))
        if not paths:
            raise UsageError("no image is selected")
        if len(paths) > _MOST_SELECTED:
            raise UsageError(
                f"more than {_MOST_SELECTED:,} images are selected", hint="Use a filter, and all it means."
            )
        return iter(paths), {"selected": len(paths)}
    wanted = filter_of(asked_of(form.get("filter", "").encode("latin-1", "replace")))
    shown = site.opened.get(record)
    rows = shown.browser.select(wanted).rows

    def usable() -> Iterator[str]:
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = shown.browser.table.rows_at(rows[start : start + _ROWS_AT_ONCE].tolist())
            yield from (row.path for row in part if row.annotation is not None)

    return usable(), {"filter": [list(pair) for pair in written(wanted)]}


def tags(site: Site, request: Request) -> Response:
    """List the tags of a data set's versions, with forms that set and remove them."""
    return _tags(site, request)


def set_tags(site: Site, request: Request, body: bytes) -> Response:
    """Set, move or remove a tag."""
    name, form = request.path_params["name"], dict(form_of(body))
    site.dataset(name)
    tag, version = form.get("tag", ""), form.get("version", "")
    if "remove" in form:
        api.untag_snapshot(name, form["remove"], settings=site.settings)
        return RedirectResponse(address("tags", name), 303)
    record = site.record(f"{name}@{version}")
    try:
        api.tag_snapshot(f"{name}@{record.id}", tag, move="move" in form, settings=site.settings)
    except TagExistsError:
        return _tags(site, request, status=409, tag=tag, version=record.id)
    except UsageError as exc:
        return _tags(site, request, status=422, problem=exc.message, tag=tag, version=record.id)
    return RedirectResponse(address("tags", name), 303)


def _tags(
    site: Site, request: Request, *, status: int = 200, problem: str = "", tag: str = "", version: str = ""
) -> Response:
    dataset = site.dataset(request.path_params["name"])
    records = site.catalog.snapshots(dataset.name)[::-1]
    of = {record.id: record for record in records}
    return render(
        request,
        "tags.html",
        status=status,
        dataset=dataset,
        tagged=[(each, of[id]) for each, id in sorted(dataset.tags.items()) if id in of],
        records=records[:_LISTED_VERSIONS],
        moves=of.get(dataset.tags.get(tag, "")) if status == 409 else None,
        problem=problem,
        tag=tag,
        version=version or dict(asked_of(request.scope["query_string"])).get("version", ""),
    )
