"""datacache: a tiered data cache and dataset manager for machine-learning training.

    bucket ──list──▶ catalog: snapshot ──▶ manifest ──▶ mount view / Dataset
    bucket ──get───▶ daemon: fetch once ──▶ RAM ──▶ SSD ──▶ reader ──▶ FUSE | Python | fsspec

    from datacache import open_snapshot
    with open_snapshot("mask@v3") as snap:
        image = snap.read("images/000001.jpg")

Names are imported when they are first used, so that `import datacache` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datacache.core.front import front

if TYPE_CHECKING:
    import fuse_mount as _fuse_mount
    from datacache.api import cache_status as cache_status
    from datacache.api import cancel_job as cancel_job
    from datacache.api import cluster_status as cluster_status
    from datacache.api import collect_garbage as collect_garbage
    from datacache.api import commit_marks as commit_marks
    from datacache.api import connect as connect
    from datacache.api import convert as convert
    from datacache.api import create_snapshot as create_snapshot
    from datacache.api import create_tasks as create_tasks
    from datacache.api import dataset_access as dataset_access
    from datacache.api import dedupe as dedupe
    from datacache.api import diff as diff
    from datacache.api import diff_snapshots as diff_snapshots
    from datacache.api import drain_node as drain_node
    from datacache.api import evaluate as evaluate
    from datacache.api import evict as evict
    from datacache.api import export_snapshot as export_snapshot
    from datacache.api import fix_problems as fix_problems
    from datacache.api import import_export as import_export
    from datacache.api import import_jsonl as import_jsonl
    from datacache.api import jobs as jobs
    from datacache.api import list_datasets as list_datasets
    from datacache.api import list_snapshots as list_snapshots
    from datacache.api import lock_snapshot as lock_snapshot
    from datacache.api import merge as merge
    from datacache.api import open_annotations as open_annotations
    from datacache.api import open_catalog as open_catalog
    from datacache.api import open_snapshot as open_snapshot
    from datacache.api import open_tasks as open_tasks
    from datacache.api import pin as pin
    from datacache.api import preview as preview
    from datacache.api import problems as problems
    from datacache.api import pull_snapshot as pull_snapshot
    from datacache.api import push_snapshot as push_snapshot
    from datacache.api import query as query
    from datacache.api import remove_snapshot as remove_snapshot
    from datacache.api import sample as sample
    from datacache.api import set_dataset_access as set_dataset_access
    from datacache.api import shard as shard
    from datacache.api import stats as stats
    from datacache.api import subset as subset
    from datacache.api import tag_snapshot as tag_snapshot
    from datacache.api import unpin as unpin
    from datacache.api import untag_snapshot as untag_snapshot
    from datacache.api import verify_shards as verify_shards
    from datacache.api import verify_snapshot as verify_snapshot
    from datacache.api import warm as warm
    from datacache.core.errors import DatacacheError as DatacacheError
    from datacache.reader.snapshot import Snapshot as Snapshot
    from datacache.settings import Settings as Settings
    from datacache.settings import load_settings as load_settings
    from fuse_mount import flush as flush
    from fuse_mount import list_bucket_mounts as list_bucket_mounts
    from fuse_mount import list_mounts as list_mounts
    from fuse_mount import mount_bucket as mount_bucket
    from fuse_mount import unmount as unmount

    mount = _fuse_mount.mount_snapshot

__version__ = "0.2.0"
__getattr__, __all__ = front(__name__)


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
