"""Annotation tables in memory, for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from datacache.annotations.model import Annotation, Box, Problem
from datacache.annotations.table.ranges import Row
from datacache.annotations.table.table import EncodedRange, Table, TableBuilder, encode_range
from datacache.manifest import codec
from datacache.manifest.model import BlobId


class Blobs(dict[BlobId, bytes]):
    """Keep blobs as a catalog does, and which were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[BlobId] = []

    def put(self, blobs: Sequence[tuple[BlobId, bytes]]) -> None:
        self.update(blobs)

    def load(self, ids: Sequence[BlobId]) -> dict[BlobId, bytes]:
        self.loaded += ids
        return {id: self[id] for id in ids if id in self}


def ranges(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows cut as a manifest is."""
    part: list[Row] = []
    for row in rows:
        part.append(row)
        if codec.ends_range(row.path.encode("utf-8", "surrogateescape"), len(part)):
            yield part
            part = []
    if part:
        yield part


def encoded(rows: Iterable[Row]) -> list[EncodedRange]:
    """The ranges of the rows, each with a key that says what is in it."""
    return [
        encode_range(part, blake2b(repr(part).encode("utf-8", "replace"), digest_size=16).digest())
        for part in ranges(rows)
    ]


def build(rows: Iterable[Row], problems: Iterable[Problem] = (), blobs: Blobs | None = None, **meta: object) -> Table:
    """A table of the rows, which are in order."""
    blobs = Blobs() if blobs is None else blobs
    with TableBuilder(blobs.put) as builder:
        for part in encoded(rows):
            builder.add_range(part)
        for problem in problems:
            builder.add_problem(problem)
        root = builder.finish(meta)
    return Table.open(root, blobs.load)


def image(path: str, *boxes: Box, size: tuple[int, int] = (640, 480), labels: tuple[str, ...] = ()) -> Row:
    """The row of a usable image."""
    stem = path.rpartition("/")[2].rpartition(".")[0]
    return Row(Annotation(path, *size, boxes, labels, f"Annotations/{stem}.xml" if boxes else ""), path)


def box(label: str, x1: float = 10, y1: float = 20, x2: float = 30, y2: float = 60, **more: object) -> Box:
    """A box of 20 by 40 pixels, if nothing else is said."""
    return Box(label, float(x1), float(y1), float(x2), float(y2), **more)  # type: ignore[arg-type]


def broken(path: str) -> Row:
    """The row of an image that cannot be used."""
    return Row(None, path, (Problem("image-truncated", "skipped", path, 0, f"{path} is cut off"),))
