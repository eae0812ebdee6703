"""Messages on a supervisor's control socket: one JSON line each way, with descriptors beside it where they
are due.

Used by `supervisor` (both ends of a hand-over), `launch`, `host` and `keeping`. Operations: `status`, `stop` (with
`lazy`), `takeover` (answers with the mount's state and its descriptor), `finish` (ends the old supervisor of a
hand-over), `leave` (ends a supervisor whose mount the keeper holds, without unmounting). Answers are `{"ok": …}` or
`{"error": …, "hint": …}`. The socket's mode is 0600: who may open it owns the mount. The mount host (`host`) and its
callers (`process`) talk the same way. No threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from datacache.core.ipc import parse_object

Request = dict[str, Any]
_TIMEOUT_S = 10.0
_MAX_FDS = 4


def reply(connection: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message (a request as well as an answer)."""
    data = json.dumps(message).encode() + b"\n"
    connection.settimeout(_TIMEOUT_S)
    if fds:
        sent = socket.send_fds(connection, [data], list(fds))
        data = data[sent:]
    connection.sendall(data)


def receive(
    connection: socket.socket, *, timeout_s: float = _TIMEOUT_S, most_fds: int = 0
) -> tuple[Request, list[int]]:
    """Read one message and up to `most_fds` descriptors that came with it, which are the caller's from then on.

    All other descriptors are closed, and all of them where the message is broken (`OSError`, `ValueError`).
    """
    connection.settimeout(timeout_s)
    text, fds = b"", []
    try:
        while not text.endswith(b"\n"):
            part, more, _, _ = socket.recv_fds(connection, 65536, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            fds += more
            if not part:
                raise ConnectionError("the other side closed the connection")
            text += part
        message = parse_object(text)
    except BaseException:
        close_all(fds)
        raise
    close_all(fds[most_fds:])
    return message, fds[:most_fds]


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
