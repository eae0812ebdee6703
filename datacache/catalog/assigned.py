"""The resource of Kubernetes that makes a data set's versions: documents of the kind `assigned` in the catalog.

Names of data sets are global, and DataSet resources are in namespaces. The first resource that names a free data set
gets it and keeps it, also when the resource is deleted, so that nobody else's data ever come under a name that people
train on. Used by the CSI controller and by `dsctl k8s assign`. Any thread and process may call; of two that want a name
at once one gets it.
"""

from __future__ import annotations

import re

from datacache.catalog.base import Catalog
from datacache.catalog.refs import check_name
from datacache.core.errors import UsageError

KIND = "assigned"
_RESOURCE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?/[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def assigned_to(catalog: Catalog, dataset: str) -> str:
    """Return the resource that has a data set, as `NAMESPACE/NAME`; '' for none. The data set need not exist."""
    return catalog.document(KIND, check_name(dataset)) or ""


def assign(catalog: Catalog, dataset: str, resource: str, *, old: str | None = None) -> bool:
    """Give a data set to a resource (`NAMESPACE/NAME`; '': to none), with `old` only while it is that one's.

    Return whether it is its now. Raise `UsageError` for what can name no resource.
    """
    if resource and not _RESOURCE.fullmatch(resource):
        raise UsageError(
            f"{resource!r} cannot be a resource", hint="Write NAMESPACE/NAME, as kubectl get datasets -A has them."
        )
    while True:
        before = assigned_to(catalog, dataset)
        if before == resource:
            return True
        if old is not None and before != old:
            return False
        if resource:
            done = catalog.set_document(KIND, dataset, resource, old=before or None)
        else:
            done = catalog.remove_document(KIND, dataset, old=before)
        if done:
            return True
