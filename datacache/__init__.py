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
        connect,
        convert,
        create_snapshot,
        create_tasks,
        diff_snapshots,
        export_snapshot,
        import_export,
        import_jsonl,
        list_datasets,
        list_snapshots,
        open_annotations,
        open_catalog,
        open_snapshot,
        open_tasks,
        preview,
        query,
        shard,
        stats,
        subset,
        tag_snapshot,
        verify_shards,
        verify_snapshot,
    )
    from datacache.core.errors import DatacacheError
    from datacache.reader.snapshot import Snapshot
    from datacache.settings import Settings, load_settings
    from fuse_mount import mount_snapshot as mount
    from fuse_mount import unmount

__version__ = "0.2.0"
__all__ = [
    "DatacacheError",
    "Settings",
    "Snapshot",
    "connect",
    "convert",
    "create_snapshot",
    "create_tasks",
    "diff_snapshots",
    "export_snapshot",
    "import_export",
    "import_jsonl",
    "list_datasets",
    "list_snapshots",
    "load_settings",
    "mount",
    "open_annotations",
    "open_catalog",
    "open_snapshot",
    "open_tasks",
    "preview",
    "query",
    "shard",
    "stats",
    "subset",
    "tag_snapshot",
    "unmount",
    "verify_shards",
    "verify_snapshot",
]

_ELSEWHERE = {
    "DatacacheError": ("datacache.core.errors", "DatacacheError"),
    "Settings": ("datacache.settings", "Settings"),
    "Snapshot": ("datacache.reader.snapshot", "Snapshot"),
    "load_settings": ("datacache.settings", "load_settings"),
    "mount": ("fuse_mount", "mount_snapshot"),
    "unmount": ("fuse_mount", "unmount"),
}
"""The modules of the names that `api` does not have."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'datacache' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _ELSEWHERE.get(name, ("datacache.api", name))
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
