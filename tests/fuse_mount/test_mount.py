"""Test what a reader sees of a mounted snapshot, through the real kernel."""

from __future__ import annotations

import errno
import mmap
import os
import random
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datacache.settings import Settings
from tests.fuse_mount.conftest import ODD_NAMES, Mounter, files_below
from tests.fuse_mount.directory_entries import expect_whole_from_every_place
from tests.promises import promise


@promise("Every file of the snapshot is in the mount, byte for byte")
def test_every_file_is_there_and_equal(folder: Path, mounter: Mounter) -> None:
    mnt = mounter().mountpoint
    assert files_below(mnt) == files_below(folder)


def test_folders_are_listed_with_odd_names_and_empty_folders(folder: Path, mounter: Mounter) -> None:
    mnt = mounter().mountpoint
    for top, folders, names in os.walk(os.fsencode(folder)):
        inside = os.path.relpath(top, os.fsencode(folder))
        assert sorted(os.listdir(os.path.join(os.fsencode(mnt), inside))) == sorted(folders + names)
    assert set(ODD_NAMES) < set(os.listdir(mnt))
    assert os.listdir(mnt / "empty") == []


def test_types_in_a_listing_need_no_stat(folder: Path, mounter: Mounter) -> None:
    mnt = mounter().mountpoint
    with os.scandir(mnt) as entries:
        kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    assert kinds["d0"]
    assert kinds["empty"]
    assert not kinds["large.bin"]


@promise("Every folder lists `.` and `..`, and goes on from a place that a program has kept (`telldir`)")
def test_a_listing_goes_on_where_it_was_left_and_starts_over(folder: Path, mounter: Mounter) -> None:
    mnt = mounter().mountpoint
    for there in (mnt, mnt / "d0", mnt / "empty"):
        expect_whole_from_every_place(there, os.listdir(folder / there.relative_to(mnt)))


def test_a_directory_of_100000_names_is_listed_completely(mounter: Mounter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_NAMES", "100000")
    mnt = mounter("open_names").mountpoint
    assert sorted(os.listdir(mnt)) == [f"{number:08d}.jpg" for number in range(100_000)]
    assert (mnt / "00099999.jpg").stat().st_size == 0


def test_attributes_say_size_time_owner_and_mode(folder: Path, mounter: Mounter) -> None:
    info = mounter(uid=1234, gid=4321, umask=0o027)
    there, source = (info.mountpoint / "large.bin").stat(), (folder / "large.bin").stat()
    assert (there.st_size, there.st_mtime_ns) == (source.st_size, source.st_mtime_ns)
    assert there.st_blocks == -(-source.st_size // 512)
    assert (there.st_uid, there.st_gid, there.st_mode) == (1234, 4321, stat.S_IFREG | 0o440)
    assert there.st_dev == info.device
    top = info.mountpoint.stat()
    assert (top.st_uid, top.st_gid, top.st_mode) == (1234, 4321, stat.S_IFDIR | 0o550)
    assert (info.mountpoint / "d0").stat().st_mode == stat.S_IFDIR | 0o550
    assert len({p.stat().st_ino for p in (info.mountpoint / "d0", info.mountpoint / "d1", info.mountpoint)}) == 3


def test_statfs_says_how_large_the_snapshot_is(folder: Path, mounter: Mounter) -> None:
    info = mounter()
    facts = os.statvfs(info.mountpoint)
    content = files_below(folder)
    assert facts.f_files == len(content) == info.files
    assert 0 <= facts.f_blocks * facts.f_frsize - sum(map(len, content.values())) < facts.f_frsize
    assert facts.f_bavail == 0
    assert facts.f_flag & os.ST_RDONLY
    assert facts.f_flag & os.ST_NOSUID


def test_another_user_can_read(folder: Path, mounter: Mounter) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    mnt = mounter().mountpoint
    command = ["cat", str(mnt / "large.bin")]
    said = subprocess.run(command, user=65534, group=65534, extra_groups=[], capture_output=True, check=True)
    assert said.stdout == (folder / "large.bin").read_bytes()


@promise("An ordinary user can mount; others read only if allowed")
@pytest.mark.parametrize("options", [{"allow_other": False}, {"umask": 0o077}])
def test_another_user_is_kept_out_without_allow_other_or_by_modes(
    folder: Path, mounter: Mounter, options: dict[str, int]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    mnt = mounter(**options).mountpoint
    said = subprocess.run(["ls", str(mnt)], user=65534, group=65534, extra_groups=[], capture_output=True, check=False)
    assert said.returncode != 0


@promise("Nothing in a snapshot's mount can be changed")
def test_nothing_can_be_changed(folder: Path, mounter: Mounter) -> None:
    mnt = mounter().mountpoint
    attempts = [
        lambda: (mnt / "new").write_bytes(b"x"),
        lambda: (mnt / "large.bin").open("r+b"),
        lambda: (mnt / "new").mkdir(),
        lambda: (mnt / "large.bin").unlink(),
        lambda: (mnt / "empty").rmdir(),
        lambda: (mnt / "large.bin").rename(mnt / "other"),
        lambda: (mnt / "large.bin").chmod(0o777),
        lambda: os.utime(mnt / "large.bin"),
        lambda: os.symlink("a", mnt / "link"),
        lambda: os.truncate(mnt / "large.bin", 0),
        lambda: os.setxattr(mnt / "large.bin", "user.a", b"b"),
    ]
    for attempt in attempts:
        with pytest.raises(OSError, match="Read-only") as caught:
            attempt()
        assert caught.value.errno == errno.EROFS


def test_missing_names_are_missing_again_and_again(folder: Path, mounter: Mounter) -> None:
    mnt = mounter().mountpoint
    for _ in range(2):
        for name in ("no", "d0/no", "no/no", "d", "d00"):
            with pytest.raises(FileNotFoundError):
                (mnt / name).stat()
        with pytest.raises(NotADirectoryError):
            (mnt / "large.bin" / "no").stat()


def test_extended_attributes_are_not_offered(folder: Path, mounter: Mounter) -> None:
    mnt = mounter().mountpoint
    for _ in range(2):
        for ask in (os.listxattr, lambda path: os.getxattr(path, "user.a")):
            with pytest.raises(OSError, match="supported"):
                ask(mnt / "large.bin")


@promise("`mmap` works")
def test_a_mapped_file_has_the_same_bytes(folder: Path, mounter: Mounter) -> None:
    mnt = mounter().mountpoint
    with (
        (mnt / "large.bin").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert mapped[:] == (folder / "large.bin").read_bytes()


def test_a_large_file_reads_the_same_in_any_order_and_without_the_page_cache(folder: Path, mounter: Mounter) -> None:
    mnt = mounter().mountpoint
    whole = (folder / "large.bin").read_bytes()
    dice = random.Random(3)
    with (mnt / "large.bin").open("rb", buffering=0) as file:
        for _ in range(300):
            offset, size = dice.randrange(len(whole) + 1000), dice.choice([1, 100, 4096, 70_000, 2_000_000])
            assert os.pread(file.fileno(), size, offset) == whole[offset : offset + size]
        assert file.seek(0, os.SEEK_DATA) == 0
        assert file.seek(0, os.SEEK_HOLE) == len(whole)
    direct = os.open(mnt / "large.bin", os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 1 << 20) as aligned:
            assert os.preadv(direct, [aligned], 1 << 20) == 1 << 20
            assert aligned[:] == whole[1 << 20 : 2 << 20]
    finally:
        os.close(direct)


@promise("A read that waits for the store delays no other")
def test_a_read_that_waits_delays_no_other(folder: Path, mounter: Mounter, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "slow").mkdir()
    for number in range(6):
        (folder / "slow" / str(number)).write_bytes(b"late %d" % number)
    gate = folder.parent / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("STANDIN_GATE", str(gate))
    mnt = mounter(workers=1).mountpoint
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit((mnt / "slow" / str(number)).read_bytes) for number in range(6)]
        for path, content in files_below(folder).items():
            if not path.startswith("slow/"):
                assert (mnt / path).read_bytes() == content
        assert not any(future.done() for future in waiting)
        opened = os.open(gate, os.O_RDWR)  # from now on the FIFO opens for everybody
        try:
            assert [future.result() for future in waiting] == [b"late %d" % number for number in range(6)]
        finally:
            os.close(opened)


@promise("A failed read has its errno, and the log says path and reason")
@pytest.mark.parametrize(
    ("error", "number"),
    [
        ("PathNotFoundError", errno.ENOENT),
        ("ObjectChangedError", errno.ESTALE),
        ("ObjectNotFoundError", errno.ESTALE),
        ("StoreAccessError", errno.EACCES),
        ("StoreUnavailableError", errno.EIO),
        ("DaemonUnavailableError", errno.EIO),
        ("CorruptManifestError", errno.EIO),
    ],
)
def test_a_failed_read_has_its_errno_and_is_logged_with_the_path(
    folder: Path, mounter: Mounter, error: str, number: int
) -> None:
    (folder / "errors").mkdir()
    (folder / "errors" / error).write_bytes(b"never read")
    info = mounter()
    for _ in range(2):
        with pytest.raises(OSError, match=r".") as caught:
            (info.mountpoint / "errors" / error).read_bytes()
        assert caught.value.errno == number
    log = info.log.read_text()
    assert f"errors/{error}: {error}: the test wants it" in log
    assert (info.mountpoint / "large.bin").stat().st_size  # and the mount lives


def test_the_kernel_shows_what_is_mounted(folder: Path, mounter: Mounter, settings: Settings) -> None:
    info = mounter()
    said = subprocess.run(
        ["findmnt", "-n", "-o", "SOURCE,FSTYPE,OPTIONS", str(info.mountpoint)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    source, kind, options = said.split()
    assert (source, kind) == ("datacache:mask@0123456789ab", "fuse.datacache")
    assert {"ro", "nosuid", "nodev", "default_permissions"} <= set(options.split(","))
    assert info.ref == "mask@" + "0123456789abcdef" * 2
