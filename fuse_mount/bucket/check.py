"""What must be true before a bucket is mounted read-write: pyfuse3 can be loaded, the staging area is free, the store
lets us in.

Used by `bucket_server`, `bucket_launch` and `dsctl doctor`. No state; any thread may call.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from datacache.core.errors import DatacacheError, MountError, StoreUnavailableError
from datacache.settings import Settings
from fuse_mount.bucket.areas import in_bytes
from fuse_mount.kernel import session
from fuse_mount.lifecycle.state import BucketConfig, BucketFiles, normal_url

if TYPE_CHECKING:
    from datacache.writeback.live import LiveBucket

PYFUSE3_HINT = (
    "Install it with `pip install 'dsctl[rw]'`. It is built on the spot: first `apt-get install libfuse3-dev "
    "pkg-config gcc python3-dev` (or what your system calls them)."
)

_LITTLE_BYTES = 1 << 30
_MEMORY = ("tmpfs", "ramfs")


def check_pyfuse3() -> None:
    """Raise `MountError` unless pyfuse3 can be loaded."""
    try:
        import pyfuse3  # noqa: F401
        import trio  # noqa: F401
    except ImportError as exc:
        raise MountError(
            f"a read-write mount needs pyfuse3, and it cannot be loaded: {exc}", hint=PYFUSE3_HINT
        ) from exc


def written_before(settings: Settings, url: str) -> bool:
    """Whether the staging folder has an area of this URL already."""
    from datacache.store.open import endpoint_of
    from datacache.store.urls import split_url
    from datacache.writeback.staging.area import areas

    wanted, endpoints = normal_url(url), (None, endpoint_of(split_url(url)[0], settings))
    return any(area.bucket_url == wanted and area.endpoint in endpoints for area in areas(settings.staging_root))


def open_live(config: BucketConfig, settings: Settings, *, restarted: bool = False) -> LiveBucket:
    """The live bucket of a config; `StagingBusyError` names who has its staging area. `restarted`: with the quota that
    was set last."""
    from datacache import api

    options: dict[str, Any] = {"ack": config.ack, "ttl_s": config.ttl_s, "upload_every_s": config.upload_every_s}
    options |= {"quota_bytes": config.quota_bytes, "keep_quota": restarted, "direct": config.direct}
    return api.open_bucket(config.url, settings, who=config.mountpoint, **options)


def check_store(url: str, settings: Settings, *, known: bool, dirty: bool) -> list[str]:
    """List the first page of what is to be mounted. What is wrong is raised, or returned where the mount is of use all
    the same: a store that is down comes back (`known`: it was mounted before), and what was written earlier (`dirty`)
    must not be out of reach because somebody changed a password."""
    from datacache.store.open import open_backend
    from datacache.store.urls import split_url

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


def staging_notes(staging: dict[str, Any], settings: Settings) -> list[str]:
    """What is odd about where writes are staged; `staging` is of a live bucket's status."""
    folder, notes = Path(staging["folder"]), []
    above = [mount for mount in session.mounts() if folder.is_relative_to(mount.mountpoint)]
    if above and max(above, key=lambda mount: len(mount.mountpoint)).kind in _MEMORY:
        notes.append(
            f"{folder} is in memory (tmpfs): what is acknowledged is lost if this machine restarts before it is "
            "uploaded. Set DATACACHE_STAGING to a folder on a disk"
        )
    if not settings.staging_bytes and staging["limit_bytes"] < _LITTLE_BYTES:
        notes.append(
            f"there are only {in_bytes(staging['limit_bytes'])} to stage in at {folder}: writers wait for uploads when "
            "that is full, and no larger file can be written"
        )
    return notes


def overlap_notes(config: BucketConfig, settings: Settings) -> list[str]:
    """Other read-write mounts of this home that show a part of the same prefix."""
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
