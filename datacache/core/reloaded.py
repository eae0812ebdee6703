"""Something that is made of files, such as of certificates, and made anew once somebody has replaced these.

Used where a process runs for longer than its certificates. Any thread may call.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Reloaded(Generic[_T]):
    """The value that `load` makes of the files as they are now."""

    def __init__(self, files: Sequence[Path], load: Callable[[], _T], *, named: str, log: logging.Logger) -> None:
        """`named` says in the log what there is in the files. `load` raises `OSError` or `ValueError`."""
        self._files, self._load, self._named, self._log = files, load, named, log
        self._lock = threading.Lock()  # guards all below
        self._loaded: tuple[_T, list[tuple[int, int]]] | None = None
        self._failed = False

    def get(self) -> _T:
        """Return the value, by the newest files, or by those before while these cannot be used, which is logged once.
        `OSError` or `ValueError` if there have been none."""
        with self._lock:
            try:
                stamps = [(each.st_ino, each.st_mtime_ns) for each in map(os.stat, self._files)]
                if self._loaded is None or self._loaded[1] != stamps:
                    self._loaded = self._load(), stamps
                    self._log.info("loaded %s", self._named)
                self._failed = False
            except (OSError, ValueError) as exc:
                if self._loaded is None:
                    raise
                if not self._failed:
                    self._log.warning("%s cannot be used now, and those before them are: %s", self._named, exc)
                self._failed = True
            return self._loaded[0]
