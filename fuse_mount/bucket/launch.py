"""Read-write mounts for callers: mounting, flushing, unmounting, listing.

Used by `dataset_cli` through `fuse_mount`. Functions may be called from any thread and from several processes; two that
mount one URL at a time are kept apart by its staging area's lock.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from datacache.core.errors import DaemonError, MountError, StagingBusyError, UsageError
from datacache.daemon.client import DaemonClient
from datacache.settings import Settings, load_settings
from fuse_mount.bucket import session as bucket_session
from fuse_mount.bucket.check import check_pyfuse3
from fuse_mount.bucket.config import ACKS, BucketConfig, BucketFiles, BucketInfo, normal_url, read_bucket_state
from fuse_mount.kernel import session
from fuse_mount.lifecycle import process
from fuse_mount.lifecycle.state import MOUNT_TYPE, SILENCE_S, NoAnswerError, Progress

_GONE_TIMEOUT_S = 30.0
_RESTART_S = 60.0
"""How long a flush waits for the next server."""
_ASK_AGAIN_S = 0.1


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
    store refuse; nothing is mounted then.
    """
    if ack not in ACKS:
        raise UsageError(f"{ack!r} is no way to acknowledge", hint=f"There are {' and '.join(ACKS)}.")
    normal_url(url)
    settings = settings or load_settings()
    target = session.resolved(mountpoint)
    known = BucketFiles(settings.home, target).read()
    was_dead = bucket_session.is_dead(target)
    if was_dead:
        if known is not None and not known.problem and process.serves(known.supervisor, known.mountpoint):
            raise MountError(
                f"{target} is mounted already, and its server is being started again",
                hint=f"Wait, or: dsctl umount {target}",
            )
    else:
        session.check_mountpoint(target)
        if known is not None and process.serves(known.pid, known.mountpoint):
            with contextlib.suppress(MountError):  # it was unmounted and only uploads yet: so will the new one
                stop_server(known, flush_s=0.0, lazy=False)
    session.check_device()
    check_pyfuse3()
    if staging is not None:
        staging = Path(os.path.abspath(staging))
    config = BucketConfig(
        url=normal_url(url),
        mountpoint=target,
        home=str(settings.home),
        staging=str(staging or ""),
        ack=ack,
        ttl_s=ttl_s,
        upload_every_s=upload_every_s,
        uid=os.getuid() if uid is None else uid,
        gid=os.getgid() if gid is None else gid,
        umask=umask,
        allow_other=os.geteuid() == 0 if allow_other is None else allow_other,
        quota_bytes=_checked_quota(quota_bytes),
        credentials=str(credentials or ""),
        direct=direct,
    )
    daemon = DaemonClient(settings)
    with contextlib.suppress(DaemonError):  # reads go past it then
        daemon.start_soon()
    info = _start(config, settings, foreground=foreground, was_dead=was_dead)
    if not foreground:
        with contextlib.suppress(DaemonError):
            daemon.ensure()
    return info


def _start(config: BucketConfig, settings: Settings, *, foreground: bool, was_dead: bool) -> BucketInfo:
    files = BucketFiles(settings.home, config.mountpoint)
    arguments = ["--bucket", config.to_json()]
    variables, host = settings.environment(), settings.mount_host
    try:
        return BucketInfo.from_dict(process.start(arguments, files, variables, foreground=foreground, host=host))
    except MountError as exc:
        if not was_dead or exc.kind != StagingBusyError.__name__:
            raise
        known = files.read()
        if known is None or not any(process.serves(pid, known.mountpoint) for pid in (known.supervisor, known.pid)):
            raise
        # The keeper was quicker: whoever has the staging area is no other mount but this one.
        raise MountError(f"{config.mountpoint} is mounted already: it was brought back meanwhile") from exc


def list_bucket_mounts(settings: Settings | None = None, *, ending: bool = False) -> list[BucketInfo]:
    """The read-write mounts of this home, dead ones included; with `ending` also those that are unmounted and whose
    server still uploads, or serves who has files open. State of mounts that are gone is removed."""
    settings = settings or load_settings()
    found = []
    for path in sorted((settings.home / "mounts").glob(f"*{BucketFiles.suffix}")):
        info = read_bucket_state(path)
        if info is None:
            continue
        there = session.mount_at(info.mountpoint)
        mounted = there is not None and there.kind == MOUNT_TYPE
        served, supervised = process.serves(info.pid, info.mountpoint), process.serves(info.supervisor, info.mountpoint)
        restarts = supervised and not served  # then an ordinary user's mount is away for a moment
        if mounted or restarts or (ending and served):
            found.append(info)
        elif not served and not supervised:
            BucketFiles(settings.home, info.mountpoint).remove()
    return found


def bucket_mount_at(path: str | Path, settings: Settings) -> BucketInfo | None:
    """The read-write mount of this home at exactly this place."""
    target = Path(session.resolved(path))
    return next((info for info in list_bucket_mounts(settings) if info.mountpoint == target), None)


def bucket_status(info: BucketInfo) -> dict[str, Any]:
    """What the mount's live bucket says now. `MountError` says why no server answers."""
    again = f"Mount it again: {mount_command(info)}"
    if info.problem:
        raise MountError(f"the mount is dead: {info.problem}", hint=again)
    try:
        answer: dict[str, Any] = _files(info).ask({"op": "status"})
    except MountError as exc:
        if process.serves(info.pid, info.mountpoint):
            raise
        if process.serves(info.supervisor, info.mountpoint):
            raise MountError("its server died and is being started again", hint=f"Its log: {info.log}") from exc
        raise MountError("the mount is dead: its processes were killed", hint=again) from exc
    status: dict[str, Any] = answer["live"] | {"errors": answer.get("errors", [])}
    return status


def set_quota(info: BucketInfo, quota_bytes: int) -> None:
    """Let there be this many bytes under a mount's prefix from now on (0: any number). What is there already stays.
    Servers that follow keep it. A server that is just being replaced is waited for; `MountError` where none answers."""
    request = {"op": "quota", "quota_bytes": _checked_quota(quota_bytes)}
    deadline = time.monotonic() + _RESTART_S
    while True:
        try:
            _files(info).ask(request)
            return
        except NoAnswerError:
            if info.problem or not process.serves(info.supervisor, info.mountpoint) or time.monotonic() > deadline:
                raise
            time.sleep(_ASK_AGAIN_S)


def forget_lost(info: BucketInfo) -> list[dict[str, Any]]:
    """Have a mount tell no longer what was lost of what was written to it: what that is, as in its status."""
    found: list[dict[str, Any]] = _files(info).ask({"op": "forget-lost"})
    return found


def is_mounted(info: BucketInfo) -> bool:
    """Whether something is mounted at its place: after a lazy unmount its server may go on for a while."""
    there = session.mount_at(info.mountpoint)
    return there is not None and there.kind == MOUNT_TYPE


def is_supervised(info: BucketInfo) -> bool:
    """Whether a server that dies would be followed by another one."""
    return not info.problem and process.serves(info.supervisor, info.mountpoint)


def flush(
    mountpoint: str | Path, *, timeout_s: float | None = None, settings: Settings | None = None
) -> dict[str, Any]:
    """Wait until everything written so far to the read-write mount at `mountpoint` is in the bucket.

    Return `{"files", "bytes", …}` that were written since. `UploadError` says what is not, and why; `MountError` where
    no such mount of this home is.
    """
    info = bucket_mount_at(mountpoint, settings or load_settings())
    if info is None:
        raise MountError(f"no read-write mount of this home is at {mountpoint}", hint="dsctl status lists the mounts.")
    return flush_mount(info, timeout_s=timeout_s, progress=lambda _status: None)


def flush_mount(info: BucketInfo, *, timeout_s: float | None, progress: Progress) -> dict[str, Any]:
    """Wait until everything written so far is in the bucket; `{"files", "bytes", …}` that were written since.
    `UploadError` says what is not, and why. `progress` gets the status of the live bucket again and again. A server
    that dies meanwhile is waited for: the next one uploads what was acknowledged."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    silent_since: float | None = None
    while True:
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            left: dict[str, Any] = _files(info).ask({"op": "flush", "timeout_s": left_s}, progress, timeout_s=SILENCE_S)
            return left
        except NoAnswerError:
            now = time.monotonic()
            silent_since = silent_since or now
            again = _files(info).read()
            if (
                again is None
                or again.problem
                or not process.serves(again.supervisor, again.mountpoint)
                or now - silent_since > _RESTART_S
            ):
                raise
            if again.pid != info.pid:
                info, silent_since = again, None
            time.sleep(_ASK_AGAIN_S)


def stop_server(info: BucketInfo, *, flush_s: float, lazy: bool, progress: Progress | None = None) -> dict[str, Any]:
    """Have the server unmount, upload for `flush_s` at most, and end; what is left then. `MountError` when the mount is
    busy (it names who uses it) or no server answers."""
    watched = process.watch(info.pid)
    try:
        request = {"op": "stop", "flush_s": flush_s, "lazy": lazy}
        left: dict[str, Any] = _files(info).ask(request, progress, timeout_s=SILENCE_S)
        if watched is not None and not lazy:
            process.readable(watched, _GONE_TIMEOUT_S)
    finally:
        if watched is not None:
            os.close(watched)
    return left


def take_away_dead(info: BucketInfo) -> None:
    """Unmount a mount that no server serves, and end its supervisor. What is staged stays."""
    if not bucket_session.is_dead(str(info.mountpoint)):
        raise MountError(
            f"the server of {info.mountpoint} does not answer", hint=f"Its log: {info.log}. To end it: kill {info.pid}"
        )
    watched = process.watch(info.supervisor) if process.serves(info.supervisor, info.mountpoint) else None
    if watched is not None:
        try:
            with contextlib.suppress(OSError):
                os.kill(info.supervisor, 15)
            process.readable(watched, _GONE_TIMEOUT_S)
        finally:
            os.close(watched)
    bucket_session.take_away(str(info.mountpoint))
    _files(info).remove()


def mount_command(info: BucketInfo) -> str:
    """What to type to mount it again."""
    staging = f" --staging {info.config.staging}" if info.config.staging else ""
    quota = f" --quota {info.config.quota_bytes}" if info.config.quota_bytes else ""
    return f"dsctl mount --rw {info.url} {info.mountpoint}{staging}{quota}"


def flush_command(info: BucketInfo) -> str:
    """What to type to upload what is left without mounting."""
    return f"dsctl flush --staging {info.config.staging}" if info.config.staging else "dsctl flush"


def _checked_quota(quota_bytes: int) -> int:
    if quota_bytes < 0:
        raise UsageError(f"{quota_bytes} is no quota", hint="It is a number of bytes; 0 for no quota.")
    return quota_bytes


def _files(info: BucketInfo) -> BucketFiles:
    return BucketFiles(info.config.home, info.mountpoint)
