"""The health of a tier's disk, as reads show it: after an error the disk is asked again later, and less and less often.

Readers and, in the daemon, the writer share one object for each folder and process. Any thread.
"""

from __future__ import annotations

import functools
import logging
import threading
from pathlib import Path
from time import monotonic

from datacache.core.breaker import pause_s

log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_TURN_S = 1.0
"""Time that one thread has for its try before another tries."""


class DiskHealth:
    """The state of a tier's disk, as reading from it has shown."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # guards all that follows; `away` reads one of them without it
        self._failures = 0
        self._until_s = 0.0
        self.problem = ""
        """The error of the last read; empty if it worked."""

    def away(self) -> bool:
        """Tell whether the disk is not worth asking at present."""
        return self._until_s > monotonic()

    def turn(self) -> bool:
        """Tell whether the caller may ask the disk now: after a pause only one of many may."""
        if not self._failures:
            return True
        with self._lock:
            if self.away():
                return False
            self._until_s = monotonic() + _TURN_S
            return True

    def failed(self, exc: OSError) -> None:
        """Note that a read failed."""
        with self._lock:
            self._failures += 1
            self.problem = f"{exc.strerror or exc} ({self._folder})"
            pause = pause_s(self._failures, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
            self._until_s = monotonic() + pause
        log.warning("nothing is read from %s for %.0f s: %s", self._folder, pause, exc.strerror or exc)

    def worked(self) -> None:
        """Note that a read worked."""
        if self._failures:
            with self._lock:
                self._failures, self._until_s, self.problem = 0, 0.0, ""
            log.warning("%s can be read again", self._folder)


@functools.cache
def health_of(folder: Path) -> DiskHealth:
    """Return this process's object for a folder."""
    return DiskHealth(folder)
