"""Folders to write into: the disk itself, our read-write mount, rclone mount, s3fs-fuse. Each time on a bucket and
caches of its own, which are empty.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Home, Workspace
from benchmarks.peers import rclone_mount, s3fs_mount
from benchmarks.written import BucketView
from tests.servers import CephRgw, RcloneS3

OURS = "datacache"
SYSTEMS = ("disk", "disk, fsync", OURS, "datacache, uploaded", "rclone", "s3fs", "s3fs, cache")
"""`uploaded` is `--ack uploaded`. `fsync` is called for each file before it is closed."""
_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class System:
    """Where to write, and what to expect of it."""

    name: str
    folder: Path
    fsync: bool = False
    view: BucketView | None = None
    """Where it arrives; None for the disk."""
    home: Home | None = None


@contextmanager
def system(name: str, work: Workspace, server: RcloneS3 | CephRgw) -> Iterator[System]:
    """One of `SYSTEMS`; what was written goes when it ends."""
    folder = work.folder(f"system-{next(_numbers)}")
    try:
        if name.startswith("disk"):
            yield System(name=name, folder=folder, fsync=name.endswith("fsync"))
        elif name.startswith(OURS):
            ack = "uploaded" if name.endswith("uploaded") else "staged"
            with ours(work, server, ack=ack) as mounted:
                yield mounted
        else:
            with ExitStack() as stack:
                view = stack.enter_context(_bucket(server))
                if name == "rclone":
                    mount = stack.enter_context(rclone_mount(server, view.bucket, folder, writable=True))
                else:
                    cache = name.endswith("cache")
                    mount = stack.enter_context(s3fs_mount(server, view.bucket, folder, writable=True, cache=cache))
                yield System(name=name, folder=mount, view=view)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ours(
    work: Workspace, server: RcloneS3 | CephRgw, *, ack: str = "staged", endpoint: str = "", **settings: object
) -> Iterator[System]:
    """Our mount, on an endpoint that leads to the server."""
    with _bucket(server) as view:
        env = server.env() | ({"AWS_ENDPOINT_URL": endpoint} if endpoint else {})
        home = work.home(f"home-{next(_numbers)}", env, **settings)
        mount = work.folder(f"mount-{next(_numbers)}")
        try:
            home.dsctl("mount", "--rw", "--ack", ack, f"s3://{view.bucket}", mount)
            yield System(name=OURS, folder=mount, view=view, home=home)
            home.dsctl("umount", mount)
        finally:
            home.close()


@contextmanager
def _bucket(server: RcloneS3 | CephRgw) -> Iterator[BucketView]:
    name = f"bench-{next(_numbers)}"
    server.client().create_bucket(Bucket=name)
    view = BucketView(server, name)
    yield view
    view.clear()
