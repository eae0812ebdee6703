"""Mounting, unmounting, listing and handing over, for callers: starts the supervisor process and talks to it.

Used by `dataset_cli` and the CSI driver through `fuse_mount`. It may not import the reader. Functions may be
called from any thread and from several processes; two that mount on one directory at a time are kept apart by
the kernel's mounts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import time
from pathlib import Path
from typing import Any

from datacache.catalog.open import open_catalog_url
from datacache.core.errors import DaemonError, DatacacheError, MountError
from datacache.daemon.client import DaemonClient
from datacache.daemon.mount_leases import MountLeases
from datacache.settings import Settings, load_settings
from fuse_mount.bucket.config import BucketFiles, BucketInfo
from fuse_mount.bucket.session import is_dead
from fuse_mount.kernel import session
from fuse_mount.lifecycle import keeping, mounting, process
from fuse_mount.lifecycle.state import (
    DEFAULT_OPENER,
    MOUNT_TYPE,
    REVIVER,
    MountConfig,
    MountFiles,
    MountInfo,
    read_state,
)

_log = logging.getLogger("fuse_mount")
_GONE_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.005
_DEFAULT_WORKERS = 4


def mount_snapshot(
    ref: str,
    mountpoint: str | Path,
    *,
    settings: Settings,
    uid: int | None = None,
    gid: int | None = None,
    umask: int = 0o022,
    allow_other: bool | None = None,
    workers: int | None = None,
    foreground: bool = False,
    resend: bool = True,
    clone: bool = True,
    opener: str = DEFAULT_OPENER,
    given: bool = False,
) -> MountInfo:
    """Mount a snapshot on an empty directory and return when it can be read.

    A mount of this home that has lost all its processes is replaced.

    Files belong to `uid` and `gid` (default: the caller's) with modes 0444 and 0555 less `umask`.
    `allow_other` lets other users in (default: for root only). `workers` processes serve it (default: one a core, at
    most 4), and other mounts of the same surroundings (`pool`). The mount outlives the caller: they are daemons with a
    log under `<home>/mounts/`. With `foreground` it has processes of its own, this process's streams are used, and the
    call returns when the mount is gone. `resend=False` behaves as on a kernel before 6.9, `clone=False` as where
    workers cannot have queues of their own; `opener` names the function that opens the
    snapshot in each worker. `given`: the caller has a record that this `NAME@ID` was looked up in the catalog and
    given before, so it is mounted also when it was removed there since. Raises `MountError`; nothing is mounted then.
    """
    target = session.resolved(mountpoint)
    known = MountFiles(settings.home, target).read()
    if known is not None and is_lost(known, settings):
        session.unmount_now(target, lazy=True)
    session.check_mountpoint(target)
    session.check_device()
    if workers is not None and workers < 1:
        raise MountError("a mount needs one worker or more")
    config = MountConfig(
        ref=ref,
        mountpoint=target,
        home=str(settings.home),
        uid=os.getuid() if uid is None else uid,
        gid=os.getgid() if gid is None else gid,
        umask=umask,
        allow_other=os.geteuid() == 0 if allow_other is None else allow_other,
        workers=workers or min(_DEFAULT_WORKERS, len(os.sched_getaffinity(0))),
        resend=resend,
        clone=clone,
        opener=REVIVER if given else opener,
    )
    if opener != DEFAULT_OPENER:
        return _mount(config, settings, foreground=foreground)
    # The first read that misses would wait for the daemon's start: let both start at once. Without one, workers read
    # from the store.
    daemon = DaemonClient(settings)
    with contextlib.suppress(DaemonError):
        daemon.start_soon()
    info = _mount(config, settings, foreground=foreground)
    if not foreground:
        with contextlib.suppress(DaemonError):
            daemon.ensure()
            _hold(daemon)
    return info


def _hold(daemon: DaemonClient) -> None:
    """Take the lease of the home's mounts. While the catalog is away one mounts without, and the daemon tries again."""
    try:
        daemon.hold_mounts()
    except (DatacacheError, OSError) as exc:
        _log.warning("garbage collection may take what is mounted: %s", exc)


def takeover(mountpoint: str | Path, settings: Settings) -> MountInfo:
    """Start a new supervisor and workers for a mount and let the old ones finish: no unmount, no error for
    readers.

    It also revives a mount whose supervisor was killed, as long as one of its workers lives. Raises
    `MountError`.
    """
    target = session.resolved(mountpoint)
    known = MountFiles(settings.home, target).read()
    if known is None:
        raise MountError(f"no mount of this home is known at {target}", hint="dsctl status lists them.")
    if settings.mount_host is not None:
        return _ask_host(["--takeover", target], known.config, settings, settings.mount_host)
    environment = process.environment(settings.environment())
    taken = mounting.take_over(target, settings.home, environment, only_if_dead=False)
    assert taken is not None
    return taken


def unmount(mountpoint: str | Path, *, lazy: bool = False, settings: Settings | None = None) -> bool:
    """Unmount and wait until its processes have ended. False where nothing was mounted.

    Raises `MountError` naming who uses it when it is busy, and naming the other home where a mount is not this one's;
    `lazy` takes it out of sight at once and lets those finish.
    """
    target = session.resolved(mountpoint)
    there = session.mount_at(target)
    if there is None:
        return False
    if there.kind != MOUNT_TYPE:
        raise MountError(f"what is mounted at {target} is not ours ({there.kind})", hint=f"umount {target}")
    settings = settings or load_settings()
    home = settings.home
    known = MountFiles(home, target).read()
    _expect_ours(there, known or BucketFiles(home, target).read(), home)
    session.unmount_now(target, lazy=lazy)
    if known is not None and not lazy:
        _await_end(known)
        _let_go(settings)
    return True


def _let_go(settings: Settings) -> None:
    """End the lease of what is not mounted any more: the daemon does it within half a minute, where there is one."""
    daemon = DaemonClient(settings)
    try:
        if daemon.alive():
            daemon.hold_mounts()
        else:
            MountLeases(settings, open_catalog_url).renew()
    except (DatacacheError, OSError) as exc:
        _log.info("the catalog takes it for mounted still: %s", exc)


def _expect_ours(there: session.Mount, known: MountInfo | BucketInfo | None, home: Path) -> None:
    """Raise `MountError` for a mount of another home: its programs read and write there."""
    target = there.mountpoint
    if known is not None and known.device == there.device:
        return
    others = [other for other in process.homes() if other.resolve() != home.resolve()]
    for other in others:
        theirs = MountFiles(other, target).read() or BucketFiles(other, target).read()
        if theirs is not None and theirs.device == there.device:
            raise MountError(
                f"{target} is no mount of this home ({home}), but of {other}",
                hint=f"DATACACHE_HOME={shlex.quote(str(other))} dsctl umount {target}",
            )
    if (known is None or known.device) and not is_dead(target):  # an old version's state has no device
        by_hand = "umount" if os.geteuid() == 0 else "fusermount3 -u"
        raise MountError(
            f"{target} is no mount of this home ({home}), and no other home is found that has it",
            hint=f"If nobody needs it: {by_hand} {target}",
        )


def _await_end(info: MountInfo) -> None:
    """Wait until its supervisor has let go of a mount that is gone, so that its place is free for another one."""
    files, deadline = MountFiles(info.config.home, info.mountpoint), time.monotonic() + _GONE_TIMEOUT_S
    while process.is_served(info) and time.monotonic() < deadline:
        now = files.read()
        if now is None or (now.pid, now.device) != (info.pid, info.device):
            return
        time.sleep(_LOOK_EVERY_S)


def list_mounts(settings: Settings | None = None) -> list[MountInfo]:
    """The mounts of this home, as their supervisors wrote them down. State of mounts that are gone is
    removed.
    """
    settings = settings or load_settings()
    found, doubtful = [], []
    paths = sorted((settings.home / "mounts").glob("*.json"))
    mounts = session.mounts_by_place()
    for path in paths:
        info = read_state(path)
        if info is None:
            continue
        there = mounts.get(str(info.mountpoint)) or session.mount_at(info.mountpoint)  # it may have come just now
        if there is not None and there.kind == MOUNT_TYPE:
            found.append(info)
        elif not process.is_served(info):
            doubtful.append(MountFiles(settings.home, info.mountpoint))
    if doubtful:
        _remove_gone(doubtful, settings)
    return found


def is_lost(info: MountInfo, settings: Settings) -> bool:
    """Tell whether nobody serves a mount, and nobody will: its processes died, and the daemon that had a copy of its
    descriptor."""
    if process.is_served(info):
        return False
    try:
        kept = keeping.kept(settings.home)
    except TimeoutError:
        return False
    return MountFiles(settings.home, info.mountpoint).key not in kept and is_dead(str(info.mountpoint))


def _remove_gone(doubtful: list[MountFiles], settings: Settings) -> None:
    """Remove the state of mounts that are not seen, but for those that the keeper has: they are mounted, though not in
    the mount namespace (container) of this process.
    """
    try:
        kept = keeping.kept(settings.home)
    except TimeoutError:  # it may have any of them
        return
    for files in doubtful:
        if files.key not in kept:
            files.remove()


def status(mountpoint: str | Path, settings: Settings) -> MountInfo:
    """What the supervisor of a mount says now. Raises `MountError` when none answers."""
    return MountInfo.from_dict(_ask(mountpoint, settings, {"op": "status"}))


def stop(mountpoint: str | Path, settings: Settings, *, lazy: bool = False) -> None:
    """Have the supervisor unmount, with its rights. Raises `MountError` when it is busy or none answers."""
    _ask(mountpoint, settings, {"op": "stop", "lazy": lazy})


def _ask(mountpoint: str | Path, settings: Settings, message: dict[str, Any]) -> Any:
    return MountFiles(settings.home, session.resolved(mountpoint)).ask(message)


def _mount(config: MountConfig, settings: Settings, *, foreground: bool) -> MountInfo:
    if settings.mount_host is not None and not foreground:
        return _ask_host(["--config", config.to_json()], config, settings, settings.mount_host)
    return mounting.mount(config, process.environment(settings.environment()), foreground=foreground)


def _ask_host(arguments: list[str], config: MountConfig, settings: Settings, host: Path) -> MountInfo:
    files, variables = MountFiles(config.home, config.mountpoint), settings.environment()
    return MountInfo.from_dict(process.start(arguments, files, variables, foreground=False, host=host))
