"""The limit: a tar of all images, read from its start to its end with `readinto`, and nothing made of it.

A loader that hands over a batch has to leave that many bytes in memory, so the buffer has the size of a batch
(`options["buffer_bytes"]`), and is used over and over. No PyTorch.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.loader_peers.plan import Counted, Loader, ReadPlan, image_files


def write(images: Path, target: Path) -> None:
    """Write `images.tar` into `target`."""
    with tarfile.open(target / "images.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for path in image_files(images):
            tar.add(path, path.name)


def open_loader(source: str, plan: ReadPlan) -> Loader:
    """Open it: one batch an epoch, with as many samples as the tar has: `options["samples"]`."""
    buffer = bytearray(plan.options["buffer_bytes"])

    def epoch(_number: int) -> Iterator[Counted]:
        with open(f"{source}/images.tar", "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
            yield Counted(plan.options["samples"], os.fstat(file.fileno()).st_size)

    return epoch
