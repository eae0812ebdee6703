"""Models for tests: they need no weights, and always say the same of an image."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np


class Finder:
    """Finds in each image two boxes and scores that its pixels decide."""

    classes: tuple[str, ...] = ("mask", "no_mask")

    def __call__(self, images: list[Any]) -> list[Any]:
        return [self.find(image) for image in images]

    def find(self, image: Any) -> Any:
        """Return boxes, labels and scores of one image."""
        height, width = image.shape[:2]
        mean = float(image.mean()) / 256
        boxes = np.array([[0, 0, width / 2, height * mean], [width * mean, 1.5, width, height]], np.float32)
        return boxes, np.array([0, 1]), np.array([mean, 1 / 3], np.float32)


class SmallFinder(Finder):
    """Wants images of one size, and finds the same part of each."""

    size = (60, 160)

    def find(self, image: Any) -> Any:
        assert image.shape == (60, 160, 3)
        return np.array([[40, 15, 80, 60]], np.float32), np.array([1]), np.array([0.5], np.float32)


class Sorter(Finder):
    """Classifies images by their brightness."""

    def find(self, image: Any) -> Any:
        mean = float(image.mean()) / 256
        return np.array([mean, 1 - mean], np.float32)


class Failing(Finder):
    """Fails at its second batch as long as a file is there."""

    def __init__(self, weights: Path) -> None:
        self._file, self._calls = weights.with_name("fails"), 0

    def __call__(self, images: list[Any]) -> list[Any]:
        self._calls += 1
        if self._calls == 2 and self._file.exists():
            raise ArithmeticError("the model is confused")
        return super().__call__(images)


class Slow(Finder):
    """Takes its time, so that a kill finds it at work."""

    def __init__(self, weights: Path) -> None:
        pass

    def __call__(self, images: list[Any]) -> list[Any]:
        time.sleep(0.05 * len(images))
        return super().__call__(images)


class Killing(Finder):
    """Kills, at its second batch, the process that the list beside its weights says next."""

    def __init__(self, weights: Path) -> None:
        self._file, self._calls = weights.with_name("kills.json"), 0

    def __call__(self, images: list[Any]) -> list[Any]:
        self._calls += 1
        kills: list[str] = json.loads(self._file.read_text())
        if self._calls == 2 and kills:
            self._file.write_text(json.dumps(kills[1:]))
            os.kill(self._process(kills[0]), signal.SIGKILL)
            while kills[0] == "command":  # which takes this process along
                signal.pause()
        return super().__call__(images)

    @staticmethod
    def _process(name: str) -> int:
        if name == "decoder":
            return int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[0])
        return os.getpid() if name == "model" else os.getppid()
