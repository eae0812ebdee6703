"""Locks on files: one holder at a time, and none on a file that was removed meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from datacache.core import lockfile


def test_one_holder_at_a_time_and_a_closed_descriptor_ends_the_lock(tmp_path: Path) -> None:
    with lockfile.held(tmp_path / "lock") as mine:
        assert mine
        with lockfile.held(tmp_path / "lock", wait=False) as second:
            assert not second
    fd = lockfile.open_locked(tmp_path / "lock")
    assert fd is not None
    os.close(fd)


def test_readers_share_a_lock(tmp_path: Path) -> None:
    with (
        open(tmp_path / "lock", "wb") as one,
        open(tmp_path / "lock", "rb") as two,
        open(tmp_path / "lock", "rb") as new,
    ):
        assert lockfile.take(one.fileno(), shared=True)
        assert lockfile.take(two.fileno(), wait=False, shared=True)
        assert not lockfile.take(new.fileno(), wait=False)
        for file in (one, two):
            lockfile.give_back(file.fileno())
        assert lockfile.take(new.fileno(), wait=False)


def test_a_file_that_its_former_holder_removed_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, take = tmp_path / "lock", lockfile.take

    def take_late(fd: int, *, wait: bool = True, shared: bool = False) -> bool:
        monkeypatch.setattr(lockfile, "take", take)
        path.unlink()
        return take(fd, wait=wait, shared=shared)

    monkeypatch.setattr(lockfile, "take", take_late)
    fd = lockfile.open_locked(path)
    assert fd is not None
    assert os.path.samestat(os.fstat(fd), path.stat())
    os.close(fd)
    monkeypatch.setattr(lockfile, "take", take_late)
    with pytest.raises(FileNotFoundError):
        lockfile.open_locked(path, os.O_RDWR)


def test_a_child_that_outlives_its_parent_keeps_no_lock_of_its_own_descriptors(tmp_path: Path) -> None:
    lock = lockfile.OwnDescriptor(lambda: lockfile.open_locked(tmp_path / "lock") or -1)
    wait, go = os.pipe()
    closed, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(go)
        os.write(tell, b".")  # its own descriptor was closed before fork() returned
        os.read(wait, 1)  # until the parent has looked, or ended
        os._exit(0 if lock.fd == -1 else 1)
    os.close(wait)
    try:
        os.read(closed, 1)
        with lockfile.held(tmp_path / "lock", wait=False) as second:
            assert not second  # the parent has it still
        lock.close()
        lock.close()
        with lockfile.held(tmp_path / "lock", wait=False) as second:
            assert second
    finally:
        for fd in (go, closed, tell):
            os.close(fd)
        assert os.waitpid(child, 0)[1] == 0
