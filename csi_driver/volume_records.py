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
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

import grpc

from csi_driver.status import RequestError, invalid
from csi_driver.volumes import CAPACITY, VolumeSpec, of_volume, parse_context
from datacache.catalog.base import Catalog
from datacache.core.errors import CatalogUnavailableError
from datacache.settings import parse_bytes

KIND = "csi-volume"
_PAGE = 500


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
    return None if text is None else _record(text)


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
        record = _record(text)
        if record.capacity_bytes >= capacity_bytes:
            return record
        grown = replace(record, capacity_bytes=capacity_bytes)
        if catalog.set_document(KIND, id, grown.text(), old=text):
            return grown


def remove(catalog: Catalog, id: str) -> None:
    """Forget a volume."""
    catalog.remove_document(KIND, id)


def records(catalog: Catalog, *, after: str = "", limit: int = 0) -> Iterator[VolumeRecord]:
    """Return the volumes by id, those after `after`, at most `limit` (None: all)."""
    left = limit or sys.maxsize
    while left and (page := catalog.documents(KIND, after=after, limit=min(left, _PAGE))):
        yield from (_record(text) for _id, text in page)
        after, left = page[-1][0], left - len(page)


def quota_of(catalog: Catalog, id: str, spec: VolumeSpec) -> int:
    """Return how many bytes a bucket volume may hold by now; 0 for no limit. The catalog's errors."""
    record = None if spec.read_only else read(catalog, id)
    return spec.quota_bytes if record is None else record.capacity_bytes


def _record(text: str) -> VolumeRecord:
    values = json.loads(text)
    return VolumeRecord(**{name: values[name] for name in VolumeRecord.__dataclass_fields__ if name in values})


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
