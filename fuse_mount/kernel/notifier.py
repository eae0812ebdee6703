"""Tell the kernel what to forget, for the server of a read-write mount, in a process of its own.

The kernel takes some notifications only when the mount has answered: it writes what it has gathered of a file before it
forgets the file's pages, and waits for a folder's lock before it forgets a name. A process that waits so cannot be
killed. If it were the server, nobody would answer, and it would keep the staging area's lock for ever. This one has
nothing but the connection, and the next server answers what it waits for.

`Notifier` forks, so it is made before any thread. Any thread may call `send`. The process ends with the server, and the
server should end when it finds that this one has (`BrokenPipeError`).
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import threading
from typing import NoReturn

from datacache.core import ipc

_ERRNO = struct.Struct("@i")
_MOST_BYTES = 4096
_MOST_DESCRIPTORS = 1 << 16


class Notifier:
    """The process, from the server's side."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            _serve(theirs)
        theirs.close()

    def begin(self, connection: int) -> None:
        """Give it the connection to the kernel, which stays the caller's as well."""
        socket.send_fds(self._channel, [b"connection"], [connection])
        self._begun.set()

    def send(self, message: bytes) -> None:
        """Have the kernel take a notification, and wait for that, and for the connection. `OSError` as of the write."""
        self._begun.wait()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                socket.send_fds(self._channel, [message], [theirs.fileno()])
            answer = ours.recv(_ERRNO.size)
        if not answer:
            raise BrokenPipeError("the notifier has ended")
        (number,) = _ERRNO.unpack(answer)
        if number:
            raise OSError(number, os.strerror(number))


def _serve(channel: socket.socket) -> NoReturn:
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it goes with the server
        os.closerange(3, channel.fileno())
        os.closerange(channel.fileno() + 1, _MOST_DESCRIPTORS)
        _, [connection] = ipc.receive_fds(channel, _MOST_BYTES, 1)
        while True:
            message, fds = ipc.receive_fds(channel, _MOST_BYTES, 1)
            if not message:
                break
            threading.Thread(target=_tell, args=(connection, message, fds[0]), daemon=True).start()
    finally:
        os._exit(0)  # the threads, too


def _tell(connection: int, message: bytes, answer: int) -> None:
    number = 0
    try:
        os.write(connection, message)
    except OSError as exc:
        number = exc.errno or errno.EIO
    with socket.socket(fileno=answer) as caller:
        try:
            caller.send(_ERRNO.pack(number))
        except OSError:  # the server has ended
            os._exit(0)
