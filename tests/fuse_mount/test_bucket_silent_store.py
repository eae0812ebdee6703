"""A read-write mount, through the kernel, over a store that accepts connections and says nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from datacache.settings import load_settings
from tests.fuse_mount.bucket_mount import BucketMount
from tests.promises import promise
from tests.servers import RcloneS3

STORE_TIMEOUT_S = 600
"""Longer than any test runs: whoever waits for the store would wait until it goes on."""


class SilentStore(RcloneS3):
    """A store that can be stopped, as a server that hangs."""

    def stop(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentStore]:
    with SilentStore(tmp_path / "s3") as store:
        for name, value in store.env().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("DATACACHE_STORE_TIMEOUT_S", str(STORE_TIMEOUT_S))
        store.make_bucket("silent")
        yield store
        store.go_on()


@pytest.fixture
def mount(store: SilentStore, home: Path, tmp_path: Path) -> Iterator[BucketMount]:
    mount = BucketMount(store, "silent", tmp_path / "mnt", load_settings(), ttl_s=0.2)
    mount.mount()
    yield mount
    store.go_on()
    mount.unmount()


def within(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return what a call returns. It may wait three seconds for a store that hangs, and a request may take 600."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(what()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "it waits for the store"
    return results[0]


def write(path: Path, text: str) -> bool:
    with path.open("w") as file:
        file.write(text)
        os.fsync(file.fileno())
    return True


@promise("Writing in a known folder waits three seconds at most for a store that hangs")
def test_writers_do_not_wait_for_a_store_that_hangs(mount: BucketMount, store: SilentStore) -> None:
    folder = mount.folder()
    (folder / "logs").mkdir()
    write(folder / "logs" / "before", "1")
    mount.flush()
    assert os.listdir(folder / "logs") == ["before"]
    store.stop()
    time.sleep(0.5)  # what is known is older than the mount's ttl
    for number in range(5):
        assert within(lambda number=number: write(folder / "logs" / f"new-{number}", "2"))
    assert within(lambda: write(folder / "logs" / "before", "3"))
    assert within(lambda: (folder / "logs" / "new").mkdir() is None)
    assert within(lambda: write(folder / "logs" / "new" / "file", "4"))
    assert within(lambda: os.rename(folder / "logs" / "new-0", folder / "logs" / "moved") is None)
    assert within(lambda: os.unlink(folder / "logs" / "new-1") is None)
    names = ["before", "moved", "new", "new-2", "new-3", "new-4"]
    assert sorted(within(lambda: os.listdir(folder / "logs"))) == names
    assert mount.status()["dirty_files"] > 0
    store.go_on()
    mount.flush()
    found = mount.objects("logs/")
    expected = {"before": b"3", "moved": b"2", "new/file": b"4", "new-2": b"2", "new-3": b"2", "new-4": b"2"}
    assert {key: data for key, data in found.items() if not key.endswith("/") and key} == expected


@promise("Writing in a known folder waits three seconds at most for a store that hangs")
def test_what_others_wrote_is_seen_again_when_the_store_goes_on(mount: BucketMount, store: SilentStore) -> None:
    folder = mount.folder()
    write(folder / "mine", "1")
    mount.flush()
    assert os.listdir(folder) == ["mine"]
    store.stop()
    time.sleep(0.5)
    assert within(lambda: os.listdir(folder)) == ["mine"]
    store.go_on()
    mount.client.put_object(Bucket="silent", Key="data/theirs", Body=b"2")
    deadline = time.monotonic() + 60
    while sorted(os.listdir(folder)) != ["mine", "theirs"]:
        assert time.monotonic() < deadline, "it stays away"
        time.sleep(0.05)
