"""Keep provisioned volumes in the catalog: documents of the kind `csi-volume`, one for each, under its id.

The controller writes them. A node reads how much a bucket volume may hold by now (`quota_of`), as a PV's attributes
never change. Every change is one compare-and-set, so of two controllers both see one result. Any thread.

A StorageClass's parameter `capacity` is how much its bucket volumes may hold together. What is counted are quotas, not
bytes that are there: a volume that was given is never without the room it was promised. All volumes count that were
made with the same other parameters and some `capacity`, as a class is changed by deleting it and making it anew;
Kubernetes tells the driver no class's name. A data set's volume takes no room. Whoever gives room away holds a lock
from `check_room` until the volume's record says so.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache

import grpc

from csi_driver.status import RequestError, invalid
from csi_driver.volumes import CAPACITY, VolumeSpec, of_volume, parse_context
from datacache.catalog.base import Catalog
from datacache.core.errors import CatalogError, CatalogUnavailableError, DatacacheError
from datacache.core.ipc import parse_object
from datacache.settings import parse_bytes

KIND = "csi-volume"
_PAGE = 500
_log = logging.getLogger("csi_driver")


@dataclass(frozen=True, kw_only=True)
class VolumeRecord:
    """A provisioned volume."""

    id: str
    name: str
    """That it was asked for under."""
    context: Mapping[str, str]
    """The attributes of its PV."""
    capacity_bytes: int
    """Of a bucket volume its quota; 0 for none."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """That it was asked for with: the same name with others is another volume."""
    storage_class: str = ""
    """Of the PVC it was made for; '' where that is not known."""

    @property
    def spec(self) -> VolumeSpec:
        """Return the volume's specification."""
        return parse_context(self.context)

    def text(self) -> str:
        """Return the record as the catalog keeps it."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)


def read(catalog: Catalog, id: str) -> VolumeRecord | None:
    """Return the volume, or None if it was not provisioned or is deleted."""
    text = catalog.document(KIND, id)
    return None if text is None else _record(id, text)


def is_provisioned(catalog: Catalog, id: str, spec: VolumeSpec) -> bool:
    """Tell whether the controller has made this data set's volume, of this snapshot and for this namespace. False where
    the catalog is away and this node has never asked."""
    try:
        record = read(catalog, id)
    except CatalogUnavailableError:
        return False
    if record is None or not spec.dataset:
        return False
    made = record.spec
    return (made.dataset, made.namespace) == (spec.dataset, spec.namespace)


def add(catalog: Catalog, record: VolumeRecord) -> VolumeRecord:
    """Keep a new volume; return the one that exists already, if any."""
    while not catalog.set_document(KIND, record.id, record.text(), old=None):
        there = read(catalog, record.id)
        if there is not None:
            return there
    return record


def grow(catalog: Catalog, id: str, capacity_bytes: int) -> VolumeRecord | None:
    """Let a volume hold this much, unless it already may. Return None if it does not exist."""
    while True:
        text = catalog.document(KIND, id)
        if text is None:
            return None
        record = _record(id, text)
        if record.capacity_bytes >= capacity_bytes:
            return record
        grown = replace(record, capacity_bytes=capacity_bytes)
        if catalog.set_document(KIND, id, grown.text(), old=text):
            return grown


def remove(catalog: Catalog, id: str) -> None:
    """Forget a volume."""
    catalog.remove_document(KIND, id)


def records(catalog: Catalog, *, after: str = "", limit: int = 0) -> Iterator[VolumeRecord]:
    """Return the volumes by id, those after `after`, at most `limit` (0: all). One whose record is damaged is named in
    the log, and left out."""
    left = limit or sys.maxsize
    while left and (page := catalog.documents(KIND, after=after, limit=min(left, _PAGE))):
        after = page[-1][0]
        for id, text in page:
            try:
                record = _record(id, text)
            except CatalogError as exc:
                _warn(str(exc))
            else:
                yield record
                left -= 1


def dataset_specs(catalog: Catalog) -> Iterator[VolumeSpec]:
    """Return the specifications of the data sets' volumes, but for those that only a newer version understands."""
    for record in records(catalog):
        with suppress(RequestError, DatacacheError):
            spec = record.spec
            if spec.dataset and spec.ref:
                yield spec


def quota_of(catalog: Catalog, id: str, spec: VolumeSpec) -> int:
    """Return how many bytes a bucket volume may hold by now; 0 for no limit. The catalog's errors."""
    record = None if spec.read_only else read(catalog, id)
    return spec.quota_bytes if record is None else record.capacity_bytes


def _record(id: str, text: str) -> VolumeRecord:
    cause: Exception | None = None
    try:
        found = parse_object(text)
        values = {name: found[name] for name in VolumeRecord.__dataclass_fields__ if name in found}
        texts = [values["id"], values["name"], values.get("storage_class", "")]
        for name in ("context", "parameters"):
            texts += values.get(name, {}).values()
        if values["id"] == id and all(isinstance(each, str) for each in texts) and int(values["capacity_bytes"]) >= 0:
            return VolumeRecord(**values)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as exc:
        cause = exc
    raise CatalogError(
        f"the catalog's record of the volume {id} is damaged",
        hint="Delete its PVC and PV, and make them anew: data sets and buckets are not touched by that.",
    ) from cause


@cache
def _warn(words: str) -> None:
    """Log it, once in the life of this process."""
    _log.warning("%s", words)


NO_END = 2**63 - 1
"""The room that is left, in bytes, without a limit: the largest number that an answer can hold."""


def room_left(catalog: Catalog, parameters: Mapping[str, str]) -> int:
    """Return how many more bytes bucket volumes with these parameters may get; `NO_END` without a capacity.
    `RequestError` if `capacity` is no size; the catalog's errors."""
    text = parameters.get(CAPACITY, "").strip()
    if not text:
        return NO_END
    try:
        capacity_bytes = parse_bytes(text)
    except ValueError as exc:
        raise invalid(f"the StorageClass's capacity: {exc}") from exc
    others = of_volume(parameters)
    given_bytes = sum(
        record.capacity_bytes
        for record in records(catalog)
        if record.parameters.get(CAPACITY) and of_volume(record.parameters) == others and not record.spec.read_only
    )
    return min(max(0, capacity_bytes - given_bytes), NO_END)


def check_room(
    catalog: Catalog,
    parameters: Mapping[str, str],
    more_bytes: int,
    *,
    code: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED,
) -> None:
    """Raise unless a bucket volume can get this many more bytes: `RequestError` with `code`, or `INVALID_ARGUMENT` for
    none, which would be a volume without a quota."""
    left = room_left(catalog, parameters)
    if left == NO_END:
        return
    if not more_bytes:
        raise invalid(f"the StorageClass has a capacity of {parameters[CAPACITY]}: a volume of it needs a size")
    if more_bytes > left:
        raise RequestError(
            code,
            f"{more_bytes:,} bytes more are asked for, and of the StorageClass's capacity of {parameters[CAPACITY]} "
            f"{left:,} bytes are left: ask for less, delete volumes of the class, or have its capacity made larger",
        )
