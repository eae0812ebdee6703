"""Check objects of several blocks as a whole once all of their blocks are on this node.

A store has no checksum of a part of an object, so a block of a large one is delivered and cached unchecked. This asks
the store for the checksum of the whole when the first block is fetched, takes CRCs of blocks as they come, and compares
when the last one has landed. Blocks that were here before, and all of them for hashes that cannot be put together, are
read back from the tiers. A wrong object leaves the tiers, so it is fetched again; after the second time, reading it is
an error for a while.

The index remembers unchecked objects (`TierWriter.unchecked`). The state here, for a number of objects, makes their
check cheaper and can be lost. A thread looks in the index for unchecked objects without state here: those that an
earlier daemon left, that were too many at once, or that could not be checked when they came.

The fetcher uses it. Any thread; a few threads in the background do what takes time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from datacache.core.errors import CacheError, ChecksumError, DatacacheError, ObjectChangedError, ObjectNotFoundError
from datacache.core.ids import ObjectId, ObjectRef, block_count, block_id, block_length, object_id
from datacache.store.base import ObjectStore
from datacache.store.checksums import TALLY, Checksum, Data, Running, combined, compute, is_crc, md5_etags, mismatch
from datacache.tiers.local import LocalBlocks
from datacache.tiers.writer import TierWriter

log = logging.getLogger(__name__)
_REMEMBERED = 1000
_THREADS = 8
_MOST_WAITING = 100
"""So many questions and comparisons may wait for a thread; then fetching new objects waits for them."""
_PATIENCE_S = 5.0
"""For how long: a store may be silent about checksums and give bytes, and readers need these."""
_LOOK_EVERY_S = 5.0
_JOIN_S = 1.0
_AGAIN_S = 300.0
"""Time after which an object that could not be checked is tried again."""
_FAILURES = 2
"""So often an object is fetched again before it counts as damaged."""
_DAMAGED_S = 600.0


class _Large:
    """An object of which some blocks have come."""

    def __init__(self, ref: ObjectRef) -> None:
        self.ref = ref
        self.asked = False
        self.expected: Checksum | None = None
        self.failed = False
        """True if the store did not tell the checksum of the whole."""
        self.crcs: dict[int, bytes] = {}
        self.here: set[int] = set()


class WholeObjects:
    """The large objects that come to a node. `md5`: also those that have only an ETag that may be an MD5."""

    def __init__(
        self, writer: TierWriter, local: LocalBlocks, open_store: Callable[[str], ObjectStore], *, md5: bool = True
    ) -> None:
        self._writer, self._local, self._open_store, self._md5 = writer, local, open_store, md5
        self._changed = threading.Condition()  # guards all below and what hangs on it
        self._objects: dict[ObjectId, _Large] = {}
        """Objects that are not whole yet, as far as is known, the oldest first."""
        self._checking: dict[ObjectId, _Large] = {}
        """Objects that are being compared, unless blocks of them have come meanwhile."""
        self._waiting = 0
        self._failed: dict[ObjectId, tuple[int, float, ChecksumError]] = {}
        self._not_checked: dict[ObjectId, float] = {}
        """When the objects that could not be checked and still are here were tried."""
        self._ended = threading.Event()
        self._look = threading.Event()
        """Set if the index may have unchecked objects without state here."""
        self._look.set()
        self._workers = ThreadPoolExecutor(_THREADS, thread_name_prefix="check")
        self._workers.submit(int)  # one thread there is from now on, should no more be had when many objects wait
        self._looker = threading.Thread(target=self._keep_looking, name="unchecked", daemon=True)
        self._looker.start()

    def expect_sound(self, ref: ObjectRef) -> bool:
        """Return False for an object that came with other bytes than its checksum is of: other nodes may still have
        those. Raise `ChecksumError` if it keeps coming so."""
        if not self._failed:
            return True
        with self._changed:
            failures, at, error = self._failed.get(object_id(ref), (0, 0.0, None))
            if failures >= _FAILURES and error is not None and time.monotonic() - at < _DAMAGED_S:
                raise error
            return not failures

    def fetched(self, ref: ObjectRef, number: int, data: Data) -> None:
        """Take note of the bytes of a block, before it is stored. Waits a few seconds while many wait to be checked."""
        if block_count(ref.size_bytes) < 2:
            return
        large = self._hold(ref, _MOST_WAITING, _PATIENCE_S)
        expected = None if large is None else large.expected
        if large is not None and expected is not None and is_crc(expected.algorithm):
            large.crcs[number] = compute(expected.algorithm, data)

    def landed(self, ref: ObjectRef, number: int) -> None:
        """Take note that the tiers have a block. Waits for nothing: the writer calls it."""
        if block_count(ref.size_bytes) < 2:
            return
        id = object_id(ref)
        with self._changed:
            large = self._objects.get(id)
            if large is not None:
                large.here.add(number)
                self._check_if_whole_locked(id, large)
            elif id not in self._checking:
                self._look.set()

    def close(self) -> None:
        """Begin nothing more. The next daemon checks what is left."""
        self._ended.set()
        self._look.set()
        with self._changed:
            self._changed.notify_all()
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._looker.join(_JOIN_S)

    def _hold(self, ref: ObjectRef, most_waiting: int, patience_s: float | None) -> _Large | None:
        """Return the state of an object; if there is none, begin to ask about it once fewer than so many wait. None if
        that takes longer than `patience_s`."""
        id = object_id(ref)

        def its_turn() -> bool:
            return self._waiting < most_waiting or id in self._objects or self._ended.is_set()

        with self._changed:
            in_time = self._changed.wait_for(its_turn, patience_s)
            large = self._objects.get(id)
            if large is not None:
                return large
            self._checking.pop(id, None)  # that began before this block came
            if not in_time or self._ended.is_set():
                return None
            if len(self._objects) >= _REMEMBERED:
                # Those that are not asked about yet are passed over: their last block may be here already.
                oldest = next((other for other, held in self._objects.items() if held.asked), None)
                if oldest is not None:
                    del self._objects[oldest]
            large = self._objects[id] = _Large(ref)
            self._do_soon_locked(self._ask, id, large)
            return large

    def _do_soon_locked(self, work: Callable[[ObjectId, _Large], None], id: ObjectId, large: _Large) -> None:
        """Have the background do it. A failure there is logged, and the object counts as not checked, once."""

        def run() -> None:
            try:
                work(id, large)
            except Exception as exc:
                with self._changed:
                    first = id not in self._not_checked
                    self._not_checked[id] = time.monotonic()
                    if self._objects.get(id) is large:
                        del self._objects[id]
                if first:
                    ours = isinstance(exc, DatacacheError)
                    words = exc.message if isinstance(exc, DatacacheError) else repr(exc)
                    log.warning("%s is not checked: %s", large.ref.url, words, exc_info=not ours)
                    TALLY.checked("none")
            finally:
                with self._changed:
                    self._waiting -= 1
                    self._changed.notify_all()

        self._waiting += 1
        # Closed; or no more threads can be started, and the work is queued all the same, for those that there are.
        with contextlib.suppress(RuntimeError):
            self._workers.submit(run)

    def _keep_looking(self) -> None:
        while not self._ended.is_set():
            self._look.wait(_AGAIN_S)
            self._look.clear()
            if self._ended.is_set():
                return
            try:
                self._take_up()
            except Exception as exc:  # noqa: BLE001 - the next look may find them
                log.warning("unchecked objects are looked for again later: %r", exc)
            self._ended.wait(_LOOK_EVERY_S)

    def _take_up(self) -> None:
        """Have those unchecked objects checked of which all blocks are here and no state is."""
        with self._changed:
            tried = dict(self._not_checked)
        gone = set(tried)
        for some in self._writer.unchecked():
            for id, ref in {object_id(ref): ref for ref in some}.items():
                gone.discard(id)
                if self._ended.is_set():
                    return
                if id in tried and time.monotonic() - tried[id] < _AGAIN_S:
                    continue
                with self._changed:
                    held = id in self._objects or id in self._checking
                # The index is asked once more after the look at what is held: a check may have ended just before.
                if held or not self._writer.is_unchecked(id):
                    continue
                if all(self._local.has(block_id(id, n)) for n in range(block_count(ref.size_bytes))):
                    self._hold(ref, _THREADS, None)  # what is fetched now comes first
        with self._changed:
            for id in gone:
                self._not_checked.pop(id, None)

    def _ask(self, id: ObjectId, large: _Large) -> None:
        """Find out the checksum of the whole, and which blocks were here before. In the background."""
        try:
            large.expected = self._expected(large.ref)
        except Exception as exc:  # noqa: BLE001 - asked again, and told then
            large.failed = True
            log.info("%s: the store does not say its checksum, and is asked again: %r", large.ref.url, exc)
        before = {n for n in range(block_count(large.ref.size_bytes)) if self._local.has(block_id(id, n))}
        with self._changed:
            large.here |= before
            large.asked = True
            self._check_if_whole_locked(id, large)

    def _check_if_whole_locked(self, id: ObjectId, large: _Large) -> None:
        whole = large.asked and len(large.here) == block_count(large.ref.size_bytes)
        if whole and self._objects.get(id) is large:
            del self._objects[id]
            self._checking[id] = large
            self._do_soon_locked(self._check, id, large)

    def _check(self, id: ObjectId, large: _Large) -> None:
        """Compare all of an object. In the background."""
        try:
            self._compare(id, large)
        finally:
            with self._changed:
                if self._checking.get(id) is large:
                    del self._checking[id]

    def _compare(self, id: ObjectId, large: _Large) -> None:
        ref = large.ref
        try:
            expected = self._expected(ref) if large.failed else large.expected
        except (ObjectNotFoundError, ObjectChangedError) as exc:  # there will never be an answer
            log.warning("%s is not checked: %s", ref.url, exc.message)
            expected = None
        if expected is None:
            TALLY.checked("none")
            self._settle(id, large)
            return
        found = self._digest(id, large, expected)
        if found is None:
            with self._changed:
                if self._checking.get(id) is not large:
                    return  # blocks have come since it began, and another check is of all of them
            raise CacheError("some of its blocks went away meanwhile")
        right = found == expected.value
        if expected.algorithm == "md5":
            right = md5_etags(ref.store).meet(ref, expected.value, found)
        with self._changed:
            self._not_checked.pop(id, None)
            if right:
                self._failed.pop(id, None)
            else:
                error = mismatch(ref, expected, found)
                self._failed[id] = self._failed.get(id, (0, 0.0, None))[0] + 1, time.monotonic(), error
        if right:
            TALLY.checked(expected.algorithm if found == expected.value else "none")
            self._settle(id, large)
            return
        TALLY.failed(expected.algorithm)
        log.error("%s; it leaves the cache", error.message)
        blocks = [block_id(id, number) for number in range(block_count(ref.size_bytes))]
        self._writer.call(lambda: self._writer.drop_object(blocks)).result()
        self._local.sweep()  # what it has open would go on to be given

    def _settle(self, id: ObjectId, large: _Large) -> None:
        """Have the index forget that an object is unchecked, unless blocks have come since the check began. Blocks that
        come from now on are stored later, as the writer does one thing after the other."""

        def settle() -> None:
            with self._changed:
                if self._checking.get(id) is not large:
                    return
            self._writer.mark_checked(id)

        self._writer.call(settle).result()

    def _digest(self, id: ObjectId, large: _Large, expected: Checksum) -> bytes | None:
        ref = large.ref
        running = Running(expected.algorithm)
        together: bytes | None = None
        for number in range(block_count(ref.size_bytes)):
            crc = large.crcs.get(number)
            if crc is None:
                found = self._local.view(block_id(id, number), 0, None)
                if found is None:
                    return None
                if not is_crc(expected.algorithm):
                    running.update(found)
                    continue
                crc = compute(expected.algorithm, found)
            length = block_length(ref.size_bytes, number)
            together = crc if together is None else combined(expected.algorithm, together, crc, length)
        return running.digest() if together is None else together

    def _expected(self, ref: ObjectRef) -> Checksum | None:
        """Ask the store for the checksum of the whole; None if there is none to go by."""
        expected = self._open_store(ref.store).checksum(ref)
        return None if expected is not None and expected.algorithm == "md5" and not self._md5 else expected
