"""How results, warnings and errors are shown.

- stdout carries the result and nothing else: text for people, or with `--json` one JSON value.
- stderr carries the rest: `error: …` and `hint: …`, `warning: …`, the progress bar. With `--json` it is one
  JSON object a line: `{"error": {"type", "message", "hint"}}`, `{"warning": "…"}` or `{"progress": "…"}`.
- A progress bar is drawn only where stderr is a terminal. Elsewhere what takes long says every `EVERY_S` seconds, in a
  line, how far it is: a log must not look as if nothing happened. A table is drawn with `rich` on a terminal; in a
  pipe it is columns of text, whole and without colour.

Used by `main` and the commands; one thread.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datacache.core.errors import UsageError
from datacache.core.progress import ProgressBar, bar

SHOWN = 50
"""Lines of a listing for people, of which `--json` has all."""
_LINES_IN_MEMORY_BYTES = 8 * 2**20
EVERY_S = 10.0


def format_time(stamp: str) -> str:
    """`2026-01-31T12:00:00Z` → `2026-01-31 12:00:00`, still UTC."""
    return stamp.replace("T", " ").removesuffix("Z")


NEXT_LINE = "\n       "
"""Between the parts of an error that has several."""


def write_file(path: Path, data: bytes, option: str) -> None:
    """Write a whole file or nothing. `UsageError` where it cannot be written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as exc:
        partial.unlink(missing_ok=True)
        raise UsageError(f"{option}: {path} cannot be written: {exc.strerror}") from exc


def printable(text: str) -> str:
    """The text without anything a terminal would obey: control characters as `\\x1b`, bytes 0x80 to 0x9f, which some
    terminals take for such, as `\\udc9b`. Other bytes that are no text stay: they are parts of names."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or "\udca0" <= c <= "\udcff" else repr(c)[1:-1] for c in text)


class Progress:
    """A bar that is updated in place; without a `bar`, a line for `say` now and then."""

    def __init__(self, say: Callable[[str], None], bar: ProgressBar | None = None) -> None:
        self._say, self._bar = say, bar
        self._last = time.monotonic()

    def update(self, text: str, done: float = 0, total: float | None = None) -> None:
        """Show where things are."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(text, done, total)
        elif now - self._last >= EVERY_S:
            self._last = now
            self._say(f"{text} ({done / total:.0%})" if total else text)


class Lines:
    """Lines that wait until what goes before them is known: in memory, and where there are many, on disk. Close it."""

    def __init__(self) -> None:
        from tempfile import SpooledTemporaryFile

        self._spool = SpooledTemporaryFile(  # noqa: SIM115 - closed by __exit__
            _LINES_IN_MEMORY_BYTES, "w+", encoding="utf-8", errors="surrogateescape", newline="\n"
        )
        self._count = 0

    def add(self, text: str) -> None:
        """One more line."""
        self._spool.write(f"{text}\n")
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        self._spool.seek(0)
        for line in self._spool:
            yield line[:-1]

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._spool.close()


class Output:
    """Prints. `json` is set by `--json`; `bars` tells whether bars are drawn on a terminal."""

    def __init__(self, bars: Callable[[], bool] = lambda: True) -> None:
        self.json = False
        self._bars = bars

    def result(self, value: Any, text: str = "") -> None:
        """The command's result: `value` with `--json`, otherwise `text`."""
        if self.json:
            print(json.dumps(value, indent=2 if sys.stdout.isatty() else None))
        elif text:
            print(text)

    def result_with(self, value: dict[str, Any], name: str, items: Iterable[str] | None) -> None:
        """With `--json`: `value` with one more field, an array of JSON texts that may be long; for None without."""
        if not self.json:
            return
        if items is None:
            self.result(value)
            return
        print(f"{json.dumps(value)[:-1]}, {json.dumps(name)}: ", end="")
        self.array(items, end="}\n")

    def array(self, items: Iterable[str], *, end: str = "\n") -> None:
        """An array of JSON texts, printed as they come."""
        print("[", end="")
        separator = "\n"
        for item in items:
            print(f"{separator}{item}", end="")
            separator = ",\n"
        print("]", end=end)

    def lines(self, texts: Iterable[str]) -> None:
        """Lines for people; nothing with `--json`, and then they are not made."""
        for text in texts if not self.json else ():
            print(text)

    def line(self, text: str = "") -> None:
        """A line for people; nothing with `--json`."""
        if not self.json:
            print(text)

    def fields(self, texts: dict[str, str]) -> None:
        """A line for each label that has a text, for people."""
        self.lines(f"{label + ':':10}{printable(text)}" for label, text in texts.items() if text)

    def warning(self, message: str) -> None:
        """Something to know that is no failure."""
        if self.json:
            print(json.dumps({"warning": message}), file=sys.stderr)
        else:
            print(f"warning: {printable(message)}", file=sys.stderr)

    def error(self, kind: str, message: str, hint: str) -> None:
        """Why the command failed, and what to do."""
        if self.json:
            print(json.dumps({"error": {"type": kind, "message": message, "hint": hint}}), file=sys.stderr)
            return
        lines = [printable(line) for line in message.split(NEXT_LINE)]
        print(f"error: {NEXT_LINE.join(lines)}", file=sys.stderr)
        if hint:
            print(f"hint: {printable(hint)}", file=sys.stderr)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
        """A table for people; `right` are the columns of numbers. Nothing with `--json`."""
        if self.json:
            return
        clean = [[printable(cell) for cell in row] for row in rows]
        if sys.stdout.isatty():
            from rich import box
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text

            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for n, header in enumerate(headers):
                table.add_column(header, justify="right" if n in right else "left", overflow="fold")
            for cells in clean:
                table.add_row(*map(Text, cells))
            Console(highlight=False).print(table)
            return
        widths = [max(len(row[n]) for row in [headers, *clean]) for n in range(len(headers))]
        for row in [headers, *clean]:
            cells = [
                cell.rjust(width) if n in right else cell.ljust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells).rstrip())

    def listing(
        self,
        values: Sequence[Any],
        headers: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        right: Sequence[int] = (),
        empty: str,
    ) -> None:
        """The command's result: `values` with `--json`, otherwise a table, or the line `empty` where there are none."""
        self.result(values)
        if values:
            self.table(headers, rows, right=right)
        else:
            self.line(empty)

    @contextmanager
    def progress(self, text: str) -> Iterator[Progress]:
        """A progress bar on a terminal; elsewhere a line every `EVERY_S` seconds."""
        with bar(text, wanted=self._bars()) as drawn:
            yield Progress(lambda state: self._progress_line(f"{text}: {state}" if state != text else text), drawn)

    def _progress_line(self, text: str) -> None:
        print(json.dumps({"progress": text}) if self.json else printable(text), file=sys.stderr, flush=True)

    def log_to_stderr(self, level: int) -> None:
        """Show what the libraries log, as warnings."""
        logging.basicConfig(level=level, handlers=[_LogHandler(self)], format="%(message)s", force=True)


class _LogHandler(logging.Handler):
    def __init__(self, out: Output) -> None:
        super().__init__()
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self._out.warning(self.format(record))
        else:
            print(f"{record.levelname.lower()}: {record.name}: {self.format(record)}", file=sys.stderr)
