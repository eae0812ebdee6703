"""Splits as folders and files are named after them: `train2017/`, `valid/`, `instances_val.json`, `2007_train.txt`.

Used by whatever recognises the layout of a data set. Pure functions, any thread. Paths are bytes, as in the manifest.
"""

from __future__ import annotations

import re
from typing import Final

_NAMES: Final = {
    b"train": "train",
    b"training": "train",
    b"val": "val",
    b"valid": "val",
    b"validation": "val",
    b"test": "test",
    b"testing": "test",
}
_FOLDER: Final = re.compile(rb"(training|train|validation|valid|val|testing|test)[-_]?[0-9]*")
_WORD: Final = re.compile(rb"[a-z]+")
_IMAGES: Final = frozenset(b"jpegimages images image imgs img pngimages photos pictures labels annotations".split())


def folder_split(path: bytes) -> str:
    """The split that a folder of this path is named after; '' for none.

    Only folders next to one of images or labels count, the first one and the last one: any other is called `test` for
    reasons of its own."""
    parts = path.lower().split(b"/")[:-1]
    for at in range(len(parts) - 1, -1, -1):
        match = _FOLDER.fullmatch(parts[at])
        beside = {parts[at - 1] if at else b"", parts[at + 1] if at + 1 < len(parts) else b""}
        if match and (at in (0, len(parts) - 1) or beside & _IMAGES):
            return _NAMES[match[1]]
    return ""


def file_split(path: bytes) -> str:
    """The split that a list of images or a COCO file is of: by its name, or else by its folder; '' for none."""
    words = _WORD.findall(path.lower().rpartition(b"/")[2])
    found = {_NAMES[word] for word in words if word in _NAMES}
    if not found and b"trainval" not in words:
        return folder_split(path)
    return found.pop() if len(found) == 1 else ""


def is_split_list(path: bytes) -> bool:
    """Whether a text file is named after a split, as lists of images are."""
    words = _WORD.findall(path.lower().rpartition(b"/")[2])
    return b"trainval" in words or any(word in _NAMES for word in words)


def split_of_name(name: bytes) -> str:
    """The split that a file of exactly this name, without its extension, is the list of; `trainval` is one too."""
    name = name.lower()
    return "trainval" if name == b"trainval" else _NAMES.get(name, "")
