"""Documents: older catalogs, cut connections, garbage collection, a shared catalog that is away. What both backends
promise is in the conformance suite."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from pathlib import Path

from datacache.catalog.blobcache import BlobCache
from datacache.catalog.mongo.catalog import MongoCatalog
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.errors import CatalogUnavailableError
from tests.catalog.test_mongo import CuttingProxy
from tests.catalog.test_sqlite import in_read_only
from tests.conformance.catalog import a_record, run_together
from tests.conformance.collect import collect
from tests.promises import promise
from tests.servers import Mongod


class Shared(SqliteCatalog):
    """A catalog that can be away."""

    away = False

    def document(self, kind: str, key: str) -> str | None:
        if self.away:
            raise CatalogUnavailableError("MongoDB at nowhere does not answer")
        return super().document(kind, key)


def version_3_file(path: Path) -> None:
    """A catalog as the version before documents left it."""
    catalog = SqliteCatalog(path)
    catalog.commit(a_record(), tags=["v1"])
    catalog.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("DROP TABLE documents; PRAGMA user_version=3;")


@promise("Garbage collection and removals leave documents and tasks alone")
def test_a_file_of_version_3_gets_documents_by_any_of_many_and_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    version_3_file(path)

    def work(process: int) -> None:
        assert SqliteCatalog(path).set_document("access", f"d{process}", "text", old=None)

    run_together(4, work)
    catalog = SqliteCatalog(path)
    assert [key for key, _text in catalog.documents("access")] == ["d0", "d1", "d2", "d3"]
    assert catalog.snapshots("mask") == [a_record()]
    catalog.close()


def test_a_file_of_version_3_that_cannot_be_written_is_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "catalog.db"
    path.parent.mkdir()
    version_3_file(path)
    script = f"""
from pathlib import Path
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.errors import CatalogError
from tests.conformance.catalog import a_record
catalog = SqliteCatalog(Path({str(path)!r}))
assert catalog.snapshots("mask") == [a_record()]
assert catalog.document("access", "mask") is None
assert catalog.documents("access") == []
try:
    catalog.set_document("access", "mask", "text", old=None)
except CatalogError as exc:
    print(exc)
"""
    assert "cannot be written" in in_read_only(path.parent, script)


@promise("Garbage collection and removals leave documents and tasks alone")
def test_garbage_collection_and_removed_snapshots_leave_documents(tmp_path: Path) -> None:
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    catalog.commit(a_record())
    catalog.set_document("access", "mask", "text", old=None)
    catalog.remove_snapshot("mask", a_record().id)
    collect(catalog)
    assert catalog.document("access", "mask") == "text"
    catalog.close()


@promise("Acknowledged documents survive a killed writer and a broken connection")
def test_a_document_whose_connection_is_cut_anywhere_is_set_once_and_its_writer_knows(mongod: Mongod) -> None:
    chance = random.Random(3)
    with CuttingProxy(mongod.port) as proxy:
        catalog = MongoCatalog(mongod.database_url().replace(str(mongod.port), str(proxy.port)))
        old: str | None = None
        told = 0
        for number in range(60):
            proxy.cut_after(chance.randrange(800))
            try:
                assert catalog.set_document("access", "mask", str(number), old=old)
                told += 1
            except CatalogUnavailableError:
                proxy.cut_after(None)
                there = catalog.document("access", "mask")
                assert there in (old, str(number))
                old = there
                continue
            old = str(number)
            if number % 7 == 6:
                proxy.cut_after(chance.randrange(800))
                with contextlib.suppress(CatalogUnavailableError):
                    assert catalog.remove_document("access", "mask")
                proxy.cut_after(None)
                catalog.remove_document("access", "mask")
                old = None
        proxy.cut_after(None)
        assert told > 30
        assert catalog.document("access", "mask") == old
        catalog.close()


def test_while_the_shared_catalog_is_away_a_document_is_what_it_was_last(tmp_path: Path) -> None:
    shared = Shared(tmp_path / "shared.db")
    cached = BlobCache(shared, tmp_path / "cache.db")
    cached.set_document("access", "mask", "one", old=None)
    assert cached.document("access", "mask") == "one"
    shared.away = True
    assert cached.document("access", "mask") == "one"
    shared.away = False
    shared.set_document("access", "mask", "two", old="one")
    assert not cached.set_document("access", "mask", "three", old="one")
    assert cached.document("access", "mask") == "two"
    cached.close()
