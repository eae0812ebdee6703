"""A detector of boxes that is small enough to be trained on a processor in a minute.

It has no anchors: a heat map for each class has its peaks at the boxes' centres, and at each place the network also
says how large the box is and where in the place its centre lies. After X. Zhou, D. Wang and P. Krähenbühl, "Objects as
Points" (2019, arXiv:1904.07850); that a Gaussian has the shape of its box, and that places around the centre learn the
box, too, is from Z. Liu et al., "Training-Time-Friendly Network for Real-Time Object Detection" (2020,
arXiv:1909.00700). One thread.

How good boxes that were found are: average precision, and precision and recall at a threshold.

A found box is right if an image's box of its class that no better one has taken overlaps it by half (intersection over
union). Average precision is the area under precision over recall, as PASCAL VOC measures it since 2010 (Everingham et
al., "The PASCAL Visual Object Classes Challenge: A Retrospective", 2015). Boxes marked difficult count like others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

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


class Found(NamedTuple):
    """The boxes found in an image, the best first."""

    boxes: Tensor
    """float32 (n, 4): x1, y1, x2, y2 in pixels of the image as it was given to the network."""
    labels: Tensor
    """int64 (n,)"""
    scores: Tensor
    """float32 (n,), from 0 to 1."""


class Detector(nn.Module):
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
        """The boxes in each image, with a score above `least`."""
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
    """How far off the outputs for a batch are: focal loss of the heat maps and L1 of sizes and centres, divided
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
    """What heat maps should be: 1 at the boxes' places, and less around them. `maps`: which map each box is in."""
    count, classes, high, wide = shape
    device = maps.device
    x = (torch.arange(wide, device=device) - places[:, :1]) / spread[:, :1]
    y = (torch.arange(high, device=device) - places[:, 1:]) / spread[:, 1:]
    gaussians = torch.exp(-(y[:, :, None] ** 2 + x[:, None, :] ** 2) / 2)
    wanted = torch.zeros(count * classes, high * wide, device=device)
    at = maps[:, None].expand(-1, high * wide)
    return wanted.scatter_reduce(0, at, gaussians.flatten(1), "amax").view(count, classes, high, wide)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of each of n boxes with each of m: n x m."""
    inner = torch.minimum(one[:, None, 2:], other[None, :, 2:]) - torch.maximum(one[:, None, :2], other[None, :, :2])
    shared = inner.clamp(min=0).prod(dim=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(dim=1) for boxes in (one, other)]
    return shared / (areas[0][:, None] + areas[1][None, :] - shared).clamp(min=1e-6)


def _distinct(boxes: Tensor, wanted: Tensor) -> Tensor:
    """The wanted boxes, the best first, without those that are another view of a better one: their positions."""
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


OVERLAP = 0.5


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
    """Which of the boxes found in an image are right: bool (n,)."""
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
    """One for each class, and one for all of them together, called `all`, whose average precision is the mean.
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
