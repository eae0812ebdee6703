"""The processes that serve the other parts of a node's cache (`tiers.parts`): the daemon starts, asks and ends them.

Each is the same kind of thing as the daemon, for its part: tiers with budgets of their own, a fetcher, warm-ups, and a
socket, which readers ask for the blocks of their objects. The daemon alone has the home's lock, pulse and leases and is
asked everything else; it asks the parts in turn and adds up. In a cluster it alone takes part, for the node: it shows
the others the members, and they let other nodes in at its listener, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from datacache.cluster.members import Members
from datacache.core import ipc
from datacache.core.breaker import Breaker
from datacache.core.disk import replace_file
from datacache.core.errors import CacheError, DaemonUnavailableError, DatacacheError
from datacache.core.ids import BlockId
from datacache.daemon import paths
from datacache.exchange.client import Connection
from datacache.exchange.frames import Buffer, Deadline
from datacache.settings import Settings
from datacache.store.credentials import Environments
from datacache.tiers.parts import Part, part_of

log = logging.getLogger(__name__)
_START_S, _STOP_S = 20.0, 5.0
T = TypeVar("T")
_ALIVE_S, _ORDER_S = 3.0, 600.0
_LOOK_EVERY_S = 0.05
_DOUBT, _PAUSES_S = 2, (0.2, 1.0)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STATES = ("done", "cancelled", "incomplete", "failed", "running")
"""Of a job in several parts the last of these is the state of all."""
_NAMES = ("name", "id", "url", "node")
_OF_ALL = frozenset({"silent_s", "position", "items", "next_items", "ahead"})
"""Numbers that are not of a part."""


@dataclass
class _PartProcess:
    """The process that serves a part, or the one that is being started in its place."""

    part: Part
    settings: Settings
    running: subprocess.Popen[bytes] | None = None
    health: dict[str, Any] | None = None
    """Its last answer; None until it serves."""
    heard_at: float = 0.0
    """When it, or the one before it, last said something."""


class PartProcesses:
    """The processes of all parts but the first. `start`, `look` and `stop` belong to the main thread: a process ends
    with the thread that started it."""

    def __init__(
        self,
        settings: Settings,
        budgets: Sequence[tuple[int, ...]],
        held: Sequence[int],
        environments: Environments | None,
        *,
        members: Members | None = None,
    ) -> None:
        """`budgets` of RAM and SSD for each part; `held`: descriptors of the home's lock, which the processes keep;
        `environments`: how stores are reached, which processes are told when they start; `members` of the cluster."""
        count = len(budgets)
        self._home, self._held = settings.home, held
        self._processes = [
            _PartProcess(Part(number, count), replace(settings, ram_bytes=ram, ssd_bytes=ssd))
            for number, (ram, ssd) in enumerate(budgets[1:], 1)
        ]
        self._environments, self._members = environments, members
        self._listener: socket.socket | None = None
        self._showing = threading.Lock()  # held while members are shown; guards _shown
        self._shown = -1
        """The version of the view that the processes know."""
        self.hangs = ""
        """The part that does not answer, or what hangs in it; '' if all go on."""

    @property
    def problems(self) -> list[str]:
        """The problems of the tiers, as the parts told them last."""
        return [problem for each in self._processes for problem in (each.health or {}).get("problems", ())]

    def start(self, listener: socket.socket | None = None) -> None:
        """Start the processes and wait until they serve; tell readers how many parts there are. `listener`: where they
        let other nodes in. `CacheError`."""
        self._listener = listener
        self.show_members()
        for each in self._processes:
            self._start(each)
        end = time.monotonic() + _START_S
        for each in self._processes:
            while not self._answers(each):
                code = each.running.poll() if each.running is not None else None
                if (
                    code is not None and code < 0 and time.monotonic() < end
                ):  # killed, for want of memory perhaps: that is chance
                    log.warning("the process of part %d ended (%d)", each.part.number, code)
                    self._start(each)
                elif code is not None or time.monotonic() > end:
                    raise CacheError(
                        f"the process of part {each.part.number} does not start",
                        hint=f"See {paths.log_path(self._home)}",
                    )
                time.sleep(0.02)
        replace_file(paths.parts_path(self._home), str(len(self._processes) + 1).encode(), durable=False)

    def look(self) -> None:
        """Start again what has ended, for which readers wait, and see whether all others answer."""
        self.show_members()
        hangs = ""
        for each in self._processes:
            if each.running is not None and each.running.poll() is not None:
                log.warning("the process of part %d ended (%d)", each.part.number, each.running.returncode)
                try:
                    self._start(each)
                except OSError as exc:  # no memory, say
                    log.warning("the process of part %d is started later: %s", each.part.number, exc)
            starts = each.health is None and time.monotonic() < each.heard_at + _START_S
            if self._answers(each):
                hangs = hangs or (each.health or {})["hangs"]
            elif not starts:
                hangs = f"the process of part {each.part.number} does not answer"
        self.hangs = hangs

    def show_members(self) -> None:
        """Show the processes the members of the cluster, or do so as soon as the disk takes it: until then they go on
        with the last view. Any thread."""
        if self._members is None:
            return
        with self._showing:
            view = self._members.view
            if view.version != self._shown:
                try:
                    replace_file(paths.members_path(self._home), view.encode(), durable=False)
                except OSError as exc:
                    log.warning("the other parts are not shown the members yet: %s", exc)
                else:
                    self._shown = view.version

    def ask(self, op: str, fields: object = None, *, timeout_s: float = _ORDER_S) -> list[dict[str, Any]]:
        """Have all parts do an operation; return their answers. Raises the first error."""
        return [self._ask(each.part, lambda of: of.ask(op, fields), timeout_s) for each in self._processes]

    def upload(self, op: str, body: Buffer) -> None:
        """Have all parts take a large body."""
        for each in self._processes:
            self._ask(each.part, lambda of: of.call(op, body), _ORDER_S)

    def stop(self) -> None:
        """End all processes: those that take long are killed, and lose nothing but cached blocks."""
        paths.parts_path(self._home).unlink(missing_ok=True)
        processes = [each.running for each in self._processes if each.running is not None]
        for process in processes:
            process.terminate()
        end = time.monotonic() + _STOP_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
                continue
            process.kill()
            process.wait()

    def _start(self, each: _PartProcess) -> None:
        environment = child_environment(each.settings, self._environments)
        number, of = each.part
        listener = [] if self._listener is None else ["--listener", str(self._listener.fileno())]
        each.health = None
        each.running = subprocess.Popen(
            [sys.executable, "-m", "datacache.daemon", "--part", f"{number}/{of}", str(os.getpid()), *listener],
            stdin=subprocess.DEVNULL,
            cwd="/",
            env=environment,
            pass_fds=[*self._held, *map(int, listener[1:])],
        )

    def _answers(self, each: _PartProcess) -> bool:
        try:
            each.health = ask_part(self._home, each.part.number, lambda of: of.ask("health"), _ALIVE_S)
        except OSError:
            return False
        each.heard_at = time.monotonic()
        return True

    def _ask(self, part: Part, talk: Callable[[Connection], T], timeout_s: float) -> T:
        end = time.monotonic() + _START_S
        while True:
            try:
                return ask_part(self._home, part.number, talk, timeout_s)
            except OSError as exc:  # it is being started again
                if time.monotonic() > end:
                    raise DaemonUnavailableError(f"the process of part {part.number} does not answer") from exc
                time.sleep(0.05)


class PartConnection(Connection):
    """A connection to a part's process, with an end of all waiting."""

    def __init__(self, home: Path, number: int, timeout_s: float) -> None:
        """`OSError` if that does not answer. See `give_time`."""
        self.number = number
        deadline = Deadline(f"the process of part {number} did not answer in time")
        end = ipc.connect(paths.socket_path(home, number), timeout_s=min(_ALIVE_S, timeout_s))
        super().__init__(end, look=deadline.look, look_every_s=_LOOK_EVERY_S)
        self._deadline = deadline
        self.give_time(timeout_s)

    def give_time(self, timeout_s: float) -> None:
        """Wait for so long at most from now on."""
        self._deadline.give_up_at = time.monotonic() + timeout_s

    def hung_up(self) -> bool:
        """Tell whether the other end has gone, while nothing is to come from it."""
        poll = select.poll()
        poll.register(self.frames.connection, select.POLLIN)
        return bool(poll.poll(0))


class OtherParts:
    """The other parts of this node, and connections to them, which are kept for the next request. A part that has been
    silent twice is asked by one caller at a time, now and then, until it answers. Any thread."""

    def __init__(self, home: Path, part: Part) -> None:
        """`part` is this process's."""
        self._home, self.part = home, part
        self._idle: defaultdict[int, deque[PartConnection]] = defaultdict(deque)
        self._breakers = [Breaker[TimeoutError](_ORDER_S, doubt=_DOUBT, pauses_s=_PAUSES_S) for _ in range(part.of)]

    def divide(self, ids: Sequence[BlockId]) -> dict[int, list[int]]:
        """Return the positions of the blocks of each part, this one included."""
        found: dict[int, list[int]] = {}
        for at, id in enumerate(ids):
            found.setdefault(part_of(id[:16], self.part.of), []).append(at)
        return found

    @contextlib.contextmanager
    def connected(self, number: int, timeout_s: float) -> Iterator[PartConnection]:
        """Yield a connection to a part for one caller. `DaemonUnavailableError` if the part does not answer in time."""
        try:
            connection = self.take(number, timeout_s)
            try:
                yield connection
            except BaseException as exc:
                connection.close()
                self.give_back(connection, exc)
                raise
        except OSError as exc:
            if isinstance(exc, DatacacheError):  # its answer
                raise
            raise DaemonUnavailableError(f"the process of part {number} does not answer: {exc}") from exc
        self.give_back(connection)

    def take(self, number: int, timeout_s: float) -> PartConnection:
        """Return a connection to a part for one caller, who ends with `give_back` in the same thread. `OSError` if the
        part does not answer."""
        breaker, now = self._breakers[number], time.monotonic()
        silent = breaker.enter(now, now, late=False)
        if silent is not None:
            raise TimeoutError(*silent.args)  # a new one: each raise adds to a traceback, which keeps what it has met
        try:
            connection = self._kept(number) or PartConnection(self._home, number, timeout_s)
        except BaseException as exc:
            self.heard(number, exc)
            raise
        connection.give_time(timeout_s)
        return connection

    def give_back(self, connection: PartConnection, error: BaseException | None = None) -> None:
        """Keep a connection for others unless it is closed; `error` is what it failed with."""
        self.heard(connection.number, error)
        if not connection.closed:
            self._idle[connection.number].append(connection)

    def heard(self, number: int, error: BaseException | None = None) -> None:
        """Take note that a part has begun to answer, so that others may ask it, or of the `error` instead. One that
        hung up, or is not there, is no silent one: another process takes its place."""
        if isinstance(error, TimeoutError):
            self._breakers[number].failed(error)
        else:
            self._breakers[number].answered()

    def _kept(self, number: int) -> PartConnection | None:
        idle = self._idle[number]
        while idle:
            with contextlib.suppress(IndexError):  # another thread was quicker
                connection = idle.pop()
                if not connection.hung_up():
                    return connection
                connection.close()
        return None


def ask_part(home: Path, number: int, talk: Callable[[Connection], T], timeout_s: float = _ORDER_S) -> T:
    """Return what `talk` makes of a connection to a part's process. `OSError` if that does not answer."""
    with contextlib.closing(PartConnection(home, number, timeout_s)) as connection:
        return talk(connection)


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def add_up(values: Sequence[Any], name: str = "") -> Any:
    """Return the sum of the answers of parts: numbers are added, lists of named things are joined by their names, and
    of texts the first is taken that says anything."""
    if len(values) == 1:
        return values[0]
    first = next((value for value in values if value is not None), None)
    if isinstance(first, dict):
        names = dict.fromkeys(key for value in values for key in value or ())
        return {key: add_up([value[key] for value in values if value and key in value], key) for key in names}
    if isinstance(first, list) and any(isinstance(each, dict) for value in values for each in value):
        return _joined(each for value in values for each in value)
    if isinstance(first, list):
        return [sum(each) for each in zip(*values, strict=True)]
    if name == "state":
        return max(values, key=lambda state: _STATES.index(state) if state in _STATES else -1)
    if isinstance(first, bool | str):
        return next((value for value in values if value), first)
    numbers = [value for value in values if value is not None]
    return (max if name in _OF_ALL else sum)(numbers) if numbers else None


def _joined(things: Iterable[Mapping[str, Any]]) -> list[Any]:
    by_name: dict[Any, list[Any]] = {}
    for thing in things:
        by_name.setdefault(next(thing[key] for key in _NAMES if key in thing), []).append(thing)
    return [add_up(same) for same in by_name.values()]


def child_environment(settings: Settings, environments: Environments | None) -> dict[str, str]:
    """Return the variables of a process that has these settings, and reaches stores as this one does."""
    environment = os.environ | settings.environment()
    if environments is not None:
        environment |= environments.newest_first()[0]
    package_root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH")) if p)
    return environment
