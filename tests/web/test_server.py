"""The page listens where it may, says why where it cannot, keeps visits, and ends when it is told to."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.client import HTTPConnection

import pytest

from datacache.core.errors import UsageError
from datacache.settings import Settings
from datacache.web.server import serve
from tests.conftest import ROOT
from tests.promises import promise


def test_every_network_needs_the_names_by_which_browsers_come(settings: Settings) -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(UsageError, match="by which names") as caught:
            serve(settings, pytest.fail, host=host)
        assert "DATACACHE_UI_HOSTS" in caught.value.hint


def test_a_port_that_is_taken_is_an_error_that_names_it(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=str(port)):
            serve(replace(settings, ui_hosts=("localhost",)), pytest.fail, port=port)


SLOW = """
import sys, threading
from datacache import api
from datacache.web import server
from dataset_cli import main

def look(_settings):
    print("looking", flush=True)
    threading.Event().wait()

api.look_at_node = look
server._SILENT_S = 2
sys.argv[1:] = ["ui", "--no-browser", "--port", "0"]
main.main()
"""
"""A page whose node never answers."""


class Running:
    """A process of `dsctl ui`, and a browser that was let in."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.cookie = process, ""
        assert process.stdout is not None
        self.out = process.stdout
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)\n", self.out.readline())
        assert found, process.communicate()
        self.port, self.token = int(found[1]), found[2]

    def get(self, path: str) -> int:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers={"cookie": self.cookie})
        answer = connection.getresponse()
        self.cookie = (answer.getheader("set-cookie") or self.cookie).partition(";")[0]
        connection.close()
        return answer.status

    def say(self, raw: bytes) -> bytes:
        """Send bytes, and return the first of what comes back; nothing once the server has closed."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(raw)
            try:
                return connection.recv(1000)
            except ConnectionResetError:
                return b""

    def end(self, with_signal: int) -> tuple[int, str]:
        """Send a signal; return the exit code, and what was said on stderr."""
        self.process.send_signal(with_signal)
        said = self.process.communicate(timeout=60)[1]
        return self.process.returncode, said


@contextmanager
def running(*words: str) -> Iterator[Running]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


@pytest.mark.usefixtures("home")
@promise("A link to the page is good for one visitor")
def test_a_visit_outlasts_a_server_that_is_killed_and_ctrl_c_is_a_good_end() -> None:
    command = ("-m", "dataset_cli", "ui", "--no-browser", "--port")
    with running(*command, "0") as page:
        assert page.get("/") == 401
        assert page.get(f"/?token={page.token}") == 200
        assert page.get("/") == 200
        assert page.end(signal.SIGKILL)[0] == -signal.SIGKILL
    with running(*command, str(page.port)) as again:
        again.cookie = page.cookie
        assert again.get("/") == 200
        assert again.say(b"GET / HTTP/1.1\r\nx: " + 70_000 * b"x").startswith(b"HTTP/1.1 400")
        assert again.say(b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n").startswith(
            b"HTTP/1.1 400"
        )
        assert again.say(b"GET http://evil.example/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").startswith(b"HTTP/1.1 400")
        two_lengths = (
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        assert again.say(two_lengths).startswith(b"HTTP/1.1 400")
        with ExitStack() as silent:  # more connections than there can be at a time
            for _ in range(120):
                silent.enter_context(socket.create_connection(("127.0.0.1", page.port)))
            assert again.get("/") == 200
        code, said = again.end(signal.SIGINT)
    assert code == 0
    assert "Traceback" not in said
    assert "interrupted" not in said


@pytest.mark.usefixtures("home")
def test_sigterm_ends_the_page_though_a_request_waits_and_silent_connections_are_closed() -> None:
    with running("-c", SLOW) as page:
        assert page.get(f"/?token={page.token}") == 200
        assert page.say(b"GET / HTTP/1.1\r\nHost: ") == b""
        with socket.create_connection(("127.0.0.1", page.port)) as slow:
            slow.sendall(f"GET /node HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {page.cookie}\r\n\r\n".encode())
            while page.out.readline() != "looking\n":
                pass
            code, said = page.end(signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in said
