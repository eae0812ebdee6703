"""The addresses of pages, and filters as they stand in them: a link shows everybody the same. Pure functions.

Paths of a store may be no valid text; they are escaped byte by byte, and come back as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from datacache import api
from datacache.core.errors import UsageError

_MOST_FIELDS = 100
_LONG, _TOO_LONG = 100, 400
"""Characters of a condition that is repeated in the links of a page, which stays below 100 KB."""


def address(page: str, name: str = "", asked: Iterable[tuple[str, str]] = (), **more: Any) -> str:
    """Return `/page/name?asked`; names have no characters that could end them. Values that are empty are left out."""
    pairs = [*asked, *((key, str(value)) for key, value in more.items() if value not in ("", None))]
    query = urlencode(pairs, quote_via=quote, errors="surrogateescape", safe="/")
    return quote(f"/{page}/{name}" if name else f"/{page}", safe="/@") + (f"?{query}" if query else "")


def asked_of(query: bytes, most: int = _MOST_FIELDS) -> list[tuple[str, str]]:
    """Return the names and values of an address's query, or of a form. `UsageError` for too many."""
    try:
        pairs = parse_qsl(query.decode("latin-1"), errors="surrogateescape", max_num_fields=most)
    except ValueError as exc:
        raise UsageError(f"more than {most:,} values were sent") from exc
    return [(name, value) for name, value in pairs if value]


def filter_of(pairs: Iterable[tuple[str, str]]) -> api.Filter:
    """Return the filter that values mean. `UsageError` for what is no number."""
    pairs = list(pairs)
    one = dict(pairs)
    query = api.Query(
        labels=tuple(dict.fromkeys(value for name, value in pairs if name == "label")),
        any_label="any" in one,
        min_objects=_number(one, "min_objects"),
        max_objects=_number(one, "max_objects"),
        where=one.get("where", ""),
    )
    return api.Filter(
        query=query,
        split=one.get("split", ""),
        folder=one.get("folder", "").strip("/"),
        min_side=_number(one, "min_side") or 0,
        problem=one.get("problem", ""),
    )


def written(found: api.Filter) -> list[tuple[str, str]]:
    """Return the values that `filter_of` makes the filter of."""
    query = found.query
    pairs = [("label", label) for label in query.labels]
    pairs += [("any", "1")] if query.any_label and query.labels else []
    numbers: Mapping[str, float | None] = {
        "min_objects": query.min_objects,
        "max_objects": query.max_objects,
        "min_side": found.min_side or None,
    }
    pairs += [(name, str(number)) for name, number in numbers.items() if number is not None]
    texts = {"where": query.where, "split": found.split, "folder": found.folder, "problem": found.problem}
    return pairs + [(name, text) for name, text in texts.items() if text]


def narrowing(ref: str, wanted: api.Filter) -> Callable[..., str]:
    """Return a function that gives the address of the images of a filter that fit a condition, too; '' where the
    filter's own is too long to be repeated."""
    pairs = [(name, value) for name, value in written(wanted) if name != "where"]
    before = wanted.query.where.strip()

    def narrowed(condition: str, split: str = "") -> str:
        if len(before) > _TOO_LONG:
            return ""
        where = f"({before}) and {condition}" if before and condition else before or condition
        kept = [(name, value) for name, value in pairs if name != "split"] if split else pairs
        return address("s", ref, kept, split=split, where=where)

    return narrowed


def with_class(ref: str, wanted: api.Filter, label: str) -> str:
    """Return the address of the images of a filter that have a class, too; '' where its condition is too long to be
    repeated for each class."""
    query, pairs = wanted.query, written(wanted)
    if len(query.where) > _LONG:
        return ""
    if label in query.labels and not query.any_label:
        return address("s", ref, pairs)
    if query.labels or query.min_objects is not None or query.max_objects is not None:  # another label changes these
        return narrowing(ref, wanted)(f"has({label!r})")
    return address("s", ref, pairs, label=label)


def _number(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"{name.replace('_', ' ')}: {text!r} is no whole number from 0 on")
    return int(text)
