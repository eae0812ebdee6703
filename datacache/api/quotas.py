"""Quotas of Kubernetes' namespaces: what they may have of caches and staging areas, and what they have."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from datacache.api.opening import open_catalog
from datacache.catalog.access import check_namespace
from datacache.catalog.quotas import (
    DEFAULT,
    NamespaceQuota,
    capacities,
    node_uses,
    read_quotas,
    remove_quota,
    set_quota,
)
from datacache.settings import Settings, load_settings


@dataclass(frozen=True, kw_only=True)
class QuotaUse:
    """A namespace's quota, and what it has."""

    namespace: str
    """`*` for the default."""
    quota: NamespaceQuota
    """Its own, completed by the default."""
    capacity_bytes: int = 0
    """The number of bytes that its bucket volumes may hold together."""
    cache_bytes: Mapping[str, int]
    """By node that said something lately, what it has of that node's cache."""
    staged_bytes: Mapping[str, int]
    """By node, what is written and not uploaded yet."""


def namespace_quotas(namespace: str | None = None, settings: Settings | None = None) -> list[QuotaUse]:
    """Return what one namespace may have and has; without a name the default, if there is one, and all namespaces that
    have a quota or something that one would count. `UsageError` for what can name none; the errors of the catalog."""
    if namespace is not None and namespace != DEFAULT:
        check_namespace(namespace)
    with closing(open_catalog(settings or load_settings())) as catalog:
        quotas, given, nodes = read_quotas(catalog), capacities(catalog), list(node_uses(catalog))
    names = {*quotas.own, *given}
    for use in nodes:
        names |= {*use.cache_bytes, *use.staged_bytes}
    return [
        QuotaUse(
            namespace=name,
            quota=quotas.of(name),
            capacity_bytes=given.get(name, 0),
            cache_bytes={use.node: use.cache_bytes[name] for use in nodes if name in use.cache_bytes},
            staged_bytes={use.node: use.staged_bytes[name] for use in nodes if name in use.staged_bytes},
        )
        for name in sorted(names if namespace is None else {namespace}, key=lambda name: (name != DEFAULT, name))
    ]


def set_namespace_quota(
    namespace: str, changes: Mapping[str, int | None] | None, settings: Settings | None = None
) -> None:
    """Change a namespace's quota of `cache` (bytes of each node's cache) and `staging` (bytes that its bucket volumes
    may hold together), None for no limit; without `changes` forget its quota. `*` is the default of all others.

    Nodes follow within seconds: what a namespace has beyond it is evicted; volumes keep the capacity they have.
    `UsageError` for an impossible namespace or size.
    """
    with closing(open_catalog(settings or load_settings())) as catalog:
        if changes is None:
            remove_quota(catalog, namespace)
        else:
            set_quota(catalog, namespace, changes)
