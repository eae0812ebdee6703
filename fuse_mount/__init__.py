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

from typing import TYPE_CHECKING

from datacache.core.front import front

if TYPE_CHECKING:
    from fuse_mount.bucket.areas import LeftArea as LeftArea
    from fuse_mount.bucket.areas import counted as counted
    from fuse_mount.bucket.areas import flush_area as flush_area
    from fuse_mount.bucket.areas import left_areas as left_areas
    from fuse_mount.bucket.areas import lost_lines as lost_lines
    from fuse_mount.bucket.check import check_pyfuse3 as check_pyfuse3
    from fuse_mount.bucket.config import ACKS as ACKS
    from fuse_mount.bucket.config import BucketInfo as BucketInfo
    from fuse_mount.bucket.launch import bucket_mount_at as bucket_mount_at
    from fuse_mount.bucket.launch import bucket_status as bucket_status
    from fuse_mount.bucket.launch import flush as flush
    from fuse_mount.bucket.launch import flush_command as flush_command
    from fuse_mount.bucket.launch import flush_mount as flush_mount
    from fuse_mount.bucket.launch import forget_lost as forget_lost
    from fuse_mount.bucket.launch import is_mounted as is_mounted
    from fuse_mount.bucket.launch import is_supervised as is_supervised
    from fuse_mount.bucket.launch import list_bucket_mounts as list_bucket_mounts
    from fuse_mount.bucket.launch import mount_bucket as mount_bucket
    from fuse_mount.bucket.launch import mount_command as mount_command
    from fuse_mount.bucket.launch import set_quota as set_quota
    from fuse_mount.bucket.launch import stop_server as stop_server
    from fuse_mount.bucket.launch import take_away_dead as take_away_dead
    from fuse_mount.bucket.metrics import render_metrics as render_metrics
    from fuse_mount.kernel.session import Mount as Mount
    from fuse_mount.kernel.session import mounts as mounts
    from fuse_mount.kernel.session import resolved as resolved
    from fuse_mount.kernel.session import users_of as users_of
    from fuse_mount.lifecycle.launch import is_lost as is_lost
    from fuse_mount.lifecycle.launch import list_mounts as list_mounts
    from fuse_mount.lifecycle.launch import mount_snapshot as mount_snapshot
    from fuse_mount.lifecycle.launch import status as status
    from fuse_mount.lifecycle.launch import stop as stop
    from fuse_mount.lifecycle.launch import takeover as takeover
    from fuse_mount.lifecycle.launch import unmount as unmount
    from fuse_mount.lifecycle.state import MountInfo as MountInfo

__getattr__, __all__ = front(__name__, __file__)
