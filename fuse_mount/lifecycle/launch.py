"""Mounts for callers: mounting, unmounting, listing, flushing, handing over. Starts their processes and talks to them.

Used by `dataset_cli` and the CSI driver through `fuse_mount`. It may not import the reader. Functions may be called
from any thread and from several processes. Two that mount on one directory at a time are kept apart by the kernel's
mounts, two that mount one bucket's URL by its staging area's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from datacache.catalog.open import open_catalog_url
from datacache.core.errors import DaemonError, DatacacheError, MountError, StagingBusyError, UsageError
from datacache.core.mounts import Mount
from datacache.daemon.client import DaemonClient
from datacache.daemon.mount_leases import MountLeases
from datacache.settings import Settings, load_settings
from datacache.store.urls import join_url, split_url
from fuse_mount.kernel import session
from fuse_mount.lifecycle import keeping, pool, process
from fuse_mount.lifecycle.state import (
    ACKS,
    DEFAULT_OPENER,
    REVIVER,
    SILENCE_S,
    BucketConfig,
    BucketFiles,
    BucketInfo,
    FilesOfMount,
    MountConfig,
    MountFiles,
    MountInfo,
    NoAnswerError,
    Progress,
    files_of,
)

_log = logging.getLogger("fuse_mount")
_GONE_TIMEOUT_S = 10.0
_SERVER_GONE_TIMEOUT_S = 30.0
_LOOK_EVERY_S = 0.005
_RESTART_S = 60.0
"""How long a request waits for the next server of a bucket."""
_ASK_AGAIN_S = 0.1
_DEFAULT_WORKERS = 4

T = TypeVar("T")


# --- mounting ---------------------------------------------------------------------------------------------------------


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
    large_files: bool = False,
    resend: bool = True,
    clone: bool = True,
    opener: str = DEFAULT_OPENER,
    given: bool = False,
) -> MountInfo:
    """Mount a snapshot on an empty directory and return when it can be read.

    A mount of this home that has lost all its processes is replaced.

    Files belong to `uid` and `gid` (default: the caller's) with modes 0444 and 0555 less `umask`. `allow_other` lets
    other users in (default: for root only). `workers` processes serve it (default: one a core, at most 4), and other
    mounts of the same surroundings (`pool`). The mount outlives the caller: they are daemons with a log under
    `<home>/mounts/`. With `foreground` it has processes of its own, this process's streams are used, and the call
    returns when the mount is gone. `large_files` has the kernel read large files from the SSD tier itself; where it
    does not allow that, the mount is as any other, and `config.passed` of the result is ''.

    `resend=False` behaves as on a kernel before 6.9, `clone=False` as where workers cannot have queues of their own;
    `opener` names the function that opens the snapshot in each worker. `given`: the caller has a record that this
    `NAME@ID` was looked up in the catalog and given before, so it is mounted also when it was removed there since.
    Raises `MountError`; nothing is mounted then."""
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
        **_owner(uid, gid, allow_other),
        umask=umask,
        workers=workers or min(_DEFAULT_WORKERS, len(os.sched_getaffinity(0))),
        large_files=large_files,
        resend=resend,
        clone=clone,
        opener=REVIVER if given else opener,
    )

    def start() -> MountInfo:
        if settings.mount_host is not None and not foreground:
            return _ask_host(["--config", config.to_json()], config, settings)
        return pool.mount(config, process.environment(settings.environment()), foreground=foreground)

    if opener != DEFAULT_OPENER:
        return start()
    # Without a daemon, workers read from the store.
    return _beside_daemon(settings, start, foreground=foreground, then=_hold)


def mount_bucket(
    url: str,
    mountpoint: str | Path,
    *,
    settings: Settings | None = None,
    ack: str = "staged",
    staging: Path | None = None,
    ttl_s: float = 5.0,
    upload_every_s: float = 30.0,
    uid: int | None = None,
    gid: int | None = None,
    umask: int = 0o022,
    allow_other: bool | None = None,
    quota_bytes: int = 0,
    credentials: Path | None = None,
    direct: bool = False,
    foreground: bool = False,
) -> BucketInfo:
    """Mount a bucket prefix read-write on an empty directory and return when it can be used.

    What has no owner and mode of its own in the bucket belongs to `uid` and `gid` (default: the caller's) with the
    modes 0666 and 0777 less `umask`; where that lets the group write, such folders hand their group on. Beyond
    `quota_bytes` (0: none) nothing can be written. Store credentials are looked for in the folder `credentials` instead
    of the settings'; with `direct` objects are read past the daemon, which has others. The mount outlives the caller
    and its own server's death. A dead mount at the place is replaced. Raises `MountError`, also for what staging or
    store refuse; nothing is mounted then."""
    if ack not in ACKS:
        raise UsageError(f"{ack!r} is no way to acknowledge", hint=f"There are {', '.join(ACKS)}.")
    store, prefix = split_url(url)
    url = join_url(store, prefix)
    settings = settings or load_settings()
    target = session.resolved(mountpoint)
    files = BucketFiles(settings.home, target)
    known, was_dead = files.read(), False
    if session.is_ours_at(target):
        supervised = known if known is not None and is_supervised(known) else None
        is_served = supervised is not None and process.serves(supervised.pid, target)
        was_dead = (supervised is None or is_served) and session.is_dead(target)
        if supervised is not None and (was_dead or not is_served):
            raise MountError(
                f"{target} is mounted already, and its server is being started again",
                hint=f"Wait, or: dsctl umount {target}",
            )
    if not was_dead:
        session.check_mountpoint(target)
        if known is not None and process.serves(known.pid, known.mountpoint):
            with contextlib.suppress(MountError):  # it was unmounted and only uploads yet: so will the new one
                stop_server(known, flush_s=0.0, lazy=False)
    session.check_device()
    if settings.fuse == "pyfuse3":
        session.check_pyfuse3()
    config = BucketConfig(
        url=url,
        mountpoint=target,
        home=str(settings.home),
        **_owner(uid, gid, allow_other),
        umask=umask,
        staging=os.path.abspath(staging) if staging is not None else "",
        ack=ack,
        ttl_s=ttl_s,
        upload_every_s=upload_every_s,
        quota_bytes=_checked_quota(quota_bytes),
        credentials=str(credentials or ""),
        direct=direct,
    )

    def start() -> BucketInfo:
        arguments, variables, host = ["--bucket", config.to_json()], settings.environment(), settings.mount_host
        try:
            return BucketInfo.from_dict(process.start(arguments, files, variables, foreground=foreground, host=host))
        except MountError as exc:
            known = files.read() if was_dead and exc.kind == StagingBusyError.__name__ else None
            if known is None or not any(process.serves(pid, target) for pid in (known.supervisor, known.pid)):
                raise
            # The keeper was quicker: whoever has the staging area is no other mount but this one.
            raise MountError(f"{target} is mounted already: it was brought back meanwhile") from exc

    return _beside_daemon(settings, start, foreground=foreground)  # without one, reads go past it


def _owner(uid: int | None, gid: int | None, allow_other: bool | None) -> dict[str, Any]:
    return {
        "uid": os.getuid() if uid is None else uid,
        "gid": os.getgid() if gid is None else gid,
        "allow_other": os.geteuid() == 0 if allow_other is None else allow_other,
    }


def _checked_quota(quota_bytes: int) -> int:
    if quota_bytes < 0:
        raise UsageError(f"{quota_bytes} is no quota", hint="It is a number of bytes; 0 for no quota.")
    return quota_bytes


def _beside_daemon(
    settings: Settings,
    start: Callable[[], T],
    *,
    foreground: bool,
    then: Callable[[DaemonClient], None] = lambda _daemon: None,
) -> T:
    """Mount while the daemon starts: the first read that misses would wait for it. One goes without a daemon, too."""
    daemon = DaemonClient(settings)
    with contextlib.suppress(DaemonError):
        daemon.start_soon()
    found = start()
    if not foreground:
        try:
            daemon.ensure()
            then(daemon)
        except DaemonError as exc:
            until = "Until it runs, what is not on this node is read from the store, and not kept."
            _log.warning("%s", f"{exc.message}. {until} {exc.hint}".rstrip())
    return found


def _hold(daemon: DaemonClient) -> None:
    """Take the lease of the home's mounts. While the catalog is away one mounts without, and the daemon tries again."""
    try:
        daemon.hold_mounts()
    except (DatacacheError, OSError) as exc:
        _log.warning("garbage collection may take what is mounted: %s", exc)


def _ask_host(arguments: list[str], config: MountConfig, settings: Settings) -> MountInfo:
    files, variables = MountFiles(config.home, config.mountpoint), settings.environment()
    return MountInfo.from_dict(process.start(arguments, files, variables, foreground=False, host=settings.mount_host))


def takeover(mountpoint: str | Path, settings: Settings) -> MountInfo:
    """Start a new supervisor and workers for a mount and let the old ones finish: no unmount, no error for readers.

    It also revives a mount whose supervisor was killed, as long as one of its workers lives. Raises `MountError`."""
    target = session.resolved(mountpoint)
    known = MountFiles(settings.home, target).read()
    if known is None:
        raise MountError(f"no mount of this home is known at {target}", hint="dsctl status lists them.")
    if settings.mount_host is not None:
        return _ask_host(["--takeover", target], known.config, settings)
    environment = process.environment(settings.environment())
    taken = pool.take_over(target, settings.home, environment, only_if_dead=False)
    assert taken is not None
    return taken


# --- unmounting -------------------------------------------------------------------------------------------------------


def unmount(mountpoint: str | Path, *, lazy: bool = False, settings: Settings | None = None) -> bool:
    """Unmount and wait until its processes have ended. False where nothing was mounted.

    Raises `MountError` naming who uses it when it is busy, and naming the other home where a mount is not this one's;
    `lazy` takes it out of sight at once and lets those finish."""
    target = session.resolved(mountpoint)
    there = session.mount_at(target)
    if there is None:
        return False
    if there.kind != session.MOUNT_TYPE:
        raise MountError(f"what is mounted at {target} is not ours ({there.kind})", hint=f"umount {target}")
    settings = settings or load_settings()
    known = MountFiles(settings.home, target).read()
    _expect_ours(there, known or BucketFiles(settings.home, target).read(), settings.home)
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
            MountLeases(settings, partial(open_catalog_url, settings=settings)).renew()
    except (DatacacheError, OSError) as exc:
        _log.info("the catalog takes it for mounted still: %s", exc)


def _expect_ours(there: Mount, known: MountInfo | BucketInfo | None, home: Path) -> None:
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
    if (known is None or known.device) and not session.is_dead(target):  # an old version's state has no device
        by_hand = "umount" if os.geteuid() == 0 else "fusermount3 -u"
        raise MountError(
            f"{target} is no mount of this home ({home}), and no other home is found that has it",
            hint=f"If nobody needs it: {by_hand} {target}",
        )


def _await_end(info: MountInfo) -> None:
    """Wait until its supervisor has let go of a mount that is gone, so that its place is free for another one."""
    files, deadline = files_of(info), time.monotonic() + _GONE_TIMEOUT_S
    while process.is_served(info) and time.monotonic() < deadline:
        now = files.read()
        if now is None or (now.pid, now.device) != (info.pid, info.device):
            return
        time.sleep(_LOOK_EVERY_S)


def stop_server(info: BucketInfo, *, flush_s: float, lazy: bool, progress: Progress | None = None) -> dict[str, Any]:
    """Have the server unmount, upload for `flush_s` at most, and end; what is left then. `MountError` when the mount is
    busy (it names who uses it) or no server answers."""
    with process.watched(info.pid) as has_ended:
        request = {"op": "stop", "flush_s": flush_s, "lazy": lazy}
        left: dict[str, Any] = files_of(info).ask(request, progress, timeout_s=SILENCE_S)
        if not lazy:
            has_ended(_SERVER_GONE_TIMEOUT_S)
        return left


def await_server(info: BucketInfo) -> None:
    """Wait for the server of a mount to answer, also for one that is just being started. `MountError` where none
    does."""

    def ask() -> None:
        try:
            files_of(info).ask({"op": "status"})
        except NoAnswerError as exc:
            known = files_of(info).read()
            if known is not None and process.serves(known.pid, known.mountpoint):  # it stands still
                raise MountError(exc.message, hint=exc.hint) from exc
            raise

    _ask_this_or_the_next(info, ask)


def take_away_dead(info: BucketInfo) -> None:
    """Unmount a mount that no server serves, and end its supervisor. What is staged stays."""
    info = BucketFiles(info.config.home, info.mountpoint).read() or info
    if process.serves(info.pid, info.mountpoint) and not session.is_dead(str(info.mountpoint)):
        raise MountError(
            f"the server of {info.mountpoint} does not answer", hint=f"Its log: {info.log}. To end it: kill {info.pid}"
        )
    with process.watched(info.supervisor) as has_ended:
        if process.serves(info.supervisor, info.mountpoint):
            with contextlib.suppress(OSError):
                os.kill(info.supervisor, signal.SIGTERM)
            has_ended(_SERVER_GONE_TIMEOUT_S)
    session.take_away(str(info.mountpoint))
    files_of(info).remove()


# --- what is mounted --------------------------------------------------------------------------------------------------


def list_mounts(settings: Settings | None = None) -> list[MountInfo]:
    """Return this home's mounts of snapshots, as their supervisors wrote them down. State of mounts that are gone is
    removed."""
    settings = settings or load_settings()
    found, doubtful = [], []
    infos, mounts = MountFiles.all_states(settings.home), session.mounts_by_place()
    for info in infos:
        there = mounts.get(str(info.mountpoint)) or session.mount_at(info.mountpoint)  # it may have come just now
        if there is not None and there.kind == session.MOUNT_TYPE:
            found.append(info)
        elif not process.is_served(info):
            doubtful.append(files_of(info))
    _remove_unless_kept(doubtful, settings)
    return found


def _remove_unless_kept(doubtful: list[FilesOfMount[Any]], settings: Settings) -> None:
    """Remove state of mounts that are gone. Those that the keeper has are mounted, though not in the mount namespace
    (container) of this process, or unmounted lazily."""
    with contextlib.suppress(TimeoutError):  # it may have any of them
        kept = keeping.kept(settings.home) if doubtful else set()
        for files in doubtful:
            if files.key not in kept:
                files.remove()


def list_bucket_mounts(settings: Settings | None = None, *, ending: bool = False) -> list[BucketInfo]:
    """Return this home's read-write mounts, dead ones included; with `ending` also those that are unmounted and whose
    server still uploads, or serves who has files open. State of mounts that are gone is removed."""
    settings = settings or load_settings()
    found, doubtful = [], []
    for info in BucketFiles.all_states(settings.home):
        mounted = is_mounted(info)
        served, supervised = process.serves(info.pid, info.mountpoint), process.serves(info.supervisor, info.mountpoint)
        restarts = supervised and not served  # then an ordinary user's mount is away for a moment
        if mounted or restarts or (ending and served):
            found.append(info)
        elif not served and not supervised:
            doubtful.append(files_of(info))
    _remove_unless_kept(doubtful, settings)
    return found


def bucket_mount_at(path: str | Path, settings: Settings) -> BucketInfo | None:
    """Return the read-write mount of this home at exactly this place."""
    target = Path(session.resolved(path))
    return next((info for info in list_bucket_mounts(settings) if info.mountpoint == target), None)


def is_lost(info: MountInfo, settings: Settings) -> bool:
    """Tell whether nobody serves a mount, and nobody will: its processes died, and the daemon that had a copy of its
    descriptor."""
    if process.is_served(info):
        return False
    try:
        kept = keeping.kept(settings.home)
    except TimeoutError:
        return False
    return MountFiles(settings.home, info.mountpoint).key not in kept and session.is_dead(str(info.mountpoint))


def is_mounted(info: BucketInfo) -> bool:
    """Tell whether something is mounted at its place: after a lazy unmount its server may go on for a while."""
    return session.is_ours_at(info.mountpoint)


def is_supervised(info: BucketInfo) -> bool:
    """Tell whether a server that dies would be followed by another one."""
    return not info.problem and process.serves(info.supervisor, info.mountpoint)


def status(mountpoint: str | Path, settings: Settings) -> MountInfo:
    """Ask the supervisor of a snapshot's mount how it is. Raises `MountError` when none answers."""
    return MountInfo.from_dict(MountFiles(settings.home, session.resolved(mountpoint)).ask({"op": "status"}))


def bucket_status(info: BucketInfo) -> dict[str, Any]:
    """Ask the mount's live bucket how it is. `MountError` says why no server answers."""
    again = f"Mount it again: {mount_command(info)}"
    if info.problem:
        raise MountError(f"the mount is dead: {info.problem}", hint=again)
    try:
        answer: dict[str, Any] = files_of(info).ask({"op": "status"})
    except MountError as exc:
        if process.serves(info.pid, info.mountpoint):
            raise
        if process.serves(info.supervisor, info.mountpoint):
            raise MountError("its server died and is being started again", hint=f"Its log: {info.log}") from exc
        raise MountError("the mount is dead: its processes were killed", hint=again) from exc
    status: dict[str, Any] = answer["live"] | {"errors": answer.get("errors", [])}
    return status


# --- what a bucket's server is asked for ------------------------------------------------------------------------------


def set_quota(info: BucketInfo, quota_bytes: int) -> None:
    """Let there be this many bytes under a mount's prefix from now on (0: any number). What is there already stays.
    Servers that follow keep it. A server that is just being replaced is waited for; `MountError` where none answers."""
    request = {"op": "quota", "quota_bytes": _checked_quota(quota_bytes)}
    _ask_this_or_the_next(info, lambda: files_of(info).ask(request))


def forget_lost(info: BucketInfo) -> list[dict[str, Any]]:
    """Have a mount tell no longer what was lost of what was written to it: what that is, as in its status."""
    found: list[dict[str, Any]] = files_of(info).ask({"op": "forget-lost"})
    return found


def flush(
    mountpoint: str | Path, *, timeout_s: float | None = None, settings: Settings | None = None
) -> dict[str, Any]:
    """Wait until everything written so far to the read-write mount at `mountpoint` is in the bucket.

    Return `{"files", "bytes", …}` that were written since. `UploadError` says what is not, and why; `MountError` where
    no such mount of this home is."""
    info = bucket_mount_at(mountpoint, settings or load_settings())
    if info is None:
        raise MountError(f"no read-write mount of this home is at {mountpoint}", hint="dsctl status lists the mounts.")
    return flush_mount(info, timeout_s=timeout_s, progress=lambda _status: None)


def flush_mount(info: BucketInfo, *, timeout_s: float | None, progress: Progress) -> dict[str, Any]:
    """Wait until everything written so far is in the bucket; `{"files", "bytes", …}` that were written since.
    `UploadError` says what is not, and why. `progress` gets the status of the live bucket again and again. A server
    that dies meanwhile is waited for: the next one uploads what was acknowledged."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def ask() -> dict[str, Any]:
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        request = {"op": "flush", "timeout_s": left_s}
        left: dict[str, Any] = files_of(info).ask(request, progress, timeout_s=SILENCE_S)
        return left

    return _ask_this_or_the_next(info, ask)


def _ask_this_or_the_next(info: BucketInfo, ask: Callable[[], T]) -> T:
    """Ask a server that may be just being replaced: again until one answers, or none is to come."""
    silent_since: float | None = None
    while True:
        try:
            return ask()
        except NoAnswerError:
            now = time.monotonic()
            silent_since = silent_since or now
            again = files_of(info).read()
            if again is None or not is_supervised(again) or now - silent_since > _RESTART_S:
                raise
            if again.pid != info.pid:
                info, silent_since = again, None
            time.sleep(_ASK_AGAIN_S)


def mount_command(info: BucketInfo) -> str:
    """Return what to type to mount it again."""
    staging = f" --staging {info.config.staging}" if info.config.staging else ""
    quota = f" --quota {info.config.quota_bytes}" if info.config.quota_bytes else ""
    return f"dsctl mount --rw {info.url} {info.mountpoint}{staging}{quota}"


def flush_command(info: BucketInfo) -> str:
    """Return what to type to upload what is left without mounting."""
    return f"dsctl flush --staging {info.config.staging}" if info.config.staging else "dsctl flush"
