"""An S3 server that gives the files of a folder, whole or a range of each, at the speed of sendfile(2): so the server
is not what is measured. Run as a child process: `python -m benchmarks.ranges_s3 PORT FOLDER`.

It knows no signatures and lists nothing. ETags are those of objects sent in parts: no MD5, so nobody compares one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.servers import free_port, program

_RANGE = re.compile(r"bytes=(\d+)-(\d*)$")


@contextmanager
def ranges_s3(folder: Path) -> Iterator[dict[str, str]]:
    """Run the server, whose buckets are the folders in this one; yields the AWS variables that lead there."""
    endpoint, setpriv = f"http://127.0.0.1:{free_port()}", program("setpriv", package="util-linux")
    port = str(urlsplit(endpoint).port)
    process = subprocess.Popen(
        [setpriv, "--pdeathsig", "KILL", "--", sys.executable, "-m", "benchmarks.ranges_s3", port, str(folder)]
    )
    try:
        while True:
            try:
                urllib.request.urlopen(endpoint, timeout=5).close()
            except urllib.error.HTTPError:
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit("the S3 server of ranges did not start") from None
                time.sleep(0.05)
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
    finally:
        process.kill()
        process.wait()


class _Answers(BaseHTTPRequestHandler):
    """GET and HEAD of files (Amazon S3 API reference, GetObject)."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def do_GET(self) -> None:
        path = self.folder / unquote(urlsplit(self.path).path).strip("/")
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = path.stat().st_size
        asked = _RANGE.match(self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        stop = min(int(asked[2]) + 1, size) if asked and asked[2] else size
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns:032x}-1"')
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.end_headers()
        if self.command == "GET":
            with path.open("rb") as file:
                self.connection.sendfile(file, start, stop - start)

    do_HEAD = do_GET  # noqa: N815 - as http.server wants it

    def log_message(self, *_words: object) -> None:
        """Say nothing."""


def main() -> None:
    _Answers.folder = Path(sys.argv[2])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Answers).serve_forever()


if __name__ == "__main__":
    main()
