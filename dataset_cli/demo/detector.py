"""A detector of boxes that is small enough to be trained on a processor in a minute, its training, and its score.

It has no anchors: a heat map for each class has its peaks at the boxes' centres, and at each place the network also
says how large the box is and where in the place its centre lies. After X. Zhou, D. Wang and P. Krähenbühl, "Objects as
Points" (2019, arXiv:1904.07850); that a Gaussian has the shape of its box, and that places around the centre learn the
box, too, is from Z. Liu et al., "Training-Time-Friendly Network for Real-Time Object Detection" (2020,
arXiv:1909.00700).

A found box is right if an image's box of its class that no better one has taken overlaps it by half (intersection over
union). Average precision is the area under precision over recall, as PASCAL VOC measures it since 2010 (Everingham et
al., "The PASCAL Visual Object Classes Challenge: A Retrospective", 2015). Boxes marked difficult count like others.

On the CPU two trainings with the same seed, number of epochs and threads give the same network; with a limit in seconds
the number of steps, and on a GPU the order of additions, are not the same every time. One thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from datacache.core.errors import UsageError
from datacache.torch import ShardDataset, SnapshotDataset, collate, loader

STRIDE = 8
"""A place of the heat map is so many pixels wide and high."""
MULTIPLE = 16
"""Images' heights and widths are multiples of this."""
_RARE = 0.02
"""How likely a peak is before anything was learnt: else the empty places outweigh all else in the first steps."""
_MOST = 200
"""Peaks that are looked at in an image."""
_SIZE, _CENTRE = 2.0, 6.0
"""How much sizes (their logarithms) and centres (in widths and heights of the box) weigh against the heat maps."""
_SAME_OBJECT = 0.6
"""Of two boxes with more overlap (intersection over union) the one with the lower score goes, whatever its class."""
OVERLAP = 0.5
_RATE, _WARM_UP = 3e-3, 0.05


class Found(NamedTuple):
    """The boxes found in an image, the best first."""

    boxes: Tensor
    """float32 (n, 4): x1, y1, x2, y2 in pixels of the image as it was given to the network."""
    labels: Tensor
    """int64 (n,)"""
    scores: Tensor
    """float32 (n,), from 0 to 1."""


class CentreNetwork(nn.Module):
    """Takes images as the datasets give them, uint8 of n x height x width x 3; gives heat maps (logits), logarithms of
    sizes and offsets of centres, of n x (classes, 2, 2) x height / 8 x width / 8."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.classes = classes
        self.fine = nn.Sequential(
            _convolution(3, width, stride=2),
            _convolution(width, 2 * width, stride=2),
            _convolution(2 * width, 4 * width, stride=2),
            _Residual(4 * width),
        )
        self.coarse = nn.Sequential(  # at twice the stride: the surroundings that tell what it is, at little cost
            _convolution(4 * width, 6 * width, stride=2),
            _Residual(6 * width),
            _Residual(6 * width),
            nn.Conv2d(6 * width, 4 * width, 1),
        )
        self.head = nn.Sequential(_convolution(4 * width, 4 * width), nn.Conv2d(4 * width, classes + 4, 1))
        with torch.no_grad():
            self.head[-1].bias[:classes] = -math.log(1 / _RARE - 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See the class."""
        pixels = images.permute(0, 3, 1, 2).float() / 127.5 - 1
        fine = self.fine(pixels)
        coarse = functional.interpolate(self.coarse(fine), scale_factor=2.0, mode="nearest")
        out = self.head(fine + coarse)
        heat, sizes, offsets = out.split((self.classes, 2, 2), dim=1)
        return heat, sizes, offsets

    def find(self, images: Tensor, *, least: float = 0.0) -> list[Found]:
        """Return the boxes in each image, with a score above `least`."""
        self.eval()
        with torch.no_grad():
            heat, sizes, offsets = (part.float() for part in self(images))
        scores = heat.sigmoid()
        peaks = scores * (functional.max_pool2d(scores, 3, stride=1, padding=1) == scores)
        across, every = heat.shape[3], heat.shape[2] * heat.shape[3]
        best, places = peaks.flatten(1).topk(min(_MOST, peaks[0].numel()))
        found = []
        for image in range(len(images)):
            place = places[image] % every
            centre = torch.stack((place % across, place // across)) + offsets[image].flatten(1)[:, place]
            half = sizes[image].flatten(1)[:, place].exp() / 2
            boxes = torch.cat((centre - half, centre + half)).T * STRIDE
            boxes[:, 0::2].clamp_(0, images.shape[2])
            boxes[:, 1::2].clamp_(0, images.shape[1])
            kept = _distinct(boxes, best[image] > least)
            found.append(Found(boxes[kept], (places[image] // every)[kept], best[image][kept]))
        return found


def loss(outputs: tuple[Tensor, Tensor, Tensor], targets: Sequence[dict[str, Tensor]]) -> Tensor:
    """Return how far off the outputs for a batch are: focal loss of the heat maps and L1 of sizes and centres, divided
    by the number of boxes."""
    heat, sizes, offsets = outputs
    device, (high, wide) = heat.device, heat.shape[2:]
    boxes = torch.cat([target["boxes"] for target in targets]).to(device) / STRIDE
    labels = torch.cat([target["labels"] for target in targets]).to(device)
    counts = torch.tensor([len(target["labels"]) for target in targets])
    images = torch.repeat_interleave(torch.arange(len(targets)), counts).to(device)
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    extents = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0.1)
    places = torch.stack((centres[:, 0].clamp(0, wide - 1), centres[:, 1].clamp(0, high - 1)), dim=1).long()
    spread = (extents * 0.09).clamp(min=0.4)

    wanted = _heat_maps(heat.shape, images * heat.shape[1] + labels, places, spread)
    likely = heat.sigmoid()
    at_peaks = functional.logsigmoid(heat) * (1 - likely) ** 2
    elsewhere = functional.logsigmoid(-heat) * likely**2 * (1 - wanted) ** 4
    wrong = -torch.where(wanted == 1, at_peaks, elsewhere).sum()

    # The places around a centre learn the box, too, the more the closer they are: the peak may turn out to be there.
    around = torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2)).to(device)
    near = torch.exp(-((around / spread[:, None]) ** 2).sum(dim=2) / 2)
    x = (places[:, :1] + around[:, 0]).clamp(0, wide - 1)
    y = (places[:, 1:] + around[:, 1]).clamp(0, high - 1)
    size, offset = sizes[images[:, None], :, y, x], offsets[images[:, None], :, y, x]
    of_size = (size - extents.log()[:, None]).abs().sum(dim=2)
    of_centre = ((torch.stack((x, y), dim=2) + offset - centres[:, None]) / extents[:, None]).abs().sum(dim=2)
    of_boxes = ((of_size * _SIZE + of_centre * _CENTRE) * near).sum(dim=1) / near.sum(dim=1)
    return (wrong + of_boxes.sum()) / max(1, len(labels))


def _heat_maps(shape: Sequence[int], maps: Tensor, places: Tensor, spread: Tensor) -> Tensor:
    """Return what heat maps should be: 1 at the boxes' places, less around them. `maps`: which map each box is in."""
    count, classes, high, wide = shape
    device = maps.device
    x = (torch.arange(wide, device=device) - places[:, :1]) / spread[:, :1]
    y = (torch.arange(high, device=device) - places[:, 1:]) / spread[:, 1:]
    gaussians = torch.exp(-(y[:, :, None] ** 2 + x[:, None, :] ** 2) / 2)
    wanted = torch.zeros(count * classes, high * wide, device=device)
    at = maps[:, None].expand(-1, high * wide)
    return wanted.scatter_reduce(0, at, gaussians.flatten(1), "amax").view(count, classes, high, wide)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Return the intersection over union of each of n boxes with each of m: n x m."""
    inner = torch.minimum(one[:, None, 2:], other[None, :, 2:]) - torch.maximum(one[:, None, :2], other[None, :, :2])
    shared = inner.clamp(min=0).prod(dim=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(dim=1) for boxes in (one, other)]
    return shared / (areas[0][:, None] + areas[1][None, :] - shared).clamp(min=1e-6)


def _distinct(boxes: Tensor, wanted: Tensor) -> Tensor:
    """Return the positions of wanted boxes, the best first, without those that are another view of a better one."""
    boxes = boxes[wanted]  # scores fall, so these are the first ones
    left = (overlap(boxes, boxes) > _SAME_OBJECT).cpu().numpy()
    kept: list[int] = []
    for at in range(len(boxes)):
        if not left[at, kept].any():
            kept.append(at)
    return torch.tensor(kept, dtype=torch.long, device=boxes.device)


def _convolution(inputs: int, outputs: int, *, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)
    )


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.change = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, features: Tensor) -> Any:
        return functional.relu(features + self.change(features))


class Score(NamedTuple):
    """How well a class is found; nan where there is nothing to find."""

    label: str
    boxes: int
    """How many there are."""
    average_precision: float
    precision: float
    recall: float
    f1: float


def right(found: Found, target: dict[str, Tensor]) -> Tensor:
    """Tell which of the boxes found in an image are right: bool (n,)."""
    alike = found.labels[:, None] == target["labels"][None, :]
    overlaps = (overlap(found.boxes, target["boxes"]) * alike).numpy()
    answers = torch.zeros(len(found.labels), dtype=torch.bool)
    if overlaps.shape[1]:
        for at, mine in enumerate(overlaps):
            best = int(mine.argmax())
            if mine[best] >= OVERLAP:
                answers[at] = True
                overlaps[:, best] = 0  # taken
    return answers


def score(
    found: Sequence[Found], targets: Sequence[dict[str, Tensor]], classes: Sequence[str], least: float
) -> list[Score]:
    """Return one for each class, and one for all of them together, called `all`, whose average precision is the mean.
    `found`: all, also those with a score below `least`, from which on precision and recall count them."""
    answers = torch.cat([right(*pair) for pair in zip(found, targets, strict=True)])
    labels = torch.cat([each.labels for each in found])
    scores = torch.cat([each.scores for each in found])
    there = torch.cat([target["labels"] for target in targets])
    made = []
    for number, name in enumerate(classes):
        mine = labels == number
        boxes = int((there == number).sum())
        precision = _average_precision(answers[mine], scores[mine], boxes)
        made.append(_score(name, boxes, precision, answers[mine & (scores >= least)]))
    known = [each.average_precision for each in made if each.boxes]
    mean = sum(known) / len(known) if known else float("nan")
    return [*made, _score("all", len(there), mean, answers[scores >= least])]


def _score(label: str, boxes: int, average_precision: float, answers: Tensor) -> Score:
    good = int(answers.sum())
    precision = good / len(answers) if len(answers) else float("nan")
    recall = good / boxes if boxes else float("nan")
    f1 = 2 * good / (len(answers) + boxes) if len(answers) + boxes else float("nan")
    return Score(label, boxes, average_precision, precision, recall, f1)


def _average_precision(answers: Tensor, scores: Tensor, boxes: int) -> float:
    if not boxes:
        return float("nan")
    good = answers[scores.argsort(descending=True, stable=True)].double().cumsum(0)
    precision = good / torch.arange(1, len(good) + 1)
    best_from_here = precision.flip(0).cummax(0).values.flip(0) if len(good) else precision
    recall = torch.cat((torch.zeros(1), good / boxes))
    return float((recall.diff() * best_from_here).sum())


class Epoch(NamedTuple):
    """The result of an epoch."""

    number: int
    """From 1 on."""
    loss: float
    """The mean over its batches."""
    images: int
    seconds: float
    data_share: float
    """Of that, the share spent waiting for batches, from the second one on."""


def train(
    dataset: ShardDataset | SnapshotDataset,
    *,
    epochs: int | None = None,
    seconds: float | None = 60.0,
    batch_size: int = 16,
    device: str = "cpu",
    workers: int | None = None,
    seed: int = 0,
    on_epoch: Callable[[Epoch], Any] = lambda _epoch: None,
) -> tuple[CentreNetwork, list[Epoch]]:
    """Return a detector of the dataset's classes, trained for so many epochs or seconds, whichever is over first; at
    least one step. `UsageError` where neither is given, and for a device that is not there."""
    if epochs is None and seconds is None:
        raise UsageError("a training without an end", hint="Give epochs or seconds.")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"there is no {device} here", hint="device='cpu'.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = CentreNetwork(len(dataset.classes))
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


def look(network: CentreNetwork, dataset: ShardDataset, *, batch_size: int = 16) -> tuple[list[Found], list[Any]]:
    """Return all that the detector finds in each image of a dataset, and the targets, both on the CPU."""
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
    """Return the batch with some images mirrored (and their boxes, in place), all a little brighter or of other
    colours."""
    mirrored = torch.rand(len(images), generator=chance) < 0.5
    gain = 1 + (torch.rand(len(images), 1, 1, 3, generator=chance) - 0.5) * 0.3
    shift = (torch.rand(len(images), 1, 1, 1, generator=chance) - 0.5) * 40
    for target, turned in zip(targets, mirrored.tolist(), strict=True):
        if turned:
            target["boxes"][:, [0, 2]] = images.shape[2] - target["boxes"][:, [2, 0]]
    flags = mirrored.to(images.device)[:, None, None, None]
    images = torch.where(flags, images.flip(2), images)
    return (images * gain.to(images.device) + shift.to(images.device)).clamp(0, 255)
