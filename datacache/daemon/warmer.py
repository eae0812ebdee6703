"""Fill the tiers with whole snapshots: what `dsctl warm` asks for, and what the first read of a snapshot starts.

A job walks the manifest, fetches what the index does not have, and at the end looks once more whether every block is
there: only then is it done. Lives in the daemon's event loop; manifests and the index are read in threads.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from datacache.core.errors import DatacacheError
from datacache.core.objects import BlockId, ObjectRef, block_count, block_id, block_length, object_id
from datacache.daemon.fetcher import Fetcher
from datacache.manifest.reader import Manifest

log = logging.getLogger(__name__)
_BATCH = 512
_KEPT_JOBS = 100
Item = tuple[ObjectRef, int, BlockId]


@dataclass
class WarmJob:
    """One warm-up, as `GET /v1/jobs/<id>` shows it. `bytes_done` counts what is on the node, found or fetched."""

    id: str
    ref: str
    state: str = "running"
    """running, done, incomplete (the tiers are full) or failed."""
    background: bool = False
    files_total: int = 0
    files_done: int = 0
    bytes_total: int = 0
    bytes_done: int = 0
    bytes_fetched: int = 0
    bytes_not_kept: int = 0
    errors: int = 0
    error: str = ""
    hint: str = ""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


class Warmer:
    """Runs warm-up jobs."""

    def __init__(self, fetcher: Fetcher, concurrency: int) -> None:
        self._fetcher = fetcher
        self._concurrency = concurrency
        self._jobs: dict[str, WarmJob] = {}
        self._by_ref: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def job(self, id: str) -> WarmJob | None:
        """A job by its id."""
        return self._jobs.get(id)

    def jobs(self) -> list[WarmJob]:
        """The jobs of this daemon's life, newest last."""
        return list(self._jobs.values())

    def start(self, ref: str, dataset: str, manifest: Manifest, *, background: bool = False) -> WarmJob:
        """Start warming, or join the job that warms the same snapshot already."""
        running = self._by_ref.get(ref)
        if running is not None and self._jobs[running].state == "running":
            job = self._jobs[running]
            job.background = job.background and background
            return job
        job = WarmJob(id=secrets.token_hex(6), ref=ref, background=background)
        job.files_total, job.bytes_total = manifest.root.files, manifest.root.total_bytes
        self._jobs[job.id] = job
        self._by_ref[ref] = job.id
        while len(self._jobs) > _KEPT_JOBS:
            self._jobs.pop(next(iter(self._jobs)))
        self._tasks[job.id] = asyncio.get_running_loop().create_task(self._run(job, dataset, manifest))
        return job

    async def stop(self) -> None:
        """Cancel what runs."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, job: WarmJob, dataset: str, manifest: Manifest) -> None:
        try:
            await self._fetch_missing(job, dataset, manifest)
            missing = await asyncio.to_thread(self._missing_bytes, manifest)
            job.bytes_done = job.bytes_total - missing
            if job.errors:
                job.state = "failed"
            elif missing:
                job.state, job.error = "incomplete", f"{missing:,} bytes are not in the cache: it is full"
                job.hint = "Raise DATACACHE_SSD_BYTES, or make room: dsctl cache evict NAME"
            else:
                job.state, job.files_done = "done", job.files_total
        except asyncio.CancelledError:
            job.state, job.error = "failed", "the daemon was stopped"
            raise
        except DatacacheError as exc:
            job.state, job.error, job.hint = "failed", str(exc), exc.hint
        except Exception as exc:
            log.exception("warming %s", job.ref)
            job.state, job.error = "failed", f"{type(exc).__name__}: {exc}"
        finally:
            self._tasks.pop(job.id, None)

    async def _fetch_missing(self, job: WarmJob, dataset: str, manifest: Manifest) -> None:
        rows = _blocks(manifest)
        waiting: asyncio.Queue[Item] = asyncio.Queue(maxsize=2 * _BATCH)
        # A background job leaves the store's attention to the reads that wait.
        workers = [
            asyncio.get_running_loop().create_task(self._work(job, dataset, waiting))
            for _ in range(min(16, self._concurrency) if job.background else self._concurrency)
        ]
        try:
            while batch := await asyncio.to_thread(self._next_batch, rows):
                for item, here in batch:
                    if here:
                        self._count(job, item)
                    else:
                        await waiting.put(item)
                if job.bytes_not_kept and job.background:
                    break  # the tiers are full: more would only be fetched to be thrown away
            await waiting.join()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    def _next_batch(self, rows: Iterator[Item]) -> list[tuple[Item, bool]]:
        batch = []
        for item in rows:
            batch.append((item, self._fetcher.has(item[2])))
            if len(batch) == _BATCH:
                break
        return batch

    async def _work(self, job: WarmJob, dataset: str, waiting: asyncio.Queue[Item]) -> None:
        while True:
            item = await waiting.get()
            ref, number, id = item
            stored = functools.partial(self._stored, job, item, waiting)
            try:
                await self._fetcher.fill(id, ref, number, dataset, stored=stored)
            except DatacacheError as exc:
                job.errors += 1
                if not job.error:
                    job.error, job.hint = str(exc), exc.hint
                waiting.task_done()

    def _stored(self, job: WarmJob, item: Item, waiting: asyncio.Queue[Item], kept: bool) -> None:
        length = block_length(item[0].size_bytes, item[1])
        job.bytes_fetched += length
        if kept:
            self._count(job, item)
        else:
            job.bytes_not_kept += length
        waiting.task_done()

    def _count(self, job: WarmJob, item: Item) -> None:
        ref, number, _ = item
        job.bytes_done += block_length(ref.size_bytes, number)
        job.files_done += number == 0

    def _missing_bytes(self, manifest: Manifest) -> int:
        return sum(block_length(ref.size_bytes, n) for ref, n, id in _blocks(manifest) if not self._fetcher.has(id))


def _blocks(manifest: Manifest) -> Iterator[Item]:
    for entry in manifest.entries():
        if entry.size_bytes:
            ref = manifest.object_ref(entry)
            obj = object_id(ref)
            for number in range(block_count(entry.size_bytes)):
                yield ref, number, block_id(obj, number)


def snapshot_blocks(manifest: Manifest) -> Iterator[BlockId]:
    """The ids of all blocks of a snapshot."""
    return (id for _, _, id in _blocks(manifest))
