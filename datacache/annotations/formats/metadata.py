"""`metadata.jsonl`: labels of whole images, one JSON object a line with `file_name` and `label`.

The convention of Hugging Face's `imagefolder` (https://huggingface.co/docs/datasets/image_dataset); imports from JSON
lines write it. A label is a string or a number; a list holds several. Other fields mean nothing here. Used by the
annotation table and by conversions. Pure functions, any thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from datacache.annotations.classes import decode
from datacache.annotations.formats.values import JSON, kind, to_text
from datacache.annotations.model import Action, Draft, DraftFile, Problem
from datacache.annotations.problems import quote
from datacache.core.errors import AnnotationError

NAME: Final = b"metadata.jsonl"
"""What such a file is called, in any folder; its `file_name`s are relative to it."""


def is_metadata(path: str) -> bool:
    """Whether a file, by its name, holds labels of whole images."""
    return path.rpartition("/")[2] == NAME.decode()


def parse(data: bytes, file: str) -> DraftFile:
    """The labels of each image, in the order of their first lines; `name` of a draft is the `file_name`.

    A line that says nothing of an image is left out and reported; an image without a label is there without one.
    `AnnotationError` for a file that is no text.
    """
    text = decode(data)
    if text is None:
        raise AnnotationError(f"{file} is neither UTF-8 nor GB18030", code="encoding", file=file)
    reader = _Lines(file)
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if line.strip():
            reader.line(line, number)
    return reader.finish()


def write(images: Iterable[tuple[str, Sequence[str]]]) -> Iterator[bytes]:
    """The lines of images, given by their paths beside the file, with their labels."""
    for path, labels in images:
        yield json.dumps({"file_name": path, "label": labels[0] if len(labels) == 1 else list(labels)}).encode() + b"\n"


class _Lines:
    """The images and problems of one file while it is read."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._images: dict[str, tuple[int, list[str], list[Problem]]] = {}
        self._lost: list[Problem] = []

    def line(self, line: str, number: int) -> None:
        """Take one line."""
        try:
            entry: JSON = json.loads(line)
        except (ValueError, RecursionError):
            self._lose("entry-malformed", number, f"{quote(line.strip())} is no JSON; the line is left out")
            return
        if not isinstance(entry, dict):
            self._lose("entry-malformed", number, f"the line is {kind(entry)}, not an object; it is left out")
            return
        name = entry.get("file_name")
        if not isinstance(name, str) or not name:
            self._lose("image-unnamed", number, "the line has no file_name; it is left out")
            return
        begun = name in self._images
        first, labels, problems = self._images.setdefault(name, (number, [], []))
        if begun:
            message = f"{quote(name)} has line {first} already; the labels of both are taken together"
            problems.append(self._problem("image-repeated", "noted", number, message))
        given = entry.get("label")
        for label in given if isinstance(given, list) else [given]:
            if isinstance(label, (str, int)) and not isinstance(label, bool):
                labels.append(str(label))
            elif label is not None:
                message = f"the label {quote(to_text(label))} is neither a string nor a number; it is left out"
                problems.append(self._problem("entry-malformed", "skipped", number, message))

    def finish(self) -> DraftFile:
        """All of it."""
        images = [
            (Draft(self._file, name, labels=tuple(labels), line=number), problems)
            for name, (number, labels, problems) in self._images.items()
        ]
        return DraftFile(images, self._lost, ())

    def _lose(self, code: str, number: int, message: str) -> None:
        self._lost.append(self._problem(code, "skipped", number, message))

    def _problem(self, code: str, action: Action, number: int, message: str) -> Problem:
        return Problem(code, action, self._file, number, message)
