"""Read and check JSON lines (one object a line: `url`, `path`, `label` and other fields), and sort them by path.

Used by `jsonl`. A file of any length is read in bounded memory: plain or gzip, with or without BOM, Unix or Windows
line ends. Above 50,000 lines, lines wait on disk; their other fields always do. A wrong line is a `Failure`; a wrong
file is a `UsageError`. One thread.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn
from urllib.parse import unquote, urlsplit

from xxhash import xxh3_128

from datacache.catalog.objects import MAX_OBJECT_BYTES
from datacache.core.errors import UsageError
from datacache.imports.failures import Failure, Failures, shown_url
from datacache.imports.places import WEB, ClosedPlaceError, Places, unusable
from datacache.manifest.builder import Sorter

MAX_LINE_BYTES = 1 << 20
_MAX_URL_BYTES = 8192
_CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")


class Line(NamedTuple):
    """One line that can be tried."""

    path: bytes
    number: int
    """Counted from 1."""
    url: str
    """A web address, or '' for an object of a store."""
    store: str
    """`WEB`, or the store's URL."""
    key: str
    fields: bytes
    """The line's other fields, as JSON without the braces; b'' where it was put aside."""
    aside: tuple[int, int] = (0, 0)
    """Where they lie that were put aside: offset and length."""

    @property
    def origin(self) -> str:
        """Return the whole address."""
        return self.url or f"{self.store}/{self.key}"

    @property
    def shown(self) -> str:
        """Return its address for reports."""
        return shown_url(self.origin)


class LinesFile:
    """An open file of JSON lines; `-` is standard input. Close it."""

    def __init__(self, file: Path | str) -> None:
        self.name = "-" if str(file) == "-" else str(Path(file).expanduser().absolute())
        self._file = _open(self.name)
        self.base = os.getcwd() if self.name == "-" else os.path.dirname(self.name)
        """The base of relative paths in it."""
        try:
            self.content = content_hash(self._file)
        except OSError as exc:
            raise UsageError(f"{self.name} cannot be read: {exc.strerror}") from exc

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield number and bytes of each line that is not blank; None for one that is too long. `UsageError` for what
        is no text file."""
        self._file.seek(0)
        start = self._file.read(4)
        self._file.seek(0)
        if start.startswith(_WIDE_BOMS):
            raise UsageError(f"{self.name} is UTF-16", hint="Write it as UTF-8.")
        stream: Any = gzip.GzipFile(fileobj=self._file) if start.startswith(b"\x1f\x8b") else self._file
        number = 0
        try:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(_BOM)
                if len(line) > MAX_LINE_BYTES:
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(MAX_LINE_BYTES)
                    yield number, None
                elif line := line.strip():
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as exc:
            raise UsageError(f"{self.name} cannot be decompressed after line {number}: {exc}") from exc
        except OSError as exc:
            raise UsageError(f"{self.name} cannot be read: {exc.strerror}") from exc

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def parse_line(number: int, line: bytes | None, places: Places) -> Line | Failure:
    """Return the line, checked, or what is wrong with it. `places` says where it may lead."""
    try:
        return _parse(number, line, places)
    except _LineError as exc:
        return Failure(number, shown_url(exc.url), exc.path, exc.code, exc.reason)
    except RecursionError:
        return Failure(number, "", "", "json", "the line is nested too deeply")


class _LineError(Exception):
    def __init__(self, code: str, reason: str, *, url: str = "", path: str = "") -> None:
        super().__init__(reason)
        self.code, self.reason, self.url, self.path = code, reason, url, path


def _parse(number: int, line: bytes | None, places: Places) -> Line:
    fields = _decode(line)
    url = fields.pop("url", None)
    if url is None or url == "":
        raise _LineError("field", "there is no url")
    if not isinstance(url, str):
        raise _LineError("field", f"url is not a string but {_kind(url)}")
    url = url.strip() if "://" in url else url
    store, key, name = _place(url, places)
    path = _path(fields, url, store, name)
    label = fields.get("label")
    if not _is_label(label) and not (isinstance(label, list) and all(map(_is_label, label))):
        raise _LineError(
            "field", f"label is neither a string nor a list of them but {_kind(label)}", url=url, path=path
        )
    try:
        rest = json.dumps(fields, ensure_ascii=False, allow_nan=False)[1:-1].encode() if fields else b""
    except ValueError:
        raise _LineError("json", "the line has a number that is too large", url=url, path=path) from None
    return Line(path.encode(), number, "" if store else url, store, key, rest)


def _decode(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise _LineError("json", f"the line is longer than {MAX_LINE_BYTES:,} bytes")
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError:
        raise _LineError("json", "the line is not UTF-8") from None
    except ValueError as exc:
        raise _LineError("json", f"the line is not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise _LineError("json", f"the line is not a JSON object but {_kind(value)}")
    if b"\\u" in line:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _LineError("json", "the line has half a character in it (a lone surrogate)") from None
    return value


def _place(url: str, places: Places) -> tuple[str, str, str]:
    """Return the store (`WEB` for a web address), the key in it, and its last part."""
    if len(url) > _MAX_URL_BYTES:
        raise _LineError("url", f"the URL is longer than {_MAX_URL_BYTES:,} characters", url=url)
    if "\0" in url:
        raise _LineError("url", "the URL has a NUL in it", url=url)
    try:
        store, key, name = places.find(url)
    except UsageError as exc:
        raise _LineError("url", exc.message, url=url) from None
    except ClosedPlaceError as exc:
        raise _LineError("access", str(exc), url=url) from None
    if store == WEB:
        try:
            host, _ = urlsplit(url).hostname, urlsplit(url).port
        except ValueError:
            host = None
        if not host:
            raise _LineError("url", "the URL has no host that could be asked", url=url)
        return WEB, "", ""
    if not key or key.endswith("/"):
        raise _LineError("url", "the URL names a folder, not an object", url=url)
    return store, key, name


def _path(fields: dict[str, Any], url: str, store: str, name: str) -> str:
    """Return where the object goes: `path`, or `file_name` as Hugging Face calls it, or the URL's last component."""
    path, alias = fields.pop("path", None), fields.pop("file_name", None)
    for field, value in (("path", path), ("file_name", alias)):
        if value is not None and not isinstance(value, str):
            raise _LineError("field", f"{field} is not a string but {_kind(value)}", url=url)
    if path is not None and alias is not None and path != alias:
        raise _LineError("field", "path and file_name are not the same", url=url, path=path)
    chosen: str | None = alias if path is None else path
    if chosen is None:
        chosen = name if store else unquote(urlsplit(url).path.rpartition("/")[2])
        if not chosen:
            raise _LineError("path", "there is no path, and the URL ends without a name", url=url)
    why = unusable(chosen)
    if why:
        raise _LineError("path", why, url=url, path=chosen)
    return chosen


def _is_label(value: Any) -> bool:
    # Numbers, because class numbers are labels too; None, because tables are written with nulls.
    return value is None or (isinstance(value, (str, int)) and not isinstance(value, bool))


def _kind(value: Any) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _open(name: str) -> IO[bytes]:
    try:
        file = sys.stdin.buffer if name == "-" else open(name, "rb")  # noqa: SIM115 - closed by LinesFile.close()
        if name != "-" and file.seekable():
            return file
        spool = tempfile.TemporaryFile()  # noqa: SIM115 - likewise
        shutil.copyfileobj(file, spool, _CHUNK)
        if name != "-":
            file.close()  # a pipe
        return spool
    except OSError as exc:
        raise UsageError(f"{name} cannot be opened: {exc.strerror}") from exc


def content_hash(file: IO[bytes]) -> str:
    """Return xxh3-128 of a file's bytes."""
    hash = xxh3_128()
    file.seek(0)
    while chunk := file.read(_CHUNK):
        hash.update(chunk)
    return hash.hexdigest()


METADATA = "metadata.jsonl"
"""Where the lines' other fields go: the name that Hugging Face's `imagefolder` reads."""
_METADATA_LINE = b'{"file_name": ""}\n'
_LINES_IN_MEMORY = 50_000
_MAX_STORES = 60_000


class Plan:
    """The lines of a file that can be tried, by path. Close it."""

    def __init__(self, file: LinesFile, failures: Failures, places: Places) -> None:
        self._failures = failures
        self.places, self.content = places, file.content
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
            self.tried += 1
            self.stores.add(line.store)
            size = len(line.fields)
            self.metadata_bytes += len(_METADATA_LINE) + len(line.path) + size
            self._fields.write(line.fields)
            self._sorter.add(line._replace(fields=b"", aside=(self.fields_bytes, size)))
            self.fields_bytes += size
        if not self.lines:
            raise UsageError(f"{file.name} holds no lines", hint='Write one JSON object a line: {"url": …, "path": …}')
        if taken and self.fields_bytes:
            raise UsageError(
                f"line {taken} goes to {METADATA}, where the lines' other fields go",
                hint="Give it another path, or leave the other fields out.",
            )
        if self.fields_bytes > MAX_OBJECT_BYTES or len(self.stores) > _MAX_STORES:
            raise UsageError("the file names too many stores, or has more than 1 GiB of fields", hint="Cut it in two.")

    def by_path(self, *, again: bool = False) -> Iterator[Line]:
        """Yield the lines, each path once: what comes later in the file is a failure, which is told unless they are
        gone through `again`."""
        self._fields.flush()
        last: Line | None = None
        for line in self._sorter.sorted():
            if last is not None and last.path == line.path:
                if again:
                    continue
                reason = f"its path is that of line {last.number} already"
                self._failures.add(Failure(line.number, line.shown, line.path.decode(), "duplicate", reason))
                self.tried -= 1
                continue
            yield line
            last = line

    def metadata(self, line: Line) -> bytes:
        """Return the line's line in the metadata."""
        at, length = line.aside
        fields = os.pread(self._fields.fileno(), length, at)
        name = json.dumps(line.path.decode(), ensure_ascii=False).encode()
        return b'{"file_name": %s%s%s}\n' % (name, b", " if fields else b"", fields)

    def close(self) -> None:
        """Give the temporary files back."""
        self._sorter.close()
        self._fields.close()
