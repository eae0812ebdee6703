"""Let in whoever has the link of this run or comes through a proxy that names the user, and nobody else.

`Guard` stands before all pages. In its order it asks: is the `Host` one of ours (DNS rebinding)? Is the path plain?
Does the browser say that another site asks? Who is it: a user that the proxy's header names, the owner of a signed
cookie, or the one visitor that a link's token is good for? May this be written, and does the page's own CSRF token come
along? What is refused is logged, without the query, which may hold a token. Every answer has a strict policy for what
it may load.

Cookies are signed with a key of this process: after a restart the new link is needed. The token is in no log of ours
and good once; for the next visitor there is a new one. One event loop; `OneTimeLinks` may be used by any thread.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
LEAVE: Final = "/leave"
"""Ends a visit, and writes nothing: allowed where all else that writes is not."""
_COOKIE_S: Final = 7 * 86400
_BODY_BYTES: Final = 2**20
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    # Not no-referrer: with that, browsers say `Origin: null` of forms of our own pages.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Visitor(NamedTuple):
    """Whoever a request comes from, in the request's scope as `visitor`."""

    user: str
    """As the proxy names it; '' where a cookie says only that it is one who had the link."""
    csrf: str
    """The token that forms and htmx send along."""


class OneTimeLinks:
    """The token in the link, good for one visitor, and what is signed with this run's key."""

    def __init__(self, announce: Callable[[str], None] = lambda _token: None) -> None:
        """`announce` is told the token that is good from then on, each time the one before was used."""
        self._key = secrets.token_bytes(32)
        self._announce = announce
        self.token = secrets.token_urlsafe(32)

    def use(self, token: str) -> bool:
        """Tell whether this is the token; it is good no more."""
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
            return False
        self.token = secrets.token_urlsafe(32)
        self._announce(self.token)
        return True

    def cookie(self) -> str:
        """Return a value that `visit` knows again."""
        visit = f"{secrets.token_hex(16)}.{int(time.time()) + _COOKIE_S}"
        return f"{visit}.{self.sign('cookie', visit)}"

    def visit(self, cookie: str) -> str | None:
        """Return the visit that a cookie is of; None for one that is forged or too old."""
        visit, _, signature = cookie.rpartition(".")
        signed = hmac.compare_digest(signature.encode("utf-8", "replace"), self.sign("cookie", visit).encode())
        return visit if signed and int(visit.partition(".")[2]) > time.time() else None

    def sign(self, purpose: str, text: str) -> str:
        """Return a signature of a text."""
        return hmac.new(self._key, f"{purpose}\0{text}".encode("utf-8", "replace"), sha256).hexdigest()


class Refused(Exception):  # noqa: N818 - an answer, not an error
    """A request that is not answered, and why."""

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason)
        self.status = status


class Guard:
    """ASGI middleware; see the module."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        links: OneTimeLinks,
        hosts: Collection[str] = LOOPBACK,
        cookie: str = "datacache_ui",
        user_header: str = "",
        read_only: bool = False,
    ) -> None:
        """`hosts` are names without ports. `cookie` tells several servers of one machine apart: cookies know no ports.
        `user_header` is the header in which a proxy names the user, '' where there is none."""
        self._app = app
        self._links = links
        self._hosts = frozenset(host.lower() for host in hosts)
        self._cookie = cookie
        self._user_header = user_header
        self._read_only = read_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have the pages answer it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            _log.warning("refused: a connection of type %s to %r", scope["type"], scope["path"])
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            answer, receive = await self._check(scope, receive)
        except Refused as refused:
            client = (scope.get("client") or ("?",))[0]
            _log.warning("refused: %s (%s %r from %s)", refused, scope["method"], scope["path"], client)
            answer = PlainTextResponse(f"Refused: {refused}.\n", refused.status)
        await (answer or self._app)(scope, receive, with_headers)

    async def _check(self, scope: Scope, receive: Receive) -> tuple[Response | None, Receive]:
        """Raise `Refused`, or return an answer, or None where the pages are to answer; and what is still to be read."""
        headers = Headers(scope=scope)
        host = self._host(headers)
        path = scope["path"]
        if "\0" in path or "\\" in path or any(part in (".", "..") for part in path.split("/")):
            raise Refused("the path leads outside", 400)
        writes = scope["method"] not in ("GET", "HEAD")
        _check_site(headers, f"{scope['scheme']}://{host}", writes=writes)
        visitor = self._visitor(headers)
        asked = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        token = next((value for name, value in asked if name == "token"), None)
        if token is not None and not writes:
            if visitor is None and not self._links.use(token):
                raise Refused("the link was used before, or is of an earlier run; a new one was printed", 401)
            rest = urlencode([pair for pair in asked if pair[0] != "token"])
            return self._welcome(path, rest, new=visitor is None, secure=scope["scheme"] == "https"), receive
        if visitor is None:
            raise Refused("open the link that dsctl ui has printed", 401)
        scope["visitor"] = visitor
        if writes:
            receive = await self._check_write(scope, headers, visitor, receive)
        return None, receive

    def _host(self, headers: Headers) -> str:
        found = headers.getlist("host")
        host = found[0].lower() if len(found) == 1 else ""
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name not in self._hosts:
            raise Refused("the request is for another host; the setting ui_hosts names those there are", 421)
        return host

    def _visitor(self, headers: Headers) -> Visitor | None:
        if self._user_header:
            named = headers.getlist(self._user_header)
            if len(named) > 1:
                raise Refused(f"several headers {self._user_header} name the user")
            if named and named[0].strip():
                user = named[0].strip()
                return Visitor(user, self._links.sign("csrf", f"user {user}"))
        try:
            cookies: Mapping[str, Any] = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return None
        visit = self._links.visit(cookies[self._cookie].value) if self._cookie in cookies else None
        return None if visit is None else Visitor("", self._links.sign("csrf", visit))

    def _welcome(self, path: str, query: str, *, new: bool, secure: bool) -> Response:
        """Have the browser ask again without the token: a redirect would come without the strict cookie where another
        site or program had the link."""
        from html import escape

        target = escape("/" + path.lstrip("/") + (f"?{query}" if query else ""))
        answer = HTMLResponse(
            f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={target}">'
            f'<title>datacache</title><a href="{target}">Go on</a>'
        )
        if new:
            answer.set_cookie(
                self._cookie, self._links.cookie(), max_age=_COOKIE_S, httponly=True, samesite="strict", secure=secure
            )
        return answer

    async def _check_write(self, scope: Scope, headers: Headers, visitor: Visitor, receive: Receive) -> Receive:
        if scope["method"] != "POST":
            raise Refused(f"nothing answers {scope['method']}", 405)
        if self._read_only and scope["path"] != LEAVE:
            raise Refused("this page is for reading only")
        body = await _read(receive)
        given = headers.get("x-csrf-token")
        if given is None and headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            given = dict(parse_qsl(body.decode("utf-8", "replace"))).get("csrf")
        if given is None or not hmac.compare_digest(given.encode("utf-8", "replace"), visitor.csrf.encode()):
            raise Refused("the form is of an earlier visit; load the page again")
        sent = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Message:
            return next(sent, None) or await receive()

        return again


def _check_site(headers: Headers, own: str, *, writes: bool) -> None:
    """Raise `Refused` where a browser says that another site asks. Following a link from there is allowed."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if origin is not None and origin not in (own, "null"):
        raise Refused("another site asks")
    if writes and (site != "same-origin" if site is not None else origin != own):
        raise Refused("another site writes")
    if site in ("cross-site", "same-site") and headers.get("sec-fetch-mode", "navigate") != "navigate":
        raise Refused("another site shows parts of this page")


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message: Message = await receive()
        body += bytes(message.get("body", b""))
        if len(body) > _BODY_BYTES:
            raise Refused("the form is too large", 413)
        if not message.get("more_body"):
            return body
