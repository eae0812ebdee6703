"""Trains something small and saves a checkpoint every few seconds into a folder. See README.md beside this file.

python examples/checkpoints/save.py /mnt/runs --every 2 --record acknowledged.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import torch

LATEST = "latest.pt"
HIDDEN = 512


def main(options: argparse.Namespace) -> int:
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    torch.manual_seed(options.seed)
    layers = max(1, options.megabytes * 10**6 // (4 * HIDDEN * HIDDEN))
    model = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    saved = failed = 0
    with open(options.record, "ab") as record:
        step = 0
        while not stop.is_set() and saved < options.count:
            begun = time.monotonic()
            step += 1
            train(model, optimizer)
            checkpoint = {"step": step, "model": model.state_dict()}
            for name in (f"step-{step:06d}.pt", LATEST):
                try:
                    seconds = save(checkpoint, options.folder / name, fsync=options.fsync)
                except (OSError, RuntimeError) as exc:  # torch.save raises a RuntimeError when its file fails
                    failed += 1
                    print(f"{name} of step {step} was not saved: {exc}", file=sys.stderr, flush=True)
                    continue
                # Only now is the checkpoint acknowledged. The record itself must be on a disk that keeps what it says.
                line = {"file": name, "step": step, "sum": sum_of(checkpoint), "seconds": round(seconds, 3)}
                record.write(json.dumps(line).encode() + b"\n")
                record.flush()
                os.fsync(record.fileno())
                saved += name != LATEST
            stop.wait(max(0.0, options.every - (time.monotonic() - begun)))
    print(f"{saved} checkpoints saved, {failed} attempts failed")
    return 0


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step, so that no checkpoint is as the one before."""
    optimizer.zero_grad()
    loss = (model(torch.randn(4, HIDDEN)) - 1).square().mean()
    loss.backward()
    optimizer.step()


def save(checkpoint: dict[str, Any], path: Path, *, fsync: bool) -> float:
    """Write it beside its place and move it there: whoever opens the path finds a whole checkpoint. Seconds it took."""
    begun = time.monotonic()
    beside = path.with_name(f"{path.name}.tmp")
    with open(beside, "wb") as file:
        torch.save(checkpoint, file)
        if fsync:
            file.flush()
            os.fsync(file.fileno())
    os.replace(beside, path)
    if fsync:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return time.monotonic() - begun


def sum_of(checkpoint: dict[str, Any]) -> str:
    """A checksum of the weights."""
    found = hashlib.sha256()
    for name, weights in checkpoint["model"].items():
        found.update(name.encode())
        found.update(weights.numpy().tobytes())
    return found.hexdigest()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where checkpoints go: a mount, or any folder")
    parser.add_argument("--record", type=Path, required=True, help="file on another disk: what was acknowledged")
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one checkpoint to the next")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="how many, if not until Ctrl-C")
    parser.add_argument("--megabytes", type=int, default=8, help="size of a checkpoint")
    parser.add_argument("--fsync", action="store_true", help="for folders where closing and renaming is not enough")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(options()))
