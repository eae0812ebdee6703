"""Let in whoever has a link of this run or comes through a proxy that names the user, and nobody else.

`Guard` stands before all pages. In its order it asks: is the `Host` one of ours (DNS rebinding)? Is the path plain?
Does the browser say that another site asks? Who is it: the user that the proxy's header names, or, where no proxy names
users, the owner of a signed cookie or the one visitor that a link's token is good for? May this be written, and does
the page's own CSRF token come along? What is refused is logged, without the query, which may hold a token. Every answer
has a strict policy for what it may load. Beside the guard stands `/healthz`, for probes: it tells nothing.

Cookies are signed with a key of the home (`read_key`), so that visits outlast a restart. A token is in no log of ours
and good once. One event loop; `OneTimeLinks` may be used by any thread.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import stat
import threading
import time
import unicodedata
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

from anyio import fail_after
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from datacache.core.disk import sync_folder, write_all
from datacache.core.errors import UsageError

_log = logging.getLogger(__name__)
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
LEAVE: Final = "/leave"
NAME: Final = "/name"
INVITE: Final = "/invite"
HEALTH: Final = "/healthz"
_WRITE_NOTHING: Final = (LEAVE, NAME, INVITE)
"""They end a visit, name the visitor, and make a link: allowed where all else that is posted is not."""
MOST_NAME: Final = 40
_MOST_USER: Final = 200
_COOKIE_S: Final = 7 * 86400
_INVITATION_S: Final = 3600
_INVITATIONS: Final = 20
_KEY_FILE: Final = "ui.key"
_KEY_BYTES: Final = 32
_BODY_BYTES: Final = 2**20
_BODY_S: Final = 30.0
_LOGGED: Final = 200
"""Characters of a path that was refused."""
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
    """As the proxy names it, or as the visitor does who came with a link; '' for one who has not said it yet."""
    csrf: str
    """The token that forms and htmx send along."""
    visit: str = ""
    """What the cookie of a visitor says who came with a link; '' behind a proxy."""


class OneTimeLinks:
    """Tokens in links, each good for one visitor, and what is signed: cookies of visits and tokens of forms."""

    def __init__(
        self, announce: Callable[[str], None] = lambda _token: None, *, key: bytes | None = None, site: str = ""
    ) -> None:
        """`announce` is told the token that is good from then on, each time the one before was used. Without a `key`
        visits end with the process. `site` tells pages apart that have a key in common: what one signs is not good for
        another."""
        self._key = key or secrets.token_bytes(_KEY_BYTES)
        self._site = site
        self._announce = announce
        self._lock = threading.Lock()  # guards token and _invitations
        self._invitations: dict[str, float] = {}
        self.token = secrets.token_urlsafe(32)

    def use(self, token: str) -> bool:
        """Tell whether this is a token that is good; it is good no more."""
        with self._lock:
            self._forget_old_locked()
            invited = [each for each in self._invitations if _same(token, each)]
            for each in invited:
                del self._invitations[each]
            if not _same(token, self.token):
                return bool(invited)
            self.token = secrets.token_urlsafe(32)
        self._announce(self.token)
        return True

    def invite(self) -> str:
        """Return a token for somebody else, good for an hour. `UsageError` where there are too many."""
        with self._lock:
            self._forget_old_locked()
            if len(self._invitations) >= _INVITATIONS:
                raise UsageError(
                    f"there are {_INVITATIONS} links that nobody has used yet", hint="Each is good for an hour."
                )
            token = secrets.token_urlsafe(32)
            self._invitations[token] = time.monotonic() + _INVITATION_S
            return token

    def _forget_old_locked(self) -> None:
        now = time.monotonic()
        self._invitations = {token: until for token, until in self._invitations.items() if until > now}

    def cookie(self, visit: str = "", name: str = "") -> str:
        """Return a value that `visitor` knows again: of a new visit, or of one whose visitor has said a name."""
        visit = visit or f"{secrets.token_hex(16)}.{int(time.time()) + _COOKIE_S}"
        value = f"{visit}.{urlsafe_b64encode(name.encode()).decode().rstrip('=')}"
        return f"{value}.{self.sign('cookie', value)}"

    def visitor(self, cookie: str) -> Visitor | None:
        """Return the visitor that has a cookie; None for one that is forged, too old, or of another page."""
        value, _, signature = cookie.rpartition(".")
        if not _same(signature, self.sign("cookie", value)):
            return None
        visit, _, name = value.rpartition(".")
        if int(visit.rpartition(".")[2]) <= time.time():
            return None
        user = urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        return Visitor(user, self.sign("csrf", f"visit {visit}"), visit)

    def sign(self, purpose: str, text: str) -> str:
        """Return a signature of a text."""
        signed = f"{self._site}\0{purpose}\0{text}"
        return hmac.new(self._key, signed.encode("utf-8", "surrogatepass"), sha256).hexdigest()


def read_key(home: Path) -> bytes:
    """Return the key that signs visits of this home's pages; made where there is none. `UsageError` for a file that
    others can read, or that is no key: whoever knows it can come in."""
    file = home / _KEY_FILE
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        _make_key(file)
        return read_key(home)
    except OSError as exc:
        raise UsageError(f"{file}, which signs visits, cannot be read: {exc.strerror}", hint=_NEW_KEY) from exc
    try:
        found, key = os.fstat(fd), b""
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise UsageError(f"{file}, which signs visits, is not a file of this user's alone", hint=_NEW_KEY)
        key = os.read(fd, _KEY_BYTES + 1)
    finally:
        os.close(fd)
    if len(key) != _KEY_BYTES:
        raise UsageError(f"{file}, which signs visits, is no key of {_KEY_BYTES} bytes", hint=_NEW_KEY)
    return key


_NEW_KEY: Final = "Remove it: a new one is made, and visitors need a new link."


def _make_key(file: Path) -> None:
    """Put a new key into its place, whole; that of another process, which was faster, stays."""
    beside = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, secrets.token_bytes(_KEY_BYTES), 0)
            os.fsync(fd)
            os.link(beside, file)
        except FileExistsError:
            pass
        finally:
            os.close(fd)
            beside.unlink()
        sync_folder(file.parent)
    except OSError as exc:
        hint = "Set DATACACHE_HOME to a folder of your own."
        raise UsageError(f"{file}, which signs visits, cannot be made: {exc.strerror}", hint=hint) from exc


def name_of(text: str) -> str:
    """Return the name that a visitor has said. `UsageError` for one that is empty, too long or cannot be shown."""
    name = unicodedata.normalize("NFC", " ".join(text.split()))
    if not 0 < len(name) <= MOST_NAME or not name.isprintable():
        raise UsageError(f"a name has 1 to {MOST_NAME} characters, all of which can be seen")
    return name


def set_visit(answer: Response, cookie: str, value: str, *, secure: bool) -> None:
    """Have the browser keep a visit."""
    answer.set_cookie(cookie, value, max_age=_COOKIE_S, httponly=True, samesite="strict", secure=secure)


def local(address: str) -> str:
    """Return an address to which the browser may be sent: one of this page, else the first page."""
    is_path = address.startswith("/") and not address.startswith("//") and "\\" not in address
    return address if is_path and address.isascii() and address.isprintable() else "/"


class Refused(Exception):  # noqa: N818 - an answer, not an error
    """A request that is not answered, and why."""

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason)
        self.status = status


_NO_LINK: Final = "open the link that dsctl ui has printed"
_ALIVE: Final = PlainTextResponse("alive\n")


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

        has_begun = False

        async def with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            answer, receive = (_ALIVE, receive) if scope["path"] == HEALTH else await self._check(scope, receive)
        except Refused as refused:
            client = (scope.get("client") or ("?",))[0]
            _log.warning("refused: %s (%s %r from %s)", refused, scope["method"], scope["path"][:_LOGGED], client)
            answer = PlainTextResponse(f"Refused: {refused}.\n", refused.status)
        try:
            await (answer or self._app)(scope, receive, with_headers)
        except asyncio.CancelledError:  # the server ends, and has waited
            if has_begun:
                raise
            await PlainTextResponse("The server ends.\n", 503)(scope, receive, with_headers)

    async def _check(self, scope: Scope, receive: Receive) -> tuple[Response | None, Receive]:
        """Raise `Refused`, or return an answer, or None where the pages are to answer; and what is still to be read."""
        headers = Headers(scope=scope)
        host = self._host(headers)
        path = scope["path"]
        if headers.get("x-forwarded-proto") == "https":  # a proxy speaks TLS: cookies and forms are of https then
            scope["scheme"] = "https"
        parts = path.split("/")
        if parts[0] or "\0" in path or "\\" in path or "." in parts or ".." in parts:
            raise Refused("the path leads outside", 400)
        if "transfer-encoding" in headers and "content-length" in headers:
            raise Refused("two headers tell the length of what is sent", 400)  # a proxy may go by the other one
        writes = scope["method"] not in ("GET", "HEAD")
        _check_site(headers, f"{scope['scheme']}://{host}", writes=writes)
        visitor = self._visitor(headers)
        asked = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        token = next((value for name, value in asked if name == "token"), None)
        if token is not None and scope["method"] == "GET" and not self._user_header:
            if visitor is None and not self._links.use(token):
                raise Refused("the link was used before, or is of an earlier run; a new one was printed", 401)
            rest = urlencode([pair for pair in asked if pair[0] != "token"])
            return self._welcome(path, rest, new=visitor is None, secure=scope["scheme"] == "https"), receive
        if visitor is None:
            who = f"the proxy has to say who asks, in {self._user_header}" if self._user_header else _NO_LINK
            raise Refused(who, 401)
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
                raise Refused(f"several headers {self._user_header} name the user", 400)
            user = _utf8(named[0].strip()) if named else ""
            if len(user) > _MOST_USER or not user.isprintable():
                raise Refused(f"what {self._user_header} names is no user", 400)
            return Visitor(user, self._links.sign("csrf", f"user {user}")) if user else None
        # Not SimpleCookie, for which a strange cookie of another page of this machine is the end of all.
        parts = [part.strip().partition("=") for line in headers.getlist("cookie") for part in line.split(";")]
        sent = {value for name, _, value in parts if name == self._cookie}
        known = {visitor for value in sent if (visitor := self._links.visitor(value)) is not None}
        if len(known) > 1:  # pages of other ports can set cookies for this one: nobody may be made to act as another
            raise Refused("two visits come with one request; remove the cookies of this page", 400)
        return next(iter(known), None)

    def _welcome(self, path: str, query: str, *, new: bool, secure: bool) -> Response:
        """Have the browser ask again without the token: a redirect would come without the strict cookie where another
        site or program had the link."""
        target = escape(quote("/" + path.lstrip("/"), safe="/@") + (f"?{query}" if query else ""))
        answer = HTMLResponse(
            f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={target}">'
            f'<title>datacache</title><a href="{target}">Go on</a>'
        )
        if new:
            set_visit(answer, self._cookie, self._links.cookie(), secure=secure)
        return answer

    async def _check_write(self, scope: Scope, headers: Headers, visitor: Visitor, receive: Receive) -> Receive:
        if scope["method"] != "POST":
            raise Refused(f"nothing answers {scope['method']}", 405)
        if self._read_only and scope["path"] not in _WRITE_NOTHING:
            raise Refused("this page is for reading only")
        try:
            with fail_after(_BODY_S):
                body = await _read(receive)
        except TimeoutError as exc:
            raise Refused("the form takes too long to come", 408) from exc
        given = headers.get("x-csrf-token")
        if given is None and headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            given = dict(parse_qsl(body.decode("utf-8", "replace"))).get("csrf")
        if given is None or not _same(given, visitor.csrf):
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
    body = bytearray()
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused("the form has not come as a whole", 400)
        body += message.get("body", b"")
        if len(body) > _BODY_BYTES:
            raise Refused("the form is too large", 413)
        if not message.get("more_body"):
            return bytes(body)


def _same(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), known.encode())


def _utf8(header: str) -> str:
    """Return a header's text, which is UTF-8; the framework takes bytes for Latin-1."""
    try:
        return header.encode("latin-1").decode()
    except UnicodeDecodeError as exc:
        raise Refused("the user's name is not UTF-8", 400) from exc
