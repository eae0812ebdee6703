"""The daemon: what it answers on its Unix socket (`running` has its life from lock to clean stop).

Each connection has a thread (`exchange.server`), in which a block that is not here is also got. Warm-ups run in threads
of their own, and one thread writes the tiers. Only the home's owner can connect (socket mode 0600 in a folder of mode
0700).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from datacache.catalog.base import Catalog
from datacache.catalog.open import open_catalog_url
from datacache.catalog.packs import stores_with_packs
from datacache.catalog.refs import resolve
from datacache.cluster.members import IN_NO_CLUSTER, JOIN_A_CLUSTER
from datacache.cluster.peers import Peers
from datacache.core import counters
from datacache.core.errors import DatacacheError, SnapshotNotFoundError, UsageError
from datacache.core.ids import ObjectRef, block_id, block_length, object_id
from datacache.daemon import memory, paths
from datacache.daemon.fetcher import Fetcher, Reading
from datacache.daemon.holdings import Holdings
from datacache.daemon.metrics import render_metrics
from datacache.daemon.mount_leases import MountLeases
from datacache.daemon.orders.lookahead import Lookaheads
from datacache.daemon.orders.plan_file import decode_header
from datacache.daemon.owners import OwnerCounts
from datacache.daemon.parts import OtherParts, PartProcesses, add_up, ask_part, child_environment
from datacache.daemon.pulse import Pulse
from datacache.daemon.turns import Sends, TurnKind
from datacache.daemon.warmer import Warmer, snapshot_objects
from datacache.daemon.whole_objects import WholeObjects
from datacache.exchange.frames import Frame, Kind
from datacache.exchange.server import Answer, error_answer
from datacache.exchange.wire import BlocksRequest, Fields, Mode, expect_text
from datacache.manifest.model import SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.store.checksums import TALLY
from datacache.store.credentials import Environments, store_fingerprint
from datacache.tiers.eviction import Shares
from datacache.tiers.index import TIER_NAMES
from datacache.tiers.local import LocalBlocks
from datacache.tiers.memory import counters_dir
from datacache.tiers.tenants import ANY_OTHER
from datacache.tiers.writer import TierWriter

if TYPE_CHECKING:
    from datacache.cluster.replicas.receiver import Replicas
    from datacache.daemon.nodes import NodeRequests

log = logging.getLogger(__name__)
_FOLD_EVERY_S = 30.0
_LOOK_EVERY_S = 1.0
_TRIM_EVERY_S = 5.0
_LARGE_BYTES = 2**18
"""A larger answer waits for its turn to be sent."""
_WINDOW_BYTES = 8 * 2**20
"""The blocks of a request that are got before the first of them is sent. All requests share the room for reads: one
that held all its blocks until the last has come could wait for room that it takes itself."""
_GIVE_WAY_S = 0.25
"""How long a request holds blocks behind one that has not come, while there is no room for others. Two requests that
want the same blocks in different order could wait for each other's for ever."""
_WRITER_STUCK_S, _GET_STUCK_S = 120.0, 60.0
"""From then on a thread counts as hanging: a busy disk takes seconds, a pin of a million blocks tens of them."""
T = TypeVar("T")
Result = dict[str, Any] | bytes
"""JSON, or text as it is."""


class Daemon:
    """The parts of a running daemon, and the requests it answers."""

    def __init__(
        self,
        settings: Settings,
        writer: TierWriter,
        catalog: Catalog,
        environments: Environments | None,
        *,
        peers: Peers | None = None,
        parts: PartProcesses | None = None,
    ) -> None:
        """`environments` takes what clients tell of reaching stores; None if they may not. `peers` are the other nodes
        of the cluster, if it is in one; `parts` the processes of the other parts, if there are any."""
        self._peers, self._parts, self._part = peers, parts, writer.part
        concurrency = max(1, settings.concurrency // writer.part.of)
        self._settings, self._writer, self._catalog = settings, writer, catalog
        self._environments = environments
        self._local = LocalBlocks(settings.home, settings.ram_dir)
        self._stores = stores_with_packs(settings, catalog.get_blobs, environments=environments)
        self._flow_of = Shares(settings.shares).flow
        self.fetcher = Fetcher(
            writer,
            self._local,
            self._stores.get,
            concurrency,
            flow_of=self._flow_of,
            whole=WholeObjects(writer, self._local, self._stores.get, md5=settings.check_md5),
            peers=peers,
            parts=writer.part.of,
        )
        others = OtherParts(settings.home, writer.part)
        self._replicas: Replicas | None = None
        self.nodes: NodeRequests | None = None
        """The answers to other nodes of the cluster; None in no cluster."""
        if peers is not None:
            # Imported here, as they and the write-back engine take a third of a daemon's start.
            from datacache.cluster.replicas.receiver import Replicas
            from datacache.daemon.nodes import NodeRequests

            if not self._part.number and settings.catalog_is_shared:
                self._replicas = Replicas(settings, peers.me.node, child_environment(settings, environments))
            self.nodes = NodeRequests(peers, self.fetcher, others, self._replicas)
        lru_bytes = writer.tiers[-1].budget_bytes if settings.eviction == "lru" else None
        self._lookaheads = Lookaheads(settings, writer, self.fetcher, self._open_manifest)
        self.fetcher.planned = self._lookaheads.plans_parts
        self._warmer = Warmer(
            self.fetcher,
            concurrency,
            lru_bytes=lru_bytes,
            share_bytes=writer.tiers[-1].charges.most_bytes,
            planned=self._lookaheads.planned,
            part=writer.part,
            peers=peers,
        )
        self._leases = MountLeases(settings, partial(open_catalog_url, settings=settings))
        self._holdings: Holdings | None = None
        if (settings.node or settings.cluster) and not catalog.read_only and not self._part.number:
            self._holdings = Holdings(
                settings.node or socket.gethostname(),
                settings.home,
                catalog,
                settings.catalog,
                missing=self._local.missing,
                datasets=self._cached_datasets,
            )
        self._sends = Sends()
        self._owners = OwnerCounts()
        self._considered: set[str] = set()
        self._chores = ThreadPoolExecutor(2, thread_name_prefix="chore")
        self._started = time.monotonic()
        self._answered = 0
        self._pulse = Pulse(settings.home, self._hangs)
        self.stopping = threading.Event()
        self._operations: dict[str, Callable[[Fields], Result]] = {
            "health": self._health,
            "cache": self._cache,
            "warm": self._warm,
            "fill": self._fill,
            "jobs": self._jobs,
            "job": self._job,
            "cancel": self._cancel,
            "pin": self._pin,
            "unpin": self._unpin,
            "evict": self._evict,
            "datasets": self._datasets,
            "environment": self._environment,
            "cluster": self._cluster,
            "tenants": self._tenants,
        }
        if not self._part.number:  # of the node as a whole
            self._operations |= {
                "metrics": self._metrics,
                "mounts": self._mounts,
                "stop": self._stop,
                "drain": self._drain,
                "look": self._look,
            }

    def answer(self, request: Frame) -> Generator[Answer, None, None]:
        """Answer one frame."""
        if request.kind == Kind.BLOCKS:
            blocks = BlocksRequest.decode(request.body)
            if blocks.mode.of_a_node and self.nodes is not None:  # another part asks for another node
                yield from self.nodes.blocks(blocks)
            else:
                yield from self._blocks(blocks)
            return
        op = request.head.decode(errors="replace")
        if request.kind == Kind.CALL and op == "lookahead":
            result: Result = self._lookahead(request.body)
        elif request.kind == Kind.CALL and op in ("lacks", "keep", "state", "replica") and self.nodes is not None:
            result = self.nodes.call(request.head, request.body)
        elif request.kind == Kind.CALL and op in self._operations:
            result = self._operations[op](Fields.decode(request.body))
        else:
            raise UsageError(f"bad request: this daemon does not know {op!r} (kind {request.kind})")
        yield Answer(Kind.OK, body=result if isinstance(result, bytes) else json.dumps(result).encode())

    def _hangs(self) -> str:
        """Return what has made no progress for longer than anything takes, or ''."""
        writing_s, getting_s = self._writer.working_s(), self.fetcher.stuck_s()
        if writing_s > _WRITER_STUCK_S:
            return f"the cache's folder has taken nothing for {writing_s:.0f} s"
        # A get takes the store's whole patience at most, and its last try as long again.
        if getting_s > 2 * self._settings.store_timeout_s + _GET_STUCK_S:
            return f"no get of a store has ended for {getting_s:.0f} s"
        return self._parts.hangs if self._parts is not None else ""

    def begin(self) -> None:
        """Show readers that this daemon answers, and start what it does on its own. To be called once it listens."""
        if not self._part.number:
            paths.start_failure_path(self._settings.home).unlink(missing_ok=True)
            self._pulse.start()
            self._leases.start()
            if self._holdings is not None:
                self._holdings.start()
            if self._replicas is not None:
                self._replicas.start()

    def live(self) -> None:
        """Look after the daemon until it is told to stop."""
        path = paths.socket_path(self._settings.home, self._part.number)
        inode = os.stat(path).st_ino
        counted = counters_dir(self._settings.home, self._settings.ram_dir)
        idle = memory.IdleTrim(lambda: (self.fetcher.stats.fetched, self._answered))
        second = 0
        while not self.stopping.wait(_LOOK_EVERY_S):
            second += 1
            if _deleted(path, inode):
                log.warning("%s was deleted: stopping, so that another daemon can start", path)
                self.stopping.set()
            if self._parts is not None:
                self._parts.look()
            if second % _TRIM_EVERY_S == 0:
                idle.look()
            if second % _FOLD_EVERY_S == 0 and not self._part.number:
                counters.fold(counted)  # of ended processes

    def close(self) -> None:
        """End all work under way; what outlasts a few seconds of patience ends with the process."""
        self._leases.stop()
        if self._holdings is not None:
            self._holdings.stop()
        if self._replicas is not None:
            self._replicas.stop()
        self._chores.shutdown(wait=False, cancel_futures=True)
        for stop in (self._lookaheads.stop, self._warmer.stop, self.fetcher.close, self._pulse.stop):
            stop()
        self._stores.close()

    def _blocks(self, request: BlocksRequest) -> Iterator[Answer]:
        dataset = request.dataset
        flow = self._flow_of(dataset)
        self._sends.note_read(flow)
        if request.mode is Mode.BROKEN:
            for ref, number in request.blocks:
                self._drop_if_broken(ref, number)
        self._consider(dataset, request.snapshot)
        left, begun, ahead_bytes = deque(enumerate(request.blocks)), deque[tuple[Reading, int, int]](), 0
        try:
            while left or begun:
                while left:
                    at, (ref, number) = left[0]
                    length = block_length(ref.size_bytes, number)
                    if begun and ahead_bytes + length > _WINDOW_BYTES:
                        break
                    left.popleft()
                    begun.append((self.fetcher.read(ref, number, dataset, here=not left), at, length))
                    ahead_bytes += length
                reading, at, length = begun[0]
                while not _has_come(reading):
                    while len(begun) > 1 and self.fetcher.turns.crowded(TurnKind.READ):
                        other, later, of_other = begun.pop()
                        other.close()
                        left.appendleft((later, request.blocks[later]))
                        ahead_bytes -= of_other
                yield from self._sent(reading, slice(*request.span(at)), flow)
                begun.popleft()
                reading.close()
                ahead_bytes -= length
        finally:
            for reading, *_ in begun:
                reading.close()

    def _sent(self, reading: Reading, span: slice, flow: str) -> Iterator[Answer]:
        try:
            data = memoryview(reading.data.result())[span]
        except Exception as exc:  # noqa: BLE001 - this block's answer; the others have their own
            yield error_answer(exc)
            return
        with self._sends.turn(flow) if len(data) > _LARGE_BYTES else contextlib.nullcontext():
            yield Answer(Kind.OK, body=data)
        self._answered += 1

    def _drop_if_broken(self, ref: ObjectRef, number: int) -> None:
        """Forget a block that is broken here, too: what the reader met may have been repaired or moved since."""
        id = block_id(object_id(ref), number)
        if self._local.view(id, 0, None) is None:
            log.warning("block %d of %s is broken on this node: fetching it again", number, ref.url)
            self._written(lambda: self._writer.drop(id))

    def _consider(self, dataset: str, snapshot: str) -> None:
        """Start warming a snapshot at its first read."""
        if not snapshot or not self._settings.prefetch or snapshot in self._considered:
            return
        if self.fetcher.partitions(dataset) or not self._lookaheads.planned(f"{dataset}@{snapshot}"):
            self._considered.add(snapshot)
            with contextlib.suppress(RuntimeError):  # it is being closed
                self._chores.submit(self._fill_all_parts, dataset, snapshot)

    def _fill_all_parts(self, dataset: str, snapshot: str) -> None:
        fields = {"dataset": dataset, "snapshot": snapshot}
        if self._part.number:
            with contextlib.suppress(OSError, DatacacheError):  # it ends, and this process with it
                ask_part(self._settings.home, 0, lambda of: of.ask("fill", fields))
        self._fill_if_it_fits(dataset, snapshot)  # a part, too: the others know it already if it was started again
        self._of_parts("fill", fields)

    def _fill(self, fields: Fields) -> Result:
        """Start warming a snapshot for another part, to which it was new."""
        dataset, snapshot = fields.text("dataset"), fields.text("snapshot")
        if self._part.number:
            self._considered.add(snapshot)
            self._chores.submit(self._fill_if_it_fits, dataset, snapshot)
        else:
            self._consider(dataset, snapshot)
        return {}

    def _fill_if_it_fits(self, dataset: str, id: str) -> None:
        """Warm the rest of a snapshot, behind the reads that wait."""
        try:
            manifest = self._open_manifest(id)
            ssd = self._writer.tiers[-1]
            keeps = self._settings.eviction in ("keep", "clairvoyant")
            room = min(ssd.budget_bytes - (ssd.used_bytes if keeps else 0), ssd.charges.most_bytes(dataset))
            if manifest.root.total_bytes / self._part.of <= room or keeps:
                self._warmer.start(f"{dataset}@{id[:12]}", dataset, manifest, background=True)
        except DatacacheError as exc:
            self._considered.discard(id)  # the next read tries again
            log.warning("%s@%s is not warmed in the background: %s", dataset, id[:12], exc)

    def _open_manifest(self, id: str) -> Manifest:
        return Manifest.open(id, self._catalog.get_blobs)

    def _open(self, fields: Fields) -> tuple[SnapshotRecord, Manifest]:
        record = resolve(self._catalog, fields.text("ref"))
        return record, self._open_manifest(record.id)

    def _warm(self, fields: Fields) -> Result:
        record, manifest = self._open(fields)
        job = self._warmer.start(record.ref, record.dataset, manifest, id=fields.optional_text("id"))
        self._of_parts("warm", {"ref": record.ref, "id": job.id})
        return asdict(job)

    def _lookahead(self, body: memoryview) -> Result:
        if self._parts is not None:
            self._parts.upload("lookahead", body)
        import numpy as np  # a daemon that gets no order starts without it, in half the time

        header, rest = decode_header(body)
        self._lookaheads.add(header, np.frombuffer(rest, "<u4").reshape(-1, header.columns))
        return {"id": header.id}

    def _cancel(self, fields: Fields) -> Result:
        self._warmer.cancel(fields.text("id"))
        self._of_parts("cancel", {"id": fields.text("id")})
        return self._job(fields, hint="See: dsctl jobs")

    def _job(self, fields: Fields, hint: str = "The daemon was restarted; ask for it again.") -> Result:
        job = self._warmer.job(fields.text("id"))
        if job is None and self._part.number:  # its process was started again meanwhile
            return self._warm(fields) if fields.optional_text("ref") else {}
        if job is None:
            raise SnapshotNotFoundError("there is no such job", hint=hint)
        return self._added_up("job", asdict(job), {"id": job.id, "ref": "" if job.cancelled else job.ref})

    def _jobs(self, _: Fields) -> Result:
        return self._added_up("jobs", self._job_state())

    def _job_state(self) -> dict[str, Any]:
        silences = [silence._asdict() for silence in self._stores.silences()]
        return {"jobs": [asdict(job) for job in self._warmer.jobs()], "silent_stores": silences}

    def _cache(self, _: Fields) -> Result:
        return self._added_up("cache", self._written(self._cache_state))

    def _cache_state(self) -> dict[str, Any]:
        folder = counters_dir(self._settings.home, self._settings.ram_dir)
        counted = counters.totals(folder)
        loader = {name: counted.pop(name) for name in counters.LOADER}
        hits = counted["ram_hits"] + counted["ssd_hits"]
        reads = hits + counted["misses"]
        datasets = self._writer.tiers[-1].charges.datasets
        state: dict[str, Any] = {
            "policy": self._settings.eviction,
            "tiers": [
                {
                    "name": tier.name,
                    "folder": str(tier.folder),
                    "used_bytes": tier.used_bytes,
                    "budget_bytes": tier.budget_bytes,
                    "blocks": 0 if self._part.number else self._writer.count_blocks(tier.name),  # of all parts
                    "containers": len(tier.containers),
                    "evicted_bytes": tier.evicted_bytes,
                    "problem": tier.problem,
                }
                for tier in self._writer.tiers
            ],
            "datasets": [{"name": name, "ssd_bytes": size} for name, size in sorted(datasets.items())],
            "namespaces": self._namespaces(),
            **self._by_owner({} if self._part.number else counters.totals_by_dataset(folder)),  # reads are of all parts
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "checks": dict(zip(("right", "wrong"), TALLY.counts(), strict=True)),
            "fetched": vars(self.fetcher.stats) | {"under_way": self.fetcher.under_way},
            "plans": self._lookaheads.plans(),
            "lookahead": vars(self._lookaheads.stats) | {"moved_bytes": self._lookaheads.moved_bytes},
            **self._job_state(),
        }
        if self._part.number:
            return state | {"cluster": self._peers.describe_answers() if self._peers is not None else None}
        return state | {
            "pins": sorted(self._writer.pins()),
            "reads": counted | {"hits": hits, "hit_rate": hits / reads if reads else None},
            "loader": loader,
            "cluster": self._peers.describe() if self._peers is not None else None,
        }

    def _by_owner(self, reads: Mapping[str, Mapping[str, int]]) -> dict[str, list[dict[str, Any]]]:
        """Return what is counted by data set and by namespace."""
        ssd = self._writer.tiers[-1]
        fetched, evicted = dict(self.fetcher.fetched_of), ssd.evicted_of
        sums = {
            name: {
                "hits": sum(reads.get(name, {}).get(f"{tier}_hits", 0) for tier in TIER_NAMES),
                "hit_bytes": sum(reads.get(name, {}).get(f"{tier}_hit_bytes", 0) for tier in TIER_NAMES),
                "misses": reads.get(name, {}).get("misses", 0),
                "miss_bytes": reads.get(name, {}).get("miss_bytes", 0),
                "fetched_bytes": fetched.get(name, 0),
                "evicted_bytes": evicted.get(name, 0),
            }
            for name in {*reads, *fetched, *evicted}
        }
        held = {each["name"]: each["ssd_bytes"] for each in self._namespaces()}
        return self._owners.look(sums, self._writer.tenants, ssd.charges.datasets, held)

    def _namespaces(self) -> list[dict[str, Any]]:
        """Return what each namespace has of the disk. Only the first part knows limits of the node as a whole."""
        charged, tenants = self._writer.tiers[-1].charges.namespaces, self._writer.tenants
        names = {*charged, *tenants.limits, *chain.from_iterable(tenants.users.values())} - {ANY_OTHER}
        found: list[dict[str, Any]] = [
            {"name": name, "ssd_bytes": round(charged.get(name, 0))} for name in sorted(names)
        ]
        if not self._part.number:
            for each in found:
                each["limit_bytes"] = tenants.limit(each["name"])
                each["mounted"] = sorted(name for name, users in tenants.users.items() if each["name"] in users)
        return found

    def _of_parts(self, op: str, fields: object = None) -> list[dict[str, Any]]:
        return self._parts.ask(op, fields) if self._parts is not None else []

    def _added_up(self, op: str, mine: dict[str, Any], fields: object = None) -> dict[str, Any]:
        """Return what all parts say, of which `mine` is this one's."""
        others = self._of_parts(op, fields)
        return cast("dict[str, Any]", add_up([mine, *others])) if others else mine

    def _pin(self, fields: Fields) -> Result:
        record, manifest = self._open(fields)
        # The writer goes on meanwhile.
        objects = [id for _, id in snapshot_objects(manifest)]
        self._written(lambda: self._writer.pin(record.ref, record.dataset, objects))
        self._of_parts("pin", {"ref": record.ref})
        return {"ref": record.ref, "pinned": True}

    def _unpin(self, fields: Fields) -> Result:
        ref = fields.text("ref")
        if ref not in self._writer.pins() and not self._part.number:
            ref = resolve(self._catalog, ref).ref
        known = self._written(lambda: self._writer.unpin(ref))
        self._of_parts("unpin", {"ref": ref})
        return {"ref": ref, "pinned": False, "was_pinned": known}

    def _evict(self, fields: Fields) -> Result:
        ref = fields.optional_text("ref")
        dataset = ref.partition("@")[0] or None
        pinned = [r for r, name in self._writer.pins().items() if name == dataset]
        if pinned:
            raise UsageError(f"{dataset} is pinned ({', '.join(pinned)})", hint=f"dsctl cache unpin {pinned[0]}")
        if dataset:
            held = self._cached_datasets()
            if dataset not in held and not self._part.number and self._catalog.dataset(dataset) is None:
                here = f"This node has something of: {', '.join(sorted(held))}."
                hint = here if held else "This node has nothing cached."
                raise SnapshotNotFoundError(f"there is no dataset {dataset!r}", ref=dataset, hint=hint)
        freed = {"freed_bytes": self._written(lambda: self._writer.evict(dataset))}
        self._considered.clear()
        return self._added_up("evict", freed, {"ref": dataset})

    def _datasets(self, _: Fields) -> dict[str, Any]:
        held = self._written(lambda: {one.dataset for tier in self._writer.tiers for one in tier.containers.values()})
        return {"datasets": [{"name": name} for name in held]}

    def _cached_datasets(self) -> set[str]:
        """Return the data sets with blocks in the cache of any part."""
        return {found["name"] for found in self._added_up("datasets", self._datasets(Fields({})))["datasets"]}

    def _health(self, _: Fields) -> Result:
        problems = [f"{tier.name}: {tier.problem}" for tier in self._writer.tiers if tier.problem]
        problems += self._parts.problems if self._parts is not None else ()
        if self._peers is not None and self._peers.members.problem:
            problems.append(f"cluster {self._settings.cluster}: {self._peers.members.problem}")
        return {
            "pid": os.getpid(),
            "home": str(self._settings.home),
            "uptime_s": time.monotonic() - self._started,
            "catalog": self._catalog.url,
            "stores": store_fingerprint(),
            "settings": self._settings.of_the_daemon(),
            "shrunk": {tier.name: tier.shrunk_bytes for tier in self._writer.tiers if tier.shrunk_bytes},
            "hangs": self._hangs() if self._part.number else self._pulse.problem,
            "problems": list(dict.fromkeys(problems)),
        }

    def _metrics(self, fields: Fields) -> Result:
        state = self._added_up("cache", self._written(self._cache_state))
        return render_metrics(state, names=fields.optional_text("names") == "yes").encode()

    def _mounts(self, _: Fields) -> Result:
        return {"mounts": self._leases.renew()}

    def _tenants(self, fields: Fields) -> Result:
        """Take what the driver says of the node's namespaces: their limits (null instead of them: as before) and which
        data sets each has mounted. What those above their limits have too much is evicted when this returns."""
        limits, users = fields.optional_mapping("limits"), fields.mapping("users")
        if not all(limit is None or (type(limit) is int and limit >= 0) for limit in (limits or {}).values()):
            raise UsageError("bad request: 'limits' are numbers of bytes")
        if not all(isinstance(names, list) and all(map(_is_text, names)) for names in users.values()):
            raise UsageError("bad request: 'users' are lists of namespaces")
        changed = self._written(lambda: self._writer.set_tenants(limits, users))
        self._of_parts("tenants", {"limits": limits, "users": users})
        if changed:
            self._considered.clear()  # what did not fit may fit by now
        return {"changed": changed}

    def _environment(self, fields: Fields) -> Result:
        """Take a client's variables for reaching stores. Answers and logs name them and show no values."""
        if self._environments is None:
            raise UsageError(
                "this daemon takes its credentials from whoever runs it",
                hint="DATACACHE_DAEMON is external: set them where it is run.",
            )
        changed = self._environments.put(fields.mapping("variables"))
        if changed:
            self._of_parts("environment", {"variables": fields.mapping("variables")})
            log.info("stores are reached with another shell's %s from now on", ", ".join(changed))
            self._considered.clear()
        return {"changed": changed}

    def _cluster(self, _: Fields) -> Result:
        peers = self._in_cluster()
        return peers.describe_answers() if self._part.number else self._added_up("cluster", peers.describe())

    def _look(self, _: Fields) -> Result:
        """Return what `_cluster` does after a look at the other nodes, which counts for all parts."""
        peers = self._in_cluster()
        peers.look()
        found = self._added_up("cluster", peers.describe())
        found["members"] = peers.describe()["members"]
        return found | {"mode": dict(self._settings.cluster_mode)}

    def _drain(self, fields: Fields) -> Result:
        return self._in_cluster().drain(fields.optional_text("node"))

    def _in_cluster(self) -> Peers:
        if self._peers is None:
            raise UsageError(IN_NO_CLUSTER, hint=JOIN_A_CLUSTER)
        return self._peers

    def _stop(self, _: Fields) -> Result:
        self.stopping.set()
        return {"pid": os.getpid(), "stopping": True}

    def _written(self, action: Callable[[], T]) -> T:
        """Run an action in the writer's thread."""
        return self._writer.call(action).result()


def _is_text(value: object) -> bool:
    """Tell whether a value is a text that can be written down."""
    try:
        expect_text(value)
    except ValueError:
        return False
    return True


def _has_come(reading: Reading) -> bool:
    """Wait a moment for a block, or the error of getting it; tell whether it has come."""
    with contextlib.suppress(Exception):
        reading.data.result(_GIVE_WAY_S)
    return reading.data.done()


def _deleted(path: Path, inode: int) -> bool:
    """Tell whether a socket was deleted or replaced: nobody can reach this daemon any more, and it keeps others from
    starting."""
    try:
        return os.stat(path).st_ino != inode
    except FileNotFoundError:
        return True
    except OSError:  # the disk fails, perhaps
        return False
