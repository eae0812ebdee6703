"""The directory tree over a manifest's sorted rows, without a table of inodes: a path prefix and a row find everything.

Rows in byte order keep the contents of every directory together, so a directory is its path prefix and its first row.
Paths that a tree cannot show (`Root.hidden`) are left out. Used by mounts and exports. Safe from several threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from datacache.manifest.model import Entry
from datacache.manifest.reader import Manifest

_AFTER_SLASH = b"0"  # the byte after '/': prefix + name + this sorts right after all of that directory's rows


class Child(NamedTuple):
    """A name in a directory."""

    name: bytes
    is_dir: bool
    row: int
    """The file's row, or the directory's first row."""
    next_row: int
    """The first row after this child: where a listing goes on."""
    is_link: bool = False


class Tree:
    """Names, children and attributes of a snapshot's directories. A prefix is '' or ends with '/'."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._hidden = manifest.root.hidden

    def entry(self, row: int) -> Entry:
        """Return the entry at a row."""
        return self.manifest.entry(row)

    def prefix_of(self, depth: int, first_row: int) -> bytes:
        """Return the path prefix of the directory `depth` levels down whose first row this is."""
        if depth == 0:
            return b""
        return b"/".join(self.manifest.path(first_row).split(b"/", depth)[:depth]) + b"/"

    def child(self, prefix: bytes, name: bytes) -> Child | None:
        """Find `name` in a directory."""
        path = prefix + name
        if not showable(name):
            return None
        row = self.manifest.find(path)
        if row is not None and path not in self._hidden:
            held, index, _ = self.manifest.locate(row)
            return Child(name, False, row, row + 1, held.targets is not None and bool(held.targets[index]))
        folder = path + b"/"
        row = self.manifest.seek(folder)
        if row < self.manifest.rows and self.manifest.path(row).startswith(folder):
            return Child(name, True, row, self.manifest.seek(path + _AFTER_SLASH))
        return None

    def children(self, prefix: bytes, start_row: int | None = None) -> Iterator[Child]:
        """Yield a directory's children from a row on (`Child.next_row` of the last one seen), in the rows' order."""
        manifest, hidden, skip = self.manifest, self._hidden, len(prefix)
        row = manifest.seek(prefix) if start_row is None else start_row
        while row < manifest.rows:
            held, index, _ = manifest.locate(row)
            paths, targets, first = held.paths, held.targets, row - index
            while index < len(paths):
                path = paths[index]
                if not path.startswith(prefix):
                    return
                slash = path.find(b"/", skip)
                if slash < 0:
                    index += 1
                    if len(path) > skip and not (hidden and path in hidden):
                        is_link = targets is not None and bool(targets[index - 1])
                        yield Child(path[skip:], False, first + index - 1, first + index, is_link)
                    continue
                name = path[skip:slash]
                after = manifest.seek(path[:slash] + _AFTER_SLASH)
                if not hidden or showable(name):
                    yield Child(name, True, first + index, after)
                index = after - first
            row = first + index


def showable(name: bytes) -> bool:
    """Tell whether a directory can hold a name."""
    return name not in (b"", b".", b"..") and len(name) <= 255 and b"\0" not in name
