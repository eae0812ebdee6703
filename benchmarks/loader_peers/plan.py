"""The task of a contender, and the counts of the batches it gives. Imported in every peer's environment: the
standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

Loader = Callable[[int], Iterable[Any]]
"""Called with an epoch's number; gives that epoch's batches."""


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """How to read."""

    workers: int = 0
    """DataLoader workers; 0: in the process itself."""
    batch_size: int = 64
    cache: str = ""
    """An empty folder for what is copied here from a remote source."""
    size: int = 0
    """Decode to RGB and resize to this height and width; 0: raw bytes."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of one module."""

    def workers_stay(self) -> dict[str, Any]:
        """Return the arguments of a DataLoader for workers that live as long as it."""
        return {"num_workers": self.workers, "persistent_workers": self.workers > 0}


@dataclass(frozen=True)
class Counted:
    """A batch of which only the size is left."""

    samples: int
    size_bytes: int


def as_list(samples: list[Any]) -> list[Any]:
    """Collate samples as they are."""
    return samples


def image_files(folder: Path) -> list[Path]:
    """Return all images, in the order of their names."""
    return sorted(folder.glob("*.jpg"))


def count(batch: Any) -> Counted:
    """Return samples and bytes of a batch."""
    if isinstance(batch, Counted):
        return batch
    if hasattr(batch, "offsets"):
        return Counted(len(batch.offsets) - 1, int(batch.offsets[-1]))
    if isinstance(batch, list):
        return Counted(len(batch), sum(map(len, batch)) if isinstance(batch[0], bytes) else sum(map(_nbytes, batch)))
    return Counted(len(batch), _nbytes(batch))


def payloads(batch: Any) -> Iterator[Any]:
    """Yield the bytes of each sample of a batch."""
    if hasattr(batch, "offsets"):
        data, bounds = memoryview(batch.data.numpy()), batch.offsets.tolist()
        yield from (data[start:stop] for start, stop in pairwise(bounds))
    else:
        yield from (sample if isinstance(sample, bytes) else sample.numpy() for sample in batch)


def digest(payload: Any) -> int:
    """Return 64 bits that stand for these bytes; their sum does not depend on the order of samples."""
    return int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "little")


def total(digests: Iterable[int]) -> int:
    """Return the sum modulo 2**64."""
    return sum(digests) % 2**64


def _nbytes(tensor: Any) -> int:
    size: int = tensor.numel() * tensor.element_size()
    return size
