"""Fill the tiers with whole snapshots: for `dsctl warm`, and for the first read of a snapshot.

A job walks the manifest, fetches the blocks that the index does not have, and at the end looks once more whether every
block is there: only then is it done. Each job has threads of its own, which take blocks from one shared walk and fetch
them themselves, as many at a time as the fetcher lets them, whatever the number of jobs. A job goes on past objects
that are gone or changed, each at the first of its blocks that fails so, and ends early if going on is of no use: the
store is away, or the tiers are full.

In a cluster with the mode `partition` the other nodes say what they lack of what is theirs to keep, and get it when
they are asked for it. A job in the background sees to this node's own blocks only.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from xxhash import xxh3_64_hexdigest

from datacache.cluster.members import Member
from datacache.cluster.peers import Peers
from datacache.core.errors import (
    DatacacheError,
    ObjectChangedError,
    ObjectNotFoundError,
    SettingsError,
    StoreAccessError,
    StoreUnavailableError,
)
from datacache.core.ids import BLOCK_BYTES, BlockId, ObjectId, ObjectRef, block_count, block_id, block_length, object_id
from datacache.daemon.fetcher import Fetcher
from datacache.daemon.handover import lacked
from datacache.exchange.frames import FrameError
from datacache.manifest.reader import Manifest
from datacache.tiers.parts import Part

log = logging.getLogger(__name__)
_BACKGROUND_THREADS = 16
_KEPT_JOBS = 100
_NOT_KEPT_BYTES = 16 * 2**20  # a few blocks may find no room while others, smaller or of another tier, still do
_STOP_TIMEOUT_S = 3.0
_PLANNED_WAIT_S = 0.25
_WHOLE_OBJECT = (ObjectChangedError, ObjectNotFoundError)
_WHOLE_STORE = (StoreUnavailableError, StoreAccessError, SettingsError)
_LOOK_BLOCKS = 64
_ASK_BLOCKS = 16_384
"""So many are looked at together where other nodes are asked."""
_NODES_TOLD = 3
Item = tuple[ObjectRef, int, BlockId]
_ByNode = dict[Member | None, list[int]]
"""Positions of blocks by the node that is to keep them; None is this one."""


@dataclass
class WarmJob:
    """One warm-up, as the operation `job` tells it. `bytes_done` counts the bytes on the node, found or fetched."""

    id: str
    ref: str
    state: str = "running"
    """running, done, incomplete (the tiers are full), failed or cancelled."""
    cancelled: bool = False
    """True once somebody asked for its end; `state` tells how it has ended."""
    background: bool = False
    files_total: int = 0
    files_done: int = 0
    bytes_total: int = 0
    bytes_done: int = 0
    bytes_fetched: int = 0
    bytes_from_nodes: int = 0
    """Of those that were fetched, by what other nodes gave."""
    bytes_not_kept: int = 0
    enough_bytes: int | None = None
    """Where to end, if the whole would push out its own beginning."""
    beyond_quota: bool = False
    """True if it is more than the quotas of its namespaces let this node keep."""
    errors: int = 0
    error: str = ""
    hint: str = ""

    def fail(self, error: str, hint: str = "") -> None:
        """End the job as failed."""
        self.error, self.hint, self.state = error, hint, "failed"


class Warmer:
    """The warm-up jobs of a daemon. Any thread may call it."""

    def __init__(
        self,
        fetcher: Fetcher,
        concurrency: int,
        *,
        lru_bytes: int | None = None,
        share_bytes: Callable[[str], float] = lambda _dataset: math.inf,
        planned: Callable[[str], bool] = lambda _ref: False,
        part: Part = Part(),  # noqa: B008 - immutable
        peers: Peers | None = None,
    ) -> None:
        """`lru_bytes`: the room in tiers that make room by themselves, so that a larger snapshot would push out its own
        beginning. `share_bytes`: how much of a data set the quotas of its namespaces allow. `planned` tells whether a
        snapshot is being fetched in a published order, which jobs in the background wait for. Objects of other parts
        are theirs to warm. `peers`: the other nodes of the cluster."""
        self._part, self._peers = part, peers
        self._fetcher = fetcher
        self._planned = planned
        self._lru_bytes, self._share_bytes = lru_bytes, share_bytes
        self._concurrency = concurrency
        self._lock = threading.Lock()  # guards _jobs and _by_ref
        self._jobs: dict[str, WarmJob] = {}
        self._by_ref: dict[str, WarmJob] = {}
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def job(self, id: str) -> WarmJob | None:
        """Return a job by its id."""
        return self._jobs.get(id)

    def jobs(self) -> list[WarmJob]:
        """Return the jobs of this daemon's life, newest last."""
        with self._lock:
            return list(self._jobs.values())

    def start(self, ref: str, dataset: str, manifest: Manifest, *, background: bool = False, id: str = "") -> WarmJob:
        """Start warming, or join the job that warms the same snapshot already. `id`: by which the job is to be known,
        too."""
        with self._lock:
            running = self._by_ref.get(ref)
            # Somebody who waits does not join a job that gives up when the tiers are full.
            joined = running is not None and running.state == "running" and not running.cancelled
            if running is not None and joined and (background or not running.background):
                if id:
                    self._jobs[id] = running
                return running
            # Jobs that parts begin on their own have one id in all.
            id = id or (xxh3_64_hexdigest(ref.encode()) if background else secrets.token_hex(6))
            job = WarmJob(id=id, ref=ref, background=background)
            job.files_total, job.bytes_total = self._share(manifest.root.files), self._share(manifest.root.total_bytes)
            alone = self._keepers(dataset) is None
            share_bytes = self._share_bytes(dataset)
            job.beyond_quota = job.bytes_total > share_bytes
            if self._lru_bytes is not None and alone:
                most_bytes = int(min(self._lru_bytes, share_bytes))
                job.enough_bytes = most_bytes if job.bytes_total > most_bytes else None
            self._jobs[job.id] = self._by_ref[ref] = job
            while len(self._jobs) > _KEPT_JOBS:
                self._jobs.pop(next(iter(self._jobs)))
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=self._run, args=(job, dataset, manifest), name=f"warm {ref}", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                job.fail(f"{exc}", "Warm it again.")
            else:
                self._threads.append(thread)
        return job

    def _keepers(self, dataset: str) -> Peers | None:
        """Return the other nodes, if they keep some of a data set and this one does not."""
        return self._peers if self._peers is not None and self._peers.partitions(dataset) else None

    def _share(self, whole: int) -> int:
        """Return this part's share of a number, about; those of all parts together are exact."""
        return (whole + self._part.number) // self._part.of

    def cancel(self, id: str) -> None:
        """Have a job end soon, if there is one; the cache keeps its blocks."""
        job = self._jobs.get(id)
        if job is not None:
            job.cancelled = True

    def stop(self) -> None:
        """End all jobs and wait a few seconds at most: a get from a store that is away takes longer."""
        self._stopping.set()
        end = time.monotonic() + _STOP_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self, job: WarmJob, dataset: str, manifest: Manifest) -> None:
        try:
            warming = _Warming(
                job,
                dataset,
                manifest,
                self._fetcher,
                self._keepers(dataset),
                part=self._part,
                stopping=self._stopping,
            )
            if job.background:
                # An order has what this node reads, not what it owns.
                waits = self._keepers(dataset) is None
                warming.run(min(_BACKGROUND_THREADS, self._concurrency), lambda: waits and self._planned(job.ref))
            else:
                warming.run(self._concurrency, bool)
        except DatacacheError as exc:
            job.fail(str(exc), exc.hint)
        except Exception as exc:  # whatever it is, the job must not seem to run
            log.exception("warming %s", job.ref)
            job.fail(f"{type(exc).__name__}: {exc}")


class _Warming:
    """One job at work."""

    def __init__(
        self,
        job: WarmJob,
        dataset: str,
        manifest: Manifest,
        fetcher: Fetcher,
        keepers: Peers | None,
        *,
        part: Part,
        stopping: threading.Event,
    ) -> None:
        self._part, self._keepers = part, keepers
        self._silent: dict[str, Exception] = {}
        """Why nodes, by their addresses, do not say which blocks they have."""
        self._missing_at: Counter[Member] = Counter()
        """The bytes that are missing in the end, by the other node that owns them."""
        self._job, self._dataset, self._manifest, self._fetcher = job, dataset, manifest, fetcher
        self._stopping = stopping
        self._not_kept_bytes = 1 if job.background else _NOT_KEPT_BYTES
        self._lost: dict[ObjectId, int] = {}
        """The first missing block of each object that is gone or changed: none is asked for from there on."""
        self._walk = self._absent()
        self._walking = threading.Lock()  # guards _walk
        self._changed = threading.Condition()  # guards the job's numbers, _landing, _lost and _broken
        self._landing = 0
        self._broken: BaseException | None = None

    def run(self, threads: int, planned: Callable[[], bool]) -> None:
        """Fetch, but not while it is `planned`; wait until all is stored, look once more."""
        job = self._job
        unanswered = self._unanswered()
        missing = self._fetch(threads, planned)
        answering = [node for node in self._missing_at if node.address not in self._silent]
        fetched = not (self._over() or job.errors or job.bytes_not_kept)
        if answering and fetched and self._unanswered() > unanswered:  # busy or late, so another node gave their blocks
            job.files_done = job.bytes_done = 0
            self._walk = self._absent()
            missing = self._fetch(threads, planned)
        if job.cancelled:
            job.error, job.hint, job.state = "it was cancelled", "Warm it again.", "cancelled"
            return
        if self._broken is not None:
            raise self._broken
        if self._stopping.is_set():
            job.fail("the daemon was stopped")
            return
        job.bytes_done = job.bytes_total - missing
        if job.errors:
            job.fail(job.error, job.hint)
        elif missing:
            full = job.bytes_not_kept or job.enough_bytes is not None
            why = "it is full" if full else "they were evicted, or lost on the disk, meanwhile"
            hint = "Raise DATACACHE_SSD_BYTES, or make room: dsctl cache evict NAME" if full else "Warm it again."
            if full and job.beyond_quota:
                why = "the namespaces that have it may not have more of this node's cache"
                hint = "Have the quota of one of them made larger: dsctl k8s quota NAMESPACE --cache SIZE"
            if self._missing_at and not full:
                why, hint = self._blame_nodes()
            job.error = f"{missing:,} of {job.bytes_total:,} bytes are not in the cache: {why}"
            job.hint, job.state = hint, "incomplete"
        else:
            job.files_done = job.files_total
            job.state = "done"

    def _fetch(self, threads: int, planned: Callable[[], bool]) -> int:
        """Fetch what the walk yields; return the bytes that are missing then."""
        workers: list[threading.Thread] = []
        try:
            while len(workers) < threads:
                worker = threading.Thread(target=self._work, args=(planned,), daemon=True)
                worker.start()
                workers.append(worker)
        except RuntimeError:  # no more threads can be started
            self._work(planned)
        for worker in workers:
            worker.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._landing)
        return 0 if self._broken is not None else self._missing()

    def _unanswered(self) -> int:
        """Return how many questions to other nodes have brought no block until now."""
        return self._keepers.stats.missed if self._keepers is not None else 0

    def _blocks(self) -> Iterator[Item]:
        for ref, obj in self._objects():
            for number in range(block_count(ref.size_bytes)):
                if number and obj in self._lost:
                    break
                yield ref, number, block_id(obj, number)

    def _absent(self) -> Iterator[tuple[Item, int | None]]:
        """Yield the blocks that are to be fetched, each with the value of `landings` before a look at both tiers, which
        found nothing; count the others."""
        blocks = self._blocks()
        at_a_time = _LOOK_BLOCKS if self._keepers is None else _ASK_BLOCKS
        while (some := list(itertools.islice(blocks, at_a_time))) and not self._over():
            looked = self._fetcher.landings if self._keepers is None else None
            ids = [id for _, _, id in some]
            lacking, unheard = self._lacking(ids)
            left = set(chain.from_iterable(unheard.values()))
            gone = {*chain.from_iterable(lacking.values()), *self._lacked_in_place(ids, sorted(left))}
            for at, item in enumerate(some):
                if at not in gone and at not in left:
                    with self._changed:
                        self._count(item)
                elif at in gone and (not item[1] or object_id(item[0]) not in self._lost):
                    yield item, looked

    def _lacking(self, ids: Sequence[BlockId], *, last: bool = False) -> tuple[_ByNode, _ByNode]:
        """Return the positions of the blocks that are not where they are to be kept, and of those whose owner does not
        say so. The `last` look is at the files of this node, too."""
        lacking: _ByNode = {}
        unheard: _ByNode = {}
        for owner, positions in self._owners(ids).items():
            some = [ids[at] for at in positions]
            if owner is None:
                gone: list[int] | None = self._lacking_here(some, last=last)
            else:
                gone = [] if self._job.background else self._lacked_by(owner, some)
            if gone is None:
                unheard[owner] = positions
            else:
                lacking[owner] = [positions[at] for at in gone]
        return lacking, unheard

    def _lacked_in_place(self, ids: Sequence[BlockId], left: list[int]) -> Iterator[int]:
        """Yield, of blocks whose owners say nothing, the positions of those that the next in rank lacks: it keeps what
        it is asked for meanwhile. This node keeps nothing in place of another one."""
        while left:
            silent, again = frozenset(self._silent), list[int]()
            for owner, nths in self._owners([ids[at] for at in left], without=silent).items():
                positions = [left[nth] for nth in nths]
                gone = self._lacked_by(owner, [ids[at] for at in positions]) if owner is not None else []
                if gone is None:
                    again += positions
                else:
                    yield from (positions[at] for at in gone)
            left = again

    def _owners(self, ids: Sequence[BlockId], *, without: Collection[str] = ()) -> _ByNode:
        """Return who is to keep some blocks, as if nodes at some addresses were not there."""
        peers = self._keepers
        try:
            owners = peers.owners(ids, without=without) if peers is not None else {}
        except LookupError:  # no node serves, so each keeps what it reads
            owners = {}
        if peers is None or not owners:
            return {None: list(range(len(ids)))}
        return {None if owner.address == peers.address else owner: positions for owner, positions in owners.items()}

    def _lacking_here(self, ids: Sequence[BlockId], *, last: bool) -> list[int]:
        fetcher = self._fetcher
        gone = fetcher.local.missing(ids) if self._keepers is None else fetcher.not_on_disk(ids)
        if not last:
            return gone
        return sorted({*gone, *(at for at, id in enumerate(ids) if not fetcher.present(id))})

    def _lacked_by(self, owner: Member, ids: Sequence[BlockId]) -> list[int] | None:
        """Return the positions of the blocks that the disk of another node has not got; None if it does not say so."""
        assert self._keepers is not None
        for tries in (1, 0):
            if owner.address in self._silent:
                break
            try:
                with contextlib.closing(self._keepers.connect(owner)) as connection:
                    return lacked(connection, ids)
            except (OSError, ValueError, DatacacheError) as exc:
                if not tries or not isinstance(exc, TimeoutError):  # it may be busy
                    self._silent[owner.address] = exc
        return None

    def _objects(self) -> Iterator[tuple[ObjectRef, ObjectId]]:
        return (found for found in snapshot_objects(self._manifest) if self._part.has(found[1]))

    def _missing(self) -> int:
        """Return the bytes that are not here, and note how many there are in all."""
        missing = files = size_bytes = 0
        self._silent.clear()
        self._missing_at.clear()

        def looked_at() -> Iterator[tuple[BlockId, int]]:
            nonlocal missing, files, size_bytes
            for ref, obj in self._objects():
                files += 1
                size_bytes += ref.size_bytes
                blocks = block_count(ref.size_bytes)
                lost_from = min(blocks, self._lost.get(obj, blocks))
                if lost_from < blocks:
                    missing += ref.size_bytes - lost_from * BLOCK_BYTES
                for number in range(lost_from):
                    yield block_id(obj, number), block_length(ref.size_bytes, number)

        blocks = looked_at()
        at_a_time = _LOOK_BLOCKS if self._keepers is None else _ASK_BLOCKS
        while some := list(itertools.islice(blocks, at_a_time)):
            for by_node in self._lacking([id for id, _ in some], last=True):
                for node, positions in by_node.items():
                    size = sum(some[at][1] for at in positions)
                    missing += size
                    if node is not None and size:
                        self._missing_at[node] += size
            if self._stopping.is_set() or self._job.cancelled:
                return missing
        if self._part.of > 1:  # it was about right until now
            self._job.files_total, self._job.bytes_total = files, size_bytes
        return missing

    def _blame_nodes(self) -> tuple[str, str]:
        """Return which other nodes lack what they own, and what to do."""
        assert self._keepers is not None
        words, hint = [], "Raise DATACACHE_SSD_BYTES there, or make room: dsctl cache evict NAME. Then warm it again."
        for node, size in self._missing_at.most_common(_NODES_TOLD):
            exc = self._silent.get(node.address)
            if exc is None:
                words.append(f"the node {node.id} has no room for {size:,} that it owns, or lost them meanwhile")
                continue
            why = getattr(exc, "strerror", None) or exc
            words.append(f"the node {node.id} at {node.address} owns {size:,}, and cannot be asked: {why}")
            if isinstance(exc, (DatacacheError, FrameError)):
                hint = f"{exc.hint} Then warm it again." if exc.hint else "Warm it again."
                continue
            for_good = "take it off DATACACHE_CLUSTER_MEMBERS of all nodes" if self._keepers.listed else "wait a while"
            hint = f"Start the daemon of {node.id} again, or if it is gone for good, {for_good}. Then warm it again."
        return "; ".join(words), hint

    def _over(self) -> bool:
        """Tell whether no thread should begin another block."""
        job = self._job
        return (
            self._broken is not None
            or self._stopping.is_set()
            or job.cancelled
            or job.bytes_not_kept >= self._not_kept_bytes
            or (job.enough_bytes is not None and job.bytes_done >= job.enough_bytes)
        )

    def _work(self, planned: Callable[[], bool]) -> None:
        try:
            while not self._over():
                with self._walking:
                    item, looked = next(self._walk, (None, 0))
                if item is None:
                    return
                while planned():  # the order it is read in is the better one to fetch it in
                    if self._stopping.wait(_PLANNED_WAIT_S) or self._job.cancelled:
                        return
                self._fill(item, looked)
        except BaseException as exc:  # noqa: BLE001 - raised again by `run`
            self._broken = self._broken or exc

    def _fill(self, item: Item, looked: int | None) -> None:
        ref, number, id = item
        job = self._job
        with self._changed:
            self._landing += 1
        try:
            stored = functools.partial(self._stored, item)
            if self._fetcher.fill(id, ref, number, self._dataset, stored=stored, looked=looked, pass_on=True):
                with self._changed:
                    job.bytes_from_nodes += block_length(ref.size_bytes, number)
        except BaseException as exc:
            with self._changed:
                self._landing -= 1
                self._changed.notify_all()
                job.errors += 1
                if isinstance(exc, DatacacheError) and not job.error:
                    job.error, job.hint = str(exc), exc.hint
                if isinstance(exc, _WHOLE_OBJECT) and block_count(ref.size_bytes) > 1:
                    obj = object_id(ref)
                    self._lost[obj] = min(number, self._lost.get(obj, number))
            if not isinstance(exc, DatacacheError) or isinstance(exc, _WHOLE_STORE):
                raise

    def _stored(self, item: Item, kept: bool) -> None:
        length = block_length(item[0].size_bytes, item[1])
        with self._changed:
            self._landing -= 1
            if not self._landing:
                self._changed.notify_all()
            self._job.bytes_fetched += length
            if kept:
                self._count(item)
            else:
                self._job.bytes_not_kept += length

    def _count(self, item: Item) -> None:
        self._job.bytes_done += block_length(item[0].size_bytes, item[1])
        self._job.files_done += item[1] == 0


def snapshot_objects(manifest: Manifest) -> Iterator[tuple[ObjectRef, ObjectId]]:
    """Yield a snapshot's objects and their ids, but the empty ones."""
    for entry in manifest.entries():
        if entry.size_bytes:
            ref = manifest.object_ref(entry)
            yield ref, object_id(ref)
