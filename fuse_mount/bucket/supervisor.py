"""The process that keeps a read-write mount served: it starts a server, and another one when that dies.

Run by `__main__`. It holds copies of the mount's two descriptors (`held`, ../CONCURRENCY.md), has the keeper hold them,
too, and hands them to each next server: programs wait meanwhile, and nothing else. While it holds them it never looks
into the mount: the kernel would keep it from ending. One thread; servers are started as new programs, never forked,
because what they use for uploads does not survive that.

Without descriptors (a kernel before 6.9, `pyfuse3`, memory of another version) the mount of a dead server is dead. All
that was acknowledged lies in the staging area, and the next server replays it. A dead mount stays in its place until
the next server puts its own there (`session.place`), also when the supervisor gives up: unmounted, programs would write
into the folder below.

One server that was killed (SIGKILL) while it served is replaced at once. One that ends by itself, or does not get as
far as serving, is followed by the next after a growing delay; after `_GIVE_UP_AFTER` of these in a row the supervisor
says so in the log and in the state, lets go of the mount, and ends. Where server and supervisor die within a second
while no daemon runs, somebody has to mount again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from dataclasses import replace

from datacache.core import ipc
from datacache.core.breaker import pause_s
from datacache.core.errors import MountError
from fuse_mount.bucket.held import COUNT, REFUSED, HeldMount, fetch, received
from fuse_mount.kernel import session
from fuse_mount.lifecycle import process
from fuse_mount.lifecycle.keeping import KeeperLine
from fuse_mount.lifecycle.state import BucketConfig, BucketFiles

_GIVE_UP_AFTER = 5
_BEGIN_ANEW_AFTER = 3
"""Deaths in a row from when on servers begin with a mount of their own: the memory may be what they die of."""
_GIVE_UP_AFTER_KILLS = 20
"""Somebody, or a lack of memory, may end servers before they serve: what they find is not the reason."""
_CALM_S = 10.0
"""A server that served this long was no part of a crash loop."""
_FIRST_DELAY_S = 0.25
"""From the second death on: the first one may have been the only one."""
_MAX_DELAY_S = 5.0
_LAST_WORD_S = 1.0

_MEMORY = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(2 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(8 * 2**20)}
"""For the server: threads come and go, and glibc would keep for each what it once used (mallopt(3))."""
_log = logging.getLogger("fuse_mount")


class BucketSupervisor:
    """One mount. `serve()` returns when it is gone or was given up."""

    def __init__(self, config: BucketConfig, *, attached: bool) -> None:
        """`attached`: this process has the streams of whoever started it instead of the mount's log."""
        self._config = config
        self._files = BucketFiles(config.home, config.mountpoint)
        self._more = process.see_log(None if attached else self._files.log)
        self._pid = 0
        """Of the server; 0 where there is none."""
        self._has_ended = -1
        """Its pidfd."""
        self._child: subprocess.Popen[bytes] | None = None
        """The server, unless another supervisor started it."""
        self._held: HeldMount | None = None
        self._line: KeeperLine | None = None
        self._talk: ipc.Lines | None = None
        """Where the server hands its descriptors over and says that the mount can be used."""
        self._word: ipc.Message = {}
        self._serves_since: float | None = None
        self._restarts = 0
        self._deaths = self._kills = 0
        """In a row, each soon after its start."""
        self._stopping = False
        self._signals = process.Signals(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)

    def start(self, report: process.Report) -> None:
        """Start the first server and report when the mount can be used. Raises `MountError` with nothing left over."""
        dead_before = session.is_dead(self._config.mountpoint)
        self._spawn()
        try:
            while self._serves_since is None:
                if self._step(None) is not None:
                    ipc.result_of(self._said())  # raises
        except BaseException:
            self._let_go()
            if not dead_before and session.is_dead(self._config.mountpoint):
                session.take_away(self._config.mountpoint)
            raise
        report(self._said())

    def go_on(self, report: process.Report) -> bool:
        """Be the supervisor of a mount whose own was killed. False where that lives, or there is no such mount. Raises
        `MountError`."""
        mountpoint = self._config.mountpoint
        with self._files.locked():
            known = self._files.read()
            if known is None or known.problem or process.serves(known.supervisor, mountpoint):
                return False
            if not self._adopt():
                self._held = fetch(self._files)
            if not self._is_there():
                return False
            self._restarts = known.restarts + 1
            known = replace(known, supervisor=os.getpid(), pid=self._pid or known.pid)
            self._files.write(known)  # nobody else becomes it
        if not self._pid:
            self._spawn()
        report({"ok": known.to_dict()})
        return True

    def serve(self) -> None:
        """Keep it served until it is unmounted, told to end, or given up."""
        self._keep()
        is_over = self._serve()
        self._let_go()
        if is_over:
            if session.is_dead(self._config.mountpoint):
                session.take_away(self._config.mountpoint)
            self._files.remove_of(os.getpid())

    def _serve(self) -> bool:
        """Return whether the mount is over; not where it was given up, or another supervisor has it."""
        due: float | None = None
        mountpoint = self._config.mountpoint
        while True:
            if due is not None and due <= time.monotonic():
                due = None
                if self._is_replaced():
                    _log.info("%s has another supervisor by now", mountpoint)
                    if self._held is not None:
                        self._held.close()  # which is the other one's, too
                        self._held = None
                    return False
                self._restarts += 1
                if not self._adopt():
                    self._spawn()
            code = self._step(due)
            if code is None:
                if self._stopping and not self._pid:
                    break
                continue
            had_begun = self._serves_since is not None or self._held is not None
            if code == 0 or self._stopping or (had_begun and not self._is_there()):
                _log.info("%s: the server has ended (%d)", mountpoint, code)
                break
            delay_s = self._judge(code)
            if delay_s is None:
                return False
            if self._held is not None and (
                code == REFUSED or self._deaths >= _BEGIN_ANEW_AFTER or not self._held.is_connected()
            ):
                _log.error("%s: the next server begins anew; files that are open cannot go on", mountpoint)
                self._let_go()
                self._keep()
            due = time.monotonic() + delay_s
        return True

    def _judge(self, code: int) -> float | None:
        """Return how long to wait before the next server; None for ever."""
        served = self._serves_since
        if served is not None and (code == -signal.SIGKILL or time.monotonic() - served >= _CALM_S):
            self._deaths = self._kills = 0
        elif code == -signal.SIGKILL:
            self._kills += 1
        else:
            self._deaths += 1
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with {code}"
        if served is None and self._word:
            how += f": {self._word.get('error')}"
        in_a_row = self._deaths + self._kills
        if self._deaths >= _GIVE_UP_AFTER or self._kills >= _GIVE_UP_AFTER_KILLS:
            problem = f"{in_a_row} servers in a row ended soon after their start; the last one {how}"
            _log.error("%s is given up: %s", self._config.mountpoint, problem)
            known = self._files.read()
            if known is not None:
                with contextlib.suppress(OSError):
                    self._files.write(replace(known, problem=problem + self._more))
            return None
        delay_s = pause_s(in_a_row - 1, first_s=_FIRST_DELAY_S, longest_s=_MAX_DELAY_S)
        soon = f"in {delay_s:.2g} s" if delay_s else "at once"
        _log.warning("%s: the server %s; the next one starts %s", self._config.mountpoint, how, soon)
        return delay_s

    def _is_replaced(self) -> bool:
        """Tell whether somebody has mounted in this place again, while the keeper brought this supervisor up."""
        known = self._files.read()
        return (
            known is not None
            and known.supervisor != os.getpid()
            and process.serves(known.supervisor, self._config.mountpoint)
        )

    # --- what outlives a server ---------------------------------------------------------------------------------------

    def _hold(self, held: HeldMount) -> None:
        former, self._held = self._held, held
        if former is not None:
            former.close()
        if self._line is not None:
            self._line.close()  # of another mount, of which nobody is the owner any more
            self._keep()

    def _keep(self) -> None:
        """Have the keeper hold what is held here, and bring up another supervisor when this one ends."""
        config, held = self._config, self._held
        self._line = KeeperLine(
            config.home,
            self._files,
            ["--bucket", config.to_json(), "--only-if-dead"],
            {"mountpoint": config.mountpoint, "url": config.url, **(held.note if held is not None else {})},
            held.fds if held is not None else (),
            is_mine=lambda: not self._is_replaced(),
        )

    def _let_go(self) -> None:
        """Have nobody hold the mount: whoever waits for it gets an error."""
        if self._held is not None:
            if self._held.is_connected():
                session.abort(self._held.device)  # others may hold it: a process that waits for the kernel
            self._held.close()
            self._held = None
        if self._line is not None:
            self._line.release()
            self._line = None

    def _is_there(self) -> bool:
        """Tell whether the mount is there, or waits for what it has unwritten while it is unmounted."""
        if self._held is not None and self._held.is_connected():
            return True
        return session.is_ours_at(self._config.mountpoint)

    # --- the server ---------------------------------------------------------------------------------------------------

    def _adopt(self) -> bool:
        """Watch a living server, which another supervisor has started that was killed. Return whether there is one."""
        known = self._files.read()
        if known is None or not process.serves(known.pid, self._config.mountpoint):
            return False
        try:
            self._watch(known.pid)
        except ProcessLookupError:  # it has ended just now
            return False
        self._serves_since = time.monotonic()
        held = fetch(self._files)
        if held is not None:
            self._hold(held)
        return True

    def _spawn(self) -> None:
        words = ["--bucket-server", self._config.to_json(), "--restarts", str(self._restarts)]
        environment = process.environment(_MEMORY)
        self._word, self._serves_since = {}, None
        fds: list[int] = []
        if self._held is not None:
            words += ["--held", self._held.to_argument()]
            fds = self._held.fds
        child, talk = process.spawn(words, self._files.log, environment, attached=True, own_session=True, fds=fds)
        try:
            self._watch(child.pid)
        except BaseException:
            child.terminate()
            child.wait()
            talk.close()
            raise
        self._child, self._talk = child, ipc.Lines(talk.connection, most_bytes=ipc.MOST_BYTES, most_fds=COUNT)

    def _watch(self, pid: int) -> None:
        """Be woken by the end of a server. Raises `ProcessLookupError` where it has ended, and `MountError`."""
        try:
            self._has_ended, self._pid = os.pidfd_open(pid), pid
        except ProcessLookupError:
            raise
        except OSError as exc:
            raise MountError(
                f"the server of {self._config.mountpoint} cannot be watched: {exc.strerror}",
                hint="See whether descriptors have run out, or a sandbox refuses pidfd_open(2).",
            ) from exc

    def _step(self, due: float | None) -> int | None:
        """Wait for something to happen, at most until `due`, and note it; the server's exit code if it ended."""
        reading = {self._signals.fd}
        writing: set[int] = set()
        times = [due] if due is not None else []
        if self._talk is not None:
            reading.add(self._talk.connection.fileno())
        if self._pid:
            reading.add(self._has_ended)
        if self._line is not None:
            self._line.want(reading, writing, times)
        ready = process.wait_for_any(reading, writing, times)
        if self._line is not None:
            self._line.step()
        if self._talk is not None and self._talk.connection.fileno() in ready:
            self._hear()
        if self._signals.fd in ready and self._signals.received() & {signal.SIGTERM, signal.SIGINT}:
            self._stopping = True
            if self._pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGTERM)
        return self._lost_server() if self._pid and self._has_ended in ready else None

    def _lost_server(self) -> int:
        while self._talk is not None:
            process.readable(self._talk.connection.fileno(), _LAST_WORD_S)
            self._hear()
        os.close(self._has_ended)
        self._pid = 0
        if self._child is None:  # somebody else's child has no code for us
            return -signal.SIGKILL if self._is_there() else 0
        code, self._child = self._child.wait(), None
        return code

    def _hear(self) -> None:
        assert self._talk is not None
        lines = self._talk.receive()
        for message in map(ipc.parse_object, lines or ()):
            if "held" in message:
                held = received(message["held"], self._talk.fds)
                self._talk.fds = []
                if held is not None:
                    self._hold(held)
                self._talk.send({"ok": None})
            else:
                self._word = message
        if lines is None:  # the server has said all and closes its end
            self._talk.close()
            self._talk = None
            if "ok" in self._word:
                self._serves_since = time.monotonic()

    def _said(self) -> ipc.Message:
        return self._word or {"error": f"the mount process ended at once{self._more}", "hint": ""}
