"""Read the annotations of a snapshot in a process of its own, which the page starts: `python -m datacache.web.reading`.

The server has threads, whose locks its forked children would inherit; this process has none, and forks as many as there
are processors. It leaves the table and what filters look at in the catalog, tells on its output how far it is, and ends
with the server. Errors are not told: whoever asks for the table afterwards meets them again.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Final

from datacache.settings import Settings, load_settings

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


class ReadingApart:
    """The process that reads. Use it in a `with`, which waits for its end."""

    def __init__(self, ref: str, settings: Settings) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "datacache.web.reading", ref, str(os.getpid())],
            env=os.environ | settings.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.stop = self._process.kill
        """End it. Any thread may."""

    def follow(self, progress: Callable[[str, int, int], None]) -> None:
        """Tell how far it is, until it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            progress(*json.loads(line))

    def __enter__(self) -> ReadingApart:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.stop()
        self._process.__exit__(None, None, None)


def _main(ref: str, server: str) -> None:
    from datacache import api

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    if os.getppid() != int(server):
        return

    def tell(*how_far: str | int) -> None:
        sys.stdout.write(json.dumps(how_far) + "\n")
        sys.stdout.flush()

    with api.open_browser(ref, settings=load_settings(), progress=tell) as (_, browser):
        browser.prepare()


if __name__ == "__main__":
    _main(*sys.argv[1:])
