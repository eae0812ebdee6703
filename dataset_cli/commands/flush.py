"""`dsctl flush`: wait until what was written to read-write mounts is in the bucket.

With `--json` it prints `[{"url", "mountpoint", "staging", "uploaded_files", "uploaded_bytes", "losses": [{"key",
"size_bytes", "at", "reason"}], "forgotten", "conflicts": [{"key", "kept_as", "at", "reason"}], "error", "hint"}]`, one
for each mount or staging area; the mount point is null where there is no mount, `forgotten` says that `--forget-lost`
has dropped those losses, and `conflicts` has those whose copies nobody has deleted or renamed. Exit code 1 if
anything could not be uploaded, or was lost and nobody has said `--forget-lost` since.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from datacache.core.errors import DatacacheError, MountError, UploadError, UsageError
from dataset_cli.app import App, json_option, pass_app
from dataset_cli.output import NEXT_LINE, format_bytes

if TYPE_CHECKING:
    from dataset_cli.output import Progress
    from fuse_mount import BucketInfo, LeftArea

_GOES_ON = "The upload goes on, and what failed is tried again."


@click.command()
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--staging",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to look for what mounts have left behind (default: DATACACHE_STAGING, or staging/ in the home).",
)
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds to wait at most (default: until it is done).")
@click.option("--forget-lost", is_flag=True, help="Tell what was lost once more, and then no longer.")
@json_option
@pass_app
def flush(app: App, directory: Path | None, staging: Path | None, timeout: float | None, forget_lost: bool) -> None:
    """Wait until everything written so far is in the bucket.

    Without DIR: of all read-write mounts, and then of the staging areas that mounts have left behind.

    Fails as long as a program's bytes were lost, as those of a full disk are, and nobody has said --forget-lost.
    """
    from fuse_mount import left_areas, list_bucket_mounts

    if directory is not None:
        if staging is not None:
            raise UsageError("give a mount or a staging folder, not both")
        info = _mount_of(directory, list_bucket_mounts(app.settings))
        done, told = _flush_mount(app, info, timeout, forget_lost)
        app.out.result([done], told)
        lost = _lost(done)
        if lost:
            raise lost
        return
    settings = app.settings if staging is None else replace(app.settings, staging=staging.absolute())
    results: list[dict[str, Any]] = []
    errors: list[DatacacheError] = []
    for info in list_bucket_mounts(app.settings) if staging is None else []:
        try:
            done, told = _flush_mount(app, info, timeout, forget_lost)
            results.append(done)
            app.out.line(told)
        except DatacacheError as exc:
            results.append(_result(info.url, str(info.mountpoint), info.staging, error=exc))
            errors.append(exc)
    for area in left_areas(settings):
        try:
            done, told = _flush_left(app, area, settings, timeout, forget_lost)
            results.append(done)
            app.out.line(told)
        except DatacacheError as exc:
            results.append(_result(area.url, None, str(area.folder), error=exc))
            errors.append(exc)
    errors += [lost for lost in map(_lost, results) if lost is not None]
    app.out.result(results, "" if results else "nothing is waiting to be uploaded")
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise UploadError(NEXT_LINE.join(exc.message for exc in errors), hint=errors[0].hint)


def follow_flush(app: App, info: BucketInfo, timeout_s: float | None, *, still: str) -> dict[str, Any]:
    """Flush a mount with a progress bar. An error, and Ctrl-C, say what is left; `still` is added to what to do."""
    from fuse_mount import bucket_status, counted, flush_mount

    before = bucket_status(info)
    try:
        with app.out.progress(f"uploading to {info.url}") as bar:
            flush_mount(info, timeout_s=timeout_s, progress=_Shown(bar))
    except UploadError as exc:
        exc.hint = f"{exc.hint} {still}".strip()
        raise
    except KeyboardInterrupt:
        left = bucket_status(info)
        app.out.warning(
            f"not uploaded yet: {counted(left['dirty_files'], left['dirty_bytes'])}, staged in {info.staging}. {still}"
        )
        raise
    return _result(info.url, str(info.mountpoint), info.staging, before=before, after=bucket_status(info))


def _flush_mount(app: App, info: BucketInfo, timeout_s: float | None, forget: bool) -> tuple[dict[str, Any], str]:
    """Flush a mount: the result, and what to say of it."""
    from fuse_mount import forget_lost

    done = follow_flush(app, info, timeout_s, still=_GOES_ON)
    if forget and done["losses"]:
        done |= {"losses": forget_lost(info), "forgotten": True}  # what has come since is among them
    return done, _told(done, f"written to {info.mountpoint} is in {info.url}")


def _flush_left(
    app: App, area: LeftArea, settings: Any, timeout_s: float | None, forget: bool
) -> tuple[dict[str, Any], str]:
    """Flush what a mount has left behind: the result, and what to say of it."""
    from fuse_mount import flush_area

    if area.problem:
        raise MountError(f"the staging area {area.folder} cannot be used: {area.problem}")
    with app.out.progress(f"uploading to {area.url}") as bar:
        status = flush_area(area, settings, timeout_s=timeout_s, progress=_Shown(bar), forget_lost=forget)
    done = _result(area.url, None, str(area.folder), after=status)
    if status is None:
        return done, f"{area.folder} was taken over by a mount meanwhile, which uploads it"
    done["forgotten"] = forget and bool(done["losses"])
    return done, _told(done, f"that was staged in {area.folder} is in {area.url}")


def _told(done: dict[str, Any], is_there: str) -> str:
    """Return what to say of what was flushed: all of it is there, or all but what was lost."""
    from dataset_cli.commands.writes import conflict_lines
    from fuse_mount import lost_lines

    forgotten = [f"forgotten: {line}" for line in lost_lines(done["losses"])] if done["forgotten"] else []
    everything = "everything else" if done["losses"] else "everything"
    return "\n".join([*forgotten, f"{everything} {is_there}", *conflict_lines(done["conflicts"])])


def _lost(done: dict[str, Any]) -> UploadError | None:
    """Return what to fail with for what was lost; None where nothing was, or somebody has seen it."""
    from dataset_cli.commands.writes import FORGET_LOST
    from fuse_mount import lost_lines

    if done["forgotten"] or not done["losses"]:
        return None
    hint = FORGET_LOST.format(where=done["mountpoint"] or "").rstrip()
    return UploadError(NEXT_LINE.join(lost_lines(done["losses"])), hint=hint)


class _Shown:
    """Shows how a flush is getting on."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar

    def __call__(self, status: dict[str, Any]) -> None:
        from fuse_mount import counted

        if "flush_files" not in status:  # it has only just begun
            return
        under_way = sum(done for _key, done, _size in status["uploading"])
        left_bytes = max(status["flush_bytes_left"] - under_way, 0)
        failed = f", {status['failed_files']:,} failed" if status["failed_files"] else ""
        waits = ", the store does not answer" if status["store_problem"] else ""
        text = f"{counted(status['flush_files_left'], left_bytes)} left, {format_bytes(status['upload_bytes_per_s'])}/s"
        self._bar.update(text + failed + waits, status["flush_bytes"] - left_bytes, max(status["flush_bytes"], 1))


def _mount_of(path: Path, mounts: list[BucketInfo]) -> BucketInfo:
    """The mount that a path is or lies in."""
    from fuse_mount import resolved

    target = Path(resolved(path))
    for info in sorted(mounts, key=lambda info: len(str(info.mountpoint)), reverse=True):
        if target.is_relative_to(info.mountpoint):
            return info
    raise MountError(f"{path} is in no read-write mount of this home", hint="dsctl status lists the mounts.")


def _result(
    url: str,
    mountpoint: str | None,
    staging: str,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    error: DatacacheError | None = None,
) -> dict[str, Any]:
    def more(name: str) -> int:
        return (after[name] - (before[name] if before else 0)) if after else 0

    return {
        "url": url,
        "mountpoint": mountpoint,
        "staging": staging,
        "uploaded_files": more("uploaded_files"),
        "uploaded_bytes": more("uploaded_bytes"),
        "losses": after.get("losses", []) if after else [],
        "forgotten": False,
        "conflicts": after["conflicts"] if after else [],
        "error": error.message if error else None,
        "hint": error.hint if error else "",
    }
