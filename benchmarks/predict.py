"""`dsctl predict` against its stages alone, and against a plain loop that decodes, predicts and writes in turns.

The model computes for a set time an image, on one processor; one decoder resizes photographs to 640×640. "Alone" is the
larger stage by itself in one process: all images decoded, or the model called for all. The plain loop uses the same
functions. Times begin when model and images are there, and end with the last result.

`--device cuda` (or `cpu`, to try it) compares images a second on a device instead: `dsctl predict` with one process and
with two, a loop over PyTorch's DataLoader with the same model, and, where Ultralytics is installed, a YOLO of it beside
its own `predict`. The GPU's utilisation is nvidia-smi's, from its first sample at work to the last.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import simplejpeg

from benchmarks.harness import Home, ResultTable, benchmark, ratio, rounds_of
from datacache.core.cores import cores
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
    with benchmark(__doc__, images=(500, 24), factors=[3.0, 1.0, 0.33], rounds=(2, 1), device="") as (args, work):
        folder = work.folder("images")
        make_photographs(folder, args.images)
        home = work.home("home")
        home.snapshot("photographs", folder, warm=True)
        with home.environment():
            if args.device:
                measure_device(home, folder, args.device, args.images)
            else:
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


# --- on a device ----------------------------------------------------------------------------------------------------

BATCH = 16


def convolutions() -> Any:
    """Return a network of about as many operations as a small detector has."""
    import torch

    class Net(torch.nn.Module):
        classes = ("face",)
        size = (SIDE, SIDE)

        def __init__(self) -> None:
            super().__init__()
            widths = (3, 32, 64, 128, 256, 512)
            layers = [torch.nn.Conv2d(a, b, 3, 2, 1) for a, b in itertools.pairwise(widths)]
            same = [torch.nn.Conv2d(b, b, 3, 1, 1) for b in widths[1:]]
            pairs = zip(layers, same, strict=True)
            self.layers = torch.nn.Sequential(*(part for pair in pairs for part in (*pair, torch.nn.ReLU())))

        def forward(self, images: Any) -> Any:
            scores = self.layers(images).mean((1, 2, 3)).sigmoid().reshape(-1, 1)
            boxes = torch.tensor([10.0, 10.0, 100.0, 100.0], device=images.device).expand(len(images), 1, 4)
            return boxes, torch.zeros_like(scores, dtype=torch.int64), scores

    return Net()


def yolo() -> Any:
    """Return a YOLO of Ultralytics without trained weights: its speed is the same."""
    from ultralytics import YOLO

    return YOLO("yolov8s.yaml")


def measure_device(home: Home, folder: Path, device: str, images: int) -> None:
    """Compare images a second, and how much of the time a GPU is at work."""
    table = ResultTable(f"{images:,} JPEGs of 1280×960 on {device}", "", "images/s", "GPU at work")

    def ours(model: str, processes: int) -> float:
        done = home.dsctl(
            *("predict", "photographs", "--model", f"benchmarks.predict:{model}", "--device", device, "--as", "found"),
            *("--json", "--batch", str(BATCH), "--processes", str(processes)),
        )
        return float(json.loads(done)["report"]["seconds"])

    def row(name: str, action: Any, *arguments: Any) -> None:
        with utilisation(device) as samples:
            seconds = action(*arguments)
        used = [at for at, percent in enumerate(samples) if percent]
        at_work = samples[used[0] : used[-1] + 1] if used else []
        table.row(name, images / seconds, f"{sum(at_work) / len(at_work):.0f} %" if at_work else "")

    for processes in (1, 2):
        row(f"dsctl predict, --processes {processes}", ours, "convolutions", processes)
    row("a loop over PyTorch's DataLoader", plain_loader, folder, device)
    if find_spec("ultralytics"):
        for processes in (1, 2):
            row(f"dsctl predict, YOLO, --processes {processes}", ours, "yolo", processes)
        row("YOLO's own predict", own_predict, folder, device)
    table.print()


@contextlib.contextmanager
def utilisation(device: str) -> Iterator[list[float]]:
    """Collect a GPU's utilisation in percent, five times a second; nothing of a processor. Read it at the end."""
    samples: list[float] = []
    if not device.startswith("cuda"):
        yield samples
        return
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    query += ["-i", device.partition(":")[2] or "0"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield samples
        finally:
            process.terminate()
            samples += map(float, process.communicate()[0].split())


class Photographs:
    """A dataset of PyTorch of the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, at: int) -> Any:
        return decode_rgb(self._paths[at].read_bytes(), "", (SIDE, SIDE))[0]


def plain_loader(folder: Path, device: str) -> float:
    """Return the seconds of the loop that people write."""
    import torch
    from torch.utils.data import DataLoader

    model = convolutions().to(device).eval()
    dataset: Any = Photographs(folder)
    workers = {"num_workers": max(1, cores() - 1), "pin_memory": device.startswith("cuda")}
    found = []
    began = time.perf_counter()
    with torch.no_grad():
        for batch in DataLoader(dataset, batch_size=BATCH, **workers):
            moved = batch.to(device, non_blocking=True).permute(0, 3, 1, 2).float() / 255
            found += [part.tolist() for part in model(moved)]
    return time.perf_counter() - began


def own_predict(folder: Path, device: str) -> float:
    """Return the seconds of Ultralytics' own loop over the files."""
    model = yolo()
    began = time.perf_counter()
    for found in model.predict(str(folder), stream=True, batch=BATCH, device=device, conf=0.05, verbose=False):
        found.boxes.data.tolist()
    return time.perf_counter() - began


# --- alone ----------------------------------------------------------------------------------------------------------


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
