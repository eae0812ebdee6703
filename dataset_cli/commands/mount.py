"""`dsctl mount` and `dsctl umount`.

With `--json`, `mount` prints `{"mountpoint", "ref", "files", "bytes", "pid", "workers", "log"}` and `umount`
`{"mountpoint", "unmounted"}`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dataset_cli.app import App, SnapshotRef, json_option, pass_app
from dataset_cli.output import format_bytes

if TYPE_CHECKING:
    from fuse_mount import MountInfo


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
    }


def _umask(_context: click.Context, _parameter: click.Parameter, value: str) -> int:
    try:
        number = int(value, 8)
    except ValueError:
        number = -1
    if not 0 <= number <= 0o777:
        raise click.BadParameter(f"{value!r} is not an octal number from 0 to 777")
    return number


@click.command()
@click.argument("ref", type=SnapshotRef())
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--uid", type=click.IntRange(min=0), help="Owner of the files (default: you).")
@click.option("--gid", type=click.IntRange(min=0), help="Group of the files (default: yours).")
@click.option("--umask", default="022", callback=_umask, help="Permission bits to leave out, octal. Default 022.")
@click.option("--allow-other/--no-allow-other", default=None, help="Whether other users may read (default: as root).")
@click.option("--workers", type=click.IntRange(1, 256), help="Processes that serve it (default: one a core, ≤ 4).")
@click.option("--foreground", "-f", is_flag=True, help="Stay until it is unmounted; Ctrl-C unmounts.")
@json_option
@pass_app
def mount(
    app: App,
    *,
    ref: str,
    directory: Path,
    uid: int | None,
    gid: int | None,
    umask: int,
    allow_other: bool | None,
    workers: int | None,
    foreground: bool,
) -> None:
    """Show a snapshot as a read-only directory.

    A tag is resolved once: the mount keeps the snapshot it named, even if it moves.
    """
    from fuse_mount import mount_snapshot

    info = mount_snapshot(
        ref,
        directory,
        settings=app.settings,
        uid=uid,
        gid=gid,
        umask=umask,
        allow_other=allow_other,
        workers=workers,
        foreground=foreground,
    )
    done = "was mounted" if foreground else "is mounted"
    app.out.result(
        as_json(info),
        f"{info.ref.partition('@')[0]}@{info.snapshot_id[:12]} {done} at {info.mountpoint}: "
        f"{info.files:,} files, {format_bytes(info.total_bytes)}",
    )


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--lazy", is_flag=True, help="Take it away at once and let those who use it finish.")
@json_option
@pass_app
def umount(app: App, directory: Path, lazy: bool) -> None:
    """Unmount what `dsctl mount` mounted."""
    from datacache.core.errors import MountError
    from fuse_mount import unmount

    if not unmount(directory, lazy=lazy, settings=app.settings):
        raise MountError(f"nothing is mounted at {directory}", hint="dsctl status lists the mounts.")
    app.out.result({"mountpoint": str(directory), "unmounted": True}, f"{directory} is unmounted")
