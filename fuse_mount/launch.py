"""Mounting, unmounting, listing and handing over, for callers: starts the supervisor process and talks to it.

Used by `dataset_cli` and the CSI driver through `fuse_mount`. It may not import the reader. Functions may be
called from any thread and from several processes; two that mount on one directory at a time are kept apart by
the kernel's mounts.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from datacache.core.errors import DaemonError, MountError
from datacache.daemon.client import DaemonClient
from datacache.settings import Settings, load_settings
from fuse_mount import keeping, process, session
from fuse_mount.control import receive, reply
from fuse_mount.state import DEFAULT_OPENER, MOUNT_TYPE, MountConfig, MountFiles, MountInfo, read_state

_GONE_TIMEOUT_MS = 10_000
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
) -> MountInfo:
    """Mount a snapshot on an empty directory and return when it can be read.

    Files belong to `uid` and `gid` (default: the caller's) with modes 0444 and 0555 less `umask`.
    `allow_other` lets other users in (default: for root only). `workers` processes serve it (default: one a
    core, at most 4). The mount outlives the caller: its supervisor is a daemon with a log under
    `<home>/mounts/`. With `foreground` this process's streams are used and the call returns when the mount is
    gone. `resend=False` behaves as on a kernel before 6.9, `clone=False` as
    where workers cannot have queues of their own; `opener` names the function that opens the
    snapshot in each worker. Raises `MountError`; nothing is mounted then.
    """
    target = session.resolved(mountpoint)
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
        opener=opener,
    )
    if opener != DEFAULT_OPENER:
        return _start(["--config", config.to_json()], config, settings, foreground=foreground)
    # The first read that misses would wait for the daemon's start: let both start at once. Without one, workers read
    # from the store.
    daemon = DaemonClient(settings)
    with contextlib.suppress(DaemonError):
        daemon.start_soon()
    info = _start(["--config", config.to_json()], config, settings, foreground=foreground)
    if not foreground:
        with contextlib.suppress(DaemonError):
            daemon.ensure()
    return info


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
    return _start(["--takeover", target], known.config, settings, foreground=False)


def revive(config: MountConfig) -> None:
    """Start a new supervisor for a mount whose own died, below the mount host if there is one. Called by its workers,
    and by the keeper: the first one wins.
    """
    arguments = ["--takeover", config.mountpoint, "--only-if-dead"]
    files = MountFiles(config.home, config.mountpoint)
    try:
        process.start(arguments, files, {"DATACACHE_HOME": config.home}, foreground=False)
    except (MountError, OSError):
        return  # its log says why, and the workers serve on


def unmount(mountpoint: str | Path, *, lazy: bool = False, settings: Settings | None = None) -> bool:
    """Unmount and wait until its processes have ended. False where nothing was mounted.

    Raises `MountError` naming who uses it when it is busy; `lazy` takes it out of sight at once and lets
    those finish.
    """
    target = session.resolved(mountpoint)
    there = session.mount_at(target)
    if there is None:
        return False
    if there.kind != MOUNT_TYPE:
        raise MountError(f"what is mounted at {target} is not ours ({there.kind})", hint=f"umount {target}")
    home = (settings or load_settings()).home
    known = MountFiles(home, target).read()
    watched = process.watch(known.pid) if known is not None and process.serves(known.pid, target) else None
    try:
        session.unmount_now(target, lazy=lazy)
        if watched is not None and not lazy:
            process.readable(watched, _GONE_TIMEOUT_MS / 1000)
    finally:
        if watched is not None:
            os.close(watched)
    return True


def list_mounts(settings: Settings) -> list[MountInfo]:
    """The mounts of this home, as their supervisors wrote them down. State of mounts that are gone is
    removed.
    """
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
        elif not process.serves(info.pid, info.mountpoint):
            doubtful.append(MountFiles(settings.home, info.mountpoint))
    if doubtful:
        _remove_gone(doubtful, settings)
    return found


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
    target = session.resolved(mountpoint)
    try:
        with MountFiles(settings.home, target).connect() as connection:
            reply(connection, message)
            answer, _ = receive(connection)
    except OSError as exc:
        raise MountError(f"no supervisor answers for {target}: {exc.strerror or exc}") from exc
    if "error" in answer:
        raise MountError(answer["error"], hint=answer.get("hint", ""))
    return answer["ok"]


def _start(arguments: list[str], config: MountConfig, settings: Settings, *, foreground: bool) -> MountInfo:
    files = MountFiles(config.home, config.mountpoint)
    variables, host = settings.environment(), settings.mount_host
    return MountInfo.from_dict(process.start(arguments, files, variables, foreground=foreground, host=host))
