"""A live bucket as a directory, without a kernel: what others do to the bucket, what is known of it, and outages."""

from __future__ import annotations

import errno
import os
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from datacache import api
from datacache.core.boot import boot_id
from datacache.core.errors import StagingError, StoreUnavailableError, UploadError
from datacache.settings import Settings
from datacache.writeback.live import LiveBucket
from datacache.writeback.remote import known
from datacache.writeback.sections import Load, complete
from datacache.writeback.staging import losses
from datacache.writeback.state_log import MemfdStateLog
from fuse_mount.bucket.fs import nodes as bucket_nodes
from fuse_mount.bucket.fs import tree as bucket_tree
from fuse_mount.bucket.fs import view as bucket_view
from fuse_mount.bucket.fs.bucket_fs import BucketFs
from fuse_mount.bucket.fs.names import Changes
from fuse_mount.bucket.fs.nodes import Attr
from tests.conformance.faults import Answer, Fault, FaultProxy
from tests.fuse_mount.kept_state import expect_kept
from tests.promises import promise
from tests.servers import RcloneS3

ROOT = 1
_LARGE = b"x" * 300_000  # more than is fetched when it is opened to be written


class Directory:
    """Paths in place of inode numbers; waits where a call needs something."""

    def __init__(self, live: LiveBucket) -> None:
        self.live = live
        self.told: list[int] = []
        """Inode numbers that a kernel would know, one for each time it was told."""
        self.stale: list[str] = []
        self.fs = BucketFs(
            live, uid=os.getuid(), gid=os.getgid(), on_stale=lambda _parent, name: self.stale.append(name)
        )

    def do(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return complete(partial(call, *args, **options))
        finally:
            if isinstance(self.fs.engine.kept, MemfdStateLog):
                expect_kept(self.fs)

    def attr(self, path: str) -> Attr:
        found = self.do(self.fs.names.getattr, ROOT)
        for name in path.split("/") if path else []:
            found = self.do(self.fs.names.lookup, found.ino, name.encode())
            self.told.append(found.ino)
        return found

    def forget_all(self) -> None:
        """Do what a kernel does that is short of memory: forget what is in a folder, then the folder."""
        for ino in reversed(self.told):
            self.fs.names.forget(ino, 1)
        self.told.clear()

    def _place(self, path: str) -> tuple[int, bytes]:
        folder, _, name = path.rpartition("/")
        return self.attr(folder).ino, name.encode()

    def create(self, path: str, data: bytes) -> int:
        handle, made = self.do(self.fs.names.create, *self._place(path), os.O_WRONLY, mode=0o644, uid=0, gid=0)
        self.told.append(made.ino)
        self.do(self.fs.handles.write, handle, 0, data)
        return handle

    def close(self, handle: int) -> None:
        for settle in (self.fs.handles.flush(handle), self.fs.handles.release(handle)):
            if settle is not None:
                settle()

    def write(self, path: str, data: bytes) -> None:
        self.close(self.create(path, data))

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        return self.do(self.fs.handles.open, self.attr(path).ino, flags)

    def read(self, path: str) -> bytes:
        handle = self.open(path)
        try:
            return self.do(self.fs.handles.read, handle, 0, 1 << 20)
        finally:
            self.close(handle)

    def names(self, path: str = "") -> list[str]:
        handle = self.do(self.fs.names.opendir, self.attr(path).ino)
        return [entry.name for entry in self.do(self.fs.names.readdir, handle, 0)]

    def mkdir(self, path: str) -> None:
        self.told.append(self.do(self.fs.names.mkdir, *self._place(path), mode=0o755, uid=0, gid=0).ino)
        self.fs.handles.commit()

    def unlink(self, path: str) -> None:
        self.do(self.fs.names.unlink, *self._place(path))
        self.fs.handles.commit()

    def rmdir(self, path: str) -> None:
        self.do(self.fs.names.rmdir, *self._place(path))
        self.fs.handles.commit()

    def rename(self, old: str, new: str) -> None:
        self.do(self.fs.names.rename, *self._place(old), *self._place(new))
        self.fs.handles.commit()

    def chmod(self, path: str, mode: int) -> None:
        self.do(self.fs.names.setattr, self.attr(path).ino, Changes(mode=mode))

    def flush(self) -> None:
        self.live.flush(30.0)

    def staged(self) -> list[Path]:
        return [path for path in self.live.engine.area.data_folder.rglob("*") if path.is_file()]


Open = Callable[..., Directory]


@pytest.fixture
def opened(bucket: Path, settings: Settings) -> Iterator[Open]:
    """Opens the bucket; a second call is the next process."""
    current: list[LiveBucket] = []

    def make(url: str = f"file://{bucket}", **options: Any) -> Directory:
        if current:
            current.pop().close()
        options = {"who": "test", "ttl_s": 0.3, "kept": MemfdStateLog.make()} | options
        current.append(api.open_bucket(url, settings, **options))
        directory = Directory(current[-1])
        current[-1].uploader.start()
        return directory

    yield make
    for live in current:
        live.close()


@contextmanager
def expect_errno(number: int) -> Iterator[None]:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - its errno is looked at
        yield
    assert caught.value.errno == number


def until(look: Callable[[], Any], value: Any) -> None:
    """Ask until it is so; what was known is used for a while first."""
    import threading

    pause = threading.Event()
    for _ in range(1200):  # a store that was silent for a moment is not asked again for 35 s
        if look() == value:
            return
        pause.wait(0.05)
    assert look() == value


@promise("A new file that was never closed or synced is not in the bucket")
def test_a_new_file_is_in_the_bucket_only_after_it_was_closed(opened: Open, bucket: Path):
    directory = opened()
    handle = directory.create("a", b"bytes")
    directory.flush()
    assert directory.names() == ["a"]
    assert os.listdir(bucket) == []
    directory.close(handle)
    directory.flush()
    assert (bucket / "a").read_bytes() == b"bytes"


@promise("`st_nlink` of a folder counts the folders in it where its listing is known, and else is 1")
def test_links_of_a_folder_are_exact_or_not_told(opened: Open, bucket: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in ("theirs/x", "theirs/y"):
        (bucket / folder).mkdir(parents=True)
        (bucket / folder / "file").write_bytes(b"")
    directory = opened(ttl_s=60.0)

    def links(*paths: str) -> list[int]:
        return [directory.attr(path).links for path in paths]

    assert links("theirs", "theirs/x") == [1, 1]
    assert directory.names("theirs") == ["x", "y"]
    assert links("theirs") == [4]
    for made in ("ours", "ours/a", "ours/b", "theirs/z"):
        directory.mkdir(made)
    directory.write("ours/file", b"")
    assert links("ours", "ours/a", "theirs") == [4, 2, 5]
    directory.rename("ours/b", "theirs/b")
    directory.rename("theirs/x", "ours/a/x")
    directory.rmdir("theirs/z")
    assert links("ours", "ours/a", "theirs") == [3, 3, 4]
    directory.write("theirs/y/file", b"new")
    directory.flush()
    assert links("theirs") == [4]
    monkeypatch.setattr(bucket_view, "_MOST_COUNTED", -1)
    assert links("theirs") == [1]


@promise("A file made with `O_TMPFILE` gets to the bucket whole once it is given its name, or not at all")
@pytest.mark.parametrize("data", [b"bytes", _LARGE], ids=["small", "large"])
def test_a_file_without_a_name_is_in_the_bucket_only_when_it_was_given_one(opened: Open, bucket: Path, data: bytes):
    directory = opened()
    names = directory.fs.names

    def make() -> tuple[int, int]:
        handle, made = directory.do(names.create_unnamed, ROOT, mode=0o640, uid=5, gid=6)
        assert made.links == 0
        directory.do(directory.fs.handles.write, handle, 0, data)
        return handle, made.ino

    def link(ino: int, name: bytes, gather: Callable[[], None] = lambda: None) -> Attr:
        return directory.do(names.link, ino, ROOT, name, gather)

    unnamed, _ = make()
    directory.fs.handles.fsync(unnamed)()
    directory.close(unnamed)
    directory.flush()
    assert (directory.names(), directory.staged(), os.listdir(bucket)) == ([], [], [])
    handle, ino = make()
    more = len(data)
    linked = link(ino, b"a", lambda: directory.do(directory.fs.handles.write, handle, more, b"late"))
    assert (linked.ino, linked.links, linked.mode, linked.uid) == (ino, 1, stat.S_IFREG | 0o640, 5)
    assert directory.attr("a") == linked
    directory.flush()
    assert (bucket / "a").read_bytes() == data + b"late"
    with expect_errno(errno.EPERM):  # it has its name
        link(ino, b"b")
    directory.do(directory.fs.handles.write, handle, more, b"then")
    directory.close(handle)
    directory.flush()
    assert {path.name: path.read_bytes() for path in bucket.iterdir()} == {"a": data + b"then"}
    other, ino = make()
    with expect_errno(errno.EEXIST):
        link(ino, b"a")
    link(ino, b"b")
    directory.close(other)
    directory.rename("b", "a")
    with expect_errno(errno.EPERM):
        link(directory.attr("a").ino, b"c")
    directory.flush()
    assert {path.name: path.read_bytes() for path in bucket.iterdir()} == {"a": data}


@promise("Changes of others are seen after the TTL (`--ttl`, 5 s)")
def test_what_others_put_there_and_take_away_appears(opened: Open, bucket: Path):
    directory = opened()
    assert directory.names() == []
    (bucket / "new").write_bytes(b"theirs")
    (bucket / "folder").mkdir()
    (bucket / "folder" / "deep").write_bytes(b"deep")
    until(directory.names, ["folder", "new"])
    assert directory.read("new") == b"theirs"
    assert directory.read("folder/deep") == b"deep"
    (bucket / "new").unlink()
    until(directory.names, ["folder"])


@promise("Another object under a name has another inode")
def test_other_bytes_under_a_name_have_another_inode_and_our_own_upload_has_not(opened: Open, bucket: Path):
    directory = opened()
    directory.write("a", b"ours")
    inode = directory.attr("a").ino
    directory.flush()
    until(lambda: directory.attr("a").ino, inode)
    (bucket / "a").write_bytes(b"theirs, longer")
    until(lambda: directory.attr("a").size_bytes, len(b"theirs, longer"))
    assert directory.attr("a").ino != inode
    assert directory.read("a") == b"theirs, longer"


@pytest.mark.parametrize("is_old", [False, True])
def test_a_file_that_is_uploaded_while_its_folder_is_listed_has_the_same_inode_there(opened: Open, is_old: bool):
    directory = opened()
    directory.write("a", b"1")
    names, inode = directory.fs.names, directory.attr("a").ino
    handle = directory.do(names.opendir, ROOT)
    [entry] = names.readdir(handle, 0)
    directory.flush()
    if is_old:  # the kernel has read a part of it, and the store has to be asked by now
        names.readdir(handle, 1)
        directory.fs.remote.expire("")
    told = names.enter(handle, entry)
    assert told is not None
    assert (told.ino, told.complete) == (inode, not is_old)


@promise("What changes in a folder that is being listed is as it is now, and not as it was")
@pytest.mark.parametrize("is_uploaded", [False, True])
def test_an_old_listing_tells_neither_a_size_from_before_nor_a_name_that_was_deleted(opened: Open, is_uploaded: bool):
    directory = opened()
    directory.write("a", b"1")
    directory.write("b", b"1")
    directory.flush()
    names, inode = directory.fs.names, directory.attr("a").ino
    handle = directory.do(names.opendir, ROOT)
    a, b = directory.do(names.readdir, handle, 0)
    names.readdir(handle, 2)  # the kernel has read a part of it
    directory.write("a", b"longer")
    directory.unlink("b")
    if is_uploaded:
        directory.flush()
    directory.fs.remote.expire("")  # the store has to be asked by now
    told = names.enter(handle, a)
    assert told is not None
    assert (told.ino, told.size_bytes) == (inode, len(b"longer"))
    assert names.enter(handle, b) is None


@promise("A file keeps inode number and times when the kernel forgets it and asks again (the last 50,000)")
def test_what_the_kernel_forgets_has_the_same_inode_and_times_when_it_asks_again(opened: Open, bucket: Path):
    directory = opened(ttl_s=60.0)  # the number of a folder's links is told from a listing that is not old
    directory.mkdir("d")
    directory.write("d/a", b"ours")
    directory.chmod("d/a", 0o600)
    folder, file = directory.attr("d"), directory.attr("d/a")
    directory.forget_all()
    assert (directory.attr("d"), directory.attr("d/a")) == (folder, file)
    directory.forget_all()
    directory.flush()  # the kernel knows nothing of what is uploaded
    assert (directory.attr("d"), directory.attr("d/a")) == (folder, file)
    directory.rename("d", "e")
    directory.forget_all()
    assert (directory.attr("e").ino, directory.attr("e/a").ino) == (folder.ino, file.ino)
    with expect_errno(errno.ENOENT):
        directory.attr("d")


@promise("A file keeps inode number and times when the kernel forgets it and asks again (the last 50,000)")
def test_a_change_has_the_time_at_which_the_kernel_saw_it_however_late_it_tells(opened: Open):
    directory = opened()
    directory.write("a", b"1")
    inode = directory.attr("a").ino
    told = directory.do(directory.fs.names.setattr, inode, Changes(mtime_ns=5_000, ctime_ns=7_000))
    assert (told.mtime_ns, told.ctime_ns) == (5_000, 7_000)
    directory.forget_all()
    directory.flush()
    assert (directory.attr("a").mtime_ns, directory.attr("a").ctime_ns) == (5_000, 7_000)


@promise("A file keeps inode number and times when the kernel forgets it and asks again (the last 50,000)")
def test_what_is_put_or_made_under_a_forgotten_name_has_another_inode(opened: Open, bucket: Path):
    directory = opened()
    directory.write("theirs", b"1")
    directory.write("ours", b"1")
    directory.flush()
    inodes = {name: directory.attr(name).ino for name in ("theirs", "ours")}
    directory.forget_all()
    (bucket / "theirs").write_bytes(b"22")
    directory.fs.remote.expire("")
    assert directory.attr("theirs").ino not in inodes.values()
    assert directory.read("theirs") == b"22"
    directory.unlink("ours")
    directory.write("ours", b"22")
    assert directory.attr("ours").ino not in inodes.values()


@promise("A file keeps inode number and times when the kernel forgets it and asks again (the last 50,000)")
def test_so_many_forgotten_names_are_remembered_and_no_more(opened: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bucket_tree, "MOST_RESTING", 10)
    monkeypatch.setattr(bucket_tree, "_LET_GO_AT_A_TIME", 4)
    directory = opened()
    names = [f"{number}/{name}" for number in range(20) for name in ("a", "b")]
    for name in names:
        if name.endswith("a"):
            directory.mkdir(name[:-2])
        directory.write(name, b"1")
        directory.forget_all()
    newest, oldest = names[-1], names[0]
    inodes = {name: directory.attr(name).ino for name in (newest, oldest)}
    assert inodes[oldest] > inodes[newest]  # it was let go of and has another one since
    directory.forget_all()
    assert {name: directory.attr(name).ino for name in (newest, oldest)} == inodes


def test_a_kernel_that_knows_much_is_asked_once_to_forget_what_it_heard_of_first(
    opened: Open, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bucket_nodes, "_MOST_NODES", 0)
    monkeypatch.setattr(bucket_tree, "_OLD_AT_A_TIME", 4)
    directory = opened()
    for name in "abcdefgh":
        directory.write(name, b"1")
    assert directory.stale == [*"abcdefgh"]
    assert {directory.attr(name).ino for name in "abcdefgh"} == set(range(2, 10))
    assert directory.stale == [*"abcdefgh"]  # it may have reasons to remember
    directory.forget_all()
    assert {directory.attr(name).ino for name in "hgfedcba"} == set(range(2, 10))
    assert directory.stale == [*"abcdefgh", *"hgfedcba"]


@promise("Another object under a name has another inode")
def test_the_old_inode_of_a_file_that_others_changed_sends_the_kernel_to_look_again(opened: Open, bucket: Path):
    (bucket / "a").write_bytes(b"1")
    directory = opened()
    inode = directory.attr("a").ino
    (bucket / "a").write_bytes(b"22")
    directory.fs.remote.expire("")
    assert directory.attr("a").size_bytes == 2
    with expect_errno(errno.ENOENT):  # its name is another inode's now
        directory.do(directory.fs.names.getattr, inode)


@promise("`fstat` of an open file that was replaced elsewhere says what it was")
@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_an_open_file_that_others_changed_is_what_it_was_to_fstat(opened: Open, bucket: Path, change: str):
    (bucket / "a").write_bytes(b"1")
    directory = opened()
    inode = directory.attr("a").ino
    handle = directory.open("a")
    if change == "replaced":
        (bucket / "a").write_bytes(b"22")
    else:
        (bucket / "a").unlink()
    until(lambda: directory.do(directory.fs.names.getattr, inode).links, 0)
    assert directory.do(directory.fs.names.getattr, inode).size_bytes == 1
    assert directory.stale == ["a"]
    directory.close(handle)
    if change == "replaced":
        assert directory.attr("a").size_bytes == 2
    else:
        with expect_errno(errno.ENOENT):
            directory.attr("a")


@promise("A first write to a larger replaced file is refused and never dropped")
@pytest.mark.parametrize("seen_by", ["fstat", "lookup", "create"])
def test_what_is_written_to_an_open_file_that_others_took_away_is_refused_and_never_dropped(
    opened: Open, bucket: Path, seen_by: str
):
    (bucket / "a").write_bytes(_LARGE)
    directory = opened(ttl_s=60.0)
    inode = directory.attr("a").ino
    handle = directory.open("a", os.O_RDWR)
    if seen_by == "create":
        (bucket / "a").unlink()
    else:
        (bucket / "a").write_bytes(b"theirs")
    directory.fs.remote.expire("")
    if seen_by == "fstat":
        assert directory.do(directory.fs.names.getattr, inode).links == 0
    elif seen_by == "lookup":
        assert directory.attr("a").ino != inode
    else:
        directory.write("a", b"theirs")
        assert directory.attr("a").ino != inode
    refused = [
        lambda: directory.do(directory.fs.handles.write, handle, 0, b"ours"),
        lambda: directory.do(directory.fs.names.setattr, inode, Changes(size=0), handle),
        lambda: directory.do(directory.fs.names.setattr, inode, Changes(mode=0o600), handle),
        lambda: directory.do(directory.fs.handles.open, inode, os.O_WRONLY | os.O_TRUNC),
    ]
    for call in refused:
        with expect_errno(errno.ESTALE):
            call()
    directory.fs.handles.spoil(handle, OSError(errno.ESTALE, "as the adapter does"), 4)
    with expect_errno(errno.ESTALE):
        directory.close(handle)
    directory.flush()
    assert {path.name: path.read_bytes() for path in bucket.iterdir()} == {"a": b"theirs"}
    (loss,) = directory.live.status()["losses"]
    assert (loss["key"], loss["size_bytes"], loss["reason"]) == ("a", 4, "as the adapter does")


@promise("What is written to an open file that others replaced goes on beside it as a whole file")
@pytest.mark.parametrize(("size", "flags"), [(0, os.O_RDWR), (10, os.O_WRONLY), (300_000, os.O_WRONLY | os.O_APPEND)])
@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_what_is_written_to_an_open_file_that_others_changed_goes_on_beside_it_whole(
    opened: Open, bucket: Path, size: int, flags: int, change: str
):
    (bucket / "log").write_bytes(b"x" * size)
    directory = opened(ttl_s=60.0)
    handle = directory.open("log", flags)
    if change == "replaced":
        (bucket / "log").write_bytes(b"theirs")
    else:
        (bucket / "log").unlink()
    directory.fs.remote.expire("")
    directory.do(directory.fs.handles.write, handle, size, b"mine")
    directory.close(handle)
    directory.flush()
    found = {path.name.partition(".conflict-")[0] + path.suffix[:10]: path.read_bytes() for path in bucket.iterdir()}
    mine = b"x" * size + b"mine"
    assert found == ({"log": b"theirs", "log.conflict-": mine} if change == "replaced" else {"log": mine})
    assert directory.live.status()["conflict_count"] == (change == "replaced")
    assert directory.live.status()["losses"] == []


@promise("What is written to an open file that others replaced goes on beside it as a whole file")
def test_a_file_that_is_opened_to_be_written_and_is_not_shows_again_what_others_put_there(opened: Open, bucket: Path):
    (bucket / "log").write_bytes(b"1")
    directory = opened()
    handle = directory.open("log", os.O_WRONLY | os.O_APPEND)
    (bucket / "log").write_bytes(b"theirs")
    directory.close(handle)
    directory.fs.remote.expire("")
    assert directory.read("log") == b"theirs"
    directory.flush()
    assert [path.read_bytes() for path in bucket.iterdir()] == [b"theirs"]
    assert directory.live.status()["dirty_files"] == 0


@promise("A program that opens a file to change a part of it changes what is there now")
def test_an_append_to_what_others_are_replacing_sends_the_kernel_to_look_again(
    opened: Open, bucket: Path, monkeypatch: pytest.MonkeyPatch
):
    (bucket / "log").write_bytes(b"1")
    directory = opened(ttl_s=60.0)
    inode = directory.attr("log").ino
    # They are quicker than the fetch.
    monkeypatch.setattr(directory.fs.remote, "expect_checked", lambda _key, _brings: None)
    (bucket / "log").write_bytes(b"theirs")
    with expect_errno(errno.ESTALE):
        directory.do(directory.fs.handles.open, inode, os.O_WRONLY | os.O_APPEND)
    handle = directory.open("log", os.O_WRONLY | os.O_APPEND)
    directory.do(directory.fs.handles.write, handle, 6, b"mine")
    directory.close(handle)
    directory.flush()
    assert (bucket / "log").read_bytes() == b"theirsmine"


@promise("What is lost after a program was told it is written is told until somebody has seen it")
def test_what_is_lost_is_told_until_somebody_has_seen_it_and_by_the_next_process_too(opened: Open, bucket: Path):
    directory = opened()
    handle = directory.create("a", b"12")
    directory.fs.handles.spoil(handle, OSError(errno.ENOSPC, "full"), 100)
    directory.fs.handles.spoil(handle, OSError(errno.ENOSPC, "full"), 20)  # the kernel sends what it has, page by page
    directory.fs.engine.losses.save()
    with expect_errno(errno.ENOSPC):
        directory.close(handle)
    deleted = directory.create("b", b"12")
    directory.unlink("b")
    directory.fs.handles.spoil(deleted, OSError(errno.ENOSPC, "full"), 100)  # nobody wants it
    for again in range(2):
        (loss,) = directory.live.status()["losses"]
        assert (loss["key"], loss["size_bytes"], loss["reason"]) == ("a", 122, "full")
        if not again:
            directory = opened()
    directory.live.engine.losses.forget()
    assert opened().live.status()["losses"] == []


@promise("What is lost after a program was told it is written is told until somebody has seen it")
@pytest.mark.parametrize("when", ["periodic look", "flush", "close"])
def test_a_loss_that_a_full_disk_did_not_let_us_write_down_is_written_when_there_is_room(
    opened: Open, bucket: Path, monkeypatch: pytest.MonkeyPatch, when: str
):
    directory = opened()
    handle = directory.create("a", b"12")
    directory.fs.handles.spoil(handle, OSError(errno.ENOSPC, "full"), 100)

    def refused(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as full:
        full.setattr(losses, "replace_file", refused)
        directory.fs.engine.losses.save()
    written_down = directory.live.engine.area.folder / losses.LOSSES
    assert not written_down.exists()
    with expect_errno(errno.ENOSPC):
        directory.close(handle)
    if when == "periodic look":
        directory.fs.remember()
    elif when == "flush":
        directory.flush()
    assert written_down.exists() == (when != "close")
    (loss,) = opened().live.status()["losses"]
    assert (loss["key"], loss["size_bytes"]) == ("a", 102)


@promise("What the journal refuses at `close` or `fsync` counts as lost until a later try succeeds")
@pytest.mark.parametrize("size", [10, 400_000])
def test_what_the_journal_refuses_is_lost_until_it_takes_it(
    opened: Open, bucket: Path, monkeypatch: pytest.MonkeyPatch, size: int
):
    directory = opened()

    def refused(*_args: Any) -> None:
        raise StagingError("the disk is broken")

    def close(handle: int) -> None:
        with pytest.raises(StagingError, match="broken"):
            directory.fs.handles.flush(handle)()
        with pytest.raises(StagingError, match="broken"):
            directory.fs.handles.fsync(handle)()
        assert directory.fs.handles.release(handle) is None

    written_down = directory.live.engine.area.folder / losses.LOSSES
    with monkeypatch.context() as broken:
        broken.setattr(directory.live.engine._journal, "commit", refused)
        close(directory.create("a", b"x" * size))
        (loss,) = directory.live.status()["losses"]
        assert (loss["key"], loss["size_bytes"], loss["reason"]) == ("a", size, "the disk is broken")
        assert written_down.exists()
    directory.flush()
    assert directory.live.status()["losses"] == []
    assert not written_down.exists()
    assert (bucket / "a").read_bytes() == b"x" * size
    # Broken to the end of the process: the next one has no file, and says so.
    with monkeypatch.context() as broken:
        broken.setattr(directory.live.engine._journal, "commit", refused)
        close(directory.create("c", b"x" * size))
        with pytest.raises(StagingError, match="broken"):
            opened()
    directory = opened()
    assert "c" not in directory.names()
    (loss,) = directory.live.status()["losses"]
    assert (loss["key"], loss["size_bytes"]) == ("c", size)


@promise("What is lost after a program was told it is written is told until somebody has seen it")
def test_a_page_that_is_written_again_and_again_is_lost_once(opened: Open, bucket: Path):
    directory = opened()
    handle = directory.create("a", b"x" * 4096)
    for _ in range(1000):
        directory.do(directory.fs.handles.write, handle, 0, b"y" * 4096)
    directory.fs.handles.spoil(handle, OSError(errno.ENOSPC, "full"), 100)
    (loss,) = directory.live.status()["losses"]
    assert loss["size_bytes"] == 4196


@promise("An open that fails after others wrote to the file leaves their bytes durable")
def test_an_open_that_fails_leaves_what_another_writer_wrote_durable(
    opened: Open, bucket: Path, monkeypatch: pytest.MonkeyPatch
):
    (bucket / "a").write_bytes(b"1")
    directory = opened()
    writer, reader = directory.open("a", os.O_WRONLY), directory.open("a")
    directory.do(directory.fs.handles.write, writer, 0, b"2")
    handles = directory.fs.handles
    with directory.live.engine.lock:
        waits = handles.add_locked(handles._handles[writer].file, writes=True)  # as an open does
    assert directory.fs.handles.release(writer) is None
    handles._release_ungiven(waits)
    directory.flush()
    assert (bucket / "a").read_bytes() == b"2"
    directory.close(reader)


@promise("A first write to a larger replaced file is refused and never dropped")
@pytest.mark.parametrize("folder", [False, True])
def test_a_rename_of_what_others_replaced_takes_nothing_along_of_who_has_the_old_one_open(
    opened: Open, bucket: Path, folder: bool
):
    (bucket / "d").mkdir()
    (bucket / "d" / "a").write_bytes(_LARGE)
    directory = opened(ttl_s=60.0)
    handle = directory.open("d/a", os.O_RDWR)
    (bucket / "d" / "a").write_bytes(b"theirs")
    if not folder:
        directory.fs.remote.expire("d/")
    directory.rename(*(("d", "e") if folder else ("d/a", "d/b")))
    with expect_errno(errno.ESTALE):
        directory.do(directory.fs.handles.write, handle, 0, b"ours")
    directory.flush()
    assert [path.read_bytes() for path in bucket.rglob("*") if path.is_file()] == [b"theirs"]


@promise("Another object under a name has another inode")
@pytest.mark.parametrize("uploaded", [False, True])
def test_a_listing_from_before_a_file_was_written_or_uploaded_takes_no_name_from_it(
    opened: Open, bucket: Path, uploaded: bool
):
    directory = opened(ttl_s=60.0)
    directory.write("a", b"old")
    if not uploaded:
        directory.flush()
    listing = directory.do(directory.fs.names.opendir, ROOT)
    (entry,) = directory.fs.names.readdir(listing, 0)
    if uploaded:
        directory.flush()
    else:
        handle = directory.open("a", os.O_WRONLY | os.O_TRUNC)
        directory.do(directory.fs.handles.write, handle, 0, b"new")
        directory.close(handle)
    inode = directory.attr("a").ino
    handle = directory.open("a", os.O_RDWR)
    told = directory.fs.names.enter(listing, entry)
    assert told is not None
    assert told.ino == inode or not told.complete
    assert directory.attr("a").ino == inode
    directory.do(directory.fs.handles.write, handle, 3, b"er")
    directory.close(handle)
    directory.flush()
    assert (bucket / "a").read_bytes() == (b"older" if uploaded else b"newer")


def test_attributes_of_very_many_folders_are_asked_for_again(
    opened: Open, bucket: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(known, "_MAX_MARKERS", 2)
    for name in "abc":
        (bucket / name).mkdir()
    directory = opened(ttl_s=60.0)
    directory.chmod("a", 0o700)
    directory.flush()
    for name in "bca":
        assert stat.S_ISDIR(directory.attr(name).mode)
        assert len(directory.live.engine.known.markers) <= 2
    assert stat.S_IMODE(directory.attr("a").mode) == 0o700


def test_what_is_written_down_of_a_bucket_is_private(opened: Open, bucket: Path):
    (bucket / "a").write_bytes(b"1")
    directory = opened()
    assert directory.names() == ["a"]
    directory.fs.remember()
    assert stat.S_IMODE((directory.live.engine.area.folder / "known.json").stat().st_mode) == 0o600


@promise("An object that was changed in the bucket is never overwritten in silence")
def test_a_file_that_somebody_else_wrote_meanwhile_is_not_overwritten(opened: Open, bucket: Path):
    (bucket / "a.pt").write_bytes(b"first")
    directory = opened()
    handle = directory.open("a.pt", os.O_WRONLY | os.O_TRUNC)
    directory.do(directory.fs.handles.write, handle, 0, b"ours")
    (bucket / "a.pt").write_bytes(b"theirs!")
    directory.close(handle)
    directory.flush()
    assert (bucket / "a.pt").read_bytes() == b"theirs!"
    (kept,) = [path for path in bucket.iterdir() if path.name != "a.pt"]
    assert kept.name.startswith("a.pt.conflict-")
    assert kept.read_bytes() == b"ours"
    assert sorted(directory.names()) == ["a.pt", kept.name]
    assert directory.read("a.pt") == b"theirs!"
    assert directory.stale == ["a.pt"]
    (conflict,) = directory.live.status()["conflicts"]
    assert (conflict["key"], conflict["kept_as"]) == ("a.pt", kept.name)


def test_a_new_file_over_one_that_was_put_there_unseen_is_kept_beside_it(opened: Open, bucket: Path):
    directory = opened(ttl_s=60.0)
    assert directory.names() == []
    (bucket / "a").write_bytes(b"theirs")
    directory.write("a", b"ours")
    directory.flush()
    assert (bucket / "a").read_bytes() == b"theirs"
    assert len(os.listdir(bucket)) == 2


@promise("A renamed file whose source others took away is sent from this node's copy or cache, or told as lost")
@pytest.mark.parametrize("was_read", [True, False])
@pytest.mark.parametrize("size", [5, 5_000_000])
def test_a_renamed_file_whose_object_others_take_away_is_sent_from_the_nodes_cache_or_is_told_as_lost(
    opened: Open, bucket: Path, was_read: bool, size: int
):
    ours = os.urandom(size)
    for name in ("deleted", "changed"):
        (bucket / name).write_bytes(ours)
    directory = opened(ttl_s=60.0)
    for name in ("deleted", "changed"):
        handle = directory.open(name)
        assert not was_read or directory.do(directory.fs.handles.read, handle, 0, size) == ours
        directory.close(handle)
    directory.live.uploader.stop(10)
    directory.rename("deleted", "kept-1")
    directory.rename("changed", "kept-2")
    (bucket / "deleted").unlink()
    (bucket / "changed").write_bytes(b"theirs")
    directory = opened(ttl_s=60.0)
    directory.flush()
    there = {path.name: path.read_bytes() for path in bucket.iterdir()}
    engine = directory.live.engine
    if was_read:
        assert there == {"kept-1": ours, "kept-2": ours, "changed": b"theirs"}
        assert engine.losses.all() == []
    else:
        assert there == {"changed": b"theirs"}
        told = {loss.key: (loss.size_bytes, loss.reason) for loss in opened().live.engine.losses.all()}
        before = "before that had reached the bucket"
        newer = "; the newer bytes stay as changed"
        assert told == {
            "kept-1": (size, f"it was renamed or copied from deleted, which somebody else deleted {before}"),
            "kept-2": (
                size,
                f"it was renamed or copied from changed, which somebody else changed {before}{newer}",
            ),
        }
    assert [conflict.key for conflict in engine.conflict_log.unsettled()] == ["changed"]


@promise("Deleting or renaming what somebody changed takes nothing from them")
def test_a_deletion_of_what_others_changed_does_not_happen(opened: Open, bucket: Path):
    (bucket / "a").write_bytes(b"first")
    directory = opened(ttl_s=60.0)
    assert directory.read("a") == b"first"
    (bucket / "a").write_bytes(b"theirs!")
    directory.unlink("a")
    directory.flush()
    assert (bucket / "a").read_bytes() == b"theirs!"
    assert directory.read("a") == b"theirs!"


@promise("A deleted file can be read and written by programs that have it open")
def test_a_deleted_file_can_be_read_by_who_has_it_open(opened: Open, bucket: Path):
    (bucket / "a").write_bytes(b"x" * 100_000)
    directory = opened()
    handle = directory.open("a")
    directory.unlink("a")
    directory.flush()
    assert not (bucket / "a").exists()
    assert directory.do(directory.fs.handles.read, handle, 0, 200_000) == b"x" * 100_000
    directory.close(handle)


@promise("A deleted file can be read and written by programs that have it open")
@pytest.mark.parametrize("size", [10, 300_000])
@pytest.mark.parametrize("uploaded", [False, True])
def test_a_deleted_file_can_be_written_by_who_has_it_open(opened: Open, bucket: Path, size: int, uploaded: bool):
    directory = opened()
    directory.write("a", b"x" * size)
    if uploaded:
        directory.flush()
    handle = directory.open("a", os.O_RDWR)
    directory.unlink("a")
    directory.flush()
    directory.do(directory.fs.handles.write, handle, 5, b"yy")  # what the kernel has gathered comes late
    assert directory.do(directory.fs.handles.read, handle, 0, size) == b"xxxxxyy" + b"x" * (size - 7)
    directory.close(handle)
    directory.flush()
    assert list(bucket.iterdir()) == []


def test_writes_that_come_at_once_fetch_what_they_change_once_and_leave_nothing_behind(opened: Open, bucket: Path):
    (bucket / "a").write_bytes(b"x" * 300_000)
    directory = opened(ttl_s=60.0)
    handle = directory.open("a", os.O_RDWR)
    waiting: list[Load] = []
    for offset in range(3):
        with pytest.raises(Load) as caught:
            directory.fs.handles.write(handle, offset, b"y")
        waiting.append(caught.value)
    for needs in waiting:
        needs.load()
    assert len(directory.staged()) == 1
    for offset in range(3):
        directory.do(directory.fs.handles.write, handle, offset, b"y")
    assert directory.do(directory.fs.handles.read, handle, 0, 300_000) == b"yyy" + b"x" * 299_997
    directory.close(handle)
    directory.flush()
    directory.fs.handles.commit()
    assert len(directory.staged()) == 1  # a clean copy


def test_a_change_that_waits_for_room_has_begun_nothing_before(opened: Open, monkeypatch: pytest.MonkeyPatch):
    directory = opened()
    directory.write("a", _LARGE)
    handle = directory.open("a", os.O_RDWR)
    handles, size = directory.fs.handles, len(_LARGE)
    with monkeypatch.context() as patch:
        patch.setattr(directory.live.engine.files, "make_room", lambda _n_bytes: False)
        with pytest.raises(Load):
            handles.write(handle, size, b"y")
        with pytest.raises(Load):
            handles.allocate(handle, 0, size, 1)
        assert handles._handles[handle].file.draft is None
    directory.do(handles.write, handle, size, b"y")
    assert directory.do(handles.read, handle, size - 1, 9) == b"xy"
    directory.close(handle)


def test_a_new_name_changes_a_folders_time_of_modification_and_not_that_of_access(opened: Open):
    directory = opened()
    directory.mkdir("d")
    before = directory.attr("d")
    directory.write("d/a", b"bytes")
    after = directory.attr("d")
    assert after.mtime_ns > before.mtime_ns
    assert after.atime_ns == before.atime_ns


@promise("A folder is renamed in one step, with all that the bucket has in it")
def test_a_folder_is_renamed_in_one_step_with_all_that_the_bucket_has_in_it(opened: Open, bucket: Path):
    for name in ("a", "b/c", "b/d"):
        (bucket / "old" / name).parent.mkdir(parents=True, exist_ok=True)
        (bucket / "old" / name).write_bytes(name.encode())
    directory = opened()
    directory.write("old/new", b"new")
    directory.rename("old", "renamed")
    assert directory.names() == ["renamed"]
    assert directory.names("renamed") == ["a", "b", "new"]
    assert directory.read("renamed/b/c") == b"b/c"  # before anything was copied
    directory.flush()
    found = {str(p.relative_to(bucket)): p.read_bytes() for p in bucket.rglob("*") if p.is_file()}
    assert found == {"renamed/a": b"a", "renamed/b/c": b"b/c", "renamed/b/d": b"b/d", "renamed/new": b"new"}
    assert directory.read("renamed/b/c") == b"b/c"


def test_a_folder_that_is_renamed_while_its_files_are_uploaded_keeps_them_all(opened: Open, bucket: Path):
    directory = opened()
    asking = directory.fs.remote._asking
    original = asking.list_below

    def uploads_meanwhile(folder: str) -> None:
        directory.flush()  # between the listing and its use
        original(folder)
        directory.write("run/later", b"later")
        directory.flush()

    directory.mkdir("run")
    directory.flush()
    directory.write("run/a", b"a")
    asking.list_below = uploads_meanwhile  # type: ignore[method-assign]
    directory.rename("run", "done")
    assert directory.names("done") == ["a", "later"]
    directory.flush()
    found = {str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file()}
    assert found == {"done/a", "done/later"}


def test_a_folder_with_folders_in_it_is_renamed_whole(opened: Open, bucket: Path):
    (bucket / "a" / "b" / "c").mkdir(parents=True)
    (bucket / "a" / "b" / "c" / "x").write_bytes(b"x")
    directory = opened()
    directory.rename("a/b", "q")
    directory.flush()
    assert directory.names("a") == []
    assert {str(path.relative_to(bucket)) for path in bucket.rglob("*")} == {"a", "q", "q/c", "q/c/x"}


def test_a_folder_made_here_is_renamed_with_what_was_uploaded_before_it(opened: Open, bucket: Path):
    directory = opened()
    directory.mkdir("run")
    directory.write("run/a", b"a")
    claim = directory.live.uploader.claims.begin("run/a")  # the file comes before its folder's marker
    if claim is not None:
        info = directory.live.engine.bucket.write(f"{bucket}/run/a"[1:], b"a", {}, expect="")
        directory.live.uploader.claims.finish(claim, info)
    directory.rename("run", "done")
    assert directory.names("done") == ["a"]
    directory.flush()
    assert (bucket / "done" / "a").read_bytes() == b"a"
    assert not (bucket / "run").exists()


def test_a_folder_is_renamed_again_before_the_bucket_has_it_under_the_name_that_it_had_before(
    opened: Open, bucket: Path
):
    mount = opened()
    mount.mkdir("f")
    mount.write("f/a", b"bytes")
    mount.flush()
    mount.rename("f", "g")
    mount.flush()
    assert not (bucket / "f").exists()
    mount.rename("g", "f")
    mount.rename("f", "h")
    mount.flush()
    assert sorted(str(path.relative_to(bucket)) for path in bucket.rglob("*")) == ["h", "h/a"]


def test_a_folder_that_is_deleted_while_its_files_are_uploaded_stays_deleted(opened: Open, bucket: Path):
    directory = opened()
    directory.mkdir("run")
    directory.write("run/a", b"a")
    engine = directory.live.engine
    claim = directory.live.uploader.claims.begin("run/a")
    directory.unlink("run/a")
    directory.do(directory.fs.names.rmdir, ROOT, b"run")
    if claim is not None:
        directory.live.uploader.claims.finish(claim, engine.bucket.write(f"{bucket}/run/a"[1:], b"a", {}, expect=""))
    assert directory.names() == []
    directory.flush()
    assert directory.names() == []
    assert os.listdir(bucket) == []


@promise("`fstat` of an open folder that was deleted or replaced says so by a link count of zero")
def test_a_folder_that_was_deleted_has_no_links(opened: Open):
    directory = opened()
    names = directory.fs.names
    for name in ("deleted", "replaced", "new"):
        directory.mkdir(name)
    inodes = [directory.do(names.lookup, ROOT, name).ino for name in (b"deleted", b"replaced")]
    directory.do(names.rmdir, ROOT, b"deleted")
    directory.rename("new", "replaced")
    assert [directory.do(names.getattr, ino).links for ino in inodes] == [0, 0]


def test_a_folder_that_is_only_opened_is_not_listed_and_takes_no_memory_for_its_names(opened: Open, bucket: Path):
    for number in range(300):
        (bucket / f"{number:03}").touch()
    directory = opened(ttl_s=60.0)
    names = directory.fs.names
    directory.names()
    tracemalloc.start()
    try:
        handles = [directory.do(names.opendir, ROOT) for _ in range(100)]
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()
    directory.write("late", b"")
    assert [entry.name for entry in directory.do(names.readdir, handles[0], 0)][-1] == "late"


def test_an_open_folder_is_read_anew_from_its_beginning(opened: Open):
    directory = opened()
    handle = directory.do(directory.fs.names.opendir, ROOT)
    assert directory.do(directory.fs.names.readdir, handle, 0) == []
    directory.write("a", b"")
    assert [entry.name for entry in directory.do(directory.fs.names.readdir, handle, 0)] == ["a"]


def test_what_is_written_while_somebody_else_changes_the_object_has_a_name_in_the_end(opened: Open, bucket: Path):
    deep = bucket
    while len(os.fsencode(deep)) < 880:  # a key has 1,024 bytes at most, with the mount's prefix
        deep /= "d" * min(200, 880 - len(os.fsencode(deep)))
    name = "a" * 140
    deep.mkdir(parents=True)
    (deep / name).write_bytes(b"1")
    directory = opened(f"file://{deep}", ttl_s=60.0)
    directory.chmod(name, 0o600)
    handle = directory.open(name, os.O_WRONLY | os.O_TRUNC)
    directory.do(directory.fs.handles.write, handle, 0, b"ours")
    (deep / name).write_bytes(b"theirs")
    directory.flush()  # of the attributes
    directory.close(handle)
    directory.flush()
    assert (deep / name).read_bytes() == b"theirs"
    (kept,) = [path for path in deep.iterdir() if path.name != name]
    assert kept.name.startswith("aaa")
    assert ".conflict-" in kept.name
    assert len(os.fsencode(kept)) <= 1 + 1024
    assert kept.read_bytes() == b"ours"


def test_what_is_open_goes_on_in_the_folder_that_has_room_for_its_conflicts_name(opened: Open, bucket: Path):
    room = 1024 - len(os.fsencode(bucket)) - 10
    folder = bucket / "/".join("d" * 99 for _ in range(room // 100)) / ("e" * (room % 100 or 1))
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"1")
    directory = opened(ttl_s=60.0)
    name = str((folder / "a").relative_to(bucket))
    directory.chmod(name, 0o600)
    handle = directory.open(name, os.O_RDWR)
    directory.do(directory.fs.handles.write, handle, 0, b"o")
    (folder / "a").write_bytes(b"theirs")
    directory.flush()  # of the attributes
    directory.do(directory.fs.handles.write, handle, 1, b"urs")
    directory.close(handle)
    directory.flush()
    assert (folder / "a").read_bytes() == b"theirs"
    (kept,) = [path for path in bucket.rglob("*.conflict-*") if path.is_file()]
    assert kept.parent == folder.parent
    assert kept.read_bytes() == b"ours"


@promise("Another object under a name has another inode")
def test_an_open_file_is_renamed_while_its_new_attributes_are_uploaded(opened: Open, bucket: Path):
    (bucket / "a").write_bytes(b"1")
    directory = opened(ttl_s=60.0)
    handle = directory.open("a", os.O_RDWR)
    inode = directory.attr("a").ino
    directory.chmod("a", 0o600)
    engine = directory.live.engine
    claim = directory.live.uploader.claims.begin("a")
    directory.rename("a", "b")
    assert claim is not None
    info = engine.bucket.write(f"{bucket}/a"[1:], b"1", {}, expect=claim.pending.base)  # with another ETag
    directory.live.uploader.claims.finish(claim, info)
    assert directory.attr("b").ino == inode
    directory.do(directory.fs.handles.write, handle, 1, b"2")
    directory.close(handle)
    directory.flush()
    assert {path.name: path.read_bytes() for path in bucket.iterdir()} == {"b": b"12"}


def test_two_names_are_swapped(opened: Open, bucket: Path):
    (bucket / "a").write_bytes(b"1")
    (bucket / "b").write_bytes(b"22")
    directory = opened()
    directory.rename("a", "t")
    directory.rename("b", "a")
    directory.rename("t", "b")
    directory.flush()
    assert {path.name: path.read_bytes() for path in bucket.iterdir()} == {"a": b"22", "b": b"1"}


@promise("A folder whose last file was deleted stays until it is deleted itself")
def test_an_emptied_folder_stays_until_it_is_deleted(opened: Open, bucket: Path):
    (bucket / "d").mkdir()
    (bucket / "d" / "a").write_bytes(b"1")
    directory = opened()
    directory.unlink("d/a")
    directory.flush()
    until(lambda: directory.names("d"), [])
    directory.do(directory.fs.names.rmdir, ROOT, b"d")
    assert directory.names() == []
    directory.flush()
    assert os.listdir(bucket) == []


@promise("`rename`, `unlink`, `mkdir`, `rmdir`, `symlink` and `truncate` of a path are durable without `fsync`")
def test_what_was_acknowledged_is_there_in_the_next_process_and_what_was_not_is_not(opened: Open, bucket: Path):
    directory = opened()
    directory.write("closed", b"1" * 200_000)
    directory.mkdir("d")
    directory.write("d/b", b"2")
    directory.rename("d/b", "d/c")
    directory.create("open", b"never closed")
    directory = opened()
    assert directory.names() == ["closed", "d"]
    assert directory.names("d") == ["c"]
    assert directory.read("closed") == b"1" * 200_000
    directory.flush()
    assert (bucket / "d" / "c").read_bytes() == b"2"


@promise("Modes, owners, times and symbolic links are kept in the bucket")
def test_modes_times_and_links_are_kept_in_the_bucket(opened: Open):
    directory = opened()
    directory.write("a", b"1")
    directory.chmod("a", 0o4751)
    directory.do(directory.fs.names.setattr, directory.attr("a").ino, Changes(mtime_ns=123456789012345678))
    directory.do(directory.fs.names.symlink, ROOT, b"l", b"../somewhere", uid=5, gid=6)
    directory.mkdir("d")
    directory.chmod("d", 0o1777)
    directory.flush()
    directory = opened()
    assert directory.live.engine.pendings() == []
    found = directory.attr("a")
    assert (stat.S_IMODE(found.mode), found.mtime_ns) == (0o4751, 123456789012345678)
    link = directory.attr("l")
    assert (stat.S_ISLNK(link.mode), link.uid, link.gid) == (True, 5, 6)
    assert directory.do(directory.fs.names.readlink, link.ino) == b"../somewhere"
    assert stat.S_IMODE(directory.attr("d").mode) == 0o1777


@promise("FIFOs, sockets and device nodes are kept in the bucket, as objects without bytes")
def test_fifos_sockets_and_devices_are_the_same_from_another_home(
    opened: Open, bucket: Path, settings: Settings, tmp_path: Path
):
    directory = opened()
    kinds = {"pipe": stat.S_IFIFO, "socket": stat.S_IFSOCK, "char": stat.S_IFCHR, "block": stat.S_IFBLK}
    numbers = {"char": 0x103, "block": 2**32 - 2}
    for name in kinds:
        mode, rdev = kinds[name] | 0o620, numbers.get(name, 0)
        directory.do(directory.fs.names.mknod, ROOT, name.encode(), mode=mode, rdev=rdev, uid=5, gid=6)
        directory.fs.handles.commit()
    with expect_errno(errno.EEXIST):
        directory.do(directory.fs.names.mknod, ROOT, b"pipe", mode=stat.S_IFIFO | 0o620, rdev=0, uid=5, gid=6)

    def seen(directory: Directory) -> dict[str, tuple[int, int, int, int, int]]:
        found = {name: directory.attr(name) for name in directory.names()}
        return {name: (a.mode, a.rdev, a.uid, a.gid, a.size_bytes) for name, a in found.items()}

    expected = {name: (kinds[name] | 0o620, numbers.get(name, 0), 5, 6, 0) for name in sorted(kinds)}
    assert seen(directory) == expected
    directory = opened()  # the next process, which has it from the journal or the bucket
    assert seen(directory) == expected
    directory.flush()
    assert {path.name: path.read_bytes() for path in bucket.iterdir()} == dict.fromkeys(kinds, b"")
    directory.rename("block", "renamed")
    directory.chmod("char", 0o600)
    directory.unlink("pipe")
    directory.flush()
    elsewhere = api.open_bucket(f"file://{bucket}", replace(settings, home=tmp_path / "elsewhere"), who="test")
    try:
        assert seen(Directory(elsewhere)) == {
            "char": (stat.S_IFCHR | 0o600, *expected["char"][1:]),
            "renamed": expected["block"],
            "socket": expected["socket"],
        }
    finally:
        elsewhere.close()


def test_attributes_that_change_again_after_an_upload_copy_what_is_there_then(opened: Open, bucket: Path):
    (bucket / "a").write_bytes(b"1" * 1000)
    directory = opened()
    for mode in (0o600, 0o640, 0o644):
        directory.chmod("a", mode)
        directory.flush()
        assert stat.S_IMODE(directory.attr("a").mode) == mode
    assert directory.read("a") == b"1" * 1000
    assert directory.live.status()["conflict_count"] == 0


@promise("Appending to a large object keeps what the bucket has")
def test_files_that_are_appended_to_keep_what_the_bucket_has(opened: Open, bucket: Path):
    (bucket / "log").write_bytes(b"a" * 100_000)
    directory = opened()
    handle = directory.open("log", os.O_WRONLY)
    directory.do(directory.fs.handles.write, handle, 100_000, b"b")
    directory.close(handle)
    directory.flush()
    assert (bucket / "log").read_bytes() == b"a" * 100_000 + b"b"
    handle = directory.open("log", os.O_WRONLY)  # there is a clean copy now
    directory.do(directory.fs.handles.write, handle, 100_001, b"c")
    directory.close(handle)
    directory.flush()
    assert (bucket / "log").read_bytes() == b"a" * 100_000 + b"bc"


def test_a_file_that_is_opened_anew_while_it_is_closed_is_what_was_written_and_leaves_nothing_behind(opened: Open):
    directory = opened()
    handle = directory.create("a", b"x" * 300_000)
    inode = directory.attr("a").ino
    file = directory.fs.handles._handles[handle].file
    settle = directory.fs.handles.release(handle)
    assert settle is not None
    with file.io:  # as `settle` does in its thread
        with pytest.raises(Load):
            directory.fs.handles.open(inode, os.O_WRONLY | os.O_TRUNC)
        reading = directory.fs.handles.open(inode, os.O_RDONLY)
    settle()
    assert directory.do(directory.fs.handles.read, reading, 299_990, 100) == b"x" * 10
    directory.close(reading)
    directory.unlink("a")
    directory.fs.handles.commit()
    assert directory.staged() == []


@promise("A program that opens a file to change a part of it changes what is there now")
def test_what_is_appended_goes_behind_what_others_wrote_meanwhile(opened: Open, bucket: Path):
    (bucket / "log").write_bytes(b"1")
    directory = opened(ttl_s=60.0)
    assert directory.read("log") == b"1"
    (bucket / "log").write_bytes(b"theirs")
    inode = directory.attr("log").ino
    with expect_errno(errno.ESTALE):  # the kernel looks the name up again
        directory.do(directory.fs.handles.open, inode, os.O_WRONLY)
    handle = directory.open("log", os.O_WRONLY)
    directory.do(directory.fs.handles.write, handle, directory.attr("log").size_bytes, b"ours")
    directory.close(handle)
    directory.flush()
    assert (bucket / "log").read_bytes() == b"theirsours"


def test_a_new_file_that_could_not_be_written_is_not_there(opened: Open):
    directory = opened()
    handle = directory.create("a", b"1")
    directory.fs.handles.spoil(handle, OSError(errno.ENOSPC, "full"), 4)
    with expect_errno(errno.ENOSPC):
        directory.close(handle)
    assert directory.names() == []
    assert directory.live.status()["dirty_files"] == 0
    directory.write("a", b"2")
    assert directory.read("a") == b"2"


@promise("A name that no object can have is refused")
def test_names_that_no_object_can_have_are_refused(opened: Open):
    directory = opened()
    with expect_errno(errno.ENAMETOOLONG):
        directory.write("n" * 256, b"")
    with expect_errno(errno.EILSEQ):
        directory.do(directory.fs.names.create, ROOT, b"\xff", os.O_WRONLY, mode=0o644, uid=0, gid=0)
    deep = "/".join(["n" * 200] * 6)
    with expect_errno(errno.ENAMETOOLONG):
        for depth in range(1, 7):
            directory.mkdir("/".join(deep.split("/")[:depth]))


@promise("With `--ack uploaded`, `close` and `fsync` return when the bytes are in the bucket")
def test_with_ack_uploaded_a_closed_file_is_in_the_bucket(opened: Open, bucket: Path):
    directory = opened(ack="uploaded")
    directory.write("a", b"1" * 100_000)
    assert (bucket / "a").read_bytes() == b"1" * 100_000


@pytest.fixture
def proxied(rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(rclone_s3.endpoint) as proxy:
        for name, value in rclone_s3.env().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@promise("With the store away, staged and known data is read, and writing goes on")
def test_an_outage_leaves_what_is_staged_and_what_is_known_and_uploads_go_on_by_themselves(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3
):
    rclone_s3.make_bucket("outage")
    directory = opened("s3://outage/live")
    directory.write("known", b"known")
    directory.flush()
    assert directory.names() == ["known"]
    proxied.refuse()
    directory.write("new", b"new" * 50_000)
    until(lambda: directory.live.status()["store_problem"] != "", True)
    until(directory.names, ["known", "new"])
    assert directory.read("new") == b"new" * 50_000
    directory.mkdir("folder")
    directory.write("folder/x", b"x")
    assert directory.names("folder") == ["x"]
    proxied.accept()
    until(lambda: directory.live.status()["dirty_files"], 0)


@promise("With the store away, work goes on in a root below 1,000 names that nobody has looked into")
def test_status_says_that_the_store_does_not_answer_who_looks_though_all_is_uploaded(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch
):
    rclone_s3.make_bucket("asked")
    directory = opened("s3://asked/live")
    directory.fs.remote.look_around()
    directory.names()
    assert directory.live.status()["store_problem"] == ""
    proxied.refuse()
    until(lambda: directory.names() == [] and directory.live.status()["store_problem"] != "", True)
    assert directory.live.status()["store_away_s"] > 0
    monkeypatch.setattr("datacache.writeback.remote.asking._TOLD_S", -60.0)
    assert directory.live.status()["store_problem"] == ""  # nobody has asked for a while
    monkeypatch.undo()
    directory.write("a", b"a")
    proxied.accept()
    until(lambda: directory.live.status()["dirty_files"], 0)
    assert directory.live.status()["store_problem"] == ""  # it has answered, though not to who looks


@promise("With the store away, work goes on in folders that this mount made or worked in")
def test_work_goes_on_in_an_outage_in_folders_that_were_made_or_looked_into_here_and_that_nobody_listed(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3
):
    rclone_s3.make_bucket("working")
    directory = opened("s3://working/live")
    directory.write("first", b"1")
    directory.mkdir("runs")
    directory.mkdir("runs/1")
    directory.write("runs/1/loss", b"0.5")
    directory.rename("runs/1", "runs/2")
    directory.flush()
    proxied.refuse()
    directory.write("second", b"2")
    directory.write("runs/2/accuracy", b"0.9")
    directory.mkdir("runs/3")
    directory.write("runs/3/loss", b"0.4")
    assert directory.names() == ["first", "runs", "second"]
    assert directory.names("runs") == ["2", "3"]
    assert directory.names("runs/2") == ["accuracy", "loss"]
    proxied.accept()
    directory.flush()
    assert directory.live.status()["conflict_count"] == 0
    root = rclone_s3.root / "working" / "live"
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert found == {
        "first": b"1",
        "second": b"2",
        "runs/2/loss": b"0.5",
        "runs/2/accuracy": b"0.9",
        "runs/3/loss": b"0.4",
    }


@promise("With the store away, work goes on in folders that this mount made or worked in")
def test_what_was_written_here_is_known_in_an_outage_where_others_have_too_many_names_to_list(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3
):
    rclone_s3.make_bucket("many")
    folder = rclone_s3.root / "many" / "live" / "full"
    folder.mkdir(parents=True)
    for number in range(1100):
        (folder / f"{number}").touch()
    directory = opened("s3://many/live")
    directory.write("full/mine", b"1")
    directory.mkdir("full/made")
    directory.write("full/made/a", b"2")
    directory.flush()
    proxied.refuse()
    assert directory.attr("full/mine").size_bytes == 1
    directory.close(directory.open("full/mine", os.O_WRONLY | os.O_TRUNC))
    directory.write("full/made/b", b"3")
    assert directory.names("full/made") == ["a", "b"]
    with pytest.raises(StoreUnavailableError):
        directory.attr("full/somebodys")


@promise("A file whose bytes only the silent store has is not opened for a change in part (EIO)")
@pytest.mark.parametrize("size_bytes", [3, 300_000])
@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_APPEND, os.O_RDWR])
def test_what_only_a_store_has_that_is_away_is_not_opened_to_be_changed_in_part(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3, flags: int, size_bytes: int
):
    bucket = f"partly-{flags}-{size_bytes}"
    rclone_s3.make_bucket(bucket)
    folder = rclone_s3.root / bucket / "live"
    folder.mkdir(parents=True)
    (folder / "log").write_bytes(b"x" * size_bytes)
    directory = opened(f"s3://{bucket}/live")
    assert directory.names() == ["log"]
    proxied.refuse()
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            directory.open("log", flags)
    handle = directory.open("log", os.O_WRONLY | os.O_TRUNC)
    directory.do(directory.fs.handles.write, handle, 0, b"anew")
    directory.close(handle)
    handle = directory.open("log", flags)  # its bytes are here now
    directory.do(directory.fs.handles.write, handle, 4, b"!")
    directory.close(handle)
    proxied.accept()
    directory.flush()
    assert (folder / "log").read_bytes() == b"anew!"
    assert directory.live.engine.losses.all() == []


@promise("A file whose bytes only the silent store has is not opened for a change in part (EIO)")
def test_a_small_file_that_the_nodes_cache_has_is_appended_to_in_an_outage(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3
):
    rclone_s3.make_bucket("cached")
    folder = rclone_s3.root / "cached" / "live"
    folder.mkdir(parents=True)
    (folder / "log").write_bytes(b"one")
    directory = opened("s3://cached/live")
    assert directory.read("log") == b"one"
    proxied.refuse()
    handle = directory.open("log", os.O_WRONLY | os.O_APPEND)
    directory.do(directory.fs.handles.write, handle, 3, b"two")
    directory.close(handle)
    proxied.accept()
    directory.flush()
    assert (folder / "log").read_bytes() == b"onetwo"


@promise("With the store away, a name in an unknown folder is EIO, never missing")
def test_names_that_were_never_asked_for_are_errors_in_an_outage_and_not_missing(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3
):
    rclone_s3.make_bucket("never")
    directory = opened("s3://never/live")
    proxied.refuse()
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            directory.attr("checkpoint.pt")
        with pytest.raises(StoreUnavailableError):
            directory.names()


@promise("The next server of the same boot knows what the former one knew, also while the store is away")
def test_what_was_known_is_known_in_the_next_process_when_the_store_is_away(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3
):
    rclone_s3.make_bucket("recall")
    directory = opened("s3://recall/live")
    directory.write("before", b"1")
    directory.flush()
    assert directory.names() == ["before"]
    directory.fs.remember()
    proxied.refuse()
    directory = opened("s3://recall/live")
    assert directory.names() == ["before"]
    directory.write("after", b"2")
    assert directory.read("after") == b"2"
    proxied.accept()
    directory.flush()
    assert rclone_s3.client().get_object(Bucket="recall", Key="live/after")["Body"].read() == b"2"


@promise("The next server of the same boot knows what the former one knew, also while the store is away")
def test_what_was_uploaded_since_it_was_written_down_is_known_in_the_next_process_too(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3
):
    rclone_s3.make_bucket("since")
    directory = opened("s3://since/live")
    directory.write("before", b"1")
    directory.write("gone", b"1")
    directory.flush()
    assert directory.names() == ["before", "gone"]
    directory.fs.remember()
    directory.write("before", b"changed")
    directory.write("since", b"2")
    directory.unlink("gone")
    directory.flush()
    proxied.refuse()
    directory = opened("s3://since/live")
    assert directory.names() == ["before", "since"]
    assert directory.attr("before").size_bytes == 7
    with expect_errno(errno.ENOENT):
        directory.attr("gone")
    directory.write("gone", b"again")
    directory.unlink("since")
    proxied.accept()
    directory.flush()
    assert directory.live.status()["conflict_count"] == 0
    folder = rclone_s3.root / "since" / "live"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"before": b"changed", "gone": b"again"}


@promise("With the store away, a name in an unknown folder is EIO, never missing")
def test_what_another_boot_or_a_cut_off_log_has_left_is_an_error_in_an_outage_and_not_missing(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch
):
    rclone_s3.make_bucket("boot")
    directory = opened("s3://boot/live")
    directory.write("a", b"1")
    directory.flush()
    assert directory.names() == ["a"]
    directory.fs.remember()
    directory.write("b", b"2")
    directory.flush()
    directory.live.engine.commit()  # which writes the log first
    log = directory.live.engine.area.folder / "known.log"
    log.write_bytes(log.read_bytes() + b'[9,"c",[1')  # of an upload that is still pending
    proxied.refuse()
    directory = opened("s3://boot/live")
    assert directory.names() == ["a", "b"]
    monkeypatch.setattr("datacache.writeback.remote.memory.boot_id", lambda: "another")
    directory = opened("s3://boot/live")
    with pytest.raises(StoreUnavailableError):
        directory.attr("a")
    assert log.read_bytes() == b""
    assert not log.with_name("known.json").exists()


@pytest.mark.parametrize("text", [None, "{", "[]", '{"boot": "BOOT", "until": 0, "folders": []}'])
def test_what_is_too_old_or_makes_no_sense_is_never_taken_for_what_is_known(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3, text: str | None
):
    bucket = rclone_s3.make_bucket(f"spoiled-{os.urandom(4).hex()}").name
    directory = opened(f"s3://{bucket}/live")
    directory.write("a", b"1")
    directory.flush()
    assert directory.names() == ["a"]
    directory.fs.remember()
    directory.write("b", b"2")  # of which only the log knows
    directory.flush()
    known = directory.live.engine.area.folder / "known.json"
    if text is None:
        os.utime(known, (0, 0))
    else:
        known.write_text(text.replace("BOOT", boot_id()))
    proxied.refuse()
    opened(f"s3://{bucket}/live").fs.remember()  # which does not make it new again
    directory = opened(f"s3://{bucket}/live")
    with pytest.raises(StoreUnavailableError):
        directory.attr("b")


def test_refused_credentials_leave_what_is_staged_and_what_is_known(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3
):
    rclone_s3.make_bucket("refused")
    directory = opened("s3://refused/live")
    directory.write("known", b"known")
    directory.flush()
    assert directory.names() == ["known"]
    proxied.always(Fault(status=403, code="InvalidAccessKeyId"))
    until(lambda: directory.names() and directory.fs.remote._requests._away is not None, True)
    directory.write("new", b"new")
    assert directory.names() == ["known", "new"]
    assert directory.read("new") == b"new"
    with pytest.raises(UploadError, match="access is denied"):
        directory.flush()
    proxied.heal()
    directory.flush()
    assert directory.live.status()["dirty_files"] == 0


def test_a_small_object_is_opened_to_be_changed_in_part_by_one_request(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3
):
    bucket = rclone_s3.make_bucket("parts") / "live"
    bucket.mkdir()
    (bucket / "a").write_bytes(b"theirs")
    directory = opened("s3://parts/live", ttl_s=60.0)
    assert directory.attr("a").size_bytes == 6
    before = len(proxied.requests)
    handle = directory.open("a", os.O_WRONLY)
    directory.do(directory.fs.handles.write, handle, 1, b"O")
    assert [request.split()[0] for request in proxied.requests[before:] if "/live/a" in request] == ["GET"]
    directory.close(handle)
    directory.flush()
    assert (bucket / "a").read_bytes() == b"tOeirs"


@promise("One name in a large folder is asked for alone")
def test_one_name_in_a_large_folder_is_asked_for_alone(opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3):
    rclone_s3.make_bucket("probe")
    directory = opened("s3://probe/live", ttl_s=60.0)
    with expect_errno(errno.ENOENT):
        directory.attr("a")
    before = len(proxied.requests)
    for _ in range(5):
        with expect_errno(errno.ENOENT):
            directory.attr("a")
    assert len(proxied.requests) == before  # it is known for a while
    for number in range(20):
        with expect_errno(errno.ENOENT):
            directory.attr(f"b{number}")
    assert len(proxied.requests) < before + 20  # after some names the folder is listed


def test_a_large_folder_is_listed_again_when_many_of_its_names_are_asked_for(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("datacache.writeback.remote.bucket._RELIST", 20)
    folder = rclone_s3.make_bucket("large") / "live"
    folder.mkdir()
    for number in range(300):
        (folder / f"{number:03}").write_bytes(b"x")
    directory = opened("s3://large/live", ttl_s=60.0)
    assert len(directory.names()) == 300
    directory.fs.remote.expire("")
    before = len(proxied.requests)
    for number in range(300):
        directory.attr(f"{number:03}")
    assert 1 < len([request for request in proxied.requests[before:] if "list-type=2" in request]) < 20


@promise("What a store lists and does not have (404) is left out until the next listing")
@pytest.mark.parametrize("small", [1000, 0])
def test_what_a_store_lists_and_does_not_have_is_left_out_until_the_folder_is_listed_again(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch, small: int
):
    monkeypatch.setattr("datacache.writeback.remote.asking._SMALL", small)
    name = f"stale-{small}"
    folder = rclone_s3.make_bucket(name) / "live"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "f").write_bytes(b"f")
    (folder / "ok").write_bytes(b"ok")

    def list_more(answer: Answer) -> None:
        keys = ("live/gone", "live/sub/f", "elsewhere", "elsewhere/sub/f", "l")
        more = "".join(
            f'<Contents><Key>{key}</Key><Size>3</Size><ETag>"e"</ETag>'
            "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            for key in keys
        )
        answer.body = answer.body.replace(b"</ListBucketResult>", f"{more}</ListBucketResult>".encode())

    proxied.always(Fault(change=list_more, only=lambda method, path: method == "GET" and "list-type=2" in path))
    directory = opened(f"s3://{name}/live", ttl_s=60.0)
    with expect_errno(errno.ENOENT):
        directory.attr("gone")
    assert directory.names() == ["ok", "sub"]
    before = len(proxied.requests)
    for _ in range(5):
        with expect_errno(errno.ENOENT):
            directory.attr("gone")
        assert directory.names() == ["ok", "sub"]
    assert len(proxied.requests) == before
    directory.write("gone", b"ours")
    directory.rename("sub", "moved")
    proxied.heal()
    directory.flush()
    assert directory.read("gone") == b"ours"
    assert directory.names("moved") == ["f"]
    assert sorted(os.listdir(folder)) == ["gone", "moved", "ok"]


@promise("Changes of others are seen after the TTL (`--ttl`, 5 s)")
def test_a_slow_listing_does_not_hide_what_was_uploaded_meanwhile(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3
):
    import threading

    rclone_s3.make_bucket("slow")
    directory = opened("s3://slow/live")
    directory.write("before", b"1")
    directory.flush()
    answered = threading.Event()
    bucket = directory.live.engine.bucket
    original = bucket.list_folder

    def listed_before_the_upload(prefix: str, *, start_after: str = "") -> Any:
        bucket.list_folder = original  # type: ignore[method-assign]  # to write may list the folder once more
        pages = list(original(prefix, start_after=start_after))
        directory.write("new", b"2")
        directory.flush()
        answered.set()
        return iter(pages)

    with expect_errno(errno.ENOENT):
        directory.attr("new")
    bucket.list_folder = listed_before_the_upload  # type: ignore[method-assign]
    until(lambda: directory.names() and answered.is_set(), True)
    assert directory.names() == ["before", "new"]


@promise("With the store away, staged and known data is read, and writing goes on")
def test_requests_that_fail_are_retried_until_all_is_in_the_bucket(
    opened: Open, proxied: FaultProxy, rclone_s3: RcloneS3
):
    rclone_s3.make_bucket("faults")
    directory = opened("s3://faults/live")
    directory.names()
    proxied.add(*[Fault(status=status, only=lambda method, _: method == "PUT") for status in (500, 503)])
    proxied.add(Fault(reset_at=0, only=lambda method, _: method == "PUT"))
    for number in range(5):
        directory.write(f"f{number}", bytes([number]) * 1000)
    directory.flush()
    stored = rclone_s3.client().list_objects_v2(Bucket="faults")["Contents"]
    assert sorted(item["Key"] for item in stored) == [f"live/f{number}" for number in range(5)]
    assert directory.live.status()["conflict_count"] == 0
