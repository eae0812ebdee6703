"""Visitors who came with a link: what they are called, links for others, and the end of a visit.

Behind a proxy, which names its users and decides who comes, none of this is there.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from datacache.core.errors import UsageError
from datacache.web.access import INVITE, LEAVE, LOOPBACK, NAME, Visitor, local, name_of, set_visit
from datacache.web.addresses import asked_of
from datacache.web.rendering import render
from datacache.web.site import Site, form_of


def routes(site: Site) -> list[Route]:
    """Return the pages of visitors."""
    named = [site.get(NAME, ask), site.post(NAME, keep)]
    return [*named, site.get(INVITE, ask), site.post(INVITE, invite), site.post(LEAVE, leave)]


def ask(_site: Site, request: Request) -> Response:
    """Ask the visitor for a name, and offer to invite somebody. `to` in the address says where to go on."""
    _visitor(request)
    to = dict(asked_of(request.scope["query_string"])).get("to", "") or _page_before(request)
    return _page(request, to=to)


def keep(site: Site, request: Request, body: bytes) -> Response:
    """Keep the name in the visit."""
    visitor, form = _visitor(request), dict(form_of(body))
    to = local(form.get("to", ""))
    try:
        name = name_of(form.get("name", ""))
    except UsageError as exc:
        return _page(request, to=to, problem=exc.message, status=422)
    answer = RedirectResponse(to, 303)
    set_visit(answer, site.cookie, site.links.cookie(visitor.visit, name), secure=request.url.scheme == "https")
    return answer


def invite(site: Site, request: Request, _body: bytes) -> Response:
    """Show a new link for somebody else, at the host by which this visitor came."""
    _visitor(request)
    token = site.links.invite()
    link = f"{request.url.scheme}://{request.url.netloc}/?token={token}"
    return _page(request, to="/", link=link, nearby=request.url.hostname in LOOPBACK)


def leave(site: Site, _request: Request, _body: bytes) -> Response:
    """End the visit."""
    answer = RedirectResponse("/", 303)
    answer.delete_cookie(site.cookie, httponly=True, samesite="strict")
    return answer


def _page(
    request: Request, *, to: str, problem: str = "", link: str = "", nearby: bool = False, status: int = 200
) -> Response:
    return render(request, "visitor.html", status=status, to=local(to), problem=problem, link=link, nearby=nearby)


def _visitor(request: Request) -> Visitor:
    visitor: Visitor = request.scope["visitor"]
    if not visitor.visit:
        raise HTTPException(404)
    return visitor


def _page_before(request: Request) -> str:
    """Return the page that led here, which is one of this site's: the policy for referrers tells no others."""
    before = urlsplit(request.headers.get("referer", ""))
    if before.netloc != request.url.netloc or before.path in (NAME, INVITE):
        return "/"
    return before.path + (f"?{before.query}" if before.query else "")
