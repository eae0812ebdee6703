"""How much of each snapshot the nodes hold: a document of the kind `holding` for each node, under the node's name.

The node's daemon writes it (`daemon.holdings`); the CSI driver's controller makes labels of it, by which Kubernetes
finds a node that has a pod's data. Snapshots are named by their ids, and labels by a hash of those, so neither names a
data set. A document ends by itself (`leases`): one of a node that died counts no more after a while. Any thread and
process may call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

from datacache.catalog.base import Catalog
from datacache.catalog.leases import HOLDINGS, REPORT_LEASE_S, all_documents, lasts
from datacache.core.ipc import parse_object

MOST_HELD = 256
"""The snapshots in one document, those with the most bytes: about 16 KiB."""
LABEL_PREFIX = "cache.datacache.io/"
FULL, PART = "full", "part"
"""The values of a label: a node holds all of a snapshot, or much of it. See `csi_driver.node_labels` for how much."""
_VERSION = 1
_MOST_BYTES = 2**63
"""Numbers beyond it are none of a snapshot, and too large to be divided."""
_IS_ID = re.compile(r"[0-9a-f]{32}")


class Holding(NamedTuple):
    """How much of one snapshot a node holds."""

    held_bytes: int
    total_bytes: int

    @property
    def share(self) -> float:
        """Return the part that is held, 0 to 1."""
        return min(1.0, self.held_bytes / self.total_bytes) if self.total_bytes else 0.0


def snapshot_label(id: str) -> str:
    """Return the key of the label that nodes with some of a snapshot have."""
    return f"{LABEL_PREFIX}{blake2b(id.encode(), digest_size=10).hexdigest()}"


def write_holdings(catalog: Catalog, node: str, snapshots: Mapping[str, Holding]) -> None:
    """Say what a node holds now, by the snapshots' ids, in place of what it said before; of more than `MOST_HELD`
    snapshots those with the most bytes. The catalog's errors."""
    most = sorted(snapshots.items(), key=lambda each: (-each[1].held_bytes, each[0]))[:MOST_HELD]
    until_s = round(catalog.now_s() + REPORT_LEASE_S, 3)
    text = json.dumps({"version": _VERSION, "until_s": until_s, "snapshots": dict(most)})
    while not catalog.set_document(HOLDINGS, node, text, old=catalog.document(HOLDINGS, node)):
        pass


def holdings(catalog: Catalog) -> dict[str, dict[str, Holding]]:
    """Return what nodes hold, by their names: those that have written lately. Documents that cannot be understood count
    as none."""
    now_s = catalog.now_s()
    found = {node: _parse(text, now_s) for node, text in all_documents(catalog.documents, HOLDINGS)}
    return {node: snapshots for node, snapshots in found.items() if snapshots is not None}


def _parse(text: str, now_s: float) -> dict[str, Holding] | None:
    """Return what a document says; None if its time is over at `now_s`, or if it says nothing that makes sense."""
    try:
        found = parse_object(text)
        if found["version"] != _VERSION or not lasts(float(found["until_s"]), now_s, REPORT_LEASE_S):
            return None
        snapshots = {id: Holding(int(held), int(total)) for id, (held, total) in found["snapshots"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    return {id: each for id, each in snapshots.items() if _IS_ID.fullmatch(id) and _makes_sense(each)}


def _makes_sense(holding: Holding) -> bool:
    return 0 < holding.held_bytes < _MOST_BYTES and 0 <= holding.total_bytes < _MOST_BYTES
