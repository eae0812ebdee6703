"""Remember at which addresses somebody was met: one that is refused there is more likely mistyped than down.

Used by what tries calls again (`retry.py`, `imports/web.py`). What a home remembers is a folder of empty files named by
hashes, so a daemon or a worker that starts while a store is away knows that it was there before. Any thread; a forked
child knows what its parent did.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path


class MetPeers:
    """Addresses where somebody was met by this object or, with `home`, by any process of that home. A home that cannot
    be written, or is not there, remembers nothing."""

    def __init__(self, home: Path | None = None) -> None:
        self._folder = None if home is None else home / "met"
        self._known: set[str] = set()  # single set operations

    def note(self, peer: str) -> None:
        """Remember an address."""
        if peer in self._known:
            return
        self._known.add(peer)
        if self._folder is not None:
            with suppress(OSError):
                self._folder.mkdir(mode=0o700, exist_ok=True)
                os.close(os.open(self._file(self._folder, peer), os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600))

    def knows(self, peer: str) -> bool:
        """Say whether somebody was met at an address before."""
        if peer in self._known or self._folder is None:
            return peer in self._known
        return os.path.exists(self._file(self._folder, peer))

    @staticmethod
    def _file(folder: Path, peer: str) -> Path:
        return folder / hashlib.sha256(peer.encode(errors="surrogatepass")).hexdigest()[:32]
