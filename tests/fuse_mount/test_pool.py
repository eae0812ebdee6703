"""Many mounts of a home share processes, and nothing else: not credentials, not each other's troubles."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import fuse_mount
from datacache.core import ipc
from datacache.core.errors import MountError
from datacache.daemon.client import DaemonClient
from datacache.settings import Settings
from fuse_mount import MountInfo
from fuse_mount.lifecycle import pool
from fuse_mount.lifecycle.pool import pool_id
from fuse_mount.lifecycle.state import MountConfig, MountFiles
from tests import leftovers
from tests.fuse_mount.conftest import files_below
from tests.fuse_mount.mount_processes import kill, wait_until
from tests.fuse_mount.test_crashes import Readers
from tests.fuse_mount.test_session import ended
from tests.promises import promise

MANY = 16
MOST_MIB = 12
"""Of memory for one of many mounts."""

MountMany = Callable[..., list[MountInfo]]


@pytest.fixture
def mount_many(settings: Settings, folder: Path, tmp_path: Path) -> Iterator[MountMany]:
    """mount_many(COUNT, name=…) → mounts of stand-in snapshots at new folders."""
    numbers = itertools.count()

    def mount(count: int, *, name: str = "mask", home: Settings = settings, **options: object) -> list[MountInfo]:
        found = []
        for _ in range(count):
            target = tmp_path / f"mnt-{next(numbers)}"
            target.mkdir()
            opener = "tests.fuse_mount.standin:open_by_name"
            arguments = {"workers": 2} | options
            found.append(fuse_mount.mount_snapshot(name, target, settings=home, opener=opener, **arguments))  # type: ignore[arg-type]
        return found

    yield mount
    leftovers.unmount_under(tmp_path)


def states(mounts: list[MountInfo], settings: Settings) -> list[MountInfo]:
    found = [MountFiles(settings.home, info.mountpoint).read() for info in mounts]
    assert None not in found
    return [info for info in found if info is not None]


def served_by_another(mounts: list[MountInfo], settings: Settings) -> list[MountInfo]:
    """Wait until all of them have another supervisor than before."""

    def ready() -> list[MountInfo] | None:
        now = states(mounts, settings)
        return now if all(new.pid != old.pid for new, old in zip(now, mounts, strict=True)) else None

    found: list[MountInfo] = wait_until(settings.home / "mounts", ready)
    return found


@promise("Mounts of a home with the same credentials, user, options and namespaces share their processes")
def test_mounts_of_a_home_are_served_by_the_same_processes_until_the_last_one_is_gone(
    mount_many: MountMany, settings: Settings, folder: Path
) -> None:
    first, *others = mount_many(4)
    now = states([first, *others], settings)
    assert {info.pid for info in now} == {first.pid}
    assert {info.workers for info in now} == {first.workers}
    for info in now:
        assert files_below(info.mountpoint) == files_below(folder)
    assert fuse_mount.unmount(first.mountpoint, settings=settings)
    assert not MountFiles(settings.home, first.mountpoint).state.exists()
    for info in others:
        assert files_below(info.mountpoint) == files_below(folder)
        assert fuse_mount.unmount(info.mountpoint, settings=settings)
    assert all(ended(pid) for pid in (first.pid, *first.workers))
    assert not list((settings.home / "run").glob("*.sock"))


@promise("Mounts of a home with the same credentials, user, options and namespaces share their processes")
def test_many_mounts_take_few_processes_and_little_memory_each(
    mount_many: MountMany, settings: Settings, folder: Path
) -> None:
    mounts = mount_many(MANY)
    for info in mounts:
        assert files_below(info.mountpoint) == files_below(folder)
    serving = {mounts[0].pid, *mounts[0].workers}
    mine = leftovers.processes_with("DATACACHE_HOME", lambda value: value == str(settings.home))
    assert set(mine) == serving
    assert len(serving) == 3
    assert sum(map(pss_mib, serving)) / MANY < MOST_MIB


def test_nonsense_on_any_socket_of_a_home_ends_none_of_its_processes(
    mount_many: MountMany, settings: Settings, folder: Path
) -> None:
    client = DaemonClient(settings)
    client.ensure()
    (info,) = mount_many(1)
    pid = client.health()["pid"]
    sockets = [path for path in settings.home.rglob("*") if path.is_socket()]
    assert len(sockets) >= 4, "the daemon, its keeper, the pool, a mount"
    for path in sockets:
        for text in (b"[" * 60_000, b"{}", b"7", b"\xff", b'{"op": []}', b'{"op": "open", "config": 7}'):
            with contextlib.suppress(ConnectionError), ipc.connect(path, timeout_s=60.0) as connection:
                connection.sendall(text + b"\n")
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
    assert [(now.pid, now.workers) for now in states([info], settings)] == [(info.pid, info.workers)]
    assert client.health()["pid"] == pid
    assert files_below(info.mountpoint) == files_below(folder)


def pss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


@promise("Many mounts whose processes are killed come back below one supervisor")
def test_a_killed_supervisor_of_many_mounts_is_replaced_by_one_and_no_read_breaks(
    mount_many: MountMany, settings: Settings, folder: Path
) -> None:
    mounts = mount_many(6)
    readers = [Readers(info, folder, count=1) for info in (mounts[0], mounts[-1])]
    kill(mounts[0].pid)
    now = served_by_another(mounts, settings)
    assert len({info.pid for info in now}) == 1
    assert all(ended(pid) for pid in mounts[0].workers)
    assert [reader.finish()[1:] for reader in readers] == [(0, 0), (0, 0)]
    for info in now:
        assert files_below(info.mountpoint) == files_below(folder)
        fuse_mount.unmount(info.mountpoint, settings=settings)
    assert ended(now[0].pid)


@promise("A killed supervisor is replaced, no read breaks, and its workers end once their mounts are taken over")
def test_a_worker_of_a_killed_supervisor_ends_also_while_it_opens_a_mount(
    mount_many: MountMany, settings: Settings, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = tmp_path / "opening"
    opening.mkdir()
    monkeypatch.setenv("STANDIN_OPENING", str(opening / "begun"))
    [served] = mount_many(1)
    never = threading.Thread(target=mount_never, args=(mount_many,))
    never.start()
    wait_until(opening, lambda: list(opening.iterdir()))
    kill(served.pid)
    [now] = served_by_another([served], settings)
    assert all(ended(pid) for pid in served.workers)
    never.join()
    assert files_below(now.mountpoint) == files_below(folder)


@promise("A mount that cannot be taken over keeps no other one of its pool from it")
def test_a_mount_that_cannot_be_taken_over_keeps_no_other_one_from_it(
    mount_many: MountMany, settings: Settings, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_REMOVED", str(tmp_path / "removed"))
    [removed] = mount_many(1, name="removed")  # the first one, which its workers ask for
    others = mount_many(2)
    (tmp_path / "removed").touch()
    kill(removed.pid)
    assert len({info.pid for info in served_by_another(others, settings)}) == 1
    for info in (removed, *others):
        assert files_below(info.mountpoint) == files_below(folder)


@promise("A mount that cannot be taken over keeps no other one of its pool from it")
def test_mounts_that_are_taken_over_at_once_get_one_new_supervisor(
    mount_many: MountMany, settings: Settings, folder: Path
) -> None:
    mounts = mount_many(6)
    with ThreadPoolExecutor(len(mounts)) as threads:
        taken = list(threads.map(lambda info: fuse_mount.takeover(info.mountpoint, settings), mounts))
    assert len({info.pid for info in taken}) == 1
    assert taken[0].pid != mounts[0].pid
    assert all(ended(pid) for pid in (mounts[0].pid, *mounts[0].workers))
    for info in taken:
        assert files_below(info.mountpoint) == files_below(folder)


@promise("Many mounts whose processes are killed come back below one supervisor")
def test_all_processes_of_many_mounts_killed_at_once_come_back_and_no_read_breaks(
    mount_many: MountMany, settings: Settings, folder: Path
) -> None:
    DaemonClient(settings).ensure()
    mounts = mount_many(6)

    def kept() -> list[MountInfo] | None:
        now = states(mounts, settings)
        return now if all(info.kept for info in now) else None

    mounts = wait_until(settings.home / "mounts", kept)
    readers = [Readers(info, folder, count=1) for info in (mounts[0], mounts[-1])]
    pids = (mounts[0].pid, *mounts[0].workers)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # none is to notice that another one died
    for pid in pids:
        kill(pid)
    now = served_by_another(mounts, settings)
    assert len({info.pid for info in now}) == 1
    assert [reader.finish()[1:] for reader in readers] == [(0, 0), (0, 0)]
    for info in now:
        assert files_below(info.mountpoint) == files_below(folder)
    DaemonClient(settings).stop()


@promise("An upgrade does not unmount")
def test_a_hand_over_moves_one_mount_after_the_other(mount_many: MountMany, settings: Settings, folder: Path) -> None:
    first, second = mount_many(2)
    readers = Readers(second, folder, count=1)
    moved = fuse_mount.takeover(first.mountpoint, settings)
    assert moved.pid != first.pid
    assert fuse_mount.status(second.mountpoint, settings).pid == first.pid
    assert fuse_mount.takeover(second.mountpoint, settings).pid == moved.pid
    assert all(ended(pid) for pid in (first.pid, *first.workers))
    assert readers.finish()[1:] == (0, 0)
    [third] = mount_many(1)
    assert third.pid == moved.pid


@promise("Mounts of a home with the same credentials, user, options and namespaces share their processes")
def test_other_credentials_another_home_and_other_options_have_processes_of_their_own(
    mount_many: MountMany, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [first] = mount_many(1)
    monkeypatch.setenv("OLDPWD", "/somewhere/else")
    [same] = mount_many(1)
    assert same.pid == first.pid
    [fewer] = mount_many(1, workers=1)
    elsewhere = replace(settings, home=tmp_path / "another-home")
    [other_home] = mount_many(1, home=elsewhere)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of somebody else")
    [other_key] = mount_many(1)
    assert len({info.pid for info in (first, fewer, other_home, other_key)}) == 4
    for pid in other_key.workers:
        assert b"AWS_SECRET_ACCESS_KEY=of somebody else" in Path(f"/proc/{pid}/environ").read_bytes()
    for pid in same.workers:
        assert b"of somebody else" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_an_upgrade_of_either_package_has_processes_of_its_own(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MountConfig(
        ref="mask@v1", mountpoint="/mnt", home=str(settings.home), uid=0, gid=0, allow_other=False, workers=1
    )
    names = {package.name for package in pool._PACKAGES}
    assert names == {"datacache", "fuse_mount"}
    for name in names:
        shutil.copytree(Path(__file__).parents[2] / name, tmp_path / name)
    monkeypatch.setattr(pool, "_PACKAGES", [tmp_path / name for name in sorted(names)])
    before = pool_id(config, os.environ)
    assert pool_id(config, os.environ) == before
    for changed in ("datacache/reader/blocks.py", "fuse_mount/snapshot/worker.py"):
        os.utime(tmp_path / changed)
        after = pool_id(config, os.environ)
        assert after != before
        before = after


@promise("Mounts of a home with the same credentials, user, options and namespaces share their processes")
def test_who_lives_in_another_mount_namespace_has_another_pool(
    mount_many: MountMany, settings: Settings, folder: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may make a mount namespace")
    [info] = mount_many(1)
    here = pool_id(info.config, os.environ)
    code = (
        "import os, sys\n"
        "from fuse_mount.lifecycle.pool import pool_id\n"
        "from fuse_mount.lifecycle.state import MountConfig\n"
        "print(pool_id(MountConfig.from_json(sys.argv[1]), os.environ))\n"
    )
    command = [sys.executable, "-c", code, info.config.to_json()]
    environment = dict(os.environ)
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()
    there = subprocess.run(["unshare", "-m", *command], capture_output=True, text=True, check=True, env=environment)
    assert said == here
    assert there.stdout.strip() != here


@promise("A mount whose store or catalog is silent costs the readers of others nothing")
def test_a_mount_whose_store_and_catalog_do_not_answer_keeps_no_other_one_waiting(
    mount_many: MountMany, settings: Settings, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "slow").mkdir()
    for number in range(80):  # more than there are threads to fetch
        (folder / "slow" / f"{number}").write_bytes(b"late")
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("STANDIN_GATE", str(gate))
    stuck, other = mount_many(2)
    # A snapshot that is never opened: somebody waits for a catalog.
    opening = threading.Thread(target=mount_never, args=(mount_many,), daemon=True)
    opening.start()
    waiting = [
        subprocess.Popen(["cat", stuck.mountpoint / "slow" / f"{number}"], stdout=subprocess.PIPE)
        for number in range(80)
    ]
    try:
        expected = {name: data for name, data in files_below(folder).items() if not name.startswith("slow/")}
        for name, data in expected.items():
            assert (other.mountpoint / name).read_bytes() == data
        [third] = mount_many(1)
        assert third.pid == other.pid
        assert all((third.mountpoint / name).read_bytes() == data for name, data in expected.items())
        assert fuse_mount.unmount(third.mountpoint, settings=settings)
        assert all(process.poll() is None for process in waiting)
    finally:
        opened = os.open(gate, os.O_RDWR)
        said = [process.communicate()[0] for process in waiting]
        os.close(opened)
    assert said == [b"late"] * 80


def mount_never(mount_many: MountMany) -> None:
    try:
        mount_many(1, name="hanging")
    except MountError as exc:  # the test has ended
        print(exc)


@promise("A mount whose store or catalog is silent costs the readers of others nothing")
def test_a_worker_that_dies_over_one_mount_costs_the_readers_of_others_nothing(
    mount_many: MountMany, settings: Settings, folder: Path
) -> None:
    (folder / "crash").mkdir()
    (folder / "crash" / "file").write_bytes(b"found another way")
    bad, good = mount_many(2)
    readers = Readers(good, folder, count=1, without=("crash/file",))
    assert (bad.mountpoint / "crash" / "file").read_bytes() == b"found another way"
    assert fuse_mount.status(bad.mountpoint, settings).bypassed
    assert readers.finish()[1:] == (0, 0)


def test_a_mount_that_cannot_be_served_leaves_nothing_in_its_pool(
    mount_many: MountMany, settings: Settings, folder: Path, tmp_path: Path
) -> None:
    [first] = mount_many(1)
    before = devices_of(first.pid)
    files = MountFiles(settings.home, tmp_path / "mnt-1")
    in_the_way = files.folder / files.socket_name / "in the way"
    in_the_way.mkdir(parents=True)  # the control socket cannot be made
    with pytest.raises(MountError):
        mount_many(1)
    assert not os.path.ismount(files.mountpoint)
    assert not files.state.exists()
    deadline = time.monotonic() + 60
    while devices_of(first.pid) != before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert files_below(first.mountpoint) == files_below(folder)
    in_the_way.rmdir()
    in_the_way.parent.rmdir()
    [third] = mount_many(1)
    assert third.pid == first.pid
    for info in (first, third):
        assert fuse_mount.unmount(info.mountpoint, settings=settings)
    assert all(ended(pid) for pid in (first.pid, *first.workers))


def devices_of(pid: int) -> int:
    """Count the descriptors of /dev/fuse that a process has."""
    found = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/{pid}/fd/{name}") == "/dev/fuse"
    return found


@promise("Mounts of a home with the same credentials, user, options and namespaces share their processes")
def test_two_that_mount_at_once_start_one_pool(mount_many: MountMany, settings: Settings, folder: Path) -> None:
    found: list[MountInfo] = []
    threads = [threading.Thread(target=lambda: found.extend(mount_many(1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({info.pid for info in states(found, settings)}) == 1


def test_a_link_to_nothing_among_the_code_breaks_no_mount(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "code.py").touch()
    monkeypatch.setattr(pool, "_PACKAGES", (tmp_path / "package",))
    config = MountConfig(
        ref="mask@v1", mountpoint="/mnt", home=str(settings.home), uid=0, gid=0, allow_other=False, workers=1
    )
    before = pool_id(config, {})
    (tmp_path / "package" / ".#code.py").symlink_to("somebody@machine.4711")  # as Emacs locks a file
    assert pool_id(config, {}) == before


@promise("`dsctl umount` takes away no mount of another home, and names that home; of several mounts it tries each")
def test_a_mount_of_nobody_knows_whom_is_not_unmounted_by_a_home_that_has_an_old_state_of_the_place(
    mount_many: MountMany, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are another user's, which only root may look at: here nobody sees them."""
    [mount] = mount_many(1)
    other = replace(settings, home=tmp_path / "other")
    (other.home / "mounts").mkdir(parents=True)
    text = MountFiles(settings.home, mount.mountpoint).state.read_text(encoding="utf-8")
    state = json.loads(text) | {"device": mount.device + 1}  # of a mount there before
    MountFiles(other.home, mount.mountpoint).state.write_text(json.dumps(state), encoding="utf-8")
    monkeypatch.setattr("fuse_mount.lifecycle.process.homes", list)
    with pytest.raises(MountError, match="is no mount of this home"):
        fuse_mount.unmount(mount.mountpoint, settings=other)
    assert os.path.ismount(mount.mountpoint)
    assert fuse_mount.unmount(mount.mountpoint, settings=settings)
