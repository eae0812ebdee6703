"""Object metadata in HTTP headers: `x-amz-meta-NAME`, any text as a value.

Headers carry ASCII only, and servers trim blanks. Any other value travels as one RFC 2047 encoded word
(`=?UTF-8?B?…?=`), the form in which S3 itself gives back what is not ASCII. Used by the S3 bucket alone. Pure
functions, any thread.
"""

from __future__ import annotations

import base64
import binascii
import quopri
import re
from collections.abc import Mapping

from datacache.core.errors import StoreError

_PREFIX = "x-amz-meta-"
_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_PLAIN = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")
_WORD = re.compile(r"=\?([A-Za-z0-9_-]+)\?([BbQq])\?([!->@-~]*)\?=")
_ATTRIBUTES = frozenset(
    ("content-disposition", "content-encoding", "content-language", "content-type", "cache-control", "storage-class")
)


def to_headers(metadata: Mapping[str, str], url: str) -> dict[str, str]:
    """The headers that store it. `StoreError` for a name that no header can have."""
    return {_PREFIX + name: value for name, value in to_words(metadata, url).items()}


def to_words(metadata: Mapping[str, str], url: str) -> dict[str, str]:
    """The same without the prefix."""
    for name in metadata:
        if _NAME.fullmatch(name) is None:
            raise StoreError(f"{url}: metadata cannot have the name {name!r}", url=url)
    return {name: _encoded(value) for name, value in metadata.items()}


def for_obstore(metadata: Mapping[str, str]) -> bool:
    """Whether obstore takes all these names for metadata, and none for a header of HTTP."""
    return _ATTRIBUTES.isdisjoint(metadata)


def from_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The metadata of an answer."""
    found = {}
    for name, value in headers.items():
        lower = name.lower()
        if lower.startswith(_PREFIX):
            found[lower.removeprefix(_PREFIX)] = _decoded(value)
    return found


def _encoded(value: str) -> str:
    if _PLAIN.fullmatch(value) is not None and "=?" not in value:
        return value
    return f"=?UTF-8?B?{base64.b64encode(value.encode('utf-8', 'surrogateescape')).decode()}?="


def _decoded(value: str) -> str:
    words = value.split()
    matches = [match for match in map(_WORD.fullmatch, words) if match is not None]
    if matches and len(matches) == len(words):
        try:
            return "".join(map(_word, matches))
        except (ValueError, LookupError, binascii.Error):
            return value
    try:  # http.client takes headers for Latin-1; servers that send other text mean UTF-8
        return value.encode("latin-1").decode()
    except ValueError:
        return value


def _word(match: re.Match[str]) -> str:
    charset, form, text = match.groups()
    data = base64.b64decode(text, validate=True) if form in "Bb" else quopri.decodestring(text.encode(), header=True)
    return data.decode(charset, "surrogateescape")
