"""Turns at being sent large blocks: one at a time for each data set while others are read, and nobody is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datacache import connect
from datacache.core import ipc
from datacache.core.ids import BLOCK_BYTES, ObjectRef
from datacache.daemon import paths, wire
from datacache.daemon import turns as sends
from datacache.daemon.turns import Sends
from datacache.settings import Settings
from datacache.store.local.store import LocalStore
from tests.promises import promise


class Sender:
    """Sends of one data set, each of which ends when it is told to."""

    def __init__(self, turns: Sends, flow: str) -> None:
        self._turns, self._flow = turns, flow
        self.begun: list[int] = []
        self.beginnings: asyncio.Queue[int] = asyncio.Queue()
        self.gates: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, count: int) -> None:
        for _ in range(count):
            self.gates.append(asyncio.Event())
            self.tasks.append(asyncio.create_task(self._send(len(self.gates) - 1)))

    async def _send(self, number: int) -> None:
        async with self._turns.turn(self._flow):
            self.begun.append(number)
            self.beginnings.put_nowait(number)
            await self.gates[number].wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sends, "SLOW_S", 60.0)
    monkeypatch.setattr(sends, "_READ_LATELY_S", 60.0)


@promise("Large blocks go one at a time to each of several data sets")
@pytest.mark.usefixtures("patient")
def test_a_data_set_that_is_read_alone_is_sent_all_at_once() -> None:
    async def run() -> None:
        turns = Sends()
        turns.note_read("greedy")
        sender = Sender(turns, "greedy")
        sender.start(5)
        await settle()
        assert sender.begun == [0, 1, 2, 3, 4]
        for gate in sender.gates:
            gate.set()
        await asyncio.gather(*sender.tasks)

    asyncio.run(run())


@promise("Large blocks go one at a time to each of several data sets")
@pytest.mark.usefixtures("patient")
def test_while_others_read_each_is_sent_one_after_the_other_in_order() -> None:
    async def run() -> None:
        turns = Sends()
        turns.note_read("greedy")
        greedy, small = Sender(turns, "greedy"), Sender(turns, "small")
        greedy.start(3)
        await settle()
        turns.note_read("small")
        greedy.start(3)
        small.start(2)
        await settle()
        assert (greedy.begun, small.begun) == ([0, 1, 2], [0])
        greedy.gates[0].set()
        greedy.gates[2].set()
        await settle()
        assert greedy.begun == [0, 1, 2], "those that began when it was alone end first"
        for number in (1, 3, 4):
            greedy.gates[number].set()
            await settle()
            assert greedy.begun[-1] == max(3, number + 1)
        greedy.tasks[5].cancel()
        small.gates[0].set()
        await settle()
        assert small.begun == [0, 1]
        greedy.start(1)
        small.gates[1].set()
        await settle()
        assert greedy.begun[-1] == 6, "who was given up gives its turn back"
        greedy.gates[6].set()
        await asyncio.gather(*greedy.tasks, *small.tasks, return_exceptions=True)
        assert not turns._under_way
        assert not turns._waiting

    asyncio.run(run())


@pytest.mark.usefixtures("patient")
def test_a_turn_that_is_given_to_somebody_who_goes_away_is_given_on() -> None:
    async def run() -> None:
        turns = Sends()
        for flow in ("greedy", "small"):
            turns.note_read(flow)
        held = contextlib.AsyncExitStack()
        await held.enter_async_context(turns.turn("greedy"))
        sender = Sender(turns, "greedy")
        sender.start(2)
        await settle()
        await held.aclose()  # the first one has the turn, and has not noticed
        sender.tasks[0].cancel()
        await settle()
        assert sender.begun == [1]
        sender.gates[1].set()
        await sender.tasks[1]
        assert not turns._under_way

    asyncio.run(run())


@promise("Large blocks go one at a time to each of several data sets")
@pytest.mark.usefixtures("patient")
def test_a_reader_that_takes_nothing_keeps_nobody_waiting_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sends, "SLOW_S", 0.01)

    async def run() -> None:
        turns = Sends()
        for flow in ("greedy", "small"):
            turns.note_read(flow)
        sender = Sender(turns, "greedy")
        sender.start(4)
        async with asyncio.timeout(60):
            assert [await sender.beginnings.get() for _ in range(4)] == [0, 1, 2, 3]
        for gate in sender.gates:
            gate.set()
        await asyncio.gather(*sender.tasks)
        assert not turns._under_way

    asyncio.run(run())


def test_a_daemon_sends_large_blocks_of_a_data_set_in_turns_while_another_one_is_read(
    settings: Settings, tmp_path: Path
) -> None:
    for name, size_bytes in (("small", 1000), ("big-1", BLOCK_BYTES), ("big-2", BLOCK_BYTES)):
        (tmp_path / name).write_bytes(os.urandom(size_bytes))
    store = LocalStore()
    client = connect(settings)

    def ask(name: str) -> socket.socket:
        key = str(tmp_path / name).lstrip("/")
        info = store.head(key)
        ref = ObjectRef(store.url, key, info.size_bytes, info.etag)
        body = json.dumps({"ref": wire.encode_ref(ref), "number": 0, "dataset": name.partition("-")[0]})
        connection = ipc.connect(paths.socket_path(settings.home), timeout_s=60.0)
        connection.sendall(f"POST /v1/block HTTP/1.1\r\nHost: d\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        return connection

    done = threading.Event()

    def read_small() -> None:
        while not done.is_set():
            with ask("small") as connection:
                assert b"200 OK" in connection.recv(100)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_small)
        try:
            begun = time.monotonic()
            with ask("big-1") as one, ask("big-2") as two:
                for connection in (one, two):
                    assert b"200 OK" in connection.recv(100)  # and takes no more
                assert time.monotonic() - begun >= sends.SLOW_S, "the second one waited for its turn"
        finally:
            done.set()
        reading.result()
    client.stop()
