"""The process that keeps a mount alive: it holds the descriptors, starts workers and starts them again.

Run by `__main__`. It stays tiny and answers no request, so that there is little in it to fail: it may not
import the reader or the catalog (workers do, after the fork). One thread; it forks, so it must never start
another.

**A worker dies.** The requests it had read are unanswered, and their readers wait.
- Linux 6.9 and newer: `FUSE_NOTIFY_RESEND` queues them again at once and the other workers, or the next one,
  answer. No reader notices.
- Older kernels: they would wait for ever, so they are *aborted*: the supervisor closes the dead worker's
  clone of /dev/fuse, of which it holds the only other copy, and the kernel ends those requests with an error
  (ECONNABORTED); requests not yet read by any worker are served by the next.
- Older kernels where cloning is refused, too: all workers share one descriptor, and what a dead worker had
  read is not to be told from the rest. Those readers wait until the mount is ended; the log says so.

**Workers die one after another.** One that was killed (SIGKILL) is replaced at once. One that ends by
itself is started again with a growing delay, and after `_CRASHES_TO_BYPASS` of these with the node's local
tiers bypassed: a broken disk under a mapped region is the likely reason.

**The supervisor is killed.** Workers hold the mount and keep serving. One starts a new supervisor, which gets
the descriptor from a worker (`pidfd_getfd(2)`, Linux 5.6) and the rest from the state file. Where that fails
the mount works on, without anybody to restart a worker.

**All are killed at once** (a container). The keeper in the cache daemon holds copies of the descriptors (`keeping`),
notices that the supervisor's line to it has ended, and starts a new one, which has the kernel send again what the
dead workers had read. Readers wait meanwhile.

**Hand-over** (an upgrade): a new supervisor connects to the control socket, gets the descriptor (SCM_RIGHTS)
and the config, starts its workers, and only then tells the old one to finish: the old workers answer all they
had read and end.

**Leaving** (the mount host is told to end): as a hand-over, to whoever the keeper starts. Refused while the keeper
does not hold the descriptor.

**The mount vanishes** (umount by hand): reading the device gives ENODEV, workers end with 0, and so does all
the rest. Whoever is about to start a worker looks as well, since one that cannot open the snapshot reads nothing.

**Two supervisors** of one mount: the state says who came last, and the other one hands over as soon as it looks. Where
a mount was detached lazily and another one made in its place, the former is only served to its end: state, control
socket and the keeper are the latter's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from datacache.core.errors import MountError
from datacache.core.pauses import pause_s
from datacache.daemon.keeper import is_connected
from fuse_mount import process, session, worker
from fuse_mount.callers import Callers
from fuse_mount.control import Request, receive, reply
from fuse_mount.keeping import KeeperLine
from fuse_mount.orphans import adopt
from fuse_mount.state import MountConfig, MountFiles, MountInfo

_OPEN_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
_CRASHES_TO_BYPASS = 4
_CALM_S = 30.0
"""A worker that served this long was no part of a crash loop."""
_FIRST_DELAY_S = 0.2
"""From the second crash on: the first one may have been the only one."""
_MAX_DELAY_S = 5.0
_KILLED_EARLY_S = 0.05
_LOOK_EVERY_S = 0.5

_log = logging.getLogger("fuse_mount")

Report = Callable[[dict[str, Any]], None]


@dataclass(kw_only=True)
class _Slot:
    """One worker's place: its descriptor outlives the process in it."""

    fd: int
    own_queue: bool
    """Whether `fd` is a clone of its own, or the one all share."""
    pid: int = 0
    channel: socket.socket | None = None
    opened: bool = False
    since: float = 0.0
    due: float | None = None
    """When to start the next worker, if none runs."""
    pending: bytes = field(default=b"")


class Supervisor:
    """One mount. `serve()` returns when it is gone or was handed over."""

    def __init__(self, config: MountConfig) -> None:
        self._config = config
        self._files = MountFiles(config.home, config.mountpoint)
        self._main = -1
        self._slots: list[_Slot] = []
        self._callers: Callers | None = None
        self._line: KeeperLine | None = None
        self._serving_since = 0.0
        self._facts: dict[str, Any] = {}
        self._device = 0
        self._started_at = time.time()
        self._crashes = 0
        self._unmounts: list[tuple[session.Unmounting, socket.socket | None]] = []
        """Asked for and not done yet, by a signal or over a connection, which is answered."""
        self._bypass = False
        self._ended = False
        self._handed_over = False
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _note_signal)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    # --- starting -------------------------------------------------------------------------------------------

    def start(self, report: Report) -> None:
        """Open the snapshot in a first worker, mount, and start the others. Raises `MountError` with nothing
        left over.
        """
        session.check_mountpoint(self._config.mountpoint)
        session.check_device()
        first = _Slot(fd=-1, own_queue=False)
        try:
            self._spawn(first)
            self._facts = self._wait_opened(first)
            self._pin()
            self._main = session.mount(self._config, f"datacache:{self._short_ref()}")
            self._make_slots(first)
        except BaseException:
            if first.pid:
                os.kill(first.pid, signal.SIGKILL)
            raise
        self._begin()
        report({"ok": self._info().to_dict()})

    def take_over(self, report: Report, *, only_if_dead: bool) -> bool:
        """Get the mount from its running supervisor, or from workers whose supervisor is dead.

        Without workers, the keeper gives the descriptor. False where there is nothing to do (`only_if_dead` and it
        lives). Raises `MountError`; the old one serves on.
        """
        self._files.make_folder()
        with open(self._files.lock, "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._take_over(report, only_if_dead=only_if_dead)

    def _take_over(self, report: Report, *, only_if_dead: bool) -> bool:
        try:
            old: socket.socket | None = self._files.connect()
        except OSError:
            old = None
        if old is not None and only_if_dead:
            old.close()
            return False
        found = self._ask_for_it(old) if old is not None else None
        orphans: list[int] = []
        if found is not None:
            self._main, info = found
        else:
            old = None
            known = self._files.read()
            if known is None:
                raise MountError(f"no mount of this home is known at {self._config.mountpoint}")
            info = known
            self._main, orphans = adopt(info.workers, self._files, self._config.home)
        self._config = info.config
        self._started_at, self._device = info.started_at, info.device
        first = _Slot(fd=-1, own_queue=False)
        try:
            self._spawn(first)
            self._facts = self._wait_opened(first)
        except BaseException:
            if first.pid:
                os.kill(first.pid, signal.SIGKILL)
            raise
        self._make_slots(first)
        if old is not None:
            try:
                with self._files.connect() as connection:
                    reply(connection, {"op": "finish"})
                    receive(connection)
            except (OSError, ValueError):  # it was killed just now
                orphans = [pid for pid in info.workers if process.serves(pid, self._config.mountpoint)]
        self._begin()  # the state names the new workers before the old ones go
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):  # it died just now
                os.kill(pid, signal.SIGTERM)
        if self._config.resend:
            session.resend(self._main)  # what the old ones will not finish
        os.set_blocking(self._main, True)
        report({"ok": self._info().to_dict()})
        return True

    def _ask_for_it(self, old: socket.socket) -> tuple[int, MountInfo] | None:
        """Descriptor and state from the supervisor that serves; None if it ends meanwhile."""
        try:
            with old:
                reply(old, {"op": "takeover"})
                answer, fds = receive(old)
        except (OSError, ValueError):
            return None
        if "error" in answer or not fds:
            raise MountError(str(answer.get("error", "the supervisor did not hand its mount over")))
        return fds[0], MountInfo.from_dict(answer["ok"])

    def _pin(self) -> None:
        self._config = self._config.pinned(f"{self._facts['dataset']}@{self._facts['id']}")

    def _short_ref(self) -> str:
        return f"{self._facts['dataset']}@{self._facts['id'][:12]}"

    def _descriptors(self) -> list[int]:
        """What the keeper is to hold: the clones as well, since the kernel aborts what was read from one when its last
        copy is closed, and to have it sent again is what they are kept for.
        """
        clones = [slot.fd for slot in self._slots if slot.own_queue] if self._config.resend else []
        return [self._main, *clones]

    def _make_slots(self, first: _Slot) -> None:
        mount = session.mount_at(self._config.mountpoint)
        if mount is not None:
            self._device = mount.device
            session.set_readahead(mount.device)
        first.fd, first.own_queue = self._queue()
        self._slots = [first]
        self._serve_from(first)
        for _ in range(1, self._config.workers):
            fd, own = self._queue()
            self._slots.append(_Slot(fd=fd, own_queue=own))
            self._spawn(self._slots[-1])

    def _queue(self) -> tuple[int, bool]:
        fd = session.clone(self._main) if self._config.clone else None
        return (self._main, False) if fd is None else (fd, True)

    def _begin(self) -> None:
        self._files.make_folder()
        self._callers = Callers(self._files.listen())
        self._serving_since = time.time()
        arguments = ["--takeover", self._config.mountpoint, "--only-if-dead"]
        note = {"mountpoint": self._config.mountpoint, "ref": self._config.ref, "device": self._device}
        self._line = KeeperLine(
            self._config.home, self._files, arguments, note, self._descriptors(), is_mine=lambda: not self._successor()
        )
        self._write_state()
        _log.info("%s serves %s with %d workers", self._config.mountpoint, self._config.ref, len(self._slots))

    # --- workers --------------------------------------------------------------------------------------------

    def _spawn(self, slot: _Slot) -> None:
        ours, theirs = socket.socketpair()
        config, bypass = self._config, self._bypass
        pid = os.fork()
        if pid == 0:
            _become_worker(theirs, config, bypass=bypass)
        theirs.close()
        slot.pid, slot.channel, slot.opened, slot.pending = pid, ours, False, b""
        slot.since, slot.due = time.monotonic(), None

    def _wait_opened(self, slot: _Slot) -> dict[str, Any]:
        """Facts about the snapshot from the first worker, or its error as a `MountError`."""
        assert slot.channel is not None
        slot.channel.settimeout(_LOOK_EVERY_S)
        deadline = time.monotonic() + _OPEN_TIMEOUT_S
        text = b""
        while not text.endswith(b"\n"):
            try:
                part = slot.channel.recv(65536)
            except TimeoutError as exc:
                if self._is_gone():
                    raise MountError(f"{self._config.mountpoint} was unmounted meanwhile") from exc
                if time.monotonic() < deadline:
                    continue
                raise MountError(f"the snapshot {self._config.ref} was not opened in {_OPEN_TIMEOUT_S:.0f} s") from exc
            if not part:
                raise MountError(f"the first worker died; see {self._files.log}")
            text += part
        slot.channel.settimeout(None)
        message = json.loads(text)
        if "error" in message:
            raise MountError(message["error"], hint=message["hint"])
        facts: dict[str, Any] = message["ok"]
        return facts

    def _serve_from(self, slot: _Slot) -> None:
        assert slot.channel is not None
        os.set_blocking(slot.fd, True)
        slot.opened = True
        with contextlib.suppress(OSError):  # it died meanwhile; SIGCHLD tells
            socket.send_fds(slot.channel, [b"!"], [slot.fd])

    def _heard(self, slot: _Slot) -> None:
        """A worker says that it has opened the snapshot, or why not, or (EOF) nothing any more."""
        assert slot.channel is not None
        try:
            part = slot.channel.recv(65536)
        except ConnectionError:
            part = b""
        slot.pending += part
        if not part:
            slot.channel.close()
            slot.channel = None
        elif slot.pending.endswith(b"\n") and not slot.opened and "ok" in json.loads(slot.pending):
            self._serve_from(slot)

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
        pid, slot.pid = slot.pid, 0
        if slot.channel is not None:
            slot.channel.close()
            slot.channel = None
        if code == worker.EXIT_UNMOUNTED:
            self._ended = True
            return
        if code == worker.EXIT_STOPPED:
            slot.due = None if self._handed_over else time.monotonic()
            return
        _log.warning("worker %d ended with %s", pid, signal.Signals(-code).name if code < 0 else code)
        if self._is_gone():
            self._ended = True
            return
        self._recover(slot)
        if self._handed_over:
            return
        now = time.monotonic()
        if code == -signal.SIGKILL:  # by somebody, or for want of memory: its successor has no reason to fail
            slot.due = now if slot.opened else now + _KILLED_EARLY_S
            return
        self._crashes = 1 if now - slot.since > _CALM_S else self._crashes + 1
        if self._crashes >= _CRASHES_TO_BYPASS and not self._bypass:
            self._bypass = True
            _log.error("workers keep failing; from here on nothing that lies on this node is used")
        slot.due = now + pause_s(self._crashes - 1, first_s=_FIRST_DELAY_S, longest_s=_MAX_DELAY_S)

    def _recover(self, slot: _Slot) -> None:
        """See to the requests that a dead worker had read."""
        if self._config.resend and session.resend(self._main):
            return
        if not slot.own_queue:
            _log.error("requests that the dead worker had read hang until %s is unmounted", self._config.mountpoint)
            return
        os.close(slot.fd)
        slot.fd, slot.own_queue = self._queue()
        if self._config.resend:  # the kernel cannot, and aborts requests when the last copy of the clone is closed
            self._config = replace(self._config, resend=False)
            if self._line is not None:
                self._line.hand_over(self._descriptors())

    # --- the loop -------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Keep the mount alive until it is unmounted or handed over."""
        while not self._ended and not (self._handed_over and not any(slot.pid for slot in self._slots)):
            self._respawn()
            readable = self._wait()
            if self._wake in readable:
                self._on_signals()
            for slot in self._slots:
                if slot.channel is not None and slot.channel.fileno() in readable:
                    self._heard(slot)
            self._hear_callers(readable)
            self._unmount()
            self._talk_to_keeper()
        self._finish()

    def _talk_to_keeper(self) -> None:
        if self._line is None:
            return
        before = self._line.kept
        self._line.step()
        if self._line.kept != before and not self._handed_over:  # the state is another one's by then
            self._note()

    def _respawn(self) -> None:
        due = [slot for slot in self._slots if slot.due is not None and slot.due <= time.monotonic()]
        if not due:
            return
        if self._is_gone():
            self._ended = True
            return
        for slot in due:
            self._spawn(slot)
        self._note()

    def _wait(self) -> list[int]:
        fds = [self._wake] + [slot.channel.fileno() for slot in self._slots if slot.channel is not None]
        if self._callers is not None:
            fds += self._callers.fds()
        due = [slot.due for slot in self._slots if slot.due is not None]
        due += [unmounting.due for unmounting, _ in self._unmounts]
        heard, sent, again = self._line.wants() if self._line is not None else (None, None, None)
        if heard is not None:
            fds.append(heard)
        if again is not None:
            due.append(again)
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
        return select.select(fds, [] if sent is None else [sent], [], timeout_s)[0]

    def _on_signals(self) -> None:
        numbers = os.read(self._wake, 256)
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self._unmounts.append((session.Unmounting(self._config.mountpoint), None))
        self._reap()

    def _unmount(self) -> None:
        """Go on with the unmounts that were asked for."""
        for asked in list(self._unmounts):
            unmounting, connection = asked
            answer: Request = {"ok": None}
            try:
                if not self._ended and not unmounting.step():  # somebody else may be quicker
                    continue
            except MountError as exc:
                answer = {"error": exc.message, "hint": exc.hint}
                if connection is None:
                    _log.error("asked to end, but %s", exc)
            self._unmounts.remove(asked)
            if connection is not None:
                with connection, contextlib.suppress(OSError):  # it went away
                    reply(connection, answer)

    def _hear_callers(self, readable: list[int]) -> None:
        for connection, message in self._callers.heard(readable) if self._callers is not None else ():
            with connection:
                try:
                    self._answer(connection, message)
                except OSError as exc:
                    _log.warning("a request on the control socket failed: %s", exc)

    def _answer(self, connection: socket.socket, message: Request) -> None:
        operation = message.get("op")
        if operation == "status":
            reply(connection, {"ok": self._info().to_dict()})
        elif operation == "takeover":
            reply(connection, {"ok": self._info().to_dict()}, [self._main])
        elif operation == "finish":
            self._hand_over()
            reply(connection, {"ok": None})
        elif operation == "leave":
            if self._line is None or not self._line.kept:
                reply(connection, {"error": "nobody else keeps the descriptor", "hint": ""})
                return
            reply(connection, {"ok": None})
            self._hand_over()
        elif operation == "stop":
            unmounting = session.Unmounting(self._config.mountpoint, lazy=bool(message.get("lazy")))
            self._unmounts.append((unmounting, connection.dup()))
        else:
            reply(connection, {"error": f"unknown operation {operation!r}"})

    def _hand_over(self) -> None:
        self._handed_over = True
        self._stop_workers()

    def _stop_workers(self) -> None:
        if self._callers is not None:
            self._callers.close()
            self._callers = None
        for slot in self._slots:
            slot.due = None
            if slot.channel is not None and slot.opened:
                with contextlib.suppress(OSError):  # dead already
                    slot.channel.sendall(b"s")
            elif slot.pid:
                os.kill(slot.pid, signal.SIGKILL)  # it has no descriptor yet

    def _finish(self) -> None:
        """Wait for the workers, and remove the state unless another supervisor has it now."""
        deadline = time.monotonic() + _END_TIMEOUT_S
        for slot in self._slots:
            slot.due = None
            if slot.pid and not slot.opened:
                os.kill(slot.pid, signal.SIGKILL)
        while any(slot.pid for slot in self._slots):
            left = deadline - time.monotonic()
            if left <= 0:
                for slot in self._slots:
                    if slot.pid:
                        os.kill(slot.pid, signal.SIGKILL)
            if select.select([self._wake], [], [], max(left, 0.05))[0]:
                os.read(self._wake, 256)
            self._handed_over = True  # no successor for those that end now
            self._reap()
        if self._callers is not None:
            self._callers.close()
            if self._successor() is None:
                self._files.remove()
            if self._line is not None:
                self._line.release()
            _log.info("%s is unmounted", self._config.mountpoint)
        else:
            if self._line is not None:
                self._line.close()
            _log.info("%s is handed over", self._config.mountpoint)

    # --- state ----------------------------------------------------------------------------------------------

    def _info(self) -> MountInfo:
        return MountInfo(
            mountpoint=Path(self._config.mountpoint),
            ref=self._config.ref,
            dataset=self._facts["dataset"],
            snapshot_id=self._facts["id"],
            files=self._facts["files"],
            total_bytes=self._facts["total_bytes"],
            pid=os.getpid(),
            workers=tuple(slot.pid for slot in self._slots if slot.pid),
            device=self._device,
            log=self._files.log,
            started_at=self._started_at,
            serving_since=self._serving_since,
            bypassed=self._bypass,
            kept=self._line is not None and self._line.kept,
            config=self._config,
        )

    def _is_gone(self) -> bool:
        return self._main >= 0 and not is_connected(self._main)

    def _successor(self) -> MountInfo | None:
        """Whoever serves this mount, or another one in its place, since after this process began to."""
        known = self._files.read()
        if known is None or known.pid == os.getpid() or known.serving_since <= self._serving_since:
            return None
        return known if process.serves(known.pid, self._config.mountpoint) else None

    def _note(self) -> None:
        """Write down what has changed, unless the state is another one's."""
        successor = self._successor()
        if successor is None:
            self._write_state()
        elif successor.device == self._device:
            _log.warning("%s was taken over by %d meanwhile", self._config.mountpoint, successor.pid)
            self._hand_over()

    def _write_state(self) -> None:
        try:
            self._files.write(self._info())
        except OSError as exc:  # a full disk must not end a mount
            _log.warning("the state of the mount cannot be written: %s", exc)


def _become_worker(channel: socket.socket, config: MountConfig, *, bypass: bool) -> NoReturn:
    """In the child: give back everything of the parent's but the one socket and the standard streams.

    The clones above all: while any process has a copy, closing one does not abort its requests.
    """
    signal.set_wakeup_fd(-1)
    kept = channel.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
    worker.run(channel, config, bypass=bypass)


def _note_signal(_number: int, _frame: object) -> None:
    """Signals act through the wake-up descriptor; a handler only has to be there."""


def set_up_logging() -> None:
    """Log lines to stderr, which is the mount's log file unless it runs in the foreground."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s"
    )
