"""The protocol of a catalog backend.

Every write is atomic and idempotent: a process killed at any point leaves nothing half-visible, and doing the same again
is fine. Two processes writing at once never lose one of the results. Backends raise only `core.errors`. All calls are
safe from several threads, and after `fork()` (a child opens its own connection).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from datacache.manifest.model import BlobId, DatasetRecord, SnapshotRecord


class Catalog(Protocol):
    """Datasets, snapshots, tags, blobs."""

    url: str
    """Where it is, for messages: without password."""

    def put_blobs(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        """Store blobs (already compressed); those that are there already are left alone."""
        ...

    def get_blobs(self, ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        """The stored bytes of those of `ids` that are there (the caller decides whether a missing one is an error)."""
        ...

    def commit(self, record: SnapshotRecord, *, tags: Sequence[str] = (), move_tags: bool = False) -> SnapshotRecord:
        """Make a snapshot visible: record, then dataset (created if need be), `latest` and tags together.

        Committing an id the dataset has already returns the record that is there (first `created_at`, `message`),
        and makes it `latest` again. `TagExistsError` if a tag names another snapshot and `move_tags` is false: then
        no tag and no `latest` was changed.
        """
        ...

    def dataset(self, name: str) -> DatasetRecord | None: ...

    def datasets(self) -> list[DatasetRecord]:
        """All of them, by name."""
        ...

    def snapshot(self, dataset: str, id: str) -> SnapshotRecord | None: ...

    def snapshots(self, dataset: str, *, id_prefix: str = "") -> list[SnapshotRecord]:
        """A dataset's snapshots in the order of their creation, those whose id starts with `id_prefix`."""
        ...

    def set_tag(self, dataset: str, tag: str, id: str, *, move: bool = False) -> None:
        """Point a tag at a snapshot; `TagExistsError` if it names another one and `move` is false."""
        ...

    def remove_tag(self, dataset: str, tag: str) -> bool:
        """Whether it was there."""
        ...

    def remove_snapshot(self, dataset: str, id: str) -> bool:
        """Forget a snapshot and the tags that name it; `latest` falls back to the newest left, and a dataset without
        snapshots is forgotten too. Blobs stay (other snapshots may share them). Whether it was there."""
        ...

    def close(self) -> None: ...
