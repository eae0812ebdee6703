"""One other node as this one knows it: whether it answers, connections to it, and questions that go to it together.

A question goes out at once, unless the node has yet to say its first word to others. Those that come meanwhile go
together with the next one that is let out: up to 64 blocks in a frame. The node answers with what it has, and with
signs of life while it gets the rest; so it is late after about four times what its first words mostly take, or when a
sign of life is missing, however long the store takes. The bytes of a large block are a sign of life as they come.

No thread does this but those that ask. One sends the questions of several, and goes on until its own is answered; then
the next goes on in its place. Any thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from datacache.cluster.members import Member
from datacache.core.breaker import Breaker
from datacache.core.errors import DatacacheError, StoreUnavailableError
from datacache.core.ids import BLOCK_BYTES, ObjectRef, block_length
from datacache.exchange.auth import Identity, introduce
from datacache.exchange.client import Connection
from datacache.exchange.frames import Deadline, Frame, FrameError, Kind, Pace
from datacache.exchange.wire import MOST_BLOCKS, BlocksRequest, Mode

log = logging.getLogger(__name__)
_CONNECT_S = 0.5
_LOOK_EVERY_S = 0.02
REQUEST_S = 60.0
"""The time for a request that is not for blocks."""
LEAST_S, MOST_S = 0.25, 1.0
"""Bounds of the time that a node has for its first word. The second is also for each further sign of life."""
_ANSWERS, _ANSWERS_A_SECOND = 4 * MOST_BLOCKS, 32
"""The most answers to a request: two for each block at once, and signs of life, which a node sends four times a
second."""
_TIMES_P99 = 4.0
_TIMES_KEPT = 256
_IDLE = 32
_UNHEARD = 2
"""Requests that go out before the node has said a word to the first."""
_DOUBT = 2
"""A node that fails once may be as quick as ever the next time."""
_PAUSES_S = (0.2, 5.0)
Came = memoryview | DatacacheError | Kind
"""A block, the error of getting it, or why the node gives none now."""


class SilentError(Exception):
    """A node does not answer, or not as it should."""


class _EndlessError(TimeoutError):
    """A node has shown signs of life for as long as anything takes, and has given no block."""


class SilenceBudget:
    """The time that a read may lose to silent nodes, in all. One thread at a time."""

    def __init__(self, *, for_node: bool = False) -> None:
        """`for_node`: another node asks, which may have waited for a silent one already."""
        self._left_s = MOST_S / 2 if for_node else MOST_S

    def share_s(self, *, last: bool) -> float:
        """Return how long one node may be silent: half of what is left, unless it is the `last` to ask. 0 if too little
        is left to blame it on the node."""
        if self._left_s < LEAST_S:
            return 0.0
        return self._left_s if last else max(LEAST_S, self._left_s / 2)

    def lose(self, seconds: float) -> None:
        """Take off the time until a node turned out to be silent."""
        self._left_s -= seconds


class Question:
    """A block that a thread asks a node for. `settle` is called once, `came` by the thread."""

    __slots__ = ("_came", "_duty", "_turn", "about", "block", "silence_s", "size_bytes")

    def __init__(self, ref: ObjectRef, number: int, dataset: str, mode: Mode, silence_s: float) -> None:
        """`silence_s` is how long the node may take for its first word, connecting included."""
        self.block, self.about, self.silence_s = (ref, number), (dataset, mode), silence_s
        self.size_bytes = block_length(ref.size_bytes, number)
        self._came: Came | SilentError | None = None
        self._duty: Callable[[], object] | None = None
        self._turn = threading.Lock()  # released for the thread that asks to go on
        self._turn.acquire()

    @property
    def settled(self) -> bool:
        """True once the answer is there."""
        return self._came is not None

    def settle(self, came: Came | SilentError) -> None:
        """Give the thread its answer."""
        self._came = came
        self._turn.release()

    def call_on(self, duty: Callable[[], object]) -> None:
        """Have the thread do something for the others, while it waits."""
        self._duty = duty
        self._turn.release()

    def wait(self) -> Came:
        """Return the answer. Raises `SilentError`."""
        while True:
            self._turn.acquire()
            duty, self._duty = self._duty, None
            if duty is None:
                break
            duty()
        if isinstance(self._came, SilentError):
            raise self._came
        assert self._came is not None
        return self._came


@dataclass
class _Exchange:
    """Questions that went out together, and what comes of them."""

    questions: list[Question]
    connection: NodeConnection
    answers: Iterator[tuple[int, Came]]
    first_left: int
    """Answers that are to come before those that the node waits for."""
    later: deque[int] = field(default_factory=deque)

    @property
    def left(self) -> list[Question]:
        """The questions that have no answer yet."""
        return [question for question in self.questions if not question.settled]


class OtherNode:
    """See the module."""

    def __init__(self, member: Member, me: Identity, patience_s: float) -> None:
        """`patience_s` is how long an answer may take however many signs of life come. A node that has not given the
        block by then waits for its store: that is no failure of the node, but of the store."""
        self.address = member.address
        self._member, self._me, self._patience_s = member, me, patience_s
        self._breaker: Breaker[Exception] = Breaker(patience_s, doubt=_DOUBT, pauses_s=_PAUSES_S)
        self._passed_over = False
        self._lock = threading.Lock()  # guards all below
        self._closed = False
        self._idle: list[NodeConnection] = []
        self._waiting: deque[Question] = deque()
        self._unheard = 0
        self._times_s: deque[float] = deque(maxlen=_TIMES_KEPT)
        self._words = 0
        self.limit_s = MOST_S
        """The time for its first word."""
        self.looked_at = False
        """True once `look` has ended."""
        self._has_other_list = False

    @property
    def problem(self) -> str:
        """Say why the last request failed; '' if it was answered."""
        error = self._breaker.error
        if error is None:
            return "it has another list of members" if self._has_other_list else ""
        return str(getattr(error, "strerror", None) or error)

    @property
    def hint(self) -> str:
        """Say what to do about the `problem`; '' where nothing is known."""
        error = self._breaker.error
        if error is None and self._has_other_list:
            return "Set the same DATACACHE_CLUSTER_MEMBERS, or none, on all nodes, and start their daemons again."
        if isinstance(error, DatacacheError):
            return error.hint
        if isinstance(error, FrameError):
            return error.hint or f"Is it a node's daemon that listens at {self.address}?"
        if isinstance(error, ConnectionRefusedError):
            return f"Does its daemon run, and listen at {self.address}?"
        if isinstance(error, socket.gaierror):
            return f"No machine is known here by the name in {self.address}."
        if isinstance(error, OSError):
            let_through = f"does a firewall let this one through to {self.address}"
            return f"Is its machine up, does its daemon answer there (dsctl doctor), and {let_through}?"
        return ""

    def connect(self, patience_s: float = REQUEST_S) -> NodeConnection:
        """Return a connection for other requests than for blocks, also to a node that is passed over: one that lets
        this one in is asked for blocks again at once. `OSError`, `PeerRefusedError`."""
        connection = NodeConnection(self._member, self._me, patience_s=patience_s)
        self._breaker.answered()
        self._passed_over = False
        return connection

    def look(self, list_id: str) -> None:
        """See whether the node lets this one in, and has its list of members."""
        try:
            with contextlib.closing(self.connect(MOST_S)) as connection:
                # Without a state this is a question only: a process that has not joined may ask it.
                theirs = connection.ask("state", {"node": self._me.node, "state": "", "left": 0})
            self._has_other_list = theirs.get("list", list_id) != list_id
        except (OSError, DatacacheError, ValueError) as exc:
            self._breaker.failed(exc)
        self.looked_at = True

    def ask(self, question: Question) -> Came:
        """Return what the node answers; `Kind.BUSY` also if it is known not to answer. Raises `SilentError`."""
        with self._lock:
            leads = self._unheard < _UNHEARD
            if leads:
                self._unheard += 1
            else:
                self._waiting.append(question)
        if leads:
            self._lead(question)
        return question.wait()

    def close(self) -> None:
        """Hang up; connections that are in use are closed after that."""
        self._closed = True
        self._hang_up()

    def _lead(self, first: Question) -> None:
        """Send a question, and those that wait and fit in with it, and see to the answers."""
        now = time.monotonic()
        if self._breaker.enter(now, now, late=False) is not None:
            self._let_next(instead=Kind.BUSY)
            first.settle(Kind.BUSY)
            return
        questions = [first]
        try:
            with self._lock:
                size_bytes = first.size_bytes
                while self._waiting and len(questions) < MOST_BLOCKS and self._waiting[0].about == first.about:
                    size_bytes += self._waiting[0].size_bytes
                    if size_bytes > BLOCK_BYTES:  # enough for a frame to be cheap; large ones come side by side
                        break
                    questions.append(self._waiting.popleft())
            connection, answers, word = self._first_word(questions)
        except BaseException as exc:  # noqa: BLE001 - raised again, once those that wait know
            late = isinstance(exc, TimeoutError)
            if late:  # answers that come too late are in no p99: without this a slower node would stay too slow
                self.limit_s = min(MOST_S, 2 * self.limit_s)
            self._failed(exc, questions)
            return
        took_s = time.monotonic() - now
        self._breaker.answered()
        self._passed_over = False
        with self._lock:
            self._times_s.append(took_s)
            self._words += 1
            if self._words % 32 == 0:
                slowest = sorted(self._times_s)[int(0.99 * (len(self._times_s) - 1))]
                self.limit_s = min(MOST_S, max(LEAST_S, _TIMES_P99 * slowest))
        self._let_next()
        exchange = _Exchange(questions, connection, answers, len(questions))
        self._take(exchange, *word)
        self._go_on(exchange, first)

    def _first_word(
        self, questions: list[Question]
    ) -> tuple[NodeConnection, Iterator[tuple[int, Came]], tuple[int, Came]]:
        """Send questions over a connection. Return it, with the answers and the first of them."""
        dataset, mode = questions[0].about
        request = BlocksRequest([question.block for question in questions], dataset, "", mode)
        begun = time.monotonic()
        give_up_at = begun + min(question.silence_s for question in questions)
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        while True:
            kept = connection is not None
            try:
                connection = connection or NodeConnection(self._member, self._me, give_up_at=give_up_at)
                connection.deadline.begin(min(give_up_at, time.monotonic() + self.limit_s), begun + self._patience_s)
                answers = connection.answers(request)
                return connection, answers, next(answers)
            except BaseException as exc:
                if connection is not None:
                    connection.close()
                if not kept or not isinstance(exc, OSError) or isinstance(exc, TimeoutError):
                    raise
                connection = None  # the node was restarted since, perhaps: a new connection tells
                self._hang_up()

    def _let_next(self, *, instead: Came | SilentError | None = None) -> None:
        """Let the next question out, as the node was heard; or give those that wait this answer `instead`."""
        heard = instead is None
        with self._lock:
            self._unheard -= 1
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting) if not heard else 1) if self._waiting]
            self._unheard += heard and bool(waiting)
        for question in waiting:
            if instead is None:
                question.call_on(lambda question=question: self._lead(question))  # type: ignore[misc]
            else:
                question.settle(instead)

    def _go_on(self, exchange: _Exchange, mine: Question) -> None:
        """Settle questions as answers come. Once this thread's own is settled, another thread takes its place."""
        try:
            while exchange.first_left or (exchange.later and not mine.settled):
                self._take(exchange, *next(exchange.answers))
        except _EndlessError:
            exchange.connection.close()
            for question in exchange.left:
                url = question.block[0].url
                words = f"{url}: the node at {self.address} has not got it in {self._patience_s:.0f} s"
                question.settle(StoreUnavailableError(words, url=url))
            return
        except BaseException as exc:  # noqa: BLE001 - raised again, once those that wait know
            exchange.connection.close()
            self._failed(exc, exchange.left, heard=True)
            return
        if exchange.later:
            heir = exchange.questions[exchange.later[0]]
            heir.call_on(lambda: self._go_on(exchange, heir))
            return
        with self._lock:
            keep = len(self._idle) < _IDLE and not self._closed
            if keep:
                self._idle.append(exchange.connection)
        if not keep:
            exchange.connection.close()

    @staticmethod
    def _take(exchange: _Exchange, at: int, came: Came) -> None:
        """Take an answer."""
        if exchange.first_left:
            exchange.first_left -= 1
            if came is Kind.WAIT:
                exchange.later.append(at)
                return
        elif came is Kind.WAIT:
            return
        else:
            exchange.later.popleft()
        exchange.questions[at].settle(came)

    def _failed(self, exc: BaseException, questions: list[Question], *, heard: bool = False) -> None:
        """Note that the node does not answer, and tell those that asked it. Raises what is no failure of the node."""
        fault = exc if isinstance(exc, Exception) else RuntimeError(str(exc))
        if self._breaker.failed(fault) and not self._passed_over:
            self._passed_over = True
            log.warning("the node at %s is passed over: %s", self.address, exc)
        self._hang_up()  # a new connection shows soon whether the node answers at all
        if not heard:
            self._let_next(instead=SilentError())
        for question in questions:
            question.settle(SilentError(str(exc)))
        if not isinstance(exc, OSError | DatacacheError | ValueError):
            raise exc

    def _hang_up(self) -> None:
        """Close the connections that wait for use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class _LivelyDeadline(Deadline):
    """The end of waiting for a node, which is put off by what comes."""

    def __init__(self, words: str) -> None:
        """See `Deadline`."""
        super().__init__(words)
        self.pace = Pace()

    def begin(self, give_up_at: float, end_at: float) -> None:
        """Wait until `give_up_at`, and whatever comes not longer than until `end_at`."""
        self.give_up_at, self._end_at = give_up_at, end_at
        self._begun, self._answers = time.monotonic(), 0
        self.pace.begin()

    def go_on(self) -> None:
        """Wait for the next sign of life. `FrameError` if they come faster than any node sends them: a processor would
        be busy with them for as long as the block may take."""
        now = self._before_end()
        self._answers += 1
        if self._answers > _ANSWERS + _ANSWERS_A_SECOND * (now - self._begun):
            raise FrameError("the node sends signs of life without a pause")
        self.give_up_at = min(self._end_at, now + MOST_S)
        self.pace.begin()

    def look(self) -> None:
        """Raise `TimeoutError` when the time is up."""
        now = self._before_end()
        if self.pace.moved_on():
            self.give_up_at = max(self.give_up_at, min(self._end_at, now + MOST_S))
        super().look()

    def _before_end(self) -> float:
        now = time.monotonic()
        if now > self._end_at:
            raise _EndlessError("the node has taken too long")
        return now


class NodeConnection(Connection):
    """An authenticated connection to a node, with an end of all waiting."""

    def __init__(
        self, member: Member, me: Identity, *, give_up_at: float = math.inf, patience_s: float = REQUEST_S
    ) -> None:
        """`give_up_at`: when it is to be there. `patience_s`: for each request that is not for blocks."""
        self._patience_s = patience_s
        now = time.monotonic()
        plain = _connected(member.address, max(_LOOK_EVERY_S, min(_CONNECT_S, give_up_at - now)))
        self.deadline = _LivelyDeadline("the node did not answer in time")
        self.deadline.begin(min(give_up_at, now + MOST_S), math.inf)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            super().__init__(plain, look=self.deadline.look, look_every_s=_LOOK_EVERY_S)
            self.frames.pace = self.deadline.pace
        except BaseException:
            plain.close()
            raise
        try:
            introduce(self.frames, me, member.id)
        except BaseException:
            self.close()
            raise
        self._give_time()

    def _expected(self, answer: Frame) -> Frame:
        self.deadline.go_on()
        return super()._expected(answer)

    def _result(self) -> memoryview:
        self._give_time()
        try:
            return super()._result()
        finally:
            self._give_time()  # for the next request

    def _give_time(self) -> None:
        """Give the next request that is not for blocks its time."""
        end_at = time.monotonic() + self._patience_s
        self.deadline.begin(end_at, end_at)


_Addresses = list[tuple[Any, ...]]
_resolving: dict[str, Future[_Addresses]] = {}
"""The names that are being resolved."""
_resolving_lock = threading.Lock()  # guards _resolving


def _connected(address: str, within_s: float) -> socket.socket:
    """Return a connection to `HOST:PORT`, made in this time. Raises `OSError`."""
    end, (host, _, port) = time.monotonic() + within_s, address.rpartition(":")
    error: OSError = OSError(f"{host} has no address")
    for ip, *_ in _resolved(host.strip("[]"), within_s):
        try:
            return socket.create_connection((ip, int(port)), timeout=max(_LOOK_EVERY_S, end - time.monotonic()))
        except OSError as exc:
            error = exc
    raise error


def _resolved(host: str, within_s: float) -> _Addresses:
    """Return the IP addresses of a host, the first of each tuple. `TimeoutError` where none is known in time: as
    getaddrinfo(3) waits for name servers as long as it likes, it does so in a thread, one for a name."""
    with contextlib.suppress(socket.gaierror):
        return _look_up(host, socket.AI_NUMERICHOST)
    with _resolving_lock:
        found = _resolving.get(host)
        if found is None:
            found = Future()
            try:
                threading.Thread(target=_resolve, args=(host, found), name="resolve", daemon=True).start()
            except RuntimeError as exc:  # no more threads can be started
                raise OSError(f"nobody can be asked for the address of {host}: {exc}") from exc
            _resolving[host] = found
    try:
        return found.result(within_s)
    except TimeoutError:
        raise TimeoutError(f"no name server has told the address of {host} in time") from None


def _resolve(host: str, found: Future[_Addresses]) -> None:
    try:
        found.set_result(_look_up(host))
    except Exception as exc:  # noqa: BLE001 - of whoever asked
        found.set_exception(exc)
    with _resolving_lock:
        del _resolving[host]


def _look_up(host: str, flags: int = 0) -> _Addresses:
    return [found[4] for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)]
