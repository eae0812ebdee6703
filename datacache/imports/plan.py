"""What a file of JSON lines asks for: each line checked, those that can be tried sorted by path.

Used by `jsonl`. Bounded memory: above 50,000 lines they wait on disk, and what they say besides URL and path always
does. One thread.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from operator import attrgetter
from typing import IO

from datacache.catalog.objects import MAX_OBJECT_BYTES
from datacache.core.errors import UsageError
from datacache.imports.failures import Failure, Failures
from datacache.imports.lines import Line, LinesFile, parse_line
from datacache.imports.places import Places
from datacache.manifest.builder import Sorter

METADATA = "metadata.jsonl"
"""Where the lines' other fields go: the name that Hugging Face's `imagefolder` reads."""
_METADATA_LINE = b'{"file_name": ""}\n'
_LINES_IN_MEMORY = 50_000
_MAX_STORES = 60_000


class Plan:
    """The lines of a file that can be tried, by path. Close it."""

    def __init__(self, file: LinesFile, failures: Failures, places: Places) -> None:
        self._failures = failures
        self.places = places
        self._sorter: Sorter[Line] = Sorter(attrgetter("path"), rows_in_memory=_LINES_IN_MEMORY)
        self._fields: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self.lines = 0
        self.tried = 0
        self.fields_bytes = 0
        self.metadata_bytes = 0
        """How large the metadata will be at least, if every line can be had and there is any."""
        self.stores: set[str] = set()
        taken = 0
        for number, data in file.lines():
            self.lines += 1
            line = parse_line(number, data, places)
            if isinstance(line, Failure):
                failures.add(line)
                continue
            if line.path == METADATA.encode() or line.path.startswith(METADATA.encode() + b"/"):
                taken = number
            self._add(line)
        if not self.lines:
            raise UsageError(f"{file.name} holds no lines", hint='Write one JSON object a line: {"url": …, "path": …}')
        if taken and self.fields_bytes:
            raise UsageError(
                f"line {taken} goes to {METADATA}, where the lines' other fields go",
                hint="Give it another path, or leave the other fields out.",
            )
        if self.fields_bytes > MAX_OBJECT_BYTES or len(self.stores) > _MAX_STORES:
            raise UsageError("the file names too many stores, or has more than 1 GiB of fields", hint="Cut it in two.")

    def _add(self, line: Line) -> None:
        self.tried += 1
        self.stores.add(line.store)
        self.metadata_bytes += len(_METADATA_LINE) + len(line.path) + len(line.fields)
        if line.fields:
            self._fields.write(line.fields)
            line = line._replace(fields=b"", aside=(self.fields_bytes, len(line.fields)))
            self.fields_bytes += line.aside[1]
        self._sorter.add(line)

    def by_path(self) -> Iterator[Line]:
        """The lines, each path once: what comes later in the file is a failure."""
        self._fields.flush()
        last: Line | None = None
        for line in self._sorter.sorted():
            if last is not None and last.path == line.path:
                reason = f"its path is that of line {last.number} already"
                self._failures.add(Failure(line.number, line.shown, line.path.decode(), "duplicate", reason))
                self.tried -= 1
                continue
            yield line
            last = line

    def metadata(self, line: Line) -> bytes:
        """The line's line in the metadata."""
        at, length = line.aside
        fields = os.pread(self._fields.fileno(), length, at)
        name = json.dumps(line.path.decode(), ensure_ascii=False).encode()
        return b'{"file_name": %s%s%s}\n' % (name, b", " if fields else b"", fields)

    def close(self) -> None:
        """Give the temporary files back."""
        self._sorter.close()
        self._fields.close()
