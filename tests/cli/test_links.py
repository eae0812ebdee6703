"""Links of a folder in its snapshot: inside of it they are links, and nothing leads out, whenever a link appears."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

import fuse_mount
from datacache import api, open_snapshot
from datacache.catalog.commit import commit_manifest
from datacache.core import paths as beneath
from datacache.core.errors import StoreAccessError, StoreError
from datacache.core.ids import ObjectRef
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import Entry, Lineage, Naming, Source
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.store.local.store import LocalStore
from tests.cli.conftest import Dsctl
from tests.promises import promise


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is none of the data set's."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "shadow").write_bytes(b"root:secret")
    return folder


@pytest.fixture
def folder(tmp_path: Path, outside: Path) -> Path:
    """A data set with links of every kind."""
    folder = tmp_path / "set"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "1.jpg").write_bytes(b"one")
    (folder / "images" / "again.jpg").symlink_to("1.jpg")
    (folder / "images" / "absolute.jpg").symlink_to(folder / "images" / "1.jpg")
    (folder / "latest").symlink_to("images")
    (folder / "innocent.txt").symlink_to(outside / "shadow")
    (folder / "etc").symlink_to(outside)
    (folder / "up").symlink_to(f"../../{outside.name}/shadow")
    return folder


@promise("A link that leads out is left out with a line, or followed with `--follow-links`")
def test_what_leads_out_is_left_out_with_a_line_or_followed(folder: Path, settings: Settings, dsctl: Dsctl) -> None:
    made = dsctl("snapshot", "create", "mask", "--from", folder, "--json")
    assert made.code == 0, made.err
    (warning,) = made.json["warnings"]
    assert warning.startswith("3 links lead out of the folder and were left out (--follow-links)")
    assert "innocent.txt" in warning
    assert (made.json["links_left_out"], made.json["entries_passed_over"]) == (3, 0)
    with open_snapshot("mask", settings) as snapshot:
        assert snapshot.paths() == ["images/1.jpg", "images/absolute.jpg", "images/again.jpg", "latest"]
        found = {path: snapshot.stat(path).target for path in snapshot.paths()}
        links = {"images/absolute.jpg": "1.jpg", "images/again.jpg": "1.jpg", "latest": "images"}
        assert found == {"images/1.jpg": ""} | links
        assert snapshot.read("images/again.jpg") == snapshot.read("images/absolute.jpg") == b"one"
        assert snapshot.read("latest") == b""
    assert dsctl("snapshot", "verify", "mask", "--read").code == 0
    followed = dsctl("snapshot", "create", "mask", "--from", folder, "--follow-links", "--json")
    assert followed.json["warnings"] == []
    with open_snapshot("mask", settings) as snapshot:
        assert snapshot.read("innocent.txt") == snapshot.read("etc/shadow") == b"root:secret"
    assert dsctl("snapshot", "verify", "mask", "--read").code == 0
    pinned = dsctl("snapshot", "create", "mask", "--from", folder, "--copy", "--json")
    assert pinned.code == 0, pinned.err
    with open_snapshot("mask", settings) as snapshot:
        assert snapshot.stat("images/again.jpg").target == "1.jpg"
        assert snapshot.read("images/again.jpg") == b"one"


@promise("A link that leads out is left out with a line, or followed with `--follow-links`")
def test_what_is_no_file_is_left_out_by_name(folder: Path, dsctl: Dsctl) -> None:
    for name in ("innocent.txt", "etc"):
        (folder / name).unlink()
    (folder / "images" / "lost.jpg").symlink_to("nowhere")
    made = dsctl("snapshot", "create", "mask", "--from", folder, "--json")
    assert made.code == 0, made.err
    out, nowhere = made.json["warnings"]
    assert out.startswith("1 link leads out of the folder and was left out (--follow-links)")
    at = str(folder / "images" / "lost.jpg")
    assert nowhere == f"1 entry is no file or folder, or points nowhere, and left out: {at!r}"
    assert (made.json["links_left_out"], made.json["entries_passed_over"]) == (1, 1)
    os.mkfifo(folder / "pipe")
    again = dsctl("snapshot", "create", "mask", "--from", folder, "--copy", "--json")
    assert again.json["warnings"][1].startswith("2 entries are no files or folders, or point nowhere, and left out: ")
    assert str(folder / "pipe") in again.json["warnings"][1]


@promise("Reading a snapshot of a folder never leads out of it")
@pytest.mark.parametrize("way", ["file", "folder"])
@pytest.mark.parametrize("kernel", ["openat2", "by steps"])
def test_a_link_that_takes_a_files_place_later_does_not_lead_out(
    way: str, kernel: str, tmp_path: Path, outside: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beneath, "_is_known", lambda: kernel == "openat2")
    folder = tmp_path / "set"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "shadow").write_bytes(b"root:secreT")
    api.create_snapshot("mask", str(folder), settings=settings)
    with open_snapshot("mask", settings) as snapshot:
        ref = snapshot.object_ref("sub/shadow")
        assert LocalStore().read(ref, 0, 11) == b"root:secreT"
        (folder / "sub" / "shadow").unlink()
        if way == "file":
            (folder / "sub" / "shadow").symlink_to(outside / "shadow")
        else:
            (folder / "sub").rmdir()
            (folder / "sub").symlink_to(outside)
        # As an attacker could have it: the file outside is by number, time and size the one that was listed.
        there = os.stat(outside / "shadow")
        etag = f"{there.st_ino:x}-{there.st_mtime_ns:x}-{there.st_size:x}"
        assert LocalStore().read(ObjectRef(ref.store, ref.key, 11, etag), 0, 11) == b"root:secret"
        for root in (ref.root, 0):
            with pytest.raises(StoreAccessError, match="leads out"):
                LocalStore().read(ref._replace(etag=etag, root=root), 0, 11)
        with pytest.raises(StoreError):
            snapshot.read("sub/shadow")


@promise("Reading a snapshot of a folder never leads out of it")
def test_the_daemon_does_not_follow_it_either(tmp_path: Path, outside: Path, settings: Settings) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "innocent").symlink_to(outside / "shadow")
    there = os.stat(outside / "shadow")
    etag = f"{there.st_ino:x}-{there.st_mtime_ns:x}-{there.st_size:x}"
    entry = Entry(b"innocent", there.st_size, there.st_mtime_ns, etag)
    with closing(api.open_catalog(settings)) as catalog:
        builder = ManifestBuilder([Source("file://", f"{str(folder)[1:]}/")], catalog.put_blobs)
        builder.add(entry)
        commit_manifest(catalog, builder, Naming(name="mask"), origin="", lineage=Lineage("create", {}))
    with open_snapshot("mask", settings) as snapshot, pytest.raises(StoreAccessError, match="leads out"):
        snapshot.read("innocent")


@promise("Older snapshots that followed links inside stay readable")
def test_an_older_snapshot_that_followed_links_inside_reads_on(tmp_path: Path, settings: Settings) -> None:
    real = tmp_path / "real"
    (real / "a").mkdir(parents=True)
    (real / "a" / "x").write_bytes(b"12345")
    (real / "b").symlink_to("a")
    (tmp_path / "by-link").symlink_to(real)
    there = os.stat(real / "a" / "x")
    etag = f"{there.st_ino:x}-{there.st_mtime_ns:x}-{there.st_size:x}"
    prefix = f"{str(tmp_path / 'by-link')[1:]}/"
    manifest = Manifest.open(*_manifest(prefix, Entry(b"b/x", 5, there.st_mtime_ns, etag)))
    ref = manifest.object_ref(manifest.entry(0))
    assert ref.root == len(prefix)
    assert LocalStore().read(ref, 0, 5) == b"12345"


def _manifest(prefix: str, entry: Entry):  # type: ignore[no-untyped-def]
    blobs: dict = {}  # type: ignore[type-arg]
    builder = ManifestBuilder([Source("file://", prefix)], blobs.update)
    builder.add(entry)
    return builder.finish()[0], lambda ids: {id: blobs[id] for id in ids}


@promise("A link that stays inside of the folder is a link in snapshots, mounts and exports")
def test_a_mount_shows_links(folder: Path, settings: Settings, tmp_path: Path) -> None:
    api.create_snapshot("mask", str(folder), settings=settings)
    point = tmp_path / "mnt"
    point.mkdir()
    fuse_mount.mount_snapshot("mask", point, settings=settings)
    try:
        assert os.readlink(point / "images" / "again.jpg") == "1.jpg"
        assert os.readlink(point / "images" / "absolute.jpg") == "1.jpg"
        assert (point / "images" / "absolute.jpg").read_bytes() == b"one"
        assert os.readlink(point / "latest") == "images"
        assert (point / "latest" / "1.jpg").read_bytes() == b"one"
        assert sorted(entry.name for entry in os.scandir(point / "images") if entry.is_symlink()) == [
            "absolute.jpg",
            "again.jpg",
        ]
        found = os.lstat(point / "latest")
        assert (stat.S_ISLNK(found.st_mode), found.st_size) == (True, len("images"))
        with pytest.raises(OSError, match="Invalid argument"):
            os.readlink(point / "images" / "1.jpg")
    finally:
        fuse_mount.unmount(point, settings=settings)


@promise("A link that stays inside of the folder is a link in snapshots, mounts and exports")
def test_an_export_has_the_links_and_goes_on_with_them(folder: Path, settings: Settings, tmp_path: Path) -> None:
    api.create_snapshot("mask", str(folder), settings=settings)
    for _ in range(2):
        api.export_snapshot("mask", tmp_path / "out", settings=settings)
        assert os.readlink(tmp_path / "out" / "images" / "again.jpg") == "1.jpg"
        assert os.readlink(tmp_path / "out" / "latest") == "images"
        assert (tmp_path / "out" / "latest" / "absolute.jpg").read_bytes() == b"one"
