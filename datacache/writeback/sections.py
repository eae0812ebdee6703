"""Sections: calls under the engine's lock, which never wait, and how one says that something has to be waited for.

Used by `RemoteView` and `fuse_mount/bucket/fs`. A call that cannot have its result at once raises one of two. `Load`:
something has to be brought here, then the call is made again from its beginning, so it has changed nothing before
(`SectionLock` sees to that). `Defer`: the rest of the call waits, and returns the result. Whoever makes such calls has
`complete` or `finish` do either, without the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from datacache.writeback.state_log import StateLog

T = TypeVar("T")


class Load(Exception):  # noqa: N818 - not an error: what has to be done before the result is known
    """Raised where `load()` has to be called, without the lock, and the call made again. Nothing was changed."""

    def __init__(self, load: Callable[[], object]) -> None:
        super().__init__("needs something that takes time")
        self.load = load


class Defer(Exception):  # noqa: N818 - not an error: how to go on without the lock
    """Raised where `rest()` has to be called, without the lock: it returns the call's result."""

    def __init__(self, rest: Callable[[], Any]) -> None:
        super().__init__("takes time")
        self.rest = rest


def complete(call: Callable[[], T]) -> T:
    """Make a call and all that it needs; return its result. Waits."""
    try:
        return call()
    except (Load, Defer) as raised:
        return finish(raised, call)


def finish(raised: Load | Defer, call: Callable[[], T]) -> T:
    """Do as `complete`, for a call that was made and has raised one of the two."""
    while isinstance(raised, Load):
        raised.load()
        try:
            return call()
        except (Load, Defer) as again:
            raised = again
    found: T = raised.rest()
    return found


class SectionLock:
    """A lock that its thread may take again, and whose outermost end ends a section."""

    def __init__(self, kept: StateLog, ended: Callable[[], None] = lambda: None) -> None:
        """`ended` is called when a section has changed something, and that is kept, before the lock is let go of."""
        self._lock, self._depth, self._kept, self._ended = threading.RLock(), 0, kept, ended

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, _exc: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if self._depth == 1 and (self._kept.noted or self._kept.changed):  # most sections change nothing
                self._kept.end_section()
                self._ended()
                if kind is Load:
                    raise RuntimeError("a call has changed something before it knew all that it needs")
        finally:
            self._depth -= 1
            self._lock.release()
