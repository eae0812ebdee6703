"""Label the nodes with what they hold of snapshots: `cache.datacache.io/HASH=full` or `part`.

Pods that would rather start near their data prefer such nodes (`datacache.api.preferred_nodes`). A thread of the
controller compares what nodes say (`datacache.catalog.holdings`) with the labels that they have, and patches the
difference. The labels are all the state there is: a controller that starts, or a second one beside it, comes to the
same. A node that says nothing any more, as it died or has no node pod, loses its labels.

A label does not flicker: it comes at 95 % (`full`) or 30 % (`part`), and goes below 90 % or 20 %. A node has 64 at
most, as they are copied wherever nodes are listed: first those of snapshots that PVCs have, then those with the most
bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from csi_driver.kube import KubeApi
from csi_driver.metrics import COUNTS
from csi_driver.status import RequestError
from csi_driver.volume_records import dataset_specs
from datacache.api import open_catalog
from datacache.catalog.holdings import FULL, LABEL_PREFIX, PART, Holding, holdings, snapshot_label
from datacache.core.concurrency import RepeatedCall
from datacache.settings import Settings
from datacache.store.clock import elapsed_s

MOST_LABELS = 64
_FROM = {FULL: 0.95, PART: 0.30}
_UNTIL = {FULL: 0.90, PART: 0.20}
_STAYS = 1.25
"""So many more bytes than a labelled snapshot another one needs to take its place."""
_LOOK_EVERY_S = 30.0
_LIST_EVERY_S = 300.0
"""How often nodes are listed though what they say is what they said before: somebody may have changed labels."""
_log = logging.getLogger(__name__)


def wanted_labels(
    have: Mapping[str, str], held: Mapping[str, Holding], claimed: Collection[str] = ()
) -> dict[str, str]:
    """Return the labels that a node should have now. `have`: ours that it has; `held`: what it holds, and `claimed`:
    the snapshots of PVCs, by their ids."""
    found = []
    for id, holding in held.items():
        key = snapshot_label(id)
        value = _value(holding.share, have.get(key, ""))
        if value:
            found.append((id in claimed, holding.held_bytes * (_STAYS if key in have else 1), key, value))
    return {key: value for _, _, key, value in sorted(found, reverse=True)[:MOST_LABELS]}


def _value(share: float, now: str) -> str:
    """Return the value of a label for a share; '' for none. `now`: the present value."""
    if share >= (_UNTIL if now == FULL else _FROM)[FULL]:
        return FULL
    return PART if share >= (_UNTIL if now in (FULL, PART) else _FROM)[PART] else ""


class NodeLabels:
    """The labels of all nodes. One thread calls `look`: its own, after `start`."""

    def __init__(self, settings: Settings, api: KubeApi) -> None:
        self._catalog, self._api = open_catalog(settings), api
        self._seen: dict[str, dict[str, Holding]] | None = None
        """The words of the nodes when their labels were right; None where that is not known."""
        self._listed_at = float("-inf")
        trouble = "nodes are not labelled with what they hold"
        self._looks = RepeatedCall("node-labels", self.look, _LOOK_EVERY_S, trouble=trouble, log=_log)

    def start(self) -> None:
        """Start the thread."""
        self._looks.start()

    def close(self) -> None:
        """End the thread, and close the catalog. A call of the API under way ends with the process."""
        self._looks.stop(1.0)
        self._catalog.close()

    def look(self) -> int:
        """Put the labels right; return how many nodes were patched. `RequestError` where the API does not let us, after
        all nodes were tried; the catalog's errors."""
        held = holdings(self._catalog)
        if held == self._seen and elapsed_s() - self._listed_at < _LIST_EVERY_S:
            return 0
        self._seen = None
        many = any(len(snapshots) > MOST_LABELS for snapshots in held.values())
        claimed = {spec.ref.version for spec in dataset_specs(self._catalog)} if many else set()
        patched, failed = 0, None
        for node, have in self._api.node_labels(LABEL_PREFIX).items():
            want = wanted_labels(have, held.get(node, {}), claimed)
            changes = {key: want.get(key) for key in have.keys() | want.keys() if have.get(key) != want.get(key)}
            if changes:
                try:
                    patched += self._api.label_node(node, changes)
                except RequestError as exc:
                    failed = exc
        COUNTS.labelled(patched)
        if patched:
            _log.info("labelled %d nodes with what they hold of snapshots", patched)
        if failed is not None:
            raise failed
        self._seen, self._listed_at = held, elapsed_s()
        return patched
