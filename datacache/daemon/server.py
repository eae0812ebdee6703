"""The daemon's HTTP server on a Unix socket, and the daemon's life from lock to clean stop.

One event loop answers requests and does nothing else: gets run in the fetcher's threads, warm-ups in theirs, the tiers
are written by one thread, manifests are read in threads. Only the user who owns the home can connect (socket mode 0600
in a folder of mode 0700).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from datacache.catalog.base import Catalog
from datacache.catalog.open import open_catalog_url
from datacache.catalog.packs import stores_with_packs
from datacache.catalog.refs import resolve
from datacache.core import counters, lockfile
from datacache.core import ipc as unix_sockets
from datacache.core.errors import (
    CacheError,
    DaemonError,
    DaemonRunningError,
    DatacacheError,
    SnapshotNotFoundError,
    UsageError,
)
from datacache.core.ids import block_id, object_id
from datacache.daemon import paths, wire
from datacache.daemon.client import import_store_clients
from datacache.daemon.fetcher import Fetcher
from datacache.daemon.keeper import Keeper
from datacache.daemon.memory import Trimmer
from datacache.daemon.metrics import render_metrics
from datacache.daemon.mount_leases import MountLeases
from datacache.daemon.orders.lookahead import Lookaheads
from datacache.daemon.orders.plan_file import HEAD_BYTES, PlanHeader, decode_header, header_length
from datacache.daemon.pulse import Pulse
from datacache.daemon.turns import Sends
from datacache.daemon.warmer import Warmer, snapshot_objects
from datacache.daemon.whole_objects import WholeObjects
from datacache.daemon.wire import fields_of
from datacache.manifest.model import SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.store.checksums import TALLY
from datacache.store.credentials import Environments
from datacache.tiers.local import LocalBlocks
from datacache.tiers.memory import counters_dir
from datacache.tiers.recovery import open_tiers
from datacache.tiers.shares import Shares
from datacache.tiers.writer import TierWriter

log = logging.getLogger(__name__)
_FOLD_EVERY_S = 30.0
_LOOK_FOR_SOCKET_S = 1.0
_MAX_HEADER_BYTES = 64 * 2**20  # the objects of a plan without a snapshot are in it
_MAX_PLAN_BYTES = 2**31
_PLAN_CHUNK_BYTES = 2**20
_PIECE_BYTES = 2**18
_TAKEN_IN_S = 20.0
_WRITER_STUCK_S, _GET_STUCK_S = 120.0, 60.0
"""From when on a thread counts as hanging: a busy disk takes seconds, a pin of a million blocks tens of them."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Daemon:
    """The parts of a running daemon and the requests it answers."""

    def __init__(
        self,
        settings: Settings,
        writer: TierWriter,
        catalog: Catalog,
        environments: Environments | None = None,
    ) -> None:
        """`environments`: where clients say how they reach stores; None if they may not."""
        self._settings, self._writer, self._catalog = settings, writer, catalog
        self._environments = environments
        self._local = LocalBlocks(settings.home, settings.ram_dir)
        self._stores = stores_with_packs(settings, catalog.get_blobs, environments=environments)
        self._flow_of = Shares(settings.shares).flow
        self._fetcher = Fetcher(
            writer,
            self._local,
            self._stores.get,
            settings.concurrency,
            flow_of=self._flow_of,
            whole=WholeObjects(writer, self._local, self._stores.get, md5=settings.check_md5),
        )
        lru_bytes = settings.ssd_bytes if settings.eviction == "lru" else None
        self._lookaheads = Lookaheads(settings, writer, self._fetcher, self._open_manifest)
        self._warmer = Warmer(
            self._fetcher, settings.concurrency, lru_bytes=lru_bytes, planned=self._lookaheads.planned
        )
        self._leases = MountLeases(settings, open_catalog_url)
        self._considered: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = time.time()
        self._trimmer = Trimmer(lambda: (self._fetcher.stats.fetched, self._answered))
        self._answered = 0
        self._sends = Sends()
        self._pulse = Pulse(settings.home, asyncio.get_running_loop().call_soon_threadsafe, self._hangs)
        self.stopping = asyncio.Event()

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[_errors_as_json], client_max_size=2**20)
        app.router.add_post("/v1/block", self._block)
        app.router.add_post("/v1/warm", self._warm)
        app.router.add_post("/v1/lookahead", self._lookahead)
        app.router.add_get("/v1/jobs", self._jobs)
        app.router.add_get("/v1/jobs/{id}", self._job)
        app.router.add_post("/v1/jobs/{id}/cancel", self._cancel)
        app.router.add_get("/v1/cache", self._cache)
        app.router.add_post("/v1/pin", self._pin)
        app.router.add_post("/v1/unpin", self._unpin)
        app.router.add_post("/v1/evict", self._evict)
        app.router.add_post("/v1/mounts", self._mounts)
        app.router.add_post("/v1/environment", self._environment)
        app.router.add_post("/v1/stop", self._stop)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    def _hangs(self) -> str:
        """Return what has made no progress for longer than anything takes, '' for nothing."""
        writing_s, getting_s = self._writer.working_s(), self._fetcher.stuck_s()
        if writing_s > _WRITER_STUCK_S:
            return f"the cache's folder has taken nothing for {writing_s:.0f} s"
        # A get takes the store's whole patience at most, and its last try as long again.
        if getting_s > 2 * self._settings.store_timeout_s + _GET_STUCK_S:
            return f"no get of a store has ended for {getting_s:.0f} s"
        return ""

    def begin(self) -> None:
        """Let readers see from now on that this daemon answers, and look after its memory."""
        self._pulse.start()
        self._trimmer.start()

    async def close(self) -> None:
        """End what is under way; what goes on after a few seconds of patience is left to the process's end."""
        for task in self._tasks:
            task.cancel()
        self._leases.stop()
        await asyncio.to_thread(self._lookaheads.stop)
        await asyncio.to_thread(self._warmer.stop)
        await asyncio.to_thread(self._fetcher.close)
        await asyncio.to_thread(self._pulse.stop)
        await asyncio.to_thread(self._trimmer.stop)
        self._stores.close()

    async def _block(self, request: web.Request) -> web.StreamResponse:
        fields = await fields_of(request)
        (ref, number), dataset = fields.parse_block(), fields.optional_text("dataset")
        snapshot = fields.optional_text("snapshot")
        if fields.flag("broken"):
            id = block_id(object_id(ref), number)
            # The reader may have met what has been repaired or moved since; only what is broken here too goes.
            if await asyncio.to_thread(self._local.view, id, 0, None) is None:
                log.warning("block %d of %s is broken on this node: fetching it again", number, ref.url)
                await asyncio.wrap_future(self._writer.call(lambda: self._writer.drop(id)))
        flow = self._flow_of(dataset)
        self._sends.note_read(flow)
        reading = self._fetcher.open_reading(ref, number, dataset)
        try:
            data = await asyncio.wrap_future(reading.data)
            self._answered += 1
            self._consider(dataset, snapshot)
            if len(data) <= _PIECE_BYTES:
                return web.Response(body=data, content_type="application/octet-stream")
            async with self._sends.turn(flow):
                return await _answer(request, data)
        finally:
            reading.close()

    def _consider(self, dataset: str, snapshot: str) -> None:
        """Start warming a snapshot of which somebody reads for the first time."""
        if (
            snapshot
            and self._settings.prefetch
            and snapshot not in self._considered
            and not self._lookaheads.planned(f"{dataset}@{snapshot}")
        ):
            self._considered.add(snapshot)
            self._in_background(self._fill_if_it_fits(dataset, snapshot))

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
            self._considered.discard(id)  # the next read tries again
            log.warning("%s@%s is not warmed in the background: %s", dataset, id[:12], exc)

    def _open_manifest(self, id: str) -> Manifest:
        return Manifest.open(id, self._catalog.get_blobs)

    async def _open(self, request: web.Request) -> tuple[SnapshotRecord, Manifest]:
        ref = (await fields_of(request)).text("ref")

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

    async def _jobs(self, _: web.Request) -> web.StreamResponse:
        jobs = [job.as_dict() for job in self._warmer.jobs()]
        return web.json_response({"jobs": jobs, "silent_stores": self._silent_stores()})

    def _silent_stores(self) -> list[dict[str, Any]]:
        return [silence._asdict() for silence in self._stores.silences()]

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        job = self._warmer.cancel(request.match_info["id"])
        if job is None:
            raise SnapshotNotFoundError("there is no such job", hint="See: dsctl jobs")
        return web.json_response(job.as_dict())

    async def _cache(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(await asyncio.wrap_future(self._writer.call(self._cache_state)))

    def _cache_state(self) -> dict[str, Any]:
        counted = counters.totals(counters_dir(self._settings.home, self._settings.ram_dir))
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
            "checks": dict(zip(("right", "wrong"), TALLY.counts(), strict=True)),
            "fetched": vars(self._fetcher.stats) | {"under_way": self._fetcher.under_way},
            "plans": self._lookaheads.plans(),
            "lookahead": vars(self._lookaheads.stats) | {"moved_bytes": self._lookaheads.moved_bytes},
            "jobs": [job.as_dict() for job in self._warmer.jobs()],
            "silent_stores": self._silent_stores(),
        }

    def _blocks_in(self, tier: str) -> int:
        return self._writer.count_blocks(tier)

    async def _pin(self, request: web.Request) -> web.StreamResponse:
        record, manifest = await self._open(request)
        objects = await asyncio.to_thread(lambda: list(snapshot_objects(manifest)))  # while the writer goes on

        def work() -> None:
            self._writer.pin(record.ref, record.dataset, objects)

        await asyncio.wrap_future(self._writer.call(work))
        return web.json_response({"ref": record.ref, "pinned": True})

    async def _unpin(self, request: web.Request) -> web.StreamResponse:
        ref = (await fields_of(request)).text("ref")
        if ref not in self._writer.pins():
            ref = (await asyncio.to_thread(resolve, self._catalog, ref)).ref
        known = await asyncio.wrap_future(self._writer.call(lambda: self._writer.unpin(ref)))
        return web.json_response({"ref": ref, "pinned": False, "was_pinned": known})

    async def _evict(self, request: web.Request) -> web.StreamResponse:
        ref = (await fields_of(request)).optional_text("ref")
        dataset = ref.partition("@")[0] or None
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
                "settings": self._settings.of_the_daemon(),
                "shrunk": {tier.name: tier.shrunk_bytes for tier in self._writer.tiers if tier.shrunk_bytes},
                "hangs": self._pulse.problem,
                "problems": [f"{tier.name}: {tier.problem}" for tier in self._writer.tiers if tier.problem],
            }
        )

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        state = await asyncio.wrap_future(self._writer.call(self._cache_state))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        text = render_metrics(state, memory)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def hold_mounts(self) -> None:
        """Begin to tell the catalog what is mounted."""
        self._leases.start()

    async def _mounts(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"mounts": await asyncio.to_thread(self._leases.renew)})

    async def _environment(self, request: web.Request) -> web.StreamResponse:
        """Take over how a client's shell reaches stores. Answers and logs names, never values."""
        if self._environments is None:
            raise UsageError(
                "this daemon takes its credentials from whoever runs it",
                hint="DATACACHE_DAEMON is external: set them where it is run.",
            )
        changed = self._environments.put((await fields_of(request)).mapping("variables"))
        if changed:
            log.info("stores are reached with another shell's %s from now on", ", ".join(changed))
            self._considered.clear()
        return web.json_response({"changed": changed})

    async def _stop(self, _: web.Request) -> web.StreamResponse:
        self.stopping.set()
        return web.json_response({"pid": os.getpid(), "stopping": True})

    async def fold_counters(self) -> None:
        """Now and then, take over the counters of processes that ended."""
        while True:
            await asyncio.to_thread(counters.fold, counters_dir(self._settings.home, self._settings.ram_dir))
            await asyncio.sleep(_FOLD_EVERY_S)

    def _in_background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _answer(request: web.Request, data: bytes | memoryview) -> web.StreamResponse:
    """Send a large block. It goes in pieces, each when the one before was taken: the transport would copy it as a
    whole and keep it for readers that are slow. One that takes nothing for long is cut off; it asks again."""
    response = web.StreamResponse()
    response.content_type = "application/octet-stream"
    response.content_length = len(data)
    await response.prepare(request)
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(_TAKEN_IN_S) as patience:
            for start in range(0, len(data), _PIECE_BYTES):
                await response.write(data[start : start + _PIECE_BYTES])
                patience.reschedule(now() + _TAKEN_IN_S)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"a reader took nothing of its answer for {_TAKEN_IN_S:g} s") from None
    await response.write_eof()
    return response


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
    except (KeyError, TypeError, ValueError) as exc:
        if isinstance(exc, DatacacheError):
            raise
        raise UsageError(f"bad request: {exc}") from exc
    return header, np.frombuffer(raw, "<u4").reshape(-1, header.columns)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except DatacacheError as exc:
        status, body = wire.encode_error(exc)
        return web.json_response(body, status=status)
    except web.HTTPException:
        raise
    except Exception as exc:  # a defect of ours, whatever was asked
        if isinstance(exc, ConnectionError) and (request.transport is None or request.transport.is_closing()):
            return web.Response()  # the reader went away. This goes nowhere; aiohttp would log what is raised.
        log.exception("%s %s", request.method, request.path)
        error = DaemonError(
            f"the daemon failed: {type(exc).__name__}: {exc}", hint="This is a defect; the daemon's log says where."
        )
        status, body = wire.encode_error(error)
        return web.json_response(body, status=status)


@contextlib.contextmanager
def hold_lock(settings: Settings, *, wait: bool = False) -> Iterator[None]:
    """Be the only daemon of a home. `DaemonRunningError` if there is one, unless its end is to be waited for."""
    path = paths.lock_path(settings.home)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # The home itself is locked: a file in it may be deleted, and another be made in its place.
        home = os.open(settings.home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise CacheError(
            f"the home {settings.home} cannot be used: {exc.strerror} ({exc.filename})",
            hint="Set DATACACHE_HOME to a folder you can write to.",
        ) from exc
    try:
        if not all(lockfile.take(held, wait=False) for held in (home, fd)):
            pid = os.pread(fd, 20, 0).decode(errors="replace").strip() or "?"
            if not wait:
                raise DaemonRunningError(
                    f"a daemon (pid {pid}) serves {settings.home} already",
                    hint="See: dsctl daemon status. Stop it: dsctl daemon stop.",
                )
            log.info("a daemon (pid %s) serves %s: waiting for its end", pid, settings.home)
            for held in (home, fd):
                lockfile.take(held)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)
        os.close(home)


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
    # A daemon that others depend on, such as a node's, has what its administrator gave it.
    environments = None if settings.daemon == "external" else Environments.take_from(os.environ)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))
    with hold_lock(settings, wait=wait), _keeping(settings), open_tiers(settings) as writer:
        catalog = open_catalog_url(settings.catalog, blob_cache_dir=settings.home)
        try:
            asyncio.run(_serve(settings, writer, catalog, environments))
        finally:
            catalog.close()
    if threading.active_count() > 1:
        # Gets from a store that is away, asleep between two tries: all is written and closed, nobody waits for them.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(0)


async def _serve(settings: Settings, writer: TierWriter, catalog: Catalog, environments: Environments | None) -> None:
    daemon = Daemon(settings, writer, catalog, environments)
    loop = asyncio.get_running_loop()
    # What the first fetch needs takes a while to import: have it ready by then.
    threading.Thread(target=import_store_clients, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stopping.set)
    runner = web.AppRunner(daemon.app(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    # What is there is stale: we hold the lock.
    listener = unix_sockets.listen(paths.socket_path(settings.home), backlog=512)
    await web.SockSite(runner, listener, backlog=512).start()
    daemon.begin()
    daemon.hold_mounts()
    folding = loop.create_task(daemon.fold_counters())
    watching = loop.create_task(_stop_without_socket(paths.socket_path(settings.home), daemon.stopping))
    log.info("serving %s (pid %d)", settings.home, os.getpid())
    await daemon.stopping.wait()
    log.info("stopping")
    paths.socket_path(settings.home).unlink(missing_ok=True)
    folding.cancel()
    watching.cancel()
    await daemon.close()
    await runner.cleanup()


async def _stop_without_socket(path: Path, stopping: asyncio.Event) -> None:
    """Stop when somebody has deleted the socket (or put another in its place): nobody can reach this daemon any more,
    and it keeps others from starting."""
    inode = os.stat(path).st_ino
    while True:
        await asyncio.sleep(_LOOK_FOR_SOCKET_S)
        try:
            gone = os.stat(path).st_ino != inode
        except FileNotFoundError:
            gone = True
        except OSError:  # the disk fails, perhaps
            gone = False
        if gone and not stopping.is_set():
            log.warning("%s was deleted: stopping, so that another daemon can start", path)
            stopping.set()
