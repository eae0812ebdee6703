"""What takes longer than a request: how far it is, then what came out."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from datacache.web.rendering import render
from datacache.web.site import Site


def routes(site: Site) -> list[Route]:
    """Return the pages of jobs."""
    return [site.get("/job/{id}", job)]


def job(site: Site, request: Request) -> Response:
    """Show a job until it has ended, then lead to what it made, or show its error."""
    found = site.jobs.get(request.path_params["id"], site.may_see)
    if found.done.done():
        return RedirectResponse(found.done.result(), 303)
    return render(request, "job.html", status=202, job=found)
