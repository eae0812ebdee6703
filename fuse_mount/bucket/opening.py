"""Opening the live bucket of a read-write mount: whether staging area and store will do, and what is odd about them.

Used by the server. No state; any thread may call.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from datacache import api
from datacache.core.errors import DatacacheError, StoreUnavailableError
from datacache.core.mounts import mounts
from datacache.settings import Settings, format_bytes, load_settings
from datacache.store.open import endpoint_of, open_backend
from datacache.store.urls import split_url
from datacache.writeback.live import LiveBucket
from datacache.writeback.staging.area import areas
from datacache.writeback.state_log import StateLog
from fuse_mount.bucket.areas import counted, lost_lines
from fuse_mount.kernel import session
from fuse_mount.lifecycle.state import BucketConfig, BucketFiles

_LITTLE_BYTES = 1 << 30
_MEMORY = ("tmpfs", "ramfs")

_log = logging.getLogger("fuse_mount")


def open_live(config: BucketConfig, *, restarted: bool, kept: StateLog | None = None) -> tuple[LiveBucket, list[str]]:
    """Open the live bucket of a mount, and return it with what whoever mounts should know, which the log gets as well.
    With `kept`, where what an earlier server left goes on, uploading is still to be begun.

    `StagingBusyError` names who has its staging area. A server that follows another one (`restarted`) has the quota
    that was set last, and looks at less.
    """
    settings = load_settings()
    if config.staging:
        settings = replace(settings, staging=Path(config.staging))
    if config.credentials:  # a daemon that was started from here would have them, too
        settings = replace(settings, credentials=Path(config.credentials), daemon="external")
    endpoints = (None, endpoint_of(split_url(config.url)[0], settings))
    known = any(area.bucket_url == config.url and area.endpoint in endpoints for area in areas(settings.staging_root))
    live = api.open_bucket(
        config.url,
        settings,
        who=config.mountpoint,
        ack=config.ack,
        ttl_s=config.ttl_s,
        upload_every_s=config.upload_every_s,
        quota_bytes=config.quota_bytes,
        keep_quota=restarted,
        direct=config.direct,
        kept=kept,
    )
    try:
        status = live.status()
        notes, files = [*live.notes, *lost_lines(status["losses"])], status["dirty_files"]
        if files:
            verb = "is" if files == 1 else "are"
            notes.append(f"{counted(files, status['dirty_bytes'])} written earlier {verb} being uploaded")
        if not restarted:
            notes += _check_store(config.url, settings, known=known, dirty=bool(files))
            notes += _staging_notes(status["staging"], settings) + _overlap_notes(config, settings)
    except BaseException:
        live.close(discard=True)
        raise
    for note in notes:
        _log.warning("%s", note)
    return live, notes


def _check_store(url: str, settings: Settings, *, known: bool, dirty: bool) -> list[str]:
    """List the first page of what is to be mounted. What is wrong is raised, or returned where the mount is of use all
    the same: a store that is down comes back (`known`: it was mounted before), and what was written earlier (`dirty`)
    must not be out of reach because somebody changed a password."""
    store_url, prefix = split_url(url)
    try:
        store = open_backend(store_url, settings)
        try:
            next(iter(store.list(prefix)), None)
        finally:
            store.close()
    except StoreUnavailableError as exc:
        if not known and not dirty:
            raise
        return [f"the store does not answer ({exc.message}); what is written is staged, and uploaded when it is back"]
    except DatacacheError as exc:
        if not dirty:
            raise
        return [f"nothing can be uploaded now: {exc.message}. {exc.hint}".rstrip()]
    return []


def _staging_notes(staging: dict[str, Any], settings: Settings) -> list[str]:
    """Say what is odd about where writes are staged; `staging` is of a live bucket's status."""
    folder, notes = Path(staging["folder"]), []
    above = [mount for mount in mounts() if folder.is_relative_to(mount.mountpoint)]
    if above and max(above, key=lambda mount: len(mount.mountpoint)).kind in _MEMORY:
        notes.append(
            f"{folder} is in memory (tmpfs): what is acknowledged is lost if this machine restarts before it is "
            "uploaded. Set DATACACHE_STAGING to a folder on a disk"
        )
    if not settings.staging_bytes and staging["limit_bytes"] < _LITTLE_BYTES:
        notes.append(
            f"there are only {format_bytes(staging['limit_bytes'])} to stage in at {folder}: writers wait for uploads "
            "when that is full, and no larger file can be written"
        )
    return notes


def _overlap_notes(config: BucketConfig, settings: Settings) -> list[str]:
    """Name other read-write mounts of this home that show a part of the same prefix."""
    notes = []
    for other in BucketFiles.all_states(settings.home):
        if str(other.mountpoint) == config.mountpoint or other.url == config.url:
            continue
        there = session.mount_at(str(other.mountpoint))
        if there is not None and (other.url.startswith(config.url) or config.url.startswith(other.url)):
            notes.append(
                f"{other.url} is mounted at {other.mountpoint}: each of the two sees what is written through the other "
                "only when it is uploaded, and what both change is a conflict"
            )
    return notes
