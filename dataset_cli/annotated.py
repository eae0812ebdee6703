"""What the commands that look at annotations share: how they are to be read, opening them, writing a picture.

A snapshot's annotations are read when they are first asked for, which shows a progress bar, and are in the catalog from
then on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dataset_cli.app import App

if TYPE_CHECKING:
    from datacache.api import Snapshot, Table
    from dataset_cli.output import Progress

_F = TypeVar("_F", bound=Callable[..., Any])


def reading_options(command: _F) -> _F:
    """`--format`, `--voc-origin`, `--trust-sizes`, `--decode`; the command passes them on to `open_annotations`."""
    for option in (
        click.option("--decode", is_flag=True, help="Decode every image: finds JPEGs that were cut in their middle."),
        click.option(
            "--trust-sizes", is_flag=True, help="Take images' sizes from the annotations: no image is opened."
        ),
        click.option(
            "--voc-origin", type=click.IntRange(0, 1), default=0, show_default=True, help="1: VOC pixels count from 1."
        ),
        click.option("--format", metavar="FORMAT", help="What the annotations are in, where that cannot be told."),
    ):
        command = option(command)
    return command


@contextmanager
def open_annotations(app: App, ref: str, **how: Any) -> Iterator[tuple[Snapshot, Table]]:
    """A snapshot and its annotations, for as long as the `with` lasts. `how` is what `reading_options` gave."""
    from datacache import api

    with ExitStack() as opened:
        with ExitStack() as while_reading:
            bar: Progress | None = None

            def show(what: str, done: int, total: int) -> None:
                nonlocal bar
                if bar is None:  # not before: where nothing has to be read, a terminal shows and loads nothing
                    bar = while_reading.enter_context(app.out.progress(f"reading annotations of {ref}"))
                bar.update(f"{what} {done:,} images", done, total)

            found = opened.enter_context(api.open_annotations(ref, settings=app.settings, progress=show, **how))
        yield found


def write_file(path: Path, data: bytes, option: str) -> None:
    """Write a whole file or nothing. `UsageError` where it cannot be written."""
    from datacache.core.errors import UsageError

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as exc:
        partial.unlink(missing_ok=True)
        raise UsageError(f"{option}: {path} cannot be written: {exc.strerror}") from exc
