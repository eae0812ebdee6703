"""Which stores snapshots may be read from: the setting, each store, the daemon."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from datacache.catalog.objects import ObjectWriter
from datacache.catalog.open import open_catalog_url
from datacache.catalog.packs import stores_with_packs
from datacache.core.errors import ObjectChangedError, SettingsError, SourceNotAllowedError, UsageError
from datacache.core.ids import ObjectRef
from datacache.daemon.client import DaemonClient
from datacache.reader.local_file import LocalFiles
from datacache.settings import Settings, load_settings
from datacache.store.local.store import LocalStore, etag_of
from datacache.store.sources import SourceRules
from tests.promises import promise

Read = Callable[[ObjectRef], bytes]


def ref_of(path: Path) -> ObjectRef:
    """As a listing records it, through whatever links there are."""
    found = path.stat()
    return ObjectRef("file://", str(path)[1:], found.st_size, etag_of(found))


def only(settings: Settings, *sources: str) -> Settings:
    return replace(settings, sources=sources, objects="")


@promise("A node reads data sets only from the stores that `DATACACHE_SOURCES` names")
@pytest.mark.parametrize(
    ("sources", "store", "key", "allowed"),
    [
        (["*"], "s3://lab", "x", True),
        (["*"], "gs://lab", "../x", True),
        (["*"], "file://", "etc/shadow", False),
        (["*"], "FILE://", "etc/shadow", False),
        (["*"], "file://localhost", "etc/shadow", False),
        (["*"], "file:///", "etc/shadow", False),
        (["*"], "/etc", "shadow", False),
        (["*"], "local://", "etc/shadow", False),
        (["*"], "simplecache::file://", "etc/shadow", False),
        (["*"], "http://169.254.169.254", "latest", False),
        (["*"], "memory://x", "y", False),
        (["s3://lab"], "s3://lab", "x", True),
        (["s3://lab"], "s3a://lab", "x", True),
        (["s3://lab"], "s3://labs", "x", False),
        (["s3://lab"], "s3://lab", "../labs/x", False),
        (["s3://lab/a"], "s3://lab", "a/x", True),
        (["s3://lab/a"], "s3://lab", "ab", False),
        (["s3://lab/a"], "s3://lab", "a/./../b", False),
        (["file:///data"], "file://", "data/x", True),
        (["file:///data"], "file://", "database/x", False),
        (["file:///data"], "file://", "data/../etc/shadow", False),
        (["file:///data", "https://host/sets"], "https://host", "sets/a", True),
        (["https://host/sets"], "https://host", "other", False),
    ],
)
def test_an_object_may_be_read_where_a_source_says_so(
    settings: Settings, sources: list[str], store: str, key: str, allowed: bool
) -> None:
    assert SourceRules(only(settings, *sources)).allow(store, key) is allowed


def test_copies_that_the_administrator_has_made_may_be_read(settings: Settings) -> None:
    rules = SourceRules(replace(settings, sources=("*",), objects="file:///srv/objects"))
    assert rules.allow("file://", "srv/objects/ab/cd")
    assert not rules.allow("file://", "srv/other")


@promise("A node reads data sets only from the stores that `DATACACHE_SOURCES` names")
def test_who_reads_for_others_reads_no_file_of_the_machine_unless_told_to(tmp_path: Path) -> None:
    plain = {"DATACACHE_HOME": str(tmp_path)}
    assert load_settings(plain).sources is None
    assert load_settings(plain).for_others().sources == ("*",)
    node = load_settings(plain | {"DATACACHE_DAEMON": "external"})
    assert node.sources == ("*",)
    told = load_settings(plain | {"DATACACHE_DAEMON": "external", "DATACACHE_SOURCES": "s3://lab, file:///data"})
    assert told.sources == told.for_others().sources == ("s3://lab", "file:///data")
    for settings in (node, told):
        assert load_settings(settings.environment()).sources == settings.sources
    (tmp_path / "config.toml").write_text('sources = ["s3://lab/a", "*"]\n')
    assert load_settings(plain).sources == ("s3://lab/a", "*")


@pytest.mark.parametrize("value", ["lab", "/data", "s3:lab", " , "])
def test_a_source_that_is_no_url_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(SettingsError, match="DATACACHE_SOURCES"):
        load_settings({"DATACACHE_HOME": str(tmp_path), "DATACACHE_SOURCES": value})


@pytest.fixture(params=["stores", "daemon", "local file"])
def read(request: pytest.FixtureRequest, settings: Settings, tmp_path: Path) -> Read:
    """Reads an object where only `tmp_path/allowed` may be read from, by each of the ways there are."""
    settings = only(settings, "*", f"file://{tmp_path}/allowed")
    if request.param == "daemon":
        return lambda ref: DaemonClient(settings).block(ref, 0, "mask", "")
    if request.param == "stores":
        return lambda ref: bytes(
            stores_with_packs(settings, lambda _ids: {}).get(ref.store).read(ref, 0, ref.size_bytes)
        )
    files = LocalFiles.__new__(LocalFiles)  # a bare one: the snapshot is not asked here
    LocalFiles.__init__(files, None, settings)  # type: ignore[arg-type]

    def by_descriptor(ref: ObjectRef) -> bytes:
        fd = files._store.open_exact(ref)
        try:
            return os.read(fd, ref.size_bytes)
        finally:
            os.close(fd)

    return by_descriptor


@promise("No link leads out of a folder that `DATACACHE_SOURCES` names")
def test_only_what_lies_in_an_allowed_folder_is_read_and_no_link_leads_out(read: Read, tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    (allowed / "deep").mkdir(parents=True)
    outside.mkdir()
    (allowed / "deep" / "in").write_text("in")
    (outside / "out").write_text("out")
    (allowed / "near").symlink_to("deep/in")
    (allowed / "away").symlink_to(outside / "out")
    (allowed / "folder").symlink_to("../outside")
    assert read(ref_of(allowed / "deep" / "in")) == b"in"
    assert read(ref_of(allowed / "near")) == b"in"
    for path in (outside / "out", allowed / "away", allowed / "folder" / "out"):
        with pytest.raises(SourceNotAllowedError, match="out"):
            read(ref_of(path))
    with pytest.raises(SourceNotAllowedError, match="DATACACHE_SOURCES"):
        read(ObjectRef("file://", "etc/passwd", 10))


@promise("A file that was recorded without an ETag is never read")
def test_a_file_without_an_etag_is_no_file_of_a_snapshot(read: Read, tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "file").write_text("text")
    ref = ref_of(tmp_path / "allowed" / "file")
    assert read(ref) == b"text"
    with pytest.raises(ObjectChangedError, match="without an ETag"):
        read(ref._replace(etag=""))


@promise("A file that was recorded without an ETag is never read")
def test_without_rules_too_a_file_is_known_by_its_etag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    ref = ref_of(tmp_path / "file")
    assert LocalStore().read(ref, 0, 4) == b"text"
    with pytest.raises(ObjectChangedError, match="without an ETag"):
        LocalStore().read(ref._replace(etag=""), 0, 4)


def test_a_copy_under_the_hash_of_its_bytes_needs_none(settings: Settings) -> None:
    writer = ObjectWriter(open_catalog_url(settings.catalog), settings)
    stored = writer.put(b"some bytes")
    assert LocalStore().read(ObjectRef("file://", stored.key, stored.size_bytes), 0, 10) == b"some bytes"
    with pytest.raises(ObjectChangedError, match="without an ETag"):
        LocalStore().read(ObjectRef("file://", stored.key, stored.size_bytes - 1), 0, 9)


def test_stores_that_are_restricted_write_nothing(settings: Settings, tmp_path: Path) -> None:
    store = stores_with_packs(only(settings, "file:///"), lambda _ids: {}).get("file://")
    with pytest.raises(UsageError, match="can only be read"):
        store.put(str(tmp_path / "new")[1:], b"x")
    assert not (tmp_path / "new").exists()
