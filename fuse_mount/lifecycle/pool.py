"""Pools: the processes that serve the mounts of a home, found or started.

A pool is a supervisor and its worker processes (`supervisor`, `worker_process`), which serve any number of mounts. One
that was mounted in the same surroundings joins the pool that is there: the same environment, user, namespaces, package
and options (`pool_id`). Whatever differs makes another pool, so no mount ever gets another one's credentials or sees
another one's network. The conversation itself is in `mounting`.

    <home>/run/pool-<id>.sock             where the supervisor hears who wants something mounted; the newest has it
    <home>/run/pool.lock                  held while one looks whether there is a supervisor, starts one, or ends
    <home>/run/worker-<id>-<pid>.sock     where a worker gives its descriptors away (`orphans`)
    <home>/mounts/pool.log                what all of them say

Any thread may call; no state.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import datacache
from datacache.core import ipc, lockfile
from datacache.core.disk import open_private
from datacache.core.errors import MountError
from fuse_mount.lifecycle.state import DEFAULT_OPENER, REVIVER, MountConfig

_HELLO_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 60.0
_NOISE = frozenset(
    ("_", "PWD", "OLDPWD", "SHLVL", "TERM", "COLUMNS", "LINES", "LC_CTYPE", "PS1", "LS_COLORS", "DISPLAY", "WINDOWID",
     "TMUX", "TMUX_PANE", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY",
     "STY", "COLORTERM", "TERM_PROGRAM", "PYTEST_CURRENT_TEST")
)  # fmt: skip
_NOISY = ("XDG_SESSION_", "VTE_", "INVOCATION_", "JOURNAL_")
"""Variables that differ from shell to shell and that nothing here goes by."""
_PACKAGES = (Path(__file__).parents[1], Path(datacache.__file__).parent)
"""The packages that a pool's processes run."""
_NAMESPACES = ("mnt", "net", "pid", "user")


def pool_id(config: MountConfig, environment: Mapping[str, str], generation: str = "") -> str:
    """The id of the pool that serves a mount. `generation` tells pools of one mount host from those of the next."""
    with contextlib.suppress(OSError):
        generation += "".join(os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES)
    words = [
        generation,
        sys.executable,
        _version(),
        str(os.geteuid()),
        config.home,
        DEFAULT_OPENER if config.opener == REVIVER else config.opener,
        f"{config.workers} {config.resend} {config.clone}",
    ]
    words += [f"{name}={value}" for name, value in sorted(environment.items()) if _counts(name)]
    return hashlib.blake2b("\0".join(words).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _counts(name: str) -> bool:
    return name not in _NOISE and not name.startswith(_NOISY)


def _version() -> str:
    """Name the code that would serve a mount, as it lies there: what is upgraded is served by new processes."""
    newest = [0] * len(_PACKAGES)
    for number, package in enumerate(_PACKAGES):
        for folder, _, names in os.walk(package):
            for name in names:
                if name.endswith(".py"):
                    with contextlib.suppress(FileNotFoundError):  # an editor's link to nothing, or replaced just now
                        newest[number] = max(newest[number], os.stat(f"{folder}/{name}").st_mtime_ns)
    return f"{_PACKAGES} {newest}"


def worker_socket(home: str | Path, pool: str, pid: int) -> Path:
    """Return where a worker of a pool can be asked for descriptors."""
    return Path(home) / "run" / f"worker-{pool}-{pid}.sock"


class Talk:
    """A conversation with a pool's supervisor. Close it."""

    def __init__(self, connection: socket.socket, log: Path) -> None:
        self._connection = connection
        self._log = log

    def ask(self, request: ipc.Message, *, timeout_s: float, fds: tuple[int, ...] = ()) -> Any:
        """The answer, or its error as a `MountError`."""
        try:
            ipc.send(self._connection, request, fds)
            answer, _ = ipc.receive(self._connection, timeout_s=timeout_s)
        except TimeoutError as exc:
            raise MountError(f"the mount did not start in {timeout_s:.0f} s; see {self._log}") from exc
        except (OSError, ValueError) as exc:
            raise MountError(f"the mount process ended at once; see {self._log}") from exc
        return ipc.result_of(answer)

    def close(self) -> None:
        """End it. What was opened and is not served yet is closed again."""
        self._connection.close()


class Pool:
    """One pool of a home, whether it runs or not."""

    def __init__(self, home: str | Path, id: str) -> None:
        self.home = Path(home)
        self.id = id
        self.socket = self.home / "run" / f"pool-{id}.sock"
        self.log = self.home / "mounts" / "pool.log"

    def join(self, environment: Mapping[str, str], *, workers: int, unless: int = 0) -> Talk:
        """A conversation with the pool's supervisor, which is started if there is none, or where it is the process
        `unless`: the new one then has its place. Raises `MountError`.
        """
        self._make_folders()
        talk = self._talk_to_other_than(unless)
        if talk is not None:
            return talk
        with self.locked():
            talk = self._talk_to_other_than(unless)  # others may have been here first
            if talk is None:
                talk, _ = self._start(environment, workers, ["--daemon"])
            return talk

    def start_alone(self, environment: Mapping[str, str], *, workers: int) -> tuple[Talk, subprocess.Popen[bytes]]:
        """A supervisor that nobody else joins, as a child with this process's streams. Raises `MountError`."""
        self._make_folders()
        return self._start(environment, workers, ["--alone"])

    def locked(self, *, wait: bool = True) -> AbstractContextManager[bool]:
        """Hold the lock under which supervisors come and go. Give False where `wait` is false and another has it."""
        return lockfile.held(self.home / "run" / "pool.lock", wait=wait)

    def _make_folders(self) -> None:
        for folder in (self.home / "run", self.home / "mounts"):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as exc:
                raise MountError(
                    f"the folder {folder} cannot be made: {exc.strerror}",
                    hint="Set DATACACHE_HOME to a folder you can write to.",
                ) from exc

    def _talk_to_other_than(self, unless: int) -> Talk | None:
        """Open a conversation with the supervisor that listens; None where there is none, or it is process `unless`."""
        talk, pid = self._hello()
        if talk is not None and pid == unless:
            talk.close()
            return None
        return talk

    def _hello(self) -> tuple[Talk | None, int]:
        """A conversation with the supervisor that listens, and its process id."""
        try:
            connection = ipc.connect(self.socket, timeout_s=_HELLO_TIMEOUT_S)
        except OSError:
            return None, 0
        talk = Talk(connection, self.log)
        try:
            return talk, int(talk.ask({"op": "hello"}, timeout_s=_HELLO_TIMEOUT_S)["pid"])
        except MountError:  # it ends just now, or stands still
            talk.close()
            return None, 0

    def _start(
        self, environment: Mapping[str, str], workers: int, options: list[str]
    ) -> tuple[Talk, subprocess.Popen[bytes]]:
        alone = "--alone" in options
        ours, theirs = socket.socketpair()
        words = [
            "--supervise",
            "--pool",
            self.id,
            "--home",
            str(self.home),
            "--workers",
            str(workers),
            "--first",
            str(theirs.fileno()),
        ]
        try:
            with theirs, open(self.log, "ab", opener=open_private) as log:
                child = subprocess.Popen(
                    [sys.executable, "-m", "fuse_mount", *words, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=None if alone else log,
                    stderr=None if alone else log,
                    env=dict(environment),
                    pass_fds=[theirs.fileno()],
                    start_new_session=not alone,
                )
        except OSError as exc:
            ours.close()
            raise MountError(
                f"the mount process cannot be started: {exc.strerror or exc}",
                hint=f"See whether memory, descriptors or the disk of {self.log} have run out.",
            ) from exc
        talk = Talk(ours, self.log)
        try:
            talk.ask({"op": "hello"}, timeout_s=_START_TIMEOUT_S)
        except MountError:
            talk.close()
            if alone:
                child.kill()
            child.wait()
            raise
        if not alone:
            child.wait()  # the parent of the daemon, which ends as soon as it has forked
        return talk, child
