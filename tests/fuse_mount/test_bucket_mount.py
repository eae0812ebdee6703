"""The processes of a read-write mount: they start, die, are started again and end, and nothing acknowledged is lost."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import fuse_mount
from datacache.core.errors import MountError, UploadError, UsageError
from datacache.settings import load_settings
from fuse_mount.kernel import session
from fuse_mount.lifecycle import keeping, process
from fuse_mount.lifecycle.state import BucketFiles
from tests.conformance.faults import FaultProxy
from tests.fuse_mount.asynchronous_io import write_asynchronously
from tests.fuse_mount.directory_entries import expect_whole_from_every_place, list_on
from tests.fuse_mount.mount_processes import (
    BucketMounter,
    kill,
    mount_is_dead,
    unmount_by_hand,
    wait_until,
    waiting_for_the_end_of,
)
from tests.leftovers import processes_with
from tests.promises import promise
from tests.servers import RcloneS3

_NOBODY = 65534


@pytest.fixture
def mounter(bucket_mounter: BucketMounter) -> BucketMounter:
    return bucket_mounter


@pytest.fixture
def proxy(mounter: BucketMounter, rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Between the mount and the store."""
    with FaultProxy(rclone_s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@promise("An unmount uploads first, or says what is left and how it gets to the bucket")
def test_what_is_written_is_in_the_bucket_after_the_unmount(mounter: BucketMounter) -> None:
    info = mounter()
    assert (info.url, info.ack, info.notes) == (f"{mounter.url}/", "staged", ())
    (mounter.target / "model.pt").write_bytes(b"weights" * 1000)
    mounter.flush()
    assert (mounter.bucket / "model.pt").read_bytes() == b"weights" * 1000
    (mounter.target / "log").write_text("one\n")
    left = mounter.unmount()
    assert left["files"] == 0
    assert (mounter.bucket / "log").read_text() == "one\n"
    assert list(mounter.target.iterdir()) == []
    assert fuse_mount.list_bucket_mounts(mounter.settings) == []


def test_the_mount_is_what_the_kernel_needs(mounter: BucketMounter) -> None:
    info = mounter()
    there = next(mount for mount in fuse_mount.mounts() if mount.mountpoint == str(mounter.target))
    assert (there.source, there.kind, there.device) == (f"{mounter.url}/", "fuse.datacache", info.device)
    line = next(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(mounter.target) in line)
    assert {"default_permissions", "max_read=1048576", f"user_id={os.geteuid()}"} <= set(line.split(" ")[-1].split(","))
    facts = os.statvfs(mounter.target)
    assert facts.f_flag & os.ST_NOSUID
    assert not facts.f_flag & os.ST_RDONLY
    if os.geteuid() == 0:
        major, minor = os.major(info.device), os.minor(info.device)
        assert int(Path(f"/sys/class/bdi/{major}:{minor}/read_ahead_kb").read_text()) == 4096
    assert "numpy" not in Path(f"/proc/{info.pid}/maps").read_text()  # half of what a start would take
    socket = mounter.settings.home / "mounts" / BucketFiles("", info.mountpoint).socket_name
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600


@promise("Every folder lists `.` and `..`, and goes on from a place that a program has kept (`telldir`)")
def test_a_listing_goes_on_where_it_was_left_and_a_large_folder_can_be_deleted(
    mounter: BucketMounter, bucket: Path
) -> None:
    names = [f"{number:0200d}" for number in range(500)]  # told in 25 requests, or more
    for folder in (bucket / "large", bucket / "small" / "one"):
        folder.mkdir(parents=True)
    for name in names:
        (bucket / "large" / name).touch()
    mounter(url=f"file://{bucket}")
    (mounter.target / "empty").mkdir()
    for folder, inside in (("", ["large", "small", "empty"]), ("large", names), ("small", ["one"]), ("empty", [])):
        expect_whole_from_every_place(mounter.target / folder, inside)
    subprocess.run(["rm", "-r", mounter.target / "large"], check=True)
    assert sorted(os.listdir(mounter.target)) == ["empty", "small"]


@promise("What changes in a folder that is being listed is as it is now, and not as it was")
def test_a_name_that_goes_while_its_folder_is_listed_does_not_come_back(mounter: BucketMounter, bucket: Path) -> None:
    mounter(url=f"file://{bucket}")
    for number in range(100):
        (mounter.target / f"{number:02}").touch()
    folder = os.open(mounter.target, os.O_RDONLY)
    names = list_on(folder)
    seen = [next(names).name]
    for number in range(50, 97):  # more than fit into one answer
        (mounter.target / f"{number}").unlink()
    (mounter.target / "97").rename(mounter.target / "other")
    (mounter.target / "98").chmod(0o600)
    (mounter.target / "99").unlink()
    (mounter.target / "99").mkdir()
    seen += [entry.name for entry in names]
    os.close(folder)
    left = {f"{number:02}" for number in (*range(50), 98, 99)}
    assert set(seen) - {"other"} == left | {".", ".."}
    for number in (50, 97):
        assert not (mounter.target / f"{number}").exists()
    assert stat.S_IMODE((mounter.target / "98").stat().st_mode) == 0o600
    assert (mounter.target / "99").is_dir()


@promise("In a folder with the sticky bit only an owner renames a file")
@promise("A file keeps inode number and times when the kernel forgets it and asks again (the last 50,000)")
def test_what_the_kernel_forgets_keeps_inodes_and_times_and_a_sticky_folder_what_is_in_it(
    mounter: BucketMounter,
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user and make the kernel forget")
    mounter(allow_other=True)
    sticky, to = mounter.target / "sticky", mounter.target / "to"
    for folder in (sticky, to):
        folder.mkdir()
    sticky.chmod(0o1777)
    os.chown(to, _NOBODY, _NOBODY)
    for folder_owner, owner in itertools.product((0, _NOBODY, 65533), repeat=2):
        os.chown(sticky, folder_owner, folder_owner)
        (sticky / "a").write_bytes(b"bytes")
        os.chown(sticky / "a", owner, owner)
        before = _facts(sticky / "a")
        _make_the_kernel_forget()
        assert _facts(sticky / "a") == before
        moved = subprocess.run(
            ["mv", "-T", "sticky/a", "to/a"], cwd=mounter.target, user=_NOBODY, group=_NOBODY, extra_groups=[],
            env={"LC_ALL": "C", "PATH": os.environ["PATH"]}, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        _make_the_kernel_forget()
        if _NOBODY in (folder_owner, owner):
            assert moved.returncode == 0, moved.stderr
            assert not (sticky / "a").exists()
        else:
            assert "Operation not permitted" in moved.stderr
            assert not (to / "a").exists()
        path = to / "a" if moved.returncode == 0 else sticky / "a"
        changed = _facts(path).pop("ctime_ns")
        assert changed >= before["ctime_ns"]
        assert _facts(path) == before | {"ctime_ns": changed}
        path.unlink()


@promise("A file made with `O_TMPFILE` is durable when `linkat` has given it its name")
def test_a_file_without_a_name_is_whole_when_it_has_one_and_its_server_is_killed(mounter: BucketMounter) -> None:
    mounter()
    libc = ctypes.CDLL(None, use_errno=True)
    at_fdcwd, at_empty_path = -100, 0x1000
    opened = [os.open(mounter.target, os.O_TMPFILE | os.O_RDWR, 0o640) for _ in range(3)]
    for fd in opened:
        assert os.fstat(fd).st_nlink == 0
        assert os.write(fd, b"bytes" * 100_000) == 500_000  # which the kernel may still have
    os.link(f"/proc/self/fd/{opened[0]}", mounter.target / "a", src_dir_fd=opened[0])
    if os.geteuid() == 0:  # before Linux 6.10 it takes CAP_DAC_READ_SEARCH
        assert not libc.linkat(opened[1], b"", at_fdcwd, bytes(mounter.target / "b"), at_empty_path)
    else:
        os.link(f"/proc/self/fd/{opened[1]}", mounter.target / "b", src_dir_fd=opened[1])
    assert os.fstat(opened[1]).st_nlink == 1
    with pytest.raises(PermissionError):
        os.link(mounter.target / "b", mounter.target / "c")
    mounter.kill()
    for fd in opened:
        with suppress(OSError):
            os.close(fd)
    assert {path.name: path.read_bytes() for path in mounter.target.iterdir()} == dict.fromkeys(
        "ab", b"bytes" * 100_000
    )
    mounter.flush()
    assert {path.name: path.read_bytes() for path in mounter.bucket.iterdir()} == dict.fromkeys(
        "ab", b"bytes" * 100_000
    )


@promise("FIFOs, sockets and device nodes are kept in the bucket, as objects without bytes")
@pytest.mark.parametrize("fuse", ["kernel", "pyfuse3"])
def test_a_fifo_works_and_devices_have_their_numbers(mounter: BucketMounter, fuse: str) -> None:
    mounter(settings=replace(mounter.settings, fuse=fuse))
    pipe, device = mounter.target / "pipe", mounter.target / "device"
    os.mkfifo(pipe, 0o600)
    end = os.open(pipe, os.O_RDWR)
    try:
        assert (os.write(end, b"through"), os.read(end, 100)) == (7, b"through")
    finally:
        os.close(end)
    with os.scandir(mounter.target) as entries:
        assert [(entry.name, entry.is_file(), entry.is_dir()) for entry in entries] == [("pipe", False, False)]
    if os.geteuid() == 0:
        os.mknod(device, stat.S_IFBLK | 0o600, os.makedev(259, 0x12345))
        found = device.stat()
        assert (found.st_mode, found.st_rdev) == (stat.S_IFBLK | 0o600, os.makedev(259, 0x12345))
        with pytest.raises(PermissionError):
            os.open(device, os.O_RDONLY)
    if fuse == "pyfuse3":
        with pytest.raises(OSError, match="not supported"):
            os.open(mounter.target, os.O_TMPFILE | os.O_WRONLY)
    pipe.rename(mounter.target / "renamed")
    assert (mounter.target / "renamed").is_fifo()
    mounter.flush()
    assert (mounter.bucket / "renamed").read_bytes() == b""


@promise("A time of access that somebody set is kept")
@pytest.mark.parametrize("fuse", ["kernel", "pyfuse3"])
def test_a_time_of_access_that_was_set_is_kept(mounter: BucketMounter, fuse: str) -> None:
    settings = replace(mounter.settings, fuse=fuse)
    mounter(settings=settings)
    path, other, link = (mounter.target / name for name in ("file", "other", "link"))
    for each in (path, other):
        each.write_bytes(b"x")
    link.symlink_to("file")
    os.utime(path, ns=(10**9 + 5, 2 * 10**9 + 7))
    os.utime(link, ns=(3 * 10**9, 4 * 10**9), follow_symlinks=False)
    mounter.unmount()
    mounter(settings=settings)
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (10**9 + 5, 2 * 10**9 + 7)
    assert (link.lstat().st_atime_ns, link.lstat().st_mtime_ns) == (3 * 10**9, 4 * 10**9)
    assert path.read_bytes() == b"x"
    assert path.stat().st_atime_ns == 10**9 + 5
    assert other.stat().st_atime_ns == other.stat().st_mtime_ns


@promise("Extended attributes (`user.*`) of files and folders are kept in the bucket")
@promise("Extended attributes that s3fs-fuse wrote are read, and it reads ours")
def test_extended_attributes_are_kept(mounter: BucketMounter, rclone_s3: RcloneS3) -> None:
    bucket = mounter.bucket.parent.name
    kept = {"Bucket": bucket, "Key": "run/s3fs", "Metadata": {"xattr": "%7B%22user.theirs%22%3A%22AP8%3D%22%7D"}}
    rclone_s3.client().put_object(**kept, Body=b"x")
    mounter()
    folder, path = mounter.target / "folder", mounter.target / "folder" / "file"
    folder.mkdir()
    path.write_bytes(b"x")
    for each in (folder, path):
        os.setxattr(each, "user.ours", b"\0\xff")
        os.setxattr(each, "user.empty", b"", os.XATTR_CREATE)
    opened = os.open(folder, os.O_RDONLY)
    os.fsync(opened)
    os.close(opened)
    mounter.kill()
    os.setxattr(path, "user.ours", b"new", os.XATTR_REPLACE)
    os.removexattr(path, "user.empty")
    moved = path.rename(folder / "moved")
    assert os.listxattr(moved) == ["user.ours"]
    assert os.getxattr(moved, "user.ours") == b"new"
    assert set(os.listxattr(folder)) == {"user.ours", "user.empty"}
    assert os.getxattr(mounter.target / "s3fs", "user.theirs") == b"\0\xff"
    asked: list[tuple[int, Callable[[], object]]] = [
        (errno.EEXIST, lambda: os.setxattr(moved, "user.ours", b"", os.XATTR_CREATE)),
        (errno.ENODATA, lambda: os.setxattr(moved, "user.other", b"", os.XATTR_REPLACE)),
        (errno.ENODATA, lambda: os.getxattr(moved, "user.other")),
        (errno.ENODATA, lambda: os.removexattr(moved, "user.other")),
        (errno.EOPNOTSUPP, lambda: os.getxattr(moved, "security.capability")),
        (errno.EOPNOTSUPP, lambda: os.setxattr(mounter.target, "user.ours", b"")),
        (errno.E2BIG, lambda: os.setxattr(moved, "user.other", b"x" * 1700)),
    ]
    for number, ask in asked:
        with pytest.raises(OSError, match=re.escape(os.strerror(number))):
            ask()
    mounter.flush()
    found = rclone_s3.client().head_object(Bucket=bucket, Key="run/folder/moved")["Metadata"]
    assert {name.lower(): text for name, text in found.items()}["xattr"] == "%7B%22user.ours%22%3A%22bmV3%22%7D"


@promise("Set-user-ID and set-group-ID go when a user writes to a file, or it gets another owner")
def test_who_writes_to_a_file_takes_its_privileges_away(mounter: BucketMounter) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    mounter(allow_other=True)
    path = mounter.target / "file"
    path.write_bytes(b"bytes")

    def mode_after(change: Callable[[int], object], user: int = _NOBODY, group: int = 0, before: int = 0o6777) -> int:
        path.chmod(before)
        os.setegid(group)
        os.seteuid(user)
        try:
            fd = os.open(path, os.O_RDWR)
            change(fd)
            os.close(fd)
        finally:
            os.seteuid(0)
            os.setegid(0)
        return mode()

    def mode() -> int:  # asks the kernel for nothing else, unlike os.stat
        return int(subprocess.run(["stat", "-c", "%a", path], check=True, capture_output=True).stdout, 8)

    def write_past_the_page_cache(_fd: int) -> None:
        direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
        os.writev(direct, [mmap.mmap(-1, mmap.PAGESIZE)])
        os.close(direct)

    changes: list[Callable[[int], object]] = [
        lambda fd: os.write(fd, b"x"),
        write_past_the_page_cache,
        lambda fd: os.ftruncate(fd, 1),
        lambda _fd: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)),
        lambda fd: os.posix_fallocate(fd, 0, 10),
        lambda fd: os.copy_file_range(fd, fd, 2, 0, 4),
    ]
    assert list(map(mode_after, changes)) == [0o777] * len(changes)
    assert mode_after(changes[0], user=0) == 0o6777
    for change in changes:  # without the right to execute, the group's members keep it
        assert mode_after(change, before=0o6666) == 0o2666
        assert mode_after(change, group=_NOBODY, before=0o6666) == 0o666
    for owner in ((5, 5), (-1, -1)):
        path.chmod(0o6777)
        os.chown(path, *owner)
        assert mode() == 0o777
    mounter.unmount()
    mounter()
    assert mode() == 0o777


@promise("Who reads a file sees what an asynchronous direct write has put there")
def test_reads_after_asynchronous_direct_writes_see_what_those_wrote(mounter: BucketMounter, bucket: Path) -> None:
    mounter(url=f"file://{bucket}")
    path, size, enough = mounter.target / "file", 640 * 1024, threading.Event()
    path.write_bytes(bytes(size))

    def read_on(read: Callable[[], object]) -> None:  # pages come and go while a write is on its way
        while not enough.is_set():
            read()

    def read_mapped() -> None:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(file, size, prot=mmap.PROT_READ) as pages:
            bytes(pages)
        os.close(file)

    readers = [threading.Thread(target=read_on, args=[read]) for read in (path.read_bytes, read_mapped)]
    for reader in readers:
        reader.start()
    try:
        for number in range(1, 26):
            content = bytes([number]) * size
            file = os.open(path, os.O_RDWR | os.O_DIRECT)
            write_asynchronously(file, content)
            os.close(file)
            assert path.read_bytes() == content, f"write {number}"
    finally:
        enough.set()
        for reader in readers:
            reader.join()


def _facts(path: Path) -> dict[str, int]:
    found = path.stat()
    names = ("ino", "mode", "uid", "gid", "size", "mtime_ns", "ctime_ns")
    return {name: getattr(found, f"st_{name}") for name in names}


def _make_the_kernel_forget() -> None:
    """Have the kernel drop the directory entries and inodes that nobody uses (proc(5), drop_caches), as it does when
    memory is short."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("2")
    except OSError as exc:
        pytest.skip(f"the kernel cannot be made to forget here: {exc}")  # as in a container


@promise("A file keeps inode number and times when the kernel forgets it and asks again (the last 50,000)")
@pytest.mark.parametrize("fuse", ["kernel", "pyfuse3"])
def test_what_changes_twice_within_a_tick_of_the_clock_keeps_its_times(mounter: BucketMounter, fuse: str) -> None:
    """The kernel tells a time of change when it is another one, and its clock moves on every few milliseconds."""
    mounter(settings=replace(mounter.settings, fuse=fuse))
    paths = [mounter.target / f"{number}" for number in range(20)]
    for path in paths:
        path.write_bytes(b"one")
        path.write_bytes(b"second")
    facts = [_facts(path) for path in paths]
    _make_the_kernel_forget()
    assert [_facts(path) for path in paths] == facts


@promise("A killed server is replaced, and its successor has all that was acknowledged")
def test_a_killed_server_is_replaced_and_what_it_acknowledged_is_there(mounter: BucketMounter) -> None:
    first = mounter()
    for number in range(3):
        (mounter.target / f"{number}.pt").write_bytes(bytes([number]) * 100_000)
        assert mounter.kill().restarts == number + 1
        for known in range(number + 1):
            assert (mounter.target / f"{known}.pt").read_bytes() == bytes([known]) * 100_000
    assert mounter.now().supervisor == first.supervisor
    mounter.flush()
    assert sorted(path.name for path in mounter.bucket.iterdir()) == ["0.pt", "1.pt", "2.pt"]
    assert len([m for m in fuse_mount.mounts() if m.mountpoint == str(mounter.target)]) == 1


@promise("A killed server is replaced, and its successor has all that was acknowledged")
@pytest.mark.slow
def test_the_folder_below_is_never_free_while_a_server_is_replaced(mounter: BucketMounter) -> None:
    if os.geteuid() != 0:
        pytest.skip("fusermount3 mounts on no dead mount: an ordinary user's mount leaves a gap")
    mounter()
    done, seen = threading.Event(), set()

    def write() -> None:
        while not done.is_set():
            try:
                (mounter.target / "a").write_text("text")
            except OSError as exc:
                seen.add(exc.errno)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(2):
            mounter.forget_state()
            mounter.kill()
    finally:
        done.set()
        writer.join()
    assert seen <= {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}
    mounter.unmount()
    assert list(mounter.target.iterdir()) == []


@promise("A killed supervisor costs nothing while the server lives")
def test_the_server_goes_on_without_its_supervisor(mounter: BucketMounter) -> None:
    info = mounter()
    assert fuse_mount.is_supervised(info)
    kill(info.supervisor)
    assert not fuse_mount.is_supervised(info)
    (mounter.target / "a").write_text("text")
    assert fuse_mount.bucket_status(mounter.now())["url"] == f"{mounter.url}/"
    mounter.unmount()
    assert (mounter.bucket / "a").read_text() == "text"


@promise("A killed server is replaced, and its successor has all that was acknowledged")
def test_daemon_supervisor_and_server_are_killed_one_after_another_and_nobody_remounts(mounter: BucketMounter) -> None:
    first = mounter()
    (mounter.target / "a").write_text("text")
    for pid in processes_with("DATACACHE_HOME", lambda value: value == str(mounter.settings.home)):
        if pid not in (first.supervisor, first.pid):
            kill(pid)
    kill(first.supervisor)
    folder = mounter.settings.home / "mounts"
    supervised = wait_until(folder, lambda: now if (now := mounter.now()).supervisor != first.supervisor else None)
    assert supervised.pid == first.pid
    fuse_mount.set_quota(supervised, 2**30)  # the server writes its state, with the supervisor that it has now
    assert mounter.now().supervisor == supervised.supervisor
    assert mounter.kill().supervisor == supervised.supervisor
    assert (mounter.target / "a").read_text() == "text"
    assert mounter.unmount()["files"] == 0


@promise("A killed supervisor costs nothing while the server lives")
def test_a_mount_whose_processes_were_all_killed_is_mounted_again(mounter: BucketMounter) -> None:
    mounter()
    (mounter.target / "a").write_bytes(b"x" * 1_000_000)
    info = mounter.kill_all()
    assert mount_is_dead(info)
    with pytest.raises(MountError, match="processes were killed") as caught:
        fuse_mount.bucket_status(mounter.now())
    assert caught.value.hint.endswith(f"dsctl mount --rw {mounter.url}/ {mounter.target}")
    mounter()
    assert (mounter.target / "a").read_bytes() == b"x" * 1_000_000
    mounter.unmount()
    assert (mounter.bucket / "a").read_bytes() == b"x" * 1_000_000


def test_who_mounts_again_what_is_brought_back_meanwhile_is_told_so(
    mounter: BucketMounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounter()
    before = mounter.kill_all()

    def bring_back() -> None:
        """As the keeper does, after it was seen to be dead."""
        arguments = ["--bucket", before.config.to_json(), "--only-if-dead"]
        files = BucketFiles(mounter.settings.home, mounter.target)
        process.start(arguments, files, mounter.settings.environment(), foreground=False)
        wait_until(files.folder, lambda: mounter.now().pid not in (0, before.pid))

    monkeypatch.setattr(session, "check_device", bring_back)
    with pytest.raises(MountError, match="brought back meanwhile"):
        mounter()
    mounter.unmount()


@promise("A killed supervisor costs nothing while the server lives")
def test_a_dead_mount_can_be_taken_away(mounter: BucketMounter) -> None:
    mounter()
    mounter.kill_all()
    fuse_mount.take_away_dead(mounter.now())
    assert not os.path.ismount(mounter.target)
    assert fuse_mount.list_bucket_mounts(mounter.settings) == []


@promise("An area has one owner at a time, on whatever node")
def test_one_url_is_mounted_once_and_the_other_mount_is_named(mounter: BucketMounter, tmp_path: Path) -> None:
    mounter()
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(MountError, match=f"in use by {mounter.target} on") as caught:
        mounter(target=other)
    assert caught.value.hint == f"Unmount there: dsctl umount {mounter.target}"
    assert not os.path.ismount(other)
    with pytest.raises(MountError, match="is mounted already"):
        mounter()


@promise("`dsctl flush` returns when all that was acknowledged before is in the bucket, or fails with the reason")
def test_a_flush_goes_on_when_the_server_dies(mounter: BucketMounter, proxy: FaultProxy) -> None:
    info = mounter()
    assert os.listdir(mounter.target) == []
    proxy.refuse()
    (mounter.target / "a").write_text("text")
    killed = threading.Event()

    def progress(_status: object) -> None:
        if not killed.is_set():
            killed.set()
            kill(info.pid)
            proxy.accept()

    fuse_mount.flush_mount(info, timeout_s=60, progress=progress)
    assert killed.is_set()
    assert (mounter.bucket / "a").read_text() == "text"


@promise("A read-write mount that cannot be served again is an error and no wait")
@pytest.mark.slow
def test_a_supervisor_gives_up_on_servers_that_cannot_start_and_says_so(mounter: BucketMounter) -> None:
    info = mounter()
    (mounter.target / "a").write_text("kept")
    area = Path(info.staging) / "area.json"
    kept = area.read_bytes()
    area.write_text("{")
    with waiting_for_the_end_of(info.supervisor):
        kill(info.pid)
        with pytest.raises(OSError, match=r"Transport endpoint|Software caused"):
            os.statvfs(mounter.target)
    assert mount_is_dead(info)  # nobody takes the folder below for the bucket
    assert keeping.known(mounter.settings.home) == {}
    with pytest.raises(MountError, match=r"5 servers in a row .* area.json"):
        fuse_mount.bucket_status(mounter.now())
    assert "is given up" in info.log.read_text()
    area.write_bytes(kept)
    mounter()
    assert (mounter.target / "a").read_text() == "kept"


@promise("An unmount uploads first, or says what is left and how it gets to the bucket")
def test_an_unmount_by_hand_uploads_before_the_server_ends(mounter: BucketMounter) -> None:
    info = mounter()
    (mounter.target / "a").write_text("text")
    with waiting_for_the_end_of(info.supervisor), waiting_for_the_end_of(info.pid):
        unmount_by_hand(mounter.target)
    assert (mounter.bucket / "a").read_text() == "text"
    assert fuse_mount.list_bucket_mounts(mounter.settings) == []


@pytest.mark.parametrize("who", ["supervisor", "pid"])
def test_a_mount_that_is_told_to_end_uploads_and_unmounts(mounter: BucketMounter, who: str) -> None:
    info = mounter()
    (mounter.target / "a").write_text("text")
    busy = os.open(mounter.target / "a", os.O_RDONLY)
    with waiting_for_the_end_of(info.supervisor), waiting_for_the_end_of(info.pid):
        os.kill(getattr(info, who), signal.SIGTERM)
    with pytest.raises(OSError, match="not connected"):
        os.close(busy)
    assert (mounter.bucket / "a").read_text() == "text"
    assert not os.path.ismount(mounter.target)


def test_ctrl_c_ends_a_mount_in_the_foreground(mounter: BucketMounter) -> None:
    script = (
        "import sys, fuse_mount\n"
        "from datacache.settings import load_settings\n"
        "fuse_mount.mount_bucket(sys.argv[1], sys.argv[2], settings=load_settings(), foreground=True)\n"
    )
    root = str(Path(fuse_mount.__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", script, mounter.url, mounter.target],
        env=os.environ | {"PYTHONPATH": root},
        start_new_session=True,
    )
    folder = mounter.settings.home / "mounts"
    folder.mkdir(parents=True, exist_ok=True)
    wait_until(folder, lambda: fuse_mount.bucket_mount_at(mounter.target, mounter.settings))
    (mounter.target / "a").write_text("text")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 0
    assert (mounter.bucket / "a").read_text() == "text"
    assert not os.path.ismount(mounter.target)


def test_a_busy_mount_stays_and_who_uses_it_is_named(mounter: BucketMounter) -> None:
    mounter()
    (mounter.target / "a").write_text("text")
    with open(mounter.target / "a"):
        with pytest.raises(MountError, match=f"is busy: used by {os.getpid()} "):
            mounter.unmount()
        (mounter.target / "b").write_text("goes on")
        info = mounter.now()
        assert fuse_mount.stop_server(info, flush_s=0, lazy=True)["url"] == f"{mounter.url}/"
        assert not os.path.ismount(mounter.target)
        (ending,) = fuse_mount.list_bucket_mounts(mounter.settings, ending=True)
        assert (ending.pid, fuse_mount.is_mounted(ending)) == (info.pid, False)
        assert fuse_mount.bucket_status(ending)["url"] == f"{mounter.url}/"
        assert fuse_mount.list_bucket_mounts(mounter.settings) == []


@promise("The next server of the same boot knows what the former one knew, also while the store is away")
def test_a_store_that_is_down_does_not_keep_a_known_url_from_being_mounted(
    mounter: BucketMounter, proxy: FaultProxy
) -> None:
    mounter()
    assert os.listdir(mounter.target) == []
    proxy.refuse()
    (mounter.target / "a").write_text("text")
    mounter.unmount(flush_s=0)
    info = mounter()
    assert info.notes[0] == "1 file, 4 B written earlier is being uploaded"
    assert "does not answer" in info.notes[1]
    assert (mounter.target / "a").read_text() == "text"
    with pytest.raises(UploadError):
        fuse_mount.flush_mount(info, timeout_s=1, progress=lambda _status: None)
    left = mounter.unmount(flush_s=0)
    assert (left["files"], left["bytes"]) == (1, 4)
    assert not (mounter.bucket / "a").exists()
    proxy.accept()
    again = mounter()
    assert again.notes == ("1 file, 4 B written earlier is being uploaded",)
    mounter.flush()
    assert (mounter.bucket / "a").read_text() == "text"


@promise("With the store away, work goes on in a root below 1,000 names that nobody has looked into")
def test_a_store_that_goes_down_before_anybody_looks_into_the_mount_keeps_nobody_from_working_in_it(
    mounter: BucketMounter, proxy: FaultProxy
) -> None:
    mounter.bucket.mkdir(exist_ok=True)
    (mounter.bucket / "there").write_text("theirs")
    info = mounter(ttl_s=0.2)
    proxy.refuse()
    assert os.listdir(mounter.target) == ["there"]
    (mounter.target / "folder").mkdir()
    (mounter.target / "folder" / "a").write_text("text")
    (mounter.target / "b").write_text("text")
    assert sorted(os.listdir(mounter.target)) == ["b", "folder", "there"]
    assert fuse_mount.bucket_status(info)["store_problem"]
    proxy.accept()
    mounter.flush()
    assert (mounter.bucket / "folder" / "a").read_text() == "text"


def test_a_store_that_is_down_is_said_when_a_new_url_is_mounted(mounter: BucketMounter, proxy: FaultProxy) -> None:
    proxy.refuse()
    with pytest.raises(MountError):
        mounter()
    assert not os.path.ismount(mounter.target)


@promise("A mount that fails leaves no area behind")
def test_a_bucket_that_is_not_there_and_wrong_credentials_are_said_before_anything_is_mounted(
    mounter: BucketMounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MountError, match="rw-nobody-made-this"):
        mounter(url="s3://rw-nobody-made-this/run")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(MountError) as caught:
        mounter()
    assert caught.value.hint
    assert not os.path.ismount(mounter.target)
    assert list(mounter.settings.staging_root.iterdir()) == []  # no area is left over for what never was


def test_mount_points_and_ways_to_acknowledge_are_checked(mounter: BucketMounter, tmp_path: Path) -> None:
    with pytest.raises(MountError, match="does not exist"):
        mounter(target=tmp_path / "missing")
    (mounter.target / "something").touch()
    with pytest.raises(MountError, match="not empty"):
        mounter()
    with pytest.raises(UsageError, match="no way to acknowledge"):
        mounter(ack="perhaps")


@promise("Mounting warns of a staging folder in memory or with little room")
def test_whoever_mounts_hears_of_an_overlap_and_of_staging_in_memory(mounter: BucketMounter, tmp_path: Path) -> None:
    mounter()
    other = tmp_path / "other"
    other.mkdir()
    overlapping = mounter(url=f"{mounter.url}/sub", target=other)
    assert f"{mounter.url}/ is mounted at {mounter.target}" in overlapping.notes[0]
    fuse_mount.stop_server(overlapping, flush_s=0, lazy=False)
    if session.mount_at("/dev/shm") is None:
        pytest.skip("there is no tmpfs here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        staged = mounter(url=f"{mounter.url}2", target=other, staging=Path(memory))
        assert "is in memory (tmpfs)" in staged.notes[0]
        fuse_mount.stop_server(staged, flush_s=0, lazy=False)


def test_staging_can_be_put_elsewhere(mounter: BucketMounter, tmp_path: Path) -> None:
    info = mounter(staging=tmp_path / "staging", ack="uploaded")
    assert Path(info.staging).parent == tmp_path / "staging"
    (mounter.target / "a").write_text("text")
    assert (mounter.bucket / "a").read_text() == "text"  # close returned when it was there


def _python_for_nobody() -> str | None:
    check = "import sys; sys.exit(sys.version_info[:2] != tuple(map(int, sys.argv[1:])))"
    version = [str(part) for part in sys.version_info[:2]]
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            if not subprocess.run([python, "-c", check, *version], user=65534, group=65534, extra_groups=[]).returncode:
                return python
        except OSError:
            continue
    return None


def test_an_ordinary_user_mounts_kills_and_unmounts(mounter: BucketMounter, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; the other tests ran through fusermount3 then")
    if not os.stat("/dev/fuse").st_mode & stat.S_IROTH:
        pytest.skip("/dev/fuse is not readable for other users here (chmod 666 /dev/fuse)")
    python = _python_for_nobody()
    if python is None:
        pytest.skip("no Python of this version that other users may run")
    mine = tmp_path / "nobody"
    (mine / "mnt").mkdir(parents=True)
    for path in (mine, mine / "mnt"):
        os.chown(path, 65534, 65534)
    script = (
        "import os, signal, sys\n"
        "sys.path[:0] = ['', *sys.argv[3:]]\n"
        "import fuse_mount\n"
        "from datacache.settings import load_settings\n"
        "from tests.fuse_mount.mount_processes import BucketMounter\n"
        "from pathlib import Path\n"
        "mounter = BucketMounter(load_settings(), sys.argv[1], Path(sys.argv[2]), Path())\n"
        "mounter()\n"
        "(mounter.target / 'a').write_text('text')\n"
        "mounter.kill()\n"
        "print((mounter.target / 'a').read_text(), (mounter.target / 'a').stat().st_uid)\n"
        "print(mounter.unmount()['files'], os.path.ismount(mounter.target))\n"
    )
    root = str(Path(fuse_mount.__file__).parent.parent)
    packages = [path for path in sys.path if path.endswith("-packages")]
    environment = os.environ | {"DATACACHE_HOME": str(mine / "home"), "HOME": str(mine)}
    environment["PYTHONPATH"] = os.pathsep.join([root, *packages])
    said = subprocess.run(
        [python, "-c", script, mounter.url, str(mine / "mnt")],
        user=65534,
        group=65534,
        extra_groups=[],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout.splitlines() == ["text 65534", "0 False"], said.stderr
    assert (mounter.bucket / "a").read_text() == "text"


def test_settings_of_the_mount_are_the_callers(mounter: BucketMounter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATACACHE_STAGING_BYTES", "64MiB")
    info = mounter(settings=load_settings())
    assert fuse_mount.bucket_status(info)["staging"]["limit_bytes"] == 64 * 2**20
