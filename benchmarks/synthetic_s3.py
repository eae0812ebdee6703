"""An S3 server that lists objects which do not exist: ListObjectsV2 over any number of keys, fast enough not to be what
is measured. Run as a child process: `python -m benchmarks.synthetic_s3 PORT FOLDERS FILES LATENCY_MS PROCESSES`.

The XML of all objects lies in one file, in order, the same number of bytes for each: a page is a slice of it, which the
kernel sends. Each connection has a thread. The server knows no signatures, prefixes or delimiters, and answers 404 to
all but listings.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from datacache.core.parallel import end_with
from tests.servers import free_port, program

BUCKET = "synthetic"
OBJECT = (
    "<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    '<ETag>"{:032x}"</ETag><Size>110000</Size><StorageClass>STANDARD</StorageClass></Contents>'
)
_PAGE = 1000


class Keys(Sequence[str]):
    """The keys of all objects, by number."""

    def __init__(self, folders: int, files: int) -> None:
        self._folders, self._files = folders, files

    def __len__(self) -> int:
        return self._folders * self._files

    def __getitem__(self, number: Any) -> Any:
        folder, file = divmod(number, self._files)
        return f"{folder:04d}/{file:07d}.jpg"


def answer(connection: socket.socket, keys: Keys, file: IO[bytes], latency_s: float) -> None:
    """Answer requests of one connection until it ends."""
    width = len(OBJECT.format(keys[0], 0))
    reader = connection.makefile("rb")
    while request := reader.readline():
        while reader.readline().strip():
            pass
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(request.split()[1].decode()).query))
        if "list-type" not in query:
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            continue
        if latency_s:
            time.sleep(latency_s)
        token = query.get("continuation-token")
        at = int(token) if token else bisect_right(keys, query.get("start-after", ""))
        count = min(int(query.get("max-keys", _PAGE)), len(keys) - at)
        more = at + count < len(keys)
        head = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><KeyCount>{count}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
            + (f"<NextContinuationToken>{at + count}</NextContinuationToken>" if more else "")
        )
        tail = "</ListBucketResult>"
        length = len(head) + count * width + len(tail)
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{head}".encode())
        start, left = at * width, count * width
        while left:
            sent = os.sendfile(connection.fileno(), file.fileno(), start, left)
            start, left = start + sent, left - sent
        connection.sendall(tail.encode())


def serve(port: int, keys: Keys, file: IO[bytes], latency_s: float) -> None:
    """Take connections, for ever."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)

    def one(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            answer(connection, keys, file, latency_s)

    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=one, args=(connection,), daemon=True).start()


@contextmanager
def synthetic_s3(folders: int, files: int, *, latency_ms: float = 0, processes: int = 2) -> Iterator[dict[str, str]]:
    """Run the server; yields the AWS variables that lead there."""
    port = free_port()
    setpriv = program("setpriv", package="util-linux")
    arguments = [sys.executable, "-m", "benchmarks.synthetic_s3", *map(str, (port, folders, files, latency_ms))]
    arguments.append(str(processes))
    process = subprocess.Popen([setpriv, "--pdeathsig", "KILL", "--", *arguments], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit("the synthetic S3 server did not start")
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
    finally:
        process.kill()
        process.wait()


def main() -> None:
    port, folders, files, latency_ms, processes = sys.argv[1:]
    keys = Keys(int(folders), int(files))
    with tempfile.TemporaryFile() as file:
        for number in range(len(keys)):
            file.write(OBJECT.format(keys[number], number).encode())
        file.flush()
        parent = os.getpid()
        for _ in range(int(processes) - 1):
            if os.fork() == 0:
                end_with(parent)
                break
        else:
            print("ready", flush=True)
        serve(int(port), keys, file, float(latency_ms) / 1000)


if __name__ == "__main__":
    main()
