"""Trains the detector on a dataset of boxes, and lets it look at another one.

On the CPU two trainings with the same seed, number of epochs and threads give the same network; with a limit in seconds
the number of steps, and on a GPU the order of additions, are not the same every time. One thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from datacache.core.errors import UsageError
from datacache.torch import ShardDataset, collate, loader
from dataset_cli.demo.detector import Detector, Found, loss

_RATE, _WARM_UP = 3e-3, 0.05


class Epoch(NamedTuple):
    """What became of an epoch."""

    number: int
    """From 1 on."""
    loss: float
    """The mean over its batches."""
    images: int
    seconds: float
    data_share: float
    """Of that, the share spent waiting for batches, from the second one on."""


def train(
    dataset: ShardDataset,
    *,
    epochs: int | None = None,
    seconds: float | None = 60.0,
    batch_size: int = 16,
    device: str = "cpu",
    workers: int | None = None,
    seed: int = 0,
    on_epoch: Callable[[Epoch], Any] = lambda _epoch: None,
) -> tuple[Detector, list[Epoch]]:
    """A detector of the dataset's classes, trained for so many epochs or seconds, whichever is over first; at least one
    step. `UsageError` where neither is given, and for a device that is not there."""
    if epochs is None and seconds is None:
        raise UsageError("a training without an end", hint="Give epochs or seconds.")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"there is no {device} here", hint="device='cpu'.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Detector(len(dataset.classes))
    network = network.to(device, memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=1e-4)
    chance = torch.Generator().manual_seed(seed)
    done: list[Epoch] = []
    on = None if device == "cpu" else device  # then batches come through a DevicePrefetcher
    batches = loader(dataset, batch_size, seed=seed, num_workers=workers, device=on)
    with closing(batches):
        steps, limit = 0, math.inf if epochs is None else epochs * len(batches)
        batches.choice  # noqa: B018 - how many workers are best is measured now, not in the time for training
        begun = time.monotonic()
        progress = 0.0
        while progress < 1:
            losses, images = [], 0
            epoch_begun = time.monotonic()
            for pixels, targets in batches:
                for group in optimiser.param_groups:
                    group["lr"] = _RATE * min(progress / _WARM_UP, (1 + math.cos(math.pi * progress)) / 2) + 1e-6
                network.train()
                value = loss(network(_varied(pixels, targets, chance)), targets)
                optimiser.zero_grad()
                value.backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 10.0)
                optimiser.step()
                losses.append(value.detach())
                images += len(targets)
                steps += 1
                spent = time.monotonic() - begun
                progress = max(steps / limit, 0.0 if seconds is None else spent / max(seconds, 1e-9))
                if progress >= 1:
                    break
            mean = float(torch.stack(losses).mean())
            took = time.monotonic() - epoch_begun
            done.append(Epoch(len(done) + 1, mean, images, took, batches.report().data_share))
            on_epoch(done[-1])
    return network.eval(), done


def look(network: Detector, dataset: ShardDataset, *, batch_size: int = 16) -> tuple[list[Found], list[Any]]:
    """All that the detector finds in each image of a dataset, and the targets, both on the CPU."""
    device = next(network.parameters()).device
    found: list[Found] = []
    wanted: list[Any] = []
    for start in range(0, len(dataset), batch_size):
        numbers = range(start, min(start + batch_size, len(dataset)))
        images, targets = collate(dataset.__getitems__(numbers))
        found += [Found(*(part.cpu() for part in each)) for each in network.find(images.to(device), least=0.01)]
        wanted += targets
    return found, wanted


def _varied(images: Tensor, targets: list[dict[str, Tensor]], chance: torch.Generator) -> Tensor:
    """The batch with some images mirrored (and their boxes, in place), all a little brighter or of other colours."""
    mirrored = torch.rand(len(images), generator=chance) < 0.5
    gain = 1 + (torch.rand(len(images), 1, 1, 3, generator=chance) - 0.5) * 0.3
    shift = (torch.rand(len(images), 1, 1, 1, generator=chance) - 0.5) * 40
    for target, turned in zip(targets, mirrored.tolist(), strict=True):
        if turned:
            target["boxes"][:, [0, 2]] = images.shape[2] - target["boxes"][:, [2, 0]]
    flags = mirrored.to(images.device)[:, None, None, None]
    images = torch.where(flags, images.flip(2), images)
    return (images * gain.to(images.device) + shift.to(images.device)).clamp(0, 255)
