"""The processes of a mount, seen from outside: started (here, or by the mount host), waited for, watched.

Used by `launch`, `bucket_launch`, `bucket_supervisor` and `host`. No state; any thread may call.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from datacache.core import ipc
from datacache.core.disk import open_private
from datacache.core.errors import MountError
from fuse_mount.lifecycle.state import FilesOfMount, MountInfo

_READY_TIMEOUT_S = 90.0
_END_TIMEOUT_S = 4.0
_HOST_TIMEOUT_S = _READY_TIMEOUT_S + 10.0
HOST_AWAY_S = 20.0
"""How long a host may be away: its container starts again."""
_HOST_RETRY_S = 0.2


def start(
    arguments: list[str],
    files: FilesOfMount,
    variables: dict[str, str],
    *,
    foreground: bool,
    host: Path | None = None,
) -> dict[str, Any]:
    """Run `python -m fuse_mount` with these arguments and wait for its word: what it says when the mount can be used.

    With `host`, the socket of a mount host, that one runs it. In the foreground, which is always here, the call returns
    when the process has ended. Raises `MountError` with what it says instead; one that says nothing in time is ended.
    """
    if host is not None and not foreground:
        return _start_there(host, arguments, files, variables)
    files.make_folder()
    try:
        process, word = _run(arguments, files, variables, foreground=foreground)
    except OSError as exc:
        raise MountError(
            f"the mount process cannot be started: {exc.strerror or exc}",
            hint=f"See whether memory, descriptors or the disk of {files.log} have run out.",
        ) from exc
    with open(word, "rb") as pipe:
        try:
            text = _read_word(pipe.fileno(), files)
        except MountError:
            _end(process, pipe.fileno(), foreground=foreground)
            raise
    if foreground:
        return _wait_for(process, text, files)
    process.wait()  # the parent of the daemon, which ends as soon as it has forked
    return parse_word(text, files)


def _run(
    arguments: list[str], files: FilesOfMount, variables: dict[str, str], *, foreground: bool
) -> tuple[subprocess.Popen[bytes], int]:
    """The process, or the one that forks it, and the descriptor from which its word is read. `OSError`."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    command = [sys.executable, "-m", "fuse_mount", *arguments, "--ready-fd", str(theirs)]
    try:
        with open(files.log, "ab", opener=open_private) as log:
            return subprocess.Popen(
                command if foreground else [*command, "--daemon"],
                stdin=subprocess.DEVNULL,
                stdout=None if foreground else log,
                stderr=None if foreground else log,
                env=environment(variables),
                pass_fds=[theirs],
                start_new_session=not foreground,
            ), ours
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)


def _end(process: subprocess.Popen[bytes], word: int, *, foreground: bool) -> None:
    """End what was started. A read-write mount's supervisor ends its server when it is told to; what does not end is
    killed, with all that it has forked.
    """
    # Its session, which is named by whoever forked it; in the foreground that is the caller's own.
    end = os.kill if foreground else os.killpg
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            end(process.pid, number)
        if _is_closed(word, _END_TIMEOUT_S):
            break
    process.wait()


def _is_closed(word: int, timeout_s: float) -> bool:
    """Wait until nobody has the other end any more, whatever is said before."""
    deadline = time.monotonic() + timeout_s
    while readable(word, max(deadline - time.monotonic(), 0.0)):
        if not os.read(word, 65536):
            return True
    return False


def _start_there(host: Path, arguments: list[str], files: FilesOfMount, variables: dict[str, str]) -> dict[str, Any]:
    """The same by a mount host, which is waited for while it is away."""
    try:
        connection = connect_to_host(host, away_s=HOST_AWAY_S)
    except OSError as exc:
        raise MountError(
            f"the process that starts mounts does not answer at {host}: {exc.strerror}",
            hint="Start it: python -m fuse_mount --host",
        ) from exc
    with connection:
        return ask_host(connection, arguments, files, variables)


def connect_to_host(host: Path, *, away_s: float) -> socket.socket:
    """A connection to a mount host, which is waited for this long. Raises `OSError`."""
    deadline = time.monotonic() + away_s
    while True:
        try:
            return ipc.connect(host, timeout_s=HOST_AWAY_S)
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_HOST_RETRY_S)


def ask_host(
    connection: socket.socket, arguments: list[str], files: FilesOfMount, variables: dict[str, str]
) -> dict[str, Any]:
    """What a process says that the host at the other end starts. `MountError` says why there is none."""
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
    """The environment of a process that imports this package from where it lies."""
    package = str(Path(__file__).parents[2])
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", package)]
    return os.environ | variables | {"PYTHONPATH": os.pathsep.join([package, *known])}


def readable(fd: int, timeout_s: float) -> bool:
    """Wait until there is something to read. Not by select(2), which knows the first 1,024 descriptors only."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _read_word(fd: int, files: FilesOfMount) -> bytes:
    text = b""
    while not text.endswith(b"\n"):
        if not readable(fd, _READY_TIMEOUT_S):
            raise MountError(f"the mount did not start in {_READY_TIMEOUT_S:.0f} s; see {files.log}")
        part = os.read(fd, 65536)
        if not part:
            break
        text += part
    return text


def _wait_for(process: subprocess.Popen[bytes], text: bytes, files: FilesOfMount) -> dict[str, Any]:
    word = parse_word(text, files)
    while True:
        try:
            process.wait()
            return word
        except KeyboardInterrupt:
            continue  # the supervisor got it, too, and unmounts


def parse_word(text: bytes, files: FilesOfMount) -> dict[str, Any]:
    """What a process said, or its error as a `MountError`."""
    try:
        said = json.loads(text)
    except ValueError as exc:
        raise MountError(f"the mount process ended at once; see {files.log}") from exc
    found: dict[str, Any] = ipc.result_of(said)
    return found


def watch(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it has."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def lives(pid: int) -> bool:
    """Whether there is such a process."""
    return os.path.exists(f"/proc/{pid}")


def born(pid: int) -> int:
    """Return when a process started, in ticks since the machine's start (proc(5), stat): together with its id that
    names it. 0 where it has ended.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def homes() -> list[Path]:
    """Return the homes of all processes of mounts that this user may look at."""
    found: set[Path] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            command = Path("/proc", name, "cmdline").read_bytes()
            if b"fuse_mount" not in command.split(b"\0"):
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
    """Whether a process lives and belongs to the mount there: ids are given again, also to other mounts' processes."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = [os.fsdecode(word) for word in file.read().split(b"\0")]
        at = words.index("fuse_mount")
    except (OSError, ValueError):
        return False
    said = dict(zip(words[at + 1 :], words[at + 2 :], strict=False))
    try:
        for option in ("--config", "--bucket", "--bucket-server"):
            if option in said:
                return bool(json.loads(said[option])["mountpoint"] == str(mountpoint))
    except (ValueError, KeyError):
        return False
    return said.get("--takeover") == str(mountpoint)
