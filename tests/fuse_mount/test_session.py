"""Mounting, unmounting, what they refuse, and what they leave behind."""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fuse_mount
from datacache.core.errors import MountError
from datacache.settings import Settings
from fuse_mount.kernel import session
from fuse_mount.lifecycle.state import MountFiles
from tests import leftovers
from tests.fuse_mount.conftest import Mounter
from tests.fuse_mount.mount_processes import unmount_by_hand
from tests.promises import promise


def ended(pid: int) -> bool:
    """Wait (a minute at most) until a process that is not our child has ended."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], 60)[0])
    finally:
        os.close(watched)


def test_unmounting_ends_every_process_and_removes_the_state(
    folder: Path, mounter: Mounter, settings: Settings
) -> None:
    info = mounter(workers=3)
    assert len(info.workers) == 3
    assert [mount.mountpoint for mount in fuse_mount.list_mounts(settings)] == [info.mountpoint]
    assert fuse_mount.unmount(info.mountpoint, settings=settings)
    assert all(ended(pid) for pid in (info.pid, *info.workers))
    assert [path.suffix for path in (settings.home / "mounts").iterdir()] == [".log"]
    assert fuse_mount.list_mounts(settings) == []
    assert not fuse_mount.unmount(info.mountpoint, settings=settings)  # nothing there: nothing done


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user needs the file system of all connections mounted")
def test_a_connection_is_ended_while_somebody_holds_it(tmp_path: Path) -> None:
    fd = session.mount(str(tmp_path), "test", allow_other=False)
    try:
        there = session.mount_at(tmp_path)
        assert there is not None
        session.abort(there.device)
        assert session.is_dead(str(tmp_path))
    finally:
        session.unmount_now(str(tmp_path), lazy=True)
        os.close(fd)


def test_umount_by_hand_ends_everything(folder: Path, mounter: Mounter, settings: Settings) -> None:
    info = mounter()
    unmount_by_hand(info.mountpoint)
    assert all(ended(pid) for pid in (info.pid, *info.workers))
    assert fuse_mount.list_mounts(settings) == []
    assert mounter().pid != info.pid  # and it can be mounted again


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_supervisor_unmounts(
    folder: Path, mounter: Mounter, settings: Settings, number: signal.Signals
) -> None:
    info = mounter()
    os.kill(info.pid, number)
    assert ended(info.pid)
    assert session.mount_at(info.mountpoint) is None


@promise("A busy mount stays, and the message names its users")
def test_a_busy_mount_stays_and_names_who_uses_it(folder: Path, mounter: Mounter, settings: Settings) -> None:
    info = mounter()
    with (info.mountpoint / "large.bin").open("rb") as file:
        with pytest.raises(MountError, match=rf"is busy: used by .*\b{os.getpid()} \(") as caught:
            fuse_mount.unmount(info.mountpoint, settings=settings)
        assert "--lazy" in caught.value.hint
        os.kill(info.pid, signal.SIGTERM)  # refused as well, and said so in the log
        deadline = time.monotonic() + 60
        while f"{os.getpid()} (" not in info.log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert fuse_mount.status(info.mountpoint, settings).pid == info.pid
        assert len(file.read()) == 24 * 2**20
    assert fuse_mount.unmount(info.mountpoint, settings=settings)
    assert ended(info.pid)


def test_a_mount_that_nobody_is_seen_to_use_is_tried_again_and_users_are_looked_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a tmpfs")
    target, inner = tmp_path / "mnt", tmp_path / "mnt" / "inner"
    looked = []

    def nobody(mountpoint: str) -> Iterator[session.User]:
        looked.append(mountpoint)
        return iter(())

    monkeypatch.setattr(session, "users_of", nobody)
    monkeypatch.setattr(session, "_NOBODY_S", 0.05)
    for path in (target, inner):  # the second one keeps the first one busy
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
    with pytest.raises(MountError, match="not visible here"):
        session.unmount_now(str(target))
    assert looked == [str(target)] * 2
    monkeypatch.setattr(session, "_NOBODY_S", 60.0)
    unmounting = session.Unmounting(str(target))
    assert not unmounting.step()
    session.unmount_now(str(inner))
    unmounting.due = 0.0
    assert unmounting.step()
    assert session.mount_at(target) is None


def test_a_lazy_unmount_lets_open_files_finish(folder: Path, mounter: Mounter, settings: Settings) -> None:
    info = mounter()
    with (info.mountpoint / "large.bin").open("rb") as file:
        assert fuse_mount.unmount(info.mountpoint, lazy=True, settings=settings)
        assert os.listdir(info.mountpoint) == []
        assert file.read() == (folder / "large.bin").read_bytes()
    assert ended(info.pid)


def test_status_comes_from_the_supervisor(folder: Path, mounter: Mounter, settings: Settings) -> None:
    info = mounter()
    assert fuse_mount.status(info.mountpoint, settings) == info
    folder_mode = stat.S_IMODE((settings.home / "mounts").stat().st_mode)
    socket_mode = stat.S_IMODE((settings.home / "mounts" / MountFiles("", info.mountpoint).socket_name).stat().st_mode)
    assert (folder_mode, socket_mode) == (0o700, 0o600)


def test_a_mount_point_that_cannot_be_is_refused(folder: Path, mounter: Mounter, tmp_path: Path) -> None:
    mnt = tmp_path / "mnt"
    (mnt / "file").write_bytes(b"")
    with pytest.raises(MountError, match="not empty"):
        mounter()
    (mnt / "file").unlink()
    mnt.rmdir()
    with pytest.raises(MountError, match="does not exist") as caught:
        mounter()
    assert "mkdir" in caught.value.hint
    mnt.write_bytes(b"")
    with pytest.raises(MountError, match="not a directory"):
        mounter()
    mnt.unlink()
    mnt.mkdir()
    mounter()
    with pytest.raises(MountError, match="mounted already") as caught:
        mounter()
    assert "umount" in caught.value.hint


def test_a_snapshot_that_cannot_be_opened_is_the_callers_error(
    folder: Path, settings: Settings, tmp_path: Path
) -> None:
    opener = "tests.fuse_mount.standin:open_folder"
    target = tmp_path / "mnt"
    target.mkdir()
    with pytest.raises(MountError, match="there is no missing@v1") as caught:
        fuse_mount.mount_snapshot("missing@v1", target, settings=settings, opener=opener)
    assert caught.value.hint == "dsctl snapshot list"
    assert session.mount_at(target) is None


def test_a_missing_device_or_helper_is_said_clearly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "DEVICE", str(tmp_path / "fuse"))
    with pytest.raises(MountError, match="there is no") as caught:
        session.check_device()
    assert "modprobe fuse" in caught.value.hint
    (tmp_path / "fuse").touch()
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MountError, match="fusermount3 is not installed"):
        session.check_device()


def test_no_new_program_inherits_the_connection_that_fusermount3_hands_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    helper = tmp_path / "fusermount3"
    helper.write_text(
        f"#!{sys.executable}\n"
        "import os, socket\n"
        "with socket.socket(fileno=int(os.environ['_FUSE_COMMFD'])) as commands:\n"
        "    socket.send_fds(commands, [b'\\0'], [0])\n"
    )
    helper.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    fd = session.connect(str(tmp_path), "mask", allow_other=False, read_only=True)
    assert os.path.samestat(os.fstat(fd), os.stat(os.devnull))
    assert not os.get_inheritable(fd)
    os.close(fd)


@promise("`status` and `doctor` tell of a snapshot's mount that lost all its processes")
@pytest.mark.parametrize("replaced", [False, True])
def test_a_dead_mount_is_told_and_can_be_unmounted_or_replaced(
    folder: Path, mounter: Mounter, settings: Settings, replaced: bool
) -> None:
    info = mounter(workers=1)
    for pid in (info.pid, *info.workers):
        os.kill(pid, signal.SIGSTOP)
    for pid in (info.pid, *info.workers):
        os.kill(pid, signal.SIGKILL)
    assert all(ended(pid) for pid in (info.pid, *info.workers))
    with pytest.raises(OSError, match="Transport endpoint"):
        os.listdir(info.mountpoint)
    assert [fuse_mount.is_lost(one, settings) for one in fuse_mount.list_mounts(settings)] == [True]
    for command in ("status", "doctor"):
        words = [sys.executable, "-m", "dataset_cli", command]
        said = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        assert f"Mount it again: dsctl mount {info.ref} {info.mountpoint}" in said
    if replaced:
        info = mounter()
        assert sorted(os.listdir(info.mountpoint)) == sorted(os.listdir(folder))
        assert [fuse_mount.is_lost(one, settings) for one in fuse_mount.list_mounts(settings)] == [False]
    assert fuse_mount.unmount(info.mountpoint, settings=settings)
    assert fuse_mount.list_mounts(settings) == []


def test_in_the_foreground_it_returns_when_the_mount_is_gone(folder: Path, mounter: Mounter, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(mounter, foreground=True, workers=1)
        while session.mount_at(tmp_path / "mnt") is None and not future.done():
            os.sched_yield()
        assert (tmp_path / "mnt" / "d0").is_dir()
        # Lazily: the mounting side may be looking at its own mount this very moment.
        subprocess.run(["umount", "-l", tmp_path / "mnt"], check=True)
        assert future.result().mountpoint == tmp_path / "mnt"


def test_no_zombie_is_left_to_the_caller(folder: Path, mounter: Mounter, settings: Settings) -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    info = mounter()
    fuse_mount.unmount(info.mountpoint, settings=settings)
    assert ended(info.pid)
    assert children.read_text() == before


def _runs_for_nobody(python: str) -> bool:
    """Tell whether others may run it, and with the packages of the tests, which may be compiled."""
    check = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    try:
        return not subprocess.run([python, "-c", check], user=65534, group=65534, extra_groups=[]).returncode
    except OSError:
        return False


@promise("An ordinary user can mount; others read only if allowed")
def test_an_ordinary_user_mounts_through_fusermount3(folder: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; the other tests ran through fusermount3 then")
    if not os.stat("/dev/fuse").st_mode & stat.S_IROTH:
        pytest.skip("/dev/fuse is not readable for other users here (chmod 666 /dev/fuse)")
    python = next((path for path in (sys.executable, "/usr/bin/python3") if _runs_for_nobody(path)), None)
    if python is None:
        pytest.skip("no Python of the tests' version that other users may run")
    leftovers.let_others_through(tmp_path)
    mine = tmp_path / "nobody"
    (mine / "mnt").mkdir(parents=True)
    for path in (mine, mine / "mnt"):
        os.chown(path, 65534, 65534)
    script = (
        "import os, sys\n"
        "import fuse_mount\n"
        "from datacache.core.errors import MountError\n"
        "from datacache.settings import load_settings\n"
        "settings, opener = load_settings(), 'tests.fuse_mount.standin:open_folder'\n"
        "info = fuse_mount.mount_snapshot('mask', sys.argv[1], settings=settings, opener=opener)\n"
        "facts = os.stat(sys.argv[1] + '/large.bin')\n"
        "print(facts.st_uid, facts.st_size, len(open(sys.argv[1] + '/large.bin', 'rb').read()))\n"
        "print(fuse_mount.unmount(sys.argv[1], settings=settings))\n"
        "try:\n"
        "    options = {'settings': settings, 'opener': opener, 'allow_other': True}\n"
        "    fuse_mount.mount_snapshot('mask', sys.argv[1], **options)\n"
        "except MountError as exc:\n"
        "    print(exc.hint)\n"
    )
    paths = os.pathsep.join([str(Path(fuse_mount.__file__).parent.parent), sysconfig.get_path("platlib")])
    environment = os.environ | {"DATACACHE_HOME": str(mine / "home"), "PYTHONPATH": paths, "HOME": str(mine)}
    said = subprocess.run(
        [python, "-c", script, str(mine / "mnt")],
        user=65534,
        group=65534,
        extra_groups=[],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    size = 24 * 2**20
    lines = said.stdout.splitlines()
    assert lines[:2] == [f"65534 {size} {size}", "True"], said.stderr
    if "user_allow_other" not in Path("/etc/fuse.conf").read_text().split("\n"):
        assert "user_allow_other into /etc/fuse.conf" in lines[2]
