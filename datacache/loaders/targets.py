"""Targets as PyTorch has them: boxes in tensors.

Used by the datasets; the columns behind them are `columns`. Apart from `selection`, which TensorFlow's datasets use
without PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch


def tensors(target: Any) -> Any:
    """Return a target with tensors, which share its arrays' memory. Return other targets unchanged."""
    if isinstance(target, dict):
        return {name: torch.from_numpy(values) for name, values in target.items()}
    return target


def scaled(target: Any, own: tuple[int, int], size: tuple[int, int]) -> Any:
    """Scale a detection target to an image resized from `own` to `size` (height, width each), and return it."""
    if isinstance(target, dict) and "boxes" in target and own != size:
        height, width = size[0] / own[0], size[1] / own[1]
        target["boxes"] *= torch.tensor([width, height, width, height])
    return target
