"""Snapshots as directories, read-only, by speaking the kernel's FUSE protocol; buckets as directories, read-write.

    lifecycle/launch ─▶ pool ──starts──▶ __main__ ─▶ supervisor ─▶ mounted
                                                     └──forks──▶ snapshot/worker_process ─▶ worker ─▶ fs
    lifecycle/launch ──starts──▶ __main__ ─▶ bucket/supervisor ──starts──▶ server ─▶ kernel_skin ─▶ fs/
    lifecycle/state: what a mount is, its files, its control socket      process: processes from outside
    lifecycle/keeping: a mount's line to the keeper in the cache daemon  host: mounts for others
    kernel/session: mount(2), fusermount3, unmount      protocol: the kernel's ABI      errno_map: error → errno
    bucket/opening: looks, and opens   areas: staging without a mount      metrics: for Prometheus

Its users call the functions below; CONCURRENCY.md says what its processes promise each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datacache.core.front import front

if TYPE_CHECKING:
    from datacache.core.mounts import Mount as Mount
    from datacache.core.mounts import mounts as mounts
    from fuse_mount.bucket.areas import LeftArea as LeftArea
    from fuse_mount.bucket.areas import counted as counted
    from fuse_mount.bucket.areas import flush_area as flush_area
    from fuse_mount.bucket.areas import left_areas as left_areas
    from fuse_mount.bucket.areas import lost_lines as lost_lines
    from fuse_mount.bucket.metrics import render_metrics as render_metrics
    from fuse_mount.kernel.session import check_pyfuse3 as check_pyfuse3
    from fuse_mount.kernel.session import resolved as resolved
    from fuse_mount.kernel.session import users_of as users_of
    from fuse_mount.lifecycle.launch import await_server as await_server
    from fuse_mount.lifecycle.launch import bucket_mount_at as bucket_mount_at
    from fuse_mount.lifecycle.launch import bucket_status as bucket_status
    from fuse_mount.lifecycle.launch import flush as flush
    from fuse_mount.lifecycle.launch import flush_command as flush_command
    from fuse_mount.lifecycle.launch import flush_mount as flush_mount
    from fuse_mount.lifecycle.launch import forget_lost as forget_lost
    from fuse_mount.lifecycle.launch import is_lost as is_lost
    from fuse_mount.lifecycle.launch import is_mounted as is_mounted
    from fuse_mount.lifecycle.launch import is_supervised as is_supervised
    from fuse_mount.lifecycle.launch import list_bucket_mounts as list_bucket_mounts
    from fuse_mount.lifecycle.launch import list_mounts as list_mounts
    from fuse_mount.lifecycle.launch import mount_bucket as mount_bucket
    from fuse_mount.lifecycle.launch import mount_command as mount_command
    from fuse_mount.lifecycle.launch import mount_snapshot as mount_snapshot
    from fuse_mount.lifecycle.launch import set_quota as set_quota
    from fuse_mount.lifecycle.launch import status as status
    from fuse_mount.lifecycle.launch import stop_server as stop_server
    from fuse_mount.lifecycle.launch import take_away_dead as take_away_dead
    from fuse_mount.lifecycle.launch import takeover as takeover
    from fuse_mount.lifecycle.launch import unmount as unmount
    from fuse_mount.lifecycle.state import ACKS as ACKS
    from fuse_mount.lifecycle.state import BucketInfo as BucketInfo
    from fuse_mount.lifecycle.state import MountInfo as MountInfo

__getattr__, __all__ = front(__name__)
