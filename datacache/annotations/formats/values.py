"""Values in annotation files that anybody may have written: numbers, ids and JSON of any type, and polygons.

Used by the readers of formats. Pure functions, any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from datacache.annotations.classes import decode, unlisted
from datacache.annotations.model import Problems, quote
from datacache.core.errors import AnnotationError

JSON = Any  # what json.loads gives


def load(data: bytes, file: str) -> JSON:
    """Parse a JSON file. `AnnotationError` with the line where it is no JSON."""

    def broken(reason: str, line: int = 0) -> AnnotationError:
        return AnnotationError(f"{file} is no JSON: {reason}", code="json-broken", file=file, line=line)

    text = decode(data)
    if text is None:
        raise broken("it is not in UTF-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        raise broken(f"{exc.msg} in line {exc.lineno}, column {exc.colno}", exc.lineno) from exc
    except (RecursionError, ValueError) as exc:  # ValueError: a number of thousands of digits
        raise broken(f"{exc}") from exc


def to_id(value: JSON) -> str | None:
    """Return an id to compare by: the number 1 and the text '1' are one, as tools that write both expect."""
    if type(value) is int:  # and no bool; nearly always
        return str(value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) and value.strip() else None


def to_number(value: JSON) -> float | None:
    """Return a number, also one that is written as a text; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return parse_number(value)
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return float("inf")


def to_text(value: JSON) -> str:
    """Return texts as they are, other values as JSON; lists and objects are only named."""
    if isinstance(value, str):
        return value
    return kind(value) if isinstance(value, list | dict) else str(json.dumps(value))


def kind(value: JSON) -> str:
    """Say in words of which kind a value is."""
    if value is None:
        return "nothing"
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else "a single value"


def displayed(value: JSON) -> str:
    """Show a value in a message: lists and objects as JSON, all others quoted, in at most 60 characters."""
    if not isinstance(value, list | dict):
        return quote(to_text(value))
    try:
        text = json.dumps(value)
    except RecursionError:
        return kind(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def shown(entry: dict[str, JSON], key: str) -> str:
    """Show a member of an object in a message: `no bbox` or `the bbox 'x'`."""
    return f"the {key} {displayed(entry[key])}" if entry.get(key) is not None else f"no {key}"


def parse_number(text: str | bytes) -> float | None:
    """Parse a number, `nan` and `inf` too (`check` reports those); None for any other text."""
    if (b"_" if isinstance(text, bytes) else "_") in text:  # type: ignore[operator]  # 1_000 is a number to Python alone
        return None
    try:
        return float(text)
    except ValueError:
        return None


class ClassIds:
    """The class ids of one file, and the names that a list has for them."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = classes
        self._unlisted: dict[int, list[int]] = {}

    def parse(self, raw: str | bytes, left_out: str, problems: Problems, line: int) -> int | None:
        """Parse a class id; None, and a problem, for any other text. `left_out` names what is left out for it."""
        value = parse_number(raw)
        text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
        if value is None or not 0 <= value < 2**31 or value != int(value):
            message = f"{quote(text)} is no class id, which is a whole number from 0 on; the {left_out} is left out"
            problems.add("class-id", "skipped", message, line)
            return None
        id = int(value)
        if not text.strip("+-").isdigit():
            problems.add("class-id-float", "repaired", f"the class id {quote(text)} was read as {id}", line)
        return id

    def label(self, id: int, line: int) -> str:
        """Return the name of a class for an object that is kept. An id that is not in the list becomes `class_7`, which
        is a problem only where there is a list."""
        if id < len(self._classes):
            return self._classes[id]
        if self._classes:
            self._unlisted.setdefault(id, []).append(line)
        return unlisted(id)

    def finish(self, problems: Problems, counted: Callable[[Sequence[int]], str]) -> None:
        """Report the ids that are not in the list; `counted` says of lines how many objects are in them."""
        for id, lines in self._unlisted.items():
            message = f"{counted(lines)} of class {id}, and the list has {len(self._classes)}; kept as {unlisted(id)!r}"
            problems.add("class-unlisted", "noted", message, lines[0])
