"""Find images that repeat others: of the same bytes, or alike to the eye.

Used by `api.dedupe`. Of images that repeat each other the one with the most objects is kept, and of several such the
first path. Two images are alike where their hashes, of 64 bits, differ in few: whether each of 8 by 8 places is lighter
than its left neighbour, in shades of grey (dHash; Krawetz, "Kind of Like That", 2013). What is alike to an image that
is left out may stay: chains of small differences do not make one image of many. Images of one colour are all alike.

Images are decoded in worker processes, JPEGs at a fraction of their size. Memory is some hundred bytes an image. NumPy
and Pillow are imported here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import PIL.Image
import simplejpeg
from numpy.typing import NDArray

from datacache.annotations.image_header import read_header
from datacache.annotations.layout import text
from datacache.annotations.table.table import Table
from datacache.conversion.contents import ImageContents
from datacache.conversion.files import Files, Part
from datacache.conversion.images import decode, expect_decodable
from datacache.conversion.index import with_entries
from datacache.core.errors import AnnotationError, BrokenImageError, UsageError
from datacache.core.parallel import Workers, ordered_map
from datacache.reader.snapshot import Snapshot

MOST_BITS = 8
"""More make half of all images alike, and take a day to compare a million."""
_BITS_OF = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1).sum(1, dtype=np.uint8)
_AT_A_TIME = 64
_UNKNOWN = -1
Numbers = NDArray[np.int64]
Hashes = NDArray[np.uint64]


class Repeat(NamedTuple):
    """An image that repeats another one."""

    path: str
    kept: str
    """The image that it repeats."""
    similar: bool
    """True: the pictures are alike; False: the bytes are the same."""


def find_repeats(
    snapshot: Snapshot,
    table: Table,
    *,
    similar: int | None = None,
    processes: Workers = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> list[Repeat]:
    """Return the images of a table that repeat others, in the order of their paths. With `similar`, also those whose
    hashes differ in so many bits at most. `UsageError` for more than `MOST_BITS`; the store's errors."""
    if similar is not None and not 0 <= similar <= MOST_BITS:
        raise UsageError(f"hashes of images can differ in 0 to {MOST_BITS} bits, not in {similar}")
    manifest = snapshot.manifest
    objects = np.full(manifest.rows, _UNKNOWN, np.int64)  # by row of the manifest; stays so for what is no usable image
    for row, number, _ in with_entries(manifest, table.rows()):
        if row.annotation is not None:
            objects[number] = len(row.annotation.boxes)
    kept = np.arange(manifest.rows)
    for group in ImageContents([snapshot], progress).groups():
        usable = [place.row for place in group if objects[place.row] != _UNKNOWN]
        if usable:
            kept[usable] = max(usable, key=lambda row: (objects[row], -row))
    same = kept.copy()
    if similar is not None:
        left = np.flatnonzero((objects != _UNKNOWN) & (kept == np.arange(len(kept))))
        left = left[np.lexsort((left, -objects[left]))]  # the best first
        rows, hashes = _hashes(snapshot, left, processes, progress)
        kept[rows] = rows[_first_alike(hashes, similar)]
        kept = kept[same]
    return [
        Repeat(text(manifest.path(row)), text(manifest.path(int(kept[row]))), bool(kept[row] != same[row]))
        for row in np.flatnonzero(kept != np.arange(len(kept))).tolist()
    ]


def _hashes(
    snapshot: Snapshot, rows: Numbers, processes: Workers, progress: Callable[[str, int, int], None]
) -> tuple[Numbers, Hashes]:
    """Return those of the rows whose images can be decoded, in their order, and their hashes."""
    by_row = np.argsort(rows)
    places = rows[by_row]
    tasks = (places[at : at + _AT_A_TIME] for at in range(0, len(places), _AT_A_TIME))
    found, decoded = array("Q"), bytearray()
    for hashes in ordered_map(_Hasher(snapshot), tasks, processes=processes):
        found.extend(value or 0 for value in hashes)
        decoded += bytes(value is not None for value in hashes)
        progress("looking at", len(found), len(rows))
    back = np.argsort(by_row)
    usable = np.frombuffer(decoded, np.bool_)[back]
    return rows[usable], np.frombuffer(found, np.uint64)[back][usable]


class _Hasher:
    """Hashes images. Made by the caller, used in each worker."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._files = Files(snapshot)

    def work(self, rows: Numbers) -> list[int | None]:
        """Return the hash of each image; None for one that cannot be decoded."""
        manifest = self._files.snapshot.manifest
        parts = (Part(row, manifest.entry(row).size_bytes) for row in rows.tolist())
        found = [image_hash(bytes(data)) for data in self._files.read(parts)]
        self._files.done()
        return found


def image_hash(data: bytes) -> int | None:
    """Return the hash of an image; None where it cannot be decoded."""
    try:
        expect_decodable(data, read_header(data), "")
        grey = simplejpeg.decode_jpeg(data, "GRAY", min_height=32, min_width=36)[:, :, 0]
    except (AnnotationError, BrokenImageError):
        return None
    except ValueError:  # no JPEG, or one that needs a second look
        try:
            pixels = decode(data, "").pixels
        except AnnotationError:
            return None
        pixels = (pixels >> 8).astype(np.uint8) if pixels.dtype == np.uint16 else pixels
        if pixels.ndim == 3:
            colours = 1 if pixels.shape[2] < 3 else 3
            pixels = (pixels[:, :, :colours].sum(2, dtype=np.uint16) // colours).astype(np.uint8)
        grey = pixels
    small = PIL.Image.fromarray(np.ascontiguousarray(grey)).resize((9, 8), PIL.Image.Resampling.BOX)
    shades = np.asarray(small)
    return int.from_bytes(np.packbits(shades[:, 1:] > shades[:, :-1]).tobytes(), "big")


def _first_alike(hashes: Hashes, bits: int) -> Numbers:
    """Return for each hash, the best first, the first one kept that it is alike; itself for those that are kept."""
    values, firsts, value_of = np.unique(hashes, return_index=True, return_inverse=True)
    pairs = [np.empty((0, 2), np.int64), *_near(values, bits)]
    near = np.unique(np.concatenate([*pairs, *(pair[:, ::-1] for pair in pairs)]), axis=0)
    starts = np.searchsorted(near[:, 0], np.arange(len(values) + 1))
    chosen = np.full(len(values), _UNKNOWN, np.int64)
    for value in np.argsort(firsts).tolist():
        if chosen[value] == _UNKNOWN:
            chosen[value] = value
            others = near[starts[value] : starts[value + 1], 1]
            chosen[others[chosen[others] == _UNKNOWN]] = value
    found: Numbers = firsts[chosen[value_of]]
    return found


def _near(values: Hashes, bits: int) -> Iterator[Numbers]:
    """Yield the pairs of places whose values, all different, differ in few bits. Of one band of bits more than that
    many, one is equal: only those are compared that have an equal band."""
    edges = np.linspace(0, 64, bits + 2).astype(int).tolist()
    for low, high in pairwise(edges):
        band = values >> np.uint64(low) & np.uint64(2 ** (high - low) - 1)
        order = np.argsort(band, kind="stable")
        band, here = band[order], np.arange(len(order))
        for step in range(1, len(order)):
            here = here[here + step < len(order)]
            here = here[band[here] == band[here + step]]
            if not here.size:
                break
            one, other = order[here], order[here + step]
            differ = (values[one] ^ values[other]).view(np.uint8).reshape(-1, 8)
            close = _BITS_OF[differ].sum(1) <= bits
            yield np.stack((one[close], other[close]), axis=1)
