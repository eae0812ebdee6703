"""Bound how many calls wait for endpoints that tenants' Secrets name, for each namespace and together.

Used by `preparation`. Such a server may take as long as all timeouts allow, for every volume anew, and each call that
waits for it takes one of the driver's threads. Any thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

import grpc

from csi_driver.status import RequestError

OF_ONE = 8
"""Calls of one namespace at a time; of volumes whose namespace nobody knows (a PV by hand) together."""
OF_ALL = 32
"""Calls of all namespaces at a time. Beyond that, only a namespace that holds no turn is given one."""
OF_FIRST = 64
"""Such first turns at most. With them a quarter of `server.THREADS` is left, which those that wait for warm-ups
(`preparation`) do not fill: others find threads, too."""


class EndpointTurns:
    """The turns of one node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _taken
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def take(self, namespace: str) -> Iterator[None]:
        """Hold a turn within. UNAVAILABLE at once where none is left: to wait for one would take a thread, too.

        A namespace that holds none is refused only where `OF_FIRST` others hold turns: whoever takes a second one finds
        fewer than `OF_ALL` taken, so all seconds and thirds together are fewer than that."""
        with self._lock:
            of_one, of_all = self._taken[namespace], self._taken.total()
            if of_one >= OF_ONE or of_all >= (OF_ALL if of_one else OF_ALL + OF_FIRST):
                whose = "of several namespaces" if of_one < OF_ONE else _whose(namespace)
                raise RequestError(
                    grpc.StatusCode.UNAVAILABLE,
                    f"{of_one if of_one >= OF_ONE else of_all} volumes {whose} wait for the endpoints of their "
                    "Secrets, which are slow or do not answer; this one is tried again when some of these have ended",
                )
            self._taken[namespace] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[namespace] -= 1
                self._taken += Counter()  # without those that have none


def _whose(namespace: str) -> str:
    return f"of namespace {namespace}" if namespace else "that were made by hand, for no namespace,"
