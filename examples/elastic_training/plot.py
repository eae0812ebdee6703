"""Draws the losses of the trainings that `compare.py curves` has run. Needs matplotlib. See README.md beside this file.

python examples/elastic_training/plot.py --out ./elastic --to curves.png
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("agg")
from matplotlib import pyplot as plt

COLOURS = {"fixed 2": "#1f77b4", "fixed 4": "#2ca02c", "changing 2-4": "#d62728"}
POINTS = 120
WINDOW = 0.04
"""Losses are means over this part of the training."""


def main(options: argparse.Namespace) -> None:
    curves: dict[str, list[np.ndarray]] = defaultdict(list)
    total = 0
    for path in sorted(options.out.glob("*.curve")):
        found = json.loads(path.read_text())
        total = found["used"]
        curves[found["kind"]].append(smooth(np.array(found["curve"]), total))
    if not curves:
        raise SystemExit(f"error: {options.out} has no curves\nhint: First run compare.py curves --out {options.out}")
    places = np.linspace(0, total, POINTS)
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for kind, found in curves.items():
        losses = np.stack(found)
        axes.plot(places, losses.mean(axis=0), color=COLOURS[kind], label=f"{kind} workers, {len(found)} seed(s)")
        axes.fill_between(places, losses.min(axis=0), losses.max(axis=0), color=COLOURS[kind], alpha=0.15, linewidth=0)
    axes.set(xlabel="records used", ylabel="loss of the training", xlim=(0, total))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(options.to, dpi=110)
    print(options.to)


def smooth(curve: np.ndarray, total: int) -> np.ndarray:
    """Return the mean loss around each of `POINTS` places. Steps that were done again count each time."""
    near = np.abs(curve[:, :1] - np.linspace(0, total, POINTS)) <= max(total * WINDOW / 2, 1)
    return (curve[:, 1:] * near).sum(axis=0) / np.maximum(near.sum(axis=0), 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draw the losses of trainings.")
    parser.add_argument("--out", type=Path, default=Path("elastic"), help="where compare.py left them")
    parser.add_argument("--to", type=Path, default=Path("curves.png"))
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
