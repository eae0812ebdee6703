"""Messages on a supervisor's control socket: one JSON line each way, with descriptors beside it where they
are due.

Used by `supervisor` (both ends of a hand-over), `launch`, `host` and `keeping`. Operations: `status`, `stop` (with
`lazy`), `takeover` (answers with the mount's state and its descriptor), `finish` (ends the old supervisor of a
hand-over), `leave` (ends a supervisor whose mount the keeper holds, without unmounting). Answers are `{"ok": …}` or
`{"error": …, "hint": …}`. The socket's mode is 0600: who may open it owns the mount. The mount host (`host`) and its
callers (`process`) talk the same way. No threads.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

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


def receive(connection: socket.socket, *, timeout_s: float = _TIMEOUT_S) -> tuple[Request, list[int]]:
    """One message and the descriptors that came with it. `OSError` or `ValueError` for a broken one."""
    connection.settimeout(timeout_s)
    text, fds = b"", []
    while not text.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(connection, 65536, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        fds += more
        if not part:
            raise ConnectionError("the other side closed the connection")
        text += part
    message = json.loads(text)
    if not isinstance(message, dict):
        raise ValueError("a message must be an object")
    return message, fds
