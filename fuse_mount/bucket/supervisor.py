"""The process that keeps a read-write mount served: it starts a server, and another one when that dies.

Run by `__main__`. It holds nothing: no descriptor of the mount, no journal. All that was acknowledged lies in the
staging area, and the next server replays it. One thread; servers are started as new programs, never forked, because
what they use for uploads does not survive that.

**The server dies.** The mount stays in its place, dead, until the next server puts its own there (`bucket_session`):
open files fail with ENOTCONN, and so does what is opened meanwhile; what is opened after it works. Were it unmounted at
once, programs would write into the folder below.

**Servers die one after another.** One that was killed (SIGKILL) while it served is replaced at once. One that ends by
itself, or does not get as far as serving, is followed by the next after a growing delay; after `_GIVE_UP_AFTER` of
these in a row the supervisor gives up: it says so in the log and in the state, and leaves the dead mount, so that no
program takes the folder below for the bucket.

**The supervisor is told to end** (SIGTERM, Ctrl-C): so is the server, which uploads what it can, unmounts and ends.

**The supervisor is killed.** The server goes on. The keeper in the cache daemon (`keeping`) starts the next supervisor,
which watches that server, or starts one if it died as well: `--bucket JSON --only-if-dead`. So does the server, with
or without a daemon. Where server and supervisor die within a second while no daemon runs, somebody has to mount again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from datacache.core.breaker import pause_s
from datacache.core.errors import MountError
from fuse_mount.bucket import session as bucket_session
from fuse_mount.bucket.config import BucketConfig, BucketFiles
from fuse_mount.kernel import session
from fuse_mount.lifecycle import process
from fuse_mount.lifecycle.keeping import KeeperLine
from fuse_mount.lifecycle.state import MOUNT_TYPE

_GIVE_UP_AFTER = 5
_CALM_S = 10.0
"""A server that served this long was no part of a crash loop."""
_FIRST_DELAY_S = 0.25
"""From the second death on: the first one may have been the only one."""
_MAX_DELAY_S = 5.0

_MEMORY = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(2 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(8 * 2**20)}
"""For the server: threads come and go, and glibc would keep for each what it once used (mallopt(3))."""
_log = logging.getLogger("fuse_mount")

Report = Callable[[dict[str, Any]], None]


class BucketSupervisor:
    """One mount. `serve()` returns when it is gone or was given up."""

    def __init__(self, config: BucketConfig) -> None:
        self._config = config
        self._files = BucketFiles(config.home, config.mountpoint)
        self._server: subprocess.Popen[bytes] | None = None
        self._adopted: tuple[int, int] | None = None
        """Process id and descriptor (pidfd) of a server that another supervisor started."""
        self._line: KeeperLine | None = None
        self._word = -1
        """Where the server says that the mount can be used."""
        self._heard = b""
        self._serves_since: float | None = None
        self._restarts = 0
        self._deaths = 0
        """In a row, each soon after its start."""
        self._stopping = False
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _note_signal)

    def start(self, report: Report) -> None:
        """Start the first server and report when the mount can be used. Raises `MountError` with nothing left over."""
        dead_before = bucket_session.is_dead(self._config.mountpoint)
        self._spawn()
        try:
            while self._serves_since is None and self._server is not None:
                self._step(None)
            if self._serves_since is None:
                raise MountError(f"the mount process ended at once; see {self._files.log}")
        except BaseException:
            if not dead_before and bucket_session.is_dead(self._config.mountpoint):
                bucket_session.take_away(self._config.mountpoint)
            raise
        report({"ok": process.parse_word(self._heard, self._files)})

    def go_on(self, report: Report) -> bool:
        """Be the supervisor of a mount whose own was killed. False where that lives, or there is no such mount."""
        with self._files.locked():
            known = self._files.read()
            if known is None or known.problem or not self._is_mounted():
                return False
            if process.serves(known.supervisor, self._config.mountpoint):
                return False
            self._restarts = known.restarts + 1
            watched = process.watch(known.pid) if process.serves(known.pid, self._config.mountpoint) else None
            if watched is not None:
                self._adopted, self._serves_since = (known.pid, watched), time.monotonic()
                known = replace(known, supervisor=os.getpid())
            else:
                known = replace(known, supervisor=os.getpid(), pid=0)
            self._files.write(known)  # nobody else becomes it
        if self._adopted is None:
            self._spawn()
        report({"ok": known.to_dict()})
        return True

    def serve(self) -> None:
        """Keep it served until it is unmounted, told to end, or given up."""
        arguments = ["--bucket", self._config.to_json(), "--only-if-dead"]
        self._line = KeeperLine(
            self._config.home,
            self._files,
            arguments,
            {"mountpoint": self._config.mountpoint, "url": self._config.url},
            (),
            is_mine=lambda: not self._is_replaced(),
        )
        self._serve()
        self._line.release()

    def _serve(self) -> None:
        due: float | None = None
        while True:
            timeout_s = None if due is None else max(due - time.monotonic(), 0)
            if due is not None and timeout_s == 0:
                due = None
                if self._is_replaced():
                    _log.info("%s has another supervisor by now", self._config.mountpoint)
                    return
                self._restarts += 1
                self._spawn()
                continue
            code, served = self._step(timeout_s), self._serves_since
            if code is None:
                if self._stopping and self._server is None and self._adopted is None:
                    break
                continue
            if code == 0 or self._stopping or (served is not None and not self._is_mounted()):
                _log.info("%s: the server has ended (%d)", self._config.mountpoint, code)
                break
            delay_s = self._judge(code, served)
            if delay_s is None:
                return
            due = time.monotonic() + delay_s
        if bucket_session.is_dead(self._config.mountpoint):
            bucket_session.take_away(self._config.mountpoint)
        self._files.remove_of(os.getpid())

    def _judge(self, code: int, served: float | None) -> float | None:
        """How long to wait before the next server; None for ever."""
        if served is not None and (code == -signal.SIGKILL or time.monotonic() - served >= _CALM_S):
            self._deaths = 0
        else:
            self._deaths += 1
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with {code}"
        if served is None and self._heard.startswith(b'{"error"'):
            how += f": {json.loads(self._heard)['error']}"
        if self._deaths >= _GIVE_UP_AFTER:
            self._give_up(f"{self._deaths} servers in a row ended soon after their start; the last one {how}")
            return None
        delay_s = pause_s(self._deaths - 1, first_s=_FIRST_DELAY_S, longest_s=_MAX_DELAY_S)
        soon = f"in {delay_s:.2g} s" if delay_s else "at once"
        _log.warning("%s: the server %s; the next one starts %s", self._config.mountpoint, how, soon)
        return delay_s

    def _spawn(self) -> None:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        command = [sys.executable, "-m", "fuse_mount", "--bucket-server", self._config.to_json()]
        command += ["--restarts", str(self._restarts), "--ready-fd", str(theirs)]
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=process.environment(_MEMORY),
            pass_fds=[theirs],
            start_new_session=True,
        )
        os.close(theirs)
        self._word, self._heard, self._serves_since = ours, b"", None

    def _step(self, timeout_s: float | None) -> int | None:
        """Wait for something to happen and note it; the server's exit code if it ended. Before the mount is there
        for the first time, a server's error is raised.
        """
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._word >= 0:
            poll.register(self._word, select.POLLIN)
        if self._adopted is not None:
            poll.register(self._adopted[1], select.POLLIN)
        if self._line is not None:
            timeout_s = self._wait_also_for_the_keeper(poll, timeout_s)
        ready = {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}
        if self._line is not None:
            self._line.step()
        if self._word in ready:
            self._hear()
        if self._wake in ready:
            self._on_signals()
        if self._adopted is not None and self._adopted[1] in ready:
            os.close(self._adopted[1])
            self._adopted = None
            return -signal.SIGKILL if self._is_mounted() else 0  # a child of somebody else has no code for us
        code = self._server.poll() if self._server is not None else None
        if code is not None:
            self._lost_server()
        return code

    def _on_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if {signal.SIGTERM, signal.SIGINT} & set(os.read(self._wake, 4096)):
                self._stop()

    def _lost_server(self) -> None:
        while self._word >= 0:
            self._hear()
        self._server = None
        if self._serves_since is None and self._heard and self._restarts == 0:
            process.parse_word(self._heard, self._files)  # raises

    def _wait_also_for_the_keeper(self, poll: select.poll, timeout_s: float | None) -> float | None:
        assert self._line is not None
        heard, sent, again = self._line.wants()
        if heard is not None:
            poll.register(heard, select.POLLIN | (select.POLLOUT if sent is not None else 0))
        if again is None:
            return timeout_s
        pause_s = max(again - time.monotonic(), 0.0)
        return pause_s if timeout_s is None else min(timeout_s, pause_s)

    def _hear(self) -> None:
        part = os.read(self._word, 65536)
        self._heard += part
        if part:
            return
        os.close(self._word)  # it says one thing and closes its end
        self._word = -1
        if self._heard.startswith(b'{"ok"'):
            self._serves_since = time.monotonic()

    def _stop(self) -> None:
        self._stopping = True
        if self._server is not None:
            self._server.terminate()
        if self._adopted is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._adopted[0], signal.SIGTERM)

    def _is_mounted(self) -> bool:
        there = session.mount_at(self._config.mountpoint)
        return there is not None and there.kind == MOUNT_TYPE

    def _is_replaced(self) -> bool:
        """Whether somebody has mounted in this place again, while the keeper brought this supervisor up."""
        known = self._files.read()
        return (
            known is not None
            and known.supervisor != os.getpid()
            and process.serves(known.supervisor, self._config.mountpoint)
        )

    def _give_up(self, problem: str) -> None:
        _log.error("%s is given up: %s", self._config.mountpoint, problem)
        known = self._files.read()
        if known is not None:
            with contextlib.suppress(OSError):
                self._files.write(replace(known, problem=f"{problem}; see {self._files.log}"))


def _note_signal(_number: int, _frame: object) -> None:
    """Signals act through the wake-up descriptor; a handler only has to be there."""
