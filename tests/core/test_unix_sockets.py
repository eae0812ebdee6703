"""Unix sockets at any path: who may connect, and one listener after another."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datacache.core import ipc


def test_a_path_may_be_longer_than_an_address(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    with ipc.listen(folder / "s", backlog=1) as listener, ipc.connect(folder / "s") as caller:
        called, _ = listener.accept()
        with called:
            called.sendall(b"word")
            assert caller.recv(10) == b"word"
    assert [path.name for path in folder.iterdir()] == ["s"]


def test_only_the_owner_may_connect(tmp_path: Path) -> None:
    with ipc.listen(tmp_path / "s", backlog=1):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600


def test_the_next_listener_takes_the_place_and_who_is_connected_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with ipc.listen(path, backlog=1) as old, ipc.connect(path) as before:
        with ipc.listen(path, backlog=1) as new, ipc.connect(path):
            new.setblocking(False)
            new.accept()[0].close()
        called, _ = old.accept()
        with called:
            before.sendall(b"x")
            assert called.recv(1) == b"x"


def test_where_nobody_listens_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ipc.connect(tmp_path / "s")
    ipc.listen(tmp_path / "s", backlog=1).close()
    with pytest.raises(ConnectionRefusedError):
        ipc.connect(tmp_path / "s")


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    """Where nobody else is let in until the listener accepts one."""
    path = tmp_path / "s"
    with ipc.listen(path, backlog=0) as listener, ipc.connect(path, timeout_s=0.0):
        yield path, listener


def test_while_too_many_wait_who_has_no_time_is_told_so_at_once_and_others_in_time(
    full: tuple[Path, socket.socket],
) -> None:
    path, _ = full
    with pytest.raises(BlockingIOError):
        ipc.connect(path, timeout_s=0.0)
    with pytest.raises(TimeoutError):
        ipc.connect(path, timeout_s=0.001)


def test_who_has_time_is_let_in_when_there_is_room(full: tuple[Path, socket.socket]) -> None:
    path, listener = full
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(ipc.connect, path, timeout_s=60.0)
        for _ in range(2):
            listener.accept()[0].close()
        calling.result().close()


def test_a_listener_that_cannot_be_put_in_its_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "s" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        ipc.listen(tmp_path / "s", backlog=1)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_lines_come_whole_with_their_descriptors_until_the_other_side_ends(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    lines = ipc.Lines(ours, most_bytes=100, most_fds=4)
    with theirs, (tmp_path / "file").open("wb") as file:
        assert lines.receive() == []
        theirs.sendall(b"one\ntw")
        assert lines.receive() == [b"one"]
        socket.send_fds(theirs, [b"o\nthree\n"], [file.fileno()])
        assert lines.receive() == [b"two", b"three"]
        [fd] = lines.fds
        assert os.path.sameopenfile(fd, file.fileno())
    assert lines.receive() is None
    lines.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_line_without_an_end_is_not_gathered_for_ever() -> None:
    ours, theirs = socket.socketpair()
    lines = ipc.Lines(ours, most_bytes=100, most_fds=4)
    with theirs:
        theirs.sendall(b"x" * 101)
        assert lines.receive() is None
    lines.close()


def test_descriptors_that_nobody_takes_are_not_gathered_for_ever(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    lines = ipc.Lines(ours, most_bytes=100, most_fds=4)
    with theirs, (tmp_path / "file").open("wb") as file:
        socket.send_fds(theirs, [b"x"], [file.fileno()] * 4)
        assert lines.receive() == []
        socket.send_fds(theirs, [b"x"], [file.fileno()])
        assert lines.receive() is None
    lines.close()


def through_receive(connection: socket.socket) -> list[int]:
    return ipc.receive(connection, most_fds=1)[1]


def through_lines(connection: socket.socket) -> list[int]:
    lines = ipc.Lines(connection, most_bytes=100, most_fds=1)
    lines.receive()
    return lines.fds


@pytest.mark.parametrize("receive", [through_receive, through_lines])
def test_no_new_program_inherits_a_descriptor_that_was_received(
    receive: Callable[[socket.socket], list[int]], tmp_path: Path
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "file").open("wb") as file:
        ipc.send(theirs, {}, [file.fileno()])
        [fd] = receive(ours)
        assert os.path.sameopenfile(fd, file.fileno())
        assert not os.get_inheritable(fd)
        os.close(fd)
