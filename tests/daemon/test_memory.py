"""The daemon's memory: held for readers that are slow, and given back."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import time

from benchmarks.usage import memory_mib
from datacache import connect, create_snapshot, open_snapshot
from datacache.core import ipc
from datacache.core.ids import BLOCK_BYTES, ObjectRef
from datacache.daemon import memory, paths
from datacache.exchange.frames import HEADER, Header, Kind, header
from datacache.exchange.wire import BlocksRequest, Mode
from tests.promises import promise

BLOCKS = 60


def until(true, what):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@promise("Bytes in the daemon are bounded from the fetch until they were stored and sent")
def test_readers_that_take_no_answer_hold_little_memory_and_nobody_else_up(settings, tmp_path):
    settings = dataclasses.replace(settings, prefetch=False)
    for number in range(BLOCKS):
        with (tmp_path / f"{number}.bin").open("wb") as file:
            file.truncate(BLOCK_BYTES)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "small.bin").write_bytes(b"small")
    create_snapshot("greedy", str(tmp_path), settings=settings)
    create_snapshot("small", str(tmp_path / "other"), settings=settings)
    client = connect(settings)
    with open_snapshot("greedy", settings) as snapshot:
        refs = [snapshot.manifest.object_ref(entry) for entry in snapshot.manifest.entries()]
    refs = [ref for ref in refs if ref.size_bytes == BLOCK_BYTES]
    assert len(refs) == BLOCKS
    pid = client.health()["pid"]
    before = memory_mib(pid, "RssAnon")
    stalled = [ask(settings, ref) for ref in refs]
    try:
        with open_snapshot("small", settings) as snapshot:
            assert snapshot.read("small.bin") == b"small"
        # In the end all are fetched, as readers that took nothing are hung up on when others wait for the room.
        until(lambda: client.cache_status()["fetched"]["fetched"] > BLOCKS, "not all is fetched")
        assert memory_mib(pid, "RssAnon") - before < 128  # of 240; the room for reads is 64 MiB
    finally:
        for connection in stalled:
            connection.close()
    for ref in refs[:4]:
        with ask(settings, ref) as connection:
            assert take(connection) == BLOCK_BYTES


@promise("Bytes in the daemon are bounded from the fetch until they were stored and sent")
def test_a_request_for_more_than_the_daemon_has_room_for_is_answered_bit_by_bit(settings, tmp_path):
    settings = dataclasses.replace(settings, prefetch=False)
    for number in range(40):  # 160 MiB; the room for reads is 64
        with (tmp_path / f"{number}.bin").open("wb") as file:
            file.truncate(BLOCK_BYTES)
            file.write(bytes([number]))
    create_snapshot("large", str(tmp_path), settings=settings)
    client = connect(settings)
    with open_snapshot("large", settings) as snapshot:
        refs = [snapshot.manifest.object_ref(entry) for entry in snapshot.manifest.entries()]
    found = client.blocks_or_errors([(ref, 0) for ref in refs], "large", "")
    assert [(data[0], len(data)) for data in found] == [(int(ref.key.split("/")[-1][:-4]), BLOCK_BYTES) for ref in refs]
    client.stop()


def test_memory_of_a_large_block_is_used_again_and_not_faulted_in_anew():
    code = """if True:
        import resource
        from datacache.core.ids import BLOCK_BYTES
        from datacache.daemon import memory
        memory.tune()
        bytearray(BLOCK_BYTES)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(100):
            bytearray(BLOCK_BYTES)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100  # 2 to 1,000 faults a block, as the kernel's pages are large or not


@promise("Bytes in the daemon are bounded from the fetch until they were stored and sent")
def test_memory_of_large_blocks_that_threads_took_is_given_back():
    code = """if True:
        import threading
        from pathlib import Path
        from datacache.core.ids import BLOCK_BYTES
        from datacache.daemon import memory
        def anonymous_kib():
            return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])
        memory.tune()
        before, barrier = anonymous_kib(), threading.Barrier(4)
        def take():
            blocks = [bytes(BLOCK_BYTES) + b"." for _ in range(4)]  # written to
            barrier.wait()
        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        memory.trim()
        print(anonymous_kib() - before)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * BLOCK_BYTES // 1024


def ask(settings, ref: ObjectRef) -> socket.socket:
    """Ask for a block, and take no answer."""
    body = BlocksRequest([(ref, 0)], "greedy", "", Mode.READ).encode()
    connection = ipc.connect(paths.socket_path(settings.home), timeout_s=30)
    connection.sendall(header(Kind.BLOCKS, 1, 0, len(body)) + body)
    return connection


def take(connection: socket.socket) -> int:
    with connection.makefile("rb") as answer:
        first = Header.parse(answer.read(HEADER.size))
        assert first.kind == Kind.OK
        return len(answer.read(first.body_bytes))


@promise("Bytes in the daemon are bounded from the fetch until they were stored and sent")
def test_memory_is_given_back_once_nothing_happens_any_more(monkeypatch):
    counts = iter([0, 1, 2, 2, 2, 2, 3, 3, 3])
    last = [0]

    def activity():
        last[0] = next(counts, 3)
        return last[0]

    trimmed = []
    monkeypatch.setattr(memory, "trim", lambda: trimmed.append(1))

    idle = memory.IdleTrim(activity)
    for _ in range(20):
        idle.look()
    assert len(trimmed) == 2
