"""Lists in a large JSON file, element by element, and texts line by line: all of a file as Python's values is ten times
its size.

An element or a line that is too long, or nested too deep, is passed over, and what follows it is read. Used by the
readers of files about many images. A `JsonFile` may be read from again and again; one thread.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from datacache.annotations.classes import decode
from datacache.annotations.formats.values import JSON, load
from datacache.annotations.model import Problems
from datacache.core.errors import AnnotationError

MAX_ELEMENT: Final = 8 * 2**20
"""Characters of an element or a line: so many numbers are read in 0.4 seconds, and take 75 MiB."""
MAX_SKIPPED: Final = 32 * 2**20
"""Bytes of an element or a line that is passed over; where one is longer, what follows is not looked for."""
_WINDOW: Final = 2**18
"""Bytes at a time: what is made of them for a while takes thirty times as much."""
_MAX_RECODED: Final = 64 * 2**20
_SPACES: Final = re.compile(r"[ \t\n\r]*")
_BETWEEN: Final = re.compile(r"[ \t\n\r]*(?:,[ \t\n\r]*(?=[^ \t\n\r\]])|\])")
_ESCAPED: Final = re.compile(rb"\\.", re.DOTALL)
_MARK: Final = re.compile(rb"[\[\]{}]")
_STEPS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_MARKS: Final = bytes(byte for byte in range(256) if byte not in (*_STEPS, ord('"')))
_utf8: Final = codecs.getincrementaldecoder("utf-8")
_decode: Final = json.JSONDecoder().raw_decode
T = TypeVar("T")


class Data(Protocol):
    """The bytes of a file: bytes, a view of memory, or what is read piece by piece."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> bytes | memoryview: ...


class _DataStream(io.RawIOBase):
    """The bytes of a file from the beginning on."""

    def __init__(self, data: Data) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        raw = self._data[self._at : self._at + len(into)]
        into[: len(raw)] = raw
        self._at += len(raw)
        return len(raw)


def read_lines(
    data: Data, problems: Problems, *, newline: str | None = "\n", errors: str = "strict"
) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text in UTF-8, without their ends, and their numbers from 1 on.

    A line of more than `MAX_ELEMENT` characters is reported and passed over. `newline` and `errors` are those of
    `open()`. `UnicodeDecodeError` for other encodings.
    """
    text = io.TextIOWrapper(io.BufferedReader(_DataStream(data), _WINDOW), "utf-8-sig", errors, newline)
    number = 0
    while line := text.readline(MAX_ELEMENT + 1):
        number += 1
        if len(line) <= MAX_ELEMENT:
            yield number, line.removesuffix("\n")
            continue
        length, left_out = len(line), "it is left out"
        while not line.endswith("\n") and (line := text.readline(_WINDOW)):
            length += len(line)
            if length > MAX_SKIPPED:
                left_out = "it and what follows are left out"
                break
        message = f"the line is longer than {MAX_ELEMENT >> 20} MiB; {left_out}"
        problems.add("line-malformed", "skipped", message, number)
        if length > MAX_SKIPPED:
            return


def in_utf8(parse: Callable[[Data], T], data: Data, file: str) -> T:
    """Return what `parse` makes of a file, recoded where it is not in UTF-8; `AnnotationError` where it cannot be."""
    try:
        return parse(data)
    except UnicodeDecodeError:
        message = f"{file} is neither UTF-8 nor, in {_MAX_RECODED >> 20} MiB, GB18030"
        return parse(_recode(data, AnnotationError(message, code="encoding", file=file)))


def _recode(data: Data, error: AnnotationError) -> bytes:
    text = decode(bytes(data[:])) if len(data) <= _MAX_RECODED else None
    if text is None:
        raise error from None
    return text.encode()


class PassedOver(NamedTuple):
    """An element that was not read."""

    reason: str


class JsonFile:
    """The object that a file is, or the list, whose name is ''. `AnnotationError` where it is neither, here and while
    its lists are read."""

    def __init__(self, data: Data, file: str) -> None:
        self._file, self._data = file, data
        self._starts: dict[str, int] = {}
        self.whole = True
        """False: it goes on behind an element that is too long to be passed over."""
        try:
            self._find_members()
        except UnicodeDecodeError:
            self._data = _recode(
                data, AnnotationError(f"{file} is no JSON: it is not in UTF-8", code="json-broken", file=file)
            )
            self._find_members()

    def _find_members(self) -> None:
        data = self._data
        here = _Place(data, self._file, len(codecs.BOM_UTF8) * (data[:3] == codecs.BOM_UTF8))
        if here.next() == "[":
            self._starts[""] = here.byte()
            self.whole = here.pass_over(level=1)
            self._end(here)
            return
        if here.next() != "{":
            if len(data) <= MAX_ELEMENT:
                load(bytes(data[:]), self._file)  # says what is wrong with it
            raise AnnotationError(f"{self._file} is no JSON object", code="not-coco", file=self._file)
        here.step()
        while here.next() != "}":
            name = here.value()
            if not isinstance(name, str) or here.next() != ":":
                raise here.broken("a name and a colon are expected")
            here.step()
            here.next()
            self._starts[name] = here.byte()
            self.whole = here.pass_over(level=1)
            if not self.whole:
                return
            if here.next() == ",":
                here.step()
                if here.next() == "}":
                    raise here.broken("a name is expected")
            elif here.next() != "}":
                raise here.broken("a comma is expected")
        here.step()
        self._end(here)

    def _end(self, here: _Place) -> None:
        if self.whole and here.next():
            raise here.broken("there is more behind its end")

    def kind(self, name: str) -> str:
        """Return the first character of a member; '' where there is none, or null."""
        start = self._starts.get(name)
        first = "" if start is None else bytes(self._data[start : start + 1]).decode()
        return "" if first == "n" else first

    def elements(self, name: str) -> Iterator[JSON | PassedOver]:
        """Yield the elements of a list."""
        here = _Place(self._data, self._file, self._starts[name] + 1)
        if here.next() == "]":
            return
        while True:
            value = here.value()
            yield value
            if here.lost or not here.to_next_element():
                return


class _Place:
    """A place in a file, and the text from there on."""

    def __init__(self, data: Data, file: str, start: int) -> None:
        self._data, self._file = data, file
        self.lost = False
        """An element was too long to be passed over."""
        self._go_to(start)

    def _go_to(self, byte: int) -> None:
        self._decoder = _utf8()
        self._end, self._text, self._at = byte, "", 0

    def byte(self) -> int:
        """Return the place, in bytes."""
        return self._end - len(self._decoder.getstate()[0]) - len(self._text[self._at :].encode())

    def next(self) -> str:
        """Return the next character that is no space; '' at the end."""
        while True:
            found = _SPACES.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read(_WINDOW):
                return ""

    def step(self) -> None:
        """Pass over one character."""
        self._at += 1

    def to_next_element(self) -> bool:
        """Go to the next element of a list. False: it has ended."""
        while (found := _BETWEEN.match(self._text, self._at)) is None:
            if len(self._text) - self._at > MAX_ELEMENT or not self._read(_WINDOW):
                self.next()
                raise self.broken("a comma or the end of a list is expected")
        self._at = found.end()
        return self._text[self._at - 1] != "]"

    def value(self) -> JSON | PassedOver:
        """Read a value."""
        while True:
            try:
                value, end = _decode(self._text, self._at)
                rest = self._text[end : end + 3]
                if rest and (rest[0] not in ".eE" or len(rest) > 2):  # else a number may go on in the next piece
                    self._at = end
                    return value
                wrong = None
            except json.JSONDecodeError as exc:
                wrong = exc.msg, exc.pos  # the error has the text, and would stay until the collector comes
            except RecursionError:
                return self._passed_over("is nested too deep")
            except ValueError:  # a number of thousands of digits
                return self._passed_over("has a number with too many digits")
            length = len(self._text) - self._at
            if length >= MAX_ELEMENT:
                return self._passed_over(f"is longer than {MAX_ELEMENT >> 20} MiB")
            if not self._read(_WINDOW if length < _WINDOW else MAX_ELEMENT - length):
                if wrong:
                    raise self.broken(*wrong)
                self._at = end
                return value

    def _passed_over(self, reason: str) -> PassedOver:
        place = self.byte()
        self.lost = self._text[self._at] not in "[{" or not self.pass_over(level=0)
        if self.lost:
            return PassedOver(f"(at byte {place:,}) {reason}, and so long that what follows is not read")
        return PassedOver(f"(at byte {place:,}) {reason}")

    def pass_over(self, *, level: int) -> bool:
        """Pass over a value without reading it. False where `MAX_SKIPPED` bytes are deeper in it than `level`."""
        if self._text[self._at : self._at + 1] not in ("[", "{"):
            self.value()
            return not self.lost
        at = begun = self.byte()
        depth, quoted, checked = 0, 0, _utf8()
        while raw := bytes(self._data[at : at + _WINDOW]):
            if not raw.isascii():
                checked.decode(raw)
            if b"\\" in raw:
                raw = _ESCAPED.sub(b"__", raw)
                raw = raw[: len(raw) - (raw[-1:] == b"\\" and len(raw) > 1)]
            parts = raw.translate(None, _NO_MARKS).split(b'"')
            marks = b"".join(parts[quoted::2])
            depths = list(accumulate(map(_STEPS.__getitem__, marks), initial=depth))[1:]
            if 0 in depths:
                blank = b'"'.join(
                    part if n % 2 == quoted else bytes(len(part)) for n, part in enumerate(raw.split(b'"'))
                )
                end = next(islice(_MARK.finditer(blank), depths.index(0), None)).end()
                self._go_to(at + end)
                return True
            at += len(raw)
            quoted ^= len(parts) % 2 ^ 1
            depth = depths[-1] if depths else depth
            if level in depths or not (quoted or depth > level):
                begun = at
            if at - begun > MAX_SKIPPED:
                return False
        self._at = len(self._text)
        raise self.broken("it ends too early")

    def broken(self, reason: str, at: int | None = None) -> AnnotationError:
        """Return the error that the file is no JSON, at a place of the text."""
        self._at = self._at if at is None else at
        byte = self.byte()
        line = 1 + sum(bytes(self._data[n : min(n + _WINDOW, byte)]).count(b"\n") for n in range(0, byte, _WINDOW))
        message = f"{self._file} is no JSON: {reason} in line {line:,}, at byte {byte:,}"
        return AnnotationError(message, code="json-broken", file=self._file, line=line)

    def _read(self, count: int) -> bool:
        """Read some more. False at the end."""
        raw = bytes(self._data[self._end : self._end + count])
        self._end += len(raw)
        self._text = self._text[self._at :] + self._decoder.decode(raw)
        self._at = 0
        return bool(raw)
