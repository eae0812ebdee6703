"""Find the images that have the same bytes, in one snapshot or in several.

Used by whatever brings data sets together and looks for repetitions. An object that two entries name is the same
without a look at it, and the key of a copy says what its bytes are. Of all others those are read that are as large as
another one. 128 bits of a hash decide. Memory is some hundred bytes an image. One thread. NumPy is imported here.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from datacache.annotations.pairing import is_image
from datacache.conversion.files import Data, Files, Part
from datacache.core.ids import CONTENT_KEY, names_its_content, object_id
from datacache.manifest.model import PACKS, Entry
from datacache.manifest.reader import Manifest
from datacache.reader.snapshot import Snapshot

_HEX = re.compile("[0-9a-f]{32}")
_DIGEST = np.dtype([("high", "<u8"), ("low", "<u8")])
Numbers = NDArray[np.int64]


class ImageRow(NamedTuple):
    """An image: the number of its snapshot, and its row in the manifest there."""

    snapshot: int
    row: int


class ImageContents:
    """Images of several snapshots by what their bytes are."""

    def __init__(
        self, snapshots: Sequence[Snapshot], progress: Callable[[str, int, int], None] = lambda _what, _done, _all: None
    ) -> None:
        """Look at all images. Raise the store's errors."""
        rows, sizes, starts = array("q"), array("q"), [0]
        names, hashed = bytearray(), bytearray()
        for snapshot in snapshots:
            for row, entry in enumerate(snapshot.manifest.entries()):
                if is_image(entry.path) and entry.has_object:
                    name, is_hash = _name(snapshot.manifest, entry)
                    rows.append(row)
                    sizes.append(entry.size_bytes)
                    names += name
                    hashed.append(is_hash)
            starts.append(len(rows))
        self._rows, self._starts = np.array(rows, np.int64), np.array(starts)
        digests = np.frombuffer(names, _DIGEST)
        _, firsts, object_of = np.unique(digests, return_index=True, return_inverse=True)
        _, size_of, times = np.unique(np.array(sizes)[firsts], return_inverse=True, return_counts=True)
        asked = np.sort(firsts[(times[size_of] > 1) & (np.frombuffer(hashed, np.uint8)[firsts] == 0)])
        for done, (image, data) in enumerate(self._read(snapshots, asked, sizes), 1):
            names[16 * image : 16 * image + 16] = xxh3_128_digest(data)
            progress("comparing", done, len(asked))
        contents = np.unique(np.frombuffer(names, _DIGEST)[firsts], return_inverse=True)[1][object_of]
        self._order = np.argsort(contents, kind="stable")
        """The images, those with the same bytes together."""
        self._bounds = np.flatnonzero(np.diff(contents[self._order], prepend=-1, append=-1))
        self._group_of = contents

    def groups(self) -> Iterator[list[ImageRow]]:
        """Yield the images that have the same bytes, where there are several: by snapshot, then by path. The groups
        come in no particular order."""
        for group in np.flatnonzero(np.diff(self._bounds) > 1):
            yield self._places(int(group))

    def same(self, snapshot: int, row: int) -> list[ImageRow]:
        """Return all images that have the bytes of one, itself among them, likewise."""
        start, end = self._starts[snapshot : snapshot + 2]
        image = start + np.searchsorted(self._rows[start:end], row)
        return self._places(int(self._group_of[image]))

    def _places(self, group: int) -> list[ImageRow]:
        images = self._order[self._bounds[group] : self._bounds[group + 1]]
        of = np.searchsorted(self._starts, images, "right") - 1
        return [ImageRow(*place) for place in zip(of.tolist(), self._rows[images].tolist(), strict=True)]

    def _read(self, snapshots: Sequence[Snapshot], images: Numbers, sizes: Sequence[int]) -> Iterator[tuple[int, Data]]:
        for number, snapshot in enumerate(snapshots):
            mine = images[slice(*np.searchsorted(images, self._starts[number : number + 2]))].tolist()
            files = Files(snapshot)
            parts = (Part(int(self._rows[image]), sizes[image]) for image in mine)
            yield from zip(mine, files.read(parts), strict=True)
            files.done()


def _name(manifest: Manifest, entry: Entry) -> tuple[bytes, bool]:
    """Return the hash of an image's bytes and True where it is known, else the id of its object and False."""
    ref = manifest.object_ref(entry)
    source = manifest.root.sources[entry.source]
    if source.content_addressed and names_its_content(ref):  # anybody can call a file in a bucket so
        match = CONTENT_KEY.fullmatch(ref.key)
        assert match is not None
        return bytes.fromhex(match[1] + match[2]), True
    if source == PACKS and _HEX.fullmatch(entry.etag):
        return bytes.fromhex(entry.etag), True
    return object_id(ref), False
