"""Add up reads, fetches and evictions by data set and by namespace of Kubernetes: for metrics, so in few names.

Made of sums by data set, each look adding what has come since the one before: to the data set, and in equal parts to
the namespaces that have it by then. The largest have names of their own, the rest one together, so that Prometheus
keeps a bounded number of series however many data sets there are. One thread: the tiers' writer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datacache.tiers.tenants import Tenants

REST = "(other)"
"""The name of all but the largest: no data set and no namespace can have it."""
_LARGEST = 20
COUNTED = ("hits", "hit_bytes", "misses", "miss_bytes", "fetched_bytes", "evicted_bytes")
Sums = Mapping[str, Mapping[str, int]]
"""By data set, and by the names in `COUNTED`."""


class OwnerCounts:
    """The counters of one daemon, or of one of its parts."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}
        self._of_datasets: dict[str, dict[str, float]] = {}
        self._of_namespaces: dict[str, dict[str, float]] = {}

    def look(
        self, sums: Sums, tenants: Tenants, datasets: Mapping[str, int], namespaces: Mapping[str, float]
    ) -> dict[str, list[dict[str, Any]]]:
        """Add what is new in `sums`; return the counters and `held_bytes` of the largest `datasets` and `namespaces`
        (their bytes on the disk) and of the rest."""
        of_datasets = _largest({*sums, *datasets}, datasets)
        owners = {name: tenants.owners(name) for name in sums}
        of_namespaces = _largest({*namespaces, *(each for some in owners.values() for each in some)}, namespaces)
        for name, now in sums.items():
            before = self._seen.setdefault(name, {})
            for what, value in now.items():
                # Less than before: its counters were lost, and have begun anew.
                new = value - before.get(what, 0) if value >= before.get(what, 0) else value
                before[what] = value
                if new:
                    _add(self._of_datasets, name if name in of_datasets else REST, what, new)
                    for owner in owners[name]:
                        label = owner if owner in of_namespaces else REST
                        _add(self._of_namespaces, label, what, new / len(owners[name]))
        return {
            "by_dataset": _shown(self._of_datasets, of_datasets, datasets),
            "by_namespace": _shown(self._of_namespaces, of_namespaces, namespaces),
        }


def _largest(names: set[str], held: Mapping[str, float]) -> list[str]:
    return sorted(names, key=lambda name: (-held.get(name, 0), name))[:_LARGEST]


def _add(counts: dict[str, dict[str, float]], label: str, what: str, value: float) -> None:
    of_label = counts.setdefault(label, {})
    of_label[what] = of_label.get(what, 0) + value


def _shown(counts: dict[str, dict[str, float]], largest: list[str], held: Mapping[str, float]) -> list[dict[str, Any]]:
    for gone in counts.keys() - {*largest, REST}:
        del counts[gone]
    rest = sum(size for name, size in held.items() if name not in largest)
    labels = [*largest, *([REST] if rest or REST in counts else [])]
    return [
        {"name": label, "held_bytes": round(rest if label == REST else held.get(label, 0))}
        | {what: round(counts.get(label, {}).get(what, 0)) for what in COUNTED}
        for label in labels
    ]
