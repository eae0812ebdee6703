"""Arrays that were made from an annotation table, kept beside it: what is read at once takes no walk over its ranges.

A group of arrays is a root (`manifest.codec.encode_children`) with a JSON header that names each array, and blobs of 4
MiB at most, small enough for every catalog. An array of zeros has no blob. The note of a group has the name of its
table's note in its own, so both go with their snapshot, and a group of another version of the reader is never found.

Used by `browsing`. An `ArrayStore` may be used by several threads, as far as its catalog may.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from datacache.annotations.table.table import LoadBlobs
from datacache.catalog.base import Catalog
from datacache.core.errors import CatalogError, CorruptManifestError
from datacache.manifest import codec
from datacache.manifest.model import BlobId

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)
VERSION: Final = 2
"""Of the groups and what is in them: one that another version made is made anew."""
_BLOB_BYTES: Final = 4 * 2**20
_AT_A_TIME: Final = 4
_KINDS: Final = ("<u1", "<u2", "<u4", "<u8", "<f4", "<f8")


class ArrayStore:
    """The groups of arrays of one table. `name` is that of the table's note."""

    def __init__(self, catalog: Catalog, snapshot_id: str, name: str) -> None:
        self._catalog, self._id, self._name = catalog, snapshot_id, name

    def has(self, group: str) -> bool:
        """Tell whether there is a group."""
        return self._catalog.derived(self._id, self._note(group)) is not None

    def get(self, group: str) -> dict[str, NDArray[Any]] | None:
        """Return the arrays of a group, in the order in which they were put; None where there is none that can be
        read. They may be read-only."""
        root = self._catalog.derived(self._id, self._note(group))
        if root is None:
            return None
        try:
            raw = self._catalog.get_blobs([root]).get(root)
            if raw is None:
                raise CorruptManifestError(f"blob {root.hex()} is missing from the catalog")
            return _read(codec.decompress(raw, root), self._catalog.get_blobs)
        except CorruptManifestError as exc:
            _log.warning("%s of snapshot %s is made anew: %s", group, self._id[:12], exc)
            return None

    def put(self, group: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep the arrays of a group. A catalog that takes nothing is left alone: they will be made again."""
        children: list[BlobId] = []
        header = []
        try:
            for name, values in arrays.items():
                parts = list(_parts(values)) if values.any() else []
                for part in parts:
                    children.append(codec.blob_id(part))
                    self._catalog.put_blobs([(children[-1], codec.compress(part))])
                header.append([name, values.dtype.newbyteorder("<").str.replace("|", "<"), len(values), len(parts)])
            raw = codec.encode_children(children) + json.dumps(header).encode()
            root = codec.blob_id(raw)
            self._catalog.put_blobs([(root, codec.compress(raw))])
            self._catalog.set_derived(self._id, self._note(group), root, needs=[root, *children])
        except CatalogError as exc:
            _log.info("%s of snapshot %s is not kept: %s", group, self._id[:12], exc)

    def _note(self, group: str) -> str:
        return f"{self._name}/{group}/{VERSION}"


def narrow(values: NDArray[Any]) -> NDArray[Any]:
    """Return the same numbers in as few bytes as hold each of them exactly."""
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        return single if np.array_equal(single, values, equal_nan=True) else values
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def _parts(values: NDArray[Any]) -> Iterator[bytes]:
    data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).view(np.uint8)
    for start in range(0, len(data), _BLOB_BYTES):
        yield data[start : start + _BLOB_BYTES].tobytes()


def _read(raw: bytes, load_blobs: LoadBlobs) -> dict[str, NDArray[Any]]:
    ids = codec.children(raw)
    found: dict[str, NDArray[Any]] = {}
    try:
        for name, kind, length, blobs in json.loads(bytes(codec.payload(raw))):
            if kind not in _KINDS:
                raise ValueError(f"{kind} is no kind of number")
            values = np.zeros(length, kind)
            if blobs:
                _fill(values.view(np.uint8), ids[:blobs], load_blobs)
            found[name] = values
            del ids[:blobs]
    except (ValueError, TypeError, MemoryError) as exc:
        raise CorruptManifestError(f"a group of arrays is damaged: {exc}") from exc
    return found


def _fill(data: NDArray[np.uint8], ids: Sequence[BlobId], load_blobs: LoadBlobs) -> None:
    at = 0
    for start in range(0, len(ids), _AT_A_TIME):
        part = ids[start : start + _AT_A_TIME]
        stored = load_blobs(part)
        for id in part:
            if id not in stored:
                raise CorruptManifestError(f"blob {id.hex()} is missing from the catalog")
            raw = codec.decompress(stored.pop(id), id)
            data[at : at + len(raw)] = np.frombuffer(raw, np.uint8)
            at += len(raw)
    if at != len(data):
        raise ValueError(f"it has {at:,} bytes instead of {len(data):,}")
