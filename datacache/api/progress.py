"""Bars of calls from Python that take long, where their caller gives no `progress` of its own.

Each drawing below makes of a bar the function that such a call tells how far it is. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from datacache.core.progress import ProgressBar, bar
from datacache.settings import Settings, format_bytes, load_settings

if TYPE_CHECKING:
    from datacache.imports.jsonl import JsonlProgress
    from datacache.imports.videos.frames import FramesProgress

_AFTER_S = 0.5
"""A bar comes only where a call takes longer."""
_P = ParamSpec("_P")
_R = TypeVar("_R")
Tell = Callable[..., None]


@contextmanager
def shown(settings: Settings, progress: Tell | None, drawing: Callable[[ProgressBar], Tell]) -> Iterator[Tell]:
    """Give the caller's `progress`; without one, what draws a bar, unless a setting says not to or nobody looks."""
    if progress is not None:
        yield progress
        return
    with bar("", wanted=settings.progress, after_s=_AFTER_S) as drawn:
        yield _nothing if drawn is None else drawing(drawn)


def shows(drawing: Callable[[ProgressBar], Tell]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a function with the keywords `settings` and `progress` draw a bar where its caller gives no `progress`."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given: dict[str, Any] = kwargs
            given["settings"] = settings = given.get("settings") or load_settings()
            with shown(settings, given.get("progress"), drawing) as given["progress"]:
                return function(*args, **kwargs)

        return call

    return decorate


def _nothing(*_far: object) -> None:
    pass


def of_images(drawn: ProgressBar) -> Tell:
    """Draw `progress(what, done, total)` of images."""
    return lambda what, done, total: drawn.update(f"{what} {done:,} images", done, total)


def of_samples(drawn: ProgressBar) -> Tell:
    """Draw `progress(what, done, total, bytes)` of samples that are written into shards."""
    return lambda what, done, total, size: drawn.update(
        f"{what} {done:,} samples" + (f", {format_bytes(size)}" if size else ""), done, total
    )


def of_files(drawn: ProgressBar) -> Tell:
    """Draw `progress(files, bytes)`, where nobody knows how many there are."""
    return lambda done, size: drawn.update(f"{done:,} files, {format_bytes(size)}")


def of_all_files(drawn: ProgressBar) -> Tell:
    """Draw `progress(done, files, bytes)`."""
    return lambda done, total, size: drawn.update(f"{done:,} of {total:,} files, {format_bytes(size)}", done, total)


def of_blobs(drawn: ProgressBar) -> Tell:
    """Draw `progress(blobs, of, bytes)` of a snapshot's blobs that are copied."""
    return lambda done, total, size: drawn.update(f"{done:,} of {total:,} blobs, {format_bytes(size)}", done, total)


def of_checks(drawn: ProgressBar) -> Tell:
    """Draw `progress(done, total)` of files or shards that are checked."""
    return lambda done, total: drawn.update(f"checking {done:,} of {total:,}", done, total)


def of_lines(drawn: ProgressBar) -> Tell:
    """Draw `progress(JsonlProgress)`."""

    def tell(far: JsonlProgress) -> None:
        failed = f", {far.failed:,} failed" if far.failed else ""
        text = f"{far.done:,} of {far.total:,} lines, {format_bytes(far.total_bytes)}{failed}"
        drawn.update(text, far.done, far.total)

    return tell


def of_frames(drawn: ProgressBar) -> Tell:
    """Draw `progress(FramesProgress)`."""

    def tell(far: FramesProgress) -> None:
        failed = f", {far.failed:,} videos failed" if far.failed else ""
        drawn.update(f"decoding videos: {far.images:,} images{failed}", far.done, far.total)

    return tell


def of_words(drawn: ProgressBar) -> Tell:
    """Draw `progress(text)`."""
    return drawn.update
