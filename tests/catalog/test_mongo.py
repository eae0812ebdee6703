"""The MongoDB backend against the real server: the conformance suite, passwords, outages, crashes of the
server.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pymongo
import pytest
from bson import ObjectId

from datacache.catalog.mongo.catalog import MongoCatalog
from datacache.catalog.record import encode_record
from datacache.core.errors import CatalogError, CatalogUnavailableError, SettingsError
from datacache.manifest.model import SnapshotRecord
from tests.conformance.catalog import CatalogConformance, a_blob, a_record
from tests.conformance.collect import HOUR_S, a_snapshot, blobs_needed, collect, read_all
from tests.promises import promise
from tests.servers import Mongod


class TestMongoCatalog(CatalogConformance):
    @pytest.fixture
    def catalog_url(self, mongod: Mongod) -> str:
        return mongod.database_url()


@pytest.fixture(scope="module")
def replica_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mongod]:
    with Mongod(tmp_path_factory.mktemp("rs"), replica_set=True) as server:
        yield server


class TestMongoCatalogOnReplicaSet(CatalogConformance):
    @pytest.fixture
    def catalog_url(self, replica_set: Mongod) -> str:
        return f"{replica_set.database_url()}?replicaSet=rs0"


@promise("What MongoDB acknowledged survives its power cut")
def test_what_was_acknowledged_survives_a_power_cut_of_the_server(tmp_path: Path) -> None:
    with Mongod(tmp_path / "own") as server:
        catalog = MongoCatalog(server.database_url())
        for number in range(20):
            catalog.put_blobs([a_blob(str(number).encode())])
            catalog.commit(a_record(number=number), tags=[f"v{number}"])
        server.stop()
        server.start()
        assert len(catalog.snapshots("mask")) == 20
        dataset = catalog.dataset("mask")
        assert dataset is not None
        assert len(dataset.tags) == 20
        catalog.commit(a_record(number=100))
        catalog.close()


def test_a_server_that_is_away_is_named_within_seconds(tmp_path: Path) -> None:
    catalog = MongoCatalog("mongodb://someone:hush@127.0.0.1:9/lab?serverSelectionTimeoutMS=500")
    begun = time.monotonic()
    with pytest.raises(CatalogUnavailableError, match=r"127\.0\.0\.1:9 does not answer") as caught:
        catalog.commit(a_record())
    assert time.monotonic() - begun < 3
    assert "DATACACHE_CATALOG" in caught.value.hint
    assert "hush" not in f"{caught.value!r} {caught.value} {caught.value.hint} {catalog!r} {catalog.url}"
    assert catalog.url == "mongodb://127.0.0.1:9/lab"
    catalog.close()


def test_without_a_timeout_in_the_url_five_seconds_are_the_bound() -> None:
    catalog = MongoCatalog("mongodb://127.0.0.1:9/lab")
    begun = time.monotonic()
    with pytest.raises(CatalogUnavailableError):
        catalog.datasets()
    assert 4 < time.monotonic() - begun < 8
    catalog.close()


@promise("A catalog server that is away is waited for once, not by each lookup")
def test_an_outage_is_waited_for_once_and_its_end_is_noticed(tmp_path: Path) -> None:
    with Mongod(tmp_path / "own") as server:
        catalog = MongoCatalog(server.database_url())
        catalog.commit(a_record())
        server.stop()
        begun = time.monotonic()
        for _ in range(6):
            with pytest.raises(CatalogUnavailableError, match="does not answer"):
                catalog.dataset("mask")
        assert time.monotonic() - begun < 4 * 5  # six waits of five seconds
        server.start()
        end = time.monotonic() + 60
        while True:
            try:
                assert catalog.dataset("mask") is not None
                break
            except CatalogUnavailableError:
                assert time.monotonic() < end
                time.sleep(0.1)
        catalog.close()


@promise("No credential appears in a message, a repr or a metric")
@pytest.mark.parametrize(
    "url",
    [
        "mongodb://someone:hu:sh@host/lab",
        "mongodb://someone:hu/sh@host/lab",
        "mongodb://someone:hush@host:port/lab",
        "mongodb://",
        "postgres://someone:hush@host/lab",
    ],
)
def test_a_wrong_url_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        MongoCatalog(url)
    assert "hush" not in f"{caught.value!r} {caught.value.hint}"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_the_database_is_datacache_unless_the_url_says_so() -> None:
    assert MongoCatalog("mongodb://a,b:27018").url == "mongodb://a,b:27018/datacache"
    assert MongoCatalog("mongodb+srv://u:p@cluster.example/lab?w=1").url == "mongodb://cluster.example/lab"


def test_a_wrong_password_is_no_outage(tmp_path: Path, mongod: Mongod) -> None:
    url = mongod.database_url().replace("mongodb://", "mongodb://nobody:hush@")
    catalog = MongoCatalog(url)
    with pytest.raises(CatalogError, match="does not let this account") as caught:
        catalog.datasets()
    assert not isinstance(caught.value, CatalogUnavailableError)
    assert "hush" not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"
    catalog.close()


def test_a_newer_schema_is_refused(mongod: Mongod) -> None:
    url = mongod.database_url()
    with pymongo.MongoClient[dict[str, object]](url) as client:
        client.get_default_database()["meta"].insert_one({"_id": "schema", "version": 99})
    catalog = MongoCatalog(url)
    with pytest.raises(CatalogError, match="newer datacache"):
        catalog.commit(a_record())
    catalog.close()


@promise("A catalog of an older version is brought up to date and keeps everything")
def test_a_database_of_version_1_is_brought_up_to_date_and_keeps_everything(mongod: Mongod) -> None:
    url = mongod.database_url()
    blob = a_blob(b"old")
    catalog = MongoCatalog(url)
    catalog.commit(a_record(), tags=["v1"])
    with pymongo.MongoClient[dict[str, object]](url) as client:  # as that version left it
        database = client.get_default_database()
        database["meta"].replace_one({"_id": "schema"}, {"version": 1})
        database["meta"].delete_one({"_id": "identity"})
        database["blobs"].drop()
        database["derived"].drop()
        database["blobs"].insert_one({"_id": blob[0], "data": blob[1]})
        database["snapshots"].update_one({}, {"$unset": {"at_s": ""}})
        catalog = MongoCatalog(url)
        assert catalog.snapshots("mask") == [a_record()]
        assert catalog.get_blobs([blob[0]]) == dict([blob])
        catalog.put_blobs([blob])
        catalog.commit(a_record(number=2), needs=[blob[0]])
        assert len(catalog.identity()) == 16
        assert database["meta"].find_one({"_id": "schema"}) == {"_id": "schema", "version": 2}
    catalog.close()


def test_a_commit_whose_connection_is_cut_anywhere_is_done_or_can_be_done_again(mongod: Mongod) -> None:
    chance = random.Random(3)
    with CuttingProxy(mongod.port) as proxy:
        catalog = MongoCatalog(mongod.database_url().replace(str(mongod.port), str(proxy.port)))
        blobs = [a_blob(b"x"), a_blob(b"y")]
        catalog.put_blobs(blobs)
        done = 0
        for number in range(60):
            proxy.cut_after(chance.randrange(3000))
            with contextlib.suppress(CatalogUnavailableError):
                catalog.commit(a_record(number=number), tags=["moving"], move_tags=True, needs=[id for id, _ in blobs])
                done += 1
            proxy.cut_after(None)
            catalog.commit(a_record(number=number), needs=[blobs[0][0]])
            catalog.set_derived(a_record(number=number).id, "table", blobs[0][0], needs=[blobs[0][0]])
        assert done > 30
        assert [record.files for record in catalog.snapshots("mask")] == list(range(60))
        catalog.close()


@pytest.fixture
def catalog(mongod: Mongod) -> Iterator[MongoCatalog]:
    catalog = MongoCatalog(mongod.database_url())
    yield catalog
    catalog.close()


def left_by_a_killed_commit(catalog: MongoCatalog, record: SnapshotRecord, *, old_s: float) -> None:
    """A record as a commit writes it before its dataset lists it."""
    with catalog._database.errors():
        catalog._database.collection("snapshots").insert_one(
            {
                "dataset": record.dataset,
                "id": record.id,
                "created_at": record.created_at,
                "record": encode_record(record),
                "at_s": time.time() - old_s,
            }
        )


def test_what_killed_commits_left_goes_when_it_is_old_and_until_then_keeps_its_blobs(catalog: MongoCatalog) -> None:
    record = a_snapshot(catalog, "mask", range(300), label=b"face")
    needed = blobs_needed(catalog, record)
    catalog.remove_snapshot("mask", record.id)
    left_by_a_killed_commit(catalog, record, old_s=0)
    assert collect(catalog, later_s=0.5 * HOUR_S, grace_s=0).blobs == 0
    assert set(catalog.get_blobs(needed)) == needed
    said = collect(catalog, grace_s=0, dry_run=True)
    done = collect(catalog, grace_s=0)
    assert said == done
    assert done.documents == 1
    assert done.blobs == len(needed)
    assert catalog._database.collection("snapshots").count_documents({}) == 0


def test_a_record_left_by_a_killed_commit_that_cannot_be_read_ends_no_collection(catalog: MongoCatalog) -> None:
    left_by_a_killed_commit(catalog, a_record(), old_s=0)
    catalog.put_blobs([a_blob(b"nobody's")])
    assert collect(catalog, later_s=10, grace_s=0).blobs == 1


def test_the_doom_of_a_collection_that_was_killed_means_nothing(catalog: MongoCatalog) -> None:
    kept, doomed = a_snapshot(catalog, "mask", range(300)), a_blob(b"doomed")
    catalog.put_blobs([doomed])
    blobs = catalog._database.collection("blobs")
    blobs.update_many({}, {"$set": {"doomed": ObjectId()}})
    collect(catalog, later_s=0)
    read_all(catalog, kept)
    catalog.put_blobs([doomed])
    assert "doomed" not in (blobs.find_one({"_id": doomed[0]}) or {})
    catalog.commit(kept, needs=blobs_needed(catalog, kept))
    assert blobs.count_documents({"doomed": {"$exists": True}}) == 0
    collect(catalog)
    read_all(catalog, kept)


def test_a_blob_of_version_1_is_kept_for_the_grace_period_from_the_first_collection_on(
    catalog: MongoCatalog,
) -> None:
    blob = a_blob(b"old")
    catalog.datasets()
    catalog._database.collection("blobs").insert_one({"_id": blob[0], "data": blob[1]})
    assert collect(catalog, dry_run=True).blobs == 0
    assert collect(catalog, later_s=0).young == 1
    assert collect(catalog, later_s=3 * HOUR_S).blobs == 1


def test_ages_go_by_the_servers_clock(catalog: MongoCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose clock is days behind puts blobs that are as young as any."""
    clock = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: clock() - 7 * 86400)
        catalog.put_blobs([a_blob(b"x")])
    assert collect(catalog, later_s=0, grace_s=HOUR_S).young == 1


class CuttingProxy:
    """Passes bytes to a port of this machine, and cuts all connections after so many of them."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._left: int | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, size_bytes: int | None) -> None:
        """Once; None for never."""
        with self._lock:
            self._left = size_bytes

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._listening.close()
        self._cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _address = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                with self._lock:
                    self._open |= {client, server}
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                with self._lock:
                    cut = self._left is not None and self._left < len(data)
                    if self._left is not None:
                        self._left = None if cut else self._left - len(data)
                if cut:
                    self._cut()
                    return
                target.sendall(data)
        for end in (source, target):
            end.close()

    def _cut(self) -> None:
        with self._lock:
            ends, self._open = self._open, set()
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_an_older_client_reads_a_record_with_fields_it_does_not_know(mongod: Mongod) -> None:
    url = mongod.database_url()
    catalog = MongoCatalog(url)
    catalog.commit(a_record())
    with pymongo.MongoClient[dict[str, str]](url) as client:
        snapshots = client.get_default_database()["snapshots"]
        document = snapshots.find_one()
        assert document is not None
        text = document["record"].replace("{", '{"from_the_future":[1],', 1)
        snapshots.update_one({}, {"$set": {"record": text}})
    assert catalog.snapshots("mask") == [a_record()]
    catalog.close()
