"""Quotas of Kubernetes' namespaces: documents of kind `quota` in the catalog, one for each namespace, and `*` for those
without one of their own.

A quota limits what a namespace's data sets may take of each node's cache (`cache`), and what its bucket volumes may
hold together (`staging`): the sum of their requested capacities, which bounds what any node stages for them. Used by
the CSI driver and `dsctl k8s quota`. What nodes hold is in documents of kind `quota-use`, one for each node, which end
by themselves (`leases`). Any thread and process may call; two that change a quota at once lose neither change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from datacache.catalog.access import check_namespace
from datacache.catalog.base import Catalog
from datacache.catalog.leases import QUOTA_USES, REPORT_LEASE_S, all_documents, lasts
from datacache.core.errors import CatalogError, UsageError
from datacache.core.ipc import parse_object

KIND = "quota"
DEFAULT = "*"
"""The key of the quota of namespaces without one of their own."""
_VOLUME_KIND = "csi-volume"  # see csi_driver.volume_records
_VERSION = 1
_MOST_BYTES = 2**63 - 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NamespaceQuota:
    """The limits of a namespace, in bytes; None: no limit."""

    cache_bytes: int | None = None
    """Of each node's cache."""
    staging_bytes: int | None = None
    """The capacities of its bucket volumes together."""
    said: frozenset[str] = frozenset()
    """Which of `cache` and `staging` its own document says; the others are those of `*`."""


@dataclass(frozen=True, kw_only=True)
class NamespaceQuotas:
    """The quotas of all namespaces at one moment."""

    own: Mapping[str, NamespaceQuota] = field(default_factory=dict)
    """As the documents say them, `*` among them."""

    def of(self, namespace: str) -> NamespaceQuota:
        """Return a namespace's quota: its own, with what that leaves unsaid from `*`."""
        own, default = self.own.get(namespace, NamespaceQuota()), self.own.get(DEFAULT, NamespaceQuota())
        return NamespaceQuota(
            cache_bytes=own.cache_bytes if "cache" in own.said else default.cache_bytes,
            staging_bytes=own.staging_bytes if "staging" in own.said else default.staging_bytes,
            said=own.said,
        )


@dataclass(frozen=True, kw_only=True)
class NodeUse:
    """The use that namespaces made of one node a moment ago."""

    node: str
    cache_bytes: Mapping[str, int] = field(default_factory=dict)
    staged_bytes: Mapping[str, int] = field(default_factory=dict)
    """What is written and not uploaded yet."""


def read_quotas(catalog: Catalog) -> NamespaceQuotas:
    """Return all quotas. Raise `CatalogError` for a document that cannot be understood."""
    return NamespaceQuotas(own={key: _parse(key, text) for key, text in all_documents(catalog.documents, KIND)})


def quota_of(catalog: Catalog, namespace: str) -> NamespaceQuota:
    """Return the quota of one namespace. Raise `UsageError` for what can name none, `CatalogError` as `read_quotas`."""
    check_namespace(namespace)
    texts = {key: catalog.document(KIND, key) for key in (namespace, DEFAULT)}
    own = {key: _parse(key, text) for key, text in texts.items() if text is not None}
    return NamespaceQuotas(own=own).of(namespace)


def set_quota(catalog: Catalog, namespace: str, changes: Mapping[str, int | None]) -> NamespaceQuota:
    """Change the quota of a namespace, or of `*`, and return what it says by itself now. `changes`: new limits of
    `cache` and `staging`, None for no limit; what is not named stays. `UsageError` for impossible ones."""
    _check_key(namespace)
    for name, size in changes.items():
        if size is not None and not 0 <= size <= _MOST_BYTES:
            raise UsageError(f"--{name}: {size:,} bytes cannot be a quota", hint=f"It is 0 to {_MOST_BYTES:,} bytes.")
    while True:
        old = catalog.document(KIND, namespace)
        quota = NamespaceQuota() if old is None else _parse(namespace, old)
        sizes = {f"{name}_bytes": size for name, size in changes.items()}
        quota = replace(quota, **sizes, said=quota.said | set(changes))
        if catalog.set_document(KIND, namespace, _text(quota), old=old):
            return quota


def remove_quota(catalog: Catalog, namespace: str) -> None:
    """Forget the quota of a namespace, which has that of `*` then. `UsageError` if it has none of its own."""
    _check_key(namespace)
    if not catalog.remove_document(KIND, namespace):
        known = sorted(key for key, _ in all_documents(catalog.documents, KIND))
        hint = f"These have one: {', '.join(known)}." if known else "No namespace has one. See: dsctl k8s quota --help"
        raise UsageError(f"namespace {namespace} has no quota of its own", hint=hint)


def capacities(catalog: Catalog) -> dict[str, int]:
    """Return what the bucket volumes of each namespace may hold together, by the volumes that were provisioned.
    Damaged records do not count; the log names them."""
    given: dict[str, int] = {}
    for id, text in all_documents(catalog.documents, _VOLUME_KIND):
        try:
            record = parse_object(text)
            context, size_bytes = record["context"], int(record["capacity_bytes"])
            namespace = str(context.get("namespace", "")) if context.get("bucket") else ""
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as exc:
            _log.warning("the catalog's record of the volume %s is damaged and does not count: %r", id, exc)
            continue
        if namespace:
            given[namespace] = given.get(namespace, 0) + size_bytes
    return given


def report_use(catalog: Catalog, use: NodeUse) -> None:
    """Say what namespaces have of a node now, in place of what it said before."""
    until_s = round(catalog.now_s() + REPORT_LEASE_S, 3)
    said = {"until_s": until_s, "cache": dict(use.cache_bytes), "staged": dict(use.staged_bytes)}
    text = json.dumps(said)
    while not catalog.set_document(QUOTA_USES, use.node, text, old=catalog.document(QUOTA_USES, use.node)):
        pass


def node_uses(catalog: Catalog) -> Iterator[NodeUse]:
    """Yield what nodes have said lately. Documents that cannot be understood count as none."""
    now_s = catalog.now_s()
    for node, text in all_documents(catalog.documents, QUOTA_USES):
        use = _use(node, text, now_s)
        if use is not None:
            yield use


def _use(node: str, text: str, now_s: float) -> NodeUse | None:
    """Return a node's report; None if its time is over at `now_s`, or if it says nothing that makes sense."""
    try:
        found = parse_object(text)
        if not lasts(float(found["until_s"]), now_s, REPORT_LEASE_S):
            return None
        sizes = [{str(name): int(size) for name, size in found[key].items()} for key in ("cache", "staged")]
        return NodeUse(node=node, cache_bytes=sizes[0], staged_bytes=sizes[1])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _check_key(namespace: str) -> None:
    if namespace != DEFAULT:
        check_namespace(namespace)


def _parse(namespace: str, text: str) -> NamespaceQuota:
    cause: Exception | None = None
    try:
        found = parse_object(text)
        if found["version"] == _VERSION:
            said = {name: found[name] for name in ("cache", "staging") if name in found}
            if all(size is None or (type(size) is int and 0 <= size <= _MOST_BYTES) for size in said.values()):
                cache, staging = said.get("cache"), said.get("staging")
                return NamespaceQuota(cache_bytes=cache, staging_bytes=staging, said=frozenset(said))
    except (ValueError, KeyError) as exc:
        cause = exc
    raise CatalogError(
        f"the quota of namespace {namespace} cannot be understood",
        hint=f"A newer datacache has written it: use that version, or: dsctl k8s quota '{namespace}' --remove",
    ) from cause


def _text(quota: NamespaceQuota) -> str:
    values = {"cache": quota.cache_bytes, "staging": quota.staging_bytes}
    return json.dumps({"version": _VERSION} | {name: size for name, size in values.items() if name in quota.said})
