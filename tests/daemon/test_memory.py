"""The daemon's memory: held for readers that are slow, and given back."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
import time

from datacache import connect, create_snapshot, open_snapshot
from datacache.core import ipc
from datacache.core.ids import BLOCK_BYTES, ObjectRef
from datacache.daemon import memory, paths, wire
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
    stalled = [ask(settings, ref) for ref in refs]
    try:
        with open_snapshot("small", settings) as snapshot:
            assert snapshot.read("small.bin") == b"small"
        until(lambda: client.cache_status()["fetched"]["fetched"] > 5, "nothing is fetched")
        fetched = client.cache_status()["fetched"]["fetched"]
        assert fetched < BLOCKS / 2  # the room for reads is 64 MiB
        # Those who take their answers get them, and so do the others then.
        lengths = []
        takers = [threading.Thread(target=lambda c=c: lengths.append(take(c))) for c in stalled]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join(60)
        assert lengths == [BLOCK_BYTES] * BLOCKS
    finally:
        for connection in stalled:
            connection.close()


def ask(settings, ref: ObjectRef) -> socket.socket:
    """Ask for a block, and take no answer."""
    body = json.dumps({"ref": wire.encode_ref(ref), "number": 0, "dataset": "greedy", "snapshot": ""}).encode()
    connection = ipc.connect(paths.socket_path(settings.home), timeout_s=30)
    head = (
        f"POST /v1/block HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def take(connection: socket.socket) -> int:
    with connection.makefile("rb") as answer:
        assert answer.readline().split()[1] == b"200"
        length = 0
        while (line := answer.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return len(answer.read(length))


@promise("Bytes in the daemon are bounded from the fetch until they were stored and sent")
def test_memory_is_given_back_once_nothing_happens_any_more(monkeypatch):
    counts = iter([0, 1, 2, 2, 2, 2, 3, 3, 3])
    last = [0]

    def activity():
        last[0] = next(counts, 3)
        return last[0]

    trimmed = []
    monkeypatch.setattr(memory, "trim", lambda: trimmed.append(1))

    async def run():
        task = asyncio.create_task(memory.trim_when_idle(activity, every_s=0.01))
        await asyncio.to_thread(until, lambda: len(trimmed) == 2, "it is never idle")
        await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(run())
    assert len(trimmed) == 2
