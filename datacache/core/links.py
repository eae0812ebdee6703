"""Symbolic links of a snapshot: do they stay inside of it? Pure functions, any thread."""

from __future__ import annotations

_PATH_MAX = 4096
"""<linux/limits.h>, with the NUL at the end."""


def stays_inside(path: bytes, target: bytes) -> bool:
    """Tell whether the link at `path` (relative to the snapshot) leads to something below the snapshot's root, whatever
    other links there are.

    It is no longer than the kernel takes, relative, climbs no higher than the root, and does not climb again after it
    has gone down: what it goes down through may be a link itself, whose parent is elsewhere. Links that all are like
    this lead nowhere else together.
    """
    if not 0 < len(target) < _PATH_MAX or target.startswith(b"/") or b"\0" in target:
        return False
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    climbed = 0
    while climbed < len(parts) and parts[climbed] == b"..":
        climbed += 1
    return b".." not in parts[climbed:] and climbed <= path.count(b"/")
