"""`dsctl mount` and `dsctl umount`.

With `--json`, `mount` prints `{"mountpoint", "ref", "files", "bytes", "pid", "workers", "log"}`, or with `--rw`
`{"mountpoint", "url", "ack", "staging", "pid", "supervisor", "restarts", "notes", "log"}`; `umount` prints
`{"mountpoint", "unmounted"}` and, of a read-write mount, `"left": {"files", "bytes", "url", "staging"}`; of several
mounts, or with `--all`, a list of these, each with `"error"` and `"hint"`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import fuse_mount
from datacache import api
from datacache.core.errors import DatacacheError, MountError, UploadError, UsageError
from datacache.settings import format_bytes
from dataset_cli.app import FOLDER, App, Size, SnapshotRef, command, raise_all
from dataset_cli.commands.flush import follow_flush
from dataset_cli.commands.writes import mount_as_json, replica_lines, rw_as_json

_LAST_FLUSH_S = 60.0
"""For what was written between the end of the flush and the unmount."""
_PATIENCE_S = 2.0
"""How long a mount may take until it is told what it may wait for."""
_OF_BUCKETS = ("ack", "staging", "ttl_s", "upload_every_s", "quota_bytes")
"""Options that snapshots do not have."""


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


@command()
@click.argument("what", metavar="REF|URL", type=_RefOrUrl())
@click.argument("directory", metavar="DIR", type=FOLDER)
@click.option("--rw", is_flag=True, help="Mount a bucket prefix (a URL), to be written.")
@click.option(
    "--ack",
    type=click.Choice(["staged", "replicated", "uploaded"]),
    help="With --rw: whether close and fsync return when the bytes are durable on this side (staged, the default), on "
    "a second node of the cluster as well, or only when they are in the bucket.",
)
@click.option(
    "--staging",
    type=FOLDER,
    help="With --rw: the folder to stage in (default: DATACACHE_STAGING, or staging/ in the home).",
)
@click.option(
    "--ttl",
    "ttl_s",
    type=click.FloatRange(min=0),
    help="With --rw: seconds for which a listing is believed. Default 5.",
)
@click.option(
    "--upload-every",
    "upload_every_s",
    type=click.FloatRange(min=0, min_open=True),
    help="With --rw: seconds after which what stays open is uploaded, again and again. Default 30.",
)
@click.option(
    "--quota",
    "quota_bytes",
    type=Size(),
    metavar="SIZE",
    help="With --rw: how much there may be under the prefix, such as 10GiB (default: any amount).",
)
@click.option("--uid", type=click.IntRange(min=0), help="Owner of the files (default: you).")
@click.option("--gid", type=click.IntRange(min=0), help="Group of the files (default: yours).")
@click.option("--umask", default="022", callback=_umask, help="Permission bits to leave out, octal. Default 022.")
@click.option("--allow-other/--no-allow-other", default=None, help="Whether other users may use it (default: as root).")
@click.option("--workers", type=click.IntRange(1, 256), help="Processes that serve a snapshot (one a core, ≤ 4).")
@click.option(
    "--large-files",
    is_flag=True,
    help="Of a snapshot: have the kernel read files over 4 MiB from this node's disk itself, each verified once, when "
    "it is opened first (Linux 6.9, root).",
)
@click.option("--foreground", "-f", is_flag=True, help="Stay until it is unmounted; Ctrl-C unmounts.")
def mount(
    app: App, /, *, what: str, directory: Path, rw: bool, workers: int | None, large_files: bool, **options: Any
) -> None:
    """Show a snapshot as a directory, or with --rw a bucket to write to.

    A snapshot is read-only. A bucket prefix can be read and written: what is written is staged on this side, durable
    when close or fsync return, and uploaded in the background.

    A tag is resolved once: the mount keeps the snapshot it named, even if it moves.

    \b
    dsctl mount mask@v1 /mnt/mask
    dsctl mount --rw s3://runs/exp-7 /mnt/exp-7
    """
    writing = {name: options.pop(name) for name in _OF_BUCKETS}
    given = {name: value for name, value in writing.items() if value is not None}
    done = "was mounted" if options["foreground"] else "is mounted"
    if rw:
        _check_url(what, directory)
        if workers is not None:
            raise UsageError("--workers is for snapshots: a read-write mount is served by one process")
        if large_files:
            raise UsageError(
                "--large-files is for snapshots: a read-write mount sees each byte that is written",
                hint="Make a snapshot of what was written (dsctl snapshot create) and mount that.",
            )
        with _telling_what_it_waits_for(app, what, foreground=options["foreground"]):
            bucket = fuse_mount.mount_bucket(what, directory, settings=app.settings, **given, **options)
        text = f"{bucket.url} {done} at {bucket.mountpoint}, to read and write; staged in {bucket.staging}"
        shown = bucket.ack == "replicated" and not options["foreground"]
        lines = replica_lines(fuse_mount.bucket_status(bucket)) if shown else ()
        app.out.result(rw_as_json(bucket), "\n".join([text, *bucket.notes, *(line.strip() for line in lines)]))
        return
    _check_ref(what, directory)
    if given:
        flag = "--" + next(iter(given)).removesuffix("_s").removesuffix("_bytes").replace("_", "-")
        raise UsageError(f"{flag} is for read-write mounts", hint="A snapshot cannot be written; see --rw.")
    info = fuse_mount.mount_snapshot(
        what, directory, settings=app.settings, workers=workers, large_files=large_files, **options
    )
    if large_files and not info.config.passed:
        app.out.warning(
            f"the kernel does not let {info.mountpoint} pass files through: large files are read as in any other "
            "mount. It takes Linux 6.9 with CONFIG_FUSE_PASSTHROUGH, and root (CAP_SYS_ADMIN)."
        )
    ref, size = f"{info.ref.partition('@')[0]}@{info.snapshot_id[:12]}", format_bytes(info.total_bytes)
    app.out.result(mount_as_json(info), f"{ref} {done} at {info.mountpoint}: {info.files:,} files, {size}")


@contextmanager
def _telling_what_it_waits_for(app: App, url: str, *, foreground: bool) -> Iterator[None]:
    text = f"{url} is not mounted yet: its store has not answered, or a former mount of it has not ended (dsctl status)"
    timer = threading.Timer(_PATIENCE_S, app.out.warning, [text])
    if not foreground:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _looks_like_url(text: str) -> bool:
    return "://" in text or text.startswith(("/", "./", "../"))


def _check_url(text: str, directory: Path) -> None:
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
    api.parse_ref(text)
    raise UsageError(
        f"--rw mounts a bucket, and {text!r} names a snapshot, which never changes",
        hint=f"To read the snapshot: dsctl mount {text} {directory}. To write a bucket, give its URL: "
        f"dsctl mount --rw s3://BUCKET/PREFIX {directory}",
    )


def _check_ref(text: str, directory: Path) -> None:
    if _looks_like_url(text):
        raise UsageError(
            f"{text!r} is a place, not a snapshot",
            hint=f"To read and write it: dsctl mount --rw {text} {directory}. To read one fixed version of it, make a "
            f"snapshot first: dsctl snapshot create NAME --from {text}; dsctl mount NAME {directory}",
        )
    api.parse_ref(text)


@command()
@click.argument("directories", metavar="DIR...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="All mounts of this home.")
@click.option("--lazy", is_flag=True, help="Take it away at once and let those who use it finish.")
@click.option(
    "--wait/--no-wait",
    default=None,
    help="Whether a read-write mount is unmounted only when all is uploaded (default: wait).",
)
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds to wait for the uploads; it stays mounted then.")
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
    if everything == bool(directories):
        raise UsageError("say which mounts: give their directories, or --all for all of this home")
    if (lazy or wait is False) and (timeout is not None or wait):
        raise UsageError("--lazy and --no-wait wait for nothing", hint="Leave --wait and --timeout out.")
    if everything:
        snapshots = [info.mountpoint for info in fuse_mount.list_mounts(app.settings)]
        directories = (*snapshots, *(info.mountpoint for info in fuse_mount.list_bucket_mounts(app.settings)))
    waits = not lazy and wait is not False
    directories = tuple(Path(fuse_mount.resolved(directory)) for directory in directories)
    os.chdir("/")  # a working directory in a mount would keep it busy

    def unmount(directory: Path) -> tuple[dict[str, Any], str]:
        info = fuse_mount.bucket_mount_at(directory, app.settings)
        if info is not None:
            return _unmount_bucket(app, info, wait=waits, lazy=lazy, timeout_s=timeout)
        if not everything and (wait is not None or timeout is not None):
            raise UsageError(
                f"--wait, --no-wait and --timeout are for read-write mounts, and none of this home is at {directory}",
                hint="dsctl status lists the mounts.",
            )
        if not fuse_mount.unmount(directory, lazy=lazy, settings=app.settings):
            raise MountError(f"nothing is mounted at {directory}", hint="dsctl status lists the mounts.")
        target = fuse_mount.resolved(directory)
        return {"mountpoint": target, "unmounted": True}, f"{target} is unmounted"

    if len(directories) == 1 and not everything:
        app.out.result(*unmount(directories[0]))
        return
    results: list[dict[str, Any]] = []
    errors: list[DatacacheError] = []
    for directory in directories:
        try:
            found, text = unmount(directory)
            results.append(found | {"error": None, "hint": ""})
            app.out.line(text)
        except DatacacheError as exc:
            target = fuse_mount.resolved(directory)
            results.append({"mountpoint": target, "unmounted": False, "error": exc.message, "hint": exc.hint})
            errors.append(exc)
    app.out.result(results, "" if results else "nothing is mounted")
    raise_all(errors, MountError)


def _unmount_bucket(
    app: App, info: fuse_mount.BucketInfo, *, wait: bool, lazy: bool, timeout_s: float | None
) -> tuple[dict[str, Any], str]:
    """Unmount one: what to print as JSON, and in words."""
    way_on = (
        f"lies in {info.staging} and is uploaded by `{fuse_mount.mount_command(info)}` or "
        f"`{fuse_mount.flush_command(info)}`"
    )
    done = {"mountpoint": str(info.mountpoint), "unmounted": True}
    text = f"{info.mountpoint} is unmounted"
    try:
        fuse_mount.await_server(info)
    except MountError:
        fuse_mount.take_away_dead(info)
        return done | {"left": None}, f"{text}. Nothing had served it: what may be left {way_on}"
    if wait:
        still = f"{info.mountpoint} stays mounted. To unmount it all the same: dsctl umount --no-wait {info.mountpoint}"
        for line in fuse_mount.lost_lines(follow_flush(app, info, timeout_s, still=still)["losses"]):
            app.out.warning(line)
    left = fuse_mount.stop_server(info, flush_s=_LAST_FLUSH_S if wait else 0.0, lazy=lazy)
    amount = fuse_mount.counted(left["files"], left["bytes"])
    if left["files"] and wait:
        raise UploadError(f"{text}, but {amount} of it are not uploaded", hint=f"what is left {way_on}")
    if left["files"]:
        text += f". Not uploaded yet: {amount}; it {way_on}"
    return done | {"left": left}, text
