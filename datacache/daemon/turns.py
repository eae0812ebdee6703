"""Turns at fetching and at sending: fair between data sets, bounded in number and bytes, readers before fills.

One `Turns` stands in front of all gets of the daemon. A get queues by its data set (or by the share of the cache that
the data set belongs to), and each data set in turn gets as many bytes (deficit round robin: Shreedhar and Varghese,
"Efficient Fair Queuing using Deficit Round Robin", SIGCOMM 1995). So a data set with one reader waits for one block of
one with two hundred, not for two hundred.

- *Reads* with a waiting reader go first, those for readers of other nodes in room of their own. Reads *ahead* begin
when no read waits, and *fills* (warm-ups, published orders) have bytes of their own; while reads wait, few of them
begin.

- *Room*: a turn has its bytes from its beginning until nobody needs them, which is after they were stored and sent.
Without room nothing is fetched, so a slow disk or slow readers hold back gets and take no memory.

- *Reserve*: a data set with little under way begins also when others have taken all. A dead store, or stopped readers,
keep the reads of their own data set waiting and no others.

Any thread; only `Turns.wait` and `Sends.turn` wait.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

QUANTUM_BYTES = 4 * 2**20
"""The bytes that a data set may begin each time it is its turn: one block."""
EXTRA_TURNS = 16
"""Turns beyond the limits, of all data sets that have little under way together."""
_LITTLE = 4
_ONE_BYTES = 2**16
"""The cost of a turn besides its bytes: many small reads are work, too."""
_FILLS_BEHIND_READS = 8
"""The part of the fills' turns that go on while reads wait: one in so many."""


class TurnKind(Enum):
    """The purpose of a turn."""

    __hash__ = object.__hash__  # that of `Enum` is a call of Python's, and each turn needs ten

    ZONE = 0
    """A node of another zone waits for it. It waits for the store only, and the room is its own: two nodes that ask
    each other would else wait for each other's room."""
    NODE = 1
    """Another node waits for it. It waits for a node of another zone at most, and has room of its own, too."""
    READ = 2
    AHEAD = 3
    FILL = 4


_HAS_RESERVE = (TurnKind.ZONE, TurnKind.NODE, TurnKind.READ)
# Tables, as `TurnKind.READ` is a call of Python's, too.
_ROOM = {kind: kind for kind in TurnKind} | {TurnKind.AHEAD: TurnKind.READ}
"""The kind that each kind shares its bytes with."""
_SHARERS = {kind: [other for other in TurnKind if _ROOM[other] is _ROOM[kind]] for kind in TurnKind}


@dataclass(slots=True)
class _Use:
    """The holdings of one data set's turns, or of all."""

    fetching: int = 0
    held_bytes: int = 0


@dataclass(eq=False, slots=True)
class Turn:
    """One get, from when it queues to when its bytes are let go. `fetched` and `release` are each called once."""

    kind: TurnKind
    flow: str
    size_bytes: int
    begin: Callable[[], object]
    """Called when its turn has come, from any thread; returns at once."""
    counted: tuple[_Use, ...] = ()
    """The holdings that it counts in, from its beginning."""


@dataclass
class _Flow:
    """The turns of one kind that one data set waits for."""

    waiting: deque[Turn] = field(default_factory=deque)
    credit_bytes: int = 0


class FairQueue:
    """Deficit round robin over data sets. Not safe from several threads."""

    def __init__(self) -> None:
        self._flows: OrderedDict[str, _Flow] = OrderedDict()  # those that want something, the next one first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, turn: Turn) -> None:
        """Queue a turn behind those of its data set."""
        self._flows.setdefault(turn.flow, _Flow()).waiting.append(turn)
        self._count += 1

    def pop(self, fits: Callable[[Turn], bool]) -> Turn | None:
        """Return the next turn, of the data sets whose first one fits; None if there is none."""
        able = {flow for flow, wanted in self._flows.items() if fits(wanted.waiting[0])}
        while able:
            flow = next(iter(self._flows))
            wanted = self._flows[flow]
            cost = wanted.waiting[0].size_bytes + _ONE_BYTES
            if flow in able and wanted.credit_bytes >= cost:
                wanted.credit_bytes -= cost
                turn = wanted.waiting.popleft()
                self._count -= 1
                if not wanted.waiting:
                    del self._flows[flow]  # with its credit: nobody saves up for later
                return turn
            if flow in able:
                wanted.credit_bytes += QUANTUM_BYTES + _ONE_BYTES
            self._flows.move_to_end(flow)
        return None


class Turns:
    """See the module. `fetching` gets at a time for readers and as many for fills."""

    def __init__(self, fetching: int, *, ahead: int, read_bytes: int, fill_bytes: int) -> None:
        self._lock = threading.Lock()  # guards all below
        self._most = dict.fromkeys(TurnKind, fetching) | {TurnKind.AHEAD: ahead}
        self._limit_bytes = dict.fromkeys(TurnKind, read_bytes) | {TurnKind.FILL: fill_bytes}
        self._waiting = {kind: FairQueue() for kind in TurnKind}
        self._all = {kind: _Use() for kind in TurnKind}
        self._by_flow: dict[tuple[TurnKind, str], _Use] = {}
        self._queued = 0
        self._beyond: set[int] = set()  # ids of turns that began in the reserve
        self._open = False

    def queue(self, turn: Turn) -> None:
        """Have `turn.begin` called when its turn has come."""
        with self._lock:
            self._waiting[turn.kind].put(turn)
            self._queued += 1
        self._begin()

    def take(self, kind: TurnKind, flow: str, size_bytes: int) -> Turn | None:
        """Return a turn that begins now; None if it has to wait."""
        turn = Turn(kind, flow, size_bytes, _nothing)
        with self._lock:
            if self._queued or not self._within_limits(turn):
                return None
            self._take(turn)
        return turn

    def wait(self, kind: TurnKind, flow: str, size_bytes: int) -> Turn:
        """Wait for a turn, in this thread."""
        turn = self.take(kind, flow, size_bytes)
        if turn is not None:  # almost always
            return turn
        come = threading.Event()
        turn = Turn(kind, flow, size_bytes, come.set)
        self.queue(turn)
        come.wait()
        return turn

    def fetched(self, turn: Turn) -> None:
        """End the get of a turn, well or badly; its bytes are needed still."""
        self._give_back(turn, fetching=1)

    def release(self, turn: Turn) -> None:
        """Let go of the bytes of a turn."""
        self._give_back(turn, held_bytes=turn.size_bytes)

    def _give_back(self, turn: Turn, *, fetching: int = 0, held_bytes: int = 0) -> None:
        with self._lock:
            for use in turn.counted:
                use.fetching -= fetching
                use.held_bytes -= held_bytes
            if not fetching:
                self._beyond.discard(id(turn))
            if not use.fetching and not use.held_bytes:
                del self._by_flow[_ROOM[turn.kind], turn.flow]
            waits = self._queued
        if waits:
            self._begin()

    def crowded(self, kind: TurnKind) -> bool:
        """Tell whether the next of the turns of a kind waits for nothing but the room that others have."""
        with self._lock:
            waits = bool(self._waiting[kind]) and self._all[kind].fetching < self._most[kind]
            return waits and self._held_bytes(kind) + QUANTUM_BYTES > self._limit_bytes[kind]

    def open(self) -> None:
        """Let all begin at once: the daemon ends, and they are to notice."""
        with self._lock:
            self._open = True
        self._begin()

    def _begin(self) -> None:
        while True:
            with self._lock:
                turn = self._next_locked()
                if turn is None:
                    return
            begin, turn.begin = turn.begin, _nothing  # no cycle keeps what it refers to
            begin()

    def _next_locked(self) -> Turn | None:
        for waiting in self._waiting.values():
            turn = waiting.pop(self._fits) if waiting else None
            if turn is not None:
                self._queued -= 1
                if not self._open and not self._within_limits(turn):
                    self._beyond.add(id(turn))
                self._take(turn)
                return turn
        return None

    def _take(self, turn: Turn) -> None:
        turn.counted = self._all[turn.kind], self._use(turn)
        for use in turn.counted:
            use.fetching += 1
            use.held_bytes += turn.size_bytes

    def _fits(self, turn: Turn) -> bool:
        if self._open or self._within_limits(turn):
            return True
        if turn.kind not in _HAS_RESERVE or len(self._beyond) >= EXTRA_TURNS:
            return False
        use, everybody = self._use(turn), self._all[turn.kind]
        little = use.fetching < _LITTLE and use.held_bytes + turn.size_bytes <= _LITTLE * QUANTUM_BYTES
        return little and (use.fetching < everybody.fetching or use.held_bytes < everybody.held_bytes)

    def _within_limits(self, turn: Turn) -> bool:
        most, use = self._most[turn.kind], self._all[turn.kind]
        if self._queued and self._waiting[TurnKind.READ]:  # almost never
            if turn.kind is TurnKind.AHEAD:
                return False
            if turn.kind is TurnKind.FILL:
                most = max(1, most // _FILLS_BEHIND_READS)
        held = self._held_bytes(turn.kind)
        return use.fetching < most and (not held or held + turn.size_bytes <= self._limit_bytes[turn.kind])

    def _held_bytes(self, kind: TurnKind) -> int:
        """Return the bytes of the room that turns of a kind have a part of."""
        return sum([self._all[other].held_bytes for other in _SHARERS[kind]])

    def _use(self, turn: Turn) -> _Use:
        key = _ROOM[turn.kind], turn.flow
        return self._by_flow.get(key) or self._by_flow.setdefault(key, _Use())


def _nothing() -> None:
    """Do nothing: a turn that has begun keeps no reference to its work."""


SLOW_S = 0.25
"""How long a turn at sending keeps others waiting at most: the answer goes on being sent to a slow reader."""
_READ_LATELY_S = 1.0
_MOST_FLOWS = 1000


class Sends:
    """Turns at sending large blocks, one at a time for each data set (or share of the cache) while several are read.

    Two hundred threads that send answers of 4 MiB take the processors from the one that sends 100 KB of another data
    set. A data set that is read alone has no turns: they would cost it some of its speed. Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._sending: dict[str, threading.Lock] = {}
        self._read_at: dict[str, float] = {}

    def note_read(self, flow: str) -> None:
        """Note that somebody asks for a block."""
        now = time.monotonic()
        with self._lock:
            self._read_at[flow] = now
            if len(self._read_at) > _MOST_FLOWS:
                self._read_at = {name: at for name, at in self._read_at.items() if now - at < _READ_LATELY_S}
                self._sending = {name: held for name, held in self._sending.items() if name in self._read_at}

    @contextmanager
    def turn(self, flow: str) -> Iterator[None]:
        """Wait for the turn to send a large answer; `SLOW_S` at most."""
        since = time.monotonic() - _READ_LATELY_S
        with self._lock:
            alone = not any(at > since for name, at in self._read_at.items() if name != flow)
            sending = self._sending.setdefault(flow, threading.Lock())
        if alone:
            yield
            return
        if not sending.acquire(timeout=SLOW_S):
            sending = threading.Lock()
            sending.acquire()
            with self._lock:
                self._sending[flow] = sending  # whoever is slow keeps nobody else waiting
        try:
            yield
        finally:
            sending.release()
