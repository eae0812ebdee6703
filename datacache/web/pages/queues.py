"""Queues of images that several people mark and review: how far they are, and the way to the next image.

Whose an image is knows the queue alone, whose leases outlast this server: a page that asks again gets the same image.
"""

from __future__ import annotations

import glob
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from datacache import api
from datacache.core.errors import DatacacheError, LeaseLostError, TasksError, UsageError
from datacache.web.addresses import address, asked_of
from datacache.web.opened import Shown
from datacache.web.rendering import render
from datacache.web.site import Site, form_of

_FITTING: Final = 50
"""Images that are looked at, of those that may be one which has moved."""


def routes(site: Site) -> list[Route]:
    """Return the page of a data set's queues, and what its forms are sent to."""
    return [site.get("/queue/{name:path}", queues), site.post("/queue/{name:path}", act)]


def queues(site: Site, request: Request) -> Response:
    """List the queues of a data set, and how far they are."""
    return _page(site, request)


def act(site: Site, request: Request, body: bytes) -> Response:
    """Lead to the next image of a queue, once the one before is finished or given back; or remove the queue."""
    name, form = request.path_params["name"], dict(form_of(body))
    site.dataset(name)
    queue, user, review = _queue(site, name, form.get("queue", "")), request.scope["visitor"].user, "review" in form
    do = form.get("do", "")
    if do == "remove":
        queue.remove()
        return RedirectResponse(address("queue", name), 303)
    if not user:
        return RedirectResponse(address("name", to=address("queue", name)), 303)
    shown = site.opened.get(site.record(name))
    path = dict(asked_of(request.scope["query_string"])).get("path", "")
    if do in ("finish", "give_back") and not _end(queue, user, path, review=review, done=do == "finish"):
        told = f"{path} was given to somebody else, since nothing was saved for ten minutes. Your marks are a draft."
        return _page(site, request, told=told, status=409)
    if do == "give_back":
        return RedirectResponse(address("queue", name), 303)
    while isinstance(image := queue.next_image(user, review=review), api.QueuedImage):
        found = path_now(shown, image.path)
        if found:
            again = "1" if review else ""
            return RedirectResponse(
                address("mark", name, path=found, queue=queue.name, queued=image.path, review=again), 303
            )
        queue.finish(image)  # the newest version has no such image: there is nothing to mark
    waits = image is not None
    what = "review" if review else "mark"
    told = f"Nothing is left for you to {what} in {queue.name}."
    return _page(site, request, told=f"Others have what is left to {what}. Come back later." if waits else told)


def keep(site: Site, request: Request) -> str:
    """Renew the lease of the image that a request is about, if it is of a queue. Return what there is to tell."""
    asked = dict(asked_of(request.scope["query_string"]))
    if "queue" not in asked:
        return ""
    dataset, user = api.parse_ref(request.path_params["ref"]).dataset, request.scope["visitor"].user
    try:
        image = _queue(site, dataset, asked["queue"]).next_image(user, review="review" in asked)
    except DatacacheError as exc:  # the marks are saved, whatever becomes of the queue
        return exc.message
    if isinstance(image, api.QueuedImage) and image.path == asked.get("queued"):
        return ""
    return "The queue has given this image to somebody else, since nothing was saved for ten minutes. It is saved here."


def _end(queue: api.MarkingQueue, user: str, path: str, *, review: bool, done: bool) -> bool:
    """Finish an image or give it back; False where it is somebody else's by now."""
    image = queue.next_image(user, review=review)
    if not isinstance(image, api.QueuedImage) or image.path != path:
        return False
    try:
        (queue.finish if done else queue.give_back)(image)
    except LeaseLostError:
        return False
    return True


def _queue(site: Site, dataset: str, name: str) -> api.MarkingQueue:
    """Return a queue of a data set. `TasksError` for one that is not there, or another data set's: the same."""
    queue = site.marking_queue(name)
    try:
        found = queue.progress().dataset
    except TasksError:
        found = ""
    if found != dataset:
        raise TasksError(f"{dataset} has no queue {name}")
    return queue


def path_now(shown: Shown, path: str) -> str:
    """Return the path of an image in the version: commits move images below the folders that the format has. '' where
    no image fits, or two do as well as each other."""
    row = shown.browser.table.row(path)
    if row is None:
        query = api.Query(where=f"like(path, {f'*/{glob.escape(path)}'!r})")
        rows = shown.browser.page(shown.browser.select(api.Filter(query=query)), size=_FITTING).rows
        # One in a deeper folder is another image, which has moved, too.
        depths = sorted((each.path.count("/"), n) for n, each in enumerate(rows))
        alone = depths and (len(depths) == 1 or depths[0][0] < depths[1][0])
        row = rows[depths[0][1]] if alone else None
    return row.path if row is not None and row.annotation is not None else ""


def _page(site: Site, request: Request, *, told: str = "", status: int = 200) -> Response:
    dataset = site.dataset(request.path_params["name"])
    found: list[Any] = api.marking_queues(dataset.name, site.settings)
    return render(request, "queues.html", status=status, dataset=dataset, queues=found, told=told)


def make(site: Site, dataset: str, name: str, paths: list[str], *, review: bool) -> str:
    """Make a queue, and return the address of its page."""
    if not paths:
        raise UsageError("no image fits, and a queue without images is of no use", hint="Ask for less.")
    try:
        site.marking_queue(name).progress()
    except TasksError:
        api.make_queue(name, dataset, paths, review=review, settings=site.settings)
        return address("queue", dataset)
    raise UsageError(f"there is a queue {name}", hint="Take another name.")
