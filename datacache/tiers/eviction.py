"""Which containers go when room is needed: pure functions of what is known about them.

`keep` suits epochs: a cyclic scan through `lru` evicts exactly what comes next, while keeping what is there gives a hit
rate of cache size over data set size (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021:
the MinIO cache). What nobody has read for `ttl_s` may go under every policy but `clairvoyant`, which knows better:
while orders are published, what none of them reads goes first, then what they read least and last (after Dryden et
al., "Clairvoyant Prefetching for Distributed Machine Learning I/O", SC 2021). Without published orders it is `keep`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class ContainerState(NamedTuple):
    """What a policy knows of a container."""

    id: int
    size_bytes: int
    last_used_s: float
    """Last read or write, Unix seconds."""
    pinned: bool
    value: float = 0.0
    """How often published orders read each of its bytes, what they read soon counting more; 0 if they do not, infinite
    if they do so right now."""


def victims(
    policy: str,
    containers: Iterable[ContainerState],
    need_bytes: int,
    *,
    now_s: float,
    ttl_s: float,
    planned: bool = False,
) -> Sequence[int]:
    """Ids to evict so that at least `need_bytes` come free; empty if the policy would rather not admit. `planned`: they
    are for what a published order reads next."""
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


def expired(policy: str, containers: Iterable[ContainerState], *, now_s: float, ttl_s: float) -> Sequence[int]:
    """Ids that policy `ttl` drops although nobody needs the room."""
    if policy != "ttl":
        return ()
    return [c.id for c in containers if not c.pinned and now_s - c.last_used_s > ttl_s]
