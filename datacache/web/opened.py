"""Keep the snapshots open that are looked at, and open them beside the requests that ask: reading annotations may take
minutes the first time, and a browser is told how far it is meanwhile.

Any thread may call. An `OpenSnapshots` owns its threads and what it has opened; close it. A snapshot that gives way to
another is closed when the last request that reads of it has dropped its `Shown`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from datacache import api
from datacache.core.errors import DatacacheError
from datacache.settings import Settings
from datacache.web.reading import ReadingApart

_log = logging.getLogger(__name__)
_MOST_OPEN = 6
_FEW_FILES = 5_000
"""Annotations of so many are read here: another process takes a second to start."""
_MOST_IMAGES = 1_500_000
"""Of all that are open together, but for two that are compared: a million take some 150 MiB with their boxes."""
_WAIT_S = 0.6
"""A page waits so long for a snapshot before it says that it is being opened."""


@dataclass(frozen=True, eq=False)
class Shown:
    """A snapshot that is open as long as somebody holds this."""

    snapshot: api.Snapshot
    browser: api.Browser
    colours: dict[str, tuple[int, int, int]]
    """Of all its labels, the same whatever is filtered."""

    @property
    def ref(self) -> str:
        """Return its immutable name, short."""
        return self.snapshot.record.ref


class Opening(Exception):  # noqa: N818 - an answer, not an error
    """The snapshot is being opened."""

    def __init__(self, ref: str, progress: str) -> None:
        super().__init__(progress)
        self.ref = ref


class _Progress:
    """Tells how far the opening is, and holds nothing that is open."""

    text = ""
    given_up = False

    def tell(self, what: str, done: int, total: int) -> None:
        self.text = f"{what} {done:,} of {total:,} images"
        self.check()

    def check(self) -> None:
        """End the opening where the server ends."""
        if self.given_up:
            raise CancelledError


class _BeingOpened:
    def __init__(self) -> None:
        self.progress = _Progress()
        self.close: Callable[[], object] = lambda: None
        self.shown: Future[Shown] = Future()


class OpenSnapshots:
    """The snapshots that are open, the last used last."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(2, "open-snapshot")
        self._lock = threading.Lock()  # guards _entries
        self._entries: OrderedDict[str, _BeingOpened] = OrderedDict()

    def get(self, record: api.SnapshotRecord) -> Shown:
        """Return a snapshot, opened now where it is not. `Opening` where that takes longer; what opening raises."""
        ref = f"{record.dataset}@{record.id}"
        with self._lock:
            entry = self._entries.get(ref)
            if entry is None:
                entry = self._entries[ref] = _BeingOpened()
                self._threads.submit(self._open, ref, record.files, entry)
            self._entries.move_to_end(ref)
        wait_for([entry.shown], timeout=_WAIT_S)
        if not entry.shown.done():
            raise Opening(record.ref, entry.progress.text)
        return entry.shown.result()

    def close(self) -> None:
        """Close all. A table that is being made is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            entries, self._entries = list(self._entries.values()), OrderedDict()
        for entry in entries:
            entry.progress.given_up = True
            entry.close()

    def _open(self, ref: str, files: int, entry: _BeingOpened) -> None:
        stack, tell = ExitStack(), entry.progress.tell
        try:
            if files > _FEW_FILES and not api.has_annotations(ref, settings=self._settings):
                with ReadingApart(ref, self._settings) as reading:
                    entry.close = reading.stop
                    reading.follow(tell)
            entry.progress.check()
            # One process: this one has threads, whose locks a forked process would inherit.
            opened = api.open_browser(ref, settings=self._settings, processes=1, progress=tell)
            snapshot, browser = stack.enter_context(opened)
            with suppress(DatacacheError):  # a filter that needs them raises it again
                if files <= _FEW_FILES:
                    browser.splits()  # sooner than a page stops waiting: so the first one has the field
            shown = Shown(snapshot, browser, api.colours_of(browser.table.labels))
        except BaseException as exc:  # noqa: BLE001 - whoever asked is told
            stack.close()
            with self._lock:
                self._entries.pop(ref, None)  # the next request tries again
            entry.shown.set_exception(exc)
            return
        entry.close = weakref.finalize(shown, stack.close)
        entry.shown.set_result(shown)
        self._make_room()
        try:
            browser.prepare()
        except Exception as exc:  # noqa: BLE001 - a filter that needs it raises it again
            _log.info("the columns of %s are loaded when they are needed: %s", ref, exc)

    def _make_room(self) -> None:
        gone = []
        with self._lock:
            ready = [(ref, entry) for ref, entry in self._entries.items() if entry.shown.done()]
            images = [entry.shown.result().browser.table.images for _, entry in ready]
            while len(ready) > 1 and (len(ready) > _MOST_OPEN or (len(ready) > 2 and sum(images) > _MOST_IMAGES)):
                images.pop(0)
                gone.append(self._entries.pop(ready.pop(0)[0]))
        gone.clear()  # without the lock: what nobody reads of is closed here
