"""The protocol of a catalog backend, and what its backends share.

Every write is atomic and idempotent: a process that is killed leaves nothing half-visible, and a caller that does not
know whether a call succeeded repeats it. What a call has acknowledged survives a crash of the process, of the database
and of the machine. Two processes that write at once never lose one of the results. Backends raise only `core.errors`.
All calls are safe from several threads and after `fork()` (a child opens its own connection). A catalog can be pickled.
A constructor opens nothing, so it never fails because a database is away.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from datacache.core.errors import CorruptManifestError, SnapshotNotFoundError, TagExistsError, UsageError
from datacache.manifest.model import BlobId, DatasetRecord, SnapshotRecord

REFRESH_AFTER_S = 3600
"""Putting a blob again renews its time only if that is older than this: writes stay rare, and a blob that a running
creation has put is never much older than the creation."""

_KIND = re.compile(r"[a-z][a-z0-9-]{0,63}")
_KEY_CHARACTERS = 1024
_T = TypeVar("_T")

Live = Callable[[Collection[BlobId]], set[BlobId]]
"""Give all blobs that can be reached from these roots, the roots among them; `CorruptManifestError` if a root cannot be
read."""


class Collected(NamedTuple):
    """The result of a garbage collection: what it removed, or would remove in a dry run."""

    blobs: int
    size_bytes: int
    """Of these blobs, as they are stored."""
    young: int
    """Blobs that nothing needs and that stay for now."""
    derived: int
    """Notes of what was derived from snapshots that are gone."""
    documents: int
    """Records that killed commits left behind (MongoDB)."""


class Catalog(Protocol):
    """Datasets, snapshots, tags, blobs, documents."""

    url: str
    """The address for messages, without password."""

    read_only: bool
    """True where no version can be made: `commit` raises `read_only_error`."""

    def now_s(self) -> float:
        """Return Unix time by the clock that all users of this catalog share: the clocks of nodes may differ by
        days."""
        ...

    def put_blobs(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        """Store blobs (already compressed). For blobs that exist, only renew the time from which garbage collection
        counts (see `REFRESH_AFTER_S`)."""
        ...

    def get_blobs(self, ids: Iterable[BlobId]) -> dict[BlobId, bytes]:
        """Return the stored bytes of those of `ids` that exist. The caller decides whether a missing one is an
        error."""
        ...

    def has_blobs(self, ids: Iterable[BlobId]) -> set[BlobId]:
        """Return those of `ids` that exist."""
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
        """Make a snapshot visible: record, dataset (created if need be), `latest` and tags in one step.

        If the dataset has a latest snapshot, call `check` with it; it is still the latest when the new one takes its
        place. An exception of `check` ends the commit with nothing changed.

        Committing an id that the dataset has returns the existing record (first `created_at`, `message`) and makes it
        `latest` again. Raise `TagExistsError` if a tag names another snapshot and `move_tags` is false; then nothing
        was changed, and the snapshot is not visible either.

        `needs` are all blobs of the snapshot (root, ranges, packs); they must have been put before. If one is gone (an
        earlier snapshot's, which was removed and collected meanwhile), raise `CorruptManifestError` with nothing
        changed. Afterwards garbage collection spares them for as long as the snapshot is listed.
        """
        ...

    def dataset(self, name: str) -> DatasetRecord | None:
        """Return the dataset with its tags as they were at one moment, or None."""
        ...

    def datasets(self) -> list[DatasetRecord]:
        """Return all datasets, by name."""
        ...

    def snapshot(self, dataset: str, id: str) -> SnapshotRecord | None:
        """Return the snapshot with this whole id, or None."""
        ...

    def snapshots(self, dataset: str, *, id_prefix: str = "") -> list[SnapshotRecord]:
        """Return the snapshots of a dataset whose id starts with `id_prefix`, in the order of their creation."""
        ...

    def set_tag(self, dataset: str, tag: str, id: str, *, move: bool = False) -> None:
        """Point a tag at a snapshot. Raise `TagExistsError` if it names another one and `move` is false,
        `SnapshotNotFoundError` if no snapshot has this whole id."""
        ...

    def remove_tag(self, dataset: str, tag: str, *, id: str = "") -> bool:
        """Remove a tag, with `id` only if it names this snapshot. Return whether it existed."""
        ...

    def remove_snapshot(self, dataset: str, id: str, *, only_tags: Collection[str] | None = None) -> bool:
        """Forget a snapshot and the tags that name it. Return whether it existed.

        `latest` falls back to the newest one left, and a dataset without snapshots is forgotten too. Blobs stay until
        `collect`, which counts its grace period from now. With `only_tags`, raise `TagExistsError` if another tag names
        the snapshot; then nothing was changed.
        """
        ...

    def identity(self) -> str:
        """Return 16 hex digits that were drawn when the catalog was made. Files written elsewhere for this catalog
        carry them, so two catalogs never mix theirs up. A copy of a catalog has the same identity."""
        ...

    def derived(self, snapshot_id: str, name: str) -> BlobId | None:
        """Return the root blob of what was made from a snapshot's content, such as its annotations, or None. All
        datasets that have the snapshot share it."""
        ...

    def derived_names(self, snapshot_id: str) -> list[str]:
        """Return the names of all that was derived from a snapshot's content, sorted."""
        ...

    def set_derived(self, snapshot_id: str, name: str, root: BlobId, *, needs: Collection[BlobId] = ()) -> None:
        """Note what was made from a snapshot's content, in place of an earlier note. `root` is a blob as
        `manifest.codec` describes, and `needs` is as for `commit`. The note goes when no dataset lists the snapshot."""
        ...

    def document(self, kind: str, key: str) -> str | None:
        """Return the text of a document, or None. Documents are small texts that belong to no snapshot, such as who may
        read a data set; only `remove_document` removes them. Raise `UsageError` for an impossible kind or key (see
        `check_document`)."""
        ...

    def set_document(self, kind: str, key: str, text: str, *, old: str | None) -> bool:
        """Replace `old` by `text` (`old` is None where no document may exist), and return whether that was done. False
        means that another writer was first, so the caller reads again. Of several writers that replace the same text,
        one succeeds."""
        ...

    def remove_document(self, kind: str, key: str, *, old: str | None = None) -> bool:
        """Remove a document, with `old` only while that is its text. Return whether one was removed."""
        ...

    def documents(self, kind: str, *, after: str = "", limit: int = 1000) -> list[tuple[str, str]]:
        """Return keys and texts of one kind by key (in the order of code points): the first `limit` above `after`."""
        ...

    def collect(self, live: Live, *, grace_s: float, dry_run: bool = False, now_s: float | None = None) -> Collected:
        """Remove the blobs that nothing needs and that were last put `grace_s` ago or earlier.

        Needed is what `live` reaches from the listed snapshots and from what was derived from them. What was derived
        from an unlisted snapshot goes when it is as old. What is mounted, and what was removed within the grace period,
        stays as if it were listed (`catalog.leases`) and counts as young. `now_s` overrides the catalog's clock. With
        `dry_run`, count and change nothing.

        Other processes may be creating snapshots: each either finds all its blobs at its commit, and keeps them, or the
        commit fails. With a grace period longer than a creation takes, none fails. A collection that is killed leaves a
        valid catalog. Raise `CorruptManifestError` if a listed snapshot's root cannot be read; then nothing goes.
        """
        ...

    def close(self) -> None:
        """Close this process's connections. A later call opens them again."""
        ...


class ListedDataset(NamedTuple):
    """A dataset as a backend keeps it: it alone makes snapshots visible."""

    latest: str
    snapshots: dict[str, Any]
    """In the order of their creation: id → where the backend has the record."""
    tags: dict[str, str]
    rev: Any = None
    """By which a backend without transactions knows this state of the dataset again."""


Change = Callable[[ListedDataset | None], ListedDataset | None]
"""Gives the new listing for an old one; None stands for a dataset that does not exist. May be called several times."""


class DatasetCatalog(ABC):
    """Changes of tags and snapshots, for backends that can change one dataset in one step."""

    read_only = False

    @abstractmethod
    def _change(self, name: str, change: Change, *, removes: str = "") -> ListedDataset | None:
        """Replace a dataset by the result of `change`, with no other change in between, and return the new one. Forget
        the records that it no longer lists. A change that returns its argument changes nothing.

        `removes` is the id of the snapshot that `change` removes. The document that says that it is removed now
        (`leases.REMOVED`) is written with the change or before it: a collection that no longer sees the snapshot sees
        this document.
        """

    def set_tag(self, dataset: str, tag: str, id: str, *, move: bool = False) -> None:
        def change(old: ListedDataset | None) -> ListedDataset:
            if old is None or id not in old.snapshots:
                raise SnapshotNotFoundError(
                    f"{dataset} has no snapshot {id!r}",
                    ref=f"{dataset}@{id}",
                    hint=f"See: dsctl snapshot list {dataset}",
                )
            if not move:
                check_tags_free(dataset, old.tags, [tag], id)
            return old if old.tags.get(tag) == id else old._replace(tags=old.tags | {tag: id})

        self._change(dataset, change)

    def remove_tag(self, dataset: str, tag: str, *, id: str = "") -> bool:
        was_there = False

        def change(old: ListedDataset | None) -> ListedDataset | None:
            nonlocal was_there
            if old is None or tag not in old.tags or (id and old.tags[tag] != id):
                return old
            was_there = True
            return old._replace(tags={other: named for other, named in old.tags.items() if other != tag})

        self._change(dataset, change)
        return was_there

    def remove_snapshot(self, dataset: str, id: str, *, only_tags: Collection[str] | None = None) -> bool:
        was_there = False

        def change(old: ListedDataset | None) -> ListedDataset | None:
            nonlocal was_there
            if old is None or id not in old.snapshots:
                return old
            others = {tag for tag, named in old.tags.items() if named == id} - set(only_tags or ())
            if others and only_tags is not None:
                raise still_tagged(dataset, id, others)
            was_there = True
            left = {other: where for other, where in old.snapshots.items() if other != id}
            if not left:
                return None
            tags = {tag: named for tag, named in old.tags.items() if named != id}
            return ListedDataset([*left][-1] if old.latest == id else old.latest, left, tags, old.rev)

        self._change(dataset, change, removes=id)
        return was_there


def batches(
    items: Iterable[_T], most: int, *, size_bytes: Callable[[_T], int] = lambda _: 0, most_bytes: int = 1
) -> Iterator[list[_T]]:
    """Cut `items` into lists of at most `most`, each of which ends with the item that fills `most_bytes`."""
    batch: list[_T] = []
    total_bytes = 0
    for item in items:
        batch.append(item)
        total_bytes += size_bytes(item)
        if len(batch) >= most or total_bytes >= most_bytes:
            yield batch
            batch, total_bytes = [], 0
    if batch:
        yield batch


def check_document(kind: str, key: str | None = None, text: str = "") -> None:
    """Raise `UsageError` unless a document can have these: a kind like `csi-volume`, a key of 1 to 1,024 characters,
    and no lone surrogates in key and text."""
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
    """Return the error for a tag that names another snapshot, `id`, already."""
    return TagExistsError(
        f"the tag {dataset}@{tag} names another snapshot, {id[:12]}",
        hint="Use another tag, or move it: --move-tags with snapshot create, --move with snapshot tag.",
    )


def check_tags_free(dataset: str, taken: dict[str, str], tags: Iterable[str], id: str) -> None:
    """Raise `TagExistsError` if one of `tags` names another snapshot than `id` in `taken` (tag → id)."""
    for tag in tags:
        if taken.get(tag, id) != id:
            raise tag_exists(dataset, tag, taken[tag])


def still_tagged(dataset: str, id: str, tags: Iterable[str]) -> TagExistsError:
    """Return the error for a snapshot that is not removed because other tags name it."""
    names = sorted(tags)
    return TagExistsError(
        f"{dataset}@{id[:12]} is also {', '.join(f'{dataset}@{tag}' for tag in names)}; nothing was removed",
        hint=f"Remove one name: dsctl snapshot rm {dataset}@{names[0]}. Or the snapshot with all its tags: --all-tags.",
    )


def blobs_missing(what: str, count: int) -> CorruptManifestError:
    """Return the error for a commit of `what`, of whose blobs `count` are gone."""
    return CorruptManifestError(
        f"{count:,} blobs that {what} needs are not in the catalog any more; nothing was changed",
        hint="A garbage collection has removed what an earlier snapshot left. Run the same command again.",
    )


def read_only_error(url: str) -> UsageError:
    """Return the error for a new version in a catalog that can only be read."""
    return UsageError(
        f"the catalog {url} can only be read; nothing was changed",
        hint=f"Make versions in a catalog of your own (DATACACHE_CATALOG) and push them: dsctl snapshot push REF {url}",
    )
