"""Fetch blocks from the stores: each once, however many ask; bounded in number and bytes, readers apart from fills.

Any thread of the daemon may ask. Gets run in the threads that ask or in others, in the order that `turns` decides.
Waiting readers have a block's bytes at once; its flight ends when the tiers have stored it, so that a reader that asks
a moment later is served from memory or from the index, never by a second get. Blocks that the tiers did not keep stay
in memory for a while: a reader takes a block in many small pieces, and each piece asks again.

Threads rather than an event loop: obstore's synchronous calls leave the interpreter alone while they run, and cost two
thirds of the processor time of its awaitable ones.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from datacache.cluster.peer import SilenceBudget
from datacache.cluster.peers import Peers
from datacache.core.errors import DaemonError
from datacache.core.ids import BLOCK_BYTES, BlockId, ObjectId, ObjectRef, block_count, block_id, block_length, object_id
from datacache.daemon.turns import EXTRA_TURNS, Turn, TurnKind, Turns
from datacache.daemon.whole_objects import WholeObjects
from datacache.exchange.wire import Mode
from datacache.store.base import ObjectStore
from datacache.store.retry import AskedAt
from datacache.tiers.local import LocalBlocks
from datacache.tiers.tier import Block
from datacache.tiers.writer import TierWriter

log = logging.getLogger(__name__)
_READ_BYTES = 64 * 2**20
_FILL_BYTES = 128 * 2**20
_HELD_BYTES = 64 * 2**20
_LEAST_BYTES = 24 * 2**20
"""Of several processes of a node each has its share of these, and at least so much: a large object is one process's."""
_ONE_READ_BYTES = 2**18
"""A smaller block is read whole and once: holding it would serve nobody."""
_READ_AHEAD_BLOCKS = 4
_LANDED = 10_000
_CLOSE_TIMEOUT_S = 3.0

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds that gets and waits are counted by; longer ones have a last place of their own."""

_HOPS = dict.fromkeys(TurnKind, 2) | {TurnKind.NODE: 1, TurnKind.ZONE: 0}
"""A reader's node asks the owner in its zone, and that one the owner among all zones, which asks the store."""

Data = bytes | memoryview
Stored = Callable[[bool], None]


@dataclass
class FetchStats:
    """The fetches since the daemon's start."""

    fetched: int = 0
    fetched_bytes: int = 0
    failed: int = 0
    shared: int = 0
    """Requests that joined a flight already under way."""
    get_s: float = 0.0
    get_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    """How long successful gets of stores took: in all, and how many of them up to each of `LATENCY_BOUNDS_S`."""
    wait_s: float = 0.0
    wait_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    """Histogram of the time that readers waited for blocks that were not here."""


class _Wanted(NamedTuple):
    """A block to fetch; `ahead` before anybody asks for it."""

    id: BlockId
    ref: ObjectRef
    number: int
    dataset: str
    ahead: bool
    asked: float
    """When, by `time.monotonic()`."""
    lane: int = 0
    looked: int | None = None
    pass_on: bool = False
    """True if nothing is to be kept here of what another node's disk keeps."""
    soon: bool = False


class _Flight:
    """A block between the first request for it and its place in the tiers."""

    __slots__ = ("data", "for_reader", "from_node", "holds", "hops", "stored", "turn", "waits_for", "wanted")

    def __init__(self) -> None:
        self.data: Future[Data] = Future()
        self.data.set_running_or_notify_cancel()  # one who no longer waits must not cancel it for the others
        self.stored: list[Stored] = []
        self.for_reader = False
        self.from_node = False
        """True if another node gave it."""
        self.hops = _HOPS[TurnKind.READ]
        """How many nodes may wait for each other behind this one: fewer, once other nodes wait for it. So no circle of
        waiting nodes can close."""
        self.waits_for = 0
        """How many may do so by now."""
        self.turn: Turn | None = None
        """The turn that its bytes count in; None until it is its turn to be fetched."""
        self.holds = 1
        """The number of holders that need the bytes: the tiers until they are stored, each reader until they are
        sent."""
        self.wanted: TurnKind | None = None
        """The most urgent kind of turn that was queued for it."""


class Reading(NamedTuple):
    """A block for one reader, who calls `close` once when it has done with the bytes. They count until then."""

    data: Future[Data]
    close: Callable[[], None]


class Fetcher:
    """The daemon's gets."""

    def __init__(
        self,
        writer: TierWriter,
        local: LocalBlocks,
        open_store: Callable[[str], ObjectStore],
        concurrency: int,
        *,
        flow_of: Callable[[str], str] = lambda dataset: dataset,
        whole: WholeObjects | None = None,
        peers: Peers | None = None,
        parts: int = 1,
    ) -> None:
        """`flow_of` maps a data set's name to those with whom it shares its turns. `whole` checks objects of several
        blocks. `peers` are asked before the stores. `parts` share the memory of a node."""
        self._peers = peers
        self._whole, self._writer, self.local, self._open_store, self._flow_of = (
            whole,
            writer,
            local,
            open_store,
            flow_of,
        )
        self._lock = threading.Lock()  # guards _flights, what hangs on a flight, _held, _landed, stats
        self._flights: dict[BlockId, _Flight] = {}
        self._held: OrderedDict[BlockId, Data] = OrderedDict()
        """The last blocks that the tiers did not keep, up to `_HELD_BYTES`."""
        self._held_bytes, self._parts = 0, parts
        self._landed: OrderedDict[BlockId, None] = OrderedDict()
        """The blocks that the tiers kept last."""
        self.landings = 0
        """How many blocks the tiers have kept."""
        self._refused = False
        """True if the tiers did not keep the block that landed last."""
        self.planned: Callable[[str], bool] = lambda _dataset: False
        """Tells whether what is read next of a data set's large objects is fetched in a published order."""
        read_bytes, fill_bytes = _share(_READ_BYTES, parts), _share(_FILL_BYTES, parts)
        self.turns = Turns(concurrency, ahead=_READ_AHEAD_BLOCKS, read_bytes=read_bytes, fill_bytes=fill_bytes)
        most = 3 * concurrency + _READ_AHEAD_BLOCKS + EXTRA_TURNS  # reads, and two kinds of those for other nodes
        self._readers = ThreadPoolExecutor(most, thread_name_prefix="read")
        self._closing = False
        self._getting: dict[BlockId, float] = {}
        """Since when each get of a store is under way. Single operations: dozens of threads would wait for a lock, and
        each for the interpreter once more."""
        self._got_at = 0.0
        self.stats = FetchStats()
        self.fetched_of: dict[str, int] = {}
        """Bytes fetched from stores, by data set."""

    def present(self, block: BlockId) -> bool:
        """Tell whether a block is on this node by the index and the file it names. A block that the index has and the
        disk has not is taken out of the index, to be fetched again."""
        if self.local.present(block):
            return True
        if self.local.has(block):
            self._writer.call(lambda: self._writer.drop(block)).result()
        return False

    def not_on_disk(self, blocks: Sequence[BlockId]) -> list[int]:
        """Return the positions of the blocks that the SSD has not got, or the RAM of a node without one. What somebody
        was given before the call is stored by then, if it ever is."""
        self._writer.call(lambda: None).result()
        return self.local.missing(blocks, on_disk=self._has_disk)

    @property
    def _has_disk(self) -> bool:
        return self._writer.tiers[-1].budget_bytes > 0

    def partitions(self, dataset: str) -> bool:
        """Tell whether only the owner of a block keeps it on its disk."""
        return self._peers is not None and self._peers.partitions(dataset)

    def kept_elsewhere(self, block: BlockId, dataset: str) -> bool:
        """Tell whether a block is for the disk of another node to keep."""
        peers = self._peers
        return peers is not None and self.partitions(dataset) and bool(peers.ranked_before_this(block, dataset))

    def read_for_node(self, ref: ObjectRef, number: int, dataset: str, *, zone: bool = False) -> Reading | None:
        """As `read`, for another node (`zone`: of another zone, which asks the owner among all). None if this one waits
        for a node itself, which may wait for that one."""
        return self._read(ref, number, dataset, TurnKind.ZONE if zone else TurnKind.NODE)

    def read(self, ref: ObjectRef, number: int, dataset: str, *, here: bool = False) -> Reading:
        """Return a block for a reader that waits. Its future may have the store's errors. `here`: if it has to be got,
        and can be at once, do that in this thread; this never waits for a turn, as the caller may hold the bytes that
        others wait for."""
        reading = self._read(ref, number, dataset, TurnKind.READ, here=here)
        assert reading is not None
        return reading

    def _read(self, ref: ObjectRef, number: int, dataset: str, kind: TurnKind, *, here: bool = False) -> Reading | None:
        """Return a block for whoever waits in turns of a `kind`; see `read` and `read_for_node`."""
        hops = _HOPS[kind]
        asked = time.monotonic()
        obj = object_id(ref)
        id = block_id(obj, number)
        if self._held:
            with self._lock:
                held = self._held.get(id)
                if held is not None:
                    self._held.move_to_end(id)
            if held is not None:
                done: Future[Data] = Future()
                done.set_result(held)
                return Reading(done, lambda: None)
        if ref.size_bytes > BLOCK_BYTES and not (self._refused or hops < _HOPS[TurnKind.READ]):
            self._read_ahead(ref, obj, number, dataset, asked)
        with self._lock:
            under_way = self._flights.get(id)
            if under_way is not None and under_way.waits_for > hops:
                return None
            flight, _ = self._flight_locked(id, for_reader=True, hold=True, hops=hops)
        wanted = _Wanted(id, ref, number, dataset, False, asked)
        turn = None
        if here and flight.turn is None:
            turn = self.turns.take(kind, self._flow_of(dataset), block_length(ref.size_bytes, number))
        if turn is not None:
            self._get(flight, wanted, turn)
        else:
            self._queue(kind, flight, wanted)
        if flight.data.done():
            self._note_wait(asked)
        else:
            flight.data.add_done_callback(lambda _: self._note_wait(asked))
        return Reading(flight.data, lambda: self._release_flight(flight))

    def _read_ahead(self, ref: ObjectRef, obj: ObjectId, number: int, dataset: str, asked: float) -> None:
        """Queue the blocks behind the one asked for, if its reader seems to go through the object."""
        before = block_id(obj, max(0, number - 1))
        if self.planned(dataset) or (number and before not in self._flights and not self.local.has(before)):
            return
        for later in range(number + 1, min(number + 1 + _READ_AHEAD_BLOCKS, block_count(ref.size_bytes))):
            id = block_id(obj, later)
            if id not in self._flights and not self.local.has(id):
                with self._lock:
                    flight, _ = self._flight_locked(id, for_reader=True)
                self._queue(TurnKind.AHEAD, flight, _Wanted(id, ref, later, dataset, True, asked))

    def _note_wait(self, asked: float) -> None:
        """Count how long a reader waited for a block."""
        waited_s = time.monotonic() - asked
        with self._lock:
            self.stats.wait_s += waited_s
            self.stats.wait_counts[bisect_left(LATENCY_BOUNDS_S, waited_s)] += 1

    def take_over(self, block: Block) -> Future[bool]:
        """Have the tiers store a block that another node hands over; the future tells whether they did."""
        kept: Future[bool] = Future()

        def landed(is_kept: bool) -> None:  # in the writer's thread
            if is_kept:
                with self._lock:
                    self._note_landing_locked(block.id)
                if block.unchecked is not None and self._whole is not None:
                    self._whole.landed(block.unchecked, block.number)
            kept.set_result(is_kept)

        self._writer.put(block, landed)
        return kept

    def fill(
        self,
        id: BlockId,
        ref: ObjectRef,
        number: int,
        dataset: str,
        *,
        stored: Stored,
        lane: int = 0,
        looked: int | None = None,
        pass_on: bool = False,
        soon: bool = False,
    ) -> bool:
        """Fetch a block for the tiers in this thread (`lane`, `soon`: see `Block`); return when its bytes have come:
        True if another node gave them. `pass_on`: for its owner's alone, if that is another node's disk to keep.

        `stored` is called, in any thread, when the tiers have taken them or not. Raises the store's errors, and then
        calls nothing. `looked`: the value of `landings` before the caller saw that the block is not here.
        """
        length = block_length(ref.size_bytes, number)
        # The turn first: a reader that joins a flight must not wait for another warm-up's bytes.
        turn = self.turns.wait(TurnKind.FILL, self._flow_of(dataset), length)
        with self._lock:
            flight, begun = self._flight_locked(id, stored)
        if begun:
            now = time.monotonic()
            self._get(flight, _Wanted(id, ref, number, dataset, True, now, lane, looked, pass_on, soon), turn)
        else:
            self.turns.fetched(turn)
            self.turns.release(turn)
        flight.data.result()
        return flight.from_node

    def close(self) -> None:
        """Let flights end, for a few seconds: a store that is away may be retried for longer, and the process then ends
        without those threads. Flights that have not begun fail with `DaemonError`."""
        self._closing = True
        self.turns.open()
        end = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._flights and time.monotonic() < end:
            time.sleep(0.01)
        if self._whole is not None:
            self._whole.close()
        self._readers.shutdown(wait=False, cancel_futures=True)

    @property
    def under_way(self) -> int:
        """The number of blocks in flight."""
        return len(self._flights)

    def stuck_s(self) -> float:
        """Return for how long gets have been under way and none has ended, well or badly."""
        begun = list(self._getting.values())
        return time.monotonic() - max(self._got_at, min(begun)) if begun else 0.0

    def _flight_locked(
        self,
        id: BlockId,
        stored: Stored | None = None,
        *,
        for_reader: bool = False,
        hold: bool = False,
        hops: int = _HOPS[TurnKind.READ],
    ) -> tuple[_Flight, bool]:
        """Return the flight of a block, and whether the caller has just begun it and must see to it."""
        flight = self._flights.get(id)
        begun = flight is None
        if flight is None:
            flight = self._flights[id] = _Flight()
        else:
            self.stats.shared += 1
        if stored is not None:
            flight.stored.append(stored)
        flight.for_reader |= for_reader
        flight.holds += hold
        flight.hops = min(flight.hops, hops)
        return flight, begun

    def _queue(self, kind: TurnKind, flight: _Flight, wanted: _Wanted) -> None:
        """Have a flight fetched, unless it is under way, or queued as something as urgent. A block that was queued to
        be read ahead and is waited for by now queues once more; the turn that comes second finds nothing to do."""
        with self._lock:
            first = flight.turn is None and (flight.wanted is None or kind.value < flight.wanted.value)
            if first:
                flight.wanted = kind
        if not first:
            return
        length = block_length(wanted.ref.size_bytes, wanted.number)

        def run() -> None:
            self._get(flight, wanted, turn)

        def begin() -> None:
            # In whatever thread makes room for it, which an error would end. Where no more threads can be started the
            # work is queued all the same, for those that there are.
            with contextlib.suppress(RuntimeError):
                self._readers.submit(run)

        turn = Turn(kind, self._flow_of(wanted.dataset), length, begin)
        self.turns.queue(turn)

    def _release_flight(self, flight: _Flight) -> None:
        """Let go of the bytes of a flight for one holder."""
        with self._lock:
            flight.holds -= 1
            turn = flight.turn if not flight.holds else None
        if turn is not None:
            self.turns.release(turn)

    def _get(self, flight: _Flight, wanted: _Wanted, turn: Turn) -> None:
        """See to a flight whose turn it is. Raises nothing."""
        with self._lock:
            mine = flight.turn is None
            flight.turn = flight.turn or turn
        if not mine:
            self.turns.fetched(turn)
            self.turns.release(turn)
            return
        id, ref, number, dataset, ahead, asked, lane, looked, pass_on, soon = wanted
        length = block_length(ref.size_bytes, number)
        try:
            if self._closing:
                raise DaemonError("the cache daemon is stopping")
            elsewhere = self.kept_elsewhere(id, dataset)
            here = None if elsewhere and pass_on else self._landed_meanwhile(id, looked, ahead=ahead)
            if here is not None and (elsewhere or not self._is_to_go_on_disk(id, dataset)):
                self.turns.fetched(turn)
                self._end(id, flight, kept=True)
                self._release_flight(flight)
                flight.data.set_result(here)
                return
            given: Data | None = here
            sound = self._whole is None or self._whole.expect_sound(ref)
            start = number * BLOCK_BYTES
            self._getting[id] = time.monotonic()
            try:
                within_s = math.inf
                if given is None and sound:
                    given, within_s = self._ask_nodes(flight, wanted)
                    flight.from_node = given is not None
                self._getting[id] = begun = time.monotonic()  # the store may take its time again
                if given is None:
                    with AskedAt(asked, within_s):
                        data = self._open_store(ref.store).read(ref, start, start + length)
                else:
                    data = given
            finally:
                self._getting.pop(id, None)
                self._got_at = time.monotonic()
            if self._whole is not None and not (elsewhere and pass_on):
                self._whole.fetched(ref, number, data)
        except BaseException as exc:  # noqa: BLE001 - whoever waits gets it, whatever it is
            with self._lock:
                self.stats.failed += 1
                del self._flights[id]
            self.turns.fetched(turn)
            self._release_flight(flight)
            flight.data.set_exception(exc)
            return
        self.turns.fetched(turn)
        took_s = time.monotonic() - begun
        with self._lock:
            if given is None:
                self.stats.fetched += 1
                self.stats.fetched_bytes += length
                self.fetched_of[dataset] = self.fetched_of.get(dataset, 0) + length
                self.stats.get_s += took_s
                self.stats.get_counts[bisect_left(LATENCY_BOUNDS_S, took_s)] += 1

        # A node that others ask for a block stands in for its owner, or is the owner in a newer view.
        elsewhere = elsewhere and flight.hops == _HOPS[TurnKind.READ]

        def landed(kept: bool) -> None:  # in the writer's thread
            self._refused = not (kept or elsewhere)
            self._end(id, flight, kept=kept, data=data, elsewhere=elsewhere)
            self._release_flight(flight)
            if kept and self._whole is not None:
                self._whole.landed(ref, number)

        block = Block(
            id=id,
            object_bytes=ref.size_bytes,
            number=number,
            data=data,
            dataset=dataset,
            ahead=ahead,
            lane=0 if elsewhere else lane,
            soon=soon,
            in_ram_only=elsewhere,
            unchecked=ref if self._whole is not None and block_count(ref.size_bytes) > 1 else None,
        )
        if elsewhere and pass_on and not flight.for_reader:
            landed(False)
        else:
            self._writer.put(block, landed)
        flight.data.set_result(data)

    def _ask_nodes(self, flight: _Flight, wanted: _Wanted) -> tuple[memoryview | None, float]:
        """Return a block that another node has, or gets for us; if there is none, how long to try the store at most."""
        peers = self._peers
        if peers is None:
            return None, math.inf
        id, ref, number, dataset = wanted[:4]
        patience = SilenceBudget(for_node=flight.hops < _HOPS[TurnKind.READ])
        found = None
        before = peers.ranked_before_this(id, dataset)
        if before and self._may_wait(flight, 2):
            found = peers.get(before, ref, number, dataset, patience)
        across = peers.ranked_across(id, dataset) if found is None else []
        if across and self._may_wait(flight, 1):
            found = peers.get(across, ref, number, dataset, patience, mode=Mode.ZONE)
        flight.waits_for = 0  # the store waits for no node
        if isinstance(found, memoryview):
            return found, math.inf
        earlier = peers.get_earlier(id, ref, number, dataset, patience)
        # Once more, as the store may be away for the owner alone.
        return earlier, peers.last_try_s if found is not None else math.inf

    def _may_wait(self, flight: _Flight, hops: int) -> bool:
        """Tell whether a flight may wait for so many nodes that wait for each other, and take note that it does."""
        with self._lock:
            flight.waits_for = hops if hops <= flight.hops else 0
            return flight.waits_for > 0

    def _is_to_go_on_disk(self, id: BlockId, dataset: str) -> bool:
        """Tell whether a block that this node owns, and has, is in RAM only: from a time when another one owned it."""
        return self.partitions(dataset) and bool(self.local.missing([id], on_disk=self._has_disk))

    def _landed_meanwhile(self, id: BlockId, looked: int | None, *, ahead: bool) -> Data | None:
        """Return a block that landed between its caller's look and the beginning of this flight. Nobody wants the bytes
        of a block fetched ahead, but a reader may have joined the flight: it gets them all the same."""
        with self._lock:
            # A look at the index gives up the interpreter several times, and dozens of threads wait for that.
            if looked is not None and id not in self._landed and self.landings - looked <= len(self._landed):
                return None
        return None if ahead and not self.local.has(id) else self.local.view(id, 0, None)

    def _end(self, id: BlockId, flight: _Flight, *, kept: bool, data: Data = b"", elsewhere: bool = False) -> None:
        with self._lock:
            del self._flights[id]
            if kept:
                self._note_landing_locked(id)
            elif flight.for_reader and len(data) > _ONE_READ_BYTES:
                self._held_bytes += len(data) - len(self._held.pop(id, b""))
                self._held[id] = data
                while self._held_bytes > _share(_HELD_BYTES, self._parts):
                    self._held_bytes -= len(self._held.popitem(last=False)[1])
        for stored in flight.stored:
            stored(kept or elsewhere)

    def _note_landing_locked(self, id: BlockId) -> None:
        self.landings += 1
        self._landed[id] = None
        self._landed.move_to_end(id)
        if len(self._landed) > _LANDED:
            self._landed.popitem(last=False)


def _share(size_bytes: int, parts: int) -> int:
    return max(size_bytes // parts, min(size_bytes, _LEAST_BYTES))
