"""The page listens where it may, and says why where it cannot."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from datacache.core.errors import UsageError
from datacache.settings import Settings
from datacache.web.server import serve


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
