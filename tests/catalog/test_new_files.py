"""Files that new snapshots bring: which go into packs, which to the storage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from datacache.catalog.objects import SMALL_BYTES, NewFiles, ObjectWriter
from datacache.catalog.packs import PACK_BYTES, PackStore
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.errors import SettingsError
from datacache.core.ids import ObjectRef
from datacache.manifest.model import PACKS, Entry, Source
from datacache.settings import load_settings


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqliteCatalog]:
    with contextlib.closing(SqliteCatalog(tmp_path / "catalog.db")) as catalog:
        yield catalog


def without_storage() -> ObjectWriter:
    load_settings({"DATACACHE_CATALOG": "mongodb://nowhere/x"}).require_objects()
    raise AssertionError("a shared catalog has no storage of its own")


def test_a_file_that_fills_packs_is_alone_in_one_and_comes_back(catalog: SqliteCatalog) -> None:
    sources: list[Source] = []
    files = NewFiles(sources, catalog.put_blobs, without_storage)
    data = {
        "a": b"a",
        "b": os.urandom(PACK_BYTES + 1),
        "c": b"c",
        "d": os.urandom(SMALL_BYTES),
        "e": b"e",
    }
    entries: list[Entry] = []
    for path, content in data.items():
        entries += files.add(path, content, 0)
    entries += files.end_pack()
    assert [entry.path.decode() for entry in entries] == list(data)
    assert sources == [PACKS]
    assert len(files.packs) == len(data)
    store = PackStore(catalog.get_blobs)
    for entry, content in zip(entries, data.values(), strict=True):
        ref = ObjectRef(PACKS.store, (entry.key or b"").decode(), entry.size_bytes)
        assert store.read(ref, 0, entry.size_bytes) == content


def test_a_file_too_large_for_a_pack_is_named_where_there_is_no_storage(catalog: SqliteCatalog) -> None:
    files = NewFiles([], catalog.put_blobs, without_storage)
    with pytest.raises(SettingsError, match=r"annotations/instances\.json has 8,388,609 bytes") as caught:
        files.add("annotations/instances.json", bytes(SMALL_BYTES + 1), 0)
    assert "DATACACHE_OBJECTS" in caught.value.hint
