"""The processes of mounts, seen from outside: started (here, or by the mount host), waited for, watched.

No state; any thread may call.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datacache.core import ipc
from datacache.core.boot import born
from datacache.core.disk import open_private
from datacache.core.errors import MountError
from fuse_mount.lifecycle.state import FilesOfMount, MountInfo

Report = Callable[[ipc.Message], None]
"""Called with what a process says, once, when its mount can be used or could not be made."""
READY_TIMEOUT_S = 90.0
_END_TIMEOUT_S = 4.0
_HOST_TIMEOUT_S = READY_TIMEOUT_S + 10.0
HOST_AWAY_S = 20.0
"""How long a host may be away: its container starts again."""
_HOST_RETRY_S = 0.2


def see_log(log: Path | None) -> str:
    """Return the end of an error's message that names the log; '' where there is none."""
    return f"; see {log}" if log is not None else ""


class Talk:
    """A conversation with a process of a mount. Close it."""

    def __init__(self, connection: socket.socket, log: Path | None) -> None:
        """`log` is the process's; None where it writes to the streams of whoever started it."""
        self.connection = connection
        self._more = see_log(log)

    def hear(self, *, timeout_s: float) -> Any:
        """Return what the process says next. Raise its error, or why it says nothing, as a `MountError`."""
        try:
            answer, _ = ipc.receive(self.connection, timeout_s=timeout_s)
        except TimeoutError as exc:
            raise MountError(f"the mount did not start in {timeout_s:.0f} s{self._more}") from exc
        except (OSError, ValueError) as exc:
            raise MountError(f"the mount process ended at once{self._more}") from exc
        return ipc.result_of(answer)

    def ask(self, request: ipc.Message, *, timeout_s: float, fds: tuple[int, ...] = ()) -> Any:
        """Send a request, with descriptors beside it, and return the answer as `hear` does."""
        with contextlib.suppress(OSError):  # it has ended, and said why
            ipc.send(self.connection, request, fds)
        return self.hear(timeout_s=timeout_s)

    def close(self) -> None:
        """Hang up. What was opened and is not served yet is closed again."""
        self.connection.close()


def spawn(
    arguments: list[str],
    log: Path,
    variables: Mapping[str, str],
    *,
    attached: bool,
    own_session: bool = False,
    option: str = "--ready-fd",
    fds: Sequence[int] = (),
) -> tuple[subprocess.Popen[bytes], Talk]:
    """Run `python -m fuse_mount` with these arguments and talk to it over the socket that `option` tells it of.

    `attached` gives it this process's streams, and its session unless it is to have its `own_session`; else it has its
    own, writes into the log, and forks once more, so that it is nobody's child. It inherits `fds`. Raises
    `MountError`."""
    try:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "fuse_mount", *arguments, option, str(theirs.fileno())]
        try:
            with theirs, contextlib.nullcontext() if attached else open(log, "ab", opener=open_private) as out:
                child = subprocess.Popen(
                    command if attached else [*command, "--daemon"],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=dict(variables),
                    pass_fds=[theirs.fileno(), *fds],
                    start_new_session=own_session or not attached,
                )
        except BaseException:
            ours.close()
            raise
    except OSError as exc:
        raise MountError(
            f"the mount process cannot be started: {exc.strerror or exc}",
            hint="See whether memory or descriptors have run out"
            + ("." if attached else f", or the disk of {log} is full."),
        ) from exc
    return child, Talk(ours, None if attached else log)


def start(
    arguments: list[str],
    files: FilesOfMount[Any],
    variables: dict[str, str],
    *,
    foreground: bool,
    host: Path | None = None,
) -> dict[str, Any]:
    """Run `python -m fuse_mount` with these arguments and return what it says when the mount can be used.

    With `host`, the socket of a mount host, that one runs it. In the foreground, which is always here, the call returns
    when the process has ended. Raises `MountError` with what it says instead; one that says nothing in time is ended.
    """
    if host is not None and not foreground:
        try:
            connection = connect_to_host(host, away_s=HOST_AWAY_S)
        except OSError as exc:
            raise MountError(
                f"the process that starts mounts does not answer at {host}: {exc.strerror}",
                hint="Start it: python -m fuse_mount --host",
            ) from exc
        with connection:
            return ask_host(connection, arguments, files, variables)
    files.make_folder()
    child, talk = spawn(arguments, files.log, environment(variables), attached=foreground)
    with contextlib.closing(talk):
        try:
            word: dict[str, Any] = talk.hear(timeout_s=READY_TIMEOUT_S)
        except MountError as exc:
            if isinstance(exc.__cause__, TimeoutError):
                _end(child, talk, foreground=foreground)
            raise
        finally:
            if not foreground:
                child.wait()  # the parent of the daemon, which ends as soon as it has forked
    if foreground:
        wait_for(child)
    return word


def wait_for(child: subprocess.Popen[bytes]) -> None:
    """Wait for a supervisor's end. Ctrl-C is its business, too: it unmounts."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            child.wait()
            return


def _end(child: subprocess.Popen[bytes], talk: Talk, *, foreground: bool) -> None:
    """End what was started. A read-write mount's supervisor ends its server when it is told to; what does not end is
    killed, with all that it has forked."""
    # Its session, which is named by whoever forked it; in the foreground that is the caller's own.
    end = os.kill if foreground else os.killpg
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            end(child.pid, number)
        deadline = time.monotonic() + _END_TIMEOUT_S
        while readable(talk.connection.fileno(), max(deadline - time.monotonic(), 0.0)):
            if not talk.connection.recv(65536):  # nobody has the other end any more, whatever was said before
                child.wait()
                return
    child.wait()


def connect_to_host(host: Path, *, away_s: float) -> socket.socket:
    """Return a connection to a mount host, which is waited for this long. Raises `OSError`."""
    deadline = time.monotonic() + away_s
    while True:
        try:
            return ipc.connect(host, timeout_s=HOST_AWAY_S)
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_HOST_RETRY_S)


def ask_host(
    connection: socket.socket, arguments: list[str], files: FilesOfMount[Any], variables: dict[str, str]
) -> dict[str, Any]:
    """Return what a process says that the host at the other end starts. `MountError` says why there is none."""
    request = {"op": "start", "arguments": arguments, "mountpoint": files.mountpoint, "variables": variables}
    try:
        ipc.send(connection, request)
        answer, _ = ipc.receive(connection, timeout_s=_HOST_TIMEOUT_S)
    except (OSError, ValueError) as exc:
        raise MountError(
            f"the process that starts mounts ended while it did: {exc}", hint=f"Try again; see {files.log}"
        ) from exc
    found: dict[str, Any] = ipc.result_of(answer)
    return found


def environment(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process that imports this package from where it lies."""
    package = str(Path(__file__).parents[2])
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", package)]
    return os.environ | variables | {"PYTHONPATH": os.pathsep.join([package, *known])}


class Signals:
    """The signals of this process, as a descriptor that a loop waits for: handlers do nothing themselves."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self.fd, self.wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.wake_fd, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, lambda _number, _frame: None)

    def received(self) -> frozenset[int]:
        """Return the numbers of those that came since the last call."""
        try:
            return frozenset(os.read(self.fd, 4096))
        except BlockingIOError:
            return frozenset()


def raise_open_files() -> None:
    """Allow this process as many descriptors as it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def wait_for_any(reading: Iterable[int], writing: set[int], times: Sequence[float]) -> set[int]:
    """Wait for descriptors to read or write, or the first of these times (`time.monotonic`); return what to read."""
    poll, reading = select.poll(), set(reading)
    for fd in reading | writing:
        poll.register(fd, (select.POLLIN if fd in reading else 0) | (select.POLLOUT if fd in writing else 0))
    timeout_ms = max(0.0, min(times) - time.monotonic()) * 1000 + 1 if times else None
    return {fd for fd, events in poll.poll(timeout_ms) if events & ~select.POLLOUT}


def readable(fd: int, timeout_s: float) -> bool:
    """Wait until there is something to read. Not by select(2), which knows the first 1,024 descriptors only."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


@contextlib.contextmanager
def watched(pid: int) -> Iterator[Callable[[float], bool]]:
    """Give a function that waits so many seconds for the end of a process, and tells whether it has ended."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        yield lambda _timeout_s: True
        return
    try:
        yield lambda timeout_s: readable(fd, max(timeout_s, 0.0))
    finally:
        os.close(fd)


def homes() -> list[Path]:
    """Return the homes of all processes of mounts that this user may look at."""
    found: set[Path] = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if b"fuse_mount" not in Path("/proc", name, "cmdline").read_bytes().split(b"\0"):
                continue
            for variable in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                if variable.startswith(b"DATACACHE_HOME="):
                    found.add(Path(os.fsdecode(variable.partition(b"=")[2])))
    return sorted(found)


def is_served(info: MountInfo) -> bool:
    """Tell whether the supervisor that a snapshot's mount was last served by lives."""
    if not info.born:  # written by an earlier version
        return serves(info.pid, info.mountpoint)
    return born(info.pid) == info.born


def serves(pid: int, mountpoint: str | Path) -> bool:
    """Tell whether a process lives and belongs to the mount there: ids are given again, also for other mounts."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = [os.fsdecode(word) for word in file.read().split(b"\0")]
        at = words.index("fuse_mount")
        said = dict(zip(words[at + 1 :], words[at + 2 :], strict=False))
        for option in ("--config", "--bucket", "--bucket-server"):
            if option in said:
                return bool(json.loads(said[option])["mountpoint"] == str(mountpoint))
    except (OSError, ValueError, KeyError):
        return False
    return said.get("--takeover") == str(mountpoint)
