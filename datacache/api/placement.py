"""Where work should run: a preference of pods for nodes that hold their data, as Kubernetes takes it.

Always a preference. What is required keeps a pod waiting when the warm nodes are full, and a volume's topology pins it
for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datacache.catalog.holdings import FULL, PART, snapshot_label

_MOST_WEIGHT = 100
"""Kubernetes' own limit, for a preference of a node."""


def preferred_nodes(snapshots: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the terms of a pod's `preferredDuringSchedulingIgnoredDuringExecution` for snapshots, given as their sizes
    in bytes by their ids. A node that holds all of the largest one counts 100, one with much of it 50, and nodes with
    others by their sizes."""
    largest = max(snapshots.values(), default=0)
    terms = []
    for id, size_bytes in snapshots.items():
        weight = max(2, round(_MOST_WEIGHT * size_bytes / largest)) if largest else _MOST_WEIGHT
        for value, counts in ((FULL, weight), (PART, weight // 2)):
            wanted = {"key": snapshot_label(id), "operator": "In", "values": [value]}
            terms.append({"weight": counts, "preference": {"matchExpressions": [wanted]}})
    return terms
