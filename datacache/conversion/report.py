"""What a conversion did: counts, and each problem with its file and line.

Made by the pipeline, printed by `dsctl convert`. Problems are kept in the order in which they were met, which is the
order of the images' paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from datacache.annotations.model import Problem


@dataclass
class Report:
    """Counts of one conversion, and everything that was not as it should be."""

    images: int = 0
    """Images of the source."""
    written: int = 0
    """Images of the result."""
    boxes: int = 0
    """Boxes of the result."""
    empty: int = 0
    """Images of the result that have an annotation without a box."""
    emptied: int = 0
    """Images of the result that had boxes, of which the classes asked for or an operation left none."""
    difficult_left_out: int = 0
    """Boxes that `skip_difficult` left out."""
    classes: Counter[str] = field(default_factory=Counter)
    """Boxes of the result by label."""
    splits: Counter[str] = field(default_factory=Counter)
    """Images of the result by split."""
    problems: list[Problem] = field(default_factory=list)

    def add(self, problems: Iterable[Problem]) -> None:
        """Note problems."""
        self.problems += problems

    @property
    def counts(self) -> dict[str, int]:
        """Problems by code."""
        return dict(sorted(Counter(problem.code for problem in self.problems).items()))

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "images": self.images,
            "written": self.written,
            "boxes": self.boxes,
            "empty": self.empty,
            "emptied": self.emptied,
            "difficult_left_out": self.difficult_left_out,
            "classes": dict(self.classes),
            "splits": dict(self.splits),
            "problem_counts": self.counts,
            "problems": [problem._asdict() for problem in self.problems],
        }
