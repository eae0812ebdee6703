"""What the benchmark of writing writes, and the proof that it arrived: contents that follow from a number, writers in
processes of their own, and a bucket that is read back.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from tests.servers import CephRgw, RcloneS3

ARRIVAL_TIMEOUT_S = 1800.0
_SHIFTS = 4096
_NOISE = random.Random(0).randbytes(2**20 + _SHIFTS)


def small(number: int, size_bytes: int) -> bytes:
    """The content of file `number`: none is another's."""
    start = number % _SHIFTS
    return number.to_bytes(8, "little") + _NOISE[start : start + size_bytes - 8]


def blocks(size_bytes: int, block_bytes: int) -> Iterator[memoryview]:
    """The content of a large file, block for block in one buffer that is filled again."""
    buffer = bytearray(_NOISE[:block_bytes])
    view = memoryview(buffer)
    for number in range(-(-size_bytes // block_bytes)):
        buffer[:8] = number.to_bytes(8, "little")
        yield view[: size_bytes - number * block_bytes]


def write_large(path: Path, size_bytes: int, block_bytes: int, *, fsync: bool) -> None:
    """Create the file, write it in blocks from start to end, close it."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        for block in blocks(size_bytes, block_bytes):
            if os.write(fd, block) != len(block):
                raise SystemExit(f"{path}: a short write")
        if fsync:
            os.fsync(fd)
    finally:
        os.close(fd)


def write_small(paths: Sequence[Path], size_bytes: int, *, writers: int, fsync: bool) -> float:
    """Create, write and close every file, file `n` by writer `n % writers`. Seconds from the first writer's start to
    the last one's end, after all are ready."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(writers), context.SimpleQueue()
    numbered = list(enumerate(paths))
    workers = [
        context.Process(target=_write_all, args=(numbered[one::writers], size_bytes, fsync, barrier, results))
        for one in range(writers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a writer failed")
    times: list[tuple[float, float]] = [results.get() for _ in workers]
    return max(end for _, end in times) - min(start for start, _ in times)


def _write_all(files: list[tuple[int, Path]], size_bytes: int, fsync: bool, barrier: Any, results: Any) -> None:
    contents = [(os.fspath(path), small(number, size_bytes)) for number, path in files] if len(files) < 5000 else None
    barrier.wait()
    start = time.monotonic()
    for path, content in contents or ((os.fspath(path), small(number, size_bytes)) for number, path in files):
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.write(fd, content)
        if fsync:
            os.fsync(fd)
        os.close(fd)
    results.put((start, time.monotonic()))


def digest_of_blocks(size_bytes: int, block_bytes: int) -> int:
    """The checksum of a large file's content."""
    sum_ = xxhash.xxh3_64()
    for block in blocks(size_bytes, block_bytes):
        sum_.update(block)
    return sum_.intdigest()


def digest_of_file(path: Path) -> int:
    """The checksum of a file, read in large pieces."""
    sum_, buffer = xxhash.xxh3_64(), bytearray(2**20)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sum_.update(memoryview(buffer)[:count])
    return sum_.intdigest()


class BucketView:
    """A bucket as any client sees it, through bare obstore."""

    def __init__(self, server: RcloneS3 | CephRgw, bucket: str, *, endpoint: str = "") -> None:
        from obstore.store import S3Store

        self.bucket = bucket
        self.store = S3Store(
            bucket,
            endpoint=endpoint or server.endpoint,
            access_key_id=server.access_key,
            secret_access_key=server.secret_key,
            region=server.region,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": "300s"},
        )

    def wait_for_one(self, key: str, size_bytes: int) -> None:
        """Until the object is there, whole."""

        def arrived() -> bool:
            try:
                return self.store.head(key)["size"] == size_bytes
            except FileNotFoundError:
                return False

        _wait(key, arrived, every_s=0.02)

    def wait_for_all(self, start: str, count: int, size_bytes: int) -> None:
        """Until this many whole objects are there whose keys begin so, none of them in a folder."""

        def arrived() -> bool:
            there = self.store.list_with_delimiter()["objects"]
            sizes = [found["size"] for found in there if found["path"].startswith(start)]
            return sizes.count(size_bytes) == count

        _wait(f"{count:,} objects", arrived, every_s=0.25)

    def check_large(self, key: str, digest: int) -> None:
        """The object's content has this checksum."""
        sum_ = xxhash.xxh3_64()
        for piece in self.store.get(key).stream(min_chunk_size=2**23):
            sum_.update(memoryview(piece))
        if sum_.intdigest() != digest:
            raise SystemExit(f"{key}: what is in the bucket is not what was written")

    def check_small(self, keys: Sequence[str], size_bytes: int) -> None:
        """Object `n` is file `n`."""
        asyncio.run(self._check_small(keys, size_bytes))

    async def _check_small(self, keys: Sequence[str], size_bytes: int) -> None:
        waiting = iter(enumerate(keys))

        async def fetcher() -> None:
            for number, key in waiting:
                answer = await self.store.get_async(key)
                if bytes(await answer.bytes_async()) != small(number, size_bytes):
                    raise SystemExit(f"{key}: what is in the bucket is not what was written")

        await asyncio.gather(*(fetcher() for _ in range(16)))

    def clear(self) -> None:
        """Delete everything, so that the server's disk or memory is free again."""
        for page in self.store.list():
            self.store.delete([found["path"] for found in page])


def _wait(what: str, arrived: Callable[[], bool], *, every_s: float) -> None:
    deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
    while not arrived():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not arrive in the bucket within {ARRIVAL_TIMEOUT_S:.0f} s")
        time.sleep(every_s)
