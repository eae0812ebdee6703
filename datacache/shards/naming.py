"""What samples are called in a shard: keys by the convention of WebDataset.

A reader of WebDataset cuts a member's name at the first dot of its base name into key and extension; folders may have
dots. So a key is an image's path without its extension, and dots that are left in its base name become `_`. Keys are
text that every reader of tars takes as it is: bytes that are no UTF-8 and control characters are written `%ff`, and no
key is absolute or leads upwards. Used by the builder. `Names` belongs to one thread.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable

import numpy as np
from xxhash import xxh3_64_intdigest

_ODD = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")
_SKIPPED = "__"
"""WebDataset passes over members whose names begin and end so, or lie in such a folder: what begins so is renamed."""


def image_key(path: str) -> tuple[str, str]:
    """Key and extension of a file that is a sample of its own: `a/b.c.JPG` → `a/b_c`, `jpg`."""
    folder, name = _split(path)
    stem, dot, extension = name.rpartition(".")
    if not dot or not stem:
        stem, extension = name, ""
    return _key(folder, stem), _extension(extension)


def group_key(path: str) -> tuple[str, str]:
    """Key and extension of a file as WebDataset would cut it: `a/b.seg.PNG` → `a/b`, `seg.png`."""
    folder, name = _split(path)
    bare = name.lstrip(".")
    stem, _, extension = bare.partition(".")
    return _key(folder, name[: len(name) - len(bare)] + stem), _extension(extension)


class Names:
    """Gives every sample a key of its own. Made with the keys of all samples in their order, of which it keeps a hash
    each; keys are then given in the same order: the first of a name gets it as it is."""

    def __init__(self, wanted: Iterable[str]) -> None:
        hashes = np.array(array("Q", map(_hash, wanted)), dtype=np.uint64)
        hashes.sort()
        self._all = hashes
        self._twice = frozenset(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
        self._given: set[int] = set()
        self.renamed = 0
        """How many got another key than they wanted."""

    def give(self, key: str, extension: str = "") -> str:
        """The key of the next sample: itself, or with the extension or a number behind it."""
        hashed = _hash(key)
        if hashed not in self._twice:
            return key
        if hashed not in self._given:
            self._given.add(hashed)
            return key
        self.renamed += 1
        count = 1
        while True:
            suffix = extension.replace(".", "_") if count == 1 and extension else str(count + 1)
            other = f"{key}_{suffix}"
            hashed = _hash(other)
            if hashed not in self._given and not self._is_wanted(hashed):
                self._given.add(hashed)
                return other
            count += 1

    def _is_wanted(self, hashed: int) -> bool:
        at = int(np.searchsorted(self._all, np.uint64(hashed)))
        return at < len(self._all) and int(self._all[at]) == hashed


def _hash(key: str) -> int:
    return xxh3_64_intdigest(key.encode())


def _split(path: str) -> tuple[list[str], str]:
    *folders, name = path.split("/")
    return folders, name


def _key(folders: list[str], stem: str) -> str:
    parts = [_folder(folder) for folder in folders]
    key = _escaped("/".join([*parts, stem.replace(".", "_") or "_"]))
    return "%5f" + key[1:] if key.startswith(_SKIPPED) else key


def _folder(name: str) -> str:
    return name.replace(".", "_") if name in (".", "..") else name or "_"


def _extension(text: str) -> str:
    """As readers compare extensions: in lower case."""
    return _escaped(text.lower()) or "bin"


def _escaped(text: str) -> str:
    return _ODD.sub(_percent, text) if not text.isprintable() else text


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02x}" for byte in match[0].encode("utf-8", "surrogateescape"))
