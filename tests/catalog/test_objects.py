"""Content-addressed storage: one object for one content, whoever writes it and however often."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from datacache.api import open_catalog
from datacache.catalog.base import Catalog
from datacache.catalog.objects import ObjectWriter, parse_object_key
from datacache.catalog.packs import content_etag
from datacache.core.errors import SettingsError, UsageError
from datacache.core.ids import ObjectRef
from datacache.settings import Settings, load_settings
from datacache.store.base import ObjectInfo
from datacache.store.open import open_store
from datacache.store.urls import split_url
from tests.conformance.faults import FaultProxy
from tests.promises import promise
from tests.store.conftest import WritableRclone


@pytest.fixture
def catalog(settings: Settings) -> Iterator[Catalog]:
    with closing(open_catalog(settings)) as catalog:
        yield catalog


def listed(place: str, settings: Settings) -> list[ObjectInfo]:
    store_url, prefix = split_url(place)
    with closing(open_store(store_url, settings)) as store:
        return [info for page in store.list(prefix) for info in page]


def contents(place: str, settings: Settings) -> dict[str, bytes]:
    store_url, _ = split_url(place)
    with closing(open_store(store_url, settings)) as store:
        return {
            info.key: bytes(store.read(ObjectRef(store_url, info.key, info.size_bytes), 0, info.size_bytes))
            for info in listed(place, settings)
        }


def test_an_object_lies_under_the_catalogs_name_and_its_hash(place: str, catalog: Catalog, settings: Settings) -> None:
    with closing(ObjectWriter(catalog, settings, url=place)) as writer:
        stored = writer.put(b"some bytes")
        empty = writer.put(b"")
    hex = content_etag(b"some bytes")
    assert stored == (f"{split_url(place)[1]}{catalog.identity()}/{hex[:2]}/{hex[2:]}-10", hex, 10)
    assert writer.source == (split_url(place)[0], f"{split_url(place)[1]}{catalog.identity()}/", True)
    assert parse_object_key(stored.key) == (hex, 10)
    assert contents(place, settings) == {stored.key: b"some bytes", empty.key: b""}


@promise("The same content is stored once, however many store it at a time")
def test_the_same_content_is_one_object_however_many_write_it_at_once(
    place: str, catalog: Catalog, settings: Settings
) -> None:
    with closing(ObjectWriter(catalog, settings, url=place)) as writer, ThreadPoolExecutor(8) as pool:
        stored = set(pool.map(lambda n: writer.put(b"%d" % (n % 3) * 100_000), range(48)))
    assert len(stored) == 3
    assert sorted(contents(place, settings).values()) == [b"%d" % n * 100_000 for n in range(3)]


def _store_many(writer: ObjectWriter) -> None:
    for number in range(20):
        writer.put(b"%d" % number * 1000)
    os._exit(0)


def test_processes_write_the_same_objects_at_once_forked_with_a_writer_in_use(
    place: str, catalog: Catalog, settings: Settings
) -> None:
    with closing(ObjectWriter(catalog, settings, url=place)) as writer:
        writer.put(b"0" * 1000)
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=_store_many, args=(writer,)) for _ in range(3)]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    # By key: after several PUTs of one key at once rclone's server may list that key twice, with one file on its disk.
    assert sorted(contents(place, settings).values()) == sorted(b"%d" % number * 1000 for number in range(20))


def test_a_pickled_writer_writes_to_the_same_place(place: str, catalog: Catalog, settings: Settings) -> None:
    with (
        closing(ObjectWriter(catalog, settings, url=place)) as writer,
        closing(pickle.loads(pickle.dumps(writer))) as other,
    ):
        assert other.put(b"x") == writer.put(b"x")
        assert other.source == writer.source
    assert len(listed(place, settings)) == 1


def test_what_is_there_is_not_sent_again(
    catalog_rclone: WritableRclone, catalog: Catalog, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = f"objects-{uuid.uuid4().hex[:12]}"
    catalog_rclone.make_bucket(bucket)
    with FaultProxy(catalog_rclone.endpoint) as proxy:
        for name, value in (catalog_rclone.env() | {"AWS_ENDPOINT_URL": proxy.url}).items():
            monkeypatch.setenv(name, value)
        for _ in range(2):
            with closing(ObjectWriter(catalog, settings, url=f"s3://{bucket}")) as writer:
                for data in (b"one", b"two", b"one"):
                    writer.put(data)
        requests = [request for request in proxy.requests if "/clock-" not in request]
        assert sum(request.startswith("PUT ") for request in requests) == 2
        assert sum(request.startswith("HEAD ") for request in requests) == 4


def test_an_old_object_is_written_again_so_that_its_age_does_not_end_it(
    tmp_path: Path, catalog: Catalog, settings: Settings
) -> None:
    place = f"file://{tmp_path}"
    with closing(ObjectWriter(catalog, settings, url=place)) as writer:
        path = Path("/", writer.put(b"old").key)
    long_ago = time.time() - 2 * 3600
    os.utime(path, (long_ago, long_ago))
    with closing(ObjectWriter(catalog, settings, url=place)) as writer:
        writer.put(b"old")
    assert time.time() - path.stat().st_mtime < 600
    assert path.read_bytes() == b"old"


def test_an_object_that_was_cut_short_is_written_again(tmp_path: Path, catalog: Catalog, settings: Settings) -> None:
    place = f"file://{tmp_path}"
    with closing(ObjectWriter(catalog, settings, url=place)) as writer:
        path = Path("/", writer.put(b"whole").key)
    path.write_bytes(b"who")
    with closing(ObjectWriter(catalog, settings, url=place)) as writer:
        assert not writer.has(str(path)[1:].encode(), 5)
        writer.put(b"whole")
        assert writer.has(str(path)[1:].encode(), 5)
    assert path.read_bytes() == b"whole"


_WRITE_FOR_EVER = """
import os, sys
from datacache.api import open_catalog
from datacache.catalog.objects import ObjectWriter
from datacache.settings import load_settings
settings = load_settings()
writer = ObjectWriter(open_catalog(settings), settings, url=sys.argv[1])
while True:
    writer.put(os.urandom(3_000_000))
    print("one", flush=True)
"""


@promise("An interrupted copy leaves nothing visible and only whole objects")
def test_a_writer_that_is_killed_leaves_only_whole_objects(place: str, catalog: Catalog, settings: Settings) -> None:
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITE_FOR_EVER, place], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()  # in the middle of the third
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    found = contents(place, settings)
    assert len(found) >= 6
    assert all(parse_object_key(key) == (content_etag(data), 3_000_000) for key, data in found.items())


def test_two_catalogs_share_no_object(tmp_path: Path, catalog: Catalog, settings: Settings) -> None:
    from datacache.catalog.sqlite.catalog import SqliteCatalog

    place = f"file://{tmp_path}/place"
    with closing(SqliteCatalog(tmp_path / "other.db")) as other:
        assert ObjectWriter(catalog, settings, url=place).put(b"x") != ObjectWriter(other, settings, url=place).put(
            b"x"
        )
    assert len(listed(place, settings)) == 2


def test_a_larger_object_than_memory_should_hold_is_refused(
    catalog: Catalog, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datacache.catalog.objects.MAX_OBJECT_BYTES", 10)
    with pytest.raises(UsageError, match="11 bytes"):
        ObjectWriter(catalog, settings).put(b"x" * 11)


def test_with_a_catalog_of_ones_own_objects_lie_in_the_home(catalog: Catalog, settings: Settings) -> None:
    assert settings.objects == f"file://{settings.home}/objects"
    stored = ObjectWriter(catalog, settings).put(b"x")
    assert Path("/", stored.key).read_bytes() == b"x"
    assert stored.key.startswith(f"{settings.home}/objects/"[1:])


def test_with_a_shared_catalog_the_place_must_be_set(tmp_path: Path, catalog: Catalog) -> None:
    environ = {"DATACACHE_HOME": str(tmp_path), "DATACACHE_CATALOG": "mongodb://nowhere/datacache"}
    with pytest.raises(SettingsError) as caught:
        ObjectWriter(catalog, load_settings(environ))
    assert "DATACACHE_OBJECTS" in caught.value.hint
    set_to = load_settings(environ | {"DATACACHE_OBJECTS": "s3://bucket/objects"})
    ObjectWriter(catalog, set_to)
    assert load_settings(set_to.environment()).objects == "s3://bucket/objects"


def test_a_place_with_credentials_in_it_is_refused_without_repeating_them(tmp_path: Path, catalog: Catalog) -> None:
    for variables in ({"DATACACHE_OBJECTS": "s3://key:hush@bucket/x"}, {}):
        settings = load_settings({"DATACACHE_HOME": str(tmp_path)} | variables)
        with pytest.raises((SettingsError, UsageError)) as caught:
            ObjectWriter(catalog, settings, url="" if variables else "s3://key:hush@bucket/x")
        assert "hush" not in str(caught.value) + caught.value.hint
