"""Messages between a mount's processes: no descriptor stays open that nobody asked for, and one process at a time has
the mount's lock, whoever removes the mount's files meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio

from datacache.core import ipc
from fuse_mount.bucket import server
from fuse_mount.bucket.fs.bucket_fs import BucketFs
from fuse_mount.errno_map import FailureLog
from fuse_mount.lifecycle.state import MountFiles
from tests.leftovers import descriptors_below
from tests.promises import promise

pytestmark = [promise("One process at a time becomes a mount's supervisor")]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def sent(tmp_path: Path) -> Iterator[list[int]]:
    """Three descriptors of the file that `descriptors` counts."""
    with ExitStack() as stack:
        yield [stack.enter_context(open(tmp_path / "sent", "ab")).fileno() for _ in range(3)]


@pytest.fixture
def descriptors(tmp_path: Path) -> Callable[[], int]:
    return lambda: descriptors_below(tmp_path / "sent")


@pytest.mark.parametrize("text", [b"[]\n", b"no JSON\n", b'{"half": ', b"[" * 60_000 + b"\n"])
def test_a_broken_message_leaves_none_of_its_descriptors_open(
    pair: tuple[socket.socket, socket.socket], sent: list[int], descriptors: Callable[[], int], text: bytes
) -> None:
    ours, theirs = pair
    socket.send_fds(theirs, [text], sent)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises((OSError, ValueError)):
        ipc.receive(ours, timeout_s=10.0, most_fds=3)
    assert descriptors() == 3


def test_descriptors_that_nobody_asked_for_are_closed(
    pair: tuple[socket.socket, socket.socket], sent: list[int], descriptors: Callable[[], int]
) -> None:
    ours, theirs = pair
    ipc.send(theirs, {"op": "status"}, sent)
    assert ipc.receive(ours) == ({"op": "status"}, [])
    assert descriptors() == 3
    ipc.send(theirs, {"op": "status"}, sent)
    _, [fd] = ipc.receive(ours, most_fds=1)
    assert descriptors() == 4
    os.close(fd)


def test_the_lock_of_a_mount_that_is_removed_is_still_one_processs(tmp_path: Path) -> None:
    files = MountFiles(tmp_path, "/mnt/somewhere")
    with files.locked():
        files.remove()  # by a supervisor whose mount is gone, while another one is being started
        with open(files.lock, "a", encoding="ascii") as second, pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_inode_that_cannot_be_forgotten_does_not_end_the_server_of_a_bucket() -> None:
    pyfuse3_adapter = pytest.importorskip("fuse_mount.bucket.pyfuse3_skin")
    forgotten = []

    class Lookups:
        def forget(self, ino: int, count: int) -> None:
            if ino == 2:
                raise KeyError(ino)
            forgotten.append((ino, count))

    operations = pyfuse3_adapter._Operations(SimpleNamespace(names=Lookups()), FailureLog())
    trio.run(operations.forget, [(1, 1), (2, 1), (3, 5)])
    assert forgotten == [(1, 1), (3, 5)]


def test_what_runs_beside_the_requests_of_a_bucket_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_REMEMBER_S", 0.0)
    monkeypatch.setattr(server, "_CHECK_OPEN_S", 0.0)
    thrice = {name: threading.Semaphore(0) for name in ("remember", "long_open")}

    def fail(name: str) -> None:
        thrice[name].release()
        raise RuntimeError("the test wants it")

    fs = SimpleNamespace(
        remember=lambda: fail("remember"), handles=SimpleNamespace(long_open=lambda: fail("long_open"))
    )
    beside = server.Chores(cast("BucketFs", fs), lambda _ino: None)
    beside.start()
    try:
        assert all(asked.acquire(timeout=10.0) for asked in thrice.values() for _ in range(3))
    finally:
        beside.stop()
