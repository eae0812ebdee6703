"""Asking a mount or a server that may be dead or slow, for a bounded time.

Used by `mounts` and `metrics`. A system call on a FUSE mount whose server does not answer cannot be given up, so it
runs in a thread of its own that is left behind; of one mount and question there is never more than one. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TypeVar

from csi_driver.status import RequestError, unavailable

T = TypeVar("T")


class Patience:
    """Remembers the unanswered questions. `whose` names who is asked, for messages."""

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._lock = threading.Lock()
        self._asking: dict[Hashable, threading.Thread] = {}  # guarded by _lock

    def ask(
        self,
        key: Hashable,
        function: Callable[[], T],
        timeout_s: float,
        *,
        discard: Callable[[T], None] = lambda _answer: None,
    ) -> T:
        """Return or raise what `function` does; UNAVAILABLE after the time. `discard` gets an answer that comes too
        late. An earlier question of this key that is unanswered is waited for first."""
        answer: Future[T] = Future()  # cancelled by whoever waits no longer

        def run() -> None:
            try:
                found = function()
            except BaseException as exc:  # noqa: BLE001 - raised where it was asked
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(exc)
                return
            if answer.set_running_or_notify_cancel():
                answer.set_result(found)
            else:
                discard(found)

        thread = threading.Thread(target=run, name=f"asks {key}", daemon=True)
        while True:
            with self._lock:
                self._asking = {each: asks for each, asks in self._asking.items() if asks.is_alive()}
                before = self._asking.setdefault(key, thread)
                if before is thread:
                    thread.start()
                    break
            before.join(timeout_s)
            if before.is_alive():
                raise self._slow(timeout_s)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            if answer.cancel():
                raise self._slow(timeout_s) from None
            return answer.result()  # it has just come, or is a timeout of the function's own

    def _slow(self, timeout_s: float) -> RequestError:
        return unavailable(f"{self._whose} did not answer within {timeout_s:.0f} s")
