"""The protocol of a catalog backend.

Every write is atomic and idempotent: a process killed at any point leaves nothing half-visible, and doing the
same again is fine. What a call has acknowledged survives a crash of the process, of the database and of the
machine. Two processes writing at once never lose one of the results. Backends raise only `core.errors`. All
calls are safe from several threads, and after `fork()` (a child opens its own connection). A catalog can be
pickled: the other process opens its own. Nothing is opened before the first call, so a constructor never
fails for a database that is away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from datacache.catalog.mark import Live
from datacache.core.errors import CorruptManifestError, SnapshotNotFoundError, TagExistsError, UsageError
from datacache.manifest.model import BlobId, DatasetRecord, SnapshotRecord

REFRESH_AFTER_S = 3600
"""A blob that is put again counts as put now if its time is older than this: hardly ever a write, and what a creation
under way has put is never much older than the creation."""


_KIND = re.compile(r"[a-z][a-z0-9-]{0,63}")
_KEY_CHARACTERS = 1024


class Collected(NamedTuple):
    """What a garbage collection removed, or with `dry_run` would have."""

    blobs: int
    size_bytes: int
    """Of these blobs, as they are stored."""
    young: int
    """Blobs that nothing needs and that stay for now."""
    derived: int
    """Notes of what was derived from snapshots that are gone."""
    documents: int
    """Records that commits which were killed have left (MongoDB)."""


class Catalog(Protocol):
    """Datasets, snapshots, tags, blobs, documents."""

    url: str
    """Where it is, for messages: without password."""

    def now_s(self) -> float:
        """Unix time by the clock that everybody who uses this catalog shares: a node's own may differ by days."""
        ...

    def put_blobs(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        """Store blobs (already compressed). Of those that are there already only the time is noted, from which
        garbage collection counts (see `REFRESH_AFTER_S`).
        """
        ...

    def get_blobs(self, ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        """The stored bytes of those of `ids` that are there (the caller decides whether a missing one is an
        error).
        """
        ...

    def commit(
        self,
        record: SnapshotRecord,
        *,
        tags: Sequence[str] = (),
        move_tags: bool = False,
        needs: Collection[BlobId] = (),
        check: Callable[[SnapshotRecord], None] | None = None,
    ) -> SnapshotRecord:
        """Make a snapshot visible: record, then dataset (created if need be), `latest` and tags together.

        `check` is called with the dataset's latest snapshot, if there is one: it is still the latest when this one
        takes its place, and what `check` raises ends the commit with nothing changed.

        Committing an id the dataset has already returns the record that is there (first `created_at`,
        `message`), and makes it `latest` again. `TagExistsError` if a tag names another snapshot and
        `move_tags` is false: then nothing was changed, and the snapshot is not visible either.

        The blobs must have been put before: `needs` are all of them (root, ranges, packs). Where one is not
        there any more (it was not put by this creation but is some earlier snapshot's, which was removed and
        collected in between), `CorruptManifestError`, and nothing was changed. Once this has returned, garbage
        collection leaves them alone for as long as the snapshot is listed.
        """
        ...

    def dataset(self, name: str) -> DatasetRecord | None:
        """The dataset with its tags as they were at one moment, or None."""
        ...

    def datasets(self) -> list[DatasetRecord]:
        """All of them, by name."""
        ...

    def snapshot(self, dataset: str, id: str) -> SnapshotRecord | None:
        """The snapshot with this whole id, or None."""
        ...

    def snapshots(self, dataset: str, *, id_prefix: str = "") -> list[SnapshotRecord]:
        """A dataset's snapshots in the order of their creation, those whose id starts with `id_prefix`."""
        ...

    def set_tag(self, dataset: str, tag: str, id: str, *, move: bool = False) -> None:
        """Point a tag at a snapshot; `TagExistsError` if it names another one and `move` is false;
        `SnapshotNotFoundError` if there is no snapshot with this whole id."""
        ...

    def remove_tag(self, dataset: str, tag: str, *, id: str = "") -> bool:
        """Remove a tag, with `id` only if it names this snapshot. Whether it was there."""
        ...

    def remove_snapshot(self, dataset: str, id: str, *, only_tags: Collection[str] | None = None) -> bool:
        """Forget a snapshot and the tags that name it; `latest` falls back to the newest left, and a dataset
        without snapshots is forgotten too. Blobs stay until `collect` (other snapshots may share them), which counts
        its grace period from now. Whether it was there.

        With `only_tags`, `TagExistsError` if a tag names it that is not among these: then nothing was changed.
        """
        ...

    def identity(self) -> str:
        """16 hex digits, drawn when the catalog was made: what is written elsewhere for this catalog is under this
        name, so two catalogs never take each other's for their own. A copy of a catalog has the same one.
        """
        ...

    def derived(self, snapshot_id: str, name: str) -> BlobId | None:
        """The root blob of something made from a snapshot's content, such as its annotations, or None. The same for
        all datasets that have the snapshot.
        """
        ...

    def set_derived(self, snapshot_id: str, name: str, root: BlobId, *, needs: Collection[BlobId] = ()) -> None:
        """Note what was made from a snapshot's content, in the place of what was noted before. `root` is a blob as
        `manifest.blobtree` describes, and `needs` as for `commit`. It goes when no dataset lists the snapshot.
        """
        ...

    def document(self, kind: str, key: str) -> str | None:
        """The text that was set, or None. Documents are small texts that belong to no snapshot, such as who may read a
        data set; nothing but `remove_document` removes them. `UsageError` for a kind or a key that cannot be one (see
        `check_document`).
        """
        ...

    def set_document(self, kind: str, key: str, text: str, *, old: str | None) -> bool:
        """Compare and set: the text becomes `text` if it is `old` now (None: if there is none). Whether it did; if not,
        somebody else was quicker, and the caller looks again. Of several who set from the same text one succeeds.
        """
        ...

    def remove_document(self, kind: str, key: str, *, old: str | None = None) -> bool:
        """Remove a document, with `old` only while it is this text. False where nothing was removed."""
        ...

    def documents(self, kind: str, *, after: str = "", limit: int = 1000) -> list[tuple[str, str]]:
        """Keys and texts of one kind, by key (in the order of code points): the first `limit` above `after`."""
        ...

    def collect(self, live: Live, *, grace_s: float, dry_run: bool = False, now_s: float | None = None) -> Collected:
        """Garbage collection: remove the blobs that nothing needs and that were last put `grace_s` ago or earlier.

        Needed is what `live` reaches from the snapshots that are listed and what was derived from them. What was
        derived from a snapshot that nobody lists goes, too, when it is as old. `now_s` is the time it is (Unix time);
        by default the clock of the catalog. With `dry_run` nothing is changed, and what would be is counted.

        What is mounted, and what was removed within the grace period, stays as if it were listed (`catalog.leases`),
        and is counted as young.

        Creations may be under way in other processes: each either finds all its blobs at its commit, and keeps them,
        or the commit fails. With a grace period longer than a creation takes, none fails. Killed at any point, it
        leaves a valid catalog. `CorruptManifestError` if a listed snapshot's root cannot be read: then nothing goes.
        """
        ...

    def close(self) -> None:
        """Close this process's connections. A later call opens them again."""
        ...


def check_document(kind: str, key: str | None = None, text: str = "") -> None:
    """`UsageError` unless these can be a document: a kind like `csi-volume`, a key of 1 to 1,024 characters, and both
    key and text without lone surrogates."""
    if not _KIND.fullmatch(kind):
        raise UsageError(f"{kind!r} cannot be a kind of documents", hint="Use lower-case letters, digits and '-'.")
    if key is None:
        return
    if not 0 < len(key) <= _KEY_CHARACTERS:
        raise UsageError(f"a document's key has 1 to {_KEY_CHARACTERS:,} characters, not {len(key):,}")
    try:
        (key + text).encode()
    except UnicodeEncodeError as exc:
        raise UsageError(f"the document {kind}/{key!r} has characters that are no Unicode") from exc


def tag_exists(dataset: str, tag: str, id: str) -> TagExistsError:
    """The error for a tag that names another snapshot, `id`, already."""
    return TagExistsError(
        f"the tag {dataset}@{tag} names another snapshot, {id[:12]}",
        hint="Use another tag, or move it: --move-tags with snapshot create, --move with snapshot tag.",
    )


def still_tagged(dataset: str, id: str, tags: Iterable[str]) -> TagExistsError:
    """The error for a snapshot that is not removed, since other tags name it."""
    names = sorted(tags)
    return TagExistsError(
        f"{dataset}@{id[:12]} is also {', '.join(f'{dataset}@{tag}' for tag in names)}; nothing was removed",
        hint=f"Remove one name: dsctl snapshot rm {dataset}@{names[0]}. Or the snapshot with all its tags: --all-tags.",
    )


def no_snapshot(dataset: str, id: str) -> SnapshotNotFoundError:
    """The error for an id that the dataset does not have."""
    return SnapshotNotFoundError(
        f"{dataset} has no snapshot {id!r}", ref=f"{dataset}@{id}", hint=f"See: dsctl snapshot list {dataset}"
    )


def blobs_missing(what: str, count: int) -> CorruptManifestError:
    """The error for a commit whose blobs are not all there."""
    return CorruptManifestError(
        f"{count:,} blobs that {what} needs are not in the catalog any more; nothing was changed",
        hint="A garbage collection has removed what an earlier snapshot left. Run the same command again.",
    )
