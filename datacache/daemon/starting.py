"""Start the process of a home's daemon: once among all threads and processes that find none, and once more where that
may help. Why a start failed stays in a file, for all of the home. `DaemonClient` and screens use it; any thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from datacache.core import lockfile
from datacache.core.disk import open_private, replace_file
from datacache.core.errors import DaemonSilentError, DaemonUnavailableError
from datacache.daemon import paths
from datacache.settings import Settings

ALREADY_RUNNING = 3
"""Exit code of the process: another daemon serves this home."""
_START_TIMEOUT_S = 20.0
_EXTERNAL_AWAY_S = 5.0
"""Time to wait for a daemon that something else starts, from when it was first missed."""
_FAILURE_S = 5.0
"""Time in which no process of the home starts a daemon for a read after a start failed; three times as long as that
start took, if that is more."""


class StartFailure(NamedTuple):
    """Why the last start of a home's daemon failed."""

    message: str
    hint: str
    ago_s: float
    repeat_s: float
    """For so long reads repeat it rather than try again."""


class DaemonProcess:
    """The process of a home's daemon. `answers` tells whether a daemon answers, and raises `DaemonSilentError` for one
    that is there and does not."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._home = settings, settings.home
        self._missed_at: float | None = None
        """When a daemon that something else starts was found missing. Any thread may set it; a lost update only costs
        another wait."""

    def start_soon(self, answers: Callable[[], bool]) -> None:
        """Start it unless a daemon is there, without waiting for it. Does nothing if something else starts it."""
        if self._settings.daemon == "external":
            return
        with contextlib.suppress(DaemonSilentError):
            if not answers():
                self._spawn()

    def ensure(self, answers: Callable[[], bool], *, fresh: bool = True) -> None:
        """Start it unless a daemon answers. `DaemonUnavailableError` tells why it cannot be started; or, where
        something else starts it, that it has been away for some seconds. Unless `fresh`, a start that failed a moment
        ago is not tried again."""
        if self._settings.daemon == "external":
            self._wait_for_it(answers)
            return
        end = time.monotonic() + _START_TIMEOUT_S
        while not answers():
            if not fresh:
                self._expect_no_failure()
            with self._turn_to_start() as mine:
                if mine:
                    self._start(answers, end)
                    return
            if time.monotonic() > end:
                raise self._no_answer()
            time.sleep(0.02)

    def failure(self) -> StartFailure | None:
        """Return why the last start of the daemon failed; None if it did not."""
        path = paths.start_failure_path(self._home)
        try:
            until_s, message, hint = json.loads(path.read_text())
            now_s = time.time()
            return StartFailure(str(message), str(hint), now_s - path.stat().st_mtime, float(until_s) - now_s)
        except (OSError, ValueError, TypeError):
            return None

    def _wait_for_it(self, answers: Callable[[], bool]) -> None:
        while not answers():
            now = time.monotonic()
            self._missed_at = missed_at = self._missed_at or now
            if now - missed_at > _EXTERNAL_AWAY_S:
                raise DaemonUnavailableError(
                    f"the cache daemon of {self._home} does not answer, and it is not ours to start it",
                    hint="DATACACHE_DAEMON is external: look at the container or service that runs it.",
                )
            time.sleep(0.05)
        self._missed_at = None

    def _expect_no_failure(self) -> None:
        failure = self.failure()
        if failure is not None and 0 < failure.repeat_s < _FAILURE_S + 3 * _START_TIMEOUT_S:  # no clock set back
            raise DaemonUnavailableError(failure.message, hint=failure.hint)

    def _note_failure(self, exc: DaemonUnavailableError, for_s: float) -> None:
        """Tell all processes of the home why no daemon could be started, and for how long they need not try."""
        with contextlib.suppress(OSError):
            path = paths.start_failure_path(self._home)
            beside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
            said = json.dumps([time.time() + for_s, exc.message, exc.hint])
            replace_file(path, said.encode(), beside=beside, durable=False)

    @contextlib.contextmanager
    def _turn_to_start(self) -> Iterator[bool]:
        """Yield True in the one thread of all threads and processes of the home that starts a daemon: sixteen readers
        that find none would start sixteen, of which fifteen come up for nothing."""
        path = self._home / "run" / "start.lock"
        with contextlib.ExitStack() as stack:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                mine = stack.enter_context(lockfile.held(path, wait=False))
            except OSError:  # the home cannot be written: starting says what is wrong
                mine = True
            yield mine

    def _start(self, answers: Callable[[], bool], end: float) -> None:
        begun = time.monotonic()
        try:
            self._start_one(answers, end)
        except DaemonSilentError:  # it was started, and is there
            raise
        except DaemonUnavailableError as exc:
            self._note_failure(exc, max(_FAILURE_S, 3 * (time.monotonic() - begun)))
            raise

    def _start_one(self, answers: Callable[[], bool], end: float) -> None:
        process: subprocess.Popen[bytes] | None = None
        lost_race_s, killed, log_bytes = 0.1, False, 0
        while not answers():
            if process is None:
                with contextlib.suppress(OSError):
                    log_bytes = paths.log_path(self._home).stat().st_size
                process = self._spawn()
            elif process.poll() == ALREADY_RUNNING:
                # Another one holds the lock. It may die before it serves, so ours is tried again, ever less often.
                process = None
                time.sleep(lost_race_s)
                lost_race_s = min(2 * lost_race_s, 2.0)
            elif (process.poll() or 0) < 0 and not killed:  # for want of memory, say: that may be chance, once
                process, killed = None, True
            elif process.poll() is not None:
                error, hint = self._last_words(log_bytes, process.returncode)
                raise DaemonUnavailableError(
                    f"the cache daemon cannot be started: {error}",
                    hint=hint or f"Its log: {paths.log_path(self._home)}. See also: dsctl doctor",
                )
            if time.monotonic() > end:
                raise self._no_answer()
            time.sleep(0.02)

    def _no_answer(self) -> DaemonUnavailableError:
        words = f"the cache daemon of {self._home} does not answer"
        return DaemonUnavailableError(words, hint=f"Its log: {paths.log_path(self._home)}")

    def _spawn(self) -> subprocess.Popen[bytes]:
        log_file = paths.log_path(self._home)
        package_root = str(Path(__file__).parents[2])
        environment = os.environ | self._settings.environment()
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH")) if p)
        try:
            log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(log_file, "ab", opener=open_private) as out:
                return subprocess.Popen(
                    [sys.executable, "-m", "datacache.daemon"],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    cwd="/",
                    env=environment,
                    start_new_session=True,
                )
        except OSError as exc:
            raise DaemonUnavailableError(
                f"the cache daemon cannot be started: {exc.strerror} ({exc.filename})",
                hint="Set DATACACHE_HOME to a folder you can write to.",
            ) from exc

    def _last_words(self, log_bytes: int, code: int) -> tuple[str, str]:
        """Return the last error in the daemon's log behind so many bytes, and its hint or ''. `code`: it ended with."""
        with contextlib.suppress(OSError):
            said = paths.log_path(self._home).read_bytes()
            if len(said) >= log_bytes:  # else the daemon has begun a fresh file, as the old one was too large
                said = said[log_bytes:]
            lines = said.decode(errors="replace").splitlines()[-20:]
            errors = [at for at, line in enumerate(lines) if line.startswith("error: ")]
            if errors:
                hint = next((line for line in lines[errors[-1] + 1 :] if line.startswith("hint: ")), "")
                return lines[errors[-1]].removeprefix("error: "), hint.removeprefix("hint: ")
            if lines:
                return lines[-1], ""
        return f"it ended ({code}) and said nothing", ""
