"""The control socket of a read-write mount: one JSON line asks, one or more answer.

`ControlServer` is the server's side (`bucket_server`), with a thread for each connection; `ask` and `follow` are the
callers' (`bucket_launch`). Operations: `status`, `metrics`, `flush` (with `timeout_s`; `{"progress": …}` comes again
and again) and `stop` (with `lazy` and `flush_s`; answers when the server has finished). The last answer is
`{"ok": …}` or `{"error", "hint", "type"}`. The socket's mode is 0600: who may open it owns the mount.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from datacache.core.errors import DatacacheError, MountError, UploadError
from fuse_mount.lifecycle.control import Request, receive, reply
from fuse_mount.lifecycle.state import FilesOfMount

_ANSWER_TIMEOUT_S = 10.0
_RETRY_S = 0.2
_SILENCE_S = 120.0
"""What a flush or a stop may take from one line to the next."""

_log = logging.getLogger("fuse_mount")


class NoAnswerError(MountError):
    """No server answers, or it ended before it had answered."""


Send = Callable[[dict[str, Any]], None]
Handler = Callable[[Request, Send], Any]
"""Gets the request and a way to send more than its last answer, which it returns."""


class ControlServer:
    """Answers until it is closed."""

    def __init__(self, listener: socket.socket, handlers: Mapping[str, Handler]) -> None:
        self._listener = listener
        self._handlers = handlers
        self._closed = threading.Event()
        self._talking: set[threading.Thread] = set()
        """Changed by the accepting thread and by each thread about itself: set operations are atomic."""
        self._thread = threading.Thread(target=self._accept, name="control", daemon=True)
        self._thread.start()

    def close(self, *, timeout_s: float) -> None:
        """Take no more connections, and let those that are open get their answers."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(2) up, which close(2) would not
        self._thread.join(timeout_s)
        self._listener.close()
        for thread in list(self._talking):
            thread.join(timeout_s)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as exc:
                if self._closed.wait(_RETRY_S):
                    return
                _log.warning("the control socket: %s", exc)  # no descriptor is free, for one
                continue
            thread = threading.Thread(target=self._talk, args=(connection,), name="control-client", daemon=True)
            self._talking.add(thread)
            thread.start()

    def _talk(self, connection: socket.socket) -> None:
        def send(message: dict[str, Any]) -> None:
            reply(connection, message)

        try:
            with connection:
                request, _ = receive(connection)
                send(self._answer(request, send))
        except (OSError, ValueError) as exc:
            _log.info("a caller went away: %s", exc)
        finally:
            self._talking.discard(threading.current_thread())

    def _answer(self, request: Request, send: Send) -> dict[str, Any]:
        handler = self._handlers.get(str(request.get("op")))
        if handler is None:
            return {"error": f"unknown operation {request.get('op')!r}", "hint": "", "type": "MountError"}
        try:
            return {"ok": handler(request, send)}
        except DatacacheError as exc:
            return {"error": exc.message, "hint": exc.hint, "type": type(exc).__name__}
        except (ConnectionError, TimeoutError):
            raise
        except Exception as exc:  # noqa: BLE001 - the caller is told, and the mount goes on
            _log.exception("%s failed", request.get("op"))
            return {"error": f"the server failed: {exc!r}", "hint": "Its log says more.", "type": "MountError"}


def ask(files: FilesOfMount, request: Request) -> Any:
    """The answer to one request. `NoAnswerError` when no server answers."""
    return _last(_lines(files, request, _ANSWER_TIMEOUT_S))


def follow(files: FilesOfMount, request: Request, progress: Callable[[dict[str, Any]], None]) -> Any:
    """The answer to a request that takes long; `progress` gets what comes before it."""
    return _last(_lines(files, request, _SILENCE_S), progress)


def _lines(files: FilesOfMount, request: Request, timeout_s: float) -> Iterator[dict[str, Any]]:
    try:
        with files.connect() as connection:
            reply(connection, request)
            connection.settimeout(timeout_s)
            with connection.makefile("rb") as stream:
                for line in stream:
                    yield json.loads(line)
    except OSError as exc:
        raise NoAnswerError(
            f"no server answers for this mount: {exc.strerror or exc}", hint=f"Its log: {files.log}"
        ) from exc


def _last(lines: Iterator[dict[str, Any]], progress: Callable[[dict[str, Any]], None] | None = None) -> Any:
    for line in lines:
        if "progress" in line:
            if progress is not None:
                progress(line["progress"])
            continue
        if "error" in line:
            kind = UploadError if line.get("type") == "UploadError" else MountError
            raise kind(line["error"], hint=line.get("hint", ""))
        return line["ok"]
    raise NoAnswerError("the server ended before it had answered", hint="dsctl status shows what is left.")
