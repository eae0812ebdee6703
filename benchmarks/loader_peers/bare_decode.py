"""Decoding and resizing in a plain loop, in as many processes as there are workers: nothing is read, handed over or
kept. The images' bytes are in memory before it begins.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.loader_peers.plan import Counted, Loader, ReadPlan, digest, image_files, total
from datacache.loaders.decode import decode_rgb


def open_loader(source: str, plan: ReadPlan) -> Loader:
    """Start processes that stay; each epoch they go through their share once."""
    paths = image_files(Path(source))
    images = [path.read_bytes() for path in paths]
    context = multiprocessing.get_context("fork")
    ends = []
    for worker in range(plan.workers):
        ours, theirs = context.Pipe()
        context.Process(
            target=_loop, args=(theirs, images[worker :: plan.workers], (plan.size, plan.size)), daemon=True
        ).start()
        ends.append(ours)

    def epoch(_number: int) -> Iterator[Counted]:
        for end in ends:
            end.send("decode")
        yield Counted(sum(end.recv() for end in ends), len(images) * plan.size * plan.size * 3)

    return epoch


def decoded(data: bytes, size: int) -> Any:
    """Decode an image for other people's data sets: RGB pixels in a tensor, (size, size, 3) uint8."""
    import torch

    return torch.from_numpy(decode_rgb(data, "", (size, size))[0])


def pixels_digest(images: Path, size: int) -> int:
    """Return what the digests of all decoded images come to."""
    return total(digest(decode_rgb(path.read_bytes(), path.name, (size, size))[0]) for path in image_files(images))


def _loop(commands: Connection, images: list[bytes], size: tuple[int, int]) -> None:
    while True:
        try:
            commands.recv()
        except EOFError:
            return
        for image in images:
            decode_rgb(image, "", size)
        commands.send(len(images))
