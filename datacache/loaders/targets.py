"""Targets as PyTorch has them: boxes in tensors. Used by the datasets; the columns behind them are `columns`."""

from __future__ import annotations

from typing import Any

import torch


def tensors(target: Any) -> Any:
    """A target whose arrays are tensors; they share the arrays' memory. Other targets as they are."""
    if isinstance(target, dict):
        return {name: torch.from_numpy(values) for name, values in target.items()}
    return target


def scaled(target: Any, own: tuple[int, int], size: tuple[int, int]) -> Any:
    """A detection target for an image that was resized from `own` to `size` (height, width each)."""
    if isinstance(target, dict) and "boxes" in target and own != size:
        height, width = size[0] / own[0], size[1] / own[1]
        target["boxes"] *= torch.tensor([width, height, width, height])
    return target
