"""The daemon's HTTP server on a Unix socket, and the daemon's life from lock to clean stop.

One event loop answers requests and does nothing else: gets run in the fetcher's threads, warm-ups in theirs, the tiers
are written by one thread, manifests are read in threads. Only the user who owns the home can connect (socket mode 0600
in a folder of mode 0700).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from datacache.catalog.base import Catalog
from datacache.catalog.open import open_catalog_url
from datacache.catalog.packs import stores_with_packs
from datacache.catalog.refs import resolve
from datacache.core import counters, unix_sockets
from datacache.core.errors import (
    CacheError,
    DaemonRunningError,
    DatacacheError,
    SnapshotNotFoundError,
    UsageError,
)
from datacache.core.objects import block_id, object_id
from datacache.daemon import paths, wire
from datacache.daemon.fetcher import Fetcher
from datacache.daemon.keeper import Keeper
from datacache.daemon.lookahead import Lookaheads
from datacache.daemon.metrics import render_metrics
from datacache.daemon.plan_file import HEAD_BYTES, PlanHeader, decode_header, header_length
from datacache.daemon.warmer import Warmer, snapshot_blocks
from datacache.manifest.model import SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.tiers.local import LocalBlocks
from datacache.tiers.recovery import open_tiers
from datacache.tiers.writer import TierWriter

log = logging.getLogger(__name__)
_FOLD_EVERY_S = 30.0
_MAX_HEADER_BYTES = 64 * 2**20  # the objects of a plan without a snapshot are in it
_MAX_PLAN_BYTES = 2**31
_PLAN_CHUNK_BYTES = 2**20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Daemon:
    """The parts of a running daemon and the requests it answers."""

    def __init__(self, settings: Settings, writer: TierWriter, catalog: Catalog) -> None:
        self._settings, self._writer, self._catalog = settings, writer, catalog
        self._local = LocalBlocks(settings.home, settings.ram_dir)
        self._stores = stores_with_packs(settings, catalog.get_blobs)
        self._fetcher = Fetcher(writer, self._local, self._stores.get, settings.concurrency)
        lru_bytes = settings.ssd_bytes if settings.eviction == "lru" else None
        self._lookaheads = Lookaheads(settings, writer, self._fetcher, self._open_manifest)
        self._warmer = Warmer(
            self._fetcher, settings.concurrency, lru_bytes=lru_bytes, planned=self._lookaheads.planned
        )
        self._considered: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = time.time()
        self.stopping = asyncio.Event()

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[_errors_as_json], client_max_size=2**20)
        app.router.add_post("/v1/block", self._block)
        app.router.add_post("/v1/warm", self._warm)
        app.router.add_post("/v1/lookahead", self._lookahead)
        app.router.add_get("/v1/jobs/{id}", self._job)
        app.router.add_get("/v1/cache", self._cache)
        app.router.add_post("/v1/pin", self._pin)
        app.router.add_post("/v1/unpin", self._unpin)
        app.router.add_post("/v1/evict", self._evict)
        app.router.add_post("/v1/stop", self._stop)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def close(self) -> None:
        """End what is under way; what goes on after a few seconds of patience is left to the process's end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._lookaheads.stop)
        await asyncio.to_thread(self._warmer.stop)
        await asyncio.to_thread(self._fetcher.close)
        self._stores.close()

    async def _block(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ref, number, dataset = wire.decode_ref(body["ref"]), int(body["number"]), str(body["dataset"])
        if body.get("broken"):
            id = block_id(object_id(ref), number)
            # The reader may have met what has been repaired or moved since; only what is broken here too goes.
            if await asyncio.to_thread(self._local.view, id, 0, None) is None:
                log.warning("block %d of %s is broken on this node: fetching it again", number, ref.url)
                await asyncio.wrap_future(self._writer.call(lambda: self._writer.drop(id)))
        data = await asyncio.wrap_future(self._fetcher.read(ref, number, dataset))
        snapshot = body.get("snapshot")
        if (
            snapshot
            and self._settings.prefetch
            and snapshot not in self._considered
            and not self._lookaheads.planned(f"{dataset}@{snapshot}")
        ):
            self._considered.add(snapshot)
            self._in_background(self._fill_if_it_fits(dataset, snapshot))
        return web.Response(body=data, content_type="application/octet-stream")

    async def _fill_if_it_fits(self, dataset: str, id: str) -> None:
        """The first read of a snapshot starts warming the rest of it, behind the reads that wait."""
        try:
            manifest = await asyncio.to_thread(self._open_manifest, id)
            ssd = self._writer.tiers[-1]
            keeps = self._settings.eviction in ("keep", "clairvoyant")
            room = ssd.budget_bytes - (ssd.used_bytes if keeps else 0)
            if manifest.root.total_bytes <= room or keeps:
                self._warmer.start(f"{dataset}@{id[:12]}", dataset, manifest, background=True)
        except DatacacheError as exc:
            log.warning("%s@%s is not warmed in the background: %s", dataset, id[:12], exc)

    def _open_manifest(self, id: str) -> Manifest:
        return Manifest.open(id, self._catalog.get_blobs)

    async def _open(self, request: web.Request) -> tuple[SnapshotRecord, Manifest]:
        ref = str((await request.json())["ref"])

        def work() -> tuple[SnapshotRecord, Manifest]:
            record = resolve(self._catalog, ref)
            return record, self._open_manifest(record.id)

        return await asyncio.to_thread(work)

    async def _warm(self, request: web.Request) -> web.StreamResponse:
        record, manifest = await self._open(request)
        job = self._warmer.start(record.ref, record.dataset, manifest)
        return web.json_response(job.as_dict())

    async def _lookahead(self, request: web.Request) -> web.StreamResponse:
        header, items = await _read_plan(request.content)
        await asyncio.to_thread(self._lookaheads.add, header, items)
        return web.json_response({"id": header.id})

    async def _job(self, request: web.Request) -> web.StreamResponse:
        job = self._warmer.job(request.match_info["id"])
        if job is None:
            raise SnapshotNotFoundError("there is no such job", hint="The daemon was restarted; ask for it again.")
        return web.json_response(job.as_dict())

    async def _cache(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(await asyncio.wrap_future(self._writer.call(self._cache_state)))

    def _cache_state(self) -> dict[str, Any]:
        counted = counters.totals(paths.counters_dir(self._settings.home))
        loader = {name: counted.pop(name) for name in counters.LOADER}
        hits = counted["ram_hits"] + counted["ssd_hits"]
        reads = hits + counted["misses"]
        datasets: dict[str, int] = {}
        for container in self._writer.tiers[-1].containers.values():
            datasets[container.dataset] = datasets.get(container.dataset, 0) + container.disk_bytes
        return {
            "policy": self._settings.eviction,
            "tiers": [
                {
                    "name": tier.name,
                    "folder": str(tier.folder),
                    "used_bytes": tier.used_bytes,
                    "budget_bytes": tier.budget_bytes,
                    "blocks": self._blocks_in(tier.name),
                    "containers": len(tier.containers),
                    "evicted_bytes": tier.evicted_bytes,
                    "problem": tier.problem,
                }
                for tier in self._writer.tiers
            ],
            "datasets": [{"name": name, "ssd_bytes": size} for name, size in sorted(datasets.items())],
            "pins": sorted(self._writer.pins()),
            "reads": counted | {"hits": hits, "hit_rate": hits / reads if reads else None},
            "loader": loader,
            "fetched": vars(self._fetcher.stats) | {"under_way": self._fetcher.under_way},
            "plans": self._lookaheads.plans(),
            "lookahead": vars(self._lookaheads.stats) | {"moved_bytes": self._lookaheads.moved_bytes},
            "jobs": [job.as_dict() for job in self._warmer.jobs()],
        }

    def _blocks_in(self, tier: str) -> int:
        return self._writer.count_blocks(tier)

    async def _pin(self, request: web.Request) -> web.StreamResponse:
        record, manifest = await self._open(request)
        blocks = await asyncio.to_thread(lambda: list(snapshot_blocks(manifest)))  # while the writer goes on

        def work() -> None:
            self._writer.pin(record.ref, record.dataset, blocks)

        await asyncio.wrap_future(self._writer.call(work))
        return web.json_response({"ref": record.ref, "pinned": True})

    async def _unpin(self, request: web.Request) -> web.StreamResponse:
        ref = str((await request.json())["ref"])
        if ref not in self._writer.pins():
            ref = (await asyncio.to_thread(resolve, self._catalog, ref)).ref
        known = await asyncio.wrap_future(self._writer.call(lambda: self._writer.unpin(ref)))
        return web.json_response({"ref": ref, "pinned": False, "was_pinned": known})

    async def _evict(self, request: web.Request) -> web.StreamResponse:
        ref = (await request.json()).get("ref")
        dataset = str(ref).partition("@")[0] if ref else None
        pinned = [r for r, name in self._writer.pins().items() if name == dataset]
        if pinned:
            raise UsageError(f"{dataset} is pinned ({', '.join(pinned)})", hint=f"dsctl cache unpin {pinned[0]}")
        if dataset:
            await self._expect_known(dataset)
        freed = await asyncio.wrap_future(self._writer.call(lambda: self._writer.evict(dataset)))
        self._considered.clear()
        return web.json_response({"freed_bytes": freed})

    async def _expect_known(self, dataset: str) -> None:
        """`SnapshotNotFoundError` if neither this node has anything of a data set nor the catalog knows it."""
        held = await asyncio.wrap_future(self._writer.call(self._held))
        if dataset in held or await asyncio.to_thread(self._catalog.dataset, dataset) is not None:
            return
        there = f"This node has something of: {', '.join(sorted(held))}." if held else "This node has nothing cached."
        raise SnapshotNotFoundError(f"there is no dataset {dataset!r}", ref=dataset, hint=there)

    def _held(self) -> set[str]:
        return {container.dataset for tier in self._writer.tiers for container in tier.containers.values()}

    async def _health(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(
            {
                "pid": os.getpid(),
                "home": str(self._settings.home),
                "uptime_s": time.time() - self._started,
                "catalog": self._catalog.url,
                "stores": wire.store_fingerprint(),
                "problems": [f"{tier.name}: {tier.problem}" for tier in self._writer.tiers if tier.problem],
            }
        )

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        state = await asyncio.wrap_future(self._writer.call(self._cache_state))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        text = render_metrics(state, memory)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _stop(self, _: web.Request) -> web.StreamResponse:
        self.stopping.set()
        return web.json_response({"pid": os.getpid(), "stopping": True})

    async def fold_counters(self) -> None:
        """Now and then, take over the counters of processes that ended."""
        while True:
            await asyncio.to_thread(counters.fold, paths.counters_dir(self._settings.home))
            await asyncio.sleep(_FOLD_EVERY_S)

    def _in_background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _read_plan(content: aiohttp.StreamReader) -> tuple[PlanHeader, NDArray[np.uint32]]:
    """A plan as `PlanHeader` describes it, straight into the array it is used from. `UsageError` if it is too large or
    ends early."""
    try:
        length = header_length(await content.readexactly(HEAD_BYTES))
        if length > _MAX_HEADER_BYTES:
            raise UsageError("a plan names too many objects")
        header = decode_header(await content.readexactly(length))
        if header.body_bytes > _MAX_PLAN_BYTES:
            raise UsageError(f"the order is too long: {header.body_bytes:,} bytes")
        raw, at = bytearray(header.body_bytes), 0
        while at < len(raw):
            part = await content.readexactly(min(_PLAN_CHUNK_BYTES, len(raw) - at))
            raw[at : at + len(part)] = part
            at += len(part)
    except asyncio.IncompleteReadError as exc:
        raise UsageError("a plan ended early") from exc
    return header, np.frombuffer(raw, "<u4").reshape(-1, header.columns)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except DatacacheError as exc:
        status, body = wire.encode_error(exc)
        return web.json_response(body, status=status)
    except (KeyError, TypeError, ValueError, json.JSONDecodeError) as exc:
        return web.json_response({"error": "UsageError", "message": f"bad request: {exc}"}, status=400)


@contextlib.contextmanager
def hold_lock(settings: Settings, *, wait: bool = False) -> Iterator[None]:
    """Be the only daemon of a home. `DaemonRunningError` if there is one, unless its end is to be waited for."""
    path = paths.lock_path(settings.home)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise CacheError(
            f"the home {settings.home} cannot be used: {exc.strerror} ({exc.filename})",
            hint="Set DATACACHE_HOME to a folder you can write to.",
        ) from exc
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            pid = os.pread(fd, 20, 0).decode(errors="replace").strip() or "?"
            if not wait:
                raise DaemonRunningError(
                    f"a daemon (pid {pid}) serves {settings.home} already",
                    hint="See: dsctl daemon status. Stop it: dsctl daemon stop.",
                ) from exc
            log.info("a daemon (pid %s) serves %s: waiting for its end", pid, settings.home)
            fcntl.flock(fd, fcntl.LOCK_EX)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _keeping(settings: Settings) -> Iterator[None]:
    """Have a keeper from before the tiers are opened, which may take a while, to after they are closed."""
    keeper = Keeper(settings.home)
    keeper.start()
    try:
        yield
    finally:
        keeper.close()


def run(settings: Settings, *, wait: bool = False) -> None:
    """Serve until told to stop; `wait` until another daemon of the home has ended. Raises `DaemonRunningError`,
    `CacheError` before it serves.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))
    with hold_lock(settings, wait=wait), _keeping(settings), open_tiers(settings) as writer:
        catalog = open_catalog_url(settings.catalog, blob_cache_dir=settings.home)
        try:
            asyncio.run(_serve(settings, writer, catalog))
        finally:
            catalog.close()
    if threading.active_count() > 1:
        # Gets from a store that is away, asleep between two tries: all is written and closed, nobody waits for them.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(0)


async def _serve(settings: Settings, writer: TierWriter, catalog: Catalog) -> None:
    daemon = Daemon(settings, writer, catalog)
    loop = asyncio.get_running_loop()
    # What the first fetch needs takes a while to import: have it ready by then.
    threading.Thread(target=importlib.import_module, args=("datacache.store.s3_clients",), daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stopping.set)
    runner = web.AppRunner(daemon.app(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    # What is there is stale: we hold the lock.
    listener = unix_sockets.listen(paths.socket_path(settings.home), backlog=512)
    await web.SockSite(runner, listener, backlog=512).start()
    folding = loop.create_task(daemon.fold_counters())
    log.info("serving %s (pid %d)", settings.home, os.getpid())
    await daemon.stopping.wait()
    log.info("stopping")
    paths.socket_path(settings.home).unlink(missing_ok=True)
    folding.cancel()
    await daemon.close()
    await runner.cleanup()
