"""Which data set a resource gets, and from where: what its namespace may have, and nobody else has already.

Resources are written by tenants, and Jobs run with the credentials of datacache. So a namespace names the sources that
`BucketRules` and the setting `sources` let it have, a name that is free or its own, and a data set that is open to it.
Answers about a closed data set do not tell whether it exists. Called by the reconciler's thread; the catalog is the
only state, and two controllers give a name once.
"""

from __future__ import annotations

from collections.abc import Mapping

from csi_driver.datasets.resource import ResourceIdentity, WantedDataset, WrongSpecError
from csi_driver.resolve import BucketRules
from datacache.catalog.access import Access, access_of, check_access, declare_access
from datacache.catalog.assigned import assign, assigned_to
from datacache.catalog.base import Catalog
from datacache.catalog.commit import check_target
from datacache.core.errors import AccessDeniedError, OtherKindError, SourceNotAllowedError
from datacache.manifest.model import Lineage, Naming
from datacache.settings import Settings
from datacache.store.sources import source_rules

_BUCKETS = ("s3", "gs", "az", "abfs", "abfss")


def check_source(wanted: WantedDataset, namespace: str, rules: BucketRules, settings: Settings) -> None:
    """Raise `WrongSpecError` unless a namespace may have a snapshot made of its source."""
    store, prefix = wanted.place
    if store.partition("://")[0] not in _BUCKETS:
        # A folder would be one of the Job's pod, where the credentials are.
        raise WrongSpecError("SourceNotAllowed", f"spec.source: {wanted.source} is no bucket of an object store")
    if not rules.allow(wanted.source, namespace):
        raise WrongSpecError(
            "SourceNotAllowed",
            f"spec.source: {wanted.source} is not open to namespace {namespace} ({rules.describe(namespace)}): use "
            "such a source, or have an administrator open this one (datasets.sources)",
        )
    places = source_rules(settings)
    try:
        if places is not None:
            places.check(store, prefix)
    except SourceNotAllowedError as exc:
        raise WrongSpecError("SourceNotAllowed", f"spec.source: {exc.message}. {exc.hint}") from exc
    if wanted.copy and not settings.objects:
        raise WrongSpecError(
            "NoPlaceForCopies",
            "spec.copy: an administrator has to say where copies go (settings.DATACACHE_OBJECTS); or leave it out",
        )


def claim_name(
    catalog: Catalog,
    identity: ResourceIdentity,
    wanted: WantedDataset,
    resources: Mapping[str, str],
    *,
    default: str,
) -> None:
    """Give a resource its data set, or raise `WrongSpecError`. `resources` are the names that all resources ask for,
    by their keys; `default` is the setting `access`."""
    name, namespace = wanted.dataset, identity.namespace
    while (owner := assigned_to(catalog, name)) != identity.key:
        free = not owner and catalog.dataset(name) is None
        if not free or access_of(catalog, name, default=default).listed:
            _check_open(catalog, name, namespace, default)
        left = owner.startswith(f"{namespace}/") and resources.get(owner) != name
        if not (free or left):
            raise _taken(name, owner, identity)
        assign(catalog, name, identity.key, old=owner)
    if access_of(catalog, name, default=default).listed:
        # Every list that a resource has written has its own namespace. Another one is an administrator's.
        _check_open(catalog, name, namespace, default)
    elif default == "none":
        declare_access(catalog, name, Access(everybody=False, allowed=(namespace,)))


def set_access(catalog: Catalog, wanted: WantedDataset) -> None:
    """Open a data set to those whom its resource names, before there is a snapshot that others could see."""
    if wanted.access is not None:
        declare_access(catalog, wanted.dataset, wanted.access)


def check_kind(catalog: Catalog, wanted: WantedDataset) -> None:
    """Raise `WrongSpecError` where the data set is something else, which the Job would find out after its start."""
    lineage = Lineage("create", {"from": wanted.source})
    try:
        check_target(catalog, Naming(name=wanted.dataset, tags=wanted.tags, replace=wanted.replace), lineage)
    except OtherKindError as exc:
        raise WrongSpecError(
            "OtherKind",
            f"{exc.message}. If that is what you mean, say spec.replace: true; else use another spec.name",
        ) from exc


def _check_open(catalog: Catalog, name: str, namespace: str, default: str) -> None:
    try:
        check_access(catalog, name, namespace, default=default)
    except AccessDeniedError as exc:
        raise WrongSpecError("AccessDenied", f"{exc.message}. {exc.hint}") from exc


def _taken(name: str, owner: str, identity: ResourceIdentity) -> WrongSpecError:
    if owner.startswith(f"{identity.namespace}/"):
        return WrongSpecError("NameTaken", f"the DataSet {owner} makes {name} already: use another spec.name")
    made_by = "a DataSet of another namespace makes" if owner else "there is"
    return WrongSpecError(
        "NameTaken",
        f"{made_by} a data set {name} already: use another spec.name, or have an administrator give it to this one: "
        f"dsctl k8s assign {name} {identity.key}",
    )
