"""Elastic tasks: a data set cut into pieces that workers, who come and go, take on lease.

No PyTorch here. Any thread may call what is here; all values are immutable.
"""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """A run of samples of a data set under a name that stays: a shard, or a list of files."""

    name: str
    first: int
    """The number of its first sample in the data set."""
    count: int
