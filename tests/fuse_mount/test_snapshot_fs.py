"""The file system without a kernel: inodes, listings and bytes are functions of the snapshot alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from datacache.core.errors import DatacacheError, PathNotFoundError
from fuse_mount.snapshot.fs import ROOT, Node, SnapshotFs, directory_inode
from tests.fuse_mount.standin import FolderSnapshot


@pytest.fixture
def fs(folder: Path) -> SnapshotFs:
    return SnapshotFs(FolderSnapshot(folder))


def walk(fs: SnapshotFs, ino: int = ROOT, prefix: bytes = b"") -> dict[bytes, Node]:
    """Path → node of everything, found through listings and lookups."""
    found = {}
    for name, child, _, kind in fs.children(ino, 0):
        is_dir = stat.S_ISDIR(kind)
        node = fs.lookup(ino, name)
        assert node is not None
        assert (node.ino, node.is_dir) == (child, is_dir)
        found[prefix + name] = node
        if is_dir:
            found |= walk(fs, child, prefix + name + b"/")
    return found


def test_any_instance_answers_for_any_inode(fs: SnapshotFs, folder: Path) -> None:
    other = SnapshotFs(FolderSnapshot(folder))
    for path, node in walk(fs).items():
        assert other.getattr(node.ino) == node
        if not node.is_dir and node.size_bytes:
            assert (
                bytes(other.read_wait(node.ino, 0, 1 << 30))
                == (folder / path.decode(errors="surrogateescape")).read_bytes()
            )
        assert (
            other.path_of(node.ino).encode() == path.decode("utf-8", "backslashreplace").encode() + b"/" * node.is_dir
        )


def test_inodes_are_different_and_none_is_the_roots(fs: SnapshotFs) -> None:
    nodes = walk(fs).values()
    assert len({node.ino for node in nodes} | {ROOT}) == len(nodes) + 1
    assert directory_inode(0, 0) == ROOT
    assert directory_inode(1, 0) != directory_inode(2, 0)


def test_a_listing_goes_on_after_any_cookie(fs: SnapshotFs) -> None:
    whole = list(fs.children(ROOT, 0))
    for place, (_, _, cookie, _) in enumerate(whole):
        assert list(fs.children(ROOT, cookie)) == whole[place + 1 :]


def test_what_is_not_there_is_none_or_an_error(fs: SnapshotFs) -> None:
    file = fs.lookup(ROOT, b"large.bin")
    assert file is not None
    assert fs.lookup(ROOT, b"larg") is None
    with pytest.raises(PathNotFoundError):
        fs.lookup(file.ino, b"x")
    with pytest.raises(PathNotFoundError):
        fs.getattr(1 << 40)
    with pytest.raises(PathNotFoundError):
        fs.read_now(ROOT, 0, 1)


def test_reads_are_cut_at_the_end(fs: SnapshotFs) -> None:
    file = fs.lookup(ROOT, b"a b")
    assert file is not None
    assert bytes(fs.read_now(file.ino, 1, 100) or b"") == b" b"
    assert fs.read_now(file.ino, 3, 100) == b""
    assert fs.read_wait(file.ino, 99, 100) == b""


def test_fewer_bytes_than_recorded_are_an_error(fs: SnapshotFs, monkeypatch: pytest.MonkeyPatch) -> None:
    file = fs.lookup(ROOT, b"large.bin")
    assert file is not None
    monkeypatch.setattr(FolderSnapshot, "read_row", lambda *_: b"short")
    with pytest.raises(DatacacheError, match="5 came"):
        fs.read_wait(file.ino, 0, 100)
