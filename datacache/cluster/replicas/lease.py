"""Which node may upload what is pending in a replicated staging area: a document of the catalog for each area.

    replica-lease   area's id → {node, replica, until_s, taken, done}

The area's own node renews `until_s` (by the catalog's clock, never a node's). `replica` is the node that has all that
was acknowledged, '' for none: it alone may take the lease over once it has ended, and writes itself into `taken`. From
then on the area is its, for ever; `done` says that it has uploaded all of it. Each change replaces the document that
was read, so of two nodes one is refused.

The owner stops as long before others may take it as one request to the store may take: what is under way ends before.
Any thread.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import NamedTuple

from datacache.catalog.base import Catalog
from datacache.core.errors import DatacacheError, StagingError

log = logging.getLogger(__name__)
LEASES = "replica-lease"
_RENEWALS = 4
"""In the time that a renewal is good for."""
_AGAIN_S = 1.0
"""After a renewal that failed."""
_HINT = "Unmount here (dsctl umount --no-wait) and mount again, which begins with an empty staging area."


class LeaseState(NamedTuple):
    """The document of an area."""

    node: str
    replica: str
    until_s: float
    taken: str = ""
    done: bool = False

    def encode(self) -> str:
        """Return the document's text."""
        return json.dumps(self._asdict())

    def replace_document(self, catalog: Catalog, area_id: str, old: str | None) -> bool:
        """Put this in the place of the text that was read; return whether that was still there. The catalog's
        errors."""
        return catalog.set_document(LEASES, area_id, self.encode(), old=old)


def read_lease(catalog: Catalog, area_id: str) -> tuple[str | None, LeaseState | None]:
    """Return the text of an area's document, and what it says; None for neither. The catalog's errors."""
    text = catalog.document(LEASES, area_id)
    if text is None:
        return None, None
    try:
        values = json.loads(text)
        return text, LeaseState(
            *(str(values["node"]), str(values["replica"]), float(values["until_s"])),
            *(str(values["taken"]), bool(values["done"])),
        )
    except (ValueError, TypeError, KeyError) as exc:
        raise StagingError(
            f"the catalog's document {LEASES}/{area_id} makes no sense", hint="Another version of datacache wrote it."
        ) from exc


class AreaLease:
    """The lease of an area that this node works in. `close` ends the thread that renews it."""

    def __init__(self, catalog: Catalog, area_id: str, node: str, lease_s: float, *, request_s: float) -> None:
        """Take the lease, or take note of who has it: see `taken_by`. A request to the store may take `request_s`. The
        catalog's errors."""
        self._catalog, self._area_id, self._node, self._lease_s = catalog, area_id, node, lease_s
        self._good_s = lease_s - request_s
        self._lock = threading.Lock()  # held while the document is changed
        self._text: str | None = None
        self._state = LeaseState(node, "", 0.0)
        self._valid_until = 0.0  # by `_now_s`
        self.taken_by = ""
        """The node that has the area now; '' while it is this one's."""
        self._ended = threading.Event()
        self._renew()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Renew it from now on."""
        self._thread = threading.Thread(target=self._keep, name="replica-lease", daemon=True)
        self._thread.start()

    @property
    def replica(self) -> str:
        """Return the node that may take the area over; '' for none."""
        return self._state.replica

    def name(self, replica: str) -> None:
        """Say which node has all that was acknowledged. The catalog's errors; `StagingError` if the area is taken."""
        if replica != self._state.replica:
            self._renew(replica)
            self.check()

    def check(self) -> None:
        """Raise `StagingError` if this node may not acknowledge or upload anything now."""
        if self.taken_by:
            raise StagingError(f"the node {self.taken_by} has taken over what was pending here", hint=_HINT)
        if _now_s() > self._valid_until:
            raise StagingError(
                "the lease on this staging area could not be renewed in the catalog, and another node may upload now",
                hint="It goes on when the catalog answers, unless that node was quicker. See dsctl doctor.",
            )

    def close(self, *, done: bool) -> None:
        """Renew it no more; with `done`, as nothing is left for this node to do, there is no lease and no replica any
        more, unless the node that has the area needs it still."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if done and (self._state.done or not self.taken_by):
            try:
                self._catalog.remove_document(LEASES, self._area_id, old=self._text)
            except DatacacheError as exc:
                log.warning("the lease on an empty staging area ends by itself: %s", exc)
        self._catalog.close()

    def _keep(self) -> None:
        every_s, fails = self._good_s / _RENEWALS, False
        while not self._ended.wait(min(every_s, _AGAIN_S) if fails else every_s):
            try:
                self._renew()
                fails = False
            except DatacacheError as exc:
                if not fails:
                    log.warning("the lease on a staging area is not renewed: %s", exc)
                fails = True
            if self.taken_by:
                log.error("the node %s has taken over what was pending here. %s", self.taken_by, _HINT)
                return

    def _renew(self, replica: str | None = None) -> None:
        with self._lock:
            while not self.taken_by:
                began = _now_s()
                until_s = self._catalog.now_s() + self._lease_s
                text, state = read_lease(self._catalog, self._area_id)
                if state is not None and state.taken:
                    self._text, self._state, self.taken_by = text, state, state.taken
                    return
                kept = state.replica if state is not None else ""
                new = LeaseState(self._node, kept if replica is None else replica, until_s)
                if new.replace_document(self._catalog, self._area_id, text):
                    self._text, self._state = new.encode(), new
                    self._valid_until = began + self._good_s
                    return


def _now_s() -> float:
    """Return the time by a clock that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
