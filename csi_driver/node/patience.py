"""Asking a mount or a server that may be dead or slow, for a bounded time.

Used by `mounts` and `metrics`. A system call on a FUSE mount whose server does not answer cannot be given up, so it
runs in a thread of its own that is left behind; of one mount and question there is never more than one. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import grpc

from csi_driver.status import RequestError

T = TypeVar("T")


class Patience:
    """Remembers the unanswered questions. `whose` names who is asked, for messages."""

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._lock = threading.Lock()
        self._asked: dict[Hashable, _Question[object]] = {}  # guarded by _lock

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
        question = _Question(function, discard)
        while True:
            with self._lock:
                before = self._asked.get(key)
                if before is None or before.done.is_set():
                    self._asked[key] = question  # type: ignore[assignment]
                    break
            if not before.done.wait(timeout_s):
                raise self._slow(timeout_s)
        threading.Thread(target=question.run, name=f"asks {key}", daemon=True).start()
        try:
            if not question.done.wait(timeout_s) and question.give_up():
                raise self._slow(timeout_s)
            return question.answer()
        finally:
            if question.done.is_set():
                with self._lock:
                    if self._asked.get(key) is question:
                        del self._asked[key]

    def _slow(self, timeout_s: float) -> RequestError:
        return RequestError(grpc.StatusCode.UNAVAILABLE, f"{self._whose} did not answer within {timeout_s:.0f} s")


class _Question(Generic[T]):
    def __init__(self, function: Callable[[], T], discard: Callable[[T], None]) -> None:
        self._function, self._discard = function, discard
        self._lock = threading.Lock()
        self._given_up = False
        self._answers: list[T] = []
        self._error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._answers.append(self._function())
        except BaseException as exc:  # noqa: BLE001 - raised where it was asked
            self._error = exc
        with self._lock:
            self.done.set()
            late = self._given_up
        if late and self._answers:
            self._discard(self._answers[0])

    def give_up(self) -> bool:
        """Give up waiting; return False if the answer has just come."""
        with self._lock:
            self._given_up = not self.done.is_set()
            return self._given_up

    def answer(self) -> T:
        if self._error is not None:
            raise self._error
        return self._answers[0]
