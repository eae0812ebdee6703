"""Ranges of files and pairs of names in a read-write mount: fallocate(2), copy_file_range(2), RENAME_EXCHANGE."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datacache import api
from datacache.core.disk import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, allocate
from datacache.core.errors import QuotaError, StagingFullError
from datacache.settings import Settings
from datacache.writeback.live import LiveBucket
from datacache.writeback.model import Staged, Stored
from tests.conformance.faults import FaultProxy
from tests.fuse_mount.mount_processes import BucketMounter
from tests.fuse_mount.posix_model import exchange
from tests.fuse_mount.test_bucket_fs import Directory, expect_errno
from tests.promises import promise
from tests.servers import RcloneS3

KEEP, PUNCH, ZERO = FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, FALLOC_ZERO_RANGE
COLLAPSE, INSERT = 0x08, 0x20
_LARGE = 1_000_000
Open = Callable[..., Directory]


@pytest.fixture
def opened(bucket: Path, settings: Settings) -> Iterator[Open]:
    """Opens the bucket; a second call is the next process."""
    current: list[LiveBucket] = []

    def make(settings: Settings = settings, **options: Any) -> Directory:
        if current:
            current.pop().close()
        options = {"who": "test", "ttl_s": 0.3} | options
        current.append(api.open_bucket(f"file://{bucket}", settings, **options))
        return Directory(current[-1])

    yield make
    for live in current:
        live.close()


def pattern(size: int, seed: int = 1) -> bytes:
    return (bytes(range(seed, 251)) * (size // 200 + 1))[:size]


def copied(directory: Directory, source: int, start: int, handle: int, offset: int, size: int) -> list[int]:
    """Copy as cp does, with as many calls as it takes; what each returned."""
    counts = []
    while size and (count := directory.do(directory.fs.handles.copy, source, start, handle, offset, size)):
        counts.append(count)
        start, offset, size = start + count, offset + count, size - count
    return counts


# --- fallocate -------------------------------------------------------------------------------------------------------


@promise("`fallocate` allocates, punches holes and zeroes ranges as on a local disk")
@pytest.mark.parametrize("size", [10_000, _LARGE], ids=["in memory", "staged"])
@pytest.mark.parametrize("disk", ["", "/dev/shm"], ids=["disk", "one without ZERO_RANGE"])
def test_ranges_are_allocated_punched_and_zeroed_as_on_a_disk(
    opened: Open, settings: Settings, tmp_path: Path, size: int, disk: str
) -> None:
    staging = Path(disk or tmp_path) / f"staging-{os.getpid()}"
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    try:
        directory = opened(replace(settings, staging=staging))
        handle = directory.create("f", pattern(size))
        os.pwrite(plain, pattern(size), 0)
        asked = [
            (PUNCH, size // 4, size // 8), (ZERO | KEEP, size - 5, 100), (ZERO, size - 9, 40), (KEEP, size, 5000),
            (0, 7, 9), (0, size + 3000, 2000), (PUNCH, size + 1000, 1_000_000), (PUNCH, size + 9000, 10),
            (ZERO, size + 6000, 300_000), (0, 0, size + 600_000),
        ]  # fmt: skip
        for mode, offset, length in asked:
            allocate(plain, mode, offset, length)
            directory.do(directory.fs.handles.allocate, handle, mode, offset, length)
            now = os.fstat(plain).st_size
            assert directory.attr("f").size_bytes == now
            assert directory.do(directory.fs.handles.read, handle, 0, now) == os.pread(plain, now, 0)
        directory.close(handle)
        assert directory.read("f") == os.pread(plain, 1 << 20, 0)
        directory.flush()
        assert (tmp_path / "bucket" / "f").read_bytes() == os.pread(plain, now, 0)
    finally:
        os.close(plain)
        shutil.rmtree(staging, ignore_errors=True)


@promise("`fallocate` allocates, punches holes and zeroes ranges as on a local disk")
@pytest.mark.parametrize("mode", [COLLAPSE, INSERT, 0x40])
def test_ranges_are_not_moved_within_a_file(opened: Open, mode: int) -> None:
    directory = opened()
    handle = directory.create("f", b"1234")
    with expect_errno(errno.EOPNOTSUPP):
        directory.do(directory.fs.handles.allocate, handle, mode, 0, 4096)
    directory.close(handle)
    assert directory.read("f") == b"1234"


@promise("What is allocated needs room as if it were written")
@pytest.mark.parametrize("mode", [0, KEEP, ZERO, ZERO | KEEP])
def test_what_is_allocated_needs_room_in_quota_and_staging_area(opened: Open, settings: Settings, mode: int) -> None:
    small = replace(settings, staging_bytes=64 * 2**20, staging_wait_s=0.0)
    directory = opened(small, quota_bytes=4 * 2**20)
    assert directory.live.quota.walk()
    handle = directory.create("f", b"1234")
    with pytest.raises(QuotaError):
        directory.do(directory.fs.handles.allocate, handle, mode, 0, 5 * 2**20)
    directory.live.quota.set(0)
    with pytest.raises(StagingFullError):
        directory.do(directory.fs.handles.allocate, handle, mode, 0, 2**40)
    assert directory.attr("f").size_bytes == 4
    directory.do(directory.fs.handles.allocate, handle, mode, 0, 2**20)
    assert directory.attr("f").size_bytes == (4 if mode & KEEP else 2**20)
    directory.close(handle)


@promise("Versions of one key arrive whole, in their order, one at a time")
@pytest.mark.parametrize("mode", [PUNCH, ZERO])
def test_an_upload_of_bytes_that_are_cleared_meanwhile_is_torn(opened: Open, bucket: Path, mode: int) -> None:
    directory = opened()
    directory.write("f", pattern(_LARGE))
    handle = directory.open("f", os.O_WRONLY)
    claim = directory.live.uploader.claims.begin("f")
    assert claim is not None
    directory.do(directory.fs.handles.allocate, handle, 0, _LARGE, 1000)
    assert not claim.torn
    directory.do(directory.fs.handles.allocate, handle, mode, 100, 1000)
    assert claim.torn
    directory.live.uploader.claims.abandon(claim)
    directory.close(handle)
    directory.flush()
    expected = pattern(_LARGE)[:100] + bytes(1000) + pattern(_LARGE)[1100:] + bytes(1000)
    assert (bucket / "f").read_bytes() == expected


# --- copies ----------------------------------------------------------------------------------------------------------


@promise("Copying a whole large object within a mount (`cp`) moves no bytes")
@pytest.mark.parametrize("name", ["new", "old"])
def test_a_whole_object_is_copied_by_its_key_whatever_becomes_of_the_original(
    opened: Open, bucket: Path, name: str
) -> None:
    (bucket / "a").write_bytes(pattern(_LARGE))
    (bucket / "old").write_bytes(b"old")
    directory = opened()
    source = directory.open("a")
    handle = directory.create(name, b"") if name == "new" else directory.open(name, os.O_WRONLY | os.O_TRUNC)
    assert directory.do(directory.fs.handles.copy, source, 0, handle, 0, 2**62) == _LARGE
    pending = directory.live.engine.get(name)
    assert pending is not None
    assert isinstance(pending.content, Stored)
    assert directory.staged() == []
    assert directory.attr(name).size_bytes == _LARGE
    other = directory.open("a", os.O_WRONLY | os.O_TRUNC)
    directory.do(directory.fs.handles.write, other, 0, b"other bytes")
    directory.close(other)
    directory.close(source)
    directory.close(handle)
    directory = opened()  # the next process
    assert directory.read(name) == pattern(_LARGE)
    directory.flush()
    assert (bucket / name).read_bytes() == pattern(_LARGE)
    assert (bucket / "a").read_bytes() == b"other bytes"


def test_a_copy_by_key_is_written_to_and_deleted_like_any_file(opened: Open, bucket: Path) -> None:
    (bucket / "a").write_bytes(pattern(_LARGE))
    directory = opened()
    source, handles = directory.open("a"), [directory.create(name, b"") for name in "bcd"]
    for handle in handles:
        assert copied(directory, source, 0, handle, 0, _LARGE) == [_LARGE]
    directory.do(directory.fs.handles.write, handles[0], 10, b"here")
    directory.rename("c", "e")
    directory.unlink("d")
    assert directory.do(directory.fs.handles.read, handles[2], 0, _LARGE) == pattern(_LARGE)
    for handle in (source, *handles):
        directory.close(handle)
    directory.flush()
    found = {path.name: path.read_bytes() for path in bucket.iterdir()}
    changed = pattern(10) + b"here" + pattern(_LARGE)[14:]
    assert found == {"a": pattern(_LARGE), "b": changed, "e": pattern(_LARGE)}


@promise("A renamed file whose source others took away is sent from this node's copy or cache, or told as lost")
def test_a_copy_whose_original_others_take_away_is_told_as_lost(opened: Open, bucket: Path) -> None:
    (bucket / "a").write_bytes(pattern(_LARGE))
    directory = opened()
    source, handle = directory.open("a"), directory.create("b", b"")
    assert copied(directory, source, 0, handle, 0, _LARGE) == [_LARGE]
    (bucket / "a").unlink()
    directory.close(source)
    directory.close(handle)
    directory.flush()
    assert [loss.key for loss in directory.live.engine.losses.all()] == ["b"]
    assert list(bucket.iterdir()) == []


@promise("`copy_file_range` copies any range of a file into another one, or into itself")
@pytest.mark.parametrize("source", ["stored", "small", "staged", "being written", "in memory"])
@pytest.mark.parametrize(("start", "offset", "size"), [(0, 0, _LARGE), (100, 0, 50), (0, 700_000, 5_000_000)])
def test_any_range_is_copied(opened: Open, bucket: Path, source: str, start: int, offset: int, size: int) -> None:
    data = pattern(1000 if source in ("small", "in memory") else _LARGE)
    (bucket / "a").write_bytes(data)
    directory = opened()
    if source == "staged":
        directory.write("a", data)
    handles = []
    if source in ("being written", "in memory"):
        handles = [directory.create("c", data)]
        directory.rename("c", "a")
    handles += [directory.open("a"), directory.create("b", b"before")]
    expected = bytearray(b"before")
    expected.extend(bytes(max(0, offset - len(expected))))
    expected[offset : offset + len(data[start : start + size])] = data[start : start + size]
    assert sum(copied(directory, handles[-2], start, handles[-1], offset, size)) == len(data[start : start + size])
    for handle in handles:
        directory.close(handle)
    assert directory.read("b") == expected[: 1 << 20]
    directory.flush()
    assert (bucket / "b").read_bytes() == expected


@promise("`copy_file_range` copies any range of a file into another one, or into itself")
@pytest.mark.parametrize("size", [1000, _LARGE])
def test_a_range_is_copied_within_a_file(opened: Open, size: int) -> None:
    directory = opened()
    handle = directory.create("a", pattern(size))
    assert sum(copied(directory, handle, 100, handle, size - 10, 300)) == 300
    directory.close(handle)
    assert directory.read("a") == (pattern(size)[:-10] + pattern(size)[100:400])[: 1 << 20]


def test_a_copy_of_a_staged_file_stays_on_the_disk(opened: Open) -> None:
    directory = opened()
    directory.write("a", pattern(_LARGE))
    source, handle = directory.open("a"), directory.create("b", b"")
    assert copied(directory, source, 0, handle, 0, _LARGE) == [
        _LARGE
    ]  # one by bytes would be short: 4 MiB in the first
    directory.close(source)
    directory.close(handle)
    pending = directory.live.engine.get("b")
    assert pending is not None
    assert isinstance(pending.content, Staged)
    assert directory.read("b") == pattern(_LARGE)


# --- names that change places ----------------------------------------------------------------------------------------


def swap(directory: Directory, one: str, other: str) -> None:
    places = [part for path in (one, other) for part in directory._place(path)]
    directory.do(directory.fs.names.rename, *places, 2)
    directory.fs.handles.commit()


def fill(bucket: Path, directory: Directory, kind: str, name: str, seed: int) -> dict[str, bytes]:
    """Make a file or a folder of a kind; what is in it by path below `name`."""
    found: dict[str, bytes] = {}
    if kind == "stored file":
        found = {"": pattern(300 + seed, seed)}
        (bucket / name).write_bytes(found[""])
    elif kind == "small file":
        found = {"": pattern(100 + seed, seed)}
        directory.write(name, found[""])
    elif kind == "staged file":
        found = {"": pattern(400_000 + seed, seed)}
        directory.write(name, found[""])
    else:
        found = {"/both": pattern(seed, seed), f"/only{seed}": b"1", f"/sub{seed}/x": pattern(7, seed), "/y/deep": b"2"}
        if seed == 1:
            found["/file/in"] = b"a folder here, a file there"
        else:
            found["/file"] = b"file"
        for path, data in found.items():
            if kind == "stored folder":
                (bucket / (name + path)).parent.mkdir(parents=True, exist_ok=True)
                (bucket / (name + path)).write_bytes(data)
            else:
                for folder in [name + path[:at] for at, letter in enumerate(path) if letter == "/"]:
                    if folder.rpartition("/")[2] not in directory.names(folder.rpartition("/")[0]):
                        directory.mkdir(folder)
                directory.write(name + path, data)
    return found


_PAIRS = [
    ("stored file", "stored file"), ("small file", "staged file"), ("stored file", "new folder"),
    ("small file", "stored folder"), ("stored folder", "stored folder"), ("new folder", "stored folder"),
    ("new folder", "new folder"),
]  # fmt: skip


@promise("Two files or folders exchange their names in one step (`RENAME_EXCHANGE`)")
@pytest.mark.parametrize(("kind", "other"), _PAIRS)
def test_two_names_change_places_with_all_that_lies_below_them(
    opened: Open, bucket: Path, kind: str, other: str
) -> None:
    directory = opened()
    (bucket / "d").mkdir()
    contents = {"d/b": fill(bucket, directory, kind, "a", 1), "a": {}}
    if "d" not in directory.names():
        directory.mkdir("d")
    contents["a"] = fill(bucket, directory, other, "d/b", 2)
    inodes = [directory.attr("a").ino, directory.attr("d/b").ino]
    swap(directory, "a", "d/b")
    assert [directory.attr("d/b").ino, directory.attr("a").ino] == inodes
    expected = {name + path: data for name, below in contents.items() for path, data in below.items()}
    for _ in range(2):
        assert {path: directory.read(path) for path in expected} == {p: d[: 1 << 20] for p, d in expected.items()}
        assert sorted(directory.names()) == ["a", "d"]
        assert directory.names("d") == ["b"]
        directory = opened()  # the next process
    directory.flush()
    found = {str(p.relative_to(bucket)): p.read_bytes() for p in bucket.rglob("*") if p.is_file()}
    assert {path: data for path, data in found.items() if not path.endswith("/")} == expected
    assert directory.live.status()["conflict_count"] == 0


@promise("Two files or folders exchange their names in one step (`RENAME_EXCHANGE`)")
def test_open_files_go_on_as_what_they_are_when_names_change_places(opened: Open, bucket: Path) -> None:
    (bucket / "d").mkdir()
    (bucket / "d" / "in").write_bytes(pattern(_LARGE))
    directory = opened()
    handles = {"f": directory.create("f", b"eff"), "in": directory.open("d/in", os.O_RDWR)}
    swap(directory, "f", "d")
    directory.do(directory.fs.handles.write, handles["f"], 3, b"ect")
    directory.do(directory.fs.handles.write, handles["in"], 0, b"in")
    for handle in handles.values():
        directory.close(handle)
    directory.flush()
    assert (bucket / "d").read_bytes() == b"effect"
    assert (bucket / "f" / "in").read_bytes() == b"in" + pattern(_LARGE)[2:]


@promise("Two files or folders exchange their names in one step (`RENAME_EXCHANGE`)")
def test_names_that_cannot_change_places_stay(opened: Open, bucket: Path) -> None:
    (bucket / "d").mkdir()
    (bucket / "d" / "in").write_bytes(b"1")
    directory = opened()
    with expect_errno(errno.ENOENT):
        swap(directory, "d", "nothing")
    for one, other in (("d", "d/in"), ("d/in", "d")):
        with expect_errno(errno.EINVAL):
            swap(directory, one, other)
    swap(directory, "d", "d")
    assert directory.read("d/in") == b"1"


# --- through the kernel ----------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(bucket_mounter: BucketMounter, rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Between the mount and the store."""
    with FaultProxy(rclone_s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@promise("Copying a whole large object within a mount (`cp`) moves no bytes")
def test_cp_of_an_object_asks_the_store_for_a_copy_and_moves_no_bytes(
    bucket_mounter: BucketMounter, proxy: FaultProxy
) -> None:
    bucket_mounter.bucket.mkdir()
    (bucket_mounter.bucket / "model").write_bytes(pattern(20 * 2**20))
    bucket_mounter()
    subprocess.run(["cp", "model", "copy"], cwd=bucket_mounter.target, check=True)
    bucket_mounter.flush()
    asked = [(r.split("?")[0], headers) for r, headers in zip(proxy.requests, proxy.headers, strict=True)]
    sent = [(r.split()[0], h) for r, h in asked if r.endswith(("/run/model", "/run/copy")) and not r.startswith("HEAD")]
    assert [method for method, _ in sent] == ["PUT"]
    assert "x-amz-copy-source" in sent[0][1]
    assert int(sent[0][1].get("content-length", 0)) == 0
    assert (bucket_mounter.bucket / "copy").read_bytes() == pattern(20 * 2**20)
    bucket_mounter.unmount()


@promise("`fallocate` allocates, punches holes and zeroes ranges as on a local disk")
@promise("Two files or folders exchange their names in one step (`RENAME_EXCHANGE`)")
def test_the_kernel_sees_what_ranges_and_names_are_now_and_a_killed_server_keeps_names(
    bucket_mounter: BucketMounter,
) -> None:
    bucket_mounter()
    data, path = pattern(_LARGE), bucket_mounter.target / "f"
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as file:
        assert file.read() == data  # in the kernel's pages
        allocate(file.fileno(), PUNCH, 5000, 10_000)
        allocate(file.fileno(), ZERO, _LARGE - 10, 5000)
        expected = data[:5000] + bytes(10_000) + data[15_000:-10] + bytes(5000)
        assert path.read_bytes() == expected
        with pytest.raises(OSError, match="not supported"):
            allocate(file.fileno(), COLLAPSE, 0, 4096)
        assert os.copy_file_range(file.fileno(), file.fileno(), 4096, 20_000, 0) == 4096
        expected = expected[20_000:24_096] + expected[4096:]
        assert path.read_bytes() == expected
    (bucket_mounter.target / "d").mkdir()
    (bucket_mounter.target / "d" / "in").write_bytes(b"inside")
    exchange(str(path), str(bucket_mounter.target / "d"))
    bucket_mounter.kill()
    assert (bucket_mounter.target / "d").read_bytes() == expected
    assert (path / "in").read_bytes() == b"inside"
    bucket_mounter.unmount()
    assert (bucket_mounter.bucket / "f" / "in").read_bytes() == b"inside"
