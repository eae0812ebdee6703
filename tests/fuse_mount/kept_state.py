"""Checks that what a `BucketFs` keeps for its successor is what it has."""

from __future__ import annotations

from datacache.writeback.model import Attributes
from fuse_mount.bucket.fs.bucket_fs import BucketFs
from fuse_mount.bucket.fs.mount_state import LeftState, MountState
from fuse_mount.bucket.fs.tree import FileRow


def expect_kept(fs: BucketFs) -> None:
    """Fail unless a server that begins now would find all that this one has."""
    kept: MountState = fs.kept
    with fs.engine.lock:
        items = list(kept.everything())
        # What `everything` says of the files that are open is what `_open` is to have: nothing was changed.
        now, noted = LeftState(iter(items)), LeftState(fs.engine.kept.items())
    assert noted.nodes == now.nodes
    assert _rows(noted) == _rows(now)
    assert noted.handles == now.handles
    assert {n: (each.ino, each.told) for n, each in noted.listings.items()} == {
        n: (each.ino, each.told) for n, each in now.listings.items()
    }
    assert noted.next == now.next
    assert noted.root == now.root


def _rows(found: LeftState) -> dict[int, FileRow]:
    """The kernel tells the time of what it has written, and the server's clock does not count."""
    rows = {}
    for ino, row in found.files.items():
        attributes = Attributes(*row.attributes)
        rows[ino] = row._replace(attributes=attributes._replace(mtime_ns=0) if row.is_dirty else attributes)
    return rows
