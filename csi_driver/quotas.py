"""Refuse what exceeds the quota of a namespace (`datacache.catalog.quotas`): bucket volumes and pins.

Used by the controller when a volume is provisioned or expanded, and by `node.preparation`. A volume that was given
keeps what it was given, whatever the quota says later. Any thread.
"""

from __future__ import annotations

import grpc

from csi_driver.status import RequestError, denied, invalid
from datacache.catalog.base import Catalog
from datacache.catalog.quotas import capacities, quota_of


def check_staging(
    catalog: Catalog,
    namespace: str,
    more_bytes: int,
    *,
    besides_bytes: int = 0,
    code: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED,
) -> None:
    """Raise unless the bucket volumes of a namespace ('': not known) may hold this many more bytes together:
    `RequestError` with `code`, or `INVALID_ARGUMENT` for a volume without a size, which could hold any number.
    `besides_bytes`: what volumes may hold that nobody provisioned."""
    limit = quota_of(catalog, namespace).staging_bytes if namespace else None
    if limit is None:
        return
    if not more_bytes:
        raise invalid(
            f"namespace {namespace} has a staging quota of {limit:,} bytes, of which each bucket volume takes its "
            "size: this one needs one (a PVC with resources.requests.storage)"
        )
    left = max(0, limit - capacities(catalog).get(namespace, 0) - besides_bytes)
    if more_bytes > left:
        raise RequestError(
            code,
            f"{more_bytes:,} bytes more are asked for, and of the staging quota of namespace {namespace}, {limit:,} "
            f"bytes, {left:,} are left: ask for less, delete volumes of buckets, or have it made larger (dsctl k8s "
            f"quota {namespace} --staging SIZE)",
        )


def check_pin_size(catalog: Catalog, namespace: str, ref: str, size_bytes: int, pinned_bytes: int = 0) -> None:
    """Raise PERMISSION_DENIED unless a namespace ('': not known) may pin this many more bytes on a node: what it pins
    is kept within its share of the cache."""
    limit = quota_of(catalog, namespace).cache_bytes if namespace else None
    if limit is not None and pinned_bytes + size_bytes > limit:
        already = f" beside the {pinned_bytes:,} that it pins on this node already" if pinned_bytes else ""
        raise denied(
            f"pin: {ref} has {size_bytes:,} bytes{already}, and namespace {namespace} may have {limit:,} bytes of a "
            f"node's cache. Leave the pin out, or have the quota made larger (dsctl k8s quota {namespace} --cache SIZE)"
        )
