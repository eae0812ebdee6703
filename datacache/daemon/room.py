"""Room in the tiers for blocks fetched ahead: taken before a fetch, so that nothing is fetched to be thrown away.

Any thread may take and give. A thread of its own has room made when there is little, by the tier's policy, and tries
again after a while if there is none to be made.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import lmdb

from datacache.tiers.tier import Tier

log = logging.getLogger(__name__)
_AGAIN_S = 0.2


class Room:
    """The part of a tier that may be filled ahead."""

    def __init__(
        self,
        tier: Tier,
        make: Callable[[int], bool],
        wake: Callable[[], None],
        *,
        step_bytes: int,
        reserve_bytes: int = 0,
    ) -> None:
        """`make` makes so much room and tells whether there is; `wake` is called when there may be more. Room is made
        in steps, before there is none left; `reserve_bytes` are never given away, because making room takes some."""
        self._tier, self._make, self._wake = tier, make, wake
        self._step_bytes, self._reserve_bytes = step_bytes, reserve_bytes
        self._lock = threading.Lock()  # guards _taken
        self._taken = 0
        self._short = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.full = False
        """True if there was no room to be had at the last try to make some."""

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="room", daemon=True)
            self._thread.start()

    def take(self, size_bytes: int) -> bool:
        """Take room for a block, the caller's until it gives it back; False if there is none."""
        with self._lock:
            left = self._tier.budget_bytes - self._tier.used_bytes - self._taken - size_bytes - self._reserve_bytes
            if left < self._step_bytes:
                self._short.set()
            if left < 0 or (self.full and left < self._step_bytes) or self._tier.problem:
                return False
            self._taken += size_bytes
            return True

    def give(self, size_bytes: int) -> None:
        """Give room back: the block is stored, or will not be."""
        with self._lock:
            self._taken -= size_bytes

    def refused(self) -> None:
        """Note that the tier did not take a block, whatever room there seemed to be."""
        self.full = True
        self._short.set()

    def look(self) -> None:
        """Have the thread make room if there is too little."""
        self._short.set()

    def stop(self, timeout_s: float) -> None:
        """End the thread."""
        self._stopping.set()
        self._short.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._short.wait()
            if self._stopping.is_set():
                return
            self._short.clear()
            try:
                self.full = not self._make(self._reserve_bytes + 2 * self._step_bytes)
            except (lmdb.Error, OSError) as exc:
                log.warning("no room can be made: %s", exc)
                self.full = True
            except Exception:  # a plan waits then, and readers fetch what it would have fetched
                log.exception("no room can be made")
                self.full = True
            if self.full and self._stopping.wait(_AGAIN_S):
                return
            self._wake()
