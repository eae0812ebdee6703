"""The quota of a read-write mount: what it is, kept over restarts, and the walks that say how much is in use.

Part of `LiveBucket`. `quota.json` in the staging area has the quota as it was last set, and what was in use beside what
is pending, after the last walk or at the end, so that the next process begins with that. One thread, which only lives
where there is a quota: it lists the prefix page by page, holding no more than a page, then sleeps; for long where there
is room, for the listing's time-to-live where there is little or something was refused, and for ten times as long as the
walk took at the least.

How many bytes a prefix has, and how many it may have: what the bucket is known to have, what is pending, and what is
being written.

Part of the engine (`WriteBack.usage`), under its lock; without any I/O. `quota` walks the bucket's listing now and
then, which puts right what others did there and what was not known here. In between every upload and deletion of our
own is counted, and of each pending key how much of the bucket's bytes is its own: so overwriting counts the difference,
and a deletion gives room before it has reached the bucket.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, Any

from datacache.core.errors import DatacacheError, ObjectNotFoundError, QuotaError
from datacache.writeback.staging.area_files import write_json

if TYPE_CHECKING:
    from datacache.writeback.engine import WriteBack

QUOTA = "quota.json"
_WALK_EVERY_S = 600.0
_AGAIN_S = 15.0
"""After a walk that failed."""
_REST = 10
_STOP_S = 1.0
_log = logging.getLogger("datacache.writeback")


class Quota:
    """One mount's."""

    def __init__(self, engine: WriteBack, *, ttl_s: float, quota_bytes: int, keep: bool) -> None:
        """`quota_bytes`: 0 for none. `keep`: what was set last in this area goes before."""
        self._engine = engine
        self._ttl_s = max(ttl_s, 0.2)
        self._path = engine.area.folder / QUOTA
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # for the thread's start and the file
        self._walking = threading.Lock()
        known = self._read()
        with engine.lock:
            engine.usage.begin(known.get("bucket_bytes", 0))
            engine.usage.on_refused = self._wake.set
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
            self._engine.usage.quota_bytes = quota_bytes
        if quota_bytes and self._thread is None and not self._stopped.is_set():
            self._thread = threading.Thread(target=self._run, name="quota", daemon=True)
            self._thread.start()
        self._wake.set()

    def status(self) -> dict[str, Any] | None:
        """The quota and what is in use: values that fit into JSON. None where there is none."""
        with self._engine.lock:
            usage = self._engine.usage
            if not usage.quota_bytes:
                return None
            found = {"quota_bytes": usage.quota_bytes, "used_bytes": usage.used_bytes}
            return found | {"is_known": usage.is_known, "refused": usage.refused}

    def walk(self) -> bool:
        """Find out now how much is in use: whether that was possible. Takes as long as listing the prefix does."""
        with self._walking:
            return self._walk()

    def close(self) -> None:
        """Walk no more."""
        self._stopped.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
            self._note()

    def _run(self) -> None:
        usage = self._engine.usage
        while not self._stopped.is_set():
            if not usage.quota_bytes:
                self._wake.wait()
                self._wake.clear()
                continue
            self._wake.clear()
            began = time.monotonic()
            done = self.walk()
            rest_s = _REST * (time.monotonic() - began)
            if self._stopped.wait(max(self._ttl_s if done else _AGAIN_S, rest_s)):
                return
            if not done or usage.is_near:
                continue
            self._wake.wait(_WALK_EVERY_S)

    def _walk(self) -> bool:
        engine, usage = self._engine, self._engine.usage
        skip = len(engine.prefix)
        with engine.lock:
            usage.begin_walk()
        complete = False
        try:
            for page in engine.bucket.list(engine.prefix):
                with engine.lock:
                    usage.listed((info.key[skip:], info.size_bytes) for info in page)
                if self._stopped.is_set():
                    return False
            complete = True
        except ObjectNotFoundError as exc:
            complete = exc.url != engine.bucket.url  # a folder of the local file system that is still to be made
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
                self._write(self._engine.usage.quota_bytes)
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
            bucket_bytes = self._engine.usage.settled_bytes
        write_json(self._path, {"quota_bytes": quota_bytes, "bucket_bytes": bucket_bytes})


class Walk:
    """A listing of the whole prefix that is under way, in the order of the keys."""

    __slots__ = ("at", "counted", "events", "total")

    def __init__(self) -> None:
        self.at = ""
        """The last key that was listed."""
        self.total = 0
        self.counted: dict[str, int] = {}
        """What `total` has of pending keys."""
        self.events: dict[str, int] = {}
        """Sizes of objects that this node has changed before they were listed."""


class Usage:
    """Bytes of one prefix. Keys are relative to it."""

    def __init__(self, pending: Container[str]) -> None:
        self.quota_bytes = 0
        """0: no quota."""
        self.bucket_bytes = 0
        """What the bucket has, as far as it is known."""
        self.is_known = False
        """Whether the bucket was walked to its end."""
        self.draft_bytes = 0
        """How much larger files are that are being written than they were when they were last acknowledged."""
        self.refused = 0
        """How often something did not fit."""
        self.size_of: Callable[[str], int] = lambda _key: 0
        """How large the bucket's object of a key is, as far as it is known."""
        self.on_refused: Callable[[], None] = lambda: None
        self._pending = pending
        self._pending_bytes = 0
        self._counted: dict[str, int] = {}  # of pending keys: what `bucket_bytes` has of them
        self._counted_bytes = 0
        self._walk: Walk | None = None

    @property
    def used_bytes(self) -> int:
        """What the bucket will have when all is uploaded."""
        return max(0, self.bucket_bytes - self._counted_bytes + self._pending_bytes + self.draft_bytes)

    @property
    def settled_bytes(self) -> int:
        """What the bucket has of keys of which nothing is pending."""
        return self.bucket_bytes - self._counted_bytes

    def begin(self, settled_bytes: int) -> None:
        """Begin with what an earlier process knew of the bucket. What that had pending is pending already."""
        self.bucket_bytes = settled_bytes + self._counted_bytes

    @property
    def is_near(self) -> bool:
        """Whether there is little room left."""
        return self.used_bytes > self.quota_bytes * 0.9

    def expect_room(self, n_bytes: int) -> None:
        """Raise `QuotaError` unless there may be this many bytes more."""
        if self.quota_bytes and self.used_bytes + n_bytes > self.quota_bytes:
            self.refused += 1
            self.on_refused()
            raise QuotaError(
                f"the quota of this mount is used up ({self.quota_bytes:,} bytes)",
                hint="Delete something, or have the quota raised.",
            )

    # --- what is pending, told by the overlay ------------------------------------------------------------------------

    def began(self, key: str, size_bytes: int) -> None:
        """A key became pending, of which the bucket has so many bytes."""
        self._count(key, size_bytes)
        if self._walk is not None and size_bytes and key <= self._walk.at:
            self._walk.counted[key] = size_bytes

    def changed(self, n_bytes: int) -> None:
        """What is pending has this many bytes more; fewer, if negative."""
        self._pending_bytes += n_bytes

    def ended(self, key: str) -> None:
        """A key is not pending any more."""
        self._count(key, 0)
        if self._walk is not None:
            self._walk.counted.pop(key, None)

    def applied(self, key: str, size_bytes: int) -> None:
        """The bucket has this much under a pending key now."""
        self.bucket_bytes += size_bytes - self._counted.get(key, 0)
        if key in self._pending:
            self._count(key, size_bytes)
        walk = self._walk
        if walk is None:
            return
        if key > walk.at or key in walk.events:
            walk.events[key] = size_bytes
        else:
            walk.total += size_bytes - walk.counted.get(key, 0)
            walk.counted[key] = size_bytes

    def _count(self, key: str, size_bytes: int) -> None:
        self._counted_bytes += size_bytes - self._counted.pop(key, 0)
        if size_bytes:
            self._counted[key] = size_bytes

    # --- walking the bucket ------------------------------------------------------------------------------------------

    def begin_walk(self) -> None:
        """A listing begins."""
        self._walk = Walk()

    def listed(self, page: Iterable[tuple[str, int]]) -> None:
        """Keys and sizes of objects as they were listed."""
        walk = self._walk
        if walk is None:
            return
        for key, listed_bytes in page:
            size_bytes = walk.events.pop(key, listed_bytes)
            walk.total += size_bytes
            if size_bytes and key in self._pending:
                walk.counted[key] = size_bytes
            walk.at = max(walk.at, key)
        if not self.is_known:
            self.bucket_bytes = max(self.bucket_bytes, walk.total)

    def end_walk(self, *, complete: bool) -> None:
        """The listing has ended; or broke off, and nothing is known anew."""
        walk, self._walk = self._walk, None
        if walk is None or not complete:
            return
        for key, size_bytes in walk.events.items():
            walk.total += size_bytes
            if size_bytes and key in self._pending:
                walk.counted[key] = size_bytes
        self.bucket_bytes, self.is_known = walk.total, True
        self._counted = {key: size for key, size in walk.counted.items() if size and key in self._pending}
        self._counted_bytes = sum(self._counted.values())
