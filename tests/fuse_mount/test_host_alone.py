"""The mount host as an object of this process: whom it hears, and what it remembers."""

from __future__ import annotations

import math
import os

import pytest

from datacache.core import ipc
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
