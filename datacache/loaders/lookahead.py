"""Tell the node's daemon in which order a training will read, so that it fetches in exactly that order.

Used by samplers and streaming datasets in the training process. `publish` returns at once: a thread of its own makes
the plan and sends it; the position goes through a mapped file, which no system call and no other process stands behind.
Nothing here fails or holds up a training: without a daemon or a home it reads as it would have read without.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from datacache.core.boot import born
from datacache.core.concurrency import PerProcess
from datacache.core.errors import DatacacheError
from datacache.core.ids import ObjectRef
from datacache.daemon.client import DaemonClient
from datacache.daemon.orders.plan_file import PlanFile, PlanHeader, new_plan_file
from datacache.tiers.memory import lookahead_dir

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from datacache.settings import Settings

log = logging.getLogger(__name__)
_CHUNK_SAMPLES = 1 << 16
_RETRY_S = 30.0


class PlanSource(NamedTuple):
    """The source of a plan's rows: a catalog snapshot's manifest, or `refs` where there is no such snapshot."""

    dataset: str
    """Under which name the tiers keep the blocks."""
    snapshot: str = ""
    """The id of the snapshot (32 hex digits)."""
    refs: tuple[ObjectRef, ...] = ()


class Plannable(Protocol):
    """A dataset whose order can be published. Called in a thread of its own; must not wait for data."""

    def plan_source(self) -> PlanSource | None:
        """Return where samples are read from; None where there is nothing to fetch, such as plain local files."""
        ...

    def plan_items(self, samples: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return what each of these samples reads: shape (n, 1), the row of a whole object; or (n, 3), the row, the
        object's first block that is read, and how many are: 0 for a sample that reads nothing of this source."""
        ...


class Order(Protocol):
    """Sample numbers by their place, such as `loaders.order.EpochOrder`; an array serves as well."""

    def __len__(self) -> int: ...

    def take(self, start: int, stop: int, /) -> NDArray[np.int64]:
        """Return the sample numbers at the places `start:stop`."""
        ...


class Lookahead:
    """An order that the daemon was told: it fetches what `order` reads from its place `start` on, a window ahead of
    `advance`.

    `next_order` is what comes right after it (the next epoch): the window reaches into it, and under the policy
    `clairvoyant` what it uses last goes first. Made at once; publishes nothing if `settings.prefetch` is off or
    `dataset` has no `plan_source`. Close it when the order is through or given up; it ends with its process at the
    latest. One thread advances it. A child of `fork()` inherits one that does nothing: it is its parent's.
    """

    def __init__(
        self,
        settings: Settings,
        dataset: Plannable,
        order: NDArray[np.int64] | Order,
        *,
        next_order: NDArray[np.int64] | Order | None = None,
        start: int = 0,
    ) -> None:
        self._settings, self._dataset = settings, dataset
        self._source = dataset.plan_source() if settings.prefetch and len(order) else None
        self._orders = [order] if next_order is None else [order, next_order]
        self._sender = threading.Lock()  # held while a thread sends
        self._retry_at_s = 0.0
        self._idle = threading.Event()
        self._idle.set()
        self._file: PerProcess[PlanFile | None] = PerProcess(lambda: None)
        if self._source is not None:
            try:
                file = new_plan_file(lookahead_dir(settings.home, settings.ram_dir), settings.home, start)
            except OSError as exc:  # a full disk, or a home that is not ours to write to
                log.debug("no order is published: %s", exc)
                return
            self._file = PerProcess(lambda: file)
            self._file.get()
            self._send_soon()

    def advance(self, position: int) -> None:
        """Note that the samples before the place `position` have been asked for. One store into the file; waits for
        nobody."""
        file = self._file.peek()
        if file is not None:
            words = file.words
            words[0] = position
            if not words[1]:  # not sent yet, or the daemon is a new one that knows of no plan
                self._send_soon()

    def close(self) -> None:
        """Take the plan back. Idempotent, and nothing in a child of `fork()`."""
        file = self._file.take()
        if file is not None:
            file.remove()

    def wait_sent(self, timeout_s: float = 30.0) -> bool:
        """Wait until no thread is sending the plan, and say whether the daemon has it. For tests and benchmarks."""
        self._idle.wait(timeout_s)
        file = self._file.peek()
        return file is not None and file.marked

    def __enter__(self) -> Lookahead:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _send_soon(self) -> None:
        """Send the plan in a thread, unless one does, or failed to a moment ago."""
        if time.monotonic() < self._retry_at_s or not self._sender.acquire(blocking=False):
            return
        self._idle.clear()
        try:
            threading.Thread(target=self._send, name="lookahead", daemon=True).start()
        except RuntimeError:  # no thread can be had, or the interpreter is ending
            self._sent(_RETRY_S)

    def _send(self) -> None:
        pause_s = _RETRY_S
        try:
            self._send_now()
            pause_s = 1.0
        except (DatacacheError, _ClosedError) as exc:
            log.debug("the order is not published: %s", exc)
        except Exception:  # whatever it is, reading goes on without
            log.warning("the order is not published", exc_info=True)
        self._sent(pause_s)

    def _sent(self, pause_s: float) -> None:
        self._retry_at_s = time.monotonic() + pause_s
        self._sender.release()
        self._idle.set()

    def _send_now(self) -> None:
        file, source = self._file.peek(), self._source
        if file is None or source is None:
            return
        header = PlanHeader(
            id=file.path.name,
            pid=os.getpid(),
            started=born(os.getpid()),
            dataset=source.dataset,
            snapshot=source.snapshot,
            refs=() if source.snapshot else source.refs,
            columns=int(self._dataset.plan_items(_take(self._orders[0], 0, 1)).shape[1]),
            items=len(self._orders[0]),
            next_items=sum(map(len, self._orders[1:])),
        )
        DaemonClient(self._settings).lookahead(header, lambda: self._items(file))

    def _items(self, file: PlanFile) -> Iterator[bytes]:
        for order in self._orders:
            for start in range(0, len(order), _CHUNK_SAMPLES):
                if self._file.peek() is not file:
                    raise _ClosedError
                samples = _take(order, start, min(start + _CHUNK_SAMPLES, len(order)))
                yield np.ascontiguousarray(self._dataset.plan_items(samples), dtype="<u4").tobytes()


class LookaheadGroup:
    """The lookaheads of one order that reads from several sources: one for each, all at the same position."""

    def __init__(self, each: Sequence[Lookahead]) -> None:
        self._each = tuple(each)

    def advance(self, position: int) -> None:
        for each in self._each:
            each.advance(position)

    def close(self) -> None:
        for each in self._each:
            each.close()

    def wait_sent(self, timeout_s: float = 30.0) -> bool:
        return all(each.wait_sent(timeout_s) for each in self._each)

    def __enter__(self) -> LookaheadGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def publish(
    settings: Settings,
    dataset: Plannable,
    order: NDArray[np.int64] | Order,
    *,
    next_order: NDArray[np.int64] | Order | None = None,
    start: int = 0,
) -> Lookahead | LookaheadGroup:
    """Return the lookahead of an order: `with publish(settings, dataset, order) as plan`. Where `dataset` has
    `plan_parts`, these are what has a source each."""
    parts = dataset.plan_parts() if hasattr(dataset, "plan_parts") else None
    if parts is None:
        return Lookahead(settings, dataset, order, next_order=next_order, start=start)
    return LookaheadGroup([Lookahead(settings, part, order, next_order=next_order, start=start) for part in parts])


class _ClosedError(Exception):
    """Ends the sending of a plan that nobody needs any more."""


def _take(order: NDArray[np.int64] | Order, start: int, stop: int) -> NDArray[np.int64]:
    return order[start:stop] if isinstance(order, np.ndarray) else order.take(start, stop)
