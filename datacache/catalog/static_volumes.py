"""Which snapshot a Kubernetes volume is that nobody provisioned, such as a PV written by hand: documents of kind
`csi-static`, by volume id (the PV's `volumeHandle`).

What such a volume's reference means is written down when a node first needs it, so that all nodes show the same
snapshot, wherever a tag moves. Nobody tells that such a volume is gone, so this stays until it is forgotten. Used by
the CSI driver and `dsctl k8s forget`. Any thread and process may call.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from datacache.catalog.base import Catalog

_KIND = "csi-static"


def snapshot_of(catalog: Catalog, volume_id: str, reference: str, resolve: Callable[[], str]) -> str:
    """The `NAME@ID` that a volume is, which was asked for as `reference`: what was written down, or now, for all who
    come later, what `resolve` gives. Another reference is resolved anew."""
    while True:
        text = catalog.document(_KIND, volume_id)
        known = json.loads(text) if text is not None else {}
        if known.get("asked") == reference:
            return str(known["dataset"])
        dataset = resolve()
        if catalog.set_document(_KIND, volume_id, json.dumps({"asked": reference, "dataset": dataset}), old=text):
            return dataset


def forget(catalog: Catalog, volume_id: str) -> bool:
    """Have the volume's reference resolved anew by who needs it next; whether anything was known."""
    return catalog.remove_document(_KIND, volume_id)
