"""`open_snapshot()` on a real daemon and a real folder: reading, stat, threads, fork, pickle, fsspec."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pickle
import random
import re
import subprocess
import sys

import fsspec
import pytest

from datacache import DatacacheError, create_snapshot, open_snapshot
from datacache.core.errors import (
    ObjectChangedError,
    ObjectNotFoundError,
    PathNotFoundError,
    SnapshotNotFoundError,
    TagExistsError,
    UsageError,
)
from datacache.core.ids import BLOCK_BYTES
from datacache.tiers.memory import memory_dir
from tests.promises import promise

FILES = {
    "a.bin": b"hello",
    "empty": b"",
    "dir/with space/ünï ☃.txt": b"snow",
    "dir/b.bin": bytes(range(256)) * 100,
    "large.bin": random.Random(1).randbytes(2 * BLOCK_BYTES + 12345),
}


@pytest.fixture
def bucket(tmp_path):
    root = tmp_path / "bucket"
    for name, data in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


@pytest.fixture
def snapshot(settings, bucket):
    create_snapshot("mask", str(bucket), tags=["v1"])
    with open_snapshot("mask@v1") as snapshot:
        yield snapshot


def test_every_file_is_read_cold_and_warm(snapshot):
    assert sorted(snapshot.paths()) == sorted(FILES)
    assert len(snapshot) == len(FILES)
    for _ in range(3):
        for path, data in FILES.items():
            assert snapshot.read(path) == data


def test_ranges_are_cut_like_slices(snapshot):
    data = FILES["large.bin"]
    for start, stop in ((0, 10), (BLOCK_BYTES - 5, BLOCK_BYTES + 5), (5, 10**9), (10**9, 10**9 + 1), (7, 7), (9, 3)):
        assert snapshot.read_range("large.bin", start, stop) == data[start:stop]


def test_a_stream_seeks_and_reads(snapshot):
    with snapshot.open("large.bin") as file:
        file.seek(BLOCK_BYTES - 3)
        assert file.read(6) == FILES["large.bin"][BLOCK_BYTES - 3 : BLOCK_BYTES + 3]
        file.seek(-4, os.SEEK_END)
        assert file.read() == FILES["large.bin"][-4:]
        assert file.read() == b""


def test_stat_knows_files_and_folders(snapshot):
    assert snapshot.stat("a.bin").size_bytes == 5
    assert not snapshot.stat("a.bin").is_dir
    assert snapshot.stat("dir").is_dir
    assert snapshot.stat("").is_dir
    assert "a.bin" in snapshot
    with pytest.raises(PathNotFoundError, match="nothing") as caught:
        snapshot.stat("nothing")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(PathNotFoundError):
        snapshot.read("di")
    with pytest.raises(TypeError, match="by its path, not by 3"):
        snapshot[3]


def test_many_threads_read_the_same_bytes(snapshot):
    def work(seed):
        rng = random.Random(seed)
        for _ in range(60):
            path = rng.choice(sorted(FILES))
            size = len(FILES[path])
            start = rng.randrange(size + 1)
            stop = rng.randrange(start, size + 1)
            assert snapshot.read_range(path, start, stop) == FILES[path][start:stop]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))


def test_children_of_a_fork_read_what_the_parent_opened(snapshot):
    snapshot.read("a.bin")
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if all(snapshot.read(path) == data for path, data in FILES.items()) else 1
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert snapshot.read("large.bin") == FILES["large.bin"]


@promise("A reference is resolved once, and a catalog that answers is always asked for tags")
def test_a_pickled_snapshot_is_the_same_bytes_even_when_the_tag_has_moved(snapshot, bucket):
    frozen = pickle.dumps(snapshot)
    (bucket / "new").write_bytes(b"new")
    create_snapshot("mask", str(bucket), tags=["v1"], move_tags=True)
    with pickle.loads(frozen) as again:
        assert again.ref == snapshot.ref
        assert "new" not in again.paths()
    with open_snapshot("mask@v1") as moved:
        assert "new" in moved.paths()


@promise("The same objects give the same id")
def test_an_unchanged_folder_gives_the_same_id_and_a_changed_one_another(settings, bucket):
    first = create_snapshot("mask", str(bucket))
    assert create_snapshot("mask", str(bucket)).id == first.id
    (bucket / "a.bin").write_bytes(b"other")
    second = create_snapshot("mask", str(bucket))
    assert second.id != first.id
    assert second.parent == first.id


@promise("A snapshot's bytes never change")
def test_a_changed_object_is_an_error_that_names_it_never_other_bytes(settings, bucket):
    create_snapshot("mask", str(bucket), tags=["v1"])
    (bucket / "a.bin").write_bytes(b"HELLO")
    (bucket / "dir/b.bin").unlink()
    with open_snapshot("mask@v1") as snapshot:
        with pytest.raises(ObjectChangedError, match=r"a\.bin"):
            snapshot.read("a.bin")
        with pytest.raises(ObjectNotFoundError, match=r"b\.bin"):
            snapshot.read("dir/b.bin")


@promise("Cached objects stay readable when the bucket has lost them")
def test_what_was_cached_is_still_read_when_the_object_is_gone(snapshot, bucket):
    for path in FILES:
        snapshot.read(path)
    for path in FILES:
        (bucket / path).unlink()
    with open_snapshot("mask@v1") as again:
        # The answer to the first read may be ahead of the tiers by a moment: the daemon still has the bytes then.
        assert {path: again.read(path) for path in FILES} == FILES


def test_a_tag_that_is_taken_is_refused_and_nothing_becomes_visible(settings, bucket):
    first = create_snapshot("mask", str(bucket), tags=["v1"])
    (bucket / "more").write_bytes(b"more")
    with pytest.raises(TagExistsError, match="v1"):
        create_snapshot("mask", str(bucket), tags=["v1"])
    with open_snapshot("mask") as latest:
        assert latest.record.id == first.id


@pytest.mark.parametrize("ref", ["nothing", "mask@v9", "mask@abcdef", "mask@latest2"])
def test_a_reference_to_nothing_says_what_there_is(snapshot, ref):
    with pytest.raises(SnapshotNotFoundError) as caught:
        open_snapshot(ref)
    assert "mask" in caught.value.hint or "v1" in caught.value.hint


@pytest.mark.parametrize("name", ["", "a b", "../x", "/x", "x@y", "-x"])
def test_a_bad_name_is_a_usage_error(settings, bucket, name):
    with pytest.raises(UsageError):
        create_snapshot(name, str(bucket))


def test_an_empty_or_missing_folder_is_an_error_with_its_name(settings, tmp_path):
    with pytest.raises(ObjectNotFoundError, match="nowhere"):
        create_snapshot("mask", str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatacacheError, match="empty"):
        create_snapshot("mask", str(tmp_path / "empty"))


@promise("Rotten bytes of the disk are never returned")
def test_a_tampered_block_is_fetched_again_and_counted(snapshot, settings):
    from datacache.tiers import layout

    assert snapshot.read("dir/b.bin") == FILES["dir/b.bin"]
    assert snapshot.read("a.bin") == FILES["a.bin"]
    snapshot.read("large.bin")
    folders = [layout.ssd_dir(settings.home), memory_dir(settings.home, settings.ram_dir)]
    for folder in folders:
        for path in (path for path in folder.iterdir() if layout.container_of(path.name) is not None):
            raw = bytearray(path.read_bytes())
            raw[600:] = bytes(byte ^ 0xFF for byte in raw[600:])
            path.write_bytes(raw)
    for path, data in FILES.items():
        assert snapshot.read(path) == data
        assert snapshot.read(path) == data
    from datacache import connect

    assert connect().cache_status()["reads"]["broken_blocks"] > 0


def test_fsspec_opens_lists_and_reads(snapshot):
    with fsspec.open("datacache://mask@v1/dir/with space/ünï ☃.txt") as file:
        assert file.read() == b"snow"
    fs = fsspec.filesystem("datacache")
    assert sorted(fs.ls("mask@v1", detail=False)) == [
        f"mask@v1/{name}" for name in ("a.bin", "dir", "empty", "large.bin")
    ]
    assert fs.find("mask@v1") == sorted(f"mask@v1/{path}" for path in FILES)
    assert fs.cat_file("mask@v1/large.bin", -10, None) == FILES["large.bin"][-10:]
    assert fs.info("mask@v1/dir")["type"] == "directory"
    assert fs.exists("mask@v1/a.bin")
    assert not fs.exists("mask@v1/nothing")
    with pytest.raises(FileNotFoundError):
        fs.cat("mask@v1/nothing")
    with pytest.raises(UsageError):
        fs.open("mask@v1/a.bin", "wb")


@promise("Reading goes on without a daemon")
def test_reading_goes_on_without_a_daemon_when_none_can_be_started(settings, bucket):
    """A home whose cache folder is a file: no daemon starts, the store itself is read."""
    create_snapshot("mask", str(bucket), tags=["v1"])
    (settings.home / "cache").write_text("in the way")
    with open_snapshot("mask@v1") as snapshot:
        assert snapshot.read("dir/b.bin") == FILES["dir/b.bin"]


def test_memory_stores_are_read_in_the_process_that_has_them(settings):
    from datacache.store.open import open_store

    store = open_store("memory://words", settings)
    store.put("a/x.txt", b"word")
    create_snapshot("words", "memory://words/a", tags=["v1"])
    with open_snapshot("words@v1") as snapshot:
        assert snapshot.read("x.txt") == b"word"


def test_scan_gives_no_name_that_leads_out_of_a_folder_whatever_the_manifest_says(settings, monkeypatch):
    from datacache.store.open import open_store

    monkeypatch.setattr("datacache.manifest.builder._UNSHOWABLE", re.compile(rb"(?!)"))
    store = open_store("memory://hostile", settings)
    for key in ("../up", "a/../../out", "a/./c", "a/b", "good"):
        store.put(f"p/{key}", b"x")
    create_snapshot("hostile", "memory://hostile/p")
    with open_snapshot("hostile") as snapshot:
        assert [stat.path for stat in snapshot.scan()] == ["a", "good"]
        assert [stat.path for stat in snapshot.scan("a")] == ["a/b"]


def test_importing_the_package_and_settings_is_quick_to_load_nothing_heavy():
    heavy = {"obstore", "pymongo", "boto3", "torch", "aiohttp", "lmdb", "fsspec"}
    program = f"import sys, datacache; import datacache.settings; print(sorted({heavy!r} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_a_snapshot_can_be_opened_with_settings_of_its_own(settings, bucket, tmp_path, monkeypatch):
    other = dataclasses.replace(settings, catalog=f"sqlite:///{tmp_path / 'other.db'}")
    create_snapshot("mask", str(bucket), settings=other)
    with pytest.raises(SnapshotNotFoundError):
        open_snapshot("mask")
    with open_snapshot("mask", settings=other) as snapshot:
        assert snapshot.read("a.bin") == b"hello"
