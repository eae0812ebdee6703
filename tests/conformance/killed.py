"""Writers that are killed in the middle of their work, and what they were told was done by then."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

_fork = multiprocessing.get_context("fork")


def reported_until_killed(writer: Callable[..., None], *arguments: Any, after_s: float) -> list[Any]:
    """Run `writer(*arguments, sending)` in a process of its own, kill it `after_s` seconds after its first report, and
    return all that it has sent.
    """
    receiving, sending = _fork.Pipe(duplex=False)
    process = _fork.Process(target=writer, args=(*arguments, sending))
    process.start()
    sending.close()
    reports: list[Any] = []
    with receiving, contextlib.suppress(EOFError):
        reports.append(receiving.recv())
        deadline = time.monotonic() + after_s
        while (left := deadline - time.monotonic()) > 0 and receiving.poll(left):
            reports.append(receiving.recv())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        while True:
            reports.append(receiving.recv())
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the writer ended by itself"
    return reports
