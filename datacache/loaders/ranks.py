"""Which process of a distributed training this is. Used by samplers and streams; does not import PyTorch."""

from __future__ import annotations

import os
import sys

from datacache.core.errors import UsageError


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
