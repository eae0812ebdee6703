"""The marking half of garbage collection: find the blobs that can be reached from roots.

Used by the backends' `collect` and by `gc`. Marks only grow: what was reachable from a root that is no longer listed
stays until the next collection. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from datacache.catalog.base import Live, batches
from datacache.core.errors import CorruptManifestError
from datacache.manifest import codec
from datacache.manifest.model import BlobId, Root
from datacache.manifest.reader import LoadBlobs

_ROOTS_AT_A_TIME = 32
_REMOVE_IT = (
    "Nothing was collected: what a snapshot needs whose root cannot be read is not known. Remove the snapshot with this"
    " id (dsctl snapshot list, dsctl snapshot rm) and collect again."
)


class Roots(NamedTuple):
    """The roots from which marking begins, as a catalog has them at one moment."""

    listed: frozenset[BlobId]
    """Of snapshots that a dataset lists. One that cannot be read ends the collection: what it needs is not known."""
    others: frozenset[BlobId]
    """Of derived data and of commits under way. One that cannot be read is of no use to anybody."""
    held: frozenset[BlobId] = frozenset()
    """Of unlisted snapshots that stay for now (`leases`), likewise."""


def reachable(load_blobs: LoadBlobs) -> Live:
    """Return a function that follows the roots of manifests and derived roots (`manifest.codec`)."""

    def live(roots: Collection[BlobId]) -> set[BlobId]:
        found: set[BlobId] = set()
        for part in batches(roots, _ROOTS_AT_A_TIME):
            stored = load_blobs(part)
            for id in part:
                if id not in stored:
                    raise CorruptManifestError(f"the root {id.hex()} is missing from the catalog", hint=_REMOVE_IT)
                raw = codec.decompress(stored[id], id)
                found.add(id)
                is_derived = raw[:4] == codec.MAGIC
                found.update(codec.children(raw) if is_derived else blobs_of(id, codec.decode_root(raw)))
        return found

    return live


def blobs_of(id: BlobId, root: Root) -> frozenset[BlobId]:
    """Return all blobs of a snapshot: root, ranges, packs."""
    return frozenset([id, *(info.blob for info in root.ranges), *root.packs])


class Marked:
    """The blobs in use that have been found so far."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._roots: set[BlobId] = set()
        self.blobs: set[BlobId] = set()
        self.needed: set[BlobId] = set()
        """Those of `blobs` that are not only held."""

    def has_new(self, roots: Roots) -> bool:
        """Tell whether some of `roots` have not been followed yet."""
        return not all(self._roots >= some for some in roots)

    def follow(self, read_roots: Callable[[], Roots]) -> Roots:
        """Mark what can be reached from the roots that exist now, and return these roots."""
        roots = read_roots()
        while True:
            try:
                self._add(roots.listed - self._roots)
                break
            except CorruptManifestError:
                before, roots = roots, read_roots()
                if roots.listed >= before.listed:
                    raise  # otherwise another collection took one that was removed before it was followed
        for held, unlisted in ((False, roots.others), (True, roots.held)):
            for root in unlisted - self._roots:
                try:
                    self._add([root], held=held)
                except CorruptManifestError:
                    self._roots.add(root)
        return roots

    def _add(self, roots: Collection[BlobId], *, held: bool = False) -> None:
        if roots:
            found = self._live(roots)
            self.blobs |= found
            if not held:
                self.needed |= found
            self._roots |= set(roots)
