"""Read what is mounted, as this process sees it (proc(5), mountinfo). Any thread."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    mountpoint: str
    source: str
    kind: str
    device: int
    """st_dev."""
    id: int
    parent: int
    """The id of the mount that it lies on."""
    root: str
    """The folder of the file system that is shown, as its own path there: / unless it is a bind mount."""


def mounts() -> Iterator[Mount]:
    """Yield all mounts, in the order they were made."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.rstrip("\n").partition(" - ")
            (id, parent, numbers, root, place, *_), (kind, source, *_) = left.split(" "), right.split(" ")
            major, _, minor = numbers.partition(":")
            device = os.makedev(int(major), int(minor))
            yield Mount(_unescape(place), _unescape(source), kind, device, int(id), int(parent), _unescape(root))


def _unescape(text: str) -> str:
    """Undo the octal escapes of mountinfo: of space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
