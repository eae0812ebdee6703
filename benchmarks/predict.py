"""`dsctl predict` against its stages alone, and against a plain loop that decodes, predicts and writes in turns.

The model computes for a set time an image, on one processor; one decoder resizes photographs to 640×640. "Alone" is the
larger stage by itself in one process: all images decoded, or the model called for all. The plain loop uses the same
functions. Times begin when model and images are there, and end with the last result.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import simplejpeg

from benchmarks.harness import Home, ResultTable, benchmark, ratio, rounds_of
from datacache.core.errors import CacheError
from datacache.core.joblog import JobLog
from datacache.loaders.decode import decode_rgb
from datacache.loaders.processes import keep_freed_memory
from datacache.reader.snapshot import Snapshot

SIDE = 640


class SetCost:
    """A model that computes for so many milliseconds an image as a file says."""

    classes = ("face",)
    size = (SIDE, SIDE)

    def __init__(self, weights: Path) -> None:
        import torch

        torch.set_num_threads(1)
        self._seconds = float(weights.read_text()) / 1000
        self._matrix = torch.rand(160, 160)

    def __call__(self, images: list[Any]) -> list[Any]:
        end = time.thread_time() + self._seconds * len(images)
        while time.thread_time() < end:
            self._matrix @ self._matrix
        box = np.array([[10, 10, 100, 100]], np.float32), np.array([0]), np.array([0.5], np.float32)
        return [box] * len(images)


def main() -> None:
    with benchmark(__doc__, images=(500, 24), factors=[3.0, 1.0, 0.33], rounds=(2, 1)) as (args, work):
        folder = work.folder("images")
        make_photographs(folder, args.images)
        home = work.home("home")
        home.snapshot("photographs", folder, warm=True)
        with home.environment():
            measure(home, work.folder("models"), args.images, args.factors, args.rounds)


def make_photographs(folder: Path, count: int) -> None:
    """Write JPEGs of 1280 x 960, soft with some noise as photographs are."""
    draw = np.random.default_rng(1)
    for number in range(count):
        soft = np.kron(draw.integers(0, 230, (30, 40, 3), np.uint8), np.ones((32, 32, 1), np.uint8))
        noise = draw.integers(0, 24, soft.shape, np.uint8)
        (folder / f"{number:06d}.jpg").write_bytes(simplejpeg.encode_jpeg(soft + noise, quality=85))


def measure(home: Home, models: Path, images: int, factors: list[float], rounds: int) -> None:
    """Measure models that are so many times as dear as decoding."""
    from datacache import api

    with api.open_snapshot("photographs") as snapshot:
        paths = snapshot.paths()
        # As the decoders do. Without it a third of the time is page faults, or none of it: as malloc happens to be.
        keep_freed_memory()
        decode_all(snapshot, paths)
        some = paths[:100]
        decoding_ms = 1000 * median(timed_cpu(lambda: decode_all(snapshot, some)) for _ in range(3)) / len(some)
        table = ResultTable(
            f"{images:,} JPEGs of 1280×960; decoding one takes {decoding_ms:.1f} ms",
            *(
                "model / decoding",
                "s",
                "larger stage alone, s",
                "/ alone",
                "model at work",
                "plain loop, s",
                "× faster",
            ),
        )
        for factor in factors:
            weights = models / f"{factor:.2f}"
            weights.write_text(str(decoding_ms * factor))
            model = SetCost(weights)
            busy: list[float] = []

            def ours(weights: Path = weights, busy: list[float] = busy) -> float:
                done = home.dsctl(
                    *("predict", "photographs", "--model", "benchmarks.predict:SetCost", "--weights", weights),
                    *("--as", "found", "--json", "--decoders", "1", "--batch", "8"),
                )
                report = json.loads(done)["report"]
                busy.append(report["busy"])
                return float(report["seconds"])

            def alone(model: SetCost = model, factor: float = factor) -> float:
                began = time.perf_counter()
                if factor > 1:
                    for start in range(0, images, 8):
                        model([None] * min(8, images - start))
                else:
                    decode_all(snapshot, paths)
                return time.perf_counter() - began

            def plain(model: SetCost = model) -> float:
                log = JobLog(models / "log", {"at": time.time_ns()}, taken=CacheError("taken"))
                began = time.perf_counter()
                for path in paths:
                    pixels, _ = decode_rgb(snapshot.view(path), path, model.size)
                    [(boxes, labels, scores)] = model([pixels])
                    found = [path, boxes.tolist(), labels.tolist(), scores.tolist()]
                    log.add(json.dumps(found).encode())
                log.close()
                return time.perf_counter() - began

            times = {
                name: median(found)
                for name, found in rounds_of({"ours": ours, "alone": alone, "plain": plain}, rounds).items()
            }
            table.row(
                f"{factor:.2f}",
                times["ours"],
                times["alone"],
                ratio(times["ours"], times["alone"]),
                f"{100 * median(busy):.0f} %",
                times["plain"],
                ratio(times["plain"], times["ours"]),
            )
        table.print()


def decode_all(snapshot: Snapshot, paths: list[str]) -> None:
    for path in paths:
        decode_rgb(snapshot.view(path), path, (SIDE, SIDE))


def timed_cpu(action: Any) -> float:
    """Return the CPU seconds of this thread."""
    began = time.thread_time()
    action()
    return time.thread_time() - began


if __name__ == "__main__":
    main()
