"""datacache: a tiered data cache and dataset manager for machine-learning training.

    bucket ──list──▶ catalog: snapshot ──▶ manifest ──▶ mount view / Dataset
    bucket ──get───▶ daemon: fetch once ──▶ RAM ──▶ SSD ──▶ reader ──▶ FUSE | Python | fsspec

    from datacache import open_snapshot
    with open_snapshot("mask@v3") as snap:
        image = snap.read("images/000001.jpg")

Names are imported when they are first used, so that `import datacache` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _CHECKING

if _CHECKING:
    from datacache.api import (
        cache_status,
        cancel_job,
        collect_garbage,
        connect,
        convert,
        create_snapshot,
        create_tasks,
        dataset_access,
        diff_snapshots,
        evict,
        export_snapshot,
        import_export,
        import_jsonl,
        jobs,
        list_datasets,
        list_snapshots,
        open_annotations,
        open_catalog,
        open_snapshot,
        open_tasks,
        pin,
        preview,
        query,
        remove_snapshot,
        set_dataset_access,
        shard,
        stats,
        subset,
        tag_snapshot,
        unpin,
        untag_snapshot,
        verify_shards,
        verify_snapshot,
        warm,
    )
    from datacache.core.errors import DatacacheError
    from datacache.reader.snapshot import Snapshot
    from datacache.settings import Settings, load_settings
    from fuse_mount import flush, list_bucket_mounts, list_mounts, mount_bucket, unmount
    from fuse_mount import mount_snapshot as mount

__version__ = "0.2.0"
__all__ = [
    "DatacacheError",
    "Settings",
    "Snapshot",
    "cache_status",
    "cancel_job",
    "collect_garbage",
    "connect",
    "convert",
    "create_snapshot",
    "create_tasks",
    "dataset_access",
    "diff_snapshots",
    "evict",
    "export_snapshot",
    "flush",
    "import_export",
    "import_jsonl",
    "jobs",
    "list_bucket_mounts",
    "list_datasets",
    "list_mounts",
    "list_snapshots",
    "load_settings",
    "mount",
    "mount_bucket",
    "open_annotations",
    "open_catalog",
    "open_snapshot",
    "open_tasks",
    "pin",
    "preview",
    "query",
    "remove_snapshot",
    "set_dataset_access",
    "shard",
    "stats",
    "subset",
    "tag_snapshot",
    "unmount",
    "unpin",
    "untag_snapshot",
    "verify_shards",
    "verify_snapshot",
    "warm",
]

_ELSEWHERE = {
    "DatacacheError": "datacache.core.errors",
    "Settings": "datacache.settings",
    "Snapshot": "datacache.reader.snapshot",
    "flush": "fuse_mount",
    "list_bucket_mounts": "fuse_mount",
    "list_mounts": "fuse_mount",
    "load_settings": "datacache.settings",
    "mount": "fuse_mount",
    "mount_bucket": "fuse_mount",
    "unmount": "fuse_mount",
}
"""Modules of the names that `datacache.api` does not have."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'datacache' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_ELSEWHERE.get(name, "datacache.api"))
    return getattr(module, "mount_snapshot" if name == "mount" else name)


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
