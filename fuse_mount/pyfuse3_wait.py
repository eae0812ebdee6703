"""How the loop of a read-write mount waits for the kernel's next request: a moment by itself, then with trio.

Used by `pyfuse3_adapter`. A program that creates files sends its requests one after the other, each right after the
answer to the last. Waiting for each through trio (lock, epoll, scheduler) costs more than answering it: measured, a
file system that does nothing takes 160 µs of CPU for a file that is created, written and closed, and 60 without. So
where no other request is being worked on, the loop waits for the next one in poll(2), for a millisecond at most, which
lets other threads run; then trio's turn comes.

pyfuse3 looks its wait up by name for each request (`_wait_fuse_readable`, 3.3 to 3.5). A release that has none of that
name is left alone.
"""

from __future__ import annotations

import select

import pyfuse3
import trio

_MOMENT_MS = 1
_IN_A_ROW = 64
"""Requests that are answered before trio has its turn all the same."""


class Waiting:
    """What is known of the requests of one session. In the loop's thread only."""

    def __init__(self, fd: int) -> None:
        self.under_way = 0
        """Requests that are being worked on."""
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._parked: list[trio.Event] = []
        self._is_watched = False
        self._is_closed = False
        self._in_a_row = 0

    def install(self) -> None:
        """Have pyfuse3 wait this way."""
        if hasattr(pyfuse3, "_wait_fuse_readable"):
            pyfuse3._wait_fuse_readable = self.wait  # noqa: SLF001

    async def wait(self) -> bool:
        """Return when there is a request to read; false to end."""
        if self._poll.poll(0 if self.under_way else _MOMENT_MS):
            self._in_a_row += 1
            if self._in_a_row < _IN_A_ROW:
                return True
        self._in_a_row = 0
        if self._is_watched:
            turn = trio.Event()
            self._parked.append(turn)
            await turn.wait()
        self._is_watched = True
        try:
            while not self._is_closed:
                await trio.lowlevel.wait_readable(self._fd)
                if self._poll.poll(0):  # another task may have read it
                    return True
        except trio.ClosedResourceError:
            self._is_closed = True
        finally:
            # The last to have come is the next to go: each task has a buffer of its own for requests, and those that
            # are not needed are not touched.
            if self._parked:
                self._parked.pop().set()
            else:
                self._is_watched = False
        return False
