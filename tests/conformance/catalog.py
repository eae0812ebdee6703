"""Test what every catalog backend promises, as tests: subclass `CatalogConformance` and give it a `catalog_url`
fixture.

    class TestMyCatalog(CatalogConformance):
        @pytest.fixture
        def catalog_url(self) -> str: ...     # of an empty catalog, a new one each time

Used by this project's tests and by whoever writes another backend. Needs pytest. The children that are killed
and those that race are made by `fork()`, because data loaders make theirs so too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import pytest

from datacache.catalog.base import Catalog
from datacache.catalog.open import open_catalog_url
from datacache.catalog.refs import resolve
from datacache.core.errors import CatalogError, CorruptManifestError, SnapshotNotFoundError, TagExistsError
from datacache.manifest.model import BlobId, SnapshotRecord
from tests.conformance.collect import CollectConformance
from tests.conformance.documents import DocumentsConformance
from tests.conformance.killed import reported_until_killed
from tests.promises import promise

_fork = multiprocessing.get_context("fork")


def a_blob(data: bytes) -> tuple[BlobId, bytes]:
    """A blob under the id of its content."""
    return BlobId(blake2b(data, digest_size=16).digest()), data


def a_record(dataset: str = "mask", number: int = 1, *, message: str = "", parent: str | None = None) -> SnapshotRecord:
    """A record of a snapshot that was never listed."""
    return SnapshotRecord(
        dataset=dataset,
        id=blake2b(f"{dataset} {number}".encode(), digest_size=16).hexdigest(),
        created_at=f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}Z",
        origin="s3://faces/mask/",
        files=number,
        total_bytes=1000 * number,
        message=message,
        parent=parent,
    )


def run_together(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` to `work(count - 1)` in child processes that begin at the same moment; all must
    succeed.
    """
    start = _fork.Barrier(count)

    def child(number: int) -> None:
        start.wait(30)
        work(number)

    children = [_fork.Process(target=child, args=(number,)) for number in range(count)]
    for process in children:
        process.start()
    for process in children:
        process.join(120)
    assert [process.exitcode for process in children] == [0] * count


def check_consistency(catalog: Catalog) -> None:
    """Whatever happened to its writers, what a catalog shows is whole."""
    for dataset in catalog.datasets():
        snapshots = catalog.snapshots(dataset.name)
        if catalog.dataset(dataset.name) != dataset:
            # A server goes on for a moment with what a killed writer had asked for.
            check_consistency(catalog)
            return
        ids = [record.id for record in snapshots]
        assert len(set(ids)) == len(ids)
        assert dataset.latest in ids
        assert set(dataset.tags.values()) <= set(ids)
        roots = [BlobId(bytes.fromhex(id)) for id in ids]
        assert set(catalog.get_blobs(roots)) == set(roots)
        for id in ids:
            assert catalog.snapshot(dataset.name, id) in snapshots


class CatalogConformance(CollectConformance, DocumentsConformance):
    """The suite. Each test gets `catalog`, opened at `catalog_url`, and `open_again` for a second one."""

    @pytest.fixture
    def catalog_url(self) -> str:
        """Address of an empty catalog that nobody else uses."""
        raise NotImplementedError

    @pytest.fixture
    def open_again(self, catalog_url: str) -> Iterator[Callable[[], Catalog]]:
        """Opens the same catalog once more, as another process would."""
        with contextlib.ExitStack() as stack:

            def opened() -> Catalog:
                catalog = open_catalog_url(catalog_url)
                stack.callback(catalog.close)
                return catalog

            yield opened

    @pytest.fixture
    def catalog(self, open_again: Callable[[], Catalog]) -> Catalog:
        """The catalog under test."""
        return open_again()

    # --- blobs ----------------------------------------------------------------------------------------------

    def test_blobs_come_back_as_they_were_put(self, catalog: Catalog, open_again: Callable[[], Catalog]) -> None:
        blobs = [a_blob(b""), a_blob(bytes(range(256))), a_blob(os.urandom(1 << 20))]
        catalog.put_blobs(blobs)
        for reader in (catalog, open_again()):
            assert reader.get_blobs(id for id, _data in blobs) == dict(blobs)

    def test_blobs_that_are_not_there_are_left_out(self, catalog: Catalog) -> None:
        here, missing = a_blob(b"here"), a_blob(b"missing")
        catalog.put_blobs([here])
        assert catalog.get_blobs([missing[0], here[0], here[0]]) == dict([here])
        assert catalog.get_blobs([]) == {}

    def test_putting_blobs_again_changes_nothing(self, catalog: Catalog) -> None:
        blobs = [a_blob(str(number).encode()) for number in range(50)]
        catalog.put_blobs([])
        catalog.put_blobs(blobs[:30])
        catalog.put_blobs(blobs[20:] + blobs[45:])
        id = blobs[0][0]
        catalog.put_blobs([(id, b"another encoding of the same")])
        assert catalog.get_blobs(id for id, _data in blobs) == dict(blobs)

    def test_thousands_of_blobs_are_put_and_got_at_once(self, catalog: Catalog) -> None:
        blobs = [a_blob(number.to_bytes(4, "big") * 100) for number in range(5200)]
        catalog.put_blobs(blobs)
        assert catalog.get_blobs([id for id, _data in blobs]) == dict(blobs)

    # --- commit ---------------------------------------------------------------------------------------------

    def test_an_empty_catalog_has_nothing(self, catalog: Catalog) -> None:
        assert catalog.datasets() == []
        assert catalog.dataset("mask") is None
        assert catalog.snapshot("mask", "0" * 32) is None
        assert catalog.snapshots("mask") == []

    def test_a_commit_shows_the_snapshot_latest_and_tags(
        self, catalog: Catalog, open_again: Callable[[], Catalog]
    ) -> None:
        record = a_record()
        assert catalog.commit(record, tags=["v1", "v1.0", "$good"]) == record
        for reader in (catalog, open_again()):
            dataset = reader.dataset("mask")
            assert dataset is not None
            assert dataset.latest == record.id
            assert dataset.tags == {"v1": record.id, "v1.0": record.id, "$good": record.id}
            assert reader.snapshot("mask", record.id) == record
            assert reader.snapshots("mask") == [record]

    def test_a_record_keeps_every_character_of_its_texts(self, catalog: Catalog) -> None:
        record = SnapshotRecord(
            dataset="a/b.c-d_e",
            id="f" * 32,
            created_at="2026-01-01T00:00:00Z",
            origin="file:///data/caf\udce9",
            files=2**40,
            total_bytes=2**60,
            message="mit Umlaut: ä, \0, 'quoted' \"twice\", 顔 \U0001f637\n",
            parent="e" * 32,
            warnings=("key \udcff cannot be shown", "", "$set"),
        )
        catalog.commit(record)
        assert catalog.snapshot("a/b.c-d_e", "f" * 32) == record

    def test_committing_again_keeps_the_first_record_and_makes_it_latest(self, catalog: Catalog) -> None:
        first, second = a_record(number=1, message="first"), a_record(number=2)
        catalog.commit(first)
        catalog.commit(second)
        assert catalog.commit(a_record(number=1, message="again"), tags=["v1"]) == first
        dataset = catalog.dataset("mask")
        assert dataset is not None
        assert dataset.latest == first.id
        assert dataset.tags == {"v1": first.id}
        assert catalog.snapshots("mask") == [first, second]

    @promise("A tag is moved only when asked to")
    def test_a_tag_that_is_taken_makes_the_commit_change_nothing(self, catalog: Catalog) -> None:
        first, second = a_record(number=1), a_record(number=2)
        catalog.commit(first, tags=["v1"])
        before = catalog.dataset("mask")
        with pytest.raises(TagExistsError):
            catalog.commit(second, tags=["v0", "v1"])
        assert catalog.dataset("mask") == before
        assert catalog.snapshots("mask") == [first]
        catalog.commit(second, tags=["v0", "v1"], move_tags=True)
        dataset = catalog.dataset("mask")
        assert dataset is not None
        assert dataset.tags == {"v0": second.id, "v1": second.id}

    def test_datasets_are_apart_and_listed_by_name(self, catalog: Catalog) -> None:
        names = ["mask", "Mask", "mask/small", "a"]
        for name in names:
            catalog.commit(a_record(name), tags=["v1"])
        assert [dataset.name for dataset in catalog.datasets()] == sorted(names)
        catalog.remove_snapshot("mask", a_record("mask").id)
        assert [dataset.name for dataset in catalog.datasets()] == sorted(set(names) - {"mask"})
        other = catalog.dataset("mask/small")
        assert other is not None
        assert other.tags == {"v1": a_record("mask/small").id}

    def test_two_datasets_may_have_the_same_snapshot(self, catalog: Catalog) -> None:
        one = SnapshotRecord(dataset="one", id="a" * 32, created_at="now", origin="file:///x", files=1, total_bytes=1)
        two = SnapshotRecord(dataset="two", id="a" * 32, created_at="then", origin="file:///y", files=1, total_bytes=1)
        catalog.commit(one)
        catalog.commit(two)
        assert catalog.snapshot("one", "a" * 32) == one
        assert catalog.snapshot("two", "a" * 32) == two

    def test_snapshots_come_in_the_order_of_their_creation(self, catalog: Catalog) -> None:
        records = [a_record(number=number) for number in range(1, 30)]
        for record in records:
            catalog.commit(record)
        assert catalog.snapshots("mask") == records
        prefix = records[7].id[:2]
        assert catalog.snapshots("mask", id_prefix=prefix) == [r for r in records if r.id.startswith(prefix)]
        assert catalog.snapshots("mask", id_prefix=records[7].id) == [records[7]]

    def test_a_commit_whose_blobs_are_not_all_there_changes_nothing(self, catalog: Catalog) -> None:
        here, missing = a_blob(b"here"), a_blob(b"missing")
        catalog.put_blobs([here])
        catalog.commit(a_record(number=1), tags=["v1"], needs=[here[0], here[0]])
        before = catalog.dataset("mask")
        with pytest.raises(CorruptManifestError, match="1 blob"):
            catalog.commit(a_record(number=2), tags=["v2"], needs=[here[0], missing[0]])
        with pytest.raises(CorruptManifestError):
            catalog.commit(a_record("other"), needs=[missing[0]])
        assert catalog.dataset("mask") == before
        assert catalog.snapshots("mask") == [a_record(number=1)]
        assert catalog.dataset("other") is None
        catalog.put_blobs([missing])
        catalog.commit(a_record(number=2), needs=[here[0], missing[0]])
        assert catalog.snapshots("mask") == [a_record(number=1), a_record(number=2)]

    def test_thousands_of_blobs_may_be_needed(self, catalog: Catalog) -> None:
        blobs = [a_blob(number.to_bytes(4, "big")) for number in range(2500)]
        catalog.put_blobs(blobs[:-1])
        needs = [id for id, _data in blobs]
        with pytest.raises(CorruptManifestError, match="1 blob"):
            catalog.commit(a_record(), needs=needs)
        catalog.put_blobs(blobs)
        catalog.commit(a_record(), needs=needs)

    # --- besides the snapshots ------------------------------------------------------------------------------

    def test_a_catalog_has_one_identity_for_ever_and_another_than_others(
        self, catalog: Catalog, open_again: Callable[[], Catalog]
    ) -> None:
        identity = catalog.identity()
        assert re.fullmatch("[0-9a-f]{16}", identity)
        catalog.commit(a_record())
        assert catalog.identity() == open_again().identity() == identity

    def test_processes_that_ask_first_for_the_identity_get_the_same(self, catalog_url: str) -> None:
        drawn = _fork.SimpleQueue()
        run_together(4, lambda _process: drawn.put(open_catalog_url(catalog_url).identity()))
        assert len({drawn.get() for _ in range(4)}) == 1

    def test_what_was_derived_from_a_snapshot_is_found_by_its_name(
        self, catalog: Catalog, open_again: Callable[[], Catalog]
    ) -> None:
        one, two = a_blob(b"annotations")[0], a_blob(b"other annotations")[0]
        id = a_record().id
        assert catalog.derived(id, "annotations/1") is None
        catalog.set_derived(id, "annotations/1", one)
        catalog.set_derived(id, "annotations/1", one)
        catalog.set_derived(id, "another.$", two)
        for reader in (catalog, open_again()):
            assert reader.derived(id, "annotations/1") == one
            assert reader.derived(id, "another.$") == two
            assert reader.derived("0" * 32, "annotations/1") is None
        catalog.set_derived(id, "annotations/1", two)
        assert open_again().derived(id, "annotations/1") == two

    def test_something_derived_whose_blobs_are_not_all_there_is_not_noted(self, catalog: Catalog) -> None:
        here, missing = a_blob(b"here"), a_blob(b"missing")
        catalog.put_blobs([here])
        catalog.set_derived("a" * 32, "table", here[0], needs=[here[0]])
        with pytest.raises(CorruptManifestError):
            catalog.set_derived("a" * 32, "table", missing[0], needs=[here[0], missing[0]])
        assert catalog.derived("a" * 32, "table") == here[0]

    # --- tags -----------------------------------------------------------------------------------------------

    @promise("A tag is moved only when asked to")
    def test_a_tag_moves_only_when_asked_to(self, catalog: Catalog) -> None:
        first, second = a_record(number=1), a_record(number=2)
        catalog.commit(first)
        catalog.commit(second)
        catalog.set_tag("mask", "good.1", first.id)
        catalog.set_tag("mask", "good.1", first.id)
        with pytest.raises(TagExistsError, match=r"good\.1"):
            catalog.set_tag("mask", "good.1", second.id)
        assert resolve(catalog, "mask@good.1") == first
        catalog.set_tag("mask", "good.1", second.id, move=True)
        assert resolve(catalog, "mask@good.1") == second

    def test_a_tag_needs_a_snapshot(self, catalog: Catalog) -> None:
        with pytest.raises(SnapshotNotFoundError):
            catalog.set_tag("mask", "v1", a_record().id)
        catalog.commit(a_record())
        with pytest.raises(SnapshotNotFoundError):
            catalog.set_tag("mask", "v1", "0" * 32, move=True)

    def test_removing_a_tag_says_whether_it_was_there(self, catalog: Catalog) -> None:
        assert not catalog.remove_tag("mask", "v1")
        catalog.commit(a_record(), tags=["v1"])
        assert catalog.remove_tag("mask", "v1")
        assert not catalog.remove_tag("mask", "v1")
        dataset = catalog.dataset("mask")
        assert dataset is not None
        assert dataset.tags == {}

    # --- removal --------------------------------------------------------------------------------------------

    def test_a_tag_is_removed_only_while_it_names_the_snapshot(self, catalog: Catalog) -> None:
        catalog.commit(a_record(number=1), tags=["v1"])
        assert not catalog.remove_tag("mask", "v1", id=a_record(number=2).id)
        assert catalog.remove_tag("mask", "v1", id=a_record(number=1).id)

    @promise("Removing by a tag removes the tag, and the snapshot with its last tag")
    def test_a_snapshot_with_other_tags_than_expected_is_not_removed(self, catalog: Catalog) -> None:
        record = a_record()
        catalog.commit(record, tags=["v1", "v2"])
        for expected in ([], ["v1"], ["v3"]):
            with pytest.raises(TagExistsError, match="mask@v2"):
                catalog.remove_snapshot("mask", record.id, only_tags=expected)
        assert catalog.snapshot("mask", record.id) == record
        assert catalog.remove_snapshot("mask", record.id, only_tags=["v1", "v2", "v3"])
        assert catalog.dataset("mask") is None

    def test_a_commit_is_checked_against_the_latest_snapshot(self, catalog: Catalog) -> None:
        seen: list[SnapshotRecord] = []

        def refuse(latest: SnapshotRecord) -> None:
            seen.append(latest)
            raise CatalogError("no")

        catalog.commit(a_record(number=1), tags=["v1"], check=refuse)
        catalog.commit(a_record(number=2))
        with pytest.raises(CatalogError, match="no"):
            catalog.commit(a_record(number=3), tags=["v1"], move_tags=True, check=refuse)
        assert seen == [a_record(number=2)]
        assert [record.files for record in catalog.snapshots("mask")] == [1, 2]
        dataset = catalog.dataset("mask")
        assert dataset is not None
        assert (dataset.latest, dataset.tags) == (a_record(number=2).id, {"v1": a_record(number=1).id})

    @promise("A data set's command, source and layout change only with `--replace`")
    def test_of_two_first_commits_at_once_the_second_is_checked(
        self, catalog: Catalog, open_again: Callable[[], Catalog]
    ) -> None:
        def refuse(_latest: SnapshotRecord) -> None:
            raise CatalogError("no")

        def commit(number: int) -> bool:
            with contextlib.closing(open_again()) as own:
                try:
                    own.commit(a_record(number=number), check=refuse)
                except CatalogError:
                    return False
                return True

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(commit, range(8))) == 1
        assert len(catalog.snapshots("mask")) == 1

    def test_removing_the_latest_falls_back_to_the_newest_left(self, catalog: Catalog) -> None:
        records = [a_record(number=number) for number in (1, 2, 3)]
        for record in records:
            catalog.commit(record, tags=[f"v{record.files}"])
        catalog.set_tag("mask", "good", records[2].id)
        assert catalog.remove_snapshot("mask", records[2].id)
        dataset = catalog.dataset("mask")
        assert dataset is not None
        assert dataset.latest == records[1].id
        assert dataset.tags == {"v1": records[0].id, "v2": records[1].id}
        assert catalog.snapshot("mask", records[2].id) is None

    def test_removing_an_old_snapshot_leaves_latest_alone(self, catalog: Catalog) -> None:
        records = [a_record(number=number) for number in (1, 2, 3)]
        for record in records:
            catalog.commit(record)
        catalog.commit(records[0])  # latest again
        assert catalog.remove_snapshot("mask", records[2].id)
        dataset = catalog.dataset("mask")
        assert dataset is not None
        assert dataset.latest == records[0].id

    def test_a_dataset_without_snapshots_is_forgotten_and_can_come_back(self, catalog: Catalog) -> None:
        blob = a_blob(b"shared")
        catalog.put_blobs([blob])
        catalog.commit(a_record(), tags=["v1"])
        assert catalog.remove_snapshot("mask", a_record().id)
        assert not catalog.remove_snapshot("mask", a_record().id)
        assert catalog.dataset("mask") is None
        assert catalog.datasets() == []
        assert catalog.get_blobs([blob[0]]) == dict([blob])
        catalog.commit(a_record(message="second life"))
        dataset = catalog.dataset("mask")
        assert dataset is not None
        assert dataset.tags == {}
        assert [record.message for record in catalog.snapshots("mask")] == ["second life"]

    # --- threads and processes ------------------------------------------------------------------------------

    def test_a_catalog_travels_to_another_process_by_pickle(self, catalog: Catalog) -> None:
        catalog.commit(a_record())
        other: Catalog = pickle.loads(pickle.dumps(catalog))
        assert other.snapshots("mask") == [a_record()]
        other.close()

    def test_a_closed_catalog_opens_again(self, catalog: Catalog) -> None:
        catalog.commit(a_record())
        catalog.close()
        catalog.close()
        assert catalog.snapshots("mask") == [a_record()]

    def test_threads_share_a_catalog(self, catalog: Catalog) -> None:
        failures: list[BaseException] = []

        def work(thread: int) -> None:
            try:
                for number in range(10):
                    catalog.put_blobs([a_blob(f"{thread} {number}".encode())])
                    catalog.commit(a_record(f"d{thread % 2}", 100 * thread + number))
                    assert catalog.datasets()
            except BaseException as exc:  # noqa: BLE001 - reported below
                failures.append(exc)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert [len(catalog.snapshots(f"d{number}")) for number in range(2)] == [30, 30]

    def test_a_forked_child_and_its_parent_go_on_while_threads_work(self, catalog: Catalog) -> None:
        catalog.commit(a_record(number=1))
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                assert catalog.snapshots("mask")

        def child() -> None:
            catalog.commit(a_record("child", os.getpid()))
            assert catalog.snapshots("mask")

        threads = [threading.Thread(target=busy) for _number in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _round in range(5):
                process = _fork.Process(target=child)
                process.start()
                catalog.put_blobs([a_blob(os.urandom(8))])
                process.join(60)
                assert process.exitcode == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert len(catalog.snapshots("child")) == 5

    @promise("Concurrent writers of the catalog lose nothing")
    def test_processes_committing_at_once_lose_nothing(self, catalog: Catalog, catalog_url: str) -> None:
        def work(process: int) -> None:
            own = open_catalog_url(catalog_url)
            for number in range(10):
                record = a_record(number=100 * process + number)
                own.put_blobs([(BlobId(bytes.fromhex(record.id)), b"root"), a_blob(os.urandom(50_000))])
                own.commit(record, tags=[f"p{process}-{number}", "moving"], move_tags=True)

        run_together(4, work)
        records = catalog.snapshots("mask")
        assert {record.files for record in records} == {100 * p + n for p in range(4) for n in range(10)}
        dataset = catalog.dataset("mask")
        assert dataset is not None
        assert dataset.tags == {f"p{r.files // 100}-{r.files % 100}": r.id for r in records} | {
            "moving": dataset.tags["moving"]
        }
        assert dataset.latest == records[-1].id
        check_consistency(catalog)

    @promise("Concurrent writers of the catalog lose nothing")
    def test_of_processes_racing_for_a_tag_one_wins_and_the_others_hear_of_it(
        self, catalog: Catalog, catalog_url: str
    ) -> None:
        won = _fork.Value("i", 0)

        def work(process: int) -> None:
            own = open_catalog_url(catalog_url)
            for number in range(10):
                try:
                    own.commit(a_record(number=100 * process + number), tags=[f"round-{number}"])
                except TagExistsError:
                    continue
                with won:
                    won.value += 1

        run_together(4, work)
        assert won.value == 10
        assert len(catalog.snapshots("mask")) == 10

    def test_committing_and_removing_the_same_snapshot_at_once_leaves_it_whole_or_gone(
        self, catalog: Catalog, catalog_url: str
    ) -> None:
        record = a_record()
        catalog.put_blobs([(BlobId(bytes.fromhex(record.id)), b"root")])

        def work(process: int) -> None:
            own = open_catalog_url(catalog_url)
            for _number in range(25):
                if process % 2:
                    own.remove_snapshot("mask", record.id)
                else:
                    assert own.commit(record, tags=["v1"]) == record
                found = own.snapshot("mask", record.id)
                assert found in (None, record)

        run_together(4, work)
        check_consistency(catalog)
        catalog.commit(record)
        check_consistency(catalog)
        assert catalog.snapshots("mask") == [record]

    @promise("Writers, creations and collections killed at any point leave a valid catalog")
    def test_a_killed_writer_leaves_a_valid_catalog_and_loses_nothing_it_was_told_is_done(
        self, catalog: Catalog, catalog_url: str
    ) -> None:
        chance = random.Random(7)
        for round_number in range(6):
            acknowledged = reported_until_killed(
                _write_until_killed, catalog_url, round_number, after_s=chance.uniform(0.02, 0.15)
            )
            check_consistency(catalog)
            there = {record.id for record in catalog.snapshots(f"killed{round_number}")}
            assert set(acknowledged) <= there
            _commit_whole(catalog, a_record("after", round_number))


def _commit_whole(catalog: Catalog, record: SnapshotRecord) -> None:
    catalog.put_blobs([(BlobId(bytes.fromhex(record.id)), b"root")])
    catalog.commit(record)


def _write_until_killed(url: str, seed: int, sending: object) -> None:
    catalog = open_catalog_url(url)
    chance = random.Random(seed)
    name = f"killed{seed}"
    number = 0
    while True:
        number += 1
        record = a_record(name, number)
        catalog.put_blobs([(BlobId(bytes.fromhex(record.id)), b"root" * chance.randrange(3000))])
        catalog.commit(record, tags=["moving", f"t{number}"], move_tags=True)
        sending.send(record.id)  # type: ignore[attr-defined]
        catalog.set_tag(name, "good", record.id, move=True)
        gone = a_record(f"{name}-gone", number)
        catalog.put_blobs([(BlobId(bytes.fromhex(gone.id)), b"root")])
        catalog.commit(gone, tags=["v1"], move_tags=True)
        catalog.remove_snapshot(gone.dataset, gone.id)
