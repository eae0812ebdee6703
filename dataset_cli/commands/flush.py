"""`dsctl flush`: wait until what was written to read-write mounts is in the bucket.

With `--json` it prints `[{"url", "mountpoint", "staging", "uploaded_files", "uploaded_bytes", "losses": [{"key",
"size_bytes", "at", "reason"}], "forgotten", "conflicts": [{"key", "kept_as", "at", "reason"}], "error", "hint"}]`, one
for each mount or staging area; the mount point is null where there is no mount, `forgotten` says that `--forget-lost`
has dropped those losses, and `conflicts` has those whose copies nobody has deleted or renamed. Exit code 1 if
anything could not be uploaded, or was lost and nobody has said `--forget-lost` since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import fuse_mount
from datacache.core.errors import DatacacheError, MountError, UploadError, UsageError
from datacache.settings import format_bytes
from dataset_cli.app import FOLDER, App, command, raise_all
from dataset_cli.commands.writes import FORGET_LOST, conflict_lines
from dataset_cli.output import NEXT_LINE

if TYPE_CHECKING:
    from datacache.settings import Settings
    from dataset_cli.output import Progress

_GOES_ON = "The upload goes on, and what failed is tried again."


@command()
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--staging",
    type=FOLDER,
    help="Where to look for what mounts have left behind (default: DATACACHE_STAGING, or staging/ in the home).",
)
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds to wait at most (default: until it is done).")
@click.option("--forget-lost", is_flag=True, help="Tell what was lost once more, and then no longer.")
def flush(app: App, directory: Path | None, staging: Path | None, timeout: float | None, forget_lost: bool) -> None:
    """Wait until everything written so far is in the bucket.

    Without DIR: of all read-write mounts, and then of the staging areas that mounts have left behind.

    Fails as long as a program's bytes were lost, as those of a full disk are, and nobody has said --forget-lost.
    """
    if directory is not None:
        if staging is not None:
            raise UsageError("give a mount or a staging folder, not both")
        info = _mount_of(directory, fuse_mount.list_bucket_mounts(app.settings))
        done, told = _flush_mount(app, info, timeout, forget_lost)
        app.out.result([done], told)
        raise_all(_lost([done]), UploadError)
        return
    settings = app.settings if staging is None else replace(app.settings, staging=staging.absolute())
    results: list[dict[str, Any]] = []
    errors: list[DatacacheError] = []
    for where in _places(settings, with_mounts=staging is None):
        try:
            if isinstance(where, fuse_mount.BucketInfo):
                done, told = _flush_mount(app, where, timeout, forget_lost)
            else:
                done, told = _flush_left(app, where, settings, timeout, forget_lost)
            results.append(done)
            app.out.line(told)
        except DatacacheError as exc:
            results.append(_result(where, error=exc))
            errors.append(exc)
    app.out.result(results, "" if results else "nothing is waiting to be uploaded")
    raise_all(errors + _lost(results), UploadError)


def _places(settings: Settings, *, with_mounts: bool) -> Iterator[fuse_mount.BucketInfo | fuse_mount.LeftArea]:
    """Yield the read-write mounts, and then what mounts have left behind by the time these are flushed."""
    if with_mounts:
        yield from fuse_mount.list_bucket_mounts(settings)
    yield from fuse_mount.left_areas(settings)


def follow_flush(app: App, info: fuse_mount.BucketInfo, timeout_s: float | None, *, still: str) -> dict[str, Any]:
    """Flush a mount with a progress bar. An error, and Ctrl-C, say what is left; `still` is added to what to do."""
    before = fuse_mount.bucket_status(info)
    try:
        with app.out.progress(f"uploading to {info.url}") as bar:
            fuse_mount.flush_mount(info, timeout_s=timeout_s, progress=lambda status: _show(bar, status))
    except UploadError as exc:
        exc.hint = f"{exc.hint} {still}".strip()
        raise
    except KeyboardInterrupt:
        left = fuse_mount.bucket_status(info)
        amount = fuse_mount.counted(left["dirty_files"], left["dirty_bytes"])
        app.out.warning(f"not uploaded yet: {amount}, staged in {info.staging}. {still}")
        raise
    return _result(info, before=before, after=fuse_mount.bucket_status(info))


def _flush_mount(
    app: App, info: fuse_mount.BucketInfo, timeout_s: float | None, forget: bool
) -> tuple[dict[str, Any], str]:
    """Flush a mount: the result, and what to say of it."""
    done = follow_flush(app, info, timeout_s, still=_GOES_ON)
    if forget and done["losses"]:
        done |= {"losses": fuse_mount.forget_lost(info), "forgotten": True}  # what has come since is among them
    return done, _told(done, f"written to {info.mountpoint} is in {info.url}")


def _flush_left(
    app: App, area: fuse_mount.LeftArea, settings: Settings, timeout_s: float | None, forget: bool
) -> tuple[dict[str, Any], str]:
    """Flush what a mount has left behind: the result, and what to say of it."""
    if area.problem:
        raise MountError(f"the staging area {area.folder} cannot be used: {area.problem}")
    with app.out.progress(f"uploading to {area.url}") as bar:
        status = fuse_mount.flush_area(
            area, settings, timeout_s=timeout_s, progress=lambda status: _show(bar, status), forget_lost=forget
        )
    done = _result(area, after=status)
    if status is None:
        return done, f"{area.folder} was taken over by a mount meanwhile, which uploads it"
    done["forgotten"] = forget and bool(done["losses"])
    return done, _told(done, f"that was staged in {area.folder} is in {area.url}")


def _told(done: dict[str, Any], is_there: str) -> str:
    """Return what to say of what was flushed: all of it is there, or all but what was lost."""
    forgotten = [f"forgotten: {line}" for line in fuse_mount.lost_lines(done["losses"])] if done["forgotten"] else []
    everything = "everything else" if done["losses"] else "everything"
    return "\n".join([*forgotten, f"{everything} {is_there}", *conflict_lines(done["conflicts"])])


def _lost(results: list[dict[str, Any]]) -> list[DatacacheError]:
    """Return what to fail with for what was lost, and nobody has seen."""
    return [
        UploadError(
            NEXT_LINE.join(fuse_mount.lost_lines(done["losses"])),
            hint=FORGET_LOST.format(where=done["mountpoint"] or "").rstrip(),
        )
        for done in results
        if done["losses"] and not done["forgotten"]
    ]


def _show(bar: Progress, status: dict[str, Any]) -> None:
    """Show how a flush is getting on."""
    if "flush_files" not in status:  # it has only just begun
        return
    under_way = sum(done for _key, done, _size in status["uploading"])
    left_bytes = max(status["flush_bytes_left"] - under_way, 0)
    left, rate = fuse_mount.counted(status["flush_files_left"], left_bytes), format_bytes(status["upload_bytes_per_s"])
    failed = f", {status['failed_files']:,} failed" if status["failed_files"] else ""
    waits = ", the store does not answer" if status["store_problem"] else ""
    done = status["flush_bytes"] - left_bytes
    bar.update(f"{left} left, {rate}/s{failed}{waits}", done, max(status["flush_bytes"], 1))


def _mount_of(path: Path, mounts: list[fuse_mount.BucketInfo]) -> fuse_mount.BucketInfo:
    """Return the mount that a path is or lies in."""
    target = Path(fuse_mount.resolved(path))
    for info in sorted(mounts, key=lambda info: len(str(info.mountpoint)), reverse=True):
        if target.is_relative_to(info.mountpoint):
            return info
    raise MountError(f"{path} is in no read-write mount of this home", hint="dsctl status lists the mounts.")


def _result(
    where: fuse_mount.BucketInfo | fuse_mount.LeftArea,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    error: DatacacheError | None = None,
) -> dict[str, Any]:
    if isinstance(where, fuse_mount.BucketInfo):
        mountpoint, staging = str(where.mountpoint), where.staging
    else:
        mountpoint, staging = None, str(where.folder)
    more = {
        name: after[name] - (before[name] if before else 0) if after else 0
        for name in ("uploaded_files", "uploaded_bytes")
    }
    return {
        "url": where.url,
        "mountpoint": mountpoint,
        "staging": staging,
        **more,
        "losses": after.get("losses", []) if after else [],
        "forgotten": False,
        "conflicts": after["conflicts"] if after else [],
        "error": error.message if error else None,
        "hint": error.hint if error else "",
    }
