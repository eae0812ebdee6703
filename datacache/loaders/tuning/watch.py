"""Watches a training's steps: what each waited for, to counters, log and the user; what the epoch shows, as a report.

Used by the loader, in the training's process. One thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from datacache.core.counters import Counters
from datacache.loaders.processes import processors
from datacache.loaders.tuning.bottleneck import diagnose
from datacache.loaders.tuning.report import Report, Step, Tally
from datacache.loaders.tuning.timing import Clocks

log = logging.getLogger("datacache.loader")

_SLOW_START_S = 5.0


class Watch:
    """The steps of one loader: `begin`, then `asked` and `handed_out` for each batch, then `end`."""

    def __init__(
        self,
        clocks: Clocks,
        counters: Counters,
        *,
        workers: int,
        report_every: float,
        on_step: Callable[[Step], Any] | None,
    ) -> None:
        self.last: Step | None = None
        self._clocks, self._counters = clocks, counters
        self._report_every, self._on_step = report_every, on_step
        self._epoch = Tally(clocks, workers=workers, processors=processors())
        self._since_log = Tally(clocks, workers=workers, processors=processors())
        self._place = (0, 0)  # epoch and step
        self._asked_s = self._asked_cpu_s = self._handed_out_s = self._first_s = 0.0
        self._bytes = 0.0

    def begin(self, epoch: int, step: int) -> None:
        """An epoch begins, or goes on at a step."""
        self._place = (epoch, step)
        self._handed_out_s = 0.0
        self._bytes = self._clocks.size_bytes()
        self._epoch.begin()

    def asked(self) -> None:
        """The training asks for a batch."""
        self._asked_s, self._asked_cpu_s = time.perf_counter(), time.thread_time()

    def handed_out(self, samples: int) -> None:
        """It is about to get one."""
        now_s, receive_cpu_s = time.perf_counter(), time.thread_time() - self._asked_cpu_s
        size_bytes = self._clocks.size_bytes()
        first = not self._handed_out_s
        data_s = now_s - self._asked_s
        step_s = data_s if first else now_s - self._handed_out_s
        step = Step(*self._place, samples, int(size_bytes - self._bytes), data_s, step_s)
        self.last, self._handed_out_s, self._bytes = step, now_s, size_bytes
        self._place = (step.epoch, step.step + 1)
        self._counters.step(samples, step.size_bytes, int(data_s * 1e9), int(step_s * 1e9))
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "epoch %d step %d: data_time=%.6f step_time=%.6f samples=%d bytes=%d",
                *(step.epoch, step.step, data_s, step_s, samples, step.size_bytes),
            )
        if first:  # starting workers and filling queues is no part of the steps
            self._first_s = data_s
            self._epoch.begin()
            self._since_log.begin()
        else:
            self._epoch.add(step, receive_cpu_s)
            self._since_log.add(step, receive_cpu_s)
            if self._since_log.age_s >= self._report_every > 0:
                self._log(self._since_log)
                self._since_log.begin()
        if self._on_step is not None:
            self._on_step(step)

    def end(self) -> None:
        """The epoch is over, or given up."""
        if self._epoch.stretch().steps and self._report_every > 0:
            self._log(self._epoch)

    def report(self) -> Report:
        """What the epoch shows until now."""
        return diagnose(self._epoch.stretch())

    def _log(self, tally: Tally) -> None:
        found = diagnose(tally.stretch())
        stretch = found.stretch
        start = f" The first batch took {self._first_s:.1f} s." if self._first_s >= _SLOW_START_S else ""
        log.info(
            "epoch %d: %d steps, data_time %.4f s of step_time %.4f s, %.0f samples/s. %s%s",
            *(self._place[0], stretch.steps, stretch.data_s / stretch.steps, stretch.step_s / stretch.steps),
            *(found.samples_per_s, found.text, start),
        )
