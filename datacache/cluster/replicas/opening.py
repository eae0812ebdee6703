"""Compose what brings a staging area's changes to a second node. No state; any thread may call."""

from __future__ import annotations

import socket

from datacache.catalog.open import open_catalog_url
from datacache.cluster.members import open_members
from datacache.cluster.peers import open_peers
from datacache.cluster.replicas.lease import AreaLease
from datacache.cluster.replicas.sender import ReplicaSender
from datacache.core.disk import replace_file, sync_folder
from datacache.core.errors import StagingError, UsageError
from datacache.settings import Settings
from datacache.writeback.staging.area import StagingArea

REPLICATED = "replicated"
"""File of an area in which something may be pending that a second node has as well."""


class AreaTakenError(StagingError):
    """Another node has taken the area over."""


def open_replication(
    settings: Settings, area: StagingArea, endpoint: str, *, required: bool, in_use: bool
) -> ReplicaSender:
    """Return what keeps a second node abreast of an area. `required`: nothing is acknowledged without one, if the
    settings say so. `AreaTakenError` if another node has taken the area over, and it is put aside; `StagingError` where
    it is `in_use`: then programs have files of it open. `UsageError` where the settings lack what it takes; the
    catalog's errors."""
    if not settings.catalog_is_shared:
        raise UsageError(
            "which node may upload is settled in a catalog in MongoDB, and this node's is none",
            hint="For ack=replicated set DATACACHE_CATALOG to mongodb://…, the same on all nodes: docs/CLUSTER.md",
        )
    if settings.replica_lease_s < 2 * settings.store_timeout_s:
        raise UsageError(
            "a lease on a staging area must last for two requests to the store, and "
            f"{settings.replica_lease_s:g} s are less than two of {settings.store_timeout_s:g} s",
            hint="Raise DATACACHE_REPLICA_LEASE_S, or lower DATACACHE_STORE_TIMEOUT_S, on all nodes.",
        )
    members = open_members(settings, holder="")
    if members is None and required:
        raise UsageError(
            "ack=replicated needs other nodes, and this one is in no cluster",
            hint="Set DATACACHE_CLUSTER for this mount and for the daemons of the nodes: docs/CLUSTER.md",
        )
    node = settings.node or socket.gethostname()
    catalog = open_catalog_url(settings.catalog)
    lease = AreaLease(catalog, area.id, node, settings.replica_lease_s, request_s=settings.store_timeout_s)
    if lease.taken_by:
        if in_use:
            lease.check()
        aside = area.put_aside()
        lease.close(done=True)
        raise AreaTakenError(
            f"while this node was away the node {lease.taken_by} took over what was pending here, and uploads it; "
            f"nothing of it is uploaded from here, and when that is done {aside} can be deleted"
        )
    marker = area.folder / REPLICATED
    replace_file(marker, b"")

    def done() -> None:
        marker.unlink(missing_ok=True)
        sync_folder(area.folder)

    return ReplicaSender(
        lease,
        open_peers(settings, members) if members is not None else None,
        node=node,
        endpoint=endpoint,
        required=required and settings.replica == "require",
        wait_s=settings.staging_wait_s,
        done=done,
    )
