"""The processes of a mount, seen from outside: started, waited for, watched.

Used by `launch`, `bucket_launch` and `bucket_supervisor`. No state; any thread may call.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from datacache.core.errors import MountError
from fuse_mount.state import FilesOfMount

_READY_TIMEOUT_S = 90.0


def start(arguments: list[str], files: FilesOfMount, variables: dict[str, str], *, foreground: bool) -> dict[str, Any]:
    """Run `python -m fuse_mount` with these arguments and wait for its word: what it says when the mount can be used.

    In the foreground the call returns when the process has ended. Raises `MountError` with what it says instead.
    """
    files.make_folder()
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    command = [sys.executable, "-m", "fuse_mount", *arguments, "--ready-fd", str(theirs)]
    with open(files.log, "ab") as log:
        process = subprocess.Popen(
            command if foreground else [*command, "--daemon"],
            stdin=subprocess.DEVNULL,
            stdout=None if foreground else log,
            stderr=None if foreground else log,
            env=environment(variables),
            pass_fds=[theirs],
            start_new_session=not foreground,
        )
    os.close(theirs)
    with open(ours, "rb") as pipe:
        text = _read_word(pipe.fileno(), files)
    if foreground:
        return _wait_for(process, text, files)
    process.wait()  # the parent of the daemon, which ends as soon as it has forked
    return parse_word(text, files)


def environment(variables: dict[str, str]) -> dict[str, str]:
    """The environment of a process that imports this package from where it lies."""
    package = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return os.environ | variables | {"PYTHONPATH": path}


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
        word = json.loads(text)
    except ValueError as exc:
        raise MountError(f"the mount process ended at once; see {files.log}") from exc
    if "error" in word:
        raise MountError(word["error"], hint=word.get("hint", ""))
    found: dict[str, Any] = word["ok"]
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
