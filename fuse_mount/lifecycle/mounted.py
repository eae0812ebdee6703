"""One mount in its pool's supervisor: descriptors, control socket, line to the keeper, state.

Used by `supervisor`, in its one thread. Nothing here waits.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datacache.core import ipc
from datacache.core.boot import boot_id
from datacache.core.errors import MountError
from datacache.daemon.keeper import is_connected
from fuse_mount.kernel import session
from fuse_mount.lifecycle import process
from fuse_mount.lifecycle.keeping import KeeperLine
from fuse_mount.lifecycle.state import Failure, MountConfig, MountFiles, MountInfo, with_failure

_MOST_CALLERS = 32
"""Connections on the control socket that have not sent a whole request yet."""
_MOST_REQUEST_BYTES = 2**16
_NOTE_EVERY_S = 1.0
"""The least time between two writes of the state because of readers' errors."""

_log = logging.getLogger("fuse_mount")


@dataclass(kw_only=True)
class WorkerQueue:
    """The queue of one worker in a mount, and its state. The descriptor outlives the process that serves it."""

    fd: int = -1
    own_queue: bool = False
    """True where `fd` is a clone of its own, False where all share one."""
    phase: str = "idle"
    """`idle`, `opening`, `opened` (waits for the descriptor), `serving` or `stopping`."""
    due: float | None = None
    """The time to have it opened again."""
    failures: int = 0


class Mounted:
    """A mount from its snapshot's opening until nobody here serves it any more."""

    def __init__(self, number: int, config: MountConfig, workers: int, facts: Callable[[], dict[str, Any]]) -> None:
        """`facts` gives those fields of `MountInfo` that all mounts of the pool have alike."""
        self.number = number
        self.config = config
        self.files = MountFiles(config.home, config.mountpoint)
        self.queues = [WorkerQueue() for _ in range(workers)]
        self.main = -1
        self.snapshot: dict[str, Any] = {}
        self.ended = False
        """Unmounted."""
        self.handed_over = False
        self.deadline: float | None = None
        """The time from which what still serves it here is not waited for any more."""
        self.open_until = 0.0
        self.unmounts: list[session.Unmounting] = []
        """Asked for by a signal, and not done yet."""
        self._facts = facts
        self._callers: ipc.Callers | None = None
        self._line: KeeperLine | None = None
        self.device = 0
        """st_dev of the mount."""
        self._started_at = time.time()
        self._serving_since = 0.0
        self._failures: tuple[Failure, ...] = ()
        self._note_due: float | None = None

    @property
    def leaving(self) -> bool:
        """Tell whether nobody is to serve it here any more."""
        return self.ended or self.handed_over

    # --- beginning and end ------------------------------------------------------------------------------------

    def begin(self, config: MountConfig, main: int, former: MountInfo | None) -> None:
        """Make the queues, and be the one who serves it: state, control socket and keeper."""
        self.config, self.main = config, main
        mount = session.mount_at(config.mountpoint)
        if mount is not None:
            self.device = mount.device
            session.set_readahead(mount.device)
        if former is not None:
            self._started_at, self.device = former.started_at, former.device
            self._failures = former.failures
        for queue in self.queues:
            self._make_queue(queue)
        self.files.make_folder()
        self._callers = ipc.Callers(self.files.listen(), most=_MOST_CALLERS, most_bytes=_MOST_REQUEST_BYTES)
        self._serving_since = time.time()
        arguments = ["--takeover", config.mountpoint, "--only-if-dead", "--pool", self._facts()["pool"]]
        note = {"mountpoint": config.mountpoint, "ref": config.ref, "device": self.device}
        self._line = KeeperLine(
            config.home, self.files, arguments, note, self._descriptors(), is_mine=lambda: not self._successor()
        )
        self.write_state()
        if former is not None and config.resend:
            # Before the keeper, which the loop talks to, lets go of the former queues: requests that were read from
            # them and not answered would be aborted then.
            session.resend(main)
        _log.info("%s serves %s with %d workers", config.mountpoint, config.ref, len(self.queues))

    def _make_queue(self, queue: WorkerQueue) -> None:
        fd = session.clone(self.main) if self.config.clone else None
        queue.fd, queue.own_queue = (self.main, False) if fd is None else (fd, True)

    def hang_up(self) -> None:
        """Take no more requests."""
        if self._callers is not None:
            self._callers.close()
            self._callers = None

    def finish(self) -> None:
        """Let go of everything, and remove the state unless another supervisor has it now."""
        for queue in self.queues:
            if queue.own_queue:
                os.close(queue.fd)
            queue.fd, queue.own_queue = -1, False
        if self.main >= 0:
            os.close(self.main)
            self.main = -1
        if self._line is None:
            return
        self.hang_up()
        if self.ended:
            if self._successor() is None:
                self.files.remove()
            if self.config.passed:
                (self.files.folder / self.config.passed).unlink(missing_ok=True)
            self._line.release()
            _log.info("%s is unmounted", self.config.mountpoint)
        else:
            self._line.close()
            _log.info("%s is handed over", self.config.mountpoint)

    # --- workers ------------------------------------------------------------------------------------------------

    def recover(self, queue: WorkerQueue) -> None:
        """See to the requests that a dead worker had read."""
        if self.main < 0:
            return
        if self.config.resend and session.resend(self.main):
            return
        if not queue.own_queue:
            _log.error("requests that the dead worker had read hang until %s is unmounted", self.config.mountpoint)
            return
        os.close(queue.fd)
        self._make_queue(queue)
        if self.config.resend:  # the kernel cannot, and aborts requests when the last copy of the clone is closed
            self.config = replace(self.config, resend=False)
            if self._line is not None:
                self._line.hand_over(self._descriptors())

    def is_gone(self) -> bool:
        """Tell whether it was unmounted."""
        return self.main >= 0 and not is_connected(self.main)

    def _descriptors(self) -> list[int]:
        """Return what the keeper is to hold: the clones as well, since the kernel aborts what was read from one when
        its last copy is closed, and to have it sent again is what they are kept for."""
        clones = [queue.fd for queue in self.queues if queue.own_queue] if self.config.resend else []
        return [self.main, *clones]

    # --- the loop -------------------------------------------------------------------------------------------------

    def want(self, reading: set[int], writing: set[int], times: list[float]) -> None:
        """Add what the loop is to wait for: descriptors to read and to write, and times (`time.monotonic`)."""
        if self._callers is not None:
            reading.update(self._callers.fds())
        times += [unmounting.due for unmounting in self.unmounts]
        times += [due for due in (self._note_due, self.deadline) if due is not None]
        times += [queue.due for queue in self.queues if queue.due is not None]
        if self.main < 0:
            times.append(self.open_until)
        if self._line is not None:
            self._line.want(reading, writing, times)

    def do_what_is_due(self, readable: set[int]) -> None:
        """Hear callers and the keeper, go on with unmounts, note what is to be noted."""
        for connection, message in self._callers.heard(list(readable)) if self._callers is not None else ():
            with connection:
                try:
                    self._answer(connection, message)
                except OSError as exc:
                    _log.warning("a request on the control socket failed: %s", exc)
        self._unmount()
        if self._line is not None:
            before = self._line.kept
            self._line.step()
            if self._line.kept != before and not self.handed_over:  # the state is another one's by then
                self.note()
        if self._note_due is not None and time.monotonic() >= self._note_due:
            self.note()

    def _unmount(self) -> None:
        for unmounting in list(self.unmounts):
            try:
                if not self.ended and not unmounting.step():  # somebody else may be quicker
                    continue
            except MountError as exc:
                _log.error("asked to end, but %s", exc)
            self.unmounts.remove(unmounting)

    def _answer(self, connection: socket.socket, message: ipc.Message) -> None:
        operation = message.get("op")
        if operation == "status":
            ipc.send(connection, {"ok": self.info().to_dict()})
        elif operation == "takeover":
            ipc.send(connection, {"ok": self.info().to_dict()}, [self.main])
        elif operation == "finish":
            self.handed_over = True
            ipc.send(connection, {"ok": None})
        elif operation == "leave":
            if self._line is None or not self._line.kept:
                ipc.send(connection, {"error": "nobody else keeps the descriptor", "hint": ""})
                return
            ipc.send(connection, {"ok": None})
            self.handed_over = True
        else:
            ipc.send(connection, {"error": f"unknown operation {operation!r}"})

    # --- state ----------------------------------------------------------------------------------------------------

    def failed(self, failure: Failure) -> None:
        """Have the state tell, soon, of an error that a reader got."""
        self._failures = with_failure(self._failures, failure)
        if self._note_due is None:
            self._note_due = time.monotonic() + _NOTE_EVERY_S

    def info(self) -> MountInfo:
        """Return the state as it is now."""
        return MountInfo(
            mountpoint=Path(self.config.mountpoint),
            ref=self.config.ref,
            dataset=self.snapshot["dataset"],
            snapshot_id=self.snapshot["id"],
            files=self.snapshot["files"],
            total_bytes=self.snapshot["total_bytes"],
            boot=boot_id(),
            catalog=os.environ.get("DATACACHE_CATALOG", ""),  # as whoever mounted it gave it to this process
            device=self.device,
            started_at=self._started_at,
            serving_since=self._serving_since,
            kept=self._line is not None and self._line.kept,
            failures=self._failures,
            config=self.config,
            **self._facts(),
        )

    def _successor(self) -> MountInfo | None:
        """Return the state of a supervisor that began later to serve this mount, or another one in its place."""
        known = self.files.read()
        if known is None or known.serving_since <= self._serving_since:
            return None
        return known if process.is_served(known) else None

    def note(self) -> None:
        """Write down what has changed, unless the state is another one's."""
        self._note_due = None
        successor = self._successor()
        if successor is None:
            self.write_state()
        elif successor.device == self.device and successor.pid != os.getpid():
            _log.warning("%s was taken over by %d meanwhile", self.config.mountpoint, successor.pid)
            self.handed_over = True

    def write_state(self) -> None:
        """Replace the state. A full disk must not end a mount."""
        try:
            self.files.write(self.info())
        except OSError as exc:
            _log.warning("the state of the mount cannot be written: %s", exc)
