"""The MongoDB backend against the real server: the conformance suite, passwords, outages, crashes of the
server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pymongo
import pytest

from datacache.catalog.mongo import MongoCatalog
from datacache.core.errors import CatalogError, CatalogUnavailableError, SettingsError
from datacache.testing.catalog import CatalogConformance, a_blob, a_record
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
