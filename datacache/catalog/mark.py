"""The marking half of garbage collection: which blobs can be reached from which roots.

Used by the backends' `collect` and by `gc`. Marks only grow: what was reachable from a root that is not listed any more
stays until the next collection. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from datacache.core.errors import CorruptManifestError
from datacache.manifest import codec
from datacache.manifest import codec as blobtree
from datacache.manifest.model import BlobId, Root
from datacache.manifest.reader import LoadBlobs

Live = Callable[[Collection[BlobId]], set[BlobId]]
"""All blobs reachable from these roots, the roots among them; `CorruptManifestError` if a root cannot be read."""

_ROOTS_AT_A_TIME = 32


class Roots(NamedTuple):
    """Where marking begins, as a catalog has it at one moment."""

    listed: frozenset[BlobId]
    """Of snapshots that a dataset lists: one that cannot be read ends the collection, as what it needs is not known."""
    others: frozenset[BlobId]
    """Of what was derived and of commits under way: one that cannot be read is of no use to anybody."""
    held: frozenset[BlobId] = frozenset()
    """Of snapshots that nobody lists and that stay for now (`leases`), likewise."""


def reachable(load_blobs: LoadBlobs) -> Live:
    """The roots of manifests (`manifest.codec`) and derived ones (`manifest.blobtree`), followed."""

    def live(roots: Collection[BlobId]) -> set[BlobId]:
        found: set[BlobId] = set()
        wanted = list(roots)
        for start in range(0, len(wanted), _ROOTS_AT_A_TIME):
            part = wanted[start : start + _ROOTS_AT_A_TIME]
            stored = load_blobs(part)
            for id in part:
                if id not in stored:
                    raise CorruptManifestError(f"the root {id.hex()} is missing from the catalog", hint=_REMOVE_IT)
                found.add(id)
                found.update(_below(id, codec.decompress(stored[id], id)))
        return found

    return live


def blobs_of(id: BlobId, root: Root) -> frozenset[BlobId]:
    """All that the catalog keeps of a snapshot: root, ranges, packs."""
    return frozenset([id, *(info.blob for info in root.ranges), *root.packs])


def _below(id: BlobId, raw: bytes) -> Iterable[BlobId]:
    return blobtree.children(raw) if raw[:4] == blobtree.MAGIC else blobs_of(id, codec.decode_root(raw))


class Marked:
    """The blobs in use, as far as they are known."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._roots: set[BlobId] = set()
        self.blobs: set[BlobId] = set()
        self.needed: set[BlobId] = set()
        """Those of them that are not only held."""

    def new(self, roots: Roots) -> bool:
        """Whether there are roots that were not followed yet."""
        return not (self._roots >= roots.listed and self._roots >= roots.others and self._roots >= roots.held)

    def follow(self, read_roots: Callable[[], Roots]) -> Roots:
        """Mark what can be reached from the roots there are now; these."""
        roots = read_roots()
        while True:
            try:
                self._add(roots.listed - self._roots)
                break
            except CorruptManifestError:
                before, roots = roots, read_roots()
                if roots.listed >= before.listed:
                    raise  # otherwise one was removed, and collected by somebody else, before it was followed
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


_REMOVE_IT = (
    "Nothing was collected: what a snapshot needs whose root cannot be read is not known. Remove the snapshot with this"
    " id (dsctl snapshot list, dsctl snapshot rm) and collect again."
)
