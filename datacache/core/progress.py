"""Bars for what takes long, where somebody looks: on a terminal, and in a notebook. In a pipe and a log there are none.

A process draws one bar at a time, so what begins inside of something that is shown draws none; nor do processes that
`multiprocessing` has made, such as the workers of a loader. Used by `dsctl` and `datacache.api`. Any thread; updates of
one bar may come from several.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from datacache.core.html import html_text, visible

_EVERY_S = 0.05
_drawn = threading.Lock()  # held by the bar that is drawn
_Draw = Callable[[str, float, float | None], None]


class ProgressBar:
    """A bar (or, while the total is not known, a count) that is updated in place."""

    def __init__(self, begin: Callable[[str], AbstractContextManager[_Draw]], after_s: float) -> None:
        self._begin, self._from = begin, time.monotonic() + after_s
        self._lock = threading.Lock()  # guards what follows
        self._draw: _Draw | None = None
        self._last = 0.0
        self.closing = ExitStack()

    def update(self, text: str, done: float = 0, total: float | None = None) -> None:
        """Show how far things are; a total of 0 or None is not known."""
        now = time.monotonic()
        with self._lock:
            if now < self._from or (now - self._last < _EVERY_S and done != total):
                return
            self._last = now
            if self._draw is None:
                self._draw = self.closing.enter_context(self._begin(visible(text)))
            self._draw(text, done, total or None)


@contextmanager
def bar(text: str, *, wanted: bool = True, after_s: float = 0.0) -> Iterator[ProgressBar | None]:
    """Draw a bar until the end, from its first update after `after_s` seconds on; without these, at once. None where
    nobody looks, another one is drawn, or it is not `wanted`."""
    drawing = _drawing() if wanted else None
    if drawing is None or not _drawn.acquire(blocking=False):
        yield None
        return
    try:
        shown = ProgressBar(drawing, after_s)
        with shown.closing:
            if not after_s:
                shown.update(text)
            yield shown
    finally:
        _drawn.release()


def _drawing() -> Callable[[str], AbstractContextManager[_Draw]] | None:
    """Return what opens a bar; None where nobody looks."""
    if multiprocessing.parent_process() is not None:
        return None
    # A notebook has imported IPython; nothing else is to pay for it.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        return _in_notebook
    return _on_terminal if sys.stderr is not None and sys.stderr.isatty() else None


@contextmanager
def _on_terminal(text: str) -> Iterator[_Draw]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    text_column = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text_column, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(text, total=None)
        yield lambda text, done, total: drawn.update(task, description=visible(text), completed=done, total=total)


@contextmanager
def _in_notebook(text: str) -> Iterator[_Draw]:
    from IPython.display import display

    def content(text: str, done: float, total: float | None) -> dict[str, str]:
        place = f' value="{done / total:.4f}"' if total else ""
        return {"text/html": f"<progress{place}></progress> {html_text(text)}", "text/plain": visible(text)}

    handle = display(content(text, 0, None), raw=True, display_id=True)
    try:
        yield lambda text, done, total: handle.update(content(text, done, total), raw=True)
    finally:
        handle.update({"text/html": "", "text/plain": ""}, raw=True)
