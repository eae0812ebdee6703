"""Shares of the cache: what each of several groups of data sets is entitled to. Pure functions of a setting.

Used by the tiers, which take room back for a group that has less than its share from those that have more, and by the
daemon, where groups take turns. A group is one pattern of data set names, such as `team-a-*`; the first that matches
counts. What no pattern matches is entitled to nothing, and has what the others leave. Any thread.

The pinned refs of a home and the data sets they are of: a small JSON file beside the index, which outlives it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from datacache.core.disk import replace_file
from datacache.tiers.eviction import ContainerState

NOBODY = ""
"""The group of data sets that no pattern matches."""


class Held(NamedTuple):
    """A container and the group it belongs to."""

    state: ContainerState
    group: str


class Shares:
    """The setting `shares`: patterns and weights, in their order."""

    def __init__(self, weights: Iterable[tuple[str, float]] = ()) -> None:
        self._weights = dict(weights)
        self._total = sum(self._weights.values())

    def __bool__(self) -> bool:
        return bool(self._weights)

    def groups(self) -> list[str]:
        """All that have a share."""
        return list(self._weights)

    def group(self, dataset: str) -> str:
        """The group of a data set."""
        return next((pattern for pattern in self._weights if fnmatchcase(dataset, pattern)), NOBODY)

    def flow(self, dataset: str) -> str:
        """With whom a data set takes its turns: its group, or itself where it has none."""
        return self.group(dataset) or dataset

    def entitled_bytes(self, group: str, budget_bytes: int) -> int:
        """Return how much of a budget a group may always have."""
        return int(budget_bytes * self._weights.get(group, 0.0) / self._total) if self._total else 0


def to_take_back(
    held: Iterable[Held], need_bytes: int, used_bytes: Mapping[str, int], entitled_bytes: Mapping[str, int], group: str
) -> list[int]:
    """Containers to evict for a group that has less than its share, until `need_bytes` come free: of the group that is
    most above its own share, what is not pinned first, and what was read longest ago. Never so much that another group
    is left below its share by more than a part of one container; fewer bytes than needed where that is all there is."""
    left = dict(used_bytes)
    of: dict[str, list[ContainerState]] = {}
    for each in held:
        if each.group != group:
            of.setdefault(each.group, []).append(each.state)
    for states in of.values():
        states.sort(key=lambda state: (state.pinned, state.last_used_s), reverse=True)
    chosen: list[int] = []
    freed = 0
    while freed < need_bytes:
        over = {name: left.get(name, 0) - entitled_bytes.get(name, 0) for name, states in of.items() if states}
        most = max(over, key=lambda name: over[name], default=None)
        if most is None or over[most] <= 0:
            break
        state = of[most].pop()
        chosen.append(state.id)
        freed += state.size_bytes
        left[most] -= state.size_bytes
    return chosen


def may_evict(group: str, owner: str, used_bytes: Mapping[str, int], entitled_bytes: Mapping[str, int]) -> bool:
    """Tell whether the policy may take a container of `owner` for a group that has its share already: its own, and of
    those that are above theirs.
    """
    return owner == group or used_bytes.get(owner, 0) > entitled_bytes.get(owner, 0)


log = logging.getLogger(__name__)


def read(path: Path) -> dict[str, str]:
    """Ref → data set; empty if there is no such file."""
    try:
        return {str(ref): str(dataset) for ref, dataset in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as exc:
        log.warning("the pins in %s cannot be read: %s", path, exc)
        return {}


def write(path: Path, pins: dict[str, str]) -> None:
    """Replace the file as a whole, durably. `OSError` leaves it as it was."""
    replace_file(path, json.dumps(pins).encode())
