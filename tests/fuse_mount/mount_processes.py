"""Read-write mounts for tests: mounting, the bucket behind them, and waiting for what their processes do."""

from __future__ import annotations

import itertools
import os
import platform
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import fuse_mount
from datacache.settings import Settings
from fuse_mount import BucketInfo
from fuse_mount.bucket.held import fetch
from fuse_mount.kernel.session import is_dead
from fuse_mount.lifecycle.state import BucketFiles
from tests import leftovers

_numbers = itertools.count()
needs_resend = pytest.mark.skipif(
    tuple(map(int, platform.release().split("-")[0].split(".")[:2])) < (6, 9)
    or os.environ.get("DATACACHE_FUSE") == "pyfuse3",
    reason="the kernel sends no request again (before 6.9), or pyfuse3 serves",
)
"""Marks tests of read-write mounts that outlive their servers."""


class BucketMounter:
    """Mounts one prefix of a bucket that is a folder of rclone's server, or any other URL."""

    def __init__(self, settings: Settings, url: str, target: Path, bucket: Path) -> None:
        self.settings = settings
        self.url = url
        self.target = target
        self.bucket = bucket
        """Where the prefix lies on the server's disk."""

    def __call__(self, **options: Any) -> BucketInfo:
        options.setdefault("settings", self.settings)
        return fuse_mount.mount_bucket(options.pop("url", self.url), options.pop("target", self.target), **options)

    def flush(self) -> None:
        """Until everything is in the bucket."""
        fuse_mount.flush_mount(self.now(), timeout_s=60, progress=lambda _status: None)

    def unmount(self, **options: Any) -> dict[str, Any]:
        """Unmount, and wait until its processes have ended."""
        info = self.now()
        options = {"flush_s": 60.0, "lazy": False} | options
        with waiting_for_the_end_of(info.supervisor), waiting_for_the_end_of(info.pid):
            return fuse_mount.stop_server(info, **options)

    def now(self) -> BucketInfo:
        """Return what is mounted now."""
        info = fuse_mount.bucket_mount_at(self.target, self.settings)
        assert info is not None, "nothing is mounted"
        return info

    def kill(self) -> BucketInfo:
        """SIGKILL to the server that serves now; returns when its successor does."""
        before = self.now()
        kill(before.pid)
        return self.after(before)

    def kill_all(self) -> BucketInfo:
        """SIGKILL to the daemon, whose keeper would bring the mount back, and to its supervisor and server."""
        info = self.now()
        self.kill_others()
        kill(info.supervisor)
        kill(info.pid)
        return info

    def forget_state(self) -> None:
        """Have the next server find memory that it cannot read, so that it begins with a mount of its own."""
        held = fetch(BucketFiles(self.settings.home, self.target))
        if held is not None:
            os.pwrite(held.memory, b"another.", 0)
            held.close()

    def kill_others(self) -> None:
        """SIGKILL to the daemon."""
        for pid in leftovers.processes_with("DATACACHE_HOME", lambda value: value == str(self.settings.home)):
            with suppress(OSError):  # another process of this home, which has just ended
                if b"datacache.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    kill(pid)

    def after(self, before: BucketInfo) -> BucketInfo:
        """The mount as its next server wrote it down."""
        folder = self.settings.home / "mounts"
        return wait_until(folder, lambda: info if (info := self.now()).pid != before.pid else None)


@contextmanager
def waiting_for_the_end_of(pid: int) -> Iterator[None]:
    """Leave only when the process has ended."""
    try:
        watched = os.pidfd_open(pid)
    except OSError:  # it has
        yield
        return
    try:
        yield
        assert select.select([watched], [], [], 60)[0], f"process {pid} does not end"
    finally:
        os.close(watched)


def kill(pid: int) -> None:
    """SIGKILL, and wait for the end."""
    assert pid > 0, "kill(2) takes it for many processes, this one among them"
    with waiting_for_the_end_of(pid):
        os.kill(pid, signal.SIGKILL)


def unmount_by_hand(mountpoint: Path) -> None:
    """As a person does it, who tries again when somebody is looking at the mount at this very moment."""
    command = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
    deadline = time.monotonic() + 10
    while subprocess.run([*command, mountpoint], check=False).returncode:
        assert time.monotonic() < deadline, f"{mountpoint} stays busy"
        time.sleep(0.1)


def wait_until(folder: Path, ready: Callable[[], Any]) -> Any:
    """Return what `ready` returns when it is true; asked again whenever a name in the folder changes."""
    with inotify(folder) as changed:
        while True:
            found = ready()
            if found:
                return found
            changed()


@contextmanager
def inotify(folder: Path) -> Iterator[Callable[[], None]]:
    """A function that waits until a name in the folder changes (inotify(7))."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_CLOEXEC)
    assert fd >= 0
    created_moved_deleted = 0x100 | 0x80 | 0x40 | 0x200 | 0x8
    assert libc.inotify_add_watch(fd, os.fsencode(folder), created_moved_deleted) >= 0

    def changed() -> None:
        assert select.select([fd], [], [], 60)[0], f"nothing happens in {folder}"
        os.read(fd, 65536)

    try:
        yield changed
    finally:
        os.close(fd)


def mount_is_dead(info: BucketInfo) -> bool:
    """Return whether a mount is there that nobody serves."""
    return is_dead(str(info.mountpoint))
