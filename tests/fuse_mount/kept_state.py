"""Checks that what a `BucketFs` keeps for its successor is what it has."""

from __future__ import annotations

from fuse_mount.bucket.fs.bucket_fs import BucketFs
from fuse_mount.bucket.fs.mount_state import LeftState, MountState


def expect_kept(fs: BucketFs) -> None:
    """Fail unless a server that begins now would find all that this one has."""
    kept: MountState = fs.kept
    with fs.engine.lock:
        items = list(kept.everything())
        # What `everything` says of the files that are open is what `_open` is to have: nothing was changed.
        now, noted = LeftState(iter(items)), LeftState(fs.engine.kept.items())
    assert noted.nodes == now.nodes
    assert noted.files == now.files
    assert noted.handles == now.handles
    assert {n: (each.ino, each.told) for n, each in noted.listings.items()} == {
        n: (each.ino, each.told) for n, each in now.listings.items()
    }
    assert noted.next == now.next
    assert noted.root == now.root
