"""A server that is killed leaves all that it has told the kernel: the next one goes on with it.

The process is not killed here but abandoned in the same way: nothing of it is made durable, its memory is not looked at
again, and the next one has the staging area's files and what was kept. `test_bucket_survives.py` kills real ones.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from datacache import api
from datacache.core.errors import StagingError, StagingFullError
from datacache.settings import Settings
from datacache.writeback.journal.journal import Journal
from datacache.writeback.model import decode_pending
from datacache.writeback.state_log import MAGIC, SLOT_BYTES, MemfdStateLog
from fuse_mount.bucket.fs.names import Changes
from fuse_mount.bucket.fs.open_file import BytesReader
from fuse_mount.bucket.fs.tree import FileRow, NodeRow
from tests.fuse_mount.kept_state import expect_kept
from tests.fuse_mount.test_bucket_fs import Directory, expect_errno
from tests.promises import promise

ROOT = 1
_SIZES = pytest.mark.parametrize("size", [9, 300_000], ids=["small", "large"])


class Request(NamedTuple):
    unique: int


class Mount:
    """One mount whose server is another one after each `kill`."""

    def __init__(self, bucket: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        # Nothing becomes durable but what is waited for.
        monkeypatch.setattr("datacache.writeback.engine._COMMIT_EVERY_S", 3600.0)
        self._url, self._settings = f"file://{bucket}", settings
        self.log = MemfdStateLog.make()
        self.now = self._start()

    def _start(self) -> Directory:
        live = api.open_bucket(
            self._url, self._settings, who="test", ttl_s=0.3, kept=MemfdStateLog(os.dup(self.log.fileno()))
        )
        live.status()  # as the server does: a section before all is taken up
        directory = Directory(live)
        live.uploader.start()
        directory.fs.finish_closing()
        expect_kept(directory.fs)
        return directory

    def kill(self) -> Directory:
        self.stop()
        self.now = self._start()
        return self.now

    def stop(self) -> None:
        live = self.now.live
        live.uploader.stop(5.0)
        live.quota.close()
        live.engine.area.close()  # its lock goes with a process
        live.engine.kept = MemfdStateLog.make()

    def do_as(self, unique: int) -> None:
        self.now.fs.notes.serve(Request(unique))


@pytest.fixture
def mount(bucket: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    made = Mount(bucket, settings, monkeypatch)
    yield made
    made.stop()


def read(directory: Directory, handle: int) -> bytes:
    return directory.do(directory.fs.handles.read, handle, 0, 1 << 20)


@promise("What was written to an open file, and not closed or synced, outlives the server")
@_SIZES
def test_what_was_written_to_a_file_that_is_open_is_there_and_can_be_gone_on_with(
    mount: Mount, bucket: Path, size: int
):
    handle = mount.now.create("a", b"x" * size)
    ino = mount.now.attr("a").ino
    after = mount.kill()
    assert after.attr("a").ino == ino
    assert after.names() == ["a"]
    assert read(after, handle) == b"x" * size
    after.do(after.fs.handles.write, handle, size, b"more")
    after = mount.kill()
    assert read(after, handle) == b"x" * size + b"more"
    after.close(handle)
    after.flush()
    assert (bucket / "a").read_bytes() == b"x" * size + b"more"
    assert mount.kill().read("a") == b"x" * size + b"more"


@promise("Files that programs keep open take 128 MiB of memory at most, however many they are")
def test_what_is_written_to_very_many_open_files_lies_on_the_disk_and_is_there(
    mount: Mount, bucket: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("datacache.writeback.state_log._MOST_SLOTS", 8)
    names = [f"{number}" for number in range(30)]
    (bucket / "0").write_bytes(b"")
    for name in names[20:]:
        mount.now.write(name, b"old" * 80_000)
    handles = {name: mount.now.create(name, b"x" * 200_000) for name in names[:20] if name != "0"}
    handles |= {name: mount.now.open(name, os.O_RDWR) for name in ("0", *names[20:])}
    for handle in handles.values():
        mount.now.do(mount.now.fs.handles.write, handle, 0, b"new")
    assert os.fstat(mount.log.fileno()).st_blocks * 512 < 20 * SLOT_BYTES
    after = mount.kill()
    for handle in handles.values():
        after.do(after.fs.handles.write, handle, 5, b"newer")
    after = mount.kill()
    for handle in handles.values():
        after.close(handle)
    after.flush()
    assert (bucket / "0").read_bytes() == b"new\0\0newer"
    for name in names[1:20]:
        assert (bucket / name).read_bytes() == b"newxxnewer" + b"x" * 199_990
    for name in names[20:]:
        assert (bucket / name).read_bytes() == b"newolnewer" + (b"old" * 80_000)[10:]


@promise("Files that programs keep open take 128 MiB of memory at most, however many they are")
def test_the_bytes_of_very_many_open_files_are_not_kept_in_memory_to_be_read(
    mount: Mount, bucket: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fuse_mount.bucket.fs.files._MOST_IN_MEMORY", 8)
    for number in range(20):
        mount.now.write(f"{number}", b"%d" % number * 50_000)
    handles = [mount.now.open(f"{number}", os.O_RDONLY) for number in range(20)]
    for _ in range(2):
        assert [read(mount.now, handle)[:2] for handle in handles] == [(b"%d" % n * 2)[:2] for n in range(20)]
        mount.now.flush()
    readers = [reader for reader in gc.get_objects() if isinstance(reader, BytesReader)]
    assert len(readers) == 8
    for handle in handles:
        mount.now.close(handle)


@_SIZES
def test_a_part_of_an_object_that_was_changed_and_not_closed_is_there(mount: Mount, bucket: Path, size: int):
    (bucket / "a").write_bytes(b"x" * size)
    handle = mount.now.open("a", os.O_RDWR)
    mount.now.do(mount.now.fs.handles.write, handle, 1, b"yy")
    mount.now.do(mount.now.fs.names.setattr, mount.now.attr("a").ino, Changes(size=size - 1), handle)
    after = mount.kill()
    assert read(after, handle) == b"xyy" + b"x" * (size - 4)
    after.close(handle)
    after.flush()
    assert (bucket / "a").read_bytes() == b"xyy" + b"x" * (size - 4)


@_SIZES
@pytest.mark.parametrize("uploaded", [False, True])
def test_a_deleted_file_that_is_open_is_there_for_who_has_it_open(
    mount: Mount, bucket: Path, size: int, uploaded: bool
):
    mount.now.write("a", b"x" * size)
    if uploaded:
        mount.now.flush()
    handle = mount.now.open("a", os.O_RDWR)
    mount.now.unlink("a")
    after = mount.kill()
    assert read(after, handle) == b"x" * size
    after.do(after.fs.handles.write, handle, 0, b"y")
    after = mount.kill()
    assert after.names() == []
    assert read(after, handle) == b"y" + b"x" * (size - 1)
    after.close(handle)
    after.flush()
    assert list(bucket.iterdir()) == []
    assert after.staged() == []


@_SIZES
def test_a_file_without_a_name_can_be_given_one(mount: Mount, bucket: Path, size: int):
    handle, made = mount.now.do(mount.now.fs.names.create_unnamed, ROOT, mode=0o640, uid=5, gid=6)
    mount.now.do(mount.now.fs.handles.write, handle, 0, b"x" * size)
    after = mount.kill()
    assert after.do(after.fs.names.link, made.ino, ROOT, b"a", lambda: None).ino == made.ino
    after = mount.kill()
    after.close(handle)
    after.flush()
    assert (bucket / "a").read_bytes() == b"x" * size


def test_a_file_that_was_being_closed_is_made_durable(mount: Mount, bucket: Path):
    handle = mount.now.create("a", b"bytes")
    assert mount.now.fs.handles.release(handle) is not None
    after = mount.kill()
    after.flush()
    assert (bucket / "a").read_bytes() == b"bytes"
    assert [node.open for node in after.fs.kept.tree if node.open is not None] == []


@promise("What a request was answered is so for the next server, durable or not")
def test_changes_that_are_not_durable_are_there(mount: Mount, bucket: Path):
    mount.now.write("a", b"bytes")
    mount.now.mkdir("d")
    mount.now.flush()
    mount.now.chmod("a", 0o600)
    names = mount.now.fs.names
    mount.now.do(names.rename, ROOT, b"a", mount.now.attr("d").ino, b"b")
    handle = mount.now.create("new", b"")
    mount.now.do(names.rename, ROOT, b"new", mount.now.attr("d").ino, b"newer")
    after = mount.kill()
    assert after.names("d") == ["b", "newer"]
    assert after.attr("d/b").mode & 0o777 == 0o600
    assert after.read("d/b") == b"bytes"
    after.close(handle)
    after.flush()
    assert sorted(path.name for path in (bucket / "d").iterdir()) == ["b", "newer"]


def test_a_new_file_that_follows_a_deletion_is_no_deletion(mount: Mount, bucket: Path):
    (bucket / "a").write_bytes(b"old")
    mount.now.unlink("a")
    handle = mount.now.create("a", b"new")
    after = mount.kill()
    assert after.read("a") == b"new"
    after.flush()
    after = mount.kill()
    assert after.read("a") == b"new"
    after.close(handle)
    after.flush()
    assert (bucket / "a").read_bytes() == b"new"


@promise("A request that is sent again is done once")
def test_what_was_done_and_not_answered_is_found_by_the_requests_number(mount: Mount):
    names, do = mount.now.fs.names, mount.now.do
    mount.do_as(10)
    handle, made = do(names.create, ROOT, b"a", os.O_WRONLY, mode=0o644, uid=0, gid=0)
    after = mount.kill()
    mount.do_as(10)
    assert after.fs.notes.take_done(10) == (made.ino, handle)
    do, names = after.do, after.fs.names
    for unique, call in enumerate(
        (
            lambda: do(names.mkdir, ROOT, b"d", mode=0o755, uid=0, gid=0),
            lambda: do(names.symlink, ROOT, b"l", b"a", uid=0, gid=0),
            lambda: do(names.rename, ROOT, b"l", ROOT, b"m"),
            lambda: do(names.unlink, ROOT, b"m"),
            lambda: do(names.rmdir, ROOT, b"d"),
            lambda: names.setxattr(made.ino, b"user.a", b"", os.XATTR_CREATE),
            lambda: names.removexattr(made.ino, b"user.a"),
            lambda: do(names.unlink, ROOT, b"a"),
        ),
        20,
    ):
        mount.do_as(unique)
        call()
    after = mount.kill()
    assert set(after.fs.notes.done) == {10, *range(20, 28)}  # by as many threads
    after.close(handle)
    after.live.engine.commit()
    assert after.names() == []


def test_of_one_threads_requests_only_the_last_is_remembered(mount: Mount):
    class Next:
        unique = 1

    mount.now.fs.notes.serve(Next)
    for name in (b"a", b"b", b"c"):
        mount.now.do(mount.now.fs.names.mkdir, ROOT, name, mode=0o755, uid=0, gid=0)
        Next.unique += 2
    assert list(mount.kill().fs.notes.done) == [5]


def test_a_listing_goes_on_after_the_last_name_that_was_told(mount: Mount):
    for number in range(10):
        mount.now.write(f"{number}", b"")
    names = mount.now.fs.names
    handle = mount.now.do(names.opendir, ROOT)
    assert [entry.name for entry in mount.now.do(names.readdir, handle, 0)][:4] == ["0", "1", "2", "3"]
    names.note_told(handle, 0, ["0", "1", "2", "3"])
    for number in (0, 2, 3, 5):  # as rm -r does
        mount.now.unlink(f"{number}")
    after = mount.kill()
    assert [entry.name for entry in after.do(after.fs.names.readdir, handle, 4)] == ["4", "6", "7", "8", "9"]
    assert [entry.name for entry in after.do(after.fs.names.readdir, handle, 5)] == ["6", "7", "8", "9"]
    after = mount.kill()
    assert [entry.name for entry in after.do(after.fs.names.readdir, handle, 2)] == ["4", "6", "7", "8", "9"]
    assert [entry.name for entry in after.do(after.fs.names.readdir, handle, 0)] == ["1", "4", "6", "7", "8", "9"]


def test_a_file_whose_write_was_refused_is_spoiled_for_its_writer_still(mount: Mount):
    handle = mount.now.create("a", b"bytes")
    mount.now.fs.handles.spoil(handle, StagingFullError("the disk is full"), 4)
    mount.now.live.engine.losses.save()
    after = mount.kill()
    with expect_errno(errno.ENOSPC):
        after.fs.handles.flush(handle)
    assert after.names() == []
    assert [loss.key for loss in after.live.engine.losses.all()] == ["a"]


def test_a_file_that_is_uploaded_after_the_kill_is_the_same_inode(mount: Mount, bucket: Path):
    mount.now.live.uploader.stop(5.0)
    mount.now.write("a", b"bytes")
    handle, ino = mount.now.open("a"), mount.now.attr("a").ino
    after = mount.kill()
    after.flush()
    assert (bucket / "a").read_bytes() == b"bytes"
    assert after.attr("a").ino == ino
    assert read(after, handle) == b"bytes"


def test_what_the_kernel_forgot_is_forgotten(mount: Mount):
    mount.now.mkdir("d")
    mount.now.write("d/a", b"bytes")
    mount.now.attr("d/a")
    known = mount.now.told
    after = mount.kill()
    assert {node.ino: node.lookups for node in after.fs.kept.tree} == {
        ROOT: 1, **{ino: known.count(ino) for ino in set(known)},
    }  # fmt: skip
    mount.now.told = known
    after.forget_all()
    after = mount.kill()
    assert [node.lookups for node in after.fs.kept.tree if node.ino != ROOT] == [0, 0]


def test_attributes_of_the_root_are_kept(mount: Mount):
    mount.now.do(mount.now.fs.names.setattr, ROOT, Changes(mode=0o700))
    assert mount.kill().attr("").mode & 0o777 == 0o700


def test_with_a_journal_that_cannot_be_written_what_was_recorded_is_recorded_again(
    mount: Mount, bucket: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise StagingError("the disk does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(mount.now.live.engine._journal, "commit", refuse)
        handle = mount.now.create("a", b"bytes")
        settle: Callable[[], None] | None = mount.now.fs.handles.flush(handle)
        assert settle is not None
        with pytest.raises(StagingError):
            settle()
        after = mount.kill()
    after.close(handle)
    after.flush()
    assert (bucket / "a").read_bytes() == b"bytes"


def test_what_is_kept_has_the_version_that_it_says():
    """A server of another version of the package reads this. A field at the end that has a default needs no other
    version; anything else needs another `MAGIC`, and then files that are open do not outlive the upgrade."""
    assert {MAGIC: (NodeRow._fields, FileRow._fields)} == {
        b"dckept02": (
            ("parent", "name", "is_folder", "lookups", "ctime_ns", "mtime_ns", "is_gone", "cached"),
            ("attributes", "content", "base", "staged", "slot", "size_bytes", "is_dirty", "name_state", "spoiled"),
        )
    }


def test_a_long_log_is_not_written_anew_before_it_is_taken_up(mount: Mount, monkeypatch: pytest.MonkeyPatch):
    mount.now.write("a", b"bytes")
    handle, ino = mount.now.create("b", b"more"), mount.now.attr("a").ino
    mount.now.chmod("a", 0o600)  # not durable: it is recorded again, which makes the log longer
    monkeypatch.setattr("datacache.writeback.state_log._LEAST_BYTES", 16)
    after = mount.kill()
    assert after.attr("a").ino == ino
    assert read(after, handle) == b"more"
    after.close(handle)


def test_another_thread_makes_nothing_durable_of_a_change_that_is_not_kept_yet(mount: Mount, bucket: Path):
    mount.now.live.uploader.stop(5.0)
    mount.now.write("a", b"bytes")
    engine, ino = mount.now.live.engine, mount.now.attr("a").ino
    with engine.lock:
        mount.now.fs.names.setattr(ino, Changes(mode=0o600))
        engine._journal.commit()  # of a thread that is past the lock
        copy = bucket.parent / "killed-here"
        shutil.copytree(engine.area.journal_folder, copy)
    journal = Journal(copy)
    [(key, header, size)] = journal.records()
    journal.close()
    attributes = decode_pending(key, header, size).attributes
    assert attributes is not None
    assert attributes.mode & 0o777 == 0o644
    assert mount.kill().attr("a").mode & 0o777 == 0o600
