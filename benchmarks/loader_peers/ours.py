"""Ours: `ShardDataset` and `SnapshotDataset` in PyTorch's DataLoader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from benchmarks.loader_peers.plan import Loader, ReadPlan, as_list
from datacache.torch import EpochSampler, ShardDataset, SnapshotDataset, collate


def open_loader(source: str, plan: ReadPlan) -> Loader:
    """Open `source`, as the dataset takes it. Options: `kind` (`shards`, `snapshot`), `packed`, `lookahead` (the order
    comes from an `EpochSampler` that publishes it; without, from PyTorch's sampler), `shuffle` (of the EpochSampler).
    """
    make = {"shards": ShardDataset, "snapshot": SnapshotDataset}[plan.options["kind"]]
    packed = plan.options.get("packed", False)
    decoded = {"decode": "rgb", "size": (plan.size, plan.size)} if plan.size else {}
    dataset = make(source, target=None, packed=packed, **decoded)
    order: dict[str, Any] = {"shuffle": True}
    if plan.options.get("lookahead"):
        order = {"sampler": EpochSampler(dataset, shuffle=plan.options.get("shuffle", "global"))}
    loader = DataLoader(
        dataset, batch_size=plan.batch_size, collate_fn=collate if packed or decoded else as_list, **order,
        **plan.workers_stay(),
    )  # fmt: skip

    def epoch(number: int) -> DataLoader:
        if "sampler" in order:
            order["sampler"].set_epoch(number)
        return loader

    return epoch
