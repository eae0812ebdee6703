"""Choose the containers that go when room is needed: pure functions, by a policy and by shares of the cache.

`keep` suits epochs: a cyclic scan through `lru` evicts exactly what comes next, while keeping what is there gives a hit
rate of cache size over data set size (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021:
the MinIO cache). Containers without a read for `ttl_s` may go under every policy but `clairvoyant`: while orders are
published, it evicts first what none of them reads, then what they read least and last (after Dryden et al.,
"Clairvoyant Prefetching for Distributed Machine Learning I/O", SC 2021). Without published orders it is `keep`.

Shares entitle groups of data sets to a part of a tier, which takes room back for a group below its share from those
above theirs. A group is one pattern of names, such as `team-a-*`; the first that matches counts. Data sets that no
pattern matches are entitled to nothing, and have what the others leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple


class ContainerState(NamedTuple):
    """The facts that a policy knows of a container."""

    id: int
    size_bytes: int
    last_used_s: float
    """Last read or write, Unix seconds."""
    pinned: bool
    value: float = 0.0
    """How often published orders read each of its bytes, soon reads counting more; 0 for never, infinite for right
    now."""
    group: str = ""
    """Its data set's, by `Shares.group`."""


def victims(
    policy: str,
    containers: Iterable[ContainerState],
    need_bytes: int,
    *,
    now_s: float,
    ttl_s: float,
    planned: bool = False,
) -> Sequence[int]:
    """Return ids to evict so that at least `need_bytes` come free; none if the policy would rather not admit.
    `planned`: the room is for blocks that a published order reads next."""
    free, chosen = 0, []
    candidates = [c for c in containers if not c.pinned]
    if policy == "keep":
        candidates = [c for c in candidates if now_s - c.last_used_s > ttl_s]
    elif policy == "clairvoyant":
        candidates = [c for c in candidates if (c.value < math.inf if planned else not c.value)]
    for container in sorted(candidates, key=lambda c: (c.value, c.last_used_s)):
        if free >= need_bytes:
            break
        chosen.append(container.id)
        free += container.size_bytes
    return chosen if free >= need_bytes else ()


NOBODY = ""
"""The group of data sets that no pattern matches."""


class Shares:
    """The setting `shares`: patterns and weights, in their order."""

    def __init__(self, weights: Iterable[tuple[str, float]] = ()) -> None:
        self._weights = dict(weights)
        self._total = sum(self._weights.values())

    def __bool__(self) -> bool:
        return bool(self._weights)

    def groups(self) -> list[str]:
        """Return all groups that have a share."""
        return list(self._weights)

    def group(self, dataset: str) -> str:
        """Return the group of a data set."""
        return next((pattern for pattern in self._weights if fnmatchcase(dataset, pattern)), NOBODY)

    def flow(self, dataset: str) -> str:
        """Return with whom a data set takes its turns: its group, or itself if it has none."""
        return self.group(dataset) or dataset

    def entitled_bytes(self, group: str, budget_bytes: int) -> int:
        """Return how much of a budget a group may always have."""
        return int(budget_bytes * self._weights.get(group, 0.0) / self._total) if self._total else 0


def to_take_back(
    containers: Iterable[ContainerState],
    need_bytes: int,
    used_bytes: Mapping[str, int],
    entitled_bytes: Mapping[str, int],
    group: str,
) -> list[int]:
    """Return the containers to evict for a group below its share, until `need_bytes` come free: from the group that is
    most above its own share, unpinned ones first, then those read longest ago. No other group gets below its share by
    more than a part of one container; so less than needed may come free."""
    left = dict(used_bytes)
    of: dict[str, list[ContainerState]] = {}
    for state in sorted(containers, key=lambda state: (state.pinned, state.last_used_s), reverse=True):
        if state.group != group:
            of.setdefault(state.group, []).append(state)
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
    """Tell whether the policy may take a container of `owner` for a group that has its share: only its own, and those
    of groups above theirs."""
    return owner == group or used_bytes.get(owner, 0) > entitled_bytes.get(owner, 0)
