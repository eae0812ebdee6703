"""What must be true before a bucket is mounted read-write: pyfuse3 can be loaded, the staging area is free, the store
lets us in.

Used by `bucket_server`, `bucket_launch` and `dsctl doctor`. No state; any thread may call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datacache.core.errors import DatacacheError, MountError, StoreUnavailableError
from datacache.settings import Settings
from fuse_mount.bucket_config import BucketConfig, normal_url

if TYPE_CHECKING:
    from datacache.writeback.live import LiveBucket

PYFUSE3_HINT = (
    "Install it with `pip install 'datacache[rw]'`. It is built on the spot: first `apt-get install libfuse3-dev "
    "pkg-config gcc python3-dev` (or what your system calls them)."
)


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
    from datacache.writeback.staging import areas

    wanted = normal_url(url)
    return any(area.bucket_url == wanted for area in areas(settings.staging_root))


def open_live(config: BucketConfig, settings: Settings, *, restarted: bool = False) -> LiveBucket:
    """The live bucket of a config; `StagingBusyError` names who has its staging area. `restarted`: with the quota that
    was set last."""
    from datacache import api

    options: dict[str, Any] = {"ack": config.ack, "ttl_s": config.ttl_s, "upload_every_s": config.upload_every_s}
    quota_bytes = None if restarted else config.quota_bytes
    return api.open_bucket(config.url, settings, who=config.mountpoint, quota_bytes=quota_bytes, **options)


def check_store(url: str, settings: Settings, *, known: bool, dirty: bool) -> list[str]:
    """List the first page of what is to be mounted. What is wrong is raised, or returned where the mount is of use all
    the same: a store that is down comes back (`known`: it was mounted before), and what was written earlier (`dirty`)
    must not be out of reach because somebody changed a password.
    """
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
