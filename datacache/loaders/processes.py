"""How many processors this process may keep busy. Any thread.

Which process of a distributed training this is. Used by samplers and streams; does not import PyTorch.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from datacache.core.errors import UsageError

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def processors() -> int:
    """Those the process may run on, bounded by the quota of its container, and shared with the other ranks of this
    machine (LOCAL_WORLD_SIZE, which torchrun sets); at least 1."""
    count = len(os.sched_getaffinity(0))
    limit = quota()
    if limit is not None:
        count = min(count, max(1, round(limit)))
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, count // max(1, int(ranks))) if ranks.isdecimal() else count


def quota(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """The processors that control groups allow, None without a limit.

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


def rank_and_world(rank: int | None = None, world: int | None = None) -> tuple[int, int]:
    """This process's rank and how many there are: as given, else as `torch.distributed` says where it is initialised,
    else as the variables RANK and WORLD_SIZE say, else 0 of 1. `UsageError` where they make no sense."""
    if (rank is None) != (world is None):
        raise UsageError("Give both `rank` and `world`, or neither.")
    if rank is not None and world is not None:
        if not 0 <= rank < world:
            raise UsageError(f"There is no rank {rank} of {world}.", hint="Ranks are 0 … world-1.")
        return rank, world
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    given, of = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not given and not of:
        return 0, 1
    if not (given.isdecimal() and of.isdecimal() and int(given) < int(of)):
        raise UsageError(
            f"The variables RANK={given} and WORLD_SIZE={of} do not say which rank this is.",
            hint="torchrun sets both; or give `rank` and `world`.",
        )
    return int(given), int(of)
