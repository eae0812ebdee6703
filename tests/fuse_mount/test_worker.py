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

    def read_now(self, ino: int, offset: int, size: int) -> None:
        """Nothing is here at once."""

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


@pytest.fixture
def kernel() -> Iterator[ExitStack]:
    before = signal.signal(signal.SIGUSR1, lambda _number, _frame: None)  # what ends the loop
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGUSR1, before)
        yield stack


@promise("A full or failing disk is read around and costs speed, not bytes")
@pytest.mark.parametrize("gone", [0, 1, 100])
def test_a_read_is_answered_also_if_its_bytes_go_away_before_the_answer(
    kernel: ExitStack, tmp_path: Path, gone: int
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kernel.enter_context(ours).settimeout(20)
    worker = Worker(Files(tmp_path, gone), theirs.detach(), protocol.Ownership(0, 0, 0))  # type: ignore[arg-type]
    loop = threading.Thread(target=worker.serve)
    loop.start()
    kernel.callback(worker.close)
    kernel.callback(loop.join)
    kernel.callback(worker.stop)
    request = _READ_IN.pack(0, 0, SIZE, 0, 0, 0, 0)
    header = _IN_HEADER.pack(_IN_HEADER.size + len(request), protocol.READ, 6, 1, 0, 0, 0, 0)
    ours.send(header + request)
    answer = ours.recv(2 * SIZE)
    length, error, unique = struct.unpack_from("<IiQ", answer)
    assert (length, unique) == (len(answer), 6)
    assert (error, answer[16:]) == ((0, b"x" * SIZE) if gone < 3 else (-errno.EIO, b""))
