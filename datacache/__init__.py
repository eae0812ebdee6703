"""datacache: a tiered data cache and dataset manager for machine-learning training.

    bucket ──list──▶ catalog: snapshot ──▶ manifest ──▶ mount view / Dataset
    bucket ──get───▶ daemon: fetch once ──▶ RAM ──▶ SSD ──▶ reader ──▶ FUSE | Python | fsspec

    from datacache import open_snapshot
    with open_snapshot("mask@v3") as snap:
        image = snap.read("images/000001.jpg")

Names are imported when they are first used, so that `import datacache` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datacache.api import (
        connect,
        convert,
        create_snapshot,
        create_tasks,
        diff_snapshots,
        export_snapshot,
        import_export,
        import_jsonl,
        open_annotations,
        open_catalog,
        open_snapshot,
        open_tasks,
        shard,
        subset,
        verify_shards,
        verify_snapshot,
    )
    from datacache.core.errors import DatacacheError
    from datacache.reader.snapshot import Snapshot
    from datacache.settings import Settings, load_settings

__version__ = "0.1.0"
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
    "load_settings",
    "open_annotations",
    "open_catalog",
    "open_snapshot",
    "open_tasks",
    "shard",
    "subset",
    "verify_shards",
    "verify_snapshot",
]

_HOME = {
    "DatacacheError": "datacache.core.errors",
    "Settings": "datacache.settings",
    "Snapshot": "datacache.reader.snapshot",
    "connect": "datacache.api",
    "convert": "datacache.api",
    "create_snapshot": "datacache.api",
    "create_tasks": "datacache.api",
    "diff_snapshots": "datacache.api",
    "export_snapshot": "datacache.api",
    "import_export": "datacache.api",
    "import_jsonl": "datacache.api",
    "load_settings": "datacache.settings",
    "open_catalog": "datacache.api",
    "open_annotations": "datacache.api",
    "open_snapshot": "datacache.api",
    "open_tasks": "datacache.api",
    "shard": "datacache.api",
    "subset": "datacache.api",
    "verify_shards": "datacache.api",
    "verify_snapshot": "datacache.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'datacache' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
