"""Whole batches: one tensor of bytes and where each sample begins, and the `collate` that DataLoaders are given.

Used by the datasets and the loader; needs PyTorch. Any process: in a DataLoader's worker a batch is made in shared
memory at once, so that handing it over copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from datacache.loaders.allocator import keep_freed_memory
from datacache.loaders.segments import empty_shared, hand_over_segments


class PackedSample(NamedTuple):
    """One sample of a packed batch."""

    image: Any
    """uint8 tensor of its bytes: a view into the batch."""
    target: Any


class PackedBatch:
    """The raw bytes of many samples in one tensor. It pins and moves like a tensor (`pin_memory()`, `to(device)`).

    `data`: uint8, one dimension. `offsets`: int64 of shape (n + 1,); sample k is `data[offsets[k]:offsets[k + 1]]`.
    `targets`: an int64 tensor for classification, None where none were asked for, else a list.
    """

    __slots__ = ("data", "offsets", "targets")

    def __init__(self, data: Any, offsets: Any, targets: Any = None) -> None:
        self.data, self.offsets, self.targets = data, offsets, targets

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self.offsets) - 1

    def __getitem__(self, at: int) -> PackedSample:
        if not 0 <= at < len(self):
            raise IndexError(f"a batch of {len(self)} samples has no sample {at}")
        image = self.data[int(self.offsets[at]) : int(self.offsets[at + 1])]
        return PackedSample(image, None if self.targets is None else self.targets[at])

    def __iter__(self) -> Iterator[PackedSample]:
        return (self[at] for at in range(len(self)))

    def __repr__(self) -> str:
        return f"<PackedBatch: {len(self)} samples, {len(self.data):,} bytes>"

    def pin_memory(self) -> PackedBatch:
        """The same in page-locked memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def to(self, device: Any, *, non_blocking: bool = False) -> PackedBatch:
        """The same on a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        """See `torch.Tensor.record_stream`."""
        for tensor in (self.data, self.offsets, self.targets):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)

    def _each(self, change: Callable[[Any], Any]) -> PackedBatch:
        targets = change(self.targets) if isinstance(self.targets, torch.Tensor) else self.targets
        return PackedBatch(change(self.data), change(self.offsets), targets)


def empty(shape: tuple[int, ...], dtype: Any = torch.uint8) -> Any:
    """An empty tensor for a batch: in a DataLoader's worker, in shared memory, where it would have to go anyway."""
    if get_worker_info() is None:
        keep_freed_memory()
        return torch.empty(shape, dtype=dtype)
    return empty_shared(shape, dtype)


def pack_targets(targets: Sequence[Any]) -> Any:
    """Numbers as a tensor, everything else as a list."""
    if targets and all(isinstance(target, int) for target in targets):
        return torch.tensor(targets, dtype=torch.int64)
    return list(targets)


def collate(batch: Any) -> Any:
    """The `collate_fn` for everything our datasets give.

    A packed batch stays as it is. Samples `(image, target)` become `(images, targets)`, and images alone `images`:
    tensors of one shape are stacked, numbers become a tensor, and what differs in shape or kind (images of several
    sizes, boxes, bytes, paths) stays a list.
    """
    if get_worker_info() is not None:
        hand_over_segments()
    if isinstance(batch, PackedBatch):
        return batch
    if batch and isinstance(batch[0], tuple) and len(batch[0]) == 2:
        images, targets = zip(*batch, strict=True)
        return _stacked(images), _stacked(targets)
    return _stacked(batch) if batch else []


def _stacked(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        alike = all(
            isinstance(value, torch.Tensor) and value.shape == first.shape and value.dtype == first.dtype
            for value in values
        )
        return _stack(values) if alike else list(values)
    if isinstance(first, np.ndarray):
        return _stacked([torch.from_numpy(value) for value in values])
    return pack_targets(values) if isinstance(first, int) else list(values)


def _stack(tensors: Sequence[Any]) -> Any:
    first = tensors[0]
    out = empty((len(tensors), *first.shape), first.dtype)
    if not first.numel() or any(tensor.requires_grad or tensor.device.type != "cpu" for tensor in tensors):
        return torch.stack(list(tensors))
    # One memcpy each: torch.stack would share it out to threads, which wait for one another where processors are busy.
    rows = out.view(len(tensors), -1).view(torch.uint8).numpy()
    for row, tensor in zip(rows, tensors, strict=True):
        row[:] = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return out


def _keep(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return batch


# torch.utils.data.default_collate, "collate_fn_map": a packed batch passes a DataLoader that was given no collate_fn.
default_collate_fn_map[PackedSample] = _keep
