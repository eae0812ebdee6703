"""The image that a name in an annotation file means: COCO's `file_name`, the paths of keras-yolo3 and of image lists.

Such a name is relative to a folder of images that the file does not name, or absolute on the machine it was written on.
Used by the annotation table. Asks the manifest for single rows; one thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from datacache.annotations.layout import Layout
from datacache.annotations.pairing import image_folders, is_image
from datacache.annotations.split_names import file_split, folder_split
from datacache.manifest.reader import Manifest

_DRIVE: Final = re.compile(rb"^[A-Za-z]:")
_IMAGES: Final = (b"images/", b"Images/", b"JPEGImages/", b"imgs/")
_IMAGE_FOLDERS: Final = frozenset(folder[:-1] for folder in _IMAGES)
_FOLDERS_KEPT: Final = 100_000


WHOLE: Final = 2
"""The image has the whole name, in a folder that the file's names may be relative to."""
END: Final = 1
"""It has the end of the name, with a folder at least: the name is a path on another machine."""
BY_NAME: Final = 0
"""It has the name's last part alone."""


class Named(NamedTuple):
    """The image that a name means."""

    image: bytes
    certainty: int
    """`WHOLE`, `END` or `BY_NAME`."""
    name: bytes
    """The name in one spelling, to compare names."""


class NamedImages:
    """Finds images by what files call them."""

    def __init__(self, manifest: Manifest, layout: Layout) -> None:
        self._manifest = manifest
        self._folders = layout.image_folders
        self._places: dict[bytes, tuple[bytes, ...]] = {}
        self._exist: dict[bytes, bool] = {}

    def find(self, name: str, file: bytes) -> bytes | None:
        """The image that `named` finds."""
        found = self.named(name, file)
        return None if found is None else found.image

    def named(self, name: str, file: bytes) -> Named | None:
        """The image that the file at `file` calls `name`; None where there is none, or no single one.

        Tried in this order, and each with the leading folders of the name dropped one by one: the folder of the file,
        folders of images beside it and above it (those of the file's own split first), and at last every folder of
        images, where the name must be in one alone. Where a folder of the name is there, the image is in it or is
        missing. An image in the folder of another split is never meant.
        """
        try:
            raw = name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # JSON can hold halves of characters; no path of a snapshot does
            return None
        return self._find(raw, file) or (self._find(raw.replace(b"\\", b"/"), file) if b"\\" in raw else None)

    def _find(self, name: bytes, file: bytes) -> Named | None:
        parts = [part for part in _DRIVE.sub(b"", name).split(b"/") if part not in (b"", b".", b"..")]
        if not parts:
            return None
        places = self._places.get(file)
        if places is None:
            places = self._places[file] = tuple(dict.fromkeys(_places(file)))
        whole = b"/".join(parts)
        for place in places:
            if self._is_there(place + whole):
                return Named(place + whole, WHOLE, whole)
        split = folder_split(whole) or file_split(file)
        for at in range(len(parts) - 1):
            rest = b"/".join(parts[at:])
            folder = rest[: rest.rfind(b"/") + 1]
            for place in places if at else ():
                if self._fits(place + rest, split):
                    return Named(place + rest, END, whole)
            if any(self._exists(place + folder) for place in places):
                return None
        for place in places:
            path = place + parts[-1]
            if self._fits(path, split):
                same_kind = len(parts) > 1 and {parts[-2], place[:-1].rpartition(b"/")[2]} <= _IMAGE_FOLDERS
                return Named(path, END if same_kind else BY_NAME, whole)
        found = [folder + parts[-1] for folder in self._folders if self._fits(folder + parts[-1], split)]
        return Named(found[0], BY_NAME, whole) if len(found) == 1 else None

    def _fits(self, path: bytes, split: str) -> bool:
        return (not split or folder_split(path) in ("", split)) and self._is_there(path)

    def _is_there(self, path: bytes) -> bool:
        return is_image(path) and self._manifest.find(path) is not None

    def _exists(self, folder: bytes) -> bool:
        known = self._exist.get(folder)
        if known is None:
            row = self._manifest.seek(folder)
            known = row < self._manifest.rows and self._manifest.path(row).startswith(folder)
            if len(self._exist) >= _FOLDERS_KEPT:
                self._exist.clear()
            self._exist[folder] = known
        return known


def _places(file: bytes) -> Iterator[bytes]:
    """Folders that names in a file may be relative to, the likeliest first."""
    folder = file[: file.rfind(b"/") + 1]
    split = file_split(file)
    words = [word for word in re.split(rb"[^A-Za-z0-9]+", file.rpartition(b"/")[2]) if file_split(word) == split]
    names = [*words, *_SPELLINGS[split]] if split else []
    near = list(dict.fromkeys([folder, *image_folders(folder, b".json")]))
    above = [folder[: at + 1] for at in range(len(folder) - 1, -1, -1) if folder[at : at + 1] == b"/"]
    for place in dict.fromkeys([*near, *above, b""]):
        for name in names:
            yield place + name + b"/"
            for images in _IMAGES:
                yield place + name + b"/" + images
                yield place + images + name + b"/"
        yield place
        yield from (place + images for images in _IMAGES)


_SPELLINGS: Final = {
    "train": (b"train", b"training"),
    "val": (b"val", b"valid", b"validation"),
    "test": (b"test", b"testing"),
}
