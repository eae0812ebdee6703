"""A node as in Kubernetes: mounts run below a host of their own, the daemon keeps their descriptors, and each may die.

`DATACACHE_TEST_KILLS` (how many kills the long test has, 8) asks for more. One reader leaves the machine air.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import stat
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import fuse_mount
from datacache.core import ipc
from datacache.core.errors import MountError
from datacache.daemon import paths
from datacache.daemon.client import DaemonClient
from datacache.settings import Settings, load_settings
from fuse_mount import BucketInfo, MountInfo
from fuse_mount.kernel import session
from fuse_mount.lifecycle import keeping, process
from fuse_mount.lifecycle.state import BucketFiles, MountFiles
from tests import leftovers
from tests.fuse_mount.conftest import Mounter, files_below
from tests.fuse_mount.containers import Container, parent_of
from tests.fuse_mount.mount_processes import BucketMounter, mount_is_dead, needs_resend
from tests.fuse_mount.test_crashes import Readers
from tests.fuse_mount.test_session import ended
from tests.promises import promise
from tests.servers import RcloneS3

T = TypeVar("T")
KILLS = int(os.environ.get("DATACACHE_TEST_KILLS") or 8)


def until(ready: Callable[[], T | None]) -> T:
    """Return what `ready` returns at last. It looks at several processes, whose changes have no one event."""
    deadline = time.monotonic() + 60
    while (found := ready()) is None:
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.01)
    return found


class Node:
    """Its containers, and what is mounted there."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.mounts = self._container("mounts", ["fuse_mount", "--host", "--ready-file", str(folder / "ready")])
        self.daemon = self._container("daemon", ["datacache.daemon", "--wait"])

    def _container(self, name: str, arguments: list[str]) -> Container:
        return Container(arguments, self.folder / f"{name}.log")

    def another(self, name: str) -> Container:
        """The same container of a newer pod."""
        arguments = {"mounts": ["fuse_mount", "--host"], "daemon": ["datacache.daemon", "--wait"]}[name]
        return self._container(f"{name}-2", arguments)

    def state(self, info: MountInfo) -> MountInfo:
        found = MountFiles(self.settings.home, info.mountpoint).read()
        assert found is not None
        return found

    def whole(self, info: MountInfo, host: Container | None = None) -> MountInfo:
        """Wait until a mount runs below the host, with all workers, and the daemon keeps its descriptor."""
        host = host or self.mounts
        files = MountFiles(self.settings.home, info.mountpoint)

        def ready() -> MountInfo | None:
            now = files.read()
            if now is None or not now.kept or len(now.workers) != info.config.workers or parent_of(now.pid) != host.pid:
                return None
            if any(parent_of(pid) != now.pid for pid in now.workers):
                return None
            return now if files.key in keeping.kept(self.settings.home) else None

        try:
            return until(ready)
        except AssertionError as exc:
            said = "\n".join(log.read_text()[-3000:] for log in (*self.folder.glob("*.log"), info.log))
            raise AssertionError(f"{files.read()}\n{keeping.known(self.settings.home)}\n{said}") from exc


@pytest.fixture
def node(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("DATACACHE_DAEMON", "external")
    monkeypatch.setenv("DATACACHE_MOUNT_HOST", str(paths.mount_host_path(home)))
    node = Node(load_settings(), tmp_path)
    with node.daemon, node.mounts:
        yield node


@pytest.fixture
def settings(node: Node) -> Settings:
    """Those of the node, for `mounter`."""
    return node.settings


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert ended(pid)


def kill_worker(node: Node, info: MountInfo) -> None:
    kill(info.workers[0])


def kill_supervisor(node: Node, info: MountInfo) -> None:
    kill(info.pid)


def kill_daemon(node: Node, info: MountInfo) -> None:
    node.daemon.kill_first()
    node.daemon.start()


def kill_host(node: Node, info: MountInfo) -> None:
    node.mounts.kill()
    node.mounts.start()


def test_whatever_is_killed_in_turn_readers_only_wait(folder: Path, mounter: Mounter, node: Node) -> None:
    info = node.whole(mounter())
    readers = Readers(info, folder, count=1)
    dice = random.Random(1)
    victims: list[Callable[[Node, MountInfo], None]] = [kill_worker, kill_supervisor, kill_daemon, kill_host]
    for number in range(KILLS):
        victims[number % len(victims)](node, info)
        info = node.whole(info)
        (info.mountpoint / f"never-looked-up-{dice.random()}").exists()  # served by somebody
    reads, errors, wrong = readers.finish()
    assert (errors, wrong) == (0, 0)
    assert reads > KILLS
    print(f"{KILLS} kills, {reads} reads")
    assert fuse_mount.unmount(info.mountpoint, settings=node.settings)
    assert all(ended(pid) for pid in (info.pid, *info.workers))
    assert keeping.kept(node.settings.home) == set()


def test_a_newer_host_takes_over_while_others_read(folder: Path, mounter: Mounter, node: Node) -> None:
    info = node.whole(mounter())
    readers = Readers(info, folder, count=1)
    with node.another("mounts") as newer, node.another("daemon") as daemon:
        after = node.whole(info, newer)
        assert ended(info.pid)
        assert fuse_mount.status(info.mountpoint, node.settings).pid == after.pid
        assert node.mounts.stop() == 0
        assert node.daemon.stop() == 0
        after = node.whole(info, newer)
        assert after.device == info.device
        assert host_pid(node) == newer.pid
        assert DaemonClient(node.settings).health()["pid"] == daemon.pid
        assert readers.finish()[1:] == (0, 0)
        fuse_mount.unmount(info.mountpoint, settings=node.settings)


def test_an_older_host_goes_on_when_the_newer_one_is_gone_for_good(folder: Path, mounter: Mounter, node: Node) -> None:
    info = node.whole(mounter())
    with node.another("mounts") as newer:
        node.whole(info, newer)
        newer.kill()
        assert files_below(info.mountpoint) == files_below(folder)
        after = node.whole(info)
        assert after.device == info.device
        assert host_pid(node) == node.mounts.pid
        mode = paths.mount_host_path(node.settings.home).stat().st_mode
        assert stat.S_IMODE(mode) == 0o600


def test_a_host_that_ends_leaves_its_mounts_to_the_keeper(folder: Path, mounter: Mounter, node: Node) -> None:
    info = node.whole(mounter())
    readers = Readers(info, folder, count=1)
    assert (node.folder / "ready").exists()
    assert node.mounts.stop() == 0
    assert not (node.folder / "ready").exists()
    assert all(ended(pid) for pid in (info.pid, *info.workers))
    assert files_below(info.mountpoint) == files_below(folder)
    assert not paths.mount_host_path(node.settings.home).exists()
    node.mounts.start()
    assert node.whole(info).device == info.device
    assert readers.finish()[1:] == (0, 0)


def is_ready(node: Node) -> bool:
    """Return what the probe of Kubernetes finds."""
    return subprocess.run(["sh", "-c", f'kill -0 "$(cat {node.folder / "ready"})"'], check=False).returncode == 0


def test_a_host_that_was_killed_does_not_make_its_successor_ready(folder: Path, mounter: Mounter, node: Node) -> None:
    info = node.whole(mounter())
    until(lambda: is_ready(node) or None)
    node.mounts.kill()
    assert (node.folder / "ready").exists()
    assert not is_ready(node)
    node.mounts.start()
    node.whole(info)
    until(lambda: is_ready(node) or None)


def test_what_is_wrong_with_a_mount_is_told_through_the_host_also_that_the_home_is_not_its_own(
    node: Node, tmp_path: Path
) -> None:
    target = tmp_path / "other"
    target.mkdir()
    opener = "tests.fuse_mount.standin:open_folder"
    other = dataclasses.replace(node.settings, home=tmp_path / "elsewhere")
    with pytest.raises(MountError, match="elsewhere"):
        fuse_mount.mount_snapshot("mask", target, settings=other, opener=opener)
    with pytest.raises(MountError, match="there is no missing") as caught:
        fuse_mount.mount_snapshot("missing", target, settings=node.settings, opener=opener)
    assert caught.value.hint == "dsctl snapshot list"


def test_a_mount_whose_processes_and_keeper_all_die_is_lost_and_the_log_says_so(
    folder: Path, mounter: Mounter, node: Node
) -> None:
    info = node.whole(mounter())
    node.daemon.kill_first()
    node.mounts.kill()
    with pytest.raises(OSError, match="Transport endpoint"):
        (info.mountpoint / "not-there").stat()
    node.daemon.start()
    node.mounts.start()
    log = node.folder / "mounts.log"
    until(lambda: True if f"{info.mountpoint} is lost" in log.read_text() else None)
    assert fuse_mount.unmount(info.mountpoint, settings=node.settings)
    assert node.whole(mounter()).pid != info.pid


def test_a_mount_that_is_gone_is_not_brought_back(folder: Path, mounter: Mounter, node: Node) -> None:
    info = node.whole(mounter())
    os.kill(info.pid, signal.SIGSTOP)
    session.unmount_now(str(info.mountpoint))
    node.mounts.kill()
    until(lambda: True if not keeping.kept(node.settings.home) else None)
    assert "bringing it back" not in (node.folder / "daemon.log").read_text()


def test_without_the_host_a_mount_by_hand_is_kept_as_well(
    folder: Path, mounter: Mounter, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.mounts.kill()
    monkeypatch.delenv("DATACACHE_MOUNT_HOST")
    target = folder.parent / "by-hand"
    target.mkdir()
    opener = "tests.fuse_mount.standin:open_folder"
    info = fuse_mount.mount_snapshot("mask", target, settings=load_settings(), opener=opener, workers=1)
    until(lambda: True if node.state(info).kept else None)
    for pid in (info.pid, *info.workers):
        os.kill(pid, signal.SIGSTOP)  # none is to notice that another one died
    for pid in (info.pid, *info.workers):
        kill(pid)
    assert files_below(target) == files_below(folder)
    until(lambda: True if (now := node.state(info)).pid != info.pid and now.kept else None)


@pytest.fixture
def credentials(rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(credentials: None, node: Node, rclone_s3: RcloneS3, tmp_path: Path) -> BucketMounter:
    """mount(…) of a bucket below the host, whose containers have its credentials."""
    leftovers.let_others_through(tmp_path)
    name = f"host-{uuid.uuid4().hex[:12]}"
    folder = rclone_s3.make_bucket(name)
    (tmp_path / "rw").mkdir()
    return BucketMounter(node.settings, f"s3://{name}/run", tmp_path / "rw", folder / "run")


def supervised(bucket: BucketMounter, unlike: int) -> BucketInfo:
    """Wait for another supervisor of a mount that is served and whom the keeper knows."""

    def ready() -> BucketInfo | None:
        now = bucket.now()
        known = keeping.known(bucket.settings.home).get(BucketFiles(bucket.settings.home, bucket.target).key)
        served = process.serves(now.pid, bucket.target) and not mount_is_dead(now)
        return now if now.supervisor != unlike and served and known and known["owned"] else None

    return until(ready)


def test_a_buckets_supervisor_is_followed_by_one_that_watches_its_server_and_all_its_processes_by_new_ones(
    bucket: BucketMounter, node: Node
) -> None:
    bucket()
    first = supervised(bucket, unlike=0)
    until(lambda: True if parent_of(first.supervisor) == node.mounts.pid else None)
    with (bucket.target / "open").open("w") as file:
        file.write("goes ")
        kill(first.supervisor)
        second = supervised(bucket, unlike=first.supervisor)
        assert second.pid == first.pid
        until(lambda: True if parent_of(second.supervisor) == node.mounts.pid else None)
        file.write("on")
    after = bucket.kill()
    assert after.supervisor == second.supervisor
    assert (bucket.target / "open").read_text() == "goes on"
    (bucket.target / "file").write_text("acknowledged")
    node.mounts.kill()
    node.mounts.start()
    third = supervised(bucket, unlike=second.supervisor)
    assert parent_of(third.supervisor) == node.mounts.pid  # and not the daemon, whose end would be its own
    assert (bucket.target / "file").read_text() == "acknowledged"
    bucket.unmount()
    assert (bucket.bucket / "file").read_text() == "acknowledged"
    assert keeping.known(node.settings.home) == {}


@needs_resend
@promise("An upgrade of the mount host lets open files of a read-write mount go on")
def test_a_host_that_ends_leaves_its_mounts_to_the_next_one(bucket: BucketMounter, node: Node) -> None:
    bucket()
    first = supervised(bucket, unlike=0)
    handle = os.open(bucket.target / "open", os.O_WRONLY | os.O_CREAT)
    os.write(handle, b"not closed")
    with node.another("mounts") as newer:
        until(lambda: True if host_pid(node) == newer.pid else None)
        assert node.mounts.stop() == 0
        after = supervised(bucket, unlike=first.supervisor)
        until(lambda: True if parent_of(after.supervisor) == newer.pid else None)
        os.write(handle, b", and goes on")
        os.close(handle)
        assert after.device == first.device
        bucket.unmount()
        assert (bucket.bucket / "open").read_bytes() == b"not closed, and goes on"


def host_pid(node: Node) -> int:
    """Of the host that has the socket."""
    try:
        with ipc.connect(paths.mount_host_path(node.settings.home)) as connection:
            ipc.send(connection, {"op": "ping"})
            return int(ipc.receive(connection)[0]["ok"]["pid"])
    except OSError:
        return 0
