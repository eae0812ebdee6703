"""The quota of a read-write mount: what counts, what is refused, and that nothing acknowledged is lost by it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fuse_mount
from datacache import api
from datacache.core.errors import UsageError
from datacache.settings import Settings
from datacache.writeback.live import LiveBucket
from datacache.writeback.model import Attributes, Logged, Pending
from datacache.writeback.overlay import Overlay
from fuse_mount.bucket.areas import LeftArea, flush_area
from fuse_mount.bucket.fs.names import Changes
from tests.fuse_mount.mount_processes import BucketMounter
from tests.fuse_mount.test_bucket_fs import Directory, expect_errno
from tests.promises import promise

QUOTA = 100_000
FILE = Attributes(stat.S_IFREG | 0o644, 0, 0, 0)
Open = Callable[..., Directory]


@pytest.fixture
def bucket(bucket: Path) -> Path:
    """With 60,000 bytes in it."""
    (bucket / "sub").mkdir()
    (bucket / "old").write_bytes(b"o" * 40_000)
    (bucket / "sub" / "older").write_bytes(b"o" * 20_000)
    return bucket


@pytest.fixture
def opened(bucket: Path, settings: Settings) -> Iterator[Open]:
    """Opens the bucket with a quota, walked; a second call is the next process."""
    current: list[LiveBucket] = []

    def make(*, walk: bool = True, **options: Any) -> Directory:
        if current:
            current.pop().close()
        options = {"who": "test", "ttl_s": 0.3, "quota_bytes": QUOTA} | options
        current.append(api.open_bucket(f"file://{bucket}", settings, **options))
        assert not walk or current[-1].quota.walk()
        return Directory(current[-1])

    yield make
    for live in current:
        live.close()


def used(directory: Directory) -> int:
    room = directory.fs.room()
    assert room is not None
    return room[1]


@promise("Quota use is the bucket's prefix, with what is pending and being written")
def test_what_is_there_what_is_pending_and_what_is_being_written_count(opened: Open) -> None:
    directory = opened()
    assert directory.fs.room() == (QUOTA, 60_000)
    handle = directory.create("new", b"n" * 10_000)
    assert used(directory) == 70_000
    directory.close(handle)
    assert used(directory) == 70_000
    directory.flush()
    assert used(directory) == 70_000
    assert directory.live.quota.walk()
    assert used(directory) == 70_000


@promise("Quota use is the bucket's prefix, with what is pending and being written")
def test_overwriting_counts_the_difference_and_what_is_deleted_or_cut_off_gives_room_at_once(opened: Open) -> None:
    directory = opened()
    handle = directory.open("old", os.O_WRONLY | os.O_TRUNC)
    assert used(directory) == 20_000
    directory.do(directory.fs.handles.write, handle, 0, b"x" * 50_000)
    directory.close(handle)
    assert used(directory) == 70_000
    directory.do(directory.fs.names.setattr, directory.attr("old").ino, Changes(size=10_000))
    assert used(directory) == 30_000
    directory.unlink("sub/older")
    assert used(directory) == 10_000
    directory.flush()
    assert used(directory) == 10_000
    assert directory.live.quota.walk()
    assert used(directory) == 10_000


@promise("Quota use is the bucket's prefix, with what is pending and being written")
def test_renaming_costs_nothing(opened: Open, bucket: Path) -> None:
    directory = opened()
    directory.rename("sub", "moved")
    directory.rename("old", "moved/old")
    assert used(directory) == 60_000
    directory.flush()
    assert (bucket / "moved" / "older").stat().st_size == 20_000
    assert used(directory) == 60_000


@promise("What does not fit a quota is refused with ENOSPC")
def test_what_does_not_fit_is_refused_and_what_was_acknowledged_stays(opened: Open, bucket: Path) -> None:
    directory = opened()
    directory.write("kept", b"k" * 30_000)
    handle = directory.open("kept", os.O_WRONLY)
    with expect_errno(errno.ENOSPC):
        directory.do(directory.fs.handles.write, handle, 30_000, b"x" * 10_001)
    with expect_errno(errno.ENOSPC):
        directory.do(directory.fs.names.setattr, directory.attr("kept").ino, Changes(size=40_001))
    directory.do(directory.fs.handles.write, handle, 30_000, b"y" * 10_000)
    with expect_errno(errno.ENOSPC):
        directory.create("another", b"")
    directory.close(handle)
    directory.flush()
    assert (bucket / "kept").read_bytes() == b"k" * 30_000 + b"y" * 10_000
    assert directory.read("old") == b"o" * 40_000
    directory.unlink("sub/older")
    directory.write("another", b"a" * 20_000)
    status = directory.live.status()["quota"]
    assert status == {"quota_bytes": QUOTA, "used_bytes": QUOTA, "is_known": True, "refused": 3}


@promise("Under a quota smaller than what is there, reading, deleting and shrinking go on")
def test_under_a_quota_that_is_smaller_than_what_is_there_reading_deleting_and_shrinking_go_on(opened: Open) -> None:
    directory = opened(quota_bytes=10_000)
    assert directory.read("old") == b"o" * 40_000
    handle = directory.open("old", os.O_WRONLY | os.O_TRUNC)
    directory.do(directory.fs.handles.write, handle, 0, b"x" * 39_000)
    directory.close(handle)
    assert directory.read("old") == b"x" * 39_000
    with expect_errno(errno.ENOSPC):
        directory.write("new", b"1")
    directory.unlink("old")
    with expect_errno(errno.ENOSPC):
        directory.write("new", b"1")
    directory.unlink("sub/older")
    directory.write("new", b"1" * 10_000)


def test_a_file_that_was_deleted_while_it_is_open_does_not_count(opened: Open) -> None:
    directory = opened()
    handle = directory.create("gone", b"g" * 40_000)
    directory.unlink("gone")
    assert used(directory) == 60_000
    directory.do(directory.fs.handles.write, handle, 40_000, b"g" * 100_000)
    directory.close(handle)
    assert used(directory) == 60_000


def test_what_others_put_there_and_take_away_is_found_by_the_next_walk(opened: Open, bucket: Path) -> None:
    directory = opened()
    (bucket / "theirs").write_bytes(b"t" * 35_000)
    (bucket / "old").unlink()
    directory.write("new", b"n" * 5_000)
    assert directory.live.quota.walk()
    assert used(directory) == 60_000


def test_uploads_during_a_walk_are_counted_once() -> None:
    overlay = Overlay({"old": 40_000}.get)  # type: ignore[arg-type]
    usage = overlay.usage
    written = [("a", "", 1_000), ("old", "etag", 10_000), ("z", "", 2_000)]
    for number, (key, base, size_bytes) in enumerate(written):
        overlay.set(Pending(key, FILE, Logged(size_bytes), base, number, 0.0))
    usage.begin_walk()
    usage.add_page([("m", 500)])
    for key, _base, size_bytes in written:  # "a" lies before what was listed, the others behind it
        usage.apply_own(key, size_bytes)
        overlay.drop(key)
    usage.add_page([("old", 40_000), ("sub/older", 20_000), ("z", 2_000)])
    usage.end_walk(complete=True)
    assert usage.used_bytes == 1_000 + 500 + 10_000 + 20_000 + 2_000


def test_the_quota_that_was_set_last_is_the_next_processs_and_so_is_what_was_in_use(opened: Open) -> None:
    directory = opened()
    directory.live.quota.set(70_000)
    with expect_errno(errno.ENOSPC):
        directory.write("new", b"n" * 10_001)
    directory = opened(keep_quota=True)
    assert directory.fs.room() == (70_000, 60_000)
    assert opened(quota_bytes=0).fs.room() is None


@promise("Until a prefix was listed to its end, the former use or the listed part counts")
def test_until_the_first_walk_what_was_in_use_last_counts_and_what_was_changed_since_counts_once(
    bucket: Path, settings: Settings, opened: Open
) -> None:
    live = api.open_bucket(f"file://{bucket}", settings, who="test", quota_bytes=QUOTA)
    assert live.quota.walk()
    directory = Directory(live)
    handle = directory.open("old", os.O_WRONLY | os.O_TRUNC)
    directory.do(directory.fs.handles.write, handle, 0, b"x" * 50_000)
    directory.close(handle)
    directory.unlink("sub/older")
    directory.write("new", b"n" * 1_000)
    directory.flush()
    directory.chmod("new", 0o600)
    handle = directory.open("old", os.O_WRONLY | os.O_TRUNC)
    directory.do(directory.fs.handles.write, handle, 0, b"x" * 10_000)
    directory.close(handle)
    live.close()
    directory = opened(quota_bytes=0, walk=False)  # without a quota nothing is listed
    assert directory.live.engine.usage.used_bytes == 11_000
    directory.flush()
    assert directory.live.engine.usage.used_bytes == 11_000


@promise("A quota can be changed while the mount is used")
def test_the_quota_outlives_an_upload_of_what_a_mount_has_left(opened: Open, bucket: Path, settings: Settings) -> None:
    live = api.open_bucket(f"file://{bucket}", settings, who="test", quota_bytes=QUOTA)
    Directory(live).write("new", b"n" * 10_000)
    live.close()
    area = LeftArea(live.engine.area.folder, live.url, None, None, "")
    assert flush_area(area, settings, timeout_s=30.0, progress=lambda _: None) is not None
    assert (bucket / "new").stat().st_size == 10_000
    assert opened(quota_bytes=0, keep_quota=True).fs.room() == (QUOTA, 70_000)


# --- with the kernel ------------------------------------------------------------------------------------------------


@pytest.fixture
def mounter(bucket_mounter: BucketMounter) -> BucketMounter:
    return bucket_mounter


@promise("What does not fit a quota is refused with ENOSPC")
def test_a_program_is_told_by_write_or_close_and_statvfs_shows_the_quota(mounter: BucketMounter) -> None:
    info = mounter(quota_bytes=1 << 20)
    file = mounter.target / "a"
    file.write_bytes(b"a" * 600_000)
    facts = os.statvfs(mounter.target)
    assert facts.f_blocks * facts.f_frsize == 1 << 20
    assert facts.f_bavail * facts.f_frsize == ((1 << 20) - 600_000) // 4096 * 4096
    with expect_errno(errno.ENOSPC):
        (mounter.target / "b").write_bytes(b"b" * 600_000)
    with expect_errno(errno.ENOSPC):
        os.truncate(file, 2 << 20)
    assert os.listdir(mounter.target) == ["a"]
    mounter.flush()
    assert (mounter.bucket / "a").read_bytes() == b"a" * 600_000
    assert "quota of this mount is used up" in info.log.read_text()


@promise("A quota can be changed while the mount is used")
def test_a_quota_is_changed_while_files_are_written_and_kept_when_the_server_is_killed(
    mounter: BucketMounter,
) -> None:
    info = mounter(quota_bytes=100_000)
    fuse_mount.set_quota(info, 300_000)
    (mounter.target / "a").write_bytes(b"a" * 200_000)
    info = mounter.kill()
    assert info.config.quota_bytes == 300_000
    assert fuse_mount.bucket_status(info)["quota"]["quota_bytes"] == 300_000
    with expect_errno(errno.ENOSPC):
        (mounter.target / "b").write_bytes(b"b" * 200_000)
    fuse_mount.set_quota(info, 0)
    (mounter.target / "b").write_bytes(b"b" * 200_000)
    assert fuse_mount.bucket_status(info)["quota"] is None
    with pytest.raises(UsageError, match="is no quota"):
        fuse_mount.set_quota(info, -1)
