"""Listing a bucket by ListObjectsV2, as fast as the server answers.

obstore cannot: its paths lose the trailing slash of folder markers and refuse keys such as `a//b`. botocore
can, at over 30 µs a key. Here the document goes through ElementTree's C parser, and the next page is on its
way while the consumer works on this one. One listing belongs to one thread.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from urllib.parse import unquote_to_bytes
from xml.etree import ElementTree as ET

from datacache.core.errors import StoreError
from datacache.store.answers import expect_plain_xml
from datacache.store.base import ObjectInfo
from datacache.store.errors import not_s3, plain_etag

FetchPage = Callable[[dict[str, str]], bytes]
"""Sends the query of one ListObjectsV2 request and returns the XML document of the answer."""

_REPEATED = re.compile(rb"<(Prefix|StartAfter|Marker)>([^<]*+)</\1>")
_LATEST_S = 2**63 // 10**9
"""The latest time that nanoseconds can say: the year 2262."""
_TOKEN = re.compile(rb"<(?:[\w.-]+:)?NextContinuationToken>([^<]+)<")
_TRUNCATED = re.compile(rb"<(?:[\w.-]+:)?IsTruncated>\s*true\b")
MAX_EMPTY_PAGES = 1_000
"""In a row. Stores give some where they pass over what was deleted."""


class Paging:
    """The pages of one listing: one that has no end is a `StoreError`."""

    def __init__(self, store_url: str) -> None:
        self._url = store_url
        self._seen: set[int] = set()  # hashes: tokens are long, and a hundred million keys have a hundred thousand
        self._empty = 0

    def follow(self, marker: str) -> None:
        """Note where the next page begins."""
        if not marker:
            raise StoreError(f"the listing of {self._url} says there is more, and not what", url=self._url)
        if hash(marker) in self._seen:
            raise StoreError(f"the listing of {self._url} goes round in a circle", url=self._url)
        self._seen.add(hash(marker))

    def count(self, entries: int) -> None:
        """Note how much is in a page that another one follows."""
        self._empty = 0 if entries else self._empty + 1
        if self._empty > MAX_EMPTY_PAGES:
            raise StoreError(f"the listing of {self._url} has only empty pages, and no end", url=self._url)


def list_pages(fetch: FetchPage, prefix: str, start_after: str, store_url: str) -> Iterator[list[ObjectInfo]]:
    """Yield all pages under a prefix, one request ahead of the consumer."""
    for objects, _ in list_documents(fetch, {"prefix": prefix}, start_after, store_url):
        if objects:
            yield objects


def list_documents(
    fetch: FetchPage, query: dict[str, str], start_after: str, store_url: str
) -> Iterator[tuple[list[ObjectInfo], list[str]]]:
    """Yield all pages with the prefixes that a delimiter in the query gives."""
    query = {"list-type": "2", "encoding-type": "url"} | query
    if start_after:
        query["start-after"] = start_after
    paging = Paging(store_url)
    ahead = ThreadPoolExecutor(1, thread_name_prefix="list")
    try:
        document = fetch(query)
        while True:
            # The token is found before the document is parsed, so the next request starts first.
            token = _TOKEN.search(document)
            following = None
            if token is not None:
                query = query | {"continuation-token": html.unescape(token[1].decode("utf-8", "replace"))}
                paging.follow(query["continuation-token"])
                following = ahead.submit(fetch, query)
            objects, folders = parse_listing(document, store_url)
            if following is None and is_truncated(document):
                raise StoreError(f"the listing of {store_url} breaks off: it does not say what follows", url=store_url)
            yield objects, folders
            if following is None:
                return
            paging.count(len(objects) + len(folders))
            document = following.result()
    finally:
        ahead.shutdown(wait=True, cancel_futures=True)


def is_truncated(document: bytes) -> bool:
    """Tell whether an answer says that there is more than is in it."""
    return _TRUNCATED.search(document) is not None


def parse_listing(document: bytes, store_url: str) -> tuple[list[ObjectInfo], list[str]]:
    """Return the objects and the common prefixes of a ListObjectsV2 answer. `StoreError` if it is something else."""
    root, space = parse_answer(document, store_url, "ListBucketResult")
    try:
        return _objects(root, space), _folders(root, space)
    except (KeyError, ValueError) as exc:
        raise StoreError(f"the listing of {store_url} has an entry without a key or size", url=store_url) from exc


def _objects(root: ET.Element, space: str) -> list[ObjectInfo]:
    encoded = root.findtext(f"{space}EncodingType") == "url"
    key_tag, size_tag, etag_tag, time_tag = (f"{space}{t}" for t in ("Key", "Size", "ETag", "LastModified"))
    page = []
    seconds: dict[str, int] = {}
    for item in root.iterfind(f"{space}Contents"):
        fields = {child.tag: child.text for child in item}
        key = fields[key_tag] or ""
        if encoded and ("%" in key or "+" in key):
            key = decoded_key(key)
        size_bytes = int(fields[size_tag] or 0)
        if size_bytes >> 63:
            raise ValueError("a size that no object has")
        page.append(
            ObjectInfo(
                key, size_bytes, nanoseconds(fields.get(time_tag) or "", seconds), plain_etag(fields.get(etag_tag))
            )
        )
    return page


def _folders(root: ET.Element, space: str) -> list[str]:
    encoded = root.findtext(f"{space}EncodingType") == "url"
    folders = [text or "" for text in (e.findtext(f"{space}Prefix") for e in root.iterfind(f"{space}CommonPrefixes"))]
    return [decoded_key(f) if encoded and ("%" in f or "+" in f) else f for f in folders]


def parse_answer(document: bytes, store_url: str, name: str) -> tuple[ET.Element, str]:
    """Return the root of an answer's document, which has this name, and the name space of its elements' tags."""
    expect_plain_xml(document, store_url)
    try:
        try:
            root = ET.fromstring(document)  # noqa: S314 - expat bounds entity expansion by itself since 2.4
        except ET.ParseError:
            # Ceph repeats the prefix as it was asked for; a control character in it is no XML. Keys are encoded.
            shorter = _REPEATED.sub(lambda found: b"" if b"&#" in found[2] else found[0], document)
            root = ET.fromstring(shorter)  # noqa: S314
    except ET.ParseError as exc:
        raise StoreError(f"{store_url}: the answer is not valid XML", url=store_url) from exc
    space, found, tag = root.tag.rpartition("}")
    if tag != name:
        raise not_s3(store_url)
    return root, space + found


def decoded_key(key: str) -> str:
    """Decode a key of a listing with `encoding-type=url`, which is form encoding: '+' is a space (AWS), '+' itself
    %2B."""
    # Ceph encodes every slash. '%' itself is always encoded, so this cannot hit the middle of something.
    key = key.replace("%2F", "/")
    if "%" in key or "+" in key:
        key = unquote_to_bytes(key.replace("+", " ")).decode("utf-8", "surrogateescape")
    return key


def nanoseconds(text: str, seconds: dict[str, int]) -> int:
    """Return `2026-01-31T10:20:30.123Z` in ns since the epoch; 0 for anything else. Objects of a page share their
    seconds."""
    whole, fraction = text[:19], text[20:].rstrip("Z")
    known = seconds.get(whole)
    if known is None:
        try:
            known = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
        except ValueError:
            return 0
        if not 0 <= known < _LATEST_S:
            return 0
        seconds[whole] = known
    return known * 10**9 + (int(fraction[:9].ljust(9, "0")) if fraction.isdecimal() else 0)
