"""Unix sockets at any path: who may connect, and one listener after another."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from datacache.core import unix_sockets


def test_a_path_may_be_longer_than_an_address(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    with unix_sockets.listen(folder / "s", backlog=1) as listener, unix_sockets.connect(folder / "s") as caller:
        called, _ = listener.accept()
        with called:
            called.sendall(b"word")
            assert caller.recv(10) == b"word"
    assert [path.name for path in folder.iterdir()] == ["s"]


def test_only_the_owner_may_connect(tmp_path: Path) -> None:
    with unix_sockets.listen(tmp_path / "s", backlog=1):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600


def test_the_next_listener_takes_the_place_and_who_is_connected_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with unix_sockets.listen(path, backlog=1) as old, unix_sockets.connect(path) as before:
        with unix_sockets.listen(path, backlog=1) as new, unix_sockets.connect(path):
            new.setblocking(False)
            new.accept()[0].close()
        called, _ = old.accept()
        with called:
            before.sendall(b"x")
            assert called.recv(1) == b"x"


def test_where_nobody_listens_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        unix_sockets.connect(tmp_path / "s")
    unix_sockets.listen(tmp_path / "s", backlog=1).close()
    with pytest.raises(ConnectionRefusedError):
        unix_sockets.connect(tmp_path / "s")


def test_one_that_waits_for_nothing_says_when_too_many_wait(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with (
        unix_sockets.listen(path, backlog=0),
        unix_sockets.connect(path, timeout_s=0.0),
        pytest.raises(BlockingIOError),
    ):
        unix_sockets.connect(path, timeout_s=0.0)
