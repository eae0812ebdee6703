"""The SQLite backend: the conformance suite, and what can happen to a file."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from datacache.catalog import leases
from datacache.catalog.record import encode_record
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.errors import CatalogError, CatalogUnavailableError, TagExistsError
from datacache.manifest.model import BlobId
from tests import leftovers
from tests.conformance.catalog import CatalogConformance, a_blob, a_record, run_together
from tests.promises import promise


class TestSqliteCatalog(CatalogConformance):
    @pytest.fixture
    def catalog_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/home/catalog.db"


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqliteCatalog]:
    catalog = SqliteCatalog(tmp_path / "new" / "folder" / "catalog.db")
    yield catalog
    catalog.close()


def test_the_file_is_its_owners_only(catalog: SqliteCatalog) -> None:
    old = os.umask(0)
    try:
        catalog.commit(a_record())
    finally:
        os.umask(old)
    files = list(catalog.path.parent.iterdir())
    assert catalog.path in files
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert catalog.path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")
def test_what_root_makes_in_anothers_folder_is_that_users(tmp_path: Path) -> None:
    def as_nobody(path: Path) -> subprocess.CompletedProcess[str]:
        code = (
            "import os, sys\n"
            "from pathlib import Path\n"
            "from datacache.catalog.sqlite.catalog import SqliteCatalog\n"
            "SqliteCatalog(Path(sys.argv[2])).datasets()  # imports all there is to import, which others may not\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "print(SqliteCatalog(Path(sys.argv[1])).datasets())\n"
        )
        command = [sys.executable, "-c", code, path, tmp_path / "other.db"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    leftovers.let_others_through(tmp_path)
    (tmp_path / "home").mkdir()
    os.chown(tmp_path / "home", 65534, 65534)
    SqliteCatalog(tmp_path / "home" / "catalog.db").datasets()
    assert as_nobody(tmp_path / "home" / "catalog.db").stdout == "[]\n"
    os.chown(tmp_path / "home" / "catalog.db", 0, 0)
    said = as_nobody(tmp_path / "home" / "catalog.db").stderr
    assert "it belongs to another user (id 0)" in said


def test_processes_that_create_the_file_together_all_succeed(tmp_path: Path) -> None:
    for round_number in range(5):
        path = tmp_path / f"{round_number}.db"

        def work(process: int, path: Path = path) -> None:
            SqliteCatalog(path).commit(a_record(number=process))

        run_together(6, work)
        assert len(SqliteCatalog(path).snapshots("mask")) == 6


def test_a_fork_closes_the_connections_so_a_child_inherits_no_lock(catalog: SqliteCatalog) -> None:
    catalog.commit(a_record())
    assert open_files(catalog.path)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, str(len(open_files(catalog.path))).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 10) == b"0"
    os.close(reading)
    os.close(writing)
    assert catalog.snapshots("mask") == [a_record()]


def open_files(path: Path) -> list[str]:
    return [
        link
        for link in (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_there(fd))
        if link.startswith(str(path))
    ]


def fd_is_there(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize("content", [b"not a database, but long enough to be taken for one" * 20, b"x"])
def test_a_file_that_is_no_database_is_named_with_the_way_out(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "catalog.db"
    path.write_bytes(content)
    with pytest.raises(CatalogUnavailableError, match="no catalog") as caught:
        SqliteCatalog(path).datasets()
    assert str(path) in caught.value.message
    assert f"mv {path}" in caught.value.hint
    assert path.read_bytes() == content


def test_a_damaged_file_is_named_with_the_way_out(catalog: SqliteCatalog) -> None:
    catalog.put_blobs([a_blob(os.urandom(10_000)) for _number in range(100)])
    catalog.commit(a_record())
    catalog.close()
    with catalog.path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(20 * 4096))
    with pytest.raises(CatalogUnavailableError, match="damaged") as caught:
        catalog.datasets()
    assert str(catalog.path) in caught.value.hint


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(CatalogUnavailableError, match="another program"):
        SqliteCatalog(path).commit(a_record())
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused(catalog: SqliteCatalog) -> None:
    catalog.commit(a_record())
    catalog.close()
    with sqlite3.connect(catalog.path) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(CatalogError, match="newer datacache"):
        catalog.datasets()


def version_1_file(path: Path) -> dict[BlobId, bytes]:
    """A catalog as version 1 made them, with a snapshot, a tag and these blobs."""
    blobs = dict(a_blob(os.urandom(size)) for size in (10, 1000, 100_000))
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript("""
            CREATE TABLE datasets (name TEXT PRIMARY KEY, latest TEXT NOT NULL) WITHOUT ROWID;
            CREATE TABLE snapshots (seq INTEGER PRIMARY KEY AUTOINCREMENT, dataset TEXT NOT NULL, id TEXT NOT NULL,
                record TEXT NOT NULL, UNIQUE (dataset, id));
            CREATE TABLE tags (dataset TEXT NOT NULL, tag TEXT NOT NULL, id TEXT NOT NULL,
                PRIMARY KEY (dataset, tag)) WITHOUT ROWID;
            CREATE TABLE blobs (id BLOB PRIMARY KEY, data BLOB NOT NULL);
            PRAGMA application_id=0x64636174;
            PRAGMA user_version=1;
        """)
        record = a_record()
        connection.execute("INSERT INTO datasets VALUES ('mask', ?)", (record.id,))
        connection.execute(
            "INSERT INTO snapshots (dataset, id, record) VALUES ('mask', ?, ?)", (record.id, encode_record(record))
        )
        connection.execute("INSERT INTO tags VALUES ('mask', 'v1', ?)", (record.id,))
        connection.executemany("INSERT INTO blobs VALUES (?, ?)", blobs.items())
    connection.close()
    return blobs


@promise("A catalog of an older version is brought up to date and keeps everything")
def test_a_file_of_version_1_is_brought_up_to_date_by_any_of_many_and_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    blobs = version_1_file(path)

    def work(process: int) -> None:
        catalog = SqliteCatalog(path)
        assert catalog.get_blobs(blobs) == blobs
        catalog.set_derived(a_record().id, f"table {process}", next(iter(blobs)), needs=blobs)
        catalog.commit(a_record(number=10 + process), needs=blobs)

    run_together(4, work)
    catalog = SqliteCatalog(path)
    assert catalog.get_blobs(blobs) == blobs
    dataset = catalog.dataset("mask")
    assert dataset is not None
    assert dataset.tags == {"v1": a_record().id}
    assert catalog.snapshot("mask", a_record().id) == a_record()
    assert len(catalog.snapshots("mask")) == 5
    assert all(catalog.derived(a_record().id, f"table {process}") for process in range(4))
    assert catalog.identity() == SqliteCatalog(path).identity()
    with catalog._file.use() as connection:
        sizes = dict(connection.execute("SELECT id, size_bytes FROM puts"))
    assert sizes == {id: len(data) for id, data in blobs.items()}


def test_a_file_of_version_1_that_cannot_be_written_is_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "catalog.db"
    path.parent.mkdir()
    blobs = version_1_file(path)
    script = f"""
from pathlib import Path
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.errors import CatalogError
from tests.conformance.catalog import a_record
catalog = SqliteCatalog(Path({str(path)!r}))
assert catalog.snapshots("mask") == [a_record()]
assert len(catalog.get_blobs({list(blobs)!r})) == 3
assert catalog.derived(a_record().id, "table") is None
for write in (catalog.identity, lambda: catalog.commit(a_record(number=2)), lambda: catalog.put_blobs([(b"1", b"")])):
    try:
        write()
    except CatalogError as exc:
        print(exc)
"""
    assert in_read_only(path.parent, script).count("cannot be written") == 3


def test_a_folder_in_the_files_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogUnavailableError, match="no file"):
        SqliteCatalog(tmp_path).datasets()


def test_a_place_where_nothing_can_be_made_is_refused() -> None:
    with pytest.raises(CatalogUnavailableError, match="cannot be created"):
        SqliteCatalog(Path("/proc/nowhere/catalog.db")).datasets()


def test_a_full_disk_is_said_clearly_and_changes_nothing(catalog: SqliteCatalog) -> None:
    catalog.commit(a_record(number=1))
    with catalog._file.use() as connection:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(CatalogError, match="no space left"):
        catalog.put_blobs([a_blob(os.urandom(100_000))])
    assert catalog.snapshots("mask") == [a_record(number=1)]
    catalog.commit(a_record(number=2))


def test_a_read_only_file_system_can_be_read_and_says_why_not_written(catalog: SqliteCatalog) -> None:
    catalog.commit(a_record())
    catalog.close()
    script = f"""
from pathlib import Path
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.errors import CatalogError
from tests.conformance.catalog import a_record
catalog = SqliteCatalog(Path({str(catalog.path)!r}))
assert catalog.snapshots("mask") == [a_record()]
try:
    catalog.commit(a_record(number=2))
except CatalogError as exc:
    print(exc)
"""
    assert "cannot be written" in in_read_only(catalog.path.parent, script)


def in_read_only(folder: Path, script: str) -> str:
    """Return what a program prints that sees `folder` on a read-only file system."""
    mount = f"mount --bind '{folder}' '{folder}' && mount -o remount,ro,bind '{folder}' && exec \"$@\""
    result = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        check=False,
    )
    if "unshare" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"no mount namespace here: {result.stderr}")
    assert result.stderr == ""
    return result.stdout


def test_a_removed_file_is_made_anew_and_not_written_into_the_void(catalog: SqliteCatalog) -> None:
    catalog.commit(a_record(number=1))
    for file in catalog.path.parent.iterdir():
        file.unlink()
    catalog.commit(a_record(number=2))
    assert SqliteCatalog(catalog.path).snapshots("mask") == [a_record(number=2)]


def test_a_removal_is_noted_with_it_and_only_where_something_is_removed(
    catalog: SqliteCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = catalog.commit(a_record(), tags=["v1", "v2"])
    catalog.now_s()  # the clock's own document
    writing, writes = catalog.writing, list[bool]()

    def spied(*, durable: bool) -> AbstractContextManager[sqlite3.Connection]:
        writes.append(durable)
        return writing(durable=durable)

    monkeypatch.setattr(catalog, "writing", spied)
    with pytest.raises(TagExistsError):
        catalog.remove_snapshot(record.dataset, record.id, only_tags=["v1"])
    assert not catalog.remove_snapshot(record.dataset, "f" * 64)
    assert not catalog.remove_snapshot("no such dataset", record.id)
    assert catalog.documents(leases.REMOVED) == []
    writes.clear()
    assert catalog.remove_snapshot(record.dataset, record.id)
    assert [id for id, _text in catalog.documents(leases.REMOVED)] == [record.id]
    assert writes == [True]


def test_a_reader_sees_the_state_before_a_write_that_is_not_done(catalog: SqliteCatalog) -> None:
    catalog.commit(a_record(number=1))
    with catalog._file.write(durable=True) as connection:
        connection.execute("DELETE FROM snapshots")
        assert catalog.snapshots("mask") == [a_record(number=1)]
        connection.execute("INSERT INTO snapshots (dataset, id, record) SELECT 'x', 'x', 'x'")
        connection.execute("DELETE FROM snapshots")
