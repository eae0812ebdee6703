"""Messages between the processes of a home: JSON lines over Unix sockets, with descriptors beside them.

Used by the keeper of the daemon, by supervisors and workers of mounts, by the mount host and by their callers. A socket
has mode 0600: whoever may open it owns what it stands for. A message is one object, at most `MOST_BYTES` long; whoever
writes and whoever reads may be of different versions, so fields that a reader does not know are passed over, and an
operation that it does not know is answered with an error. Answers are `{"ok": …}` or `{"error", "hint", "type"}`.

Two kinds of servers: `MessageServer` has a thread for each caller; `Lines` and `Callers` are for loops that wait for
nobody.
Functions may be called from any thread; `Lines` and `Callers` belong to one.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from datacache.core.errors import DatacacheError, MountError

Message = dict[str, Any]
MOST_BYTES = 16 * 2**20
TIMEOUT_S = 10.0
_MOST_FDS = 4
_FULL_PAUSE_S = 0.01
_RETRY_S = 0.2

_log = logging.getLogger(__name__)


# --- sockets --------------------------------------------------------------------------------------------------------


def connect(path: Path, *, timeout_s: float | None = None) -> socket.socket:
    """Connect to a socket at a path of any length. `OSError` where nobody listens.

    `timeout_s` is the socket's from the start. While too many callers wait to be let in, this waits, too, and then
    raises `TimeoutError`; with 0 it waits for nothing and raises `BlockingIOError`.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        deadline = time.monotonic() + (timeout_s or 0.0)
        with _address(path) as address:
            while True:
                try:
                    connection.connect(address)
                    return connection
                except BlockingIOError as exc:  # at once, whatever the timeout
                    if not timeout_s:
                        raise
                    if time.monotonic() >= deadline:
                        raise TimeoutError(errno.ETIMEDOUT, f"nobody was let in for {timeout_s:g} s") from exc
                time.sleep(_FULL_PAUSE_S)
    except OSError:
        connection.close()
        raise


def listen(path: Path, *, backlog: int) -> socket.socket:
    """Listen at a path of any length that only its owner may use (mode 0600), in the place of an earlier listener: at
    no instant does nobody listen. The folder must be there. `OSError`.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.unlink(missing_ok=True)
        with _address(beside) as address:
            listener.bind(address)
        beside.chmod(0o600)  # before anybody can connect; no umask, which is all threads'
        listener.listen(backlog)
        beside.replace(path)
    except OSError:
        listener.close()
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    return listener


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """Give an address below a descriptor of the folder: an address itself holds 107 bytes only (unix(7))."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


# --- messages -------------------------------------------------------------------------------------------------------


def send(connection: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one message, with descriptors, which stay the caller's. `OSError`."""
    data = json.dumps(message).encode() + b"\n"
    connection.settimeout(TIMEOUT_S)
    if fds:
        sent = socket.send_fds(connection, [data], list(fds))
        data = data[sent:]
    connection.sendall(data)


def receive(connection: socket.socket, *, timeout_s: float = TIMEOUT_S, most_fds: int = 0) -> tuple[Message, list[int]]:
    """Read one message and up to `most_fds` descriptors that came with it, which are the caller's from then on.

    All other descriptors are closed, and all of them where the message is broken (`OSError`, `ValueError`).
    """
    connection.settimeout(timeout_s)
    text, fds = bytearray(), []
    try:
        while not text.endswith(b"\n"):
            part, more = receive_fds(connection, 65536, _MOST_FDS)
            fds += more
            if not part:
                raise ConnectionError("the other side closed the connection")
            text += part
            if len(text) > MOST_BYTES:
                raise ValueError("the message is too long")
        message = parse_object(bytes(text))
    except BaseException:
        close_all(fds)
        raise
    close_all(fds[most_fds:])
    return message, fds[:most_fds]


def receive_fds(connection: socket.socket, most_bytes: int, most_fds: int) -> tuple[bytes, list[int]]:
    """Receive once: bytes, and descriptors beside them, which are the caller's and which no new program inherits.
    `OSError`.

    `socket.recv_fds` ignores its flags (CPython 3.11), and one that is made not inheritable later can be inherited
    until then.
    """
    fds = array.array("i")
    room = socket.CMSG_LEN(most_fds * fds.itemsize)
    data, beside, _, _ = connection.recvmsg(most_bytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])  # it may be cut off
    return data, list(fds)


def ask(path: Path, message: Message, *, timeout_s: float, most_fds: int = 0) -> tuple[Message, list[int]]:
    """Send one message to whoever listens at a path, and return the answer as `receive` does. `OSError`, `ValueError`;
    `TimeoutError` where no answer comes in time."""
    with connect(path, timeout_s=timeout_s) as connection:
        send(connection, message)
        return receive(connection, timeout_s=timeout_s, most_fds=most_fds)


def answers(connection: socket.socket, *, timeout_s: float) -> Iterator[Message]:
    """Read messages until the other side ends, each within `timeout_s`. `OSError`, `ValueError`."""
    connection.settimeout(timeout_s)
    with connection.makefile("rb") as stream:
        while line := stream.readline(MOST_BYTES):
            yield parse_object(line)


def parse_object(text: str | bytes) -> Message:
    """Parse a JSON object. `ValueError` for anything else, such as brackets that are nested a million deep, or a field
    that is there twice: writer and reader may not mean the same one."""
    try:
        found = json.loads(text, object_pairs_hook=_object)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    if not isinstance(found, dict):
        raise ValueError("a message must be an object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> Message:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is there twice")
    return found


def error_answer(error: DatacacheError) -> Message:
    """Return the answer that says what failed."""
    kind = (error.kind if isinstance(error, MountError) else "") or type(error).__name__
    return {"error": error.message, "hint": error.hint, "type": kind}


def result_of(answer: Message) -> Any:
    """Return the result in an answer. Raise its error as a `MountError`."""
    if "error" in answer:
        error = MountError(answer["error"], hint=answer.get("hint", ""))
        error.kind = answer.get("type", "")
        raise error
    return answer["ok"]


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


# --- servers --------------------------------------------------------------------------------------------------------


Send = Callable[..., None]
"""Called with a message, and descriptors beside it, while the caller waits for the last answer."""
Handler = Callable[[Message, Send], Any]
"""Called with a request. The result is the last answer, unless it is `ANSWERED`. A `DatacacheError` is sent back."""
ANSWERED = object()


class MessageServer:
    """Answer callers at a listener, one request each, in a thread each, until it is closed."""

    def __init__(self, listener: socket.socket, handler: Handler, *, most: int, name: str) -> None:
        """`most` callers are heard at a time; more wait to be let in."""
        self._listener = listener
        self._handler = handler
        self._name = name
        self._room = threading.Semaphore(most)
        self._closed = threading.Event()
        self._talking: set[threading.Thread] = set()
        """Changed by the accepting thread and by each thread about itself: set operations are atomic."""
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self, *, timeout_s: float = 0.0) -> None:
        """Let in no more callers. Wait until those that are heard have their answers, each for `timeout_s` at most."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(2) up, which close(2) would not
        self._thread.join(timeout_s)
        self._listener.close()
        for thread in list(self._talking):
            thread.join(timeout_s)

    def _accept(self) -> None:
        while not self._closed.is_set():
            self._room.acquire()
            try:
                connection, _ = self._listener.accept()
                self._hear(connection)
            except (OSError, RuntimeError) as exc:  # no descriptor is free, for one, or no more threads
                self._room.release()
                if self._closed.wait(_RETRY_S):
                    return
                _log.warning("the %s socket: %s", self._name, exc)

    def _hear(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._talk, args=(connection,), name=f"{self._name}-caller", daemon=True)
        self._talking.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._talking.discard(thread)
            connection.close()
            raise

    def _talk(self, connection: socket.socket) -> None:
        def send_part(message: Message, fds: Sequence[int] = ()) -> None:
            send(connection, message, fds)

        try:
            with connection:
                request, _ = receive(connection)
                answer = self._answer(request, send_part)
                if answer is not None:
                    send(connection, answer)
        except (OSError, ValueError) as exc:
            _log.info("a caller went away: %s", exc)
        finally:
            self._talking.discard(threading.current_thread())
            self._room.release()

    def _answer(self, request: Message, send_part: Send) -> Message | None:
        try:
            result = self._handler(request, send_part)
            return None if result is ANSWERED else {"ok": result}
        except DatacacheError as exc:
            return error_answer(exc)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as exc:  # noqa: BLE001 - the caller is told, and the server goes on
            _log.exception("%s: %s failed", self._name, request.get("op"))
            return {"error": f"the server failed: {exc!r}", "hint": "Its log says more.", "type": "MountError"}


class Lines:
    """The lines that come over a connection, and the descriptors beside them, for a loop that waits for nobody."""

    def __init__(self, connection: socket.socket, *, most_bytes: int, most_fds: int) -> None:
        """`most_bytes`: of a line that has no end yet; `most_fds`: that nobody has taken yet."""
        self.connection = connection
        self.fds: list[int] = []
        """Descriptors that came and that nobody has taken. `close` closes them."""
        self._most_bytes = most_bytes
        self._most_fds = most_fds
        self._text = b""
        connection.setblocking(False)

    def receive(self) -> list[bytes] | None:
        """Read what there is and return the lines that it completes. Return None where the other side has ended, or a
        line is too long or brings too many descriptors; close the connection then.
        """
        try:
            part, fds = receive_fds(self.connection, 65536, self._most_fds)
        except BlockingIOError:
            return []
        except OSError:
            part, fds = b"", []
        self._text += part
        self.fds += fds
        if not part or len(self._text) > self._most_bytes or len(self.fds) > self._most_fds:
            return None
        *lines, self._text = self._text.split(b"\n")
        return lines

    def send(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """Send a short message without waiting. Return False where the other side is gone, or does not read; close the
        connection then."""
        data = json.dumps(message).encode() + b"\n"
        try:
            return socket.send_fds(self.connection, [data], list(fds)) == len(data)
        except OSError:
            return False

    def close(self) -> None:
        """Hang up."""
        self.connection.close()
        close_all(self.fds)
        self.fds = []


class Callers:
    """Connections at a listener that send one request each, for a loop that must go on while a caller says nothing."""

    def __init__(self, listener: socket.socket, *, most: int, most_bytes: int) -> None:
        """`most` connections may have sent nothing whole yet; of more, the oldest is hung up on."""
        self._listener = listener
        self._listener.setblocking(False)
        self._most, self._most_bytes = most, most_bytes
        self._callers: list[Lines] = []
        self._closed = False

    def fds(self) -> list[int]:
        """Return the descriptors to wait for, to read."""
        return [self._listener.fileno(), *(caller.connection.fileno() for caller in self._callers)]

    def heard(self, readable: list[int]) -> Iterator[tuple[socket.socket, Message]]:
        """Give whole requests, each with its connection, which is the loop's from then on. End when this is closed."""
        for caller in [caller for caller in self._callers if caller.connection.fileno() in readable]:
            request = self._read(caller)
            if request is not None:
                yield caller.connection, request
            if self._closed:
                return
        if self._listener.fileno() in readable:
            with contextlib.suppress(OSError):  # it went away, or there is no descriptor left for it
                connection, _ = self._listener.accept()
                self._callers.append(Lines(connection, most_bytes=self._most_bytes, most_fds=0))
            while len(self._callers) > self._most:
                self._hang_up(self._callers[0], "others came")

    def close(self) -> None:
        """Listen no more, and hang up."""
        self._closed = True
        self._listener.close()
        for caller in self._callers:
            caller.close()
        self._callers.clear()

    def _read(self, caller: Lines) -> Message | None:
        lines = caller.receive()
        if lines is None:
            self._hang_up(caller, "it sent no whole request")
        elif lines:
            try:
                request = parse_object(lines[0])
            except ValueError:
                self._hang_up(caller, "it sent something else")
                return None
            self._callers.remove(caller)
            return request
        return None

    def _hang_up(self, caller: Lines, why: str) -> None:
        self._callers.remove(caller)
        caller.close()
        _log.info("a caller is hung up on: %s", why)
