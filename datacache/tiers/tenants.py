"""Which namespaces of Kubernetes have which data sets of this node, and what each may have of a tier.

A data set is charged in equal parts to the namespaces that have it mounted, or to those that had it last: what a
namespace leaves behind stays its own until it is evicted or others mount it. What nobody ever mounted through
Kubernetes is charged to nobody. The driver tells the daemon (operation `tenants`), which keeps it in
`<home>/cache/tenants.json`, so that it holds from a daemon's start. `Charges` belong to the writer's thread; other
threads may look.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from datacache.core.disk import replace_file
from datacache.core.ipc import parse_object

log = logging.getLogger(__name__)
_MOST_REMEMBERED = 10_000
ANY_OTHER = "*"


@dataclass(frozen=True, kw_only=True)
class Tenants:
    """The namespaces of a node."""

    limits: Mapping[str, int | None] = field(default_factory=dict)
    """By namespace, how many bytes of the node's cache it may have, None for no limit; `*` is for all others."""
    users: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By data set, the namespaces that have it mounted."""
    had: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By data set, those that had it last."""

    def owners(self, dataset: str) -> tuple[str, ...]:
        """Return the namespaces that a data set is charged to."""
        return self.users.get(dataset) or self.had.get(dataset, ())

    def limit(self, namespace: str) -> int | None:
        """Return how many bytes of the node's cache a namespace may have; None for no limit."""
        return self.limits.get(namespace if namespace in self.limits else ANY_OTHER)

    def followed_by(self, limits: Mapping[str, int | None] | None, users: Mapping[str, Iterable[str]]) -> Tenants:
        """Return what holds once the driver tells this; None leaves the limits as they are."""
        now = {dataset: tuple(sorted(set(names))) for dataset, names in sorted(users.items()) if names}
        had = {dataset: names for dataset, names in self.had.items() if dataset not in now} | now
        for dataset in list(had)[:-_MOST_REMEMBERED]:
            del had[dataset]
        return Tenants(limits=self.limits if limits is None else dict(limits), users=now, had=had)


NO_TENANTS = Tenants()


class Charges:
    """What namespaces have of one tier, or of one part of it."""

    def __init__(self) -> None:
        self._tenants, self._scale = NO_TENANTS, 1.0
        self.datasets: dict[str, int] = {}
        """The bytes of each data set."""
        self.namespaces: dict[str, float] = {}
        """The bytes that each namespace is charged."""

    def set(self, tenants: Tenants, scale: float) -> None:
        """Charge by what is known now. `scale`: the part of each limit that is this tier's."""
        self._tenants, self._scale, self.namespaces = tenants, scale, {}
        for dataset, size_bytes in self.datasets.items():
            self._charge(dataset, size_bytes)

    def count(self, dataset: str, size_bytes: int) -> None:
        """Count bytes that a data set has got, or lost (below 0)."""
        self.datasets[dataset] = self.datasets.get(dataset, 0) + size_bytes
        if not self.datasets[dataset]:
            del self.datasets[dataset]
        self._charge(dataset, size_bytes)

    def sole_owner(self, dataset: str) -> str | None:
        """Return the namespace that alone pays for a data set; None if several do, or nobody."""
        owners = self._tenants.owners(dataset)
        return owners[0] if len(owners) == 1 else None

    def is_mounted(self, dataset: str) -> bool:
        """Tell whether a namespace has a data set now."""
        return dataset in self._tenants.users

    def room_bytes(self, dataset: str) -> float:
        """Return how many bytes more of a data set its namespaces may have: as many as the one with the most room can
        pay its part of. Infinite if one of them has no limit."""
        return max(0.0, self._most(dataset, self.namespaces))

    def most_bytes(self, dataset: str) -> float:
        """Return how many bytes of a data set its namespaces may have if they have nothing else."""
        return self._most(dataset, {})

    def excess_bytes(self, dataset: str, more_bytes: int) -> Iterator[tuple[str, float]]:
        """Yield the namespaces that would be above their limits with so many bytes more of a data set, and by how
        many."""
        owners = self._tenants.owners(dataset)
        for name in owners:
            excess = self.namespaces.get(name, 0.0) + more_bytes / len(owners) - self._limit(name)
            if excess > 0:
                yield name, excess

    def above(self) -> list[tuple[str, float]]:
        """Return the namespaces that are above their limits, and by how many bytes."""
        over = ((name, size_bytes - self._limit(name)) for name, size_bytes in self.namespaces.items())
        return [(name, excess) for name, excess in over if excess > 0]

    def _most(self, dataset: str, taken: Mapping[str, float]) -> float:
        owners = self._tenants.owners(dataset)
        if not self._tenants.limits or not owners:
            return math.inf
        return max((self._limit(name) - taken.get(name, 0.0)) * len(owners) for name in owners)

    def _limit(self, namespace: str) -> float:
        limit = self._tenants.limit(namespace)
        return math.inf if limit is None else limit * self._scale

    def _charge(self, dataset: str, size_bytes: int) -> None:
        owners = self._tenants.owners(dataset)
        for name in owners:
            self.namespaces[name] = self.namespaces.get(name, 0.0) + size_bytes / len(owners)


def read_tenants(path: Path) -> Tenants:
    """Return what a file says of a node's namespaces; none if there is no such file."""
    try:
        found = parse_object(path.read_bytes())
        limits = {str(name): None if limit is None else int(limit) for name, limit in found["limits"].items()}
        users, had = (
            {str(dataset): tuple(map(str, names)) for dataset, names in found[key].items()} for key in ("users", "had")
        )
        return Tenants(limits=limits, users=users, had=had)
    except FileNotFoundError:
        return NO_TENANTS
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        log.warning(
            "the namespaces in %s cannot be read, and have no limits until the driver names them: %s", path, exc
        )
        return NO_TENANTS


def write_tenants(path: Path, tenants: Tenants) -> None:
    """Replace the file of a node's namespaces, durably. `OSError` leaves it as it was."""
    replace_file(path, json.dumps(asdict(tenants)).encode())
