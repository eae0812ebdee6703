"""The keeper of descriptors: what it does when their owners end, with pipes in the place of /dev/fuse."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datacache.daemon import paths
from datacache.daemon.keeper import Keeper, is_connected
from tests.leftovers import in_own_process


class Owner:
    """A connection to the keeper."""

    def __init__(self, home: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(str(paths.keeper_socket_path(home)))

    def ask(self, message: dict[str, Any], *fds: int) -> tuple[dict[str, Any], list[int]]:
        socket.send_fds(self.socket, [json.dumps(message).encode() + b"\n"], list(fds))
        text, received = b"", []
        while not text.endswith(b"\n"):
            part, more, _, _ = socket.recv_fds(self.socket, 65536, 4)
            assert part
            text += part
            received += more
        return json.loads(text), received

    def keep(self, folder: Path, *fds: int, code: str = "", key: str = "k") -> dict[str, Any]:
        """Keep descriptors; `code` is Python that runs when their owners have ended."""
        message = {
            "op": "keep",
            "key": key,
            "argv": [sys.executable, "-c", code],
            "environment": {"WHERE": str(folder)},
            "log": str(folder / "log"),
            "note": {"mountpoint": "/there"},
            "descriptors": len(fds),
        }
        return self.ask(message, *fds)[0]

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def kept_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with a keeper in a hurry."""
    monkeypatch.setattr("datacache.daemon.keeper._GRACE_S", 0.02)
    home = tmp_path_factory.mktemp("home")
    keeper = Keeper(home)
    keeper.start()
    yield home
    keeper.close()
    assert not paths.keeper_socket_path(home).exists()


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A FIFO that what is brought back writes to."""
    os.mkfifo(tmp_path / "told")
    return tmp_path / "told"


TELL = "import os; open(os.environ['WHERE'] + '/told', 'w').write('back')"


def test_an_owner_that_ends_is_brought_back_once_and_gets_its_descriptors(
    kept_home: Path, tmp_path: Path, told: Path
) -> None:
    reading, writing = os.pipe()
    owner = Owner(kept_home)
    assert owner.keep(tmp_path, writing, reading, code=TELL) == {"ok": None}
    os.close(writing)
    owner.close()
    assert told.read_text() == "back"
    next_one = Owner(kept_home)
    answer, [fd, other] = next_one.ask({"op": "fetch", "key": "k"})
    assert answer == {"ok": {"note": {"mountpoint": "/there"}}}
    os.write(fd, b"the very pipe")
    assert os.read(other, 100) == b"the very pipe"
    assert next_one.keep(tmp_path, fd) == {"ok": None}
    assert next_one.ask({"op": "list"})[0]["ok"]["k"]["owned"]
    for number in (reading, fd, other):
        os.close(number)


def test_what_fails_to_come_back_is_tried_again(kept_home: Path, tmp_path: Path, told: Path) -> None:
    reading, writing = os.pipe()
    owner = Owner(kept_home)
    second = (
        "import os, sys; d = os.environ['WHERE'] + '/once'; os.path.exists(d) or sys.exit(bool(os.mkdir(d)) or 1)\n"
    )
    owner.keep(tmp_path, writing, code=second + TELL)
    owner.close()
    assert told.read_text() == "back"
    for number in (reading, writing):
        os.close(number)


def test_what_has_failed_thousands_of_times_is_tried_again(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path_factory.mktemp("home")
    keeper = Keeper(home)
    keeper.start()
    owner = Owner(home)
    owner.keep(tmp_path, code=TELL)
    keeper._kept["k"].tries = 5000
    monkeypatch.setattr("datacache.daemon.keeper._MAX_DELAY_S", 0.0)
    owner.close()
    assert told.read_text() == "back"
    keeper.close()


def test_a_release_ends_it_and_so_does_the_end_of_what_is_kept(kept_home: Path, tmp_path: Path) -> None:
    owner, other = Owner(kept_home), Owner(kept_home)
    reading, writing = os.pipe()
    owner.keep(tmp_path, writing, key="released")
    owner.keep(tmp_path, writing, key="gone", code="open('/nowhere/at/all', 'w')")
    os.close(writing)
    assert owner.ask({"op": "release", "key": "released"})[0] == {"ok": None}
    assert set(other.ask({"op": "list"})[0]["ok"]) == {"gone"}
    os.close(reading)  # as an unmount ends a descriptor of /dev/fuse
    owner.close()
    while other.ask({"op": "list"})[0]["ok"]:
        pass
    assert not (tmp_path / "log").exists()
    assert "error" in other.ask({"op": "fetch", "key": "gone"})[0]


def test_while_one_of_two_owners_lives_nothing_is_run(kept_home: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    old, new = Owner(kept_home), Owner(kept_home)
    old.keep(tmp_path, writing, code=TELL)
    new.keep(tmp_path, writing, code=TELL)
    old.close()
    while not new.ask({"op": "list"})[0]["ok"]["k"]["owned"]:
        pass
    new.ask({"op": "release", "key": "k"})
    assert new.ask({"op": "list"})[0] == {"ok": {}}
    assert not (tmp_path / "log").exists()
    for number in (reading, writing):
        os.close(number)


def test_what_has_no_descriptor_is_started_again_and_forgotten_if_it_does_not_want(
    kept_home: Path, tmp_path: Path, told: Path
) -> None:
    owner, other = Owner(kept_home), Owner(kept_home)
    owner.keep(tmp_path, code=TELL)
    owner.close()
    assert told.read_text() == "back"
    while other.ask({"op": "list"})[0]["ok"]:
        pass


def test_requests_that_make_no_sense_are_refused_and_the_keeper_lives(kept_home: Path, tmp_path: Path) -> None:
    owner = Owner(kept_home)
    for message in ({"op": "nonsense"}, {}, {"op": "keep"}, {"op": "keep", "key": "k", "descriptors": 1}):
        assert "error" in owner.ask(message)[0]
    for text in (b"[1]\n", b'{"op": "keep", "descriptors": 1e400}\n'):
        owner.socket.sendall(text)
        assert b"error" in owner.socket.recv(1000)
    reading, writing = os.pipe()
    os.close(reading)
    assert not is_connected(writing)
    assert "gone" in owner.keep(tmp_path, writing)["error"]
    os.close(writing)
    cut_off = Owner(kept_home)
    cut_off.socket.sendall(b'{"op": "lis')
    cut_off.close()
    assert owner.ask({"op": "list"})[0] == {"ok": {}}


def test_the_socket_is_for_its_owner_only(kept_home: Path) -> None:
    assert stat.S_IMODE(paths.keeper_socket_path(kept_home).stat().st_mode) == 0o600


def test_closing_leaves_no_descriptor_and_no_thread() -> None:
    in_own_process(start_and_close_a_keeper)


def start_and_close_a_keeper() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _, writing = os.pipe()
        before = os.listdir("/proc/self/fd")
        keeper = Keeper(Path(folder))
        keeper.start()
        owner = Owner(Path(folder))
        owner.keep(Path(folder, "mnt"), writing)
        keeper.close()
        owner.close()
        assert os.listdir("/proc/self/fd") == before
        assert "keeper" not in [thread.name for thread in threading.enumerate()]
