"""Our decoding as a function for other people's data sets. Needs our package and PyTorch."""

from __future__ import annotations

import torch

from datacache.loaders.decode import decode_rgb


def decoded(data: bytes, size: int) -> torch.Tensor:
    """RGB pixels, (size, size, 3) uint8."""
    return torch.from_numpy(decode_rgb(data, "", (size, size))[0])
