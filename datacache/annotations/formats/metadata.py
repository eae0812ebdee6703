"""`metadata.jsonl`: labels of whole images, one JSON object a line with `file_name` and `label`.

The convention of Hugging Face's `imagefolder` (https://huggingface.co/docs/datasets/image_dataset), which imports from
JSON lines write. A label is a string or a number; a list holds several. Other fields mean nothing here. Used by the
annotation table and by conversions. Pure functions, any thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from datacache.annotations.classes import decode
from datacache.annotations.formats.values import JSON, kind, to_text
from datacache.annotations.model import Draft, DraftFile, Problem, Problems, quote
from datacache.core.errors import AnnotationError

NAME: Final = b"metadata.jsonl"
"""The file's name, in any folder; its `file_name`s are relative to that folder."""


def is_metadata(path: str) -> bool:
    """Tell by a file's name whether it holds labels of whole images."""
    return path.rpartition("/")[2] == NAME.decode()


def parse(data: bytes, file: str) -> DraftFile:
    """Read the labels of each image, in the order of their first lines; `name` of a draft is the `file_name`.

    A line without an image is left out and reported; an image without a label is kept.
    `AnnotationError` for a file that is no text.
    """
    text = decode(data)
    if text is None:
        raise AnnotationError(f"{file} is neither UTF-8 nor GB18030", code="encoding", file=file)
    of_file = Problems(file)
    found: dict[str, tuple[int, list[str], Problems]] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        entry = _entry(line, number, of_file) if line.strip() else None
        if entry is None:
            continue
        name = entry["file_name"]
        begun = name in found
        first, labels, problems = found.setdefault(name, (number, [], Problems(file)))
        if begun:
            message = f"{quote(name)} has line {first} already; the labels of both are taken together"
            problems.add("image-repeated", "noted", message, number)
        given = entry.get("label")
        for label in given if isinstance(given, list) else [given]:
            if isinstance(label, (str, int)) and not isinstance(label, bool):
                labels.append(str(label))
            elif label is not None:
                message = f"the label {quote(to_text(label))} is neither a string nor a number; it is left out"
                problems.add("entry-malformed", "skipped", message, number)
    images: list[tuple[Draft, list[Problem]]] = [
        (Draft(file, name, labels=tuple(labels), line=number), problems)
        for name, (number, labels, problems) in found.items()
    ]
    return DraftFile(images, of_file, ())


def _entry(line: str, number: int, problems: Problems) -> dict[str, JSON] | None:
    """Read one line; None, and a problem, for one that names no image."""
    try:
        entry: JSON = json.loads(line)
    except (ValueError, RecursionError):
        message = f"{quote(line.strip())} is no JSON; the line is left out"
        problems.add("entry-malformed", "skipped", message, number)
        return None
    if not isinstance(entry, dict):
        message = f"the line is {kind(entry)}, not an object; it is left out"
        problems.add("entry-malformed", "skipped", message, number)
        return None
    name = entry.get("file_name")
    if isinstance(name, str) and name:
        return entry
    problems.add("image-unnamed", "skipped", "the line has no file_name; it is left out", number)
    return None


def write(images: Iterable[tuple[str, Sequence[str]]]) -> Iterator[bytes]:
    """Write the lines of images, given by their paths beside the file, with their labels."""
    for path, labels in images:
        yield json.dumps({"file_name": path, "label": labels[0] if len(labels) == 1 else list(labels)}).encode() + b"\n"
