"""The loop of a worker on a socket in the kernel's place, where bytes go away between their read and the answer."""

from __future__ import annotations

import errno
import mmap
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from datacache.core.errors import StoreUnavailableError
from fuse_mount.kernel import protocol
from fuse_mount.snapshot.worker import Worker
from tests.promises import promise

SIZE = 3 * mmap.PAGESIZE
_IN_HEADER = struct.Struct("<IIQQIIII")  # linux/fuse.h
_READ_IN = struct.Struct("<QQIIQII")


class Files:
    """A file system of one file, whose bytes come from mappings; those of `gone` reads are cut off behind."""

    total_bytes, files = SIZE, 1

    def __init__(self, folder: Path, gone: int) -> None:
        self.path, self.gone, self.reads = folder / "container", gone, 0

    def read_now(self, ino: int, offset: int, size: int) -> bytes | None:
        """Nothing is here at once."""

    def ask(self, ino: int, offset: int, size: int) -> AskedFake | None:
        """There is no daemon."""

    def read_wait(self, ino: int, offset: int, size: int) -> memoryview:
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(b"x" * SIZE)
        with open(self.path, "r+b") as file:
            view = memoryview(mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ))
            if self.reads < self.gone:
                file.truncate(0)
        self.reads += 1
        return view

    def path_of(self, ino: int) -> str:
        return "a file"


class AskedFake:
    """A block that a daemon, the test, was asked for: `answers` has its end of a connection."""

    def __init__(self, *, late: bool) -> None:
        self.late = late
        self.error: StoreUnavailableError | None = None
        self.ours, self.answers = socket.socketpair()

    def fileno(self) -> int:
        return self.ours.fileno()

    def overdue(self) -> bool:
        return self.late

    def take(self) -> memoryview | None:
        came = self.ours.recv(SIZE)
        self.give_up()
        return memoryview(came) if came else None

    def failure(self) -> StoreUnavailableError | None:
        return self.error

    def give_up(self) -> None:
        self.ours.close()


class AskedFiles(Files):
    """Inode 1 is asked for; all others are here."""

    def __init__(self, folder: Path, *, late: bool = False) -> None:
        super().__init__(folder, gone=0)
        self.asked = AskedFake(late=late)

    def read_now(self, ino: int, offset: int, size: int) -> bytes | None:
        return None if ino == 1 else b"here"

    def ask(self, ino: int, offset: int, size: int) -> AskedFake:
        return self.asked


class Kernel:
    """The kernel's end of a queue, and the worker that serves it."""

    def __init__(self, files: Files, stack: ExitStack) -> None:
        self._queue, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(self._queue).settimeout(20)
        self.worker = Worker(files, theirs.detach(), protocol.Ownership(0, 0, 0))  # type: ignore[arg-type]
        loop = threading.Thread(target=self.worker.serve)
        loop.start()
        stack.callback(self.worker.close)
        stack.callback(loop.join)
        stack.callback(self.worker.stop)

    def ask(self, ino: int) -> None:
        """Ask for all bytes of a file."""
        request = _READ_IN.pack(0, 0, SIZE, 0, 0, 0, 0)
        header = _IN_HEADER.pack(_IN_HEADER.size + len(request), protocol.READ, 10 + ino, ino, 0, 0, 0, 0)
        self._queue.send(header + request)

    def answer(self) -> tuple[int, int, bytes]:
        """Return the next answer: the inode of its request, error and bytes."""
        answer = self._queue.recv(2 * SIZE)
        length, error, unique = struct.unpack_from("<IiQ", answer)
        assert length == len(answer)
        return unique - 10, error, answer[16:]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    before = signal.signal(signal.SIGUSR1, lambda _number, _frame: None)  # what ends the loop
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGUSR1, before)
        yield stack


@promise("A full or failing disk is read around and costs speed, not bytes")
@pytest.mark.parametrize("gone", [0, 1, 100])
def test_a_read_is_answered_also_if_its_bytes_go_away_before_the_answer(
    stack: ExitStack, tmp_path: Path, gone: int
) -> None:
    kernel = Kernel(Files(tmp_path, gone), stack)
    kernel.ask(1)
    assert kernel.answer() == ((1, 0, b"x" * SIZE) if gone < 3 else (1, -errno.EIO, b""))


def test_a_thread_reads_what_the_loop_cannot_wait_for(stack: ExitStack, tmp_path: Path) -> None:
    files = AskedFiles(tmp_path)
    files.asked.give_up()
    kernel = Kernel(files, stack)
    for ino in (1, 2):
        kernel.ask(ino)
    assert sorted([kernel.answer(), kernel.answer()]) == [(1, 0, b"x" * SIZE), (2, 0, b"here")]


@promise("A read that waits for the store delays no other")
def test_the_loop_serves_others_until_the_daemon_answers(stack: ExitStack, tmp_path: Path) -> None:
    files = AskedFiles(tmp_path)
    kernel = Kernel(files, stack)
    for ino in (1, 2, 3):
        kernel.ask(ino)
    assert [kernel.answer(), kernel.answer()] == [(2, 0, b"here"), (3, 0, b"here")]
    files.asked.answers.send(b"fetched")
    assert kernel.answer() == (1, 0, b"fetched")
    assert not files.reads  # by a thread
    kernel.ask(2)
    assert kernel.answer() == (2, 0, b"here")


def test_a_store_that_was_away_for_the_daemon_is_not_waited_for_again(stack: ExitStack, tmp_path: Path) -> None:
    files = AskedFiles(tmp_path)
    files.asked.error = StoreUnavailableError("it is away", url="s3://b/k")
    kernel = Kernel(files, stack)
    kernel.ask(1)
    files.asked.answers.close()
    assert kernel.answer() == (1, -errno.EIO, b"")
    assert not files.reads


@pytest.mark.parametrize("how", ["the daemon hangs up", "the daemon is silent", "the worker is stopped"])
def test_a_thread_reads_what_the_daemon_was_asked_for_in_vain(stack: ExitStack, tmp_path: Path, how: str) -> None:
    files = AskedFiles(tmp_path, late=how == "the daemon is silent")
    kernel = Kernel(files, stack)
    for ino in (1, 2):
        kernel.ask(ino)
    if how != "the daemon is silent":
        assert kernel.answer() == (2, 0, b"here")
    if how == "the daemon hangs up":
        files.asked.answers.close()
    elif how == "the worker is stopped":
        kernel.worker.stop()
    while (answer := kernel.answer())[0] == 2:  # looks at the silent daemon come before or after
        pass
    assert answer == (1, 0, b"x" * SIZE)
