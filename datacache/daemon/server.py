"""The daemon's HTTP server on a Unix socket, and the daemon's life from lock to clean stop.

One event loop answers requests and does nothing else. Gets and warm-ups run in threads of their own, one thread writes
the tiers, and manifests are read in threads. Only the home's owner can connect (socket mode 0600 in a folder of mode
0700).
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
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, TypeVar, cast

from aiohttp import web

from datacache.catalog.base import Catalog
from datacache.catalog.open import open_catalog_url
from datacache.catalog.packs import stores_with_packs
from datacache.catalog.refs import resolve
from datacache.core import counters, ipc, lockfile
from datacache.core.errors import CacheError, DaemonRunningError, DatacacheError, SnapshotNotFoundError, UsageError
from datacache.core.ids import block_id, object_id
from datacache.daemon import paths, wire
from datacache.daemon.client import import_store_clients
from datacache.daemon.fetcher import Fetcher
from datacache.daemon.keeper import Keeper
from datacache.daemon.memory import trim_when_idle
from datacache.daemon.metrics import render_metrics
from datacache.daemon.mount_leases import MountLeases
from datacache.daemon.orders.lookahead import Lookaheads
from datacache.daemon.pulse import Pulse
from datacache.daemon.requests import PIECE_BYTES, answer_as_json, fields_of, read_plan, send_pieces
from datacache.daemon.turns import Sends
from datacache.daemon.warmer import Warmer, snapshot_objects
from datacache.daemon.whole_objects import WholeObjects
from datacache.manifest.model import SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.store.checksums import TALLY
from datacache.store.credentials import Environments
from datacache.tiers.eviction import Shares
from datacache.tiers.local import LocalBlocks
from datacache.tiers.memory import counters_dir, remove_abandoned_dirs
from datacache.tiers.recovery import open_tiers
from datacache.tiers.writer import TierWriter

log = logging.getLogger(__name__)
_FOLD_EVERY_S = 30.0
_LOOK_FOR_SOCKET_S = 1.0
_WRITER_STUCK_S, _GET_STUCK_S = 120.0, 60.0
"""From then on a thread counts as hanging: a busy disk takes seconds, a pin of a million blocks tens of them."""
T = TypeVar("T")
Answer = dict[str, Any]


class Daemon:
    """The parts of a running daemon, and the requests it answers."""

    def __init__(
        self, settings: Settings, writer: TierWriter, catalog: Catalog, environments: Environments | None
    ) -> None:
        """`environments` takes what clients tell of reaching stores; None if they may not."""
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
        self._answered = 0
        self._sends = Sends()
        self._pulse = Pulse(settings.home, asyncio.get_running_loop().call_soon_threadsafe, self._hangs)
        self.stopping = asyncio.Event()

    def app(self) -> web.Application:
        """Return the application: one handler a request."""
        app = web.Application(middlewares=[answer_as_json], client_max_size=2**20)
        for method, path, handler in (
            ("POST", "/v1/block", self._block),
            ("POST", "/v1/warm", self._warm),
            ("POST", "/v1/lookahead", self._lookahead),
            ("GET", "/v1/jobs", self._jobs),
            ("GET", "/v1/jobs/{id}", self._job),
            ("POST", "/v1/jobs/{id}/cancel", self._job),
            ("GET", "/v1/cache", self._cache),
            ("POST", "/v1/pin", self._pin),
            ("POST", "/v1/unpin", self._unpin),
            ("POST", "/v1/evict", self._evict),
            ("POST", "/v1/mounts", self._mounts),
            ("POST", "/v1/environment", self._environment),
            ("POST", "/v1/stop", self._stop),
            ("GET", "/healthz", self._health),
            ("GET", "/metrics", self._metrics),
        ):
            # Its answer may be a dictionary. This way a GET has its HEAD; `add_route` makes none.
            app.add_routes([web.route(method, path, cast("Any", handler))])
        return app

    def _hangs(self) -> str:
        """Return what has made no progress for longer than anything takes, or ''."""
        writing_s, getting_s = self._writer.working_s(), self._fetcher.stuck_s()
        if writing_s > _WRITER_STUCK_S:
            return f"the cache's folder has taken nothing for {writing_s:.0f} s"
        # A get takes the store's whole patience at most, and its last try as long again.
        if getting_s > 2 * self._settings.store_timeout_s + _GET_STUCK_S:
            return f"no get of a store has ended for {getting_s:.0f} s"
        return ""

    def begin(self) -> None:
        """Show readers that this daemon answers, and start what it does on its own. To be called once it listens."""
        self._pulse.start()
        self._leases.start()
        self._in_background(trim_when_idle(lambda: (self._fetcher.stats.fetched, self._answered)))
        self._in_background(self._fold_counters())
        self._in_background(self._stop_without_socket())

    async def close(self) -> None:
        """End all work under way; what outlasts a few seconds of patience ends with the process."""
        for task in self._tasks:
            task.cancel()
        self._leases.stop()
        for stop in (self._lookaheads.stop, self._warmer.stop, self._fetcher.close, self._pulse.stop):
            await asyncio.to_thread(stop)
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
                await self._written(lambda: self._writer.drop(id))
        flow = self._flow_of(dataset)
        self._sends.note_read(flow)
        reading = self._fetcher.read(ref, number, dataset)
        try:
            data = await asyncio.wrap_future(reading.data)
            self._answered += 1
            self._consider(dataset, snapshot)
            if len(data) <= PIECE_BYTES:
                return web.Response(body=data, content_type="application/octet-stream")
            async with self._sends.turn(flow):
                return await send_pieces(request, data)
        finally:
            reading.close()

    def _consider(self, dataset: str, snapshot: str) -> None:
        """Start warming a snapshot at its first read."""
        if not snapshot or not self._settings.prefetch or snapshot in self._considered:
            return
        if not self._lookaheads.planned(f"{dataset}@{snapshot}"):
            self._considered.add(snapshot)
            self._in_background(self._fill_if_it_fits(dataset, snapshot))

    async def _fill_if_it_fits(self, dataset: str, id: str) -> None:
        """Warm the rest of a snapshot, behind the reads that wait."""
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

    async def _warm(self, request: web.Request) -> Answer:
        record, manifest = await self._open(request)
        return asdict(self._warmer.start(record.ref, record.dataset, manifest))

    async def _lookahead(self, request: web.Request) -> Answer:
        header, items = await read_plan(request.content)
        await asyncio.to_thread(self._lookaheads.add, header, items)
        return {"id": header.id}

    async def _job(self, request: web.Request) -> Answer:
        id, hint = request.match_info["id"], "The daemon was restarted; ask for it again."
        if request.method == "POST":
            self._warmer.cancel(id)
            hint = "See: dsctl jobs"
        job = self._warmer.job(id)
        if job is None:
            raise SnapshotNotFoundError("there is no such job", hint=hint)
        return asdict(job)

    async def _jobs(self, _: web.Request) -> Answer:
        return self._job_state()

    def _job_state(self) -> Answer:
        silences = [silence._asdict() for silence in self._stores.silences()]
        return {"jobs": [asdict(job) for job in self._warmer.jobs()], "silent_stores": silences}

    async def _cache(self, _: web.Request) -> Answer:
        return await self._written(self._cache_state)

    def _cache_state(self) -> Answer:
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
                    "blocks": self._writer.count_blocks(tier.name),
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
            **self._job_state(),
        }

    async def _pin(self, request: web.Request) -> Answer:
        record, manifest = await self._open(request)
        # The writer goes on meanwhile.
        objects = await asyncio.to_thread(lambda: [id for _, id in snapshot_objects(manifest)])
        await self._written(lambda: self._writer.pin(record.ref, record.dataset, objects))
        return {"ref": record.ref, "pinned": True}

    async def _unpin(self, request: web.Request) -> Answer:
        ref = (await fields_of(request)).text("ref")
        if ref not in self._writer.pins():
            ref = (await asyncio.to_thread(resolve, self._catalog, ref)).ref
        known = await self._written(lambda: self._writer.unpin(ref))
        return {"ref": ref, "pinned": False, "was_pinned": known}

    async def _evict(self, request: web.Request) -> Answer:
        ref = (await fields_of(request)).optional_text("ref")
        dataset = ref.partition("@")[0] or None
        pinned = [r for r, name in self._writer.pins().items() if name == dataset]
        if pinned:
            raise UsageError(f"{dataset} is pinned ({', '.join(pinned)})", hint=f"dsctl cache unpin {pinned[0]}")
        if dataset:
            held = await self._written(
                lambda: {one.dataset for tier in self._writer.tiers for one in tier.containers.values()}
            )
            if dataset not in held and await asyncio.to_thread(self._catalog.dataset, dataset) is None:
                here = f"This node has something of: {', '.join(sorted(held))}."
                hint = here if held else "This node has nothing cached."
                raise SnapshotNotFoundError(f"there is no dataset {dataset!r}", ref=dataset, hint=hint)
        freed = await self._written(lambda: self._writer.evict(dataset))
        self._considered.clear()
        return {"freed_bytes": freed}

    async def _health(self, _: web.Request) -> Answer:
        return {
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

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        state = await self._written(self._cache_state)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return web.Response(
            text=render_metrics(state, memory), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _mounts(self, _: web.Request) -> Answer:
        return {"mounts": await asyncio.to_thread(self._leases.renew)}

    async def _environment(self, request: web.Request) -> Answer:
        """Take a client's variables for reaching stores. Answers and logs name them and show no values."""
        if self._environments is None:
            raise UsageError(
                "this daemon takes its credentials from whoever runs it",
                hint="DATACACHE_DAEMON is external: set them where it is run.",
            )
        changed = self._environments.put((await fields_of(request)).mapping("variables"))
        if changed:
            log.info("stores are reached with another shell's %s from now on", ", ".join(changed))
            self._considered.clear()
        return {"changed": changed}

    async def _stop(self, _: web.Request) -> Answer:
        self.stopping.set()
        return {"pid": os.getpid(), "stopping": True}

    async def _stop_without_socket(self) -> None:
        """Stop when the socket was deleted or replaced: nobody can reach this daemon any more, and it keeps others from
        starting."""
        path = paths.socket_path(self._settings.home)
        inode = os.stat(path).st_ino
        while True:
            await asyncio.sleep(_LOOK_FOR_SOCKET_S)
            try:
                gone = os.stat(path).st_ino != inode
            except FileNotFoundError:
                gone = True
            except OSError:  # the disk fails, perhaps
                gone = False
            if gone and not self.stopping.is_set():
                log.warning("%s was deleted: stopping, so that another daemon can start", path)
                self.stopping.set()

    async def _fold_counters(self) -> None:
        """Add up the counters of ended processes, now and then."""
        while True:
            await asyncio.to_thread(counters.fold, counters_dir(self._settings.home, self._settings.ram_dir))
            await asyncio.sleep(_FOLD_EVERY_S)

    async def _written(self, action: Callable[[], T]) -> T:
        """Run an action in the writer's thread."""
        return await asyncio.wrap_future(self._writer.call(action))

    def _in_background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@contextlib.contextmanager
def hold_lock(settings: Settings, *, wait: bool = False) -> Iterator[None]:
    """Be the only daemon of a home. `DaemonRunningError` if there is another, unless its end is to be waited for."""
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


def run(settings: Settings, *, wait: bool = False) -> None:
    """Serve until told to stop; with `wait`, once another daemon of the home has ended. Raises `DaemonRunningError` and
    `CacheError` before it serves."""
    # A daemon that others depend on, such as a node's, has what its administrator gave it.
    environments = None if settings.daemon == "external" else Environments.take_from(os.environ)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))
    with contextlib.ExitStack() as stack:
        stack.enter_context(hold_lock(settings, wait=wait))
        keeper = Keeper(settings.home)  # before the tiers are opened, which may take a while, to after they are closed
        keeper.start()
        stack.callback(keeper.close)
        remove_abandoned_dirs(settings.ram_dir)
        writer = stack.enter_context(open_tiers(settings))
        catalog = open_catalog_url(settings.catalog, blob_cache_dir=settings.home)
        stack.callback(catalog.close)
        asyncio.run(_serve(settings, writer, catalog, environments))
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
    listener = ipc.listen(paths.socket_path(settings.home), backlog=512)
    await web.SockSite(runner, listener, backlog=512).start()
    daemon.begin()
    log.info("serving %s (pid %d)", settings.home, os.getpid())
    await daemon.stopping.wait()
    log.info("stopping")
    paths.socket_path(settings.home).unlink(missing_ok=True)
    await daemon.close()
    await runner.cleanup()
