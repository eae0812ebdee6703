"""Test what garbage collection of every catalog backend promises; a part of `testing.catalog.CatalogConformance`.

Time is not waited for: collections are told what time it is, and processes race without any grace.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator

import pytest

from datacache.catalog import leases
from datacache.catalog.base import Catalog, Collected, Live
from datacache.catalog.commit import commit_manifest, known_blobs
from datacache.catalog.mark import blobs_of, reachable
from datacache.catalog.open import open_catalog_url
from datacache.catalog.packs import PackStore, PackWriter, content_etag, pack_key
from datacache.core.errors import CatalogError, CorruptManifestError
from datacache.core.ids import ObjectRef
from datacache.manifest import codec
from datacache.manifest import codec as blobtree
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import PACKS, BlobId, Entry, Lineage, Naming, SnapshotRecord, Source
from datacache.manifest.reader import Manifest
from tests.promises import promise

HOUR_S = 3600.0
_fork = multiprocessing.get_context("fork")


def a_snapshot(
    catalog: Catalog, dataset: str, numbers: Iterable[int], *, label: bytes = b"", tags: Collection[str] = ()
) -> SnapshotRecord:
    """Commit a snapshot of these images, with labels for some of the last in a pack."""
    known = known_blobs(catalog, catalog.dataset(dataset))
    builder = ManifestBuilder([Source("s3://faces", ""), PACKS], catalog.put_blobs, known=known)
    entries = [Entry(b"%06d.jpg" % number, 1000 + number, 0, f"{number:032x}") for number in numbers]
    packs = []
    if label:
        writer = PackWriter(catalog.put_blobs)
        texts = [(entry.path[:-4] + b".txt", label + entry.path) for entry in entries[-50::10]]
        offsets = [writer.add(text) for _path, text in texts]
        packs = [writer.close()]
        entries += [
            Entry(path, len(text), 0, content_etag(text), "", 1, pack_key(packs[0], offset))
            for (path, text), offset in zip(texts, offsets, strict=True)
        ]
    for entry in sorted(entries):
        builder.add(entry)
    return commit_manifest(
        catalog,
        builder,
        Naming(name=dataset, tags=tags),
        origin="s3://faces/",
        lineage=Lineage("test", {}),
        packs=packs,
    )


def read_all(catalog: Catalog, record: SnapshotRecord) -> None:
    """Every range and every packed file of a snapshot is there and right."""
    manifest = Manifest.open(record.id, catalog.get_blobs)
    packs = PackStore(catalog.get_blobs)
    files = 0
    for entry in manifest.entries():
        files += 1
        if manifest.root.sources[entry.source] == PACKS:
            ref: ObjectRef = manifest.object_ref(entry)
            assert content_etag(packs.read(ref, 0, ref.size_bytes)) == entry.etag
    assert files == record.files


def read_everything(catalog: Catalog) -> int:
    """All snapshots there are can be read; how many."""
    records = [record for dataset in catalog.datasets() for record in catalog.snapshots(dataset.name)]
    for record in records:
        read_all(catalog, record)
    return len(records)


def a_table(catalog: Catalog, record: SnapshotRecord, *parts: bytes, name: str = "table") -> list[BlobId]:
    """Note something derived from a snapshot: a root and these parts, all of whose ids are returned."""
    raws = [*parts, blobtree.encode_children([codec.blob_id(part) for part in parts]) + name.encode()]
    ids = [codec.blob_id(raw) for raw in raws]
    catalog.put_blobs([(id, codec.compress(raw)) for id, raw in zip(ids, raws, strict=True)])
    catalog.set_derived(record.id, name, ids[-1], needs=ids)
    return ids


def collect(
    catalog: Catalog, *, later_s: float = 3 * HOUR_S, grace_s: float = HOUR_S, dry_run: bool = False
) -> Collected:
    """A collection at a later time."""
    return catalog.collect(reachable(catalog.get_blobs), grace_s=grace_s, dry_run=dry_run, now_s=time.time() + later_s)


def set_clock_ahead(catalog: Catalog, patch: pytest.MonkeyPatch, ahead_s: float) -> None:
    """Have the catalog's own clock, which goes by no step of the node's, be ahead from now on."""
    if catalog.url.startswith("mongodb"):
        from datacache.catalog.mongo.client import MongoDatabase

        server = MongoDatabase.now_s
        patch.setattr(MongoDatabase, "now_s", lambda self: server(self) + ahead_s)
    else:
        from datacache.catalog.sqlite.catalog import SqliteCatalog

        node = SqliteCatalog.now_s
        patch.setattr(SqliteCatalog, "now_s", lambda self: node(self) + ahead_s)


def blobs_needed(catalog: Catalog, record: SnapshotRecord) -> frozenset[BlobId]:
    """All blobs of a snapshot."""
    return blobs_of(BlobId(bytes.fromhex(record.id)), Manifest.open(record.id, catalog.get_blobs).root)


def interrupted(live: Live, *between: Callable[[], object]) -> Live:
    """`live`, and after each of its first calls something that others do at that moment."""
    todo = list(between)

    def marking(roots: Collection[BlobId]) -> set[BlobId]:
        found = live(roots)
        if todo:
            todo.pop(0)()
        return found

    return marking


class CollectConformance:
    """The part of the suite.

    Whether a blob is gone is asked of a catalog opened again: one that reads through a cache may have it still.
    """

    # --- what goes and what stays ---------------------------------------------------------------------------

    @promise("What a listed snapshot needs stays, and the rest goes")
    def test_what_a_removed_snapshot_alone_needed_goes_and_the_rest_stays(
        self, catalog: Catalog, open_again: Callable[[], Catalog]
    ) -> None:
        kept = a_snapshot(catalog, "mask", range(2000), label=b"face")
        gone = a_snapshot(catalog, "mask", range(1, 2000), label=b"mask")
        only = blobs_needed(catalog, gone) - blobs_needed(catalog, kept)
        catalog.remove_snapshot("mask", gone.id)
        assert 2 < len(only) < len(blobs_needed(catalog, kept))
        sizes = catalog.get_blobs(only)
        done = collect(catalog)
        assert done == Collected(
            blobs=len(only), size_bytes=sum(map(len, sizes.values())), young=0, derived=0, documents=0
        )
        assert open_again().get_blobs(only) == {}
        read_all(catalog, kept)
        assert collect(catalog).blobs == 0

    @promise("What a listed snapshot needs stays, and the rest goes")
    def test_what_two_datasets_share_stays_until_both_are_gone(
        self, catalog: Catalog, open_again: Callable[[], Catalog]
    ) -> None:
        one = a_snapshot(catalog, "one", range(500), label=b"face")
        two = a_snapshot(catalog, "two", range(500), label=b"face")
        assert one.id == two.id
        catalog.remove_snapshot("one", one.id)
        assert collect(catalog).blobs == 0
        read_all(catalog, two)
        needed = blobs_needed(catalog, two)
        catalog.remove_snapshot("two", two.id)
        assert collect(catalog).blobs == len(needed)
        assert open_again().get_blobs(needed) == {}

    @promise("A dry run says what would go and removes nothing")
    def test_a_dry_run_says_what_would_go_and_removes_nothing(
        self, catalog: Catalog, open_again: Callable[[], Catalog]
    ) -> None:
        a_snapshot(catalog, "mask", range(500), label=b"face")
        gone = a_snapshot(catalog, "gone", range(700, 900))
        a_table(catalog, gone, b"part")
        needed = blobs_needed(catalog, gone)
        catalog.remove_snapshot("gone", gone.id)
        said = collect(catalog, dry_run=True)
        assert said == collect(catalog, dry_run=True)
        assert set(open_again().get_blobs(needed)) == needed
        assert catalog.derived(gone.id, "table") is not None
        assert collect(catalog) == said
        assert said.blobs == len(needed) + 2
        assert open_again().get_blobs(needed) == {}

    @promise("What is younger than the grace period, or was removed within it, stays")
    def test_what_was_put_within_the_grace_period_stays(
        self, catalog: Catalog, open_again: Callable[[], Catalog]
    ) -> None:
        blob = codec.blob_id(b"of a creation under way"), b"x"
        catalog.put_blobs([blob])
        assert collect(catalog, later_s=HOUR_S - 60) == Collected(
            blobs=0, size_bytes=0, young=1, derived=0, documents=0
        )
        assert open_again().get_blobs([blob[0]])
        assert collect(catalog, later_s=HOUR_S + 60).blobs == 1
        assert not open_again().get_blobs([blob[0]])

    @promise("What is younger than the grace period, or was removed within it, stays")
    def test_what_is_put_again_counts_as_put_now(
        self, catalog: Catalog, open_again: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        again, once = (codec.blob_id(b"again"), b"x"), (codec.blob_id(b"once"), b"y")
        catalog.put_blobs([again, once])
        with monkeypatch.context() as patch:
            set_clock_ahead(catalog, patch, 10 * HOUR_S)
            catalog.put_blobs([again])
        assert collect(catalog, later_s=10 * HOUR_S + 60).blobs == 1
        assert set(open_again().get_blobs([again[0], once[0]])) == {again[0]}

    @promise("What is younger than the grace period, or was removed within it, stays")
    def test_the_grace_period_counts_from_the_removal(self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
        record = a_snapshot(catalog, "mask", range(50), label=b"old")
        with monkeypatch.context() as patch:
            set_clock_ahead(catalog, patch, 100 * HOUR_S)
            catalog.remove_snapshot("mask", record.id)
        held = len(blobs_needed(catalog, record))
        found = collect(catalog, later_s=100.5 * HOUR_S)
        assert (found.blobs, found.young) == (0, held)
        read_all(catalog, record)
        assert collect(catalog, later_s=102 * HOUR_S).blobs == held

    def test_a_snapshot_removed_in_one_data_set_stays_in_another(self, catalog: Catalog) -> None:
        kept = a_snapshot(catalog, "kept", range(50))
        catalog.remove_snapshot("mask", a_snapshot(catalog, "mask", range(50)).id)
        found = collect(catalog)
        assert (found.blobs, found.young) == (0, 0)
        read_all(catalog, kept)

    @promise("What is mounted anywhere stays readable after its removal")
    def test_what_is_mounted_stays_until_the_lease_ends(self, catalog: Catalog) -> None:
        record = a_snapshot(catalog, "mask", range(50), label=b"mounted")
        leases.write_mounts(catalog, "home", "node-1", [(record.id, "/mnt/mask"), (record.id, "/mnt/again")])
        assert leases.mounted_at(catalog, record.id) == ["node-1:/mnt/again", "node-1:/mnt/mask"]
        catalog.remove_snapshot("mask", record.id)
        assert collect(catalog, dry_run=True).blobs == 0
        assert collect(catalog).blobs == 0
        read_all(catalog, record)
        assert collect(catalog, later_s=leases.MOUNT_LEASE_S + HOUR_S).blobs > 1

    def test_what_is_unmounted_goes(self, catalog: Catalog) -> None:
        record = a_snapshot(catalog, "mask", range(50))
        leases.write_mounts(catalog, "home", "node-1", [(record.id, "/mnt/mask")])
        leases.write_mounts(catalog, "other", "node-2", [(record.id, "/mnt/mask")])
        catalog.remove_snapshot("mask", record.id)
        for holder in ("home", "other"):
            assert collect(catalog).blobs == 0
            leases.write_mounts(catalog, holder, "node", [])
        assert leases.mounted_at(catalog, record.id) == []
        assert collect(catalog).blobs > 1

    @promise("What is mounted anywhere stays readable after its removal")
    def test_a_mount_that_comes_while_a_collection_marks_is_seen(self, catalog: Catalog) -> None:
        record = a_snapshot(catalog, "mask", range(50))
        a_snapshot(catalog, "mask", range(60))
        catalog.remove_snapshot("mask", record.id)
        live = interrupted(
            reachable(catalog.get_blobs),
            lambda: leases.write_mounts(catalog, "home", "node-1", [(record.id, "/mnt/mask")]),
        )
        catalog.collect(live, grace_s=HOUR_S, now_s=time.time() + 3 * HOUR_S)
        read_all(catalog, record)

    def test_leases_that_ended_and_old_removals_are_forgotten(self, catalog: Catalog) -> None:
        record = a_snapshot(catalog, "mask", range(5))
        catalog.remove_snapshot("mask", record.id)
        leases.write_mounts(catalog, "home", "node-1", [(record.id, "/mnt/mask")])
        now_s = catalog.now_s()
        leases.forget_ended(catalog, now_s=now_s, cutoff_s=now_s - HOUR_S)
        assert catalog.documents(leases.MOUNTS)
        assert catalog.documents(leases.REMOVED)
        later_s = now_s + leases.MOUNT_LEASE_S + 1
        leases.forget_ended(catalog, now_s=later_s, cutoff_s=later_s - HOUR_S)
        assert catalog.documents(leases.MOUNTS) == catalog.documents(leases.REMOVED) == []

    def test_leases_from_before_the_clock_was_set_back_end_in_their_time(self, catalog: Catalog) -> None:
        record = a_snapshot(catalog, "mask", range(5))
        now_s = catalog.now_s()
        leases.write_mounts(catalog, "home", "node-1", [(record.id, "/mnt/mask")])
        leases.Creation(catalog).begin()
        catalog.remove_snapshot("mask", record.id)
        for kind in (leases.MOUNTS, leases.CREATIONS, leases.REMOVED):
            ((key, text),) = catalog.documents(kind)
            found = json.loads(text)
            later = {name: found[name] + 1e8 for name in ("until_s", "since_s", "at_s") if name in found}
            assert catalog.set_document(kind, key, json.dumps(found | later), old=text)
        # Nobody knows when it began: all that it can have stored is spared.
        assert leases.oldest_creation_age_s(catalog, now_s) == leases.CREATION_S + leases.REUSE_S
        leases.forget_ended(catalog, now_s=now_s, cutoff_s=now_s - HOUR_S)
        assert leases.mounted_at(catalog, record.id) == ["node-1:/mnt/mask"]
        later_s = now_s + leases.MOUNT_LEASE_S + 1
        assert leases.held_now(catalog, now_s=later_s, cutoff_s=later_s) == set()
        assert leases.oldest_creation_age_s(catalog, later_s) == 0
        leases.forget_ended(catalog, now_s=later_s, cutoff_s=later_s - HOUR_S)
        for kind in (leases.MOUNTS, leases.CREATIONS, leases.REMOVED):
            assert catalog.documents(kind) == []

    @pytest.mark.parametrize("number", ["9" * 400, "-1e308", "1e400", "NaN", "[" * 100_000, '"soon"'])
    def test_documents_that_make_no_sense_end_no_collection(self, catalog: Catalog, number: str) -> None:
        record = a_snapshot(catalog, "mask", range(5))
        for kind, name in ((leases.MOUNTS, "until_s"), (leases.CREATIONS, "since_s"), (leases.REMOVED, "at_s")):
            text = '{"snapshots": {}, "host": "h", "until_s": 1, "%s": %s}' % (name, number)  # noqa: UP031
            catalog.set_document(kind, "f" * 32, text, old=None)
        now_s = catalog.now_s()
        assert leases.held_now(catalog, now_s=now_s, cutoff_s=now_s) == set()
        assert leases.mounted_at(catalog, record.id) == []
        assert leases.oldest_creation_age_s(catalog, now_s) == 0
        leases.forget_ended(catalog, now_s=now_s, cutoff_s=now_s)
        for kind in (leases.MOUNTS, leases.CREATIONS, leases.REMOVED):
            assert catalog.documents(kind) == []

    @promise("A node's wrong clock harms no creation under way: ages go by the clocks of store and database")
    def test_the_catalogs_clock_is_about_right(self, catalog: Catalog) -> None:
        before_s = time.time()
        assert before_s - 5 < catalog.now_s() < time.time() + 5

    @promise("What was stored for a creation under way stays, also without a grace period")
    def test_a_creation_under_way_is_noted_until_it_ends(self, catalog: Catalog) -> None:
        creation = leases.Creation(catalog)
        creation.begin()
        now_s = catalog.now_s()
        assert leases.REUSE_S - 5 < leases.oldest_creation_age_s(catalog, now_s) < leases.REUSE_S + 60
        assert creation.is_undisturbed()
        leases.note_sweep(catalog)
        assert not creation.is_undisturbed()
        assert leases.oldest_creation_age_s(catalog, now_s + leases.CREATION_S + 60) == 0
        creation.end()
        assert leases.oldest_creation_age_s(catalog, now_s) == 0

    def test_an_empty_catalog_has_nothing_to_collect(self, catalog: Catalog) -> None:
        assert collect(catalog) == Collected(blobs=0, size_bytes=0, young=0, derived=0, documents=0)

    @promise("Where a snapshot cannot be read, a collection removes nothing")
    def test_a_snapshot_whose_root_cannot_be_read_ends_the_collection_and_nothing_goes(self, catalog: Catalog) -> None:
        blob = codec.blob_id(b"nobody's"), b"x"
        catalog.put_blobs([blob])
        catalog.commit(SnapshotRecord(dataset="mask", id="a" * 32, created_at="", origin="", files=0, total_bytes=0))
        with pytest.raises(CorruptManifestError, match="a" * 32) as caught:
            collect(catalog)
        assert "dsctl snapshot rm" in caught.value.hint
        assert catalog.get_blobs([blob[0]])
        catalog.remove_snapshot("mask", "a" * 32)
        assert collect(catalog).blobs == 1

    # --- what was derived -----------------------------------------------------------------------------------

    @promise("Derived annotations go with the last snapshot they are of")
    def test_what_was_derived_goes_with_the_last_snapshot_it_is_of(
        self, catalog: Catalog, open_again: Callable[[], Catalog]
    ) -> None:
        one = a_snapshot(catalog, "one", range(300))
        two = a_snapshot(catalog, "two", range(300))
        other = a_snapshot(catalog, "one", range(400))
        shared = a_table(catalog, one, b"part 1", b"part 2")
        others = a_table(catalog, other, b"part 2", b"part 3")
        catalog.remove_snapshot("one", one.id)
        assert collect(catalog).blobs == 0
        assert catalog.derived(two.id, "table") == shared[-1]
        catalog.remove_snapshot("two", two.id)
        done = collect(catalog)
        assert done.derived == 1
        assert catalog.derived(one.id, "table") is None
        assert set(open_again().get_blobs([*shared, *others])) == set(others)
        assert catalog.derived(other.id, "table") == others[-1]

    def test_what_another_derivation_took_the_place_of_goes(
        self, catalog: Catalog, open_again: Callable[[], Catalog]
    ) -> None:
        record = a_snapshot(catalog, "mask", range(10))
        old = a_table(catalog, record, b"old")
        new = a_table(catalog, record, b"new")
        collect(catalog)
        assert catalog.derived(record.id, "table") == new[-1]
        assert set(open_again().get_blobs([*old, *new])) == set(new)

    def test_what_was_derived_from_a_snapshot_not_yet_committed_stays_for_the_grace_period(
        self, catalog: Catalog
    ) -> None:
        coming = SnapshotRecord(dataset="mask", id="c" * 32, created_at="", origin="", files=0, total_bytes=0)
        table = a_table(catalog, coming, b"part")
        collect(catalog, later_s=HOUR_S - 60)
        assert catalog.derived(coming.id, "table") == table[-1]
        assert len(catalog.get_blobs(table)) == 2
        assert collect(catalog).derived == 1
        assert catalog.derived(coming.id, "table") is None

    def test_something_derived_that_is_lost_is_forgotten_so_that_it_can_be_made_again(self, catalog: Catalog) -> None:
        record = a_snapshot(catalog, "mask", range(10))
        catalog.set_derived(record.id, "lost", codec.blob_id(b"never put"))
        collect(catalog)
        assert catalog.derived(record.id, "lost") is None

    # --- creations under way --------------------------------------------------------------------------------

    @promise("Collection costs a creation under way nothing")
    @pytest.mark.parametrize("moment", [0, 1])
    def test_a_commit_at_any_moment_of_a_collection_keeps_its_blobs(
        self, catalog: Catalog, open_again: Callable[[], Catalog], moment: int
    ) -> None:
        a_snapshot(catalog, "kept", range(100))
        gone = a_snapshot(catalog, "mask", range(1000, 2000), label=b"face")
        needs = blobs_needed(catalog, gone)
        catalog.remove_snapshot("mask", gone.id)
        other = open_again()

        def commit() -> None:
            other.commit(gone, needs=needs)

        def nearly_the_same() -> None:  # so that there is something new to mark, and then another moment
            a_snapshot(other, "else", range(50))

        live = interrupted(reachable(catalog.get_blobs), *([nearly_the_same] * moment), commit)
        catalog.collect(live, grace_s=0, now_s=time.time() + HOUR_S)
        assert [record.id for record in catalog.snapshots("mask")] == [gone.id]
        assert read_everything(catalog) == 2 + moment

    @pytest.mark.parametrize("moment", [0, 1])
    def test_something_derived_at_any_moment_of_a_collection_keeps_its_blobs(
        self, catalog: Catalog, open_again: Callable[[], Catalog], moment: int
    ) -> None:
        record = a_snapshot(catalog, "kept", range(100))
        old = a_table(catalog, a_snapshot(catalog, "gone", range(7)), b"part 1", b"part 2")
        catalog.remove_snapshot("gone", a_snapshot(catalog, "gone", range(7)).id)
        other = open_again()

        def derive() -> None:
            other.set_derived(record.id, "table", old[-1], needs=old)

        def something_else() -> None:
            a_snapshot(other, "else", range(50))

        live = interrupted(reachable(catalog.get_blobs), *([something_else] * moment), derive)
        catalog.collect(live, grace_s=0, now_s=time.time() + HOUR_S)
        assert catalog.derived(record.id, "table") == old[-1]
        assert set(catalog.get_blobs(old)) == set(old)

    @promise("Collection costs a creation under way nothing")
    def test_a_commit_that_comes_too_late_fails_whole_and_can_be_made_again(self, catalog: Catalog) -> None:
        gone = a_snapshot(catalog, "mask", range(1000))
        needs = blobs_needed(catalog, gone)
        blobs = catalog.get_blobs(needs)
        catalog.remove_snapshot("mask", gone.id)
        collect(catalog, grace_s=0)
        with pytest.raises(CorruptManifestError):
            catalog.commit(gone, needs=needs)
        assert catalog.datasets() == []
        catalog.put_blobs(list(blobs.items()))
        catalog.commit(gone, needs=needs)
        collect(catalog, grace_s=0)
        read_all(catalog, gone)

    @promise("Collection costs a creation under way nothing")
    def test_creations_lose_nothing_while_collections_run_again_and_again(
        self, catalog: Catalog, catalog_url: str
    ) -> None:
        creators, rounds = 3, 6
        running = _fork.Value("i", creators)
        start = _fork.Barrier(creators + 2)

        def create(process: int) -> None:
            own = open_catalog_url(catalog_url)
            chance = random.Random(process)
            name = f"d{process}"
            start.wait(30)
            for _round in range(rounds):
                record = _created(own, name, chance)
                read_all(own, record)
                assert own.derived(record.id, "table") == a_table(own, record, b"part")[-1]
                old = own.snapshots(name)
                if len(old) > 2:
                    own.remove_snapshot(name, old[0].id)
                for listed in own.snapshots(name):
                    read_all(own, listed)
            with running:
                running.value -= 1

        def gc(_process: int) -> None:
            own = open_catalog_url(catalog_url)
            start.wait(30)
            while running.value:
                own.collect(reachable(own.get_blobs), grace_s=0)

        with _children([create] * creators + [gc] * 2) as children:
            for child in children:
                child.join(200)
            assert [child.exitcode for child in children] == [0] * len(children)
        assert read_everything(catalog) >= creators
        for number in range(creators):
            for record in catalog.snapshots(f"d{number}"):
                root = catalog.derived(record.id, "table")
                assert root is not None
                assert len(catalog.get_blobs([root, codec.blob_id(b"part")])) == 2
        collect(catalog)
        assert read_everything(catalog) >= creators

    @promise("Writers, creations and collections killed at any point leave a valid catalog")
    def test_collections_and_creations_killed_at_any_point_leave_a_valid_catalog(
        self, catalog: Catalog, catalog_url: str
    ) -> None:
        def work(process: int) -> None:
            own = open_catalog_url(catalog_url)
            chance = random.Random(os.getpid())
            while True:
                if process == 0:
                    own.collect(reachable(own.get_blobs), grace_s=0)
                    continue
                record = _created(own, f"d{process}", chance)
                a_table(own, record, b"part")
                for old in own.snapshots(f"d{process}")[:-2]:
                    own.remove_snapshot(f"d{process}", old.id)

        chance = random.Random(11)
        rounds = 0
        while rounds < 5 or not read_everything(catalog):  # a busy machine may not get as far as a commit at first
            rounds += 1
            with _children([work, work, work]) as children:
                children[0].join(chance.uniform(0.05, 0.4) * max(1, rounds / 5))
                for child in children:
                    assert child.exitcode is None
                    os.kill(child.pid or 0, signal.SIGKILL)
            read_everything(catalog)
        a_snapshot(catalog, "after", range(300), label=b"face")
        collect(catalog)
        collect(catalog, grace_s=0)
        read_everything(catalog)


def _created(catalog: Catalog, name: str, chance: random.Random) -> SnapshotRecord:
    """A snapshot of one of a few contents, so that datasets share blobs; made again when its blobs went meanwhile."""
    numbers = range(100 * chance.randrange(3), 500 + 100 * chance.randrange(3))
    label = chance.choice([b"", b"face", b"mask"])
    while True:
        with contextlib.suppress(CorruptManifestError):
            record = a_snapshot(catalog, name, numbers, label=label)
            with contextlib.suppress(CatalogError):
                return _with_table(catalog, record)


def _with_table(catalog: Catalog, record: SnapshotRecord) -> SnapshotRecord:
    while True:
        with contextlib.suppress(CorruptManifestError):
            a_table(catalog, record, b"part")
            return record


@contextlib.contextmanager
def _children(work: list[Callable[[int], None]]) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Children that call `work[number](number)`, ended at the end."""
    children: list[multiprocessing.process.BaseProcess] = [
        _fork.Process(target=target, args=(number,)) for number, target in enumerate(work)
    ]
    for child in children:
        child.start()
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.join()
