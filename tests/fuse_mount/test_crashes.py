"""Workers and supervisors die while others read: no reader may notice, and no byte may be wrong.

`DATACACHE_TEST_KILLS` (how many kills a run has, 8) asks for long ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fuse_mount
from datacache.settings import Settings
from fuse_mount import MountInfo
from fuse_mount.kernel.session import resend
from tests.fuse_mount.conftest import Mounter
from tests.fuse_mount.test_session import ended
from tests.promises import promise

KILLS = int(os.environ.get("DATACACHE_TEST_KILLS") or 8)

_READER = """
import os, random, sys
mnt, source, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
paths = [os.path.relpath(os.path.join(t, n), source) for t, _, names in os.walk(source) for n in names]
for left_out in ("large.bin", *sys.argv[4:]):
    paths.remove(left_out)
expected = {p: open(os.path.join(source, p), "rb").read() for p in paths}
dice = random.Random(seed)
reads = errors = wrong = 0
print("ready", flush=True)
os.set_blocking(0, False)
while True:
    try:
        if not os.read(0, 1):
            break
    except BlockingIOError:
        pass
    path = dice.choice(paths)
    try:
        fd = os.open(os.path.join(mnt, path), os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            data = b""
            while part := os.pread(fd, 2**21, len(data)):  # of an error amid a file the first read tells by its length
                data += part
        finally:
            os.close(fd)
        if dice.random() < 0.05:
            os.listdir(os.path.dirname(os.path.join(mnt, path)))
    except OSError as exc:
        errors += 1
        print(path, exc, file=sys.stderr)
        continue
    reads += 1
    if data != expected[path]:
        wrong += 1
        at = next((n for n, pair in enumerate(zip(data, expected[path])) if pair[0] != pair[1]), None)
        print(f"{path}: {len(data)} of {len(expected[path])} bytes, the first wrong one at {at}", file=sys.stderr)
print(reads, errors, wrong)
"""


class Readers:
    """Processes that read random files past the page cache and compare every byte."""

    def __init__(self, info: MountInfo, source: Path, count: int = 3, without: tuple[str, ...] = ()) -> None:
        command = [sys.executable, "-c", _READER, str(info.mountpoint), str(source)]
        self._processes = [
            subprocess.Popen([*command, str(seed), *without], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for seed in range(count)
        ]
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def finish(self) -> tuple[int, int, int]:
        """(reads, errors, wrong reads)."""
        said = [process.communicate()[0].split() for process in self._processes]
        return sum(int(s[0]) for s in said), sum(int(s[1]) for s in said), sum(int(s[2]) for s in said)


@pytest.fixture
def kernel_resends(folder: Path, mounter: Mounter) -> None:
    """Skips on kernels before 6.9."""
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if release < (6, 9):
        pytest.skip(f"this kernel ({os.uname().release}) has no FUSE_NOTIFY_RESEND")


def kill_a_worker(info: MountInfo, settings: Settings, dice: random.Random) -> None:
    """SIGKILL to a worker that serves now, and wait until it is replaced."""
    before = fuse_mount.status(info.mountpoint, settings).workers
    victim = dice.choice(before)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    while True:
        now = fuse_mount.status(info.mountpoint, settings).workers
        if victim not in now and len(now) == len(info.workers):
            return
        time.sleep(0.005)


@promise("Workers and daemon may be killed again and again: no read breaks, no byte is wrong (Linux 6.9 and newer)")
@pytest.mark.usefixtures("kernel_resends")
@pytest.mark.parametrize("workers", [1, 2])
def test_killing_workers_again_and_again_breaks_no_read(
    folder: Path, mounter: Mounter, settings: Settings, workers: int
) -> None:
    info = mounter(workers=workers)
    readers = Readers(info, folder)
    dice = random.Random(workers)
    for _ in range(KILLS):
        kill_a_worker(info, settings, dice)
        (info.mountpoint / f"never-looked-up-{dice.random()}").exists()  # served by somebody: readers go on between
    reads, errors, wrong = readers.finish()
    assert (errors, wrong) == (0, 0)
    assert reads > 0
    assert not fuse_mount.status(info.mountpoint, settings).bypassed


@pytest.mark.usefixtures("kernel_resends")
def test_a_read_that_waits_for_the_store_survives_its_worker(
    folder: Path, mounter: Mounter, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, waiting, gate = _waiting_read(folder, mounter, monkeypatch)
    os.kill(info.workers[0], signal.SIGKILL)
    (info.mountpoint / "not-there").exists()  # answered by the successor
    opened = os.open(gate, os.O_RDWR)
    try:
        assert waiting.communicate()[0] == b"late"
    finally:
        os.close(opened)


@promise("On older kernels a killed worker's reads end with an error instead of hanging")
def test_without_resend_a_dead_workers_requests_are_aborted_and_new_ones_served(
    folder: Path, mounter: Mounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, waiting, gate = _waiting_read(folder, mounter, monkeypatch, resend=False)
    os.kill(info.workers[0], signal.SIGKILL)
    opened = os.open(gate, os.O_RDWR)
    try:
        # Never a wait for ever: the aborted request was a read-ahead, so the kernel asks once more before it
        # fails.
        assert waiting.communicate()[0] == (b"" if waiting.returncode else b"late")
    finally:
        os.close(opened)
    assert (info.mountpoint / "large.bin").read_bytes() == (folder / "large.bin").read_bytes()


def test_without_resend_what_no_worker_had_read_is_served(folder: Path, mounter: Mounter, settings: Settings) -> None:
    info = mounter(resend=False)
    readers = Readers(info, folder)
    dice = random.Random(5)
    for _ in range(KILLS):
        kill_a_worker(info, settings, dice)
    reads, errors, wrong = readers.finish()
    assert wrong == 0
    assert errors <= KILLS * 3 * 2  # at most what was in flight at each kill
    assert reads > errors


def _waiting_read(
    folder: Path, mounter: Mounter, monkeypatch: pytest.MonkeyPatch, **options: bool
) -> tuple[MountInfo, subprocess.Popen[bytes], Path]:
    """A mount with one worker, and a process that reads a file whose bytes do not come."""
    (folder / "slow").mkdir()
    (folder / "slow" / "file").write_bytes(b"late")
    gate = folder.parent / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("STANDIN_GATE", str(gate))
    info = mounter(workers=1, **options)
    waiting = subprocess.Popen(
        ["cat", info.mountpoint / "slow" / "file"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    while "fetch" not in _threads(info.workers[0]):
        os.sched_yield()
    return info, waiting, gate


def _threads(pid: int) -> str:
    """Which threads wait for a FIFO to be opened, by what the kernel says they are in."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "wchan").read_text() in ("wait_for_partner", "fifo_open"):
                states.append("fetch")
    return " ".join(states)


@promise("Workers that crash over local files end up reading around them")
def test_workers_that_crash_over_local_bytes_go_round_them_in_the_end(
    folder: Path, mounter: Mounter, settings: Settings
) -> None:
    (folder / "crash").mkdir()
    (folder / "crash" / "file").write_bytes(b"found another way")
    info = mounter(workers=1)
    content = None
    while content is None:  # on an old kernel each crash is an error for its reader
        with contextlib.suppress(OSError):
            content = (info.mountpoint / "crash" / "file").read_bytes()
    assert content == b"found another way"
    assert fuse_mount.status(info.mountpoint, settings).bypassed
    assert "nothing that lies on this node is used" in info.log.read_text()


@promise("A killed supervisor is replaced, no read breaks, and its workers end once their mounts are taken over")
def test_a_killed_supervisor_is_replaced_and_no_read_breaks(folder: Path, mounter: Mounter, settings: Settings) -> None:
    info = mounter()
    readers = Readers(info, folder)
    os.kill(info.pid, signal.SIGKILL)
    assert ended(info.pid)
    assert all(ended(pid) for pid in info.workers)  # they go when a new supervisor has taken over
    [after] = fuse_mount.list_mounts(settings)
    assert after.pid != info.pid
    dice = random.Random(2)
    kill_a_worker(after, settings, dice)
    reads, errors, wrong = readers.finish()
    assert (errors, wrong) == (0, 0)
    assert reads > 0
    fuse_mount.unmount(info.mountpoint, settings=settings)
    assert ended(after.pid)


@promise("An upgrade does not unmount")
def test_a_hand_over_while_others_read_breaks_no_read(folder: Path, mounter: Mounter, settings: Settings) -> None:
    info = mounter()
    readers = Readers(info, folder)
    seen = {info.pid}
    for _ in range(3):
        before = fuse_mount.status(info.mountpoint, settings)
        after = fuse_mount.takeover(info.mountpoint, settings)
        assert (after.ref, after.device, after.started_at) == (before.ref, before.device, before.started_at)
        assert after.pid not in seen
        seen.add(after.pid)
        assert all(ended(pid) for pid in (before.pid, *before.workers))
        assert fuse_mount.status(info.mountpoint, settings).pid == after.pid
    reads, errors, wrong = readers.finish()
    assert (errors, wrong) == (0, 0)
    assert reads > 0


def test_a_hand_over_without_resend_loses_nothing_either(folder: Path, mounter: Mounter, settings: Settings) -> None:
    info = mounter(resend=False)
    readers = Readers(info, folder)
    for _ in range(2):
        fuse_mount.takeover(info.mountpoint, settings)
    assert readers.finish()[1:] == (0, 0)


@pytest.mark.usefixtures("kernel_resends")
def test_workers_that_share_one_descriptor_may_die_and_be_handed_over(
    folder: Path, mounter: Mounter, settings: Settings
) -> None:
    info = mounter(clone=False)
    readers = Readers(info, folder)
    dice = random.Random(4)
    for _ in range(KILLS // 2):
        kill_a_worker(info, settings, dice)
    info = fuse_mount.takeover(info.mountpoint, settings)
    for _ in range(KILLS // 2):
        kill_a_worker(info, settings, dice)
    reads, errors, wrong = readers.finish()
    assert (errors, wrong) == (0, 0)
    assert reads > 0
    fuse_mount.unmount(info.mountpoint, settings=settings)
    assert all(ended(pid) for pid in (info.pid, *info.workers))


def device_of(pid: int) -> int:
    """A copy of the descriptor of /dev/fuse that a process has (pidfd_getfd(2))."""
    folder = f"/proc/{pid}/fd"
    number = next(int(name) for name in os.listdir(folder) if os.readlink(f"{folder}/{name}") == "/dev/fuse")
    pidfd = os.pidfd_open(pid)
    try:
        fd: int = ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, number, 0)
        assert fd >= 0, os.strerror(ctypes.get_errno())
        return fd
    finally:
        os.close(pidfd)


def test_a_worker_ends_though_who_got_its_descriptor_makes_it_blocking_again(folder: Path, mounter: Mounter) -> None:
    info = mounter(workers=1)
    (worker,) = info.workers
    os.listdir(info.mountpoint)  # by now it has the descriptor
    shared = device_of(worker)
    os.kill(worker, signal.SIGTERM)
    while os.get_blocking(shared):
        os.sched_yield()
    # Some 20 ms before the worker looks whether it woke up. (On a busy machine this may be later, and the worker
    # gone already. What the descriptor is afterwards tells nothing: the supervisor starts the next worker with it.)
    os.set_blocking(shared, True)
    assert ended(worker)  # no request came that would have woken it up
    os.close(shared)


def test_resend_on_something_else_than_a_new_kernels_device_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def refuse(_fd: int, _data: bytes) -> int:
        raise OSError(errno.EINVAL, "no such notification")

    monkeypatch.setattr(os, "write", refuse)
    assert resend(7) is False
