"""Snapshots as directories, read-only, by speaking the kernel's FUSE protocol; buckets as directories, read-write.

    launch → mounting → pool ──starts──▶ __main__ → supervisor → mounted
                                                    └──forks──▶ worker_process → worker → snapshot_fs → the snapshot
    session: mount(2), fusermount3, unmount        protocol: the kernel's ABI        errno_map: error → errno
    state: what a mount is, and its files          control: messages                 orphans: after kill -9
    keeping: a mount's line to the keeper in the cache daemon                host: mounts for others

    bucket_launch ──starts──▶ __main__ → bucket_supervisor ──starts──▶ bucket_server → pyfuse3_adapter → bucket_fs
    bucket_fs → bucket_names, bucket_rename, bucket_attributes, bucket_handles, bucket_listings → bucket_nodes
    bucket_session: placing a mount    bucket_config: what it is, its files    bucket_control: the server's socket
    bucket_check: before mounting      bucket_areas: staging without a mount   bucket_metrics: for Prometheus

Its users call the functions below; docs/CONCURRENCY.md says what its processes promise each other.
"""

from __future__ import annotations

from fuse_mount.bucket.areas import LeftArea, counted, flush_area, left_areas, lost_lines
from fuse_mount.bucket.check import check_pyfuse3
from fuse_mount.bucket.config import BucketInfo
from fuse_mount.bucket.launch import (
    bucket_mount_at,
    bucket_status,
    flush,
    flush_command,
    flush_mount,
    forget_lost,
    is_mounted,
    is_supervised,
    list_bucket_mounts,
    mount_bucket,
    mount_command,
    set_quota,
    stop_server,
    take_away_dead,
)
from fuse_mount.bucket.metrics import render_metrics
from fuse_mount.kernel.session import Mount, mounts, resolved, users_of
from fuse_mount.lifecycle.launch import is_lost, list_mounts, mount_snapshot, status, stop, takeover, unmount
from fuse_mount.lifecycle.state import MountInfo

__all__ = [
    "LeftArea",
    "Mount",
    "check_pyfuse3",
    "counted",
    "flush_area",
    "left_areas",
    "lost_lines",
    "mounts",
    "render_metrics",
    "resolved",
    "MountInfo",
    "is_lost",
    "list_mounts",
    "mount_snapshot",
    "status",
    "stop",
    "takeover",
    "unmount",
    "users_of",
    "BucketInfo",
    "bucket_mount_at",
    "bucket_status",
    "flush",
    "flush_command",
    "flush_mount",
    "forget_lost",
    "is_mounted",
    "is_supervised",
    "list_bucket_mounts",
    "mount_bucket",
    "mount_command",
    "set_quota",
    "stop_server",
    "take_away_dead",
]
