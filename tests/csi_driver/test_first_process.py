"""A node's containers with the commands of the chart, as a kubelet keeps them, while their processes are killed.

`DATACACHE_TEST_KILLS` (how many kills the long test has, 5) asks for more.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fuse_mount
from csi_driver import first_process
from datacache.api import create_snapshot
from datacache.daemon import paths
from datacache.settings import Settings, load_settings
from fuse_mount import MountInfo
from fuse_mount.lifecycle import keeping
from fuse_mount.lifecycle.state import MountFiles
from tests.csi_driver.containers import KubeletContainer, until
from tests.csi_driver.kubelet import needs_root
from tests.deploy.test_manifests import node_container
from tests.fuse_mount.test_crashes import Readers
from tests.promises import promise

KILLS = int(os.environ.get("DATACACHE_TEST_KILLS") or 5)
RUN = [sys.executable, "-m", "csi_driver.first_process"]


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*RUN, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# --- alone ----------------------------------------------------------------------------------------------------------


@promise("A killed program of a container is started again at once, and the log says so")
def test_a_command_that_is_killed_is_started_again_and_the_log_says_so() -> None:
    first = start("sh", "-c", "echo $$; exec sleep 100")
    assert first.stdout is not None
    for _ in range(2):
        os.kill(int(first.stdout.readline()), signal.SIGKILL)
    last = int(first.stdout.readline())
    first.send_signal(signal.SIGTERM)
    _, log = first.communicate(timeout=30)
    assert (first.returncode, log.count("was ended by SIGKILL")) == (128 + signal.SIGTERM, 2)
    assert not Path(f"/proc/{last}").exists()


@promise("SIGTERM reaches a container's program, whose orphans live on and are reaped")
def test_signals_reach_the_command_and_its_exit_code_is_passed_on() -> None:
    script = "trap 'echo again' HUP; trap 'echo ends; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    first = start("sh", "-c", script)
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    first.send_signal(signal.SIGHUP)
    assert first.stdout.readline() == "again\n"
    first.send_signal(signal.SIGTERM)
    out, _ = first.communicate(timeout=30)
    assert (out, first.returncode) == ("ends\n", 7)


@promise("A killed program of a container is started again at once, and the log says so")
def test_a_command_that_cannot_start_is_not_hidden() -> None:
    first = start("sh", "-c", "echo tried; exit 3")
    out, log = first.communicate(timeout=60)
    assert (first.returncode, out.count("tried")) == (3, first_process.GIVE_UP_AFTER)
    assert "so does this container" in log
    missing = start("/nowhere/at-all")
    _, log = missing.communicate(timeout=30)
    assert (missing.returncode, "/nowhere/at-all cannot be started" in log) == (127, True)
    assert start().wait(timeout=30) == 2


def test_it_can_be_told_to_end_while_it_pauses() -> None:
    first = start("sh", "-c", "echo $$; exit 1")
    assert first.stdout is not None
    for _ in range(3):
        first.stdout.readline()
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=30)
    assert first.returncode in (1, 128 + signal.SIGTERM)


@promise("SIGTERM reaches a container's program, whose orphans live on and are reaped")
def test_what_the_command_leaves_behind_lives_on_and_is_reaped() -> None:
    first = start("sh", "-c", "sleep 0.01 & sleep 100 & echo $!; exec sleep 100")
    assert first.stdout is not None
    left = int(first.stdout.readline())
    [command] = [pid for pid in children_of(first.pid) if pid != left]
    os.kill(command, signal.SIGKILL)
    another = int(first.stdout.readline())
    until(lambda: left in children_of(first.pid), "the orphan is not its child")
    os.kill(left, signal.SIGKILL)
    until(lambda: left not in children_of(first.pid), "the orphan is not reaped")
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 128 + signal.SIGTERM
    os.kill(another, signal.SIGKILL)
    first.communicate(timeout=30)


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@promise("Liveness probes notice a driver, mount host or daemon that hangs, and wait for one that opens its cache")
def test_the_probe_of_the_mounts_notices_a_host_that_hangs(tmp_path: Path) -> None:
    place = tmp_path / "mounts.sock"
    check = [sys.executable, "-m", "csi_driver.host_check", str(place)]
    nobody = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert (nobody.returncode, str(place) in nobody.stderr) == (1, True)
    environment = os.environ | {"DATACACHE_HOME": str(tmp_path), "DATACACHE_MOUNT_HOST": str(place)}
    host = subprocess.Popen([sys.executable, "-m", "fuse_mount", "--host"], env=environment)
    try:
        until(place.exists, "no host")
        assert subprocess.run(check, timeout=60, check=False).returncode == 0
        host.send_signal(signal.SIGSTOP)
        assert subprocess.run(check, timeout=60, check=False, capture_output=True).returncode == 1
    finally:
        host.kill()
        host.wait()


# --- a node ---------------------------------------------------------------------------------------------------------


class Node:
    """The containers `mounts` and `daemon` as the chart has them, and one snapshot that is mounted."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings = settings
        self.containers = {
            name: KubeletContainer(self._command(name, folder), folder / f"{name}.log") for name in ("mounts", "daemon")
        }

        self._killed: dict[str, list[float]] = {name: [] for name in self.containers}

    @staticmethod
    def _command(name: str, folder: Path) -> list[str]:
        command = [word.replace("/tmp/", f"{folder}/") for word in node_container("the defaults", name)["command"]]
        return [sys.executable if word == "python" else word for word in command]

    def mount(self, reference: str, folder: Path) -> MountInfo:
        """Mount it as the driver does."""
        folder.mkdir()
        return fuse_mount.mount_snapshot(reference, str(folder), settings=self.settings)

    def program(self, name: str) -> int:
        """The process of a container that does its work: not the one that only starts it."""
        words = {"mounts": "--host", "daemon": "datacache.daemon"}[name]
        for pid in self.containers[name].processes():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if words.encode() in line and b"csi_driver.first_process" not in line:
                    return pid
        return 0

    def has_two_owners(self, info: MountInfo) -> bool:
        """Tell whether the mount runs in the mounts' container, and the daemon in its own one keeps the descriptor."""
        files = MountFiles(self.settings.home, info.mountpoint)
        now = files.read()
        if now is None or not now.kept:
            return False
        if now.pid not in self.containers["mounts"].processes():
            return False
        with contextlib.suppress(TimeoutError):
            return files.key in keeping.kept(self.settings.home)
        return False

    def _note_kill(self, name: str) -> None:
        """Wait, if one more death this soon would be a crash loop, which is the kubelet's to show."""
        recent = self._killed[name]
        if len(recent) == first_process.GIVE_UP_AFTER - 1:
            until(lambda: time.monotonic() > recent[-1] + first_process.CALM_S + 5.0, "time stands still")
            recent.clear()
        recent.append(time.monotonic())

    def kill_program(self, name: str) -> None:
        """SIGKILL to who does a container's work, unless the kubelet has the container wait."""
        self._note_kill(name)
        until(lambda: self.program(name) or not self.containers[name].first_pid, f"nobody does the work of {name}")
        if pid := self.program(name):
            os.kill(pid, signal.SIGKILL)

    def kill_all_but_the_first(self, name: str) -> None:
        """SIGKILL to what a container does: nothing of it is to react to the death of another one."""
        self._note_kill(name)
        container, stopped = self.containers[name], set[int]()
        keep = {container.first_pid} if self.program(name) != container.first_pid else set[int]()
        while found := container.processes() - stopped - keep:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= found
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def node(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("DATACACHE_DAEMON", "external")
    monkeypatch.setenv("DATACACHE_SOURCES", f"{tmp_path.as_uri()}/")  # which a node reads for others
    monkeypatch.setenv("DATACACHE_MOUNT_HOST", str(paths.mount_host_path(home)))
    node = Node(tmp_path, load_settings())
    for container in node.containers.values():
        container.start()
    until(lambda: paths.mount_host_path(home).exists(), "no host")
    yield node
    for container in reversed(node.containers.values()):
        container.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    dice = random.Random(7)
    for number in range(64):
        (folder / f"{number:03}.bin").write_bytes(dice.randbytes(100_000))
    (folder / "large.bin").touch()  # which `Readers` leave out
    return folder


@promise("After any kill but of first processes, reads only wait, and mounts have owners again within seconds")
@needs_root
def test_kills_of_both_keepers_in_turn_break_no_read_with_the_pauses_of_a_kubelet(
    node: Node, source: Path, tmp_path: Path
) -> None:
    create_snapshot("mask", str(source), tags=["v1"], settings=node.settings)
    info = node.mount("mask@v1", tmp_path / "mounted")
    until(lambda: node.has_two_owners(info), "it is not mounted")
    victims: list[Callable[[], None]] = [
        lambda: node.kill_all_but_the_first("mounts"),
        lambda: node.kill_all_but_the_first("daemon"),
        lambda: node.kill_program("mounts"),
        lambda: node.kill_program("daemon"),
        lambda: os.kill(supervisor_of(node, info), signal.SIGKILL),
    ]
    readers = Readers(info, source, count=1)
    waits: list[float] = []
    alone: list[float] = []
    for number in range(KILLS):
        victims[number % len(victims)]()
        began = time.monotonic()
        (tmp_path / "mounted" / f"never-looked-up-{number}").exists()  # served by somebody
        waits.append(time.monotonic() - began)
        until(lambda: node.has_two_owners(info), f"one owner only after kill {number}")
        alone.append(time.monotonic() - began)
    reads, errors, wrong = readers.finish()
    print(f"{KILLS} kills, {reads} reads, {errors} errors, {wrong} wrong; the first look-up after a kill took")
    print(f"at the median {sorted(waits)[len(waits) // 2]:.2f} s, at most {max(waits):.2f} s;")
    print(f"it had both owners again after {sorted(alone)[len(alone) // 2]:.2f} s and {max(alone):.2f} s")
    assert (errors, wrong) == (0, 0)
    assert reads > 0
    assert [container.restarts for container in node.containers.values()] == [0, 0]
    assert fuse_mount.unmount(info.mountpoint, settings=node.settings)


def supervisor_of(node: Node, info: MountInfo) -> int:
    found = MountFiles(node.settings.home, info.mountpoint).read()
    assert found is not None
    return found.pid
