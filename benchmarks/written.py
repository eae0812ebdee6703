"""Files whose contents follow from a number, folders to write them to, writers in processes of their own, and a bucket
that is read back as the proof that all arrived.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from benchmarks.harness import Home, Workspace, forked
from benchmarks.peers import bare_store, rclone_mount, s3fs_mount
from tests.servers import CephRgw, RcloneS3

ARRIVAL_TIMEOUT_S = 1800.0
_SHIFTS = 4096
_NOISE = random.Random(0).randbytes(2**20 + _SHIFTS)


def small(number: int, size_bytes: int) -> bytes:
    """Return the content of file `number`: none is another's."""
    start = number % _SHIFTS
    return number.to_bytes(8, "little") + _NOISE[start : start + size_bytes - 8]


def blocks(size_bytes: int, block_bytes: int) -> Iterator[memoryview]:
    """Yield the content of a large file, block for block in one buffer that is filled again."""
    buffer = bytearray(_NOISE[:block_bytes])
    view = memoryview(buffer)
    for number in range(-(-size_bytes // block_bytes)):
        buffer[:8] = number.to_bytes(8, "little")
        yield view[: size_bytes - number * block_bytes]


def write_large(path: Path, size_bytes: int, block_bytes: int, *, fsync: bool) -> None:
    """Create the file, write it in blocks from start to end, close it."""
    with open(path, "xb", buffering=0) as file:
        for block in blocks(size_bytes, block_bytes):
            if file.write(block) != len(block):
                raise SystemExit(f"{path}: a short write")
        if fsync:
            os.fsync(file.fileno())


def write_small(paths: Sequence[Path], size_bytes: int, *, writers: int, fsync: bool) -> float:
    """Create, write and close every file, file `n` by process `n % writers`; return the seconds."""

    def prepare(writer: int) -> Callable[[], int]:
        mine = [(number, os.fspath(path)) for number, path in list(enumerate(paths))[writer::writers]]
        ready = [small(number, size_bytes) for number, _ in mine] if len(mine) < 5000 else None

        def write() -> int:
            for place, (number, path) in enumerate(mine):
                fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
                os.write(fd, ready[place] if ready else small(number, size_bytes))
                if fsync:
                    os.fsync(fd)
                os.close(fd)
            return len(mine)

        return write

    return forked(writers, prepare)[0]


def digest_of(pieces: Iterator[memoryview]) -> int:
    """Return the checksum of a file's content."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def pieces_of(path: Path) -> Iterator[memoryview]:
    """Yield a file's content in large pieces."""
    buffer = bytearray(2**20)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield memoryview(buffer)[:count]


class BucketView:
    """A bucket as any client sees it, through bare obstore."""

    def __init__(self, server: RcloneS3 | CephRgw, bucket: str, *, endpoint: str = "") -> None:
        self.bucket = bucket
        env = server.env() | ({"AWS_ENDPOINT_URL": endpoint} if endpoint else {})
        self.store = bare_store(bucket, env, timeout="300s")

    def wait_for(self, start: str, count: int, size_bytes: int) -> None:
        """Wait until this many whole objects are there whose keys begin so, none of them in a folder."""
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        while time.monotonic() < deadline:
            there = self.store.list_with_delimiter()["objects"]
            if [found["size"] for found in there if found["path"].startswith(start)].count(size_bytes) == count:
                return
            time.sleep(0.02 if count == 1 else 0.25)
        raise SystemExit(f"{start}… did not arrive in the bucket within {ARRIVAL_TIMEOUT_S:.0f} s")

    def check_large(self, key: str, size_bytes: int, block_bytes: int) -> None:
        """Compare an object with what was written."""
        found = digest_of(memoryview(piece) for piece in self.store.get(key).stream(min_chunk_size=2**23))
        if found != digest_of(blocks(size_bytes, block_bytes)):
            raise SystemExit(f"{key}: what is in the bucket is not what was written")

    def check_small(self, keys: Sequence[str], size_bytes: int) -> None:
        """Compare object `n` with file `n`."""
        waiting = iter(enumerate(keys))

        async def fetcher() -> None:
            for number, key in waiting:
                answer = await self.store.get_async(key)
                if bytes(await answer.bytes_async()) != small(number, size_bytes):
                    raise SystemExit(f"{key}: what is in the bucket is not what was written")

        async def fetch_all() -> None:
            await asyncio.gather(*(fetcher() for _ in range(16)))

        asyncio.run(fetch_all())

    def clear(self) -> None:
        """Delete everything, so that the server's disk or memory is free again."""
        for page in self.store.list():
            self.store.delete([found["path"] for found in page])


# --- where to write ---

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
    """Have one of `SYSTEMS` to write to; what was written goes when it ends."""
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
    """Mount ours, on an endpoint that leads to the server."""
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
