"""The mount host as an object of this process: whom it hears, and what it remembers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from datacache.core import ipc
from datacache.core.errors import MountError
from datacache.settings import Settings
from fuse_mount.lifecycle import host as mount_host
from fuse_mount.lifecycle.host import MountHost


def test_who_says_nothing_takes_one_place_of_a_few(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_host, "_MOST_CALLERS", 1)
    host = MountHost(settings)
    silent = ipc.connect(host.path)
    with ipc.connect(host.path) as caller:
        ipc.send(caller, {"op": "ping"})
        with pytest.raises(TimeoutError):
            ipc.receive(caller, timeout_s=0.1)
        silent.close()
        answer, _ = ipc.receive(caller, timeout_s=60.0)
    assert answer["ok"]["pid"] == os.getpid()
    host._ending.set()
    host._server.close()


def hang_up(_request: ipc.Message, _send: ipc.Send) -> None:
    raise ConnectionError


def fail(_request: ipc.Message, _send: ipc.Send) -> None:
    raise MountError("it cannot be asked now")


@pytest.mark.parametrize("answer", [hang_up, fail])
def test_a_newer_host_that_lets_callers_in_is_there_whatever_it_answers(
    settings: Settings, answer: Callable[[ipc.Message, ipc.Send], None]
) -> None:
    host = MountHost(settings)
    newer = ipc.MessageServer(ipc.listen(host.path, backlog=1), answer, most=1, name="newer")
    assert host._somebody_listens()
    newer.close()
    assert not host._somebody_listens()
    host._server.close()


def test_a_newer_host_that_answers_with_junk_is_there(settings: Settings) -> None:
    host = MountHost(settings)
    with ipc.listen(host.path, backlog=1) as newer, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(host._somebody_listens)
        connection, _ = newer.accept()
        with connection:
            ipc.receive(connection)
            connection.sendall(b"junk\n")
        assert asked.result()
    assert not host._somebody_listens()
    host._server.close()


def test_failures_are_forgotten_with_the_mount(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    host = MountHost(settings)
    host._failures["/gone"] = (3, math.inf)

    def look() -> list[tuple[str, list[str]]]:
        host._ending.set()  # after one look
        return []

    monkeypatch.setattr(host, "_works", look)
    host._look_after()
    assert host._failures == {}
    host._server.close()
