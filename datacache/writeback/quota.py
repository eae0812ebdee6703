"""The quota of a read-write mount: what it is, kept over restarts, and the walks that say how much is in use.

Part of `LiveBucket`. `quota.json` in the staging area has the quota as it was last set, and what was in use beside what
is pending, after the last walk or at the end, so that the next process begins with that. One thread, which only lives
where there is a quota: it lists the prefix page by page, holding no more than a page, then sleeps; for long where there
is room, for the listing's time-to-live where there is little or something was refused, and for ten times as long as the
walk took at the least. `overlay.Usage` counts.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

from datacache.core.errors import DatacacheError
from datacache.writeback.engine import WriteBack
from datacache.writeback.staging.area import write_json

QUOTA = "quota.json"
_WALK_EVERY_S = 600.0
_AGAIN_S = 15.0
"""After a walk that failed."""
_REST = 10
_STOP_S = 1.0
_log = logging.getLogger("datacache.writeback")


class Quota:
    """The quota of one mount."""

    def __init__(self, engine: WriteBack, *, ttl_s: float, quota_bytes: int, keep: bool) -> None:
        """Begin with `quota_bytes`, 0 for none; with `keep` with what was set last in this area, if anything was."""
        self._engine, self._usage = engine, engine.usage
        self._ttl_s = max(ttl_s, 0.2)
        self._path = engine.area.folder / QUOTA
        self._wake = engine.usage.wants_walk
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # for the thread's start and the file
        self._walking = threading.Lock()
        known = self._read()
        with engine.lock:
            engine.usage.begin(known.get("bucket_bytes", 0))
        wanted = known.get("quota_bytes", quota_bytes) if keep else quota_bytes
        if wanted != known.get("quota_bytes", 0):
            try:
                self._write(wanted)
            except OSError as exc:  # a full disk is no reason not to start
                _log.warning("the quota cannot be kept for the next process: %s", exc)
        self._apply(wanted)

    def set(self, quota_bytes: int) -> None:
        """Have another quota from now on, also in the next process; 0: none. `OSError` where that cannot be kept: then
        it stays as it was."""
        with self._lock:
            self._write(quota_bytes)
            self._apply(quota_bytes)

    def _apply(self, quota_bytes: int) -> None:
        with self._engine.lock:
            self._usage.quota_bytes = quota_bytes
        if quota_bytes and self._thread is None and not self._stopped.is_set():
            self._thread = threading.Thread(target=self._run, name="quota", daemon=True)
            self._thread.start()
        self._wake.set()

    def status(self) -> dict[str, Any] | None:
        """Return the quota and what is in use: values that fit into JSON. None where there is none."""
        with self._engine.lock:
            usage = self._usage
            if not usage.quota_bytes:
                return None
            found = {"quota_bytes": usage.quota_bytes, "used_bytes": usage.used_bytes}
            return found | {"is_known": usage.is_known, "refused": usage.refused}

    def close(self) -> None:
        """Walk no more."""
        self._stopped.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
            self._note()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if not self._usage.quota_bytes:
                self._wake.wait()
                self._wake.clear()
                continue
            self._wake.clear()
            began = time.monotonic()
            done = self.walk()
            rest_s = _REST * (time.monotonic() - began)
            if self._stopped.wait(max(self._ttl_s if done else _AGAIN_S, rest_s)):
                return
            if not done or self._usage.is_near:
                continue
            self._wake.wait(_WALK_EVERY_S)

    def walk(self) -> bool:
        """Find out now how much is in use, and return whether that was possible. Lists the whole prefix."""
        with self._walking:
            engine, usage = self._engine, self._usage
            skip = len(engine.prefix)
            with engine.lock:
                usage.begin_walk()
            complete = False
            try:
                for page in engine.bucket.list(engine.prefix):
                    with engine.lock:
                        usage.add_page((info.key[skip:], info.size_bytes) for info in page)
                    if self._stopped.is_set():
                        return False
                complete = True
            except DatacacheError as exc:
                _log.info("how much is in use was not found out: %s", exc)
            finally:
                with engine.lock:
                    usage.end_walk(complete=complete)
            if complete:
                self._note()
            return complete

    def _note(self) -> None:
        """Write down what is known, for the next process to begin with."""
        try:
            with self._lock:
                self._write(self._usage.quota_bytes)
        except OSError as exc:
            _log.info("what is in use was not written down: %s", exc)

    def _read(self) -> dict[str, int]:
        try:
            table = json.loads(self._path.read_bytes())
            return {name: int(table[name]) for name in ("quota_bytes", "bucket_bytes")}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError) as exc:
            _log.warning("%s cannot be read: %s", self._path, exc)
            return {}

    def _write(self, quota_bytes: int) -> None:
        with self._engine.lock:
            # What is pending counts by itself in the next process, which does not know what of it the bucket has.
            bucket_bytes = self._usage.settled_bytes
        write_json(self._path, {"quota_bytes": quota_bytes, "bucket_bytes": bucket_bytes})
