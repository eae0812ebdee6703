"""Talk to the node's daemon, and start it when there is none.

Readers use it for blocks that are not on the node, and `dsctl` for everything else. Any thread may call it; a
connection has one request at a time, and none goes across `fork()`. If the daemon dies in the middle of a request, it
is started and asked again: every request is idempotent.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import logging
import os
import random
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from datacache.core import ipc
from datacache.core.boot import stat_of
from datacache.core.concurrency import PerProcess
from datacache.core.errors import (
    DaemonError,
    DaemonSilentError,
    DaemonUnavailableError,
    DatacacheError,
    StoreError,
    StoreUnavailableError,
)
from datacache.core.ids import ObjectRef, object_id
from datacache.daemon import paths
from datacache.daemon.keeper import keeper_answers
from datacache.daemon.orders.plan_file import PlanHeader
from datacache.daemon.pulse import PulseWatch
from datacache.daemon.starting import DaemonProcess
from datacache.exchange.client import Connection
from datacache.exchange.frames import Deadline, FrameError
from datacache.exchange.wire import BlocksRequest, Mode
from datacache.settings import Settings
from datacache.store.credentials import store_fingerprint, told_variables
from datacache.tiers.parts import part_of

T = TypeVar("T")
log = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.25
_MOST_IDLE = 64
"""Connections that a process keeps for its next requests."""
_ALIVE_TIMEOUT_S = 3.0
_LOOK_TIMEOUT_S = 10.0
"""For questions that the daemon answers from memory."""
_ORDER_TIMEOUT_S = 600.0
"""For orders to the daemon itself, such as pins: while its pulse beats it is at work on them."""
_STOP_TIMEOUT_S = 20.0


class _Connection(Connection):
    """A connection to the daemon that watches the daemon's pulse while it waits."""

    def __init__(self, home: Path, watch: Callable[[], object], part: int) -> None:
        self.part = part
        connection = ipc.connect(paths.socket_path(home, part), timeout_s=_CONNECT_TIMEOUT_S)
        self.deadline = Deadline("the daemon did not answer in time", watch=watch)
        """The end of all waiting, whatever the pulse."""
        super().__init__(connection, look=self.deadline.look, look_every_s=_LOOK_EVERY_S)
        self.introduced = False
        """True if the daemon was told over it how this process reaches stores."""


class _PartAwayError(Exception):
    """A part does not answer, or is not the one to ask any more: there are more or fewer now."""


class AskedBlock:
    """A block that the daemon was asked for, by a caller that does other things until the answer comes. One thread at a
    time calls it, and ends with `take` or `give_up`."""

    def __init__(
        self,
        connection: _Connection,
        request: BlocksRequest,
        silent: Callable[[], bool],
        keep: Callable[[_Connection], object],
        tell_again: Callable[[StoreError], bool],
    ) -> None:
        self._connection, self._request = connection, request
        self._silent, self._keep, self._tell_again = silent, keep, tell_again
        self._failure: StoreUnavailableError | None = None
        connection.ask_blocks(request)

    def fileno(self) -> int:
        """Return the descriptor that is readable once the answer comes."""
        return self._connection.frames.connection.fileno()

    def overdue(self) -> bool:
        """Tell whether the daemon has become silent or has had its time, so that no answer may ever come."""
        return time.monotonic() > self._connection.deadline.give_up_at or self._silent()

    def take(self) -> memoryview | None:
        """Receive the answer, which has begun to come. None if it does not come, or is an error: unless there is
        `failure`, `DaemonClient.block` asks again, and says what is wrong."""
        self._connection.deadline.give_up_at = 0.0
        try:
            data = self._connection.asked_block(self._request, 0)
        except (OSError, DatacacheError):
            self.give_up()
            return None
        self._keep(self._connection)
        if isinstance(data, StoreUnavailableError):
            self._failure = data
        return data if isinstance(data, memoryview) else None

    def failure(self) -> StoreUnavailableError | None:
        """Return the error that `take` met if the store is away, so that it need not be waited for again. None if
        another shell had told the daemon to reach it otherwise: that is asked, and may take a while."""
        return None if self._failure is None or self._tell_again(self._failure) else self._failure

    def give_up(self) -> None:
        """Do without the answer."""
        self._connection.close()


_Idle = defaultdict[int, deque[_Connection]]
"""Connections to each part that no thread uses at the moment; the last is taken first."""


class DaemonClient:
    """The daemon of one home. Any thread."""

    def __init__(self, settings: Settings, *, prepare: Callable[[], object] = lambda: None) -> None:
        """`prepare` is called in the thread of a caller that waits and may soon have to do without the daemon."""
        self._settings, self._prepare = settings, prepare
        self._idle: PerProcess[_Idle] = PerProcess(lambda: defaultdict(deque))
        self._part_count = 0
        """The parts of the daemon that answered last; 0 if they are not known."""
        # A get may take the store's whole patience, and wait behind others.
        self._block_timeout_s = 2 * settings.store_timeout_s + 10.0
        self._pulse = PerProcess(lambda: PulseWatch(settings.home))
        self._process = DaemonProcess(settings)

    def block(
        self,
        ref: ObjectRef,
        number: int,
        dataset: str,
        snapshot: str,
        *,
        span: tuple[int, int] | None = None,
        broken: bool = False,
        into: memoryview | None = None,
    ) -> memoryview:
        """Return the bytes of a block, or of a span of it, fetched if need be: received `into` a buffer, of which the
        result then is a view. Raises the store's errors, and `DaemonUnavailableError` if there is no daemon and none
        can be started."""
        mode, spans = Mode.BROKEN if broken else Mode.READ, () if span is None else (span,)
        request = BlocksRequest([(ref, number)], dataset, snapshot, mode, spans, into)

        def ask() -> memoryview:
            [found] = self._ask_until(request)
            if isinstance(found, DatacacheError):
                raise found
            assert found is not None
            return found

        try:
            return ask()
        except StoreError as exc:
            if self._tell_again(exc):
                return ask()
            raise

    def blocks_or_errors(
        self, wanted: Sequence[tuple[ObjectRef, int]], dataset: str, snapshot: str
    ) -> list[memoryview | DatacacheError | None]:
        """Return the bytes of up to `MOST_BLOCKS` blocks, fetched at once if need be, or the error of each that cannot
        be had. Raises `DaemonUnavailableError` as `block` does."""
        return self._ask_until(BlocksRequest(wanted, dataset, snapshot, Mode.READ))

    def _tell_again(self, exc: StoreError) -> bool:
        """Return True if another shell had told the daemon its own variables meanwhile; it was told these again. Else
        add to the error's hint what a process cannot tell."""
        with contextlib.suppress(DatacacheError):
            told = self._introduction()
            look = functools.partial(self._call, start=False, timeout_s=_LOOK_TIMEOUT_S)
            if told and look("environment", told)["changed"]:
                return True
            if look("health").get("stores") != store_fingerprint():
                exc.hint = (
                    "The daemon runs with other GOOGLE_* or AZURE_* variables (or AWS_* ones of roles) than this "
                    "process: dsctl daemon stop, then try again. " + exc.hint
                )
        return False

    def _ask_until(self, request: BlocksRequest) -> list[memoryview | DatacacheError | None]:
        """Ask the parts of the daemon for blocks, again where one is away for a moment."""
        found: list[memoryview | DatacacheError | None] = [None] * len(request.blocks)
        end, delay_s = time.monotonic() + self._block_timeout_s, 0.01
        while True:
            try:
                self._ask_parts(request, found)
                return found
            except _PartAwayError:
                if time.monotonic() > end:
                    raise DaemonUnavailableError(
                        f"a part of the cache daemon of {self._settings.home} does not answer",
                        hint=f"Its log: {paths.log_path(self._settings.home)}",
                    ) from None
            time.sleep(random.uniform(0, delay_s))
            delay_s = min(2 * delay_s, 0.25)

    def _ask_parts(self, request: BlocksRequest, found: list[memoryview | DatacacheError | None]) -> None:
        """Ask each part for its blocks that are not found yet."""
        parts: dict[int, list[int]] = {}
        for at, (ref, _) in enumerate(request.blocks):
            if found[at] is None:
                parts.setdefault(self._part_of(ref), []).append(at)

        def ask(left: list[tuple[int, list[int]]]) -> None:
            """Ask the first part, and all others before its answers are taken, so that all are at work."""
            (part, wanted), others = left[0], left[1:]
            away: _PartAwayError | None = None

            def talk(of: _Connection) -> None:
                nonlocal away
                positions = [at for at in wanted if found[at] is None]  # of a second try those that did not come
                own = request.only(positions)
                if any(self._part_of(ref) != part for ref, _ in own.blocks):
                    raise _PartAwayError  # it has become clear with the connection how many there are
                of.ask_blocks(own)
                rest = [(each, some) for each, some in others if any(found[at] is None for at in some)]
                if rest:
                    try:
                        ask(rest)
                    except _PartAwayError as exc:
                        away = exc  # this one's answers come nevertheless
                    except BaseException:
                        of.close()
                        raise
                for nth, at in enumerate(positions):
                    found[at] = of.asked_block(own, nth)
                    of.deadline.give_up_at = time.monotonic() + self._block_timeout_s  # for each of them

            self._ask(talk, timeout_s=self._block_timeout_s, introduce=True, part=part)
            if away is not None:
                raise away

        ask(list(parts.items()))

    def ask_block(
        self, ref: ObjectRef, number: int, span: tuple[int, int], dataset: str, snapshot: str
    ) -> AskedBlock | None:
        """Ask for a span of a block and do not wait for it. None where only `block` can ask: no connection that the
        daemon knows is free."""
        try:
            connection = self._idle.get()[self._part_of(ref)].pop()
        except IndexError:
            return None
        if not connection.introduced:
            self._keep(connection)
            return None
        connection.deadline.give_up_at = time.monotonic() + self._block_timeout_s
        request = BlocksRequest([(ref, number)], dataset, snapshot, Mode.READ, [span])
        try:
            return AskedBlock(connection, request, self._is_silent, self._keep, self._tell_again)
        except (OSError, DatacacheError):
            connection.close()
            return None

    def health(self) -> dict[str, Any]:
        """Return the daemon's process, settings and problems."""
        return self._look_at("health")

    def cache_status(self) -> dict[str, Any]:
        """Return tiers, data sets, pins, hit rate and jobs."""
        return self._look_at("cache")

    def warm(self, ref: str) -> str:
        """Start fetching all of a snapshot; return the job's id."""
        return str(self._call("warm", {"ref": ref}, introduce=True)["id"])

    def job(self, id: str) -> dict[str, Any]:
        """Return the progress of a warm-up (`WarmJob`)."""
        return self._look_at("job", {"id": id})

    def jobs(self) -> list[dict[str, Any]]:
        """Return the warm-ups of the daemon's life, newest last (`WarmJob`)."""
        return list(self._look_at("jobs")["jobs"])

    def silent_stores(self) -> list[dict[str, Any]]:
        """Return the stores that do not answer the daemon: url, silent_s, problem."""
        return list(self._look_at("jobs").get("silent_stores", []))

    def cancel(self, id: str) -> dict[str, Any]:
        """Have a warm-up end soon; return the job. `SnapshotNotFoundError` if there is no such job."""
        return self._call("cancel", {"id": id})

    def pin(self, ref: str) -> dict[str, Any]:
        """Keep a snapshot's blocks from being evicted."""
        return self._call("pin", {"ref": ref})

    def unpin(self, ref: str) -> dict[str, Any]:
        """Let the policy evict a snapshot's blocks again."""
        return self._call("unpin", {"ref": ref})

    def set_tenants(self, limits: Mapping[str, int | None] | None, users: Mapping[str, Sequence[str]]) -> bool:
        """Say how many bytes of the node's cache namespaces may have (`*`: all others; None instead of all: as before),
        and which of them have which data sets mounted. What those above their limits have too much is evicted by then.
        Return whether that is anything new."""
        return bool(self._call("tenants", {"limits": limits, "users": users})["changed"])

    def evict(self, ref: str | None = None) -> dict[str, Any]:
        """Drop a data set's blocks, or all blocks that are not pinned."""
        return self._call("evict", {"ref": ref})

    def hold_mounts(self) -> int:
        """Have garbage collection leave alone what this home has mounted now; return the number of mounts. Raises the
        catalog's errors."""
        return int(self._look_at("mounts")["mounts"])

    def lookahead(self, header: PlanHeader, items: Callable[[], Iterable[bytes]]) -> dict[str, Any]:
        """Publish an order (`loaders.lookahead`). `items()` gives its items from the beginning."""
        head = header.encode()

        def send(connection: _Connection) -> dict[str, Any]:
            answer: dict[str, Any] = json.loads(
                bytes(connection.upload("lookahead", len(head) + header.body_bytes, itertools.chain([head], items())))
            )
            return answer

        return self._ask(send, timeout_s=_ORDER_TIMEOUT_S, introduce=True)

    def cluster(self, *, look: bool = False) -> dict[str, Any]:
        """Return the members of this node's cluster (`Peers.describe`), after a `look` at them if that is asked for.
        `UsageError` if it is in none."""
        return self._look_at("look" if look else "cluster")

    def drain(self, node: str = "") -> dict[str, Any]:
        """Have a node own no blocks any more; '' is this one. `UsageError` if the cluster has none of this name."""
        return self._call("drain", {"node": node})

    def metrics(self, *, names: bool = False) -> str:
        """Return the metrics as Prometheus text; with `names` also by data set and namespace."""
        fields = b'{"names": "yes"}' if names else b""
        return bytes(self._ask(lambda of: of.call("metrics", fields), timeout_s=_LOOK_TIMEOUT_S)).decode()

    def stop(self) -> None:
        """Stop the daemon and wait until it is gone. `DaemonSilentError` names the process of one that does not
        answer."""
        pid = int(self._call("stop", start=False)["pid"])
        end = time.monotonic() + _STOP_TIMEOUT_S
        while stat_of(pid)[:1] not in ([], ["Z"]):
            if time.monotonic() > end:
                raise DaemonError(f"the daemon (pid {pid}) does not stop", hint=f"kill -9 {pid}")
            time.sleep(0.02)

    def alive(self) -> bool:
        """Tell whether a daemon answers now; none is started."""
        if self._pulse.get().silent_s() is not None:
            return False
        try:
            self._once(lambda of: of.ask("health"), _ALIVE_TIMEOUT_S)
        except FrameError:  # one of another version, which the next question names
            return True
        except OSError:
            return False
        return True

    def beats(self) -> bool:
        """Tell by its pulse whether a daemon can answer, without asking it."""
        return self._pulse.get().beats()

    def opens(self) -> bool:
        """Tell whether a daemon is about to serve, such as one that rebuilds its index: it shows no pulse yet, and its
        keeper answers."""
        return self._pulse.get().silent_s() is None and keeper_answers(self._settings.home, _ALIVE_TIMEOUT_S)

    def silence(self) -> DaemonSilentError | None:
        """Return the error for a daemon that lives and is silent; None if there is none, or if it answers."""
        silent_s = self._pulse.get().silent_s()
        if silent_s is None:
            return None
        pid = self._pid()
        if stat_of(pid)[:1] == ["T"]:
            hint = f"It is stopped. Let it go on: kill -CONT {pid}."
        else:
            hint = f"It waits for a processor or a disk, or it hangs. If it does not come back, end it: kill -9 {pid}."
        return DaemonSilentError(
            f"the cache daemon of {self._settings.home} (pid {pid}) has not answered for {silent_s:.0f} s",
            hint=f"{hint} Its log: {paths.log_path(self._settings.home)}",
        )

    def _is_silent(self) -> bool:
        return self._pulse.get().silent_s() is not None

    def _pid(self) -> str:
        with contextlib.suppress(OSError):
            return paths.lock_path(self._settings.home).read_text(errors="replace").strip()
        return "unknown"

    def start_soon(self) -> None:
        """Start the daemon unless one is there, without waiting for it. Does nothing if something else starts it."""
        self._process.start_soon(self._answers)

    def ensure(self, *, fresh: bool = True) -> None:
        """See that a daemon answers (`DaemonProcess.ensure`). `DaemonSilentError` for one that is there and does
        not."""
        self._process.ensure(self._answers, fresh=fresh)

    def _answers(self) -> bool:
        self._expect_no_silence()
        return self.alive()

    def _look(self) -> None:
        if self._pulse.get().late():
            self._prepare()
        self._expect_no_silence()

    def _expect_no_silence(self) -> None:
        silence = self.silence()
        if silence is not None:
            raise silence

    def _look_at(self, op: str, fields: object = None) -> dict[str, Any]:
        return self._call(op, fields, timeout_s=_LOOK_TIMEOUT_S)

    def _call(
        self, op: str, fields: object = None, *, timeout_s: float = _ORDER_TIMEOUT_S, **more: bool
    ) -> dict[str, Any]:
        return self._ask(lambda of: of.ask(op, fields), timeout_s=timeout_s, **more)

    def _ask(
        self,
        talk: Callable[[_Connection], T],
        *,
        timeout_s: float,
        start: bool = True,
        introduce: bool = False,
        part: int = 0,
    ) -> T:
        """Ask again, and start the daemon again, while the daemon is away. `DaemonSilentError` as soon as it is silent.
        `talk` asks over a connection. With `introduce` the daemon is told first how this process reaches stores: for
        requests that make it ask them. A question that only looks changes nothing for others."""
        end = time.monotonic() + timeout_s
        delay = 0.01
        while True:
            self._expect_no_silence()
            try:
                return self._once(talk, max(0.0, end - time.monotonic()), introduce=introduce, part=part)
            except OSError as exc:
                if isinstance(exc, DatacacheError):
                    raise
                if isinstance(exc, FrameError):
                    raise DaemonUnavailableError(
                        f"the cache daemon of {self._settings.home} is of another version: {exc}",
                        hint=f"Stop it: kill {self._pid()}. The next read starts another.",
                    ) from exc
                if not start or time.monotonic() > end:
                    raise DaemonUnavailableError(
                        f"no daemon answers for {self._settings.home}", hint="Start one: dsctl daemon start"
                    ) from exc
            time.sleep(random.uniform(0, delay))
            delay = min(2 * delay, 0.5)
            self.ensure(fresh=False)
            if part:
                raise _PartAwayError

    def _introduction(self) -> dict[str, Any] | None:
        """Return the variables to tell a daemon; None if something else runs it, or none is set."""
        variables = told_variables(os.environ) if self._settings.daemon != "external" else None
        return {"variables": variables} if variables else None

    def _introduce(self, connection: _Connection) -> None:
        connection.introduced = True
        body = self._introduction()
        if body is None:
            return
        try:
            changed = connection.ask("environment", body)["changed"]
        except DatacacheError:  # of another version, say
            return
        ours = [name for name in changed if name in body["variables"]]
        others = [name for name in changed if name not in body["variables"]]
        words = [f"with the {', '.join(ours)} of this shell"] if ours else []
        words += [f"without {', '.join(others)} (not set in this shell)"] if others else []
        if words and not connection.part:
            log.warning("the daemon reaches stores %s from now on", " and ".join(words))

    def _part_of(self, ref: ObjectRef) -> int:
        if not self._part_count:
            try:
                self._part_count = int(paths.parts_path(self._settings.home).read_text())
            except (OSError, ValueError):
                self._part_count = 1
        return part_of(object_id(ref), self._part_count) if self._part_count > 1 else 0

    def _once(self, talk: Callable[[_Connection], T], timeout_s: float, *, introduce: bool = False, part: int = 0) -> T:
        idle = self._idle.get()[part]
        try:
            connection = idle.pop()
        except IndexError:
            # Through a weak reference: a client that nobody holds hangs up at once, and not when garbage is collected.
            watch = functools.partial(DaemonClient._look, weakref.proxy(self))
            self._part_count = 0  # perhaps this is another daemon
            connection = _Connection(self._settings.home, watch, part)
        connection.deadline.give_up_at = time.monotonic() + timeout_s
        try:
            if introduce and not connection.introduced:
                self._introduce(connection)
            answer = talk(connection)
        except BaseException as exc:
            if isinstance(exc, DatacacheError) and not (isinstance(exc, DaemonSilentError) or connection.closed):
                self._keep(connection)
            else:
                connection.close()  # an answer may be on its way still
                while idle:  # the daemon they lead to is away
                    idle.pop().close()
            raise
        self._keep(connection)
        return answer

    def _keep(self, connection: _Connection) -> None:
        idle = self._idle.get()[connection.part]
        if len(idle) < _MOST_IDLE:
            idle.append(connection)
        else:
            connection.close()


def import_store_clients() -> None:
    """Import the clients of stores ahead of their first use, which takes some tenths of a second."""
    for name in ("botocore.session", "obstore.store", "datacache.store.s3.store"):
        importlib.import_module(name)
