"""The node: its tiers, hit rate, jobs and mounts, and its cluster. Looking starts and changes nothing.

There is no such page where the pages are for one namespace: a node knows of everybody's data sets.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from itertools import pairwise
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from datacache import api
from datacache.settings import Settings
from datacache.web.rendering import render
from datacache.web.site import Site

_FRESH_S: Final = 1.0
"""Whoever asks within this time sees what the one before saw."""
_HOUR_S: Final = 3600.0
_SPAN_S: Final = 60.0
_SAMPLES: Final = 3600
_WIDTH: Final = 600
_HEIGHT: Final = 80
_LISTED: Final = 100


class RateBar(NamedTuple):
    """The reads of about a minute, as a bar of the chart."""

    x: float
    width: float
    height: float
    hits: int
    reads: int
    ago_s: float


class HitRates:
    """The hits and misses of the last hour, as far as somebody looked. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _samples
        self._samples: deque[tuple[float, int, int, int]] = deque(maxlen=_SAMPLES)

    def add(self, now_s: float, process: int, hits: int, misses: int) -> None:
        """Note what the daemon has counted since it was started."""
        with self._lock:
            self._samples.append((now_s, process, hits, misses))
            while now_s - self._samples[0][0] > _HOUR_S:
                self._samples.popleft()

    def spans(self, now_s: float) -> list[RateBar]:
        """Return the bars, the oldest first. A time without reads has none."""
        with self._lock:
            samples = list(self._samples)
        spans = []
        start = samples[0] if samples else (now_s, 0, 0, 0)
        for before, sample in pairwise(samples):
            if sample[1] != start[1] or sample[2] < start[2] or sample[3] < start[3]:  # counts from 0 again
                start = sample
            elif sample[0] - start[0] >= _SPAN_S or sample is samples[-1] or sample[0] - before[0] >= _SPAN_S:
                hits, misses = sample[2] - start[2], sample[3] - start[3]
                if hits + misses:
                    x = _WIDTH * (1 - (now_s - start[0]) / _HOUR_S)
                    width = max(1.0, _WIDTH * (sample[0] - start[0]) / _HOUR_S)
                    height = _HEIGHT * hits / (hits + misses)
                    spans.append(RateBar(max(0.0, x), width, height, hits, hits + misses, now_s - sample[0]))
                start = sample
        return spans


class _Watch:
    """The state of the node, looked up once for all visitors who ask within a second."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._rates = HitRates()
        self._lock = threading.Lock()  # guards _state and _looked_s, and is held while the daemon is asked
        self._state: dict[str, Any] = {}
        self._looked_s = float("-inf")

    def look(self) -> dict[str, Any]:
        """Return the values of the template."""
        with self._lock:
            if time.monotonic() - self._looked_s >= _FRESH_S:
                self._state = self._ask()
                self._looked_s = time.monotonic()
            spans = self._rates.spans(time.monotonic())
        jobs = self._site.jobs.all()[:_LISTED]
        return self._state | {"spans": spans, "width": _WIDTH, "height": _HEIGHT, "page_jobs": jobs}

    def _ask(self) -> dict[str, Any]:
        state = api.look_at_node(self._site.settings)
        cache = state["cache"]
        if cache is not None:
            reads = cache["reads"]
            self._rates.add(time.monotonic(), state["daemon"]["pid"], reads["hits"], reads["misses"])
        stopped = state["daemon"] is None and not state["error"]
        failure = api.start_failure(self._site.settings) if stopped else None
        mounts = [[line.strip() for line in lines] for lines in self._site.mounts()]
        is_external = self._site.settings.daemon == "external"
        now = time.strftime("%H:%M:%S", time.gmtime())
        return state | {
            "failure": failure,
            "mounts": mounts,
            "is_external": is_external,
            "now": now,
            "home": str(self._site.settings.home),
        }


def is_shown(settings: Settings) -> bool:
    """Tell whether there is this page."""
    return not settings.ui_namespace


def routes(site: Site) -> list[Route]:
    """Return the pages of the node."""
    if not is_shown(site.settings):
        return []
    watch = _Watch(site)

    def node(_site: Site, request: Request) -> Response:
        part = "hx-request" in request.headers
        return render(request, "node_now.html" if part else "node.html", **watch.look())

    def cancel(site: Site, request: Request, _body: bytes) -> Response:
        api.cancel_job(request.path_params["id"], site.settings)
        return RedirectResponse("/node", 303)

    return [site.get("/node", node), site.post("/node/cancel/{id}", cancel)]
