"""A worker process on its socket to the supervisor and on its own, at the moments when one of the two goes away."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from datacache.core import ipc
from datacache.settings import Settings
from fuse_mount.lifecycle.pool import Pool, worker_socket
from fuse_mount.lifecycle.state import MountConfig
from fuse_mount.snapshot.worker_process import EXIT_STOPPED, MOST_MESSAGE_BYTES
from tests.fuse_mount.mount_processes import wait_until
from tests.promises import promise

pytestmark = [
    promise("A killed supervisor is replaced, no read breaks, and its workers end once their mounts are taken over")
]

_RUN = (
    "import socket, sys\n"
    "from fuse_mount.snapshot import worker_process\n"
    "from fuse_mount.lifecycle.pool import Pool\n"
    "worker_process.run(socket.socket(fileno=int(sys.argv[1])), Pool(sys.argv[2], 'mine'), bypass=False)\n"
)


class Run:
    """A worker process, and this side of its channel."""

    def __init__(self, home: Path, channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.channel = channel
        self.process = process
        self._socket = worker_socket(home, Pool(home, "mine").id, process.pid)

    def order(self, message: dict[str, object], *fds: int) -> None:
        socket.send_fds(self.channel, [json.dumps(message).encode()], fds)

    def hear(self) -> dict[str, object]:
        message: dict[str, object] = json.loads(self.channel.recv(MOST_MESSAGE_BYTES))
        return message

    def ask(self, operation: str, mountpoint: str, device: int) -> list[int]:
        """Ask on its own socket, again until it has read the order to serve that mount."""
        wait_until(self._socket.parent, self._socket.exists)
        deadline = time.monotonic() + 30
        while True:
            with ipc.connect(self._socket, timeout_s=10.0) as connection:
                ipc.send(connection, {"op": operation, "mountpoint": mountpoint, "device": device})
                answer, fds = ipc.receive(connection, timeout_s=30.0, most_fds=1)
            if answer == {"ok": None}:
                return fds
            assert time.monotonic() < deadline, answer
            time.sleep(0.01)


@pytest.fixture
def run(settings: Settings) -> Iterator[Run]:
    (settings.home / "run").mkdir(parents=True)
    with ExitStack() as stack:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(ours)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _RUN, str(theirs.fileno()), str(settings.home)], pass_fds=[theirs.fileno()]
            )
        stack.callback(process.wait)
        stack.callback(process.kill)
        yield Run(settings.home, ours, process)


def config(settings: Settings, opener: str) -> dict[str, object]:
    return asdict(
        MountConfig(
            ref="mask@v1",
            mountpoint="/nowhere/mask",
            home=str(settings.home),
            uid=0,
            gid=0,
            allow_other=False,
            workers=1,
            opener=f"tests.fuse_mount.standin:{opener}",
        )
    )


@pytest.fixture
def device() -> Iterator[int]:
    """A pipe in the place of a mount's descriptor: no request ever comes."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    yield ours
    os.close(ours)
    os.close(theirs)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gate"
    os.mkfifo(path)
    monkeypatch.setenv("STANDIN_GATE", str(path))
    return path


@pytest.mark.usefixtures("folder")
def test_a_mount_that_is_taken_over_before_its_serving_has_begun_is_let_go_of(
    gate: Path, run: Run, settings: Settings, device: int
) -> None:
    run.order({"op": "open", "mount": 1, "config": config(settings, "open_behind_gate")})
    run.order({"op": "serve", "mount": 1, "device": 7, "own": True}, device)
    run.ask("stop", "/nowhere/mask", 7)
    os.close(os.open(gate, os.O_WRONLY))
    assert "opened" in run.hear()
    assert run.hear() == {"mount": 1, "ended": "stopped"}


@pytest.mark.usefixtures("folder")
def test_a_descriptor_can_be_had_as_soon_as_it_was_given(run: Run, settings: Settings, device: int) -> None:
    run.order({"op": "open", "mount": 1, "config": config(settings, "open_folder")})
    assert "opened" in run.hear()
    run.order({"op": "serve", "mount": 1, "device": 7, "own": True}, device)
    [fd] = run.ask("descriptor", "/nowhere/mask", 7)
    assert os.fstat(fd).st_ino == os.fstat(device).st_ino
    os.close(fd)


@pytest.mark.usefixtures("folder")
def test_no_program_that_a_worker_starts_inherits_its_mounts(run: Run, settings: Settings, device: int) -> None:
    run.order({"op": "open", "mount": 1, "config": config(settings, "open_folder")})
    assert "opened" in run.hear()
    run.order({"op": "serve", "mount": 1, "device": 7, "own": True}, device)
    for fd in run.ask("descriptor", "/nowhere/mask", 7):  # it was given by now
        os.close(fd)
    process = Path(f"/proc/{run.process.pid}")
    given = [fd.name for fd in (process / "fd").iterdir() if os.path.samestat(fd.stat(), os.fstat(device))]
    assert given
    for fd in given:
        flags = re.search(r"^flags:\s+([0-7]+)$", (process / "fdinfo" / fd).read_text(), re.MULTILINE)
        assert flags is not None
        assert int(flags[1], 8) & os.O_CLOEXEC


@pytest.mark.usefixtures("folder", "gate")
def test_it_ends_with_its_supervisor_while_it_only_opens_something(run: Run, settings: Settings) -> None:
    run.order({"op": "open", "mount": 1, "config": config(settings, "open_behind_gate")})
    run.channel.close()
    assert run.process.wait(timeout=60) == EXIT_STOPPED


@pytest.mark.usefixtures("folder")
def test_it_hears_all_that_a_supervisor_said_that_has_ended(run: Run, settings: Settings, device: int) -> None:
    run.order({"op": "open", "mount": 1, "config": config(settings, "open_folder")})
    assert select.select([run.channel], [], [], 60)[0]  # what it says is never read, so the kernel resets the channel
    os.kill(run.process.pid, signal.SIGSTOP)
    run.order({"op": "serve", "mount": 1, "device": 7, "own": True}, device)
    run.channel.close()
    os.kill(run.process.pid, signal.SIGCONT)
    run.ask("stop", "/nowhere/mask", 7)
    assert run.process.wait(timeout=60) == EXIT_STOPPED
