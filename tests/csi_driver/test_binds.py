"""Bind mounts of ordinary folders: what can be reached, what lies on what, what is taken away."""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from csi_driver.node import binds
from csi_driver.node.patience import Patience
from csi_driver.status import RequestError
from tests import leftovers
from tests.csi_driver.kubelet import needs_root

pytestmark = needs_root


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with folders, links and a file."""
    path = tmp_path / "volume with space"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "volume", path], check=True)
    (path / "a" / "b").mkdir(parents=True)
    (path / "a" / "file").write_text("x")
    (path / "out").symlink_to("/etc")
    (path / "a" / "loop").symlink_to("../a")
    yield path
    leftovers.unmount_under(tmp_path)


@pytest.fixture
def root(volume: Path) -> Iterator[int]:
    descriptor = binds.open_root(str(volume))
    yield descriptor
    os.close(descriptor)


def bound(root: int, subpath: str, target: Path, *, read_only: bool = False) -> None:
    folder = binds.open_folder(root, subpath)
    try:
        binds.bind(folder, str(target), read_only=read_only)
    finally:
        os.close(folder)


def test_a_folder_of_a_mount_is_bound_with_its_flags(volume: Path, root: int, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    bound(root, "a", target, read_only=True)
    assert sorted(os.listdir(target)) == ["b", "file", "loop"]
    flags = os.statvfs(target).f_flag
    assert flags & os.ST_RDONLY
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NODEV
    (volume / "a" / "new").touch()  # the volume itself stays as it was
    there = binds.top_at(str(target))
    assert there is not None
    assert there.device == volume.stat().st_dev


@pytest.mark.parametrize(
    "wrong", ["out", "out/ssl", "a/loop", "a/loop/b", "../x", "a/../..", "no", "a/file", "a/file/b"]
)
def test_what_is_no_folder_of_the_volume_is_refused(root: int, wrong: str) -> None:
    with pytest.raises(RequestError, match=r"folder|symbolic link"):
        binds.open_folder(root, wrong)


def test_another_mount_in_the_volume_is_not_entered(volume: Path, root: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "other", volume / "a" / "b"], check=True)
    with pytest.raises(RequestError, match="out of the volume"):
        binds.open_folder(root, "a/b")


def test_missing_folders_are_made_for_their_owner_and_links_are_not_followed(volume: Path, root: int) -> None:
    os.close(binds.make_folder(root, "a/new/er", uid=12, gid=34, umask=0o002))
    made = (volume / "a" / "new" / "er").stat()
    assert (made.st_uid, made.st_gid, made.st_mode & 0o7777) == (12, 34, 0o2775)
    with pytest.raises(RequestError):
        binds.make_folder(root, "out/new", uid=0, gid=0, umask=0o022)
    assert not Path("/etc/new").exists()


def test_the_top_of_a_stack_is_found_and_all_of_it_is_taken_away(root: int, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    found = []
    for subpath in ("a", "", "a/b"):
        bound(root, subpath, target)
        there = binds.top_at(str(target))
        assert there == binds.tops()[str(target)]
        found.append(there)
    for lower, upper in itertools.pairwise(found):
        assert upper is not None
        assert lower is not None
        assert upper.parent == lower.id
    with open(target / "busy", "w"):
        binds.clear(str(target))
    assert binds.top_at(str(target)) is None
    binds.clear(str(target))
    binds.remove_place(str(target))
    binds.remove_place(str(target))
    assert not target.exists()


def test_a_question_that_is_not_answered_is_asked_once_and_its_late_answer_is_thrown_away() -> None:
    patience, gate, discarded = Patience("it"), threading.Event(), threading.Event()
    started: list[int] = []

    def wait() -> str:
        started.append(1)
        gate.wait()
        return "late"

    for _ in range(3):
        with pytest.raises(RequestError):
            patience.ask("key", wait, 0.05, discard=lambda _answer: discarded.set())
    assert len(started) == 1
    gate.set()
    assert discarded.wait(10)
    assert patience.ask("key", lambda: "now", 10.0) == "now"
