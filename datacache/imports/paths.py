"""Which names may become paths of a snapshot: those that stay inside it, whatever system they were written on.

Used for the `path` of a JSON line and for the names in an archive. Pure functions, any thread.
"""

from __future__ import annotations

import re

_DRIVE = re.compile(r"[A-Za-z]:")
_MAX_PATH_BYTES, _MAX_PART_BYTES = 4096, 255
_JUNK_NAMES = frozenset({".DS_Store", "Thumbs.db", "desktop.ini", "ehthumbs.db", ".datacache-exported"})


def unusable(path: str) -> str:
    """Why this cannot be a path of a snapshot, or '' if it can."""
    if not path:
        return "the path is empty"
    if "\0" in path:
        return "the path has a NUL in it"
    if "\\" in path:
        return "the path has a backslash in it; folders are separated by '/'"
    if path.startswith("/"):
        return "the path is absolute"
    parts = path.split("/")
    if ".." in parts:
        return "the path leads out of the snapshot ('..')"
    if "" in parts or "." in parts:
        return "the path has an empty part or a '.'" if path[-1] != "/" else "the path names a folder"
    if _DRIVE.match(path) and (len(path) == 2 or path[2] == "/" or len(parts) > 1):
        return "the path begins with a drive letter"
    return _too_long(path, parts)


def _too_long(path: str, parts: list[str]) -> str:
    try:
        if len(path.encode("utf-8", "surrogateescape")) > _MAX_PATH_BYTES:
            return f"the path is longer than {_MAX_PATH_BYTES:,} bytes"
        if any(len(part.encode("utf-8", "surrogateescape")) > _MAX_PART_BYTES for part in parts):
            return f"a part of the path is longer than {_MAX_PART_BYTES} bytes, which no file system takes"
    except UnicodeEncodeError:
        return "the path has half a character in it"
    return ""


def from_archive(name: str) -> str:
    """A member's name as a path: '\\\\' of Windows tools becomes '/', and `./` and doubled slashes go. What is not safe
    stays so, for `unusable` to refuse."""
    path = name.replace("\\", "/")
    absolute = path.startswith("/")
    return "/" * absolute + "/".join(part for part in path.split("/") if part not in ("", "."))


def is_junk(path: str) -> bool:
    """Whether it is what a desktop leaves behind (`__MACOSX/`, `.DS_Store`, `Thumbs.db`, `._x` and the like), or the
    note in a folder that a snapshot was exported into."""
    parts = path.split("/")
    return "__MACOSX" in parts or parts[-1] in _JUNK_NAMES or parts[-1].startswith("._")
