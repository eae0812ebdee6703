"""Read a DataSet resource: what it wants, and what its status says.

The API server has checked the fields by the schema in `deploy/helm/datacache/templates/datasets.yaml`; they are checked
again here, as a schema can be changed in the cluster and a tenant writes them. Pure values. Any thread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import grpc

from csi_driver.status import RequestError
from datacache.catalog.access import Access, check_namespace
from datacache.catalog.refs import check_name, check_tag
from datacache.core.errors import UsageError
from datacache.store.urls import join_url, split_url

GROUP, VERSION, PLURAL = "datacache.io", "v1alpha1", "datasets"
READY = "Ready"
_T = TypeVar("_T")


class Condition(NamedTuple):
    """The condition `Ready` of a resource: `status` is True, False or Unknown, `message` says what to do."""

    status: str
    reason: str
    message: str


class WrongSpecError(RequestError):
    """Refuse a resource, with the reason of its condition."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(grpc.StatusCode.INVALID_ARGUMENT, message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class ResourceIdentity:
    """The metadata by which a resource is known. They come from the API server."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    status: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return `NAMESPACE/NAME`."""
        return f"{self.namespace}/{self.name}"

    @property
    def condition(self) -> Mapping[str, Any]:
        """Return the condition `Ready` as it stands, {} for none."""
        found = [each for each in self.status.get("conditions") or () if each.get("type") == READY]
        return found[0] if found else {}


@dataclass(frozen=True, kw_only=True)
class WantedDataset:
    """The specification of a resource."""

    dataset: str
    source: str
    """The URL, as snapshots record it."""
    tags: tuple[str, ...] = ()
    copy: bool = False
    replace: bool = False
    schedule: str = ""
    time_zone: str = ""
    suspend: bool = False
    run: str = ""
    access: Access | None = None

    @property
    def place(self) -> tuple[str, str]:
        """Return the source as store and prefix."""
        return split_url(self.source)

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of `dsctl` that make a snapshot. None can be taken for another option."""
        flags = ["--copy"] * self.copy + ["--replace"] * self.replace
        tags = [f"--tag={tag}" for tag in self.tags] + ["--move-tags"] * bool(self.tags)
        return ["snapshot", "create", self.dataset, f"--from={self.source}", *tags, *flags]

    @property
    def digest(self) -> str:
        """Return a hash of what a snapshot depends on: with another one, a snapshot is made at once."""
        values = [self.dataset, self.source, self.tags, self.copy, self.replace, self.run]
        return hashlib.blake2b(json.dumps(values).encode(), digest_size=8).hexdigest()


def identity_of(resource: Mapping[str, Any]) -> ResourceIdentity:
    """Return the metadata and status of a resource as the API has it."""
    metadata = resource["metadata"]
    return ResourceIdentity(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=int(metadata.get("generation") or 0),
        resource_version=str(metadata.get("resourceVersion") or ""),
        status=resource.get("status") or {},
    )


def dataset_of(resource: Mapping[str, Any]) -> str:
    """Return the name of the data set that a resource asks for, checked or not."""
    spec = resource.get("spec")
    return str((spec.get("name") if isinstance(spec, Mapping) else None) or resource["metadata"]["name"])


def wanted_of(resource: Mapping[str, Any]) -> WantedDataset:
    """Return what a resource wants. Raise `WrongSpecError` naming the field that is wrong."""
    spec = resource.get("spec") or {}
    try:
        source = _typed(spec, "source", "")
        if any(not c.isprintable() for c in source) or "://" not in source:
            raise WrongSpecError("WrongSpec", "spec.source is no URL of a bucket: write s3://BUCKET/PREFIX")
        return WantedDataset(
            dataset=check_name(dataset_of(resource)),
            source=join_url(*split_url(source)),
            tags=tuple(check_tag(tag) for tag in _texts(spec, "tags")),
            copy=_typed(spec, "copy", False),
            replace=_typed(spec, "replace", False),
            schedule=_typed(spec, "schedule", ""),
            time_zone=_typed(spec, "timeZone", ""),
            suspend=_typed(spec, "suspend", False),
            run=_typed(spec, "run", ""),
            access=_access(spec["access"], resource["metadata"]["namespace"]) if spec.get("access") else None,
        )
    except UsageError as exc:
        words = f"{exc.message}. {exc.hint}".removesuffix(". ")
        raise WrongSpecError("WrongSpec", words) from exc


def _access(spec: Mapping[str, Any], namespace: str) -> Access:
    """Return the list that a resource wants. Its own namespace is always let in."""
    if not isinstance(spec, Mapping):
        raise WrongSpecError("WrongSpec", "spec.access is no object")
    everybody = _typed(spec, "everybody", False)
    allow, deny = _texts(spec, "allow", "spec.access"), _texts(spec, "deny", "spec.access")
    for each in (*allow, *deny):
        check_namespace(each)
    if everybody and allow:
        raise WrongSpecError("WrongSpec", "spec.access: with everybody: true there is nothing to allow; leave one out")
    if deny and not everybody:
        raise WrongSpecError("WrongSpec", "spec.access: deny takes from everybody: true; without it, leave deny out")
    if everybody:
        return Access(everybody=True, denied=tuple(sorted({*deny} - {namespace})))
    return Access(everybody=False, allowed=tuple(sorted({*allow, namespace})))


def _typed(spec: Mapping[str, Any], name: str, default: _T) -> _T:
    value = spec.get(name)
    if value is None:
        return default
    if not isinstance(value, type(default)):
        raise WrongSpecError("WrongSpec", f"spec.{name} is {value!r}, and not a {type(default).__name__}")
    return value


def _texts(spec: Mapping[str, Any], name: str, place: str = "spec") -> list[str]:
    values = spec.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise WrongSpecError("WrongSpec", f"{place}.{name} is no list of texts")
    return values
