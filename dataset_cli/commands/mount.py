"""`dsctl mount` and `dsctl umount`.

With `--json`, `mount` prints `{"mountpoint", "ref", "files", "bytes", "pid", "workers", "log"}`, or with `--rw`
`{"mountpoint", "url", "ack", "staging", "pid", "supervisor", "restarts", "notes", "log"}`; `umount` prints
`{"mountpoint", "unmounted"}` and, of a read-write mount, `"left": {"files", "bytes", "url", "staging"}`; of several
mounts, or with `--all`, a list of these, each with `"error"` and `"hint"`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from datacache.core.errors import DatacacheError, MountError, UploadError, UsageError
from dataset_cli.app import App, SnapshotRef, json_option, pass_app
from dataset_cli.commands.flush import follow_flush
from dataset_cli.output import NEXT_LINE, format_bytes

if TYPE_CHECKING:
    from fuse_mount import BucketInfo, MountInfo

_LAST_FLUSH_S = 60.0
"""For what was written between the end of the flush and the unmount."""


def as_json(info: MountInfo) -> dict[str, Any]:
    """The JSON shape of a mount."""
    return {
        "mountpoint": str(info.mountpoint),
        "ref": info.ref,
        "files": info.files,
        "bytes": info.total_bytes,
        "pid": info.pid,
        "workers": list(info.workers),
        "log": str(info.log),
        "errors": [failure.to_dict() for failure in info.failures],
    }


def rw_as_json(info: BucketInfo) -> dict[str, Any]:
    """The JSON shape of a read-write mount."""
    return {
        "mountpoint": str(info.mountpoint),
        "url": info.url,
        "ack": info.ack,
        "staging": info.staging,
        "pid": info.pid,
        "supervisor": info.supervisor,
        "restarts": info.restarts,
        "notes": list(info.notes),
        "log": str(info.log),
    }


class _RefOrUrl(SnapshotRef):
    """A snapshot, or with `--rw` a bucket. Which of them is checked when the options are known."""

    name = "ref or url"

    def convert(self, value: Any, _param: click.Parameter | None, _context: click.Context | None) -> str:
        return str(value)


def _umask(_context: click.Context, _parameter: click.Parameter, value: str) -> int:
    try:
        number = int(value, 8)
    except ValueError:
        number = -1
    if not 0 <= number <= 0o777:
        raise click.BadParameter(f"{value!r} is not an octal number from 0 to 777")
    return number


def _size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    from datacache.settings import parse_bytes

    if value is None:
        return None
    try:
        return parse_bytes(value)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


@click.command()
@click.argument("what", metavar="REF|URL", type=_RefOrUrl())
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--rw", is_flag=True, help="Mount a bucket prefix (a URL), to be written.")
@click.option(
    "--ack",
    type=click.Choice(["staged", "uploaded"]),
    help="With --rw: whether close and fsync return when the bytes are durable on this side (staged, the default) or "
    "only when they are in the bucket.",
)
@click.option(
    "--staging",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --rw: the folder to stage in (default: DATACACHE_STAGING, or staging/ in the home).",
)
@click.option(
    "--ttl", type=click.FloatRange(min=0), help="With --rw: seconds for which a listing is believed. Default 5."
)
@click.option(
    "--upload-every",
    type=click.FloatRange(min=0, min_open=True),
    help="With --rw: seconds after which what stays open is uploaded, again and again. Default 30.",
)
@click.option(
    "--quota",
    callback=_size,
    metavar="SIZE",
    help="With --rw: how much there may be under the prefix, such as 10GiB (default: any amount).",
)
@click.option("--uid", type=click.IntRange(min=0), help="Owner of the files (default: you).")
@click.option("--gid", type=click.IntRange(min=0), help="Group of the files (default: yours).")
@click.option("--umask", default="022", callback=_umask, help="Permission bits to leave out, octal. Default 022.")
@click.option("--allow-other/--no-allow-other", default=None, help="Whether other users may use it (default: as root).")
@click.option("--workers", type=click.IntRange(1, 256), help="Processes that serve a snapshot (one a core, ≤ 4).")
@click.option("--foreground", "-f", is_flag=True, help="Stay until it is unmounted; Ctrl-C unmounts.")
@json_option
@pass_app
def mount(
    app: App,
    /,
    *,
    what: str,
    directory: Path,
    rw: bool,
    ack: str | None,
    staging: Path | None,
    ttl: float | None,
    upload_every: float | None,
    quota: int | None,
    workers: int | None,
    **options: Any,
) -> None:
    """Show a snapshot as a directory, or with --rw a bucket to write to.

    A snapshot is read-only. A bucket prefix can be read and written: what is written is staged on this side, durable
    when close or fsync return, and uploaded in the background.

    A tag is resolved once: the mount keeps the snapshot it named, even if it moves.

    \b
    dsctl mount mask@v1 /mnt/mask
    dsctl mount --rw s3://runs/exp-7 /mnt/exp-7
    """
    writing = {"ack": ack, "staging": staging, "ttl_s": ttl, "upload_every_s": upload_every}
    writing["quota_bytes"] = quota
    given = {name: value for name, value in writing.items() if value is not None}
    if rw:
        _check_url(what, directory)
        if workers is not None:
            raise UsageError("--workers is for snapshots: a read-write mount is served by one process")
        _mount_bucket(app, what, directory, given | options)
        return
    _check_ref(what, directory)
    if given:
        flag = "--" + next(iter(given)).removesuffix("_s").removesuffix("_bytes").replace("_", "-")
        raise UsageError(f"{flag} is for read-write mounts", hint="A snapshot cannot be written; see --rw.")
    _mount_snapshot(app, what, directory, options | {"workers": workers})


def _mount_snapshot(app: App, ref: str, directory: Path, options: dict[str, Any]) -> None:
    from fuse_mount import mount_snapshot

    info = mount_snapshot(ref, directory, settings=app.settings, **options)
    done = "was mounted" if options["foreground"] else "is mounted"
    app.out.result(
        as_json(info),
        f"{info.ref.partition('@')[0]}@{info.snapshot_id[:12]} {done} at {info.mountpoint}: "
        f"{info.files:,} files, {format_bytes(info.total_bytes)}",
    )


def _mount_bucket(app: App, url: str, directory: Path, options: dict[str, Any]) -> None:
    from fuse_mount import mount_bucket

    info = mount_bucket(url, directory, settings=app.settings, **options)
    done = "was mounted" if options["foreground"] else "is mounted"
    app.out.result(
        rw_as_json(info), f"{info.url} {done} at {info.mountpoint}, to read and write; staged in {info.staging}"
    )
    for note in info.notes:
        app.out.line(note)


def _looks_like_url(text: str) -> bool:
    return "://" in text or text.startswith(("/", "./", "../"))


def _check_url(text: str, directory: Path) -> None:
    from datacache.api import parse_ref

    if _looks_like_url(text):
        return
    scheme, _, rest = text.partition(":/")
    if rest and scheme.isalnum():
        raise UsageError(
            f"{text!r} is no URL: a slash is missing", hint=f"dsctl mount --rw {scheme}://{rest} {directory}"
        )
    if "/" in text and "@" not in text:  # it may be a snapshot's name all the same
        raise UsageError(
            f"--rw mounts a bucket, and {text!r} is no URL",
            hint=f"For a bucket write s3://{text}, for a folder of this machine ./{text}. If a snapshot has this name: "
            f"it can only be read, dsctl mount {text} {directory}",
        )
    parse_ref(text)
    raise UsageError(
        f"--rw mounts a bucket, and {text!r} names a snapshot, which never changes",
        hint=f"To read the snapshot: dsctl mount {text} {directory}. To write a bucket, give its URL: "
        f"dsctl mount --rw s3://BUCKET/PREFIX {directory}",
    )


def _check_ref(text: str, directory: Path) -> None:
    from datacache.api import parse_ref

    if _looks_like_url(text):
        raise UsageError(
            f"{text!r} is a place, not a snapshot",
            hint=f"To read and write it: dsctl mount --rw {text} {directory}. To read one fixed version of it, make a "
            f"snapshot first: dsctl snapshot create NAME --from {text}; dsctl mount NAME {directory}",
        )
    parse_ref(text)


@click.command()
@click.argument("directories", metavar="DIR...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="All mounts of this home.")
@click.option("--lazy", is_flag=True, help="Take it away at once and let those who use it finish.")
@click.option(
    "--wait/--no-wait",
    default=None,
    help="Whether a read-write mount is unmounted only when all is uploaded (default: wait).",
)
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds to wait for the uploads; it stays mounted then.")
@json_option
@pass_app
def umount(
    app: App,
    /,
    *,
    directories: tuple[Path, ...],
    everything: bool,
    lazy: bool,
    wait: bool | None,
    timeout: float | None,
) -> None:
    """Unmount what `dsctl mount` mounted.

    A read-write mount is flushed first. What --no-wait or --lazy leave behind is uploaded by the next mount, or by
    `dsctl flush`. Of several mounts each is tried, whatever becomes of the others.
    """
    from fuse_mount import list_bucket_mounts, list_mounts, resolved

    if everything == bool(directories):
        raise UsageError("say which mounts: give their directories, or --all for all of this home")
    if (lazy or wait is False) and (timeout is not None or wait):
        raise UsageError("--lazy and --no-wait wait for nothing", hint="Leave --wait and --timeout out.")
    if everything:
        snapshots = [info.mountpoint for info in list_mounts(app.settings)]
        directories = (*snapshots, *(info.mountpoint for info in list_bucket_mounts(app.settings)))
    how = _How(lazy, wait, timeout, strict=not everything)
    if len(directories) == 1 and not everything:
        app.out.result(*_unmount(app, directories[0], how))
        return
    results: list[dict[str, Any]] = []
    errors: list[DatacacheError] = []
    for directory in directories:
        try:
            found, text = _unmount(app, directory, how)
            results.append(found | {"error": None, "hint": ""})
            app.out.line(text)
        except DatacacheError as exc:
            failed = {"mountpoint": resolved(directory), "unmounted": False, "error": exc.message, "hint": exc.hint}
            results.append(failed)
            errors.append(exc)
    app.out.result(results, "" if results else "nothing is mounted")
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise MountError(NEXT_LINE.join(exc.message for exc in errors), hint=errors[0].hint)


class _How(NamedTuple):
    """The options of an unmount."""

    lazy: bool
    wait: bool | None
    timeout_s: float | None
    strict: bool
    """True if what is said of read-write mounts is refused for others."""


def _unmount(app: App, directory: Path, how: _How) -> tuple[dict[str, Any], str]:
    """Unmount one: what to print as JSON, and in words."""
    from fuse_mount import bucket_mount_at, resolved, unmount

    info = bucket_mount_at(directory, app.settings)
    if info is not None:
        wait = not how.lazy and how.wait is not False
        return _unmount_bucket(app, info, wait=wait, lazy=how.lazy, timeout_s=how.timeout_s)
    if how.strict and (how.wait is not None or how.timeout_s is not None):
        raise UsageError(
            f"--wait, --no-wait and --timeout are for read-write mounts, and none of this home is at {directory}",
            hint="dsctl status lists the mounts.",
        )
    if not unmount(directory, lazy=how.lazy, settings=app.settings):
        raise MountError(f"nothing is mounted at {directory}", hint="dsctl status lists the mounts.")
    target = resolved(directory)
    return {"mountpoint": target, "unmounted": True}, f"{target} is unmounted"


def _unmount_bucket(
    app: App, info: BucketInfo, *, wait: bool, lazy: bool, timeout_s: float | None
) -> tuple[dict[str, Any], str]:
    from fuse_mount import bucket_status, counted, lost_lines, stop_server, take_away_dead

    try:
        bucket_status(info)
    except MountError:
        take_away_dead(info)
        text = f"{info.mountpoint} is unmounted. Nothing had served it: {_way_on(info, 'what may be left')}"
        return {"mountpoint": str(info.mountpoint), "unmounted": True, "left": None}, text
    if wait:
        done = follow_flush(
            app,
            info,
            timeout_s,
            still=f"{info.mountpoint} stays mounted. To unmount it all the same: "
            f"dsctl umount --no-wait {info.mountpoint}",
        )
        for line in lost_lines(done["losses"]):
            app.out.warning(line)
    left = stop_server(info, flush_s=_LAST_FLUSH_S if wait else 0.0, lazy=lazy)
    amount = counted(left["files"], left["bytes"])
    if left["files"] and wait:
        raise UploadError(
            f"{info.mountpoint} is unmounted, but {amount} of it are not uploaded", hint=_way_on(info, "what is left")
        )
    text = f"{info.mountpoint} is unmounted"
    if left["files"]:
        text += f". Not uploaded yet: {amount}; {_way_on(info, 'it')}"
    return {"mountpoint": str(info.mountpoint), "unmounted": True, "left": left}, text


def _way_on(info: BucketInfo, what: str) -> str:
    from fuse_mount import flush_command, mount_command

    return f"{what} lies in {info.staging} and is uploaded by `{mount_command(info)}` or `{flush_command(info)}`"
