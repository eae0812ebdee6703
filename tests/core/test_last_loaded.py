"""Values that take long to load: each once, the last of them held."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from datacache.core.concurrency import LastLoaded
from tests.promises import promise

pytestmark = [promise("Bytes are checked past the daemon, in copies and imports, and through a proxy")]


def test_what_many_ask_for_at_once_is_loaded_once() -> None:
    held: LastLoaded[str, bytes] = LastLoaded(10)
    loads: list[str] = []
    go = threading.Event()

    def load() -> bytes:
        loads.append("a")
        assert go.wait(60)
        return b"12345"

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(held.get, "a", load) for _ in range(4)]
        go.set()
        assert [each.result() for each in asked] == [b"12345"] * 4
    assert loads == ["a"]


def test_the_last_ones_are_held_up_to_the_bound_and_one_at_least() -> None:
    held: LastLoaded[str, bytes] = LastLoaded(10)
    loads: list[str] = []

    def get(key: str, size: int) -> None:
        held.get(key, lambda: loads.append(key) or bytes(size))  # type: ignore[func-returns-value]

    for key, size in (("a", 5), ("b", 5), ("a", 5), ("c", 5), ("a", 5), ("b", 5), ("large", 20), ("large", 20)):
        get(key, size)
    assert loads == ["a", "b", "c", "b", "large"]
    held.forget(lambda key: key == "large")
    get("large", 20)
    assert loads[-2:] == ["large", "large"]


def test_what_failed_is_tried_again() -> None:
    held: LastLoaded[str, bytes] = LastLoaded(10)

    def fail() -> bytes:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        held.get("a", fail)
    assert held.get("a", lambda: b"here") == b"here"
