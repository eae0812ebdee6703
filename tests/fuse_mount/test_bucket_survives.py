"""A read-write mount outlives its processes: whoever is killed, programs wait, and their open files go on.

`DATACACHE_TEST_KILLS` (how many kills the long test has, 4) asks for more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from datacache.daemon.client import DaemonClient
from fuse_mount import BucketInfo
from fuse_mount.lifecycle import keeping, launch, process
from fuse_mount.lifecycle.state import BucketFiles
from tests import leftovers
from tests.fuse_mount.containers import parent_of
from tests.fuse_mount.crash.programs import Running, problems_in
from tests.fuse_mount.mount_processes import BucketMounter, kill, mount_is_dead, needs_resend, unmount_by_hand
from tests.promises import promise

T = TypeVar("T")
KILLS = int(os.environ.get("DATACACHE_TEST_KILLS") or 4)

pytestmark = needs_resend


def until(ready: Callable[[], T | None]) -> T:
    """Return what `ready` returns at last. It looks at several processes, whose changes have no one event."""
    deadline = time.monotonic() + 60
    while (found := ready()) is None:
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.01)
    return found


class Surviving:
    """A mount whose processes are killed."""

    def __init__(self, mounter: BucketMounter) -> None:
        self.mounter, self.target = mounter, mounter.target
        self.settings = mounter.settings
        mounter(upload_every_s=1.0)
        self.device = self.whole().device

    def whole(self) -> BucketInfo:
        """Wait until it is served and supervised, and kept by the daemon."""

        def ready() -> BucketInfo | None:
            now = BucketFiles(self.settings.home, self.target).read()
            if now is None or not all(process.serves(pid, self.target) for pid in (now.pid, now.supervisor)):
                return None
            known = keeping.known(self.settings.home).get(BucketFiles(self.settings.home, self.target).key)
            is_kept = known is not None and known["owned"] and known["note"].get("device") == now.device
            return now if is_kept else None

        return until(ready)

    def kill_server(self) -> None:
        self.after(kill, self.mounter.now().pid)

    def kill_supervisor(self) -> None:
        kill(self.mounter.now().supervisor)

    def kill_both(self) -> None:
        now = self.mounter.now()
        kill(now.supervisor)
        self.after(kill, now.pid)

    def kill_daemon(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(OSError):  # another process of this home, which has just ended
                if b"datacache.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    kill(pid)
        DaemonClient(self.settings).ensure()

    def after(self, what: Callable[[int], None], pid: int) -> None:
        """Wait for the next server after something was done to this one."""
        what(pid)
        until(lambda: True if self.mounter.now().pid != pid else None)

    def processes(self) -> list[int]:
        """All of this home's."""
        return leftovers.processes_with("DATACACHE_HOME", lambda value: value == str(self.settings.home))

    WAYS = (kill_server, kill_daemon, kill_both, kill_supervisor)

    def elsewhere(self, folder: Path) -> BucketMounter:
        """Mount the bucket with an empty home."""
        target, home = folder / "elsewhere", folder / "other-home"
        target.mkdir()
        home.mkdir()
        other = BucketMounter(replace(self.settings, home=home), self.mounter.url, target, self.mounter.bucket)
        other()
        return other


@pytest.fixture
def mount(bucket_mounter: BucketMounter) -> Surviving:
    return Surviving(bucket_mounter)


@promise("Server, supervisor and daemon of a read-write mount may be killed again and again: programs wait")
@pytest.mark.timeout(180 + 15 * KILLS)
def test_whoever_is_killed_programs_wait_and_nothing_is_lost(mount: Surviving, tmp_path: Path) -> None:
    with Running(mount.target) as programs:
        for number in range(KILLS):
            mount.WAYS[number % len(mount.WAYS)](mount)
            assert mount.whole().device == mount.device
        said = programs.finish()
    print(said)
    assert os.stat(mount.target).st_dev == mount.device
    mount.mounter.unmount(flush_s=60.0 + 5 * KILLS)
    other = mount.elsewhere(tmp_path)
    problems = [each for name in said for each in problems_in(other.target / name, name, said[name]["rounds"])]
    other.unmount()
    assert problems == []


@promise("Server, supervisor and daemon of a read-write mount may be killed again and again: programs wait")
def test_open_files_and_folders_go_on(mount: Surviving) -> None:
    folder = mount.target / "folder"
    folder.mkdir()
    long_names = sorted(f"{number:0200d}" for number in range(150))  # more than are told at a time
    for name in long_names:
        (folder / name).touch()
    names = os.scandir(folder)
    seen = [next(names).name for _ in range(10)]
    (mount.target / "read").write_bytes(b"0123456789")
    (mount.target / "gone").write_bytes(b"still here")
    read = os.open(mount.target / "read", os.O_RDONLY)
    gone = os.open(mount.target / "gone", os.O_RDWR)
    write = os.open(mount.target / "write", os.O_RDWR | os.O_CREAT)
    append = os.open(mount.target / "append", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    unnamed = os.open(mount.target, os.O_TMPFILE | os.O_RDWR)
    mapped = os.open(mount.target / "mapped", os.O_RDWR | os.O_CREAT)
    os.unlink(mount.target / "gone")
    os.ftruncate(mapped, 8192)
    memory = mmap.mmap(mapped, 8192)
    memory[0:5] = b"first"
    for handle in (write, append, unnamed):
        os.write(handle, b"before ")
    assert os.read(read, 4) == b"0123"
    os.write(gone, b"was")
    numbers = [os.fstat(handle).st_ino for handle in (read, gone, write, append, unnamed, mapped)]

    mount.kill_server()
    mount.whole()
    mount.kill_both()

    assert numbers == [os.fstat(handle).st_ino for handle in (read, gone, write, append, unnamed, mapped)]
    assert sorted([*seen, *(entry.name for entry in names)]) == long_names
    assert os.read(read, 10) == b"456789"
    assert os.pread(gone, 20, 0) == b"wasll here"
    memory[4096:4100] = b"last"
    memory.flush()
    for handle in (write, append, unnamed):
        os.write(handle, b"after")
    folder_fd = os.open(mount.target, os.O_RDONLY)
    os.link(f"/proc/self/fd/{unnamed}", "named", dst_dir_fd=folder_fd, follow_symlinks=True)
    os.close(folder_fd)
    for handle in (read, gone, write, append, unnamed, mapped):
        os.close(handle)
    memory.close()
    mount.mounter.unmount()
    for name in ("write", "append", "named"):
        assert (mount.mounter.bucket / name).read_bytes() == b"before after"
    assert (mount.mounter.bucket / "mapped").read_bytes() == b"first" + bytes(4091) + b"last" + bytes(4092)
    assert not (mount.mounter.bucket / "gone").exists()


def test_a_server_that_has_the_kernel_write_what_it_gathered_can_be_killed(mount: Surviving) -> None:
    """The kernel lets nobody end who waits for that."""
    content = os.urandom(8 * 2**20)
    server, caught = mount.mounter.now().pid, threading.Event()
    processes = [server, *(pid for pid in mount.processes() if parent_of(pid) == server)]

    def write_on() -> None:
        while not caught.is_set():
            os.pwrite(handle, content, 0)

    def flush_on() -> None:
        while not caught.is_set():
            mount.mounter.flush()

    def catch() -> bool | None:
        if not any(map(waits_for_pages, processes)):
            return None
        os.kill(server, signal.SIGSTOP)
        if any(map(waits_for_pages, processes)):
            return True
        os.kill(server, signal.SIGCONT)
        return None

    handle = os.open(mount.target / "large", os.O_RDWR | os.O_CREAT)
    with ThreadPoolExecutor(2) as threads:
        work = [threads.submit(each) for each in (write_on, flush_on)]
        until(catch)
        caught.set()
        mount.after(kill, server)
        for each in work:
            each.result()
    assert os.pread(handle, len(content), 0) == content
    os.close(handle)
    mount.mounter.flush()
    assert (mount.mounter.bucket / "large").read_bytes() == content


def waits_for_pages(pid: int) -> bool:
    """Return whether a thread of a process waits for pages to be written."""
    with suppress(OSError):
        return any(b"folio_wait" in (task / "wchan").read_bytes() for task in Path(f"/proc/{pid}/task").iterdir())
    return False


def test_without_a_daemon_the_next_supervisor_has_it_from_the_server(mount: Surviving) -> None:
    first = mount.mounter.now()
    mount.mounter.kill_others()
    with (mount.target / "open").open("w") as file:
        file.write("goes ")
        kill(first.supervisor)
        until(lambda: True if mount.mounter.now().supervisor != first.supervisor else None)
        mount.kill_server()
        file.write("on")
    assert (mount.target / "open").read_text() == "goes on"


def test_it_is_unmounted_as_ever_also_while_its_server_is_dead(mount: Surviving) -> None:
    before = mount.mounter.now()
    with (mount.target / "open").open("w") as file:
        file.write("written")
    kill(before.pid)
    unmount_by_hand(mount.target)
    until(lambda: True if not process.serves(before.supervisor, mount.target) else None)
    assert BucketFiles(mount.settings.home, mount.target).read() is None
    assert keeping.known(mount.settings.home) == {}
    mount.mounter()
    before = mount.whole()
    kill(before.pid)
    launch.await_server(before)
    mount.mounter.unmount()
    assert (mount.mounter.bucket / "open").read_text() == "written"


def test_memory_of_another_version_has_the_next_server_begin_anew(mount: Surviving) -> None:
    before = mount.mounter.now()
    (mount.target / "file").write_text("acknowledged")
    mount.mounter.forget_state()
    mount.kill_server()
    assert mount.whole().device != before.device
    assert (mount.target / "file").read_text() == "acknowledged"
    mount.mounter.unmount()


def test_a_mount_that_nobody_serves_for_the_moment_is_not_taken_for_dead(mount: Surviving) -> None:
    before = mount.mounter.now()
    os.kill(before.supervisor, signal.SIGSTOP)
    kill(before.pid)
    try:
        assert not mount_is_dead(before)
        with pytest.raises(launch.MountError, match="being started again"):
            mount.mounter()
    finally:
        os.kill(before.supervisor, signal.SIGCONT)
    assert mount.whole().device == before.device
