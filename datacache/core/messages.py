"""Messages of other processes: JSON objects, of which whoever opens a socket can send any."""

from __future__ import annotations

import json
from typing import Any


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; `ValueError` for anything else, such as brackets that are nested a million deep, or a field
    that is there twice: who wrote it and who reads it may not mean the same one."""
    try:
        found = json.loads(text, object_pairs_hook=_object)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    if not isinstance(found, dict):
        raise ValueError("a message must be an object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is there twice")
    return found
