"""The process that keeps the mounts of a pool alive: it holds their descriptors, starts workers and starts them again.

Run by `__main__`. It answers no request of the kernel, so that there is little in it to fail: it may not import the
reader or the catalog (workers do, after the fork). One thread; it forks, so it must never start another. It waits for
nobody: whoever wants something mounted (`pool`) mounts it, and hands the descriptor over.

    {"op": "hello"}                              its process id
    {"op": "open", "config": …}                  a worker opens the snapshot: facts about it
    {"op": "serve", "config": …, "former": …}    with the descriptor: serve it from now on, after another one

Who is killed, and what becomes of the requests that a worker had read: ../CONCURRENCY.md. Where cloning is refused
on a kernel before 6.9, what a dead worker had read is not to be told from the rest, and hangs until the mount is ended.

Of workers that die one after another, one that was killed (SIGKILL) is replaced at once. One that ends by itself is
started again with a growing delay, and after `_CRASHES_TO_BYPASS` of these with the node's local tiers bypassed: a
broken disk under a mapped region is the likely reason. All mounts of a pool have the same tiers. A worker that cannot
open a snapshot again is told to try again after growing pauses, for this mount alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NoReturn

from datacache.core import ipc
from datacache.core.boot import born
from datacache.core.breaker import pause_s
from datacache.core.ipc import parse_object
from fuse_mount.kernel import session
from fuse_mount.lifecycle import process
from fuse_mount.lifecycle.mounted import Mounted, WorkerQueue
from fuse_mount.lifecycle.pool import Pool, worker_socket
from fuse_mount.lifecycle.state import Failure, MountConfig, MountInfo
from fuse_mount.snapshot import worker_process

_OPEN_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
_CRASHES_TO_BYPASS = 4
_CALM_S = 30.0
"""A worker that served this long was no part of a crash loop."""
_FIRST_DELAY_S = 0.2
"""From the second crash on: the first one may have been the only one."""
_MAX_DELAY_S = 5.0
_KILLED_EARLY_S = 0.05
_MOST_BYTES = 2**20
_MOST_FDS = 4

_log = logging.getLogger("fuse_mount")


@dataclass(kw_only=True)
class _Slot:
    """The place of one worker process."""

    number: int
    pid: int = 0
    channel: socket.socket | None = None
    unsent: deque[tuple[bytes, list[int]]] = field(default_factory=deque)
    opened: bool = False
    """True once it has come to serve anything."""
    since: float = 0.0
    due: float | None = None
    """When to start the next worker, if none runs."""


@dataclass(kw_only=True, eq=False)
class _Client:
    """A caller that wants something mounted."""

    lines: ipc.Lines
    mounted: Mounted | None = None
    """The mount that was opened for it and is not served yet."""


class Supervisor:
    """A pool's supervisor. `serve()` returns when it has no mounts any more."""

    def __init__(self, pool: Pool, workers: int, first: socket.socket, *, alone: bool) -> None:
        """`first` is the connection of who started it. `alone`: nobody else joins, and it has no log."""
        self._pool = pool
        self._alone = alone
        self._slots = [_Slot(number=number) for number in range(workers)]
        self._mounts: dict[int, Mounted] = {}
        self._numbers = 0
        self._clients: list[_Client] = []
        self._crashes = 0
        self._bypass = False
        self._stopping = False
        self._born = born(os.getpid())
        self._signals = process.Signals(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        process.raise_open_files()  # each mount takes some
        self._listener: socket.socket | None = None
        self._inode = 0
        if not alone:
            self._listener = ipc.listen(pool.socket, backlog=128)
            self._listener.setblocking(False)
            self._inode = os.stat(pool.socket).st_ino
        for path in worker_socket(pool.home, pool.id, 0).parent.glob(f"worker-{pool.id}-*.sock"):
            if not born(int(path.stem.rpartition("-")[2])):  # it was killed
                path.unlink(missing_ok=True)
        self._add_client(first)

    def _facts(self) -> dict[str, Any]:
        own = {"pid": os.getpid(), "born": self._born, "pool": self._pool.id, "log": self._pool.log}
        return own | {"workers": tuple(slot.pid for slot in self._slots if slot.pid), "bypassed": self._bypass}

    # --- the loop -------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Keep the mounts alive until there is none and nobody wants one."""
        while not self._is_over():
            self._start_what_is_due()
            if not self._mounts and not self._clients:
                continue
            readable = self._wait()
            if self._signals.fd in readable:
                self._on_signals()
            for slot in self._slots:
                if slot.channel is not None and slot.unsent:
                    self._flush(slot)
                if slot.channel is not None and slot.channel.fileno() in readable:
                    self._hear_worker(slot)
            for mounted in list(self._mounts.values()):
                mounted.do_what_is_due(readable)
                self._wind_up(mounted)
            if self._listener is not None and self._listener.fileno() in readable:
                self._accept()
            for client in list(self._clients):
                if client.lines.connection.fileno() in readable:
                    self._hear_client(client)
        self._end()

    def _is_over(self) -> bool:
        if self._mounts or (self._clients and not self._stopping):
            return False
        if self._listener is None:
            return True
        with self._pool.locked(wait=False) as mine:
            if not mine:  # somebody looks whether there is a supervisor: it may want this one
                process.readable(self._listener.fileno(), 0.01)
                self._accept()
                return False
            if self._accept() and not self._stopping:
                return False
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._pool.socket).st_ino == self._inode:
                    self._pool.socket.unlink()
            self._listener.close()
            return True

    def _wait(self) -> set[int]:
        reading, writing = {self._signals.fd}, set[int]()
        times = [slot.due for slot in self._slots if slot.due is not None and not slot.pid]
        if self._listener is not None:
            reading.add(self._listener.fileno())
        reading |= {client.lines.connection.fileno() for client in self._clients}
        for slot in self._slots:
            if slot.channel is not None:
                reading.add(slot.channel.fileno())
                if slot.unsent:
                    writing.add(slot.channel.fileno())
        for mounted in self._mounts.values():
            mounted.want(reading, writing, times)
        return process.wait_for_any(reading, writing, times)

    def _on_signals(self) -> None:
        numbers = self._signals.received()
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self._stopping = not any(mounted.main >= 0 for mounted in self._mounts.values())
            for mounted in self._mounts.values():
                if mounted.main < 0:
                    mounted.ended = True
                elif not mounted.leaving:
                    mounted.unmounts.append(session.Unmounting(mounted.config.mountpoint))
        self._reap()

    def _start_what_is_due(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.due is None or slot.due > now or slot.pid:
                continue
            for mounted in list(self._mounts.values()):  # one may have vanished while no worker was there to see it
                if not mounted.leaving and mounted.is_gone():
                    mounted.ended = True
                    self._wind_up(mounted)
            if any(not mounted.leaving for mounted in self._mounts.values()):
                self._spawn(slot)
        for mounted in list(self._mounts.values()):
            if mounted.main < 0 and mounted.open_until <= now:
                self._refuse(mounted, f"{mounted.config.ref} was not opened in {_OPEN_TIMEOUT_S:.0f} s")
            for slot, queue in zip(self._slots, mounted.queues, strict=True):
                if queue.due is None or queue.due > now or mounted.leaving:
                    continue
                queue.due = None
                if mounted.is_gone():
                    mounted.ended = True
                elif slot.pid:
                    self._open(slot, mounted)
            self._wind_up(mounted)

    # --- who wants something mounted ---------------------------------------------------------------------------

    def _accept(self) -> bool:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it went away, or there is no descriptor left for it
            return False
        self._add_client(connection)
        return True

    def _add_client(self, connection: socket.socket) -> None:
        lines = ipc.Lines(connection, most_bytes=_MOST_BYTES, most_fds=_MOST_FDS)
        self._clients.append(_Client(lines=lines))

    def _hear_client(self, client: _Client) -> None:
        lines = client.lines.receive()
        if lines is None:
            self._lose_client(client)
            return
        for line in lines:
            if client not in self._clients:
                return
            try:
                self._answer_client(client, parse_object(line))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
                _log.warning("somebody who wants a mount is hung up on: %s", exc)
                self._lose_client(client)
        if client in self._clients:
            client.lines.connection.setblocking(False)  # an answer has set a timeout

    def _answer_client(self, client: _Client, request: ipc.Message) -> None:
        operation = request["op"]
        if operation == "hello":
            ipc.send(client.lines.connection, {"ok": {"pid": os.getpid()}})
        elif operation == "open":
            if client.mounted is not None:
                raise ValueError("it has opened one already")
            self._numbers += 1
            mounted = Mounted(self._numbers, MountConfig.from_dict(request["config"]), len(self._slots), self._facts)
            mounted.open_until = time.monotonic() + _OPEN_TIMEOUT_S
            client.mounted = self._mounts[mounted.number] = mounted
            living = [slot for slot in self._slots if slot.pid]
            if living:  # another one for each mount, since opening takes the processor
                self._open(living[mounted.number % len(living)], mounted)
            else:
                self._spawn(self._slots[0])
        elif operation == "serve":
            if client.mounted is None or not client.mounted.snapshot or not client.lines.fds:
                raise ValueError("nothing is opened, or the descriptor is missing")
            mounted = client.mounted
            former = MountInfo.from_dict(request["former"]) if "former" in request else None
            mounted.begin(MountConfig.from_dict(request["config"]), client.lines.fds.pop(0), former)
            for slot, queue in zip(self._slots, mounted.queues, strict=True):
                if queue.phase == "opened":
                    self._serve_from(slot, mounted)
                elif slot.pid:
                    self._open(slot, mounted)
                elif slot.due is None:  # the first mount has one worker until it is opened
                    self._spawn(slot)
            client.mounted = None  # until here it is let go with the client, whatever fails
            ipc.send(client.lines.connection, {"ok": mounted.info().to_dict()})
        else:
            ipc.send(client.lines.connection, {"error": f"unknown operation {operation!r}", "hint": ""})

    def _answer_opening(self, mounted: Mounted, answer: ipc.Message) -> None:
        for client in [client for client in self._clients if client.mounted is mounted]:
            if "error" in answer:
                client.mounted = None
            try:
                ipc.send(client.lines.connection, answer)
                client.lines.connection.setblocking(False)
            except OSError:
                self._lose_client(client)

    def _refuse(self, mounted: Mounted, error: str, hint: str = "") -> None:
        self._answer_opening(mounted, {"error": error, "hint": hint})
        mounted.ended = True

    def _lose_client(self, client: _Client) -> None:
        self._clients.remove(client)
        client.lines.close()
        if client.mounted is not None:  # it was opened and is not mounted
            client.mounted.ended = True
            self._wind_up(client.mounted)

    # --- workers --------------------------------------------------------------------------------------------

    def _spawn(self, slot: _Slot) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        bypass, pool = self._bypass, self._pool
        pid = os.fork()
        if pid == 0:
            _become_worker(theirs, pool, bypass=bypass)
        theirs.close()
        ours.setblocking(False)
        slot.pid, slot.channel, slot.opened = pid, ours, False
        slot.unsent.clear()
        slot.since, slot.due = time.monotonic(), None
        for mounted in self._mounts.values():
            queue = mounted.queues[slot.number]
            if not mounted.leaving and (
                mounted.main >= 0 or not any(other.phase != "idle" for other in mounted.queues)
            ):
                queue.due = None
                self._open(slot, mounted)
            if mounted.main >= 0 and not mounted.leaving:
                mounted.note()

    def _open(self, slot: _Slot, mounted: Mounted) -> None:
        if not slot.pid:  # it is opened by the next one
            if slot.due is None:
                slot.due = time.monotonic()
            return
        mounted.queues[slot.number].phase = "opening"
        self._order(slot, {"op": "open", "mount": mounted.number, "config": mounted.config.to_dict()})

    def _serve_from(self, slot: _Slot, mounted: Mounted) -> None:
        queue = mounted.queues[slot.number]
        os.set_blocking(queue.fd, True)
        slot.opened = True
        queue.phase = "serving"
        order = {"op": "serve", "mount": mounted.number, "device": mounted.device, "own": queue.own_queue}
        self._order(slot, order | {"passed": mounted.config.passed}, [os.dup(queue.fd)])

    def _stop(self, slot: _Slot, mounted: Mounted) -> None:
        mounted.queues[slot.number].phase = "stopping"
        self._order(slot, {"op": "stop", "mount": mounted.number})

    def _order(self, slot: _Slot, message: dict[str, Any], fds: list[int] | None = None) -> None:
        slot.unsent.append((json.dumps(message).encode(), fds or []))
        self._flush(slot)

    def _flush(self, slot: _Slot) -> None:
        while slot.channel is not None and slot.unsent:
            data, fds = slot.unsent[0]
            try:
                socket.send_fds(slot.channel, [data], fds)
            except BlockingIOError:
                return
            except OSError:  # it died; SIGCHLD tells
                pass
            slot.unsent.popleft()
            ipc.close_all(fds)

    def _hear_worker(self, slot: _Slot) -> None:
        assert slot.channel is not None
        while True:
            try:
                data = slot.channel.recv(worker_process.MOST_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:  # it has ended with something unread; what it said before is still to come
                continue
            except OSError:
                data = b""
            if not data:
                slot.channel.close()
                slot.channel = None
                return
            message = json.loads(data)
            mounted = self._mounts.get(int(message["mount"]))
            if mounted is not None:
                self._on_word(slot, mounted, message)
            elif "opened" in message:  # it took so long that the mount has gone meanwhile
                self._order(slot, {"op": "stop", "mount": message["mount"]})

    def _on_word(self, slot: _Slot, mounted: Mounted, message: dict[str, Any]) -> None:
        queue = mounted.queues[slot.number]
        if "failure" in message:
            mounted.failed(Failure.from_dict(message["failure"]))
        elif "opened" in message:
            queue.phase, queue.failures = "opened", 0
            mounted.snapshot = message["opened"]
            if mounted.leaving:
                self._stop(slot, mounted)
            elif mounted.main < 0:
                self._answer_opening(mounted, {"ok": mounted.snapshot})
            else:
                self._serve_from(slot, mounted)
        elif "error" in message:
            queue.phase = "idle"
            if mounted.main < 0:
                self._refuse(mounted, message["error"], message["hint"])
            else:
                self._again(queue)
        elif "ended" in message:
            was, queue.phase = queue.phase, "idle"
            if message["ended"] == "unmounted":
                mounted.ended = True
            elif message["ended"] == "failed":
                mounted.recover(queue)
                self._again(queue)
            elif was != "stopping" and not mounted.leaving:  # whoever took it over has told it to stop
                mounted.note()
                queue.due = time.monotonic()
        self._wind_up(mounted)

    def _again(self, queue: WorkerQueue) -> None:
        queue.failures += 1
        queue.due = time.monotonic() + pause_s(queue.failures, first_s=_FIRST_DELAY_S, longest_s=_MAX_DELAY_S)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            slot = next((slot for slot in self._slots if slot.pid == pid), None)
            if slot is not None:
                self._lost(slot, os.waitstatus_to_exitcode(status))

    def _lost(self, slot: _Slot, code: int) -> None:
        if slot.channel is not None:  # what it said before
            self._hear_worker(slot)
        pid, slot.pid = slot.pid, 0
        if slot.channel is not None:
            slot.channel.close()
            slot.channel = None
        for _, fds in slot.unsent:
            ipc.close_all(fds)
        slot.unsent.clear()
        worker_socket(self._pool.home, self._pool.id, pid).unlink(missing_ok=True)
        stopped = code == worker_process.EXIT_STOPPED
        if not stopped:
            _log.warning("worker %d ended with %s", pid, signal.Signals(-code).name if code < 0 else code)
        for mounted in list(self._mounts.values()):
            self._without(slot, mounted, recover=not stopped)
        now = time.monotonic()
        if stopped:
            slot.due = now
        elif code == -signal.SIGKILL:  # by somebody, or for want of memory: its successor has no reason to fail
            slot.due = now if slot.opened else now + _KILLED_EARLY_S
        else:
            self._crashes = 1 if now - slot.since > _CALM_S else self._crashes + 1
            if self._crashes >= _CRASHES_TO_BYPASS and not self._bypass:
                self._bypass = True
                _log.error("workers keep failing; from here on nothing that lies on this node is used")
            slot.due = now + pause_s(self._crashes - 1, first_s=_FIRST_DELAY_S, longest_s=_MAX_DELAY_S)

    def _without(self, slot: _Slot, mounted: Mounted, *, recover: bool) -> None:
        """See to a mount whose worker has died."""
        queue = mounted.queues[slot.number]
        was, queue.phase, queue.due = queue.phase, "idle", None
        if mounted.main < 0 and was in ("opening", "opened"):
            self._refuse(mounted, "the worker died" + process.see_log(None if self._alone else self._pool.log))
        elif mounted.is_gone():
            mounted.ended = True
        elif recover and mounted.main >= 0:
            mounted.recover(queue)
        self._wind_up(mounted)

    # --- ends -----------------------------------------------------------------------------------------------

    def _wind_up(self, mounted: Mounted) -> None:
        """Have the workers stop serving what is unmounted or handed over, and finish when they have."""
        if not mounted.leaving or mounted.number not in self._mounts:
            return
        now = time.monotonic()
        if mounted.deadline is None:
            mounted.deadline = now + _END_TIMEOUT_S
            mounted.hang_up()
            for client in self._clients:
                if client.mounted is mounted:
                    client.mounted = None
        for slot, queue in zip(self._slots, mounted.queues, strict=True):
            queue.due = None
            if queue.phase in ("serving", "opened"):
                self._stop(slot, mounted)
        if now < mounted.deadline and any(queue.phase == "stopping" for queue in mounted.queues):
            return
        del self._mounts[mounted.number]
        mounted.finish()

    def _end(self) -> None:
        """Nothing is served here any more: end the workers, whatever they wait for."""
        for client in list(self._clients):
            self._lose_client(client)
        for slot in self._slots:
            if slot.pid:
                os.kill(slot.pid, signal.SIGKILL)
        for slot in self._slots:
            if slot.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(slot.pid, 0)
                worker_socket(self._pool.home, self._pool.id, slot.pid).unlink(missing_ok=True)


def _become_worker(channel: socket.socket, pool: Pool, *, bypass: bool) -> NoReturn:
    """Give back, in the child, everything of the parent's but the one socket and the standard streams.

    The clones above all: while any process has a copy, closing one does not abort its requests."""
    signal.set_wakeup_fd(-1)
    kept = channel.fileno()
    most = os.sysconf("SC_OPEN_MAX")
    os.closerange(3, kept)
    os.closerange(kept + 1, most if most < 1 << 16 else 1 << 16)
    worker_process.run(channel, pool, bypass=bypass)
