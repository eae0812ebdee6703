"""A read-write mount's supervisor where the kernel refuses it something."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from datacache.core.errors import MountError
from fuse_mount.bucket.supervisor import BucketSupervisor
from fuse_mount.kernel import session
from fuse_mount.lifecycle import process
from fuse_mount.lifecycle.state import BucketConfig, BucketFiles, BucketInfo
from tests import leftovers


@contextmanager
def servers_that_sleep() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Give the servers that supervisors start, which do nothing; no process can be watched."""
    started: list[subprocess.Popen[bytes]] = []

    def spawn(_arguments: list[str], log: Path, *_: Any, **__: Any) -> tuple[subprocess.Popen[bytes], process.Talk]:
        ours, theirs = socket.socketpair()
        theirs.close()
        started.append(subprocess.Popen(["sleep", "infinity"]))
        return started[-1], process.Talk(ours, log)

    def refuse(_pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "spawn", spawn)
        patch.setattr(os, "pidfd_open", refuse)
        try:
            yield started
        finally:
            for child in started:
                child.kill()
                child.wait()


def config(folder: str) -> BucketConfig:
    return BucketConfig(mountpoint=f"{folder}/mnt", home=folder, uid=0, gid=0, allow_other=False, url="s3://lab/run")


def test_a_server_that_cannot_be_watched_is_ended_and_the_error_says_why() -> None:
    leftovers.in_own_process(start_without_pidfds)


def start_without_pidfds() -> None:
    with tempfile.TemporaryDirectory() as folder, servers_that_sleep() as started:
        supervisor = BucketSupervisor(config(folder), attached=True)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(MountError, match="cannot be watched: Too many open files"):
            supervisor.start(lambda _: None)
        [child] = started
        assert child.returncode is not None  # reaped
        assert os.listdir("/proc/self/fd") == before


def test_beside_a_server_that_lives_and_cannot_be_watched_no_other_one_is_started() -> None:
    leftovers.in_own_process(go_on_without_pidfds)


def go_on_without_pidfds() -> None:
    with tempfile.TemporaryDirectory() as folder, servers_that_sleep() as started:
        files = BucketFiles(Path(folder), f"{folder}/mnt")
        files.make_folder()
        files.write(
            BucketInfo(
                config=config(folder),
                mountpoint=Path(folder, "mnt"),
                pid=os.getpid(),
                supervisor=0,
                device=0,
                log=files.log,
                started_at=time.time(),
                url="s3://lab/run",
                staging=folder,
                ack="staged",
            )
        )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "is_ours_at", lambda _: True)
            patch.setattr(process, "serves", lambda pid, _: pid == os.getpid())
            with pytest.raises(MountError, match="cannot be watched"):
                BucketSupervisor(config(folder), attached=True).go_on(lambda _: None)
        assert not started
