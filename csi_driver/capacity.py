"""How much the bucket volumes of one StorageClass may hold together: its parameter `capacity`.

What is counted are quotas, not bytes that are there: a volume that was given is never without the room it was promised.
All volumes count that were made with the same other parameters and some `capacity`, as a class is changed by deleting
it and making it anew; Kubernetes tells the driver no class's name. A data set's volume takes no room, and without the
parameter there is no end that the driver could know of. Reads the catalog; any thread, but who gives room away holds a
lock from `check_room` until the volume's record says so.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from csi_driver import volume_records
from csi_driver.status import RequestError, invalid
from csi_driver.volumes import CAPACITY, KUBERNETES
from datacache.catalog.base import Catalog
from datacache.settings import parse_bytes

NO_END = 2**63 - 1
"""What is left, in bytes, where nobody has set an end: the largest number that the answer can be."""


def room_left(catalog: Catalog, parameters: Mapping[str, str]) -> int:
    """How many bytes bucket volumes made with these parameters may still be given; `NO_END` where there is none.
    `RequestError` if `capacity` is no size; the catalog's errors.
    """
    text = parameters.get(CAPACITY, "").strip()
    if not text:
        return NO_END
    try:
        capacity_bytes = parse_bytes(text)
    except ValueError as exc:
        raise invalid(f"the StorageClass's capacity: {exc}") from exc
    others = _others(parameters)
    given_bytes = sum(
        record.capacity_bytes
        for record in volume_records.records(catalog)
        if record.parameters.get(CAPACITY) and _others(record.parameters) == others and not record.spec.read_only
    )
    return min(max(0, capacity_bytes - given_bytes), NO_END)


def check_room(
    catalog: Catalog,
    parameters: Mapping[str, str],
    more_bytes: int,
    *,
    code: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED,
) -> None:
    """That a bucket volume can be given that many bytes more. `RequestError` with `code`, or `INVALID_ARGUMENT` for
    none, which would be a volume without a quota.
    """
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


def _others(parameters: Mapping[str, str]) -> dict[str, str]:
    return {
        name: text for name, text in parameters.items() if name != CAPACITY and not name.startswith(KUBERNETES) and text
    }
