"""Counts in messages: `1 link`, `1,204 links`. Used wherever something is said to people; any thread."""

from __future__ import annotations


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun, in the plural (`many`, or with an s) unless it is 1."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
