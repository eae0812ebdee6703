"""MosaicML Streaming: MDS shards, in its default order of shuffling."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.loader_peers.plan import Loader, ReadPlan, image_files

try:
    import torchvision  # noqa: F401  (needed by streaming for data sets not used here)
except (ImportError, RuntimeError):
    # A torchvision for CUDA beside a PyTorch for CPUs: what describes its operators cannot be imported, the rest can.
    sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")
from streaming import MDSWriter, StreamingDataset


def write(images: Path, target: Path) -> None:
    """Write shards of 64 MiB, which is its default, without compression."""
    with MDSWriter(out=str(target), columns={"image": "bytes"}) as writer:
        for path in image_files(images):
            writer.write({"image": path.read_bytes()})


def images_of(samples: list[dict[str, Any]]) -> list[bytes]:
    """Collate samples."""
    return [sample["image"] for sample in samples]


def open_loader(source: str, plan: ReadPlan) -> Loader:
    """Open `source`: a folder, or `s3://` with the endpoint in `S3_ENDPOINT_URL`, copied to the plan's cache."""
    where = {"remote": source, "local": plan.cache} if "://" in source else {"local": source}
    dataset = StreamingDataset(**where, shuffle=True, batch_size=plan.batch_size)
    for stream in dataset.streams:
        # The connection over which it got the index would be shared by all forked workers, who then read one another's
        # answers: one in four epochs failed, or stood still for a minute.
        stream._downloader.clean_up()  # noqa: SLF001
    loader = DataLoader(dataset, batch_size=plan.batch_size, collate_fn=images_of, **plan.workers_stay())
    return lambda _number: loader
