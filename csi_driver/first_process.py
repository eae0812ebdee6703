"""The first process of a node's container: starts a command, and starts it again when it dies.

    python -m csi_driver.first_process COMMAND [ARGUMENT …]

A container ends with its first process, and with it everything else in there: supervisors, workers, servers. A kubelet
starts it again after a pause that grows to five minutes, and for that long a node's mounts have one keeper left. So the
first process is this one, which does nothing that could fail: it imports no more of datacache than its package, opens
no file and listens to nobody. What the command started outlives it and finds the next one.

- SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 go to the command. After SIGTERM or SIGINT it is not started again, and
  its exit code is this one's (128 and the signal's number, if a signal ended it).
- A command that lived for `CALM_S` is started again at once. After one that did not there is a pause, which grows.
- After `GIVE_UP_AFTER` of those in a row this ends with the command's exit code: the kubelet shows the container as
  failing, with its log, and waits as it does for any other. So a command that cannot start is never hidden.
- Each end of the command is a line of log on stderr.
- Whatever loses its parent in the container becomes a child of this process (a subreaper), which reaps it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from datetime import datetime

CALM_S = 10.0
"""A command that ran this long was no part of a crash loop."""
GIVE_UP_AFTER = 5
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 4.0
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = {signal.SIGTERM, signal.SIGINT}
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as a shell has it


class FirstProcess:
    """The loop around one command."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._pid = 0
        """Of the command; 0 while it does not run."""
        self._how = ""
        """The command's last end, in words."""
        self._started = 0.0
        self._quick_deaths = 0
        """In a row."""
        self._ending = False
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (*_PASSED_ON, signal.SIGCHLD):
            signal.signal(number, lambda _number, _frame: None)  # the wake-up descriptor acts, and needs a handler
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # without it orphans go to the container's shim

    def run(self) -> int:
        """Run the command again and again, until told to end or until it cannot be kept running. Return the exit
        code."""
        again = ""
        while True:
            try:
                self._start()
            except OSError as exc:
                _log(f"{self._command[0]} cannot be started{again}: {exc.strerror}")
                return _NOT_FOUND if isinstance(exc, FileNotFoundError) and not again else _NOT_EXECUTABLE
            while (code := self._reap()) is None:
                self._wait()
            if self._ending:
                _log(f"the command has ended ({code}), as it was told to")
                return code
            pause_s, again = self._judge(), " again"
            if pause_s is None:
                return code or 1
            until, ending = time.monotonic() + pause_s, False
            while not ending and (left_s := until - time.monotonic()) > 0:
                ending = self._wait(left_s)
                self._reap()
            if ending:
                return code

    def _start(self) -> None:
        # Python ignores SIGPIPE, and a child would inherit that.
        default = [*_PASSED_ON, signal.SIGCHLD, signal.SIGPIPE]
        self._started = time.monotonic()
        self._pid = os.posix_spawnp(self._command[0], self._command, os.environ, setsigdef=default)

    def _wait(self, timeout_s: float | None = None) -> bool:
        """Wait for signals, and pass them on; tell whether the command is to end."""
        readable, _, _ = select.select([self._wake], [], [], timeout_s)
        received = set(os.read(self._wake, 4096)) if readable else set()
        self._ending = self._ending or bool(received & _ENDING)
        for number in _PASSED_ON:
            if number in received and self._pid:
                os.kill(self._pid, number)  # it is not reaped yet, so the number is its own
        return self._ending

    def _reap(self) -> int | None:
        """Return the command's exit code if it has ended; reap orphans along with it."""
        code = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return code
            if not pid:
                return code
            if pid == self._pid:
                self._pid = 0
                code = os.waitstatus_to_exitcode(status)
                self._how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
                code = 128 - code if code < 0 else code

    def _judge(self) -> float | None:
        """Return how long to wait before the next start of the command; None to give up."""
        lived_s = time.monotonic() - self._started
        self._quick_deaths = 0 if lived_s >= CALM_S else self._quick_deaths + 1
        words = f"{' '.join(self._command)} {self._how} after {lived_s:.1f} s"
        if self._quick_deaths >= GIVE_UP_AFTER:
            _log(f"{words}, the {self._quick_deaths}th time in a row within {CALM_S:.0f} s: so does this container")
            return None
        pause_s = 0.0
        if self._quick_deaths > 1:
            pause_s = min(_FIRST_PAUSE_S * 2 ** (self._quick_deaths - 2), _LONGEST_PAUSE_S)
        _log(f"{words}; it is started again" + (f" in {pause_s} s" if pause_s else ""))
        return pause_s


def _log(words: str) -> None:
    now = datetime.now()  # noqa: DTZ005 - as the command's own lines
    try:
        sys.stderr.write(f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d} WARNING first process: {words}\n")
        sys.stderr.flush()
    except OSError:
        pass  # nobody reads the log, and that ends nothing


def main() -> int:
    """Run the command that the arguments name, and return the exit code."""
    command = sys.argv[1:]
    if not command or command[0].startswith("-"):
        sys.stderr.write("usage: python -m csi_driver.first_process COMMAND [ARGUMENT …]\n")
        return 2
    return FirstProcess(command).run()


if __name__ == "__main__":
    sys.exit(main())
