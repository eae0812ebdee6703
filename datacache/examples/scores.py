"""How good boxes that were found are: average precision, and precision and recall at a threshold.

A found box is right if an image's box of its class that no better one has taken overlaps it by half (intersection over
union). Average precision is the area under precision over recall, as PASCAL VOC measures it since 2010 (Everingham et
al., "The PASCAL Visual Object Classes Challenge: A Retrospective", 2015). Boxes marked difficult count like others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from datacache.examples.detector import Found, overlap

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
