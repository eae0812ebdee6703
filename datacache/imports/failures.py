"""Lines of an import that failed: collected while it runs, given in the order of the file at its end.

One thread adds. Memory is bounded: above some ten thousand the rest waits in an unnamed temporary file.
"""

from __future__ import annotations

import re
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
    """The kind of failure, for machines: `json`, `field`, `url`, `path`, `duplicate`, `not-found`, `access`, `changed`,
    `unavailable`, `too-large`, `too-slow`, `store`."""
    reason: str
    """The failure in a sentence."""

    def as_json(self) -> dict[str, Any]:
        """Return a line of a report."""
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
    """Return the code of a store's error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), "store")


def shown_url(url: str) -> str:
    """Return a URL that may be shown and kept: without user and password, and without the query of a web address, which
    may be a signature."""
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


class Failures(Sorter[Failure]):
    """The failures of one import, which come in the order of their lines. Close it."""

    def __init__(self) -> None:
        super().__init__(attrgetter("line"), rows_in_memory=_IN_MEMORY)
        self.count = 0

    def add(self, row: Failure) -> None:
        """Add one more."""
        self.count += 1
        super().add(row)
