"""The cores that this process may use: those it may run on, bounded by the quota of its container. Any thread."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def cores() -> int:
    """Count the cores; at least 1."""
    count, limit = len(os.sched_getaffinity(0)), quota()
    return count if limit is None else min(count, max(1, round(limit)))


def quota(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """Return the processors that control groups allow, None without a limit.

    See the kernel's admin-guide/cgroup-v2.rst (`cpu.max`) and scheduler/sched-bwc.rst (version 1). A container sees its
    own group as the root; elsewhere the groups above count, too.
    """
    limits = []
    for folder in _folders(root, membership):
        with suppress(OSError, ValueError):
            allowed, _, period = (folder / "cpu.max").read_text().strip().partition(" ")
            if allowed != "max":
                limits.append(int(allowed) / int(period))
        with suppress(OSError, ValueError):
            microseconds = int((folder / "cpu.cfs_quota_us").read_text())
            if microseconds > 0:
                limits.append(microseconds / int((folder / "cpu.cfs_period_us").read_text()))
    return min(limits, default=None)


def _folders(root: Path, membership: Path) -> list[Path]:
    found = [root, root / "cpu"]
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            base = root if not controllers else root / "cpu"
            if not controllers or "cpu" in controllers.split(","):
                group = base / path.lstrip("/")
                found += [group, *(parent for parent in group.parents if parent.is_relative_to(base))]
    return found
