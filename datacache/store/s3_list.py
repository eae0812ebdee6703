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
from datacache.store.base import ObjectInfo
from datacache.store.errors import plain_etag

FetchPage = Callable[[dict[str, str]], bytes]
"""Send the query of one ListObjectsV2 request; the XML document of the answer."""

_REPEATED = re.compile(rb"<(Prefix|StartAfter|Marker)>[^<]*&#[^<]*</\1>")
_TOKEN = re.compile(rb"<NextContinuationToken>([^<]+)</NextContinuationToken>")


def list_pages(fetch: FetchPage, prefix: str, start_after: str, store_url: str) -> Iterator[list[ObjectInfo]]:
    """All pages under a prefix, one request ahead of the consumer."""
    for objects, _ in list_documents(fetch, {"prefix": prefix}, start_after, store_url):
        if objects:
            yield objects


def list_documents(
    fetch: FetchPage, query: dict[str, str], start_after: str, store_url: str
) -> Iterator[tuple[list[ObjectInfo], list[str]]]:
    """The same with the prefixes that a delimiter in the query gives."""
    query = {"list-type": "2", "encoding-type": "url"} | query
    if start_after:
        query["start-after"] = start_after
    ahead = ThreadPoolExecutor(1, thread_name_prefix="list")
    try:
        document = fetch(query)
        while True:
            # The token is found before the document is parsed, so the next request starts first.
            token = _TOKEN.search(document)
            following = None
            if token is not None:
                query = query | {"continuation-token": html.unescape(token[1].decode())}
                following = ahead.submit(fetch, query)
            yield parse_listing(document, store_url)
            if following is None:
                return
            document = following.result()
    finally:
        ahead.shutdown(wait=True, cancel_futures=True)


def parse_listing(document: bytes, store_url: str) -> tuple[list[ObjectInfo], list[str]]:
    """The objects and the common prefixes of a ListObjectsV2 answer. `StoreError` if it is something else."""
    try:
        root = _parsed(document)
    except ET.ParseError as exc:
        raise StoreError(f"the listing of {store_url} is not valid XML", url=store_url) from exc
    space, found, name = root.tag.rpartition("}")
    space += found
    if name != "ListBucketResult":
        raise StoreError(
            f"{store_url}: the endpoint does not answer as S3 does",
            url=store_url,
            hint="Check AWS_ENDPOINT_URL: it must be the S3 endpoint, not a console or a website.",
        )
    encoded = root.findtext(f"{space}EncodingType") == "url"
    key_tag, size_tag, etag_tag, time_tag = (f"{space}{t}" for t in ("Key", "Size", "ETag", "LastModified"))
    page = []
    seconds: dict[str, int] = {}
    for item in root.iterfind(f"{space}Contents"):
        fields = {child.tag: child.text for child in item}
        key = fields[key_tag] or ""
        if encoded and ("%" in key or "+" in key):
            key = _decoded(key)
        page.append(
            ObjectInfo(
                key,
                int(fields[size_tag] or 0),
                _nanoseconds(fields.get(time_tag) or "", seconds),
                plain_etag(fields.get(etag_tag)),
            )
        )
    folders = [text or "" for text in (e.findtext(f"{space}Prefix") for e in root.iterfind(f"{space}CommonPrefixes"))]
    return page, [_decoded(f) if encoded and ("%" in f or "+" in f) else f for f in folders]


def _parsed(document: bytes) -> ET.Element:
    try:
        return ET.fromstring(document)  # noqa: S314 - expat bounds entity expansion by itself since 2.4
    except ET.ParseError:
        # Ceph repeats the prefix as it was asked for; a control character in it is no XML. Keys are encoded.
        shorter = _REPEATED.sub(b"", document)
        if shorter == document:
            raise
        return ET.fromstring(shorter)  # noqa: S314


def _decoded(key: str) -> str:
    """A key of a listing with `encoding-type=url`, which is form encoding: '+' is a space (AWS), '+' itself
    %2B."""
    # Ceph encodes every slash. '%' itself is always encoded, so this cannot hit the middle of something.
    key = key.replace("%2F", "/")
    if "%" in key or "+" in key:
        key = unquote_to_bytes(key.replace("+", " ")).decode("utf-8", "surrogateescape")
    return key


def _nanoseconds(text: str, seconds: dict[str, int]) -> int:
    """`2026-01-31T10:20:30.123Z` in ns since the epoch; 0 for anything else. Objects of a page share their
    seconds."""
    whole, fraction = text[:19], text[20:].rstrip("Z")
    known = seconds.get(whole)
    if known is None:
        try:
            known = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
        except ValueError:
            return 0
        seconds[whole] = known
    return known * 10**9 + (int(fraction[:9].ljust(9, "0")) if fraction.isdecimal() else 0)
