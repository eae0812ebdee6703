"""Snapshots as directories: a read-only mount that speaks the kernel's FUSE protocol itself.

    launch ──starts──▶ __main__ → supervisor ──forks──▶ worker → snapshot_fs → the snapshot
    session: mount(2), fusermount3, unmount        protocol: the kernel's ABI        errno_map: error → errno
    state: what a mount is, and its files          control: the supervisor's socket  orphans: after kill -9

Its users call the functions below; docs/CONCURRENCY.md says what its processes promise each other.
"""

from __future__ import annotations

from fuse_mount.launch import list_mounts, mount_snapshot, status, stop, takeover, unmount
from fuse_mount.session import users_of
from fuse_mount.state import MountInfo

__all__ = ["MountInfo", "list_mounts", "mount_snapshot", "status", "stop", "takeover", "unmount", "users_of"]
