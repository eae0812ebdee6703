"""Pauses between tries that grow while something keeps failing, however often it does. No state; any thread."""

from __future__ import annotations

_MOST_DOUBLINGS = 64
"""More make no difference to a pause, and from 1,024 on 2**n fits into no float."""


def pause_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """The pause after so many failures in a row: none without one, `first_s` after the first, twice as long after each
    further one, `longest_s` at most.
    """
    if failures < 1:
        return 0.0
    return min(first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest_s)
