"""A node as in Kubernetes: mounts run below a host of their own, the daemon keeps their descriptors, and each may die.

`DATACACHE_TEST_KILLS` (how many kills the long test has, 12) asks for more.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import fuse_mount
from datacache.daemon import paths
from datacache.settings import Settings, load_settings
from fuse_mount import MountInfo, keeping
from fuse_mount.state import MountFiles
from tests.fuse_mount.conftest import Mounter
from tests.fuse_mount.containers import Container, parent_of
from tests.fuse_mount.test_crashes import Readers
from tests.fuse_mount.test_session import ended

T = TypeVar("T")
KILLS = int(os.environ.get("DATACACHE_TEST_KILLS") or 12)


def until(ready: Callable[[], T | None]) -> T:
    """What `ready` returns at last. It looks at several processes, whose changes have no one event."""
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
        self.mounts = self._container("mounts", ["fuse_mount", "--host"])
        self.daemon = self._container("daemon", ["datacache.daemon", "--wait"])

    def _container(self, name: str, arguments: list[str]) -> Container:
        return Container(name, arguments, self.folder / f"{name}.log")

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

        return until(ready)


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
    readers = Readers(info, folder)
    dice = random.Random(1)
    victims: list[Callable[[Node, MountInfo], None]] = [kill_worker, kill_supervisor, kill_daemon, kill_host]
    for number in range(KILLS):
        victims[number % len(victims)](node, info)
        info = node.whole(info)
        (info.mountpoint / f"never-looked-up-{dice.random()}").exists()  # served by somebody
    reads, errors, wrong = readers.finish()
    assert (errors, wrong) == (0, 0)
    assert reads > KILLS
    assert fuse_mount.unmount(info.mountpoint, settings=node.settings)
    assert all(ended(pid) for pid in (info.pid, *info.workers))
    assert keeping.kept(node.settings.home) == set()
    print(f"{KILLS} kills, {reads} reads")
