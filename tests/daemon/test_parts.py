"""A node's cache in several parts, each with a process of its own."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import fuse_mount
from datacache import connect, create_snapshot, load_settings, open_snapshot
from datacache.api import running_daemon
from datacache.cluster.members import DRAINING, SERVING, Member, ShownMembers, StaticMembers
from datacache.core import ipc
from datacache.core.boot import stat_of
from datacache.core.errors import CacheError, UsageError
from datacache.core.ids import ObjectRef, object_id
from datacache.daemon import paths
from datacache.daemon.client import DaemonClient
from datacache.daemon.parts import PartProcesses, ask_part
from datacache.exchange.frames import Frame, Kind
from datacache.exchange.server import Answer, FrameServer
from datacache.exchange.wire import BlocksRequest
from datacache.settings import Settings
from datacache.store.credentials import told_variables
from datacache.tiers.index import Index
from datacache.tiers.parts import part_of
from datacache.tiers.recovery import open_tiers
from datacache.torch import SnapshotDataset
from tests.promises import promise
from tests.servers import RcloneS3

SMALL = {f"{n % 7}/{n:04d}.bin": random.Random(n).randbytes(20_000) for n in range(200)}
LARGE = {f"large-{n}.bin": random.Random(n).randbytes(9 * 2**20 + n) for n in range(4)}
DATA = SMALL | LARGE


@pytest.fixture
def bucket(rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Callable[[], int]]:
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DATACACHE_PREFETCH", "0")
    name = f"parts-{random.SystemRandom().randrange(10**9)}"
    folder = rclone_s3.make_bucket(name)
    for path, data in DATA.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(data)
    return name, lambda: rclone_s3.get_count(name)


def with_processes(count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, DaemonClient]:
    monkeypatch.setenv("DATACACHE_PROCESSES", str(count))
    settings = load_settings()
    running = running_daemon(settings)
    if running is not None:
        running.stop()
    return settings, connect(settings)


def read_all(ref: str, settings: Settings, paths: Sequence[str] = tuple(DATA)) -> None:
    snapshot = open_snapshot(ref, settings)
    for path in paths:
        assert bytes(snapshot.read(path)) == DATA[path]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def finish(client: DaemonClient, id: str) -> dict:
    end = time.monotonic() + 60
    while (job := client.job(id))["state"] == "running":
        assert time.monotonic() < end, job
        time.sleep(0.01)
    return job


def test_a_part_that_hangs_up_is_asked_again_and_no_other_for_what_it_has_given(home: Path) -> None:
    settings = load_settings()
    refs = [ObjectRef("s3://b", str(number), 10, "e", "") for number in range(64)]
    asked: list[list[int]] = [[], []]
    servers: list[FrameServer] = []
    with ExitStack() as stack:
        for part in range(2):

            def answer(frame: Frame, part: int = part) -> Iterator[Answer]:
                if frame.kind == Kind.BLOCKS:
                    blocks = BlocksRequest.decode(frame.body).blocks
                    asked[part].append(len(blocks))
                    for _ in blocks:
                        yield Answer(Kind.OK, body=b"x" * 10)
                        if part and len(asked[1]) == 1:
                            for frames in servers[1]._connections:
                                frames.connection.shutdown(socket.SHUT_RDWR)
                            return
                else:
                    yield Answer(Kind.OK, body=b'{"changed": []}')

            server = FrameServer(answer, most_bytes=2**20)
            servers.append(server)
            path = paths.socket_path(settings.home, part)
            path.parent.mkdir(exist_ok=True)
            server.listen(ipc.listen(path, backlog=8))
            stack.callback(server.close)
        paths.parts_path(settings.home).write_text("2")
        found = DaemonClient(settings).blocks_or_errors([(ref, 0) for ref in refs], "d", "")
    assert found == [b"x" * 10] * len(refs)
    first, second = (sum(part_of(object_id(ref), 2) == part for ref in refs) for part in range(2))
    assert asked[0] == [first]
    assert asked[1] == [second, second - 1]


@promise("The number of processes can be changed, and nothing is fetched again")
def test_the_number_of_processes_changes_and_nothing_is_fetched_again(bucket, home, monkeypatch) -> None:
    name, gets = bucket
    settings, client = with_processes(3, monkeypatch)
    ref = create_snapshot("d", f"s3://{name}/", settings=settings).ref
    job = finish(client, client.warm(ref))
    assert (job["state"], job["files_done"], job["bytes_done"]) == ("done", len(DATA), sum(map(len, DATA.values())))
    read_all(ref, settings)
    before = gets()
    for count in (1, 2, 3, 1):
        settings, client = with_processes(count, monkeypatch)
        read_all(ref, settings)
        assert finish(client, client.warm(ref))["state"] == "done"
        assert gets() == before
        state = client.cache_status()
        assert state["tiers"][1]["budget_bytes"] == pytest.approx(settings.ssd_bytes, abs=count)
    assert not paths.parts_path(settings.home).exists()
    assert "Traceback" not in paths.log_path(settings.home).read_text()  # parts came to an orderly end


def pids_of_parts(client: DaemonClient) -> list[int]:
    daemon = client.health()["pid"]
    found = subprocess.run(["pgrep", "-P", str(daemon), "-f", "--", "--part"], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def test_a_part_that_is_killed_comes_back_and_readers_see_no_error(bucket, home, monkeypatch) -> None:
    name, gets = bucket
    settings, client = with_processes(3, monkeypatch)
    record = create_snapshot("d", f"s3://{name}/", settings=settings)
    job = client.warm(record.ref)
    assert finish(client, job)["state"] == "done"
    before, pids = gets(), pids_of_parts(client)
    assert len(pids) == 2
    client.evict()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    found = finish(client, job)  # as somebody does who waits for it
    assert (found["state"], found["files_done"]) == ("done", len(DATA))
    assert len(pids_of_parts(client)) == 2
    assert not set(pids) & set(pids_of_parts(client))
    assert len(DATA) // 2 < gets() - before < len(DATA)  # their share
    read_all(record.ref, settings)


def test_a_part_that_was_killed_is_warmed_in_the_background_again(bucket, home, monkeypatch) -> None:
    name, _ = bucket
    monkeypatch.setenv("DATACACHE_PREFETCH", "1")
    settings, client = with_processes(2, monkeypatch)
    record = create_snapshot("d", f"s3://{name}/", settings=settings)

    def warmed(part: int) -> bool:
        jobs = ask_part(home, part, lambda of: of.ask("jobs"))["jobs"]
        return [job["state"] for job in jobs] == ["done"]

    with open_snapshot(record.ref, settings) as snapshot:
        refs = [snapshot.manifest.object_ref(entry) for entry in snapshot.manifest.entries()]
    first, second = (next(ref for ref in refs if part_of(object_id(ref), 2) == part) for part in range(2))
    client.block(first, 0, "d", record.id)
    until(lambda: warmed(1))
    [pid] = pids_of_parts(client)
    os.kill(pid, signal.SIGKILL)
    client.block(second, 0, "d", record.id)
    until(lambda: warmed(1))


def test_parts_end_with_the_daemon_however_that_ends(bucket, home, monkeypatch) -> None:
    name, gets = bucket
    settings, client = with_processes(2, monkeypatch)
    ref = create_snapshot("d", f"s3://{name}/", settings=settings).ref
    assert finish(client, client.warm(ref))["state"] == "done"
    before, daemon, [part] = gets(), client.health()["pid"], pids_of_parts(client)
    os.kill(daemon, signal.SIGKILL)
    read_all(ref, settings)
    client = connect(settings)  # the lock is free once the part has ended, too
    assert stat_of(part)[:1] in ([], ["Z"])
    assert finish(client, client.warm(ref))["state"] == "done"
    assert gets() == before


def test_state_pins_and_eviction_are_of_all_parts(bucket, home, monkeypatch) -> None:
    name, _ = bucket
    settings, client = with_processes(3, monkeypatch)
    ref = create_snapshot("d", f"s3://{name}/", settings=settings).ref
    client.pin(ref)
    assert finish(client, client.warm(ref))["state"] == "done"
    state = client.cache_status()
    ssd = state["tiers"][1]
    assert ssd["blocks"] == len(SMALL) + 3 * len(LARGE)
    assert ssd["used_bytes"] >= sum(map(len, DATA.values()))
    assert state["fetched"]["fetched"] == ssd["blocks"]
    assert [each["name"] for each in state["datasets"]] == ["d"]
    assert len([job for job in state["jobs"] if not job["background"]]) == 1
    assert client.evict()["freed_bytes"] == 0
    client.unpin(ref)
    assert client.evict("d")["freed_bytes"] > sum(map(len, DATA.values()))
    assert client.cache_status()["tiers"][1]["blocks"] == 0
    for op in (b"metrics", b"mounts", b"stop", b"drain"):
        with pytest.raises(UsageError, match="does not know"):
            ask_part(home, 2, lambda of, op=op: of.call(op.decode(), b""))


def test_a_snapshot_that_is_open_outlives_changes_of_the_number_and_each_block_is_got_once(
    bucket, home, monkeypatch
) -> None:
    name, gets = bucket
    settings, _ = with_processes(1, monkeypatch)
    ref = create_snapshot("d", f"s3://{name}/", settings=settings).ref
    before, names = gets(), random.Random(7).sample(list(DATA), len(DATA))
    snapshot = open_snapshot(ref, settings)
    for nth, count in enumerate((1, 3, 2, 4)):
        with_processes(count, monkeypatch)
        for path in names[nth::4]:
            assert bytes(snapshot.read(path)) == DATA[path]
    for path in names:
        assert bytes(snapshot.read(path)) == DATA[path]
    assert gets() - before == len(SMALL) + 3 * len(LARGE)


def test_parts_that_are_killed_while_they_commit_lose_nothing_that_was_stored(bucket, home, monkeypatch) -> None:
    name, gets = bucket
    settings, client = with_processes(3, monkeypatch)
    ref = create_snapshot("d", f"s3://{name}/", settings=settings).ref
    over, wrong, chance = threading.Event(), [], random.Random(11)

    def read() -> None:
        while not over.is_set():
            try:
                read_all(ref, settings, random.sample(list(SMALL), 40))
            except BaseException as exc:  # noqa: BLE001 - the test says it
                wrong.append(exc)
                return

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(6):
        client.evict()
        fetched = gets()
        while gets() < fetched + chance.randrange(20, 120):  # blocks are on their way into the tiers
            assert not wrong, wrong
        for pid in pids_of_parts(client):
            os.kill(pid, signal.SIGKILL)
    over.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert finish(client, client.warm(ref))["state"] == "done"
    before = gets()
    for pid in pids_of_parts(client):
        os.kill(pid, signal.SIGKILL)
    read_all(ref, settings)
    assert gets() == before


def test_a_writer_that_is_killed_within_a_transaction_stops_no_other(tmp_path: Path) -> None:
    index = Index(tmp_path, writable=True)
    code = (
        "import sys, time; from pathlib import Path; from datacache.tiers.index import Index\n"
        "index = Index(Path(sys.argv[1]), writable=True)\n"
        "with index.write() as txn:\n"
        "    [txn.put(b'lost%d' % n, b'x' * 200, db=index.meta) for n in range(5000)]\n"
        "    print('within', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "within\n"
        other.kill()
        with index.write() as txn:
            txn.put(b"kept", b"y", db=index.meta)
    with index.env.begin() as txn:
        assert txn.get(b"kept", db=index.meta) == b"y"
        assert txn.get(b"lost0", db=index.meta) is None
    index.close()


def test_a_part_that_is_started_again_knows_the_credentials_that_callers_have_told(bucket, home, monkeypatch) -> None:
    name, gets = bucket
    variables = told_variables(os.environ)
    for variable in variables:
        monkeypatch.delenv(variable)
    settings, client = with_processes(3, monkeypatch)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    ref = create_snapshot("d", f"s3://{name}/", settings=settings).ref
    assert finish(client, client.warm(ref))["state"] == "done"  # the daemon is told
    for variable in variables:
        monkeypatch.delenv(variable)
    client.evict()
    before, pids = gets(), pids_of_parts(client)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    read_all(ref, settings)
    assert gets() > before
    assert not set(pids) & set(pids_of_parts(client))


def test_a_disk_that_takes_no_file_neither_ends_the_daemon_nor_takes_the_members_from_its_parts(home: Path) -> None:
    path = paths.members_path(home)
    path.mkdir(parents=True)
    members = StaticMembers("a", (Member("a", "127.0.0.1:1", 1.0), Member("b", "127.0.0.1:2", 1.0)))
    parts, shown = PartProcesses(load_settings(), [(0, 0)], (), None, members=members), ShownMembers(path)
    parts.look()
    assert shown.view.members == ()
    path.rmdir()
    parts.look()
    assert shown.view == members.view
    path.unlink()
    path.mkdir()
    members.set_state(DRAINING)
    parts.look()
    assert shown.view.members[0].state == SERVING
    path.rmdir()
    parts.look()
    assert shown.view == members.view


def test_a_part_that_cannot_be_started_again_is_tried_later(home: Path, monkeypatch, caplog) -> None:
    parts = PartProcesses(load_settings(), [(0, 0), (0, 0)], (), None)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CacheError, match="does not start"):
        parts.start()
    monkeypatch.setattr(sys, "executable", "/not there")
    parts.look()
    assert "is started later" in caplog.text


@promise("The number of processes can be changed, and nothing is fetched again")
def test_a_part_that_is_killed_while_the_daemon_starts_is_started_again(home: Path, monkeypatch, tmp_path) -> None:
    killed, program, settings = tmp_path / "killed", tmp_path / "program", load_settings()
    program.write_text(f'#!/bin/sh\n[ -e {killed} ] || {{ : >{killed}; kill -9 $$; }}\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)
    paths.parts_path(home).parent.mkdir(parents=True)
    with open_tiers(settings) as writer:
        parts = PartProcesses(settings, writer.divide(2), (), None)
        monkeypatch.setattr(sys, "executable", str(program))
        parts.start()
        assert killed.exists()
        parts.stop()


def test_a_mount_and_a_data_loader_read_from_all_parts(bucket, home, monkeypatch, tmp_path) -> None:
    name, gets = bucket
    settings, client = with_processes(2, monkeypatch)
    ref = create_snapshot("d", f"s3://{name}/", settings=settings).ref
    before = gets()
    target = tmp_path / "mnt"
    target.mkdir()
    fuse_mount.mount_snapshot(ref, target, settings=settings)
    try:
        for path in list(DATA)[::2]:
            assert (target / path).read_bytes() == DATA[path]
    finally:
        fuse_mount.unmount(target, settings=settings)
    samples = DataLoader(SnapshotDataset(ref, target=None), batch_size=None, num_workers=2)
    assert sorted(samples) == sorted(DATA.values())
    assert gets() - before == len(SMALL) + 3 * len(LARGE)
    assert client.cache_status()["fetched"]["fetched"] == len(SMALL) + 3 * len(LARGE)
