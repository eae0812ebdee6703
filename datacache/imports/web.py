"""Get one object from a web server: whole, within a size and a time, or an error that says why not.

Used by `jsonl` for `http://` and `https://` URLs. A web server promises nothing, so everything it does is bounded and
checked: redirects, length, encoding, time. Messages name the URL without its query, and never where it redirects to,
which may be a signed URL. Safe from several threads; each process makes its own.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import urllib3
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from datacache.core.addresses import AddressRule, ClosedAddressError
from datacache.core.errors import (
    AddressRefusedError,
    DatacacheError,
    StoreError,
    StoreUnavailableError,
    StoreUnreachableError,
)
from datacache.imports.failures import TooLargeError
from datacache.imports.places import Allowance
from datacache.store.answers import ENCODINGS, bounded_pools, checked_pools, pieces
from datacache.store.errors import from_connection, from_status
from datacache.store.retry import Backoff, MetAddresses

OWN_SETTING = ", and DATACACHE_ALLOW_NETWORK of the process that fetches"
"""Text that an engine's process adds to a message that names `--allow-network`."""
MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_UNKNOWN_BYTES = 4 << 20
"""Room for an answer that does not say its length; one that is longer waits until it is alone."""
_PAGE_STARTS = (b"<!doctype html", b"<html")
_CONNECT_S = 10.0
_GIVE_UP_AFTER = 10
"""So many objects of a host in a row that it did not give for all the retries: the next are tried once each, until one
comes. A million lines of a server that is gone would take days otherwise."""


class Request(NamedTuple):
    """A request, and its bounds."""

    url: str
    shown: str
    """The URL as messages name it."""
    allowed: Allowance
    """Holds the size of the body, for the caller to give back."""
    max_bytes: int
    stop: Callable[[], bool]
    """Tells whether to give up."""


class Body(NamedTuple):
    """The answer of a server."""

    data: bytes
    is_page: bool
    """Tell whether this is a web page by its type and its bytes: many servers send one for a file that is gone."""


class _BusyError(StoreUnavailableError):
    retry_after_s = 0.0


class Web:
    """A client with pooled connections. Close it."""

    def __init__(self, *, request_timeout_s: float, connections: int, rule: AddressRule) -> None:
        """`rule` says which addresses may be asked. It is asked for each connection, so also after a redirect."""
        self._timeout_s = request_timeout_s
        self._rule = rule
        self._options: dict[str, Any] = {
            "num_pools": connections,
            "maxsize": connections,
            "cert_reqs": "CERT_REQUIRED",
            "ca_certs": os.environ.get("SSL_CERT_FILE") or get_cert_path(True),
            "headers": {"User-Agent": "datacache", "Accept": "*/*", "Accept-Encoding": "identity"},
        }
        self._direct = urllib3.PoolManager(**self._options)
        self._direct.pool_classes_by_scheme = checked_pools(rule)
        self._proxied: dict[str, urllib3.ProxyManager] = {}
        self._met = MetAddresses()
        self._failed: Counter[str] = Counter()  # by host, in a row; a race miscounts by a few, no more

    def get(self, request: Request) -> Body:
        """Return the object at a URL.

        A server that is busy or breaks off is asked again until the clock, or the timeout of a request, has run out; a
        host that was never met and refuses connections, or has no address, for `UNREACHED_S`.
        Raises the store's errors, `TooLargeError`, `TooSlowError`.
        """
        host = _host(request.shown)
        try:
            body = self._retried(request, once=self._failed[host] >= _GIVE_UP_AFTER)
        except StoreUnavailableError:
            self._failed[host] += 1
            raise
        self._failed[host] = 0
        return body

    def close(self) -> None:
        """Close the pooled connections."""
        for pool in (self._direct, *self._proxied.values()):
            pool.clear()

    def _retried(self, request: Request, *, once: bool) -> Body:
        host = _host(request.shown)
        backoff = Backoff(min(self._timeout_s, request.allowed.left_s()), reached=lambda: self._met.knows(host))
        while True:
            try:
                body = self._try(request)
            except StoreUnavailableError as exc:
                if not isinstance(exc, StoreUnreachableError):
                    self._met.note(host)
                asked_s = exc.retry_after_s if isinstance(exc, _BusyError) else 0.0
                wait_s = asked_s or backoff.wait_s(exc)
                if once or request.stop() or wait_s > request.allowed.left_s():
                    raise
                time.sleep(wait_s)
            else:
                self._met.note(host)
                return body

    def _try(self, request: Request) -> Body:
        answer = self._follow(request.url, request.shown, request.allowed)
        whole = False
        try:
            body = _read(answer, request)
            whole = True
            return body
        except (urllib3.exceptions.HTTPError, OSError) as exc:
            if isinstance(exc, DatacacheError):
                raise
            raise _broken(exc, request.shown) from exc
        finally:
            # Read to its end, it goes back to the pool; otherwise the connection is cut, not drained.
            answer.release_conn() if whole else answer.close()

    def _follow(self, url: str, shown: str, allowed: Allowance) -> urllib3.BaseHTTPResponse:
        """Return the answer at the end of a URL's redirects, a 200."""
        at = url
        for _ in range(MAX_REDIRECTS + 1):
            allowed.check()
            answer = self._send(at, shown, allowed)
            if answer.status == 200:
                return answer
            answer.close()
            if answer.status not in _REDIRECTS:
                raise _refusal(answer, shown)
            target = urljoin(at, answer.headers.get("Location", ""))
            if urlsplit(target).scheme not in ("http", "https") or not urlsplit(target).netloc:
                raise StoreError(f"{shown}: it redirects to something that is no web address", url=shown)
            if at.lower().startswith("https:") and not target.lower().startswith("https:"):
                raise StoreError(f"{shown}: it redirects from https to http", url=shown)
            at = target
        raise StoreError(f"{shown}: it redirects more than {MAX_REDIRECTS} times", url=shown)

    def _send(self, url: str, shown: str, allowed: Allowance) -> urllib3.BaseHTTPResponse:
        timeout_s = max(0.1, min(self._timeout_s, allowed.left_s()))
        timeout = urllib3.Timeout(connect=min(_CONNECT_S, timeout_s), read=timeout_s)
        try:
            return self._pool(url).urlopen(
                "GET", url, retries=False, redirect=False, preload_content=False, timeout=timeout
            )
        except ClosedAddressError as exc:
            raise self._refused(url, shown) from exc
        except ValueError as exc:  # before the others: urllib3 has errors of both kinds
            raise StoreError(f"{shown}: this address cannot be asked for ({type(exc).__name__})", url=shown) from exc
        except (urllib3.exceptions.HTTPError, OSError) as exc:
            raise _broken(exc, shown) from exc

    def _refused(self, url: str, shown: str) -> AddressRefusedError:
        # Where it redirects to may be a signed URL: the host alone is named.
        parts = urlsplit(url)
        where = "it redirects to" if url != shown and _host(url) != _host(shown) else "it is at"
        also = "" if self._rule.within is None else OWN_SETTING
        return AddressRefusedError(
            f"{shown}: {where} {parts.hostname}, on this machine or in a private network; if the list may read from "
            f"there: --allow-network {parts.hostname}{also}",
            url=shown,
        )

    def _pool(self, url: str) -> urllib3.PoolManager:
        """Connections that check where they go. Through a proxy the proxy decides that; what is known of the address
        here is checked before it is asked."""
        proxy = get_environ_proxies(url).get(url.partition(":")[0].lower())
        if not proxy:
            return self._direct
        parts = urllib3.util.parse_url(url)
        self._rule.check_host(parts.host or "", parts.port or (443 if parts.scheme == "https" else 80))
        if proxy not in self._proxied:
            user = urllib3.util.parse_url(proxy).auth
            headers = urllib3.make_headers(proxy_basic_auth=user) if user else None
            manager = urllib3.ProxyManager(proxy, proxy_headers=headers, **self._options)
            manager.pool_classes_by_scheme = bounded_pools()
            self._proxied[proxy] = manager
        return self._proxied[proxy]


def _read(answer: urllib3.BaseHTTPResponse, request: Request) -> Body:
    _, shown, allowed, max_bytes, stop = request
    encoding = answer.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ENCODINGS:
        raise StoreError(f"{shown}: the server sends it in an encoding nobody asked for", url=shown)
    length = answer.length_remaining if encoding in ("", "identity") else None
    if length is not None and length > max_bytes:
        raise _too_large(shown, length, max_bytes)
    allowed.take(_UNKNOWN_BYTES if length is None else length)
    parts: list[bytes] = []
    size = 0
    for part in pieces(answer):
        if length is None and size <= _UNKNOWN_BYTES < size + len(part):
            allowed.take(max_bytes)
        size += len(part)
        if size > max_bytes:
            raise _too_large(shown, None, max_bytes)
        allowed.check()
        if stop():
            raise StoreError(f"{shown}: the import was stopped", url=shown)
        parts.append(part)
    data = b"".join(parts)
    if length is not None and size != length:
        raise StoreUnavailableError(f"{shown}: the answer ended after {size:,} of {length:,} bytes", url=shown)
    page = answer.headers.get("Content-Type", "").lower().startswith("text/html")
    return Body(data, page and data[:1024].lstrip().lower().startswith(_PAGE_STARTS))


def _refusal(answer: urllib3.BaseHTTPResponse, shown: str) -> DatacacheError:
    error = from_status(answer.status, "", shown, store=_host(shown))
    if not isinstance(error, StoreUnavailableError):
        return error
    busy = _BusyError(error.message, url=shown, hint=error.hint)
    seconds = answer.headers.get("Retry-After", "")
    busy.retry_after_s = float(seconds) if seconds.isascii() and seconds.isdigit() else 0.0
    return busy


def _broken(exc: Exception, shown: str) -> DatacacheError:
    return from_connection(f"{type(exc).__name__} {exc}", shown, endpoint=_host(shown))


def _too_large(shown: str, size_bytes: int | None, max_bytes: int) -> TooLargeError:
    is_ = "it is larger than" if size_bytes is None else f"it has {size_bytes:,} bytes, more than"
    return TooLargeError(f"{shown}: {is_} the {max_bytes:,} bytes that one object may have", url=shown)


def _host(shown: str) -> str:
    scheme, _, rest = shown.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"
