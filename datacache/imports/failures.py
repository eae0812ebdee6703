"""Lines of an import that failed: collected while it runs, given in the order of the file at its end.

One thread adds. Memory is bounded: above some ten thousand the rest waits in an unnamed temporary file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from datacache.core.errors import (
    ObjectChangedError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    UsageError,
)
from datacache.manifest.builder import Sorter
from datacache.store.urls import split_object_url

_IN_MEMORY = 10_000
_MAX_URL = 500
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(.*)", re.DOTALL)


class Failure(NamedTuple):
    """One line that cannot be taken."""

    line: int
    """Counted from 1."""
    url: str
    """As `shown_url` gives it; '' where the line has none."""
    path: str
    """Where it was to go; '' where that is not known."""
    code: str
    """What went wrong, for machines: `json`, `field`, `url`, `path`, `duplicate`, `not-found`, `access`, `changed`,
    `unavailable`, `too-large`, `too-slow`, `store`."""
    reason: str
    """The same in a sentence."""

    def as_json(self) -> dict[str, Any]:
        """A line of a report."""
        return self._asdict()


class TooLargeError(StoreError):
    """The object is larger than an import may take."""


class TooSlowError(StoreError):
    """The object did not come in the time it was given."""


_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (TooLargeError, "too-large"),
    (TooSlowError, "too-slow"),
    (ObjectNotFoundError, "not-found"),
    (ObjectChangedError, "changed"),
    (StoreAccessError, "access"),
    (StoreUnavailableError, "unavailable"),
)


def code_of(error: BaseException) -> str:
    """The code of a store's error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), "store")


def shown_url(url: str) -> str:
    """A URL that may be shown and kept: without user and password, and without the query of a web address, which may be
    a signature."""
    match = _SCHEME.match(url)
    if match is None:
        return url[:_MAX_URL]
    scheme, rest = match.groups()
    web = scheme.lower() in ("http://", "https://")
    try:
        split_object_url(url)
        secret = False
    except UsageError:
        secret = True
    if secret and "@" in rest:
        rest = f"…@{rest.rpartition('@')[2]}"  # a secret may have a '/' in it: all before the last '@' goes
    for mark in "?#" if web or secret else "":
        if mark in rest:
            rest = f"{rest.partition(mark)[0]}{mark}…"
    return f"{scheme}{rest}"[:_MAX_URL]


class Failures:
    """The failures of one import. Close it."""

    def __init__(self) -> None:
        self._sorter: Sorter[Failure] = Sorter(attrgetter("line"), rows_in_memory=_IN_MEMORY)
        self.count = 0

    def add(self, failure: Failure) -> None:
        """One more."""
        self.count += 1
        self._sorter.add(failure)

    def __iter__(self) -> Iterator[Failure]:
        """All of them, in the order of their lines. Nothing may be added any more."""
        return self._sorter.sorted()

    def close(self) -> None:
        """Give the temporary file back."""
        self._sorter.close()
