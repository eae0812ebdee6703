"""Whole batches: one tensor of bytes and where each sample begins, and the `collate` that DataLoaders are given.

Used by the datasets and the loader; needs PyTorch. Any process: in a DataLoader's worker a batch is made in shared
memory at once, so that handing it over copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from datacache.core.errors import UsageError
from datacache.loaders.device import each_part, pinned, record
from datacache.loaders.processes import keep_freed_memory
from datacache.loaders.segments import empty_shared, hand_over_segments

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


class PackedSample(NamedTuple):
    """One sample of a packed batch."""

    image: Any
    """uint8 tensor of its bytes: a view into the batch."""
    target: Any


class PackedBatch:
    """The raw bytes of many samples in one tensor. It pins and moves like a tensor (`pin_memory()`, `to(device)`).

    `data`: uint8, one dimension. `offsets`: int64 of shape (n + 1,); sample k is `data[offsets[k]:offsets[k + 1]]`.
    `targets`: an int64 tensor for classification, None where none were asked for, else a list. Of a batch all of whose
    samples were skipped, `[0]` is a sample of no bytes: PyTorch's `default_collate` looks at it.
    """

    __slots__ = ("data", "offsets", "targets")

    def __init__(self, data: Any, offsets: Any, targets: Any = None) -> None:
        self.data, self.offsets, self.targets = data, offsets, targets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, at: int) -> PackedSample:
        count = len(self)
        if not count and at == 0:
            return PackedSample(self.data[:0], None)
        if not -count <= at < count:
            raise IndexError(f"a batch of {count} samples has no sample {at}")
        at %= count
        image = self.data[int(self.offsets[at]) : int(self.offsets[at + 1])]
        return PackedSample(image, None if self.targets is None else self.targets[at])

    def __iter__(self) -> Iterator[PackedSample]:
        return (self[at] for at in range(len(self)))

    def __repr__(self) -> str:
        return f"<PackedBatch: {len(self)} samples, {len(self.data):,} bytes>"

    def pin_memory(self) -> PackedBatch:
        """Return the batch in page-locked memory, targets included."""
        return self._each(pinned)

    def to(self, device: Any, *, non_blocking: bool = False) -> PackedBatch:
        """Return the batch on a device, targets included."""
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        self._each(lambda part: record(part, stream))

    def _each(self, change: Callable[[Any], Any]) -> PackedBatch:
        return PackedBatch(*each_part([self.data, self.offsets, self.targets], change))


class EmptyBatch(list[Any]):
    """The list of samples of a batch of which all were skipped: it knows what they would have been."""

    def __init__(self, parts: int) -> None:
        """`parts`: how many things a sample is, as a tuple; 0 for one that is no tuple."""
        super().__init__()
        self.parts = parts

    def __getitem__(self, at: Any) -> Any:
        return self if at == 0 else super().__getitem__(at)  # PyTorch's default_collate looks at the first sample

    def collated(self) -> Any:
        """Return what `collate` makes of it: unpacked as any other batch is."""
        return tuple([] for _ in range(self.parts)) if self.parts else []


def is_empty(samples: Any) -> bool:
    """Tell whether what a dataset gave for a batch has no sample in it."""
    return isinstance(samples, list | PackedBatch) and not len(samples)


class Nothing:
    """The stand-in for a batch of which all samples were skipped."""

    __slots__ = ()


@dataclass(frozen=True)
class CollateUnlessEmpty:
    """A `collate_fn` that is given no batch without samples: a user's would fail. Equal if the `collate` is."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        return Nothing() if is_empty(samples) else self.collate(samples)


def empty(shape: tuple[int, ...], dtype: Any = torch.uint8) -> Any:
    """Return an empty tensor for a batch: in a DataLoader's worker, in shared memory, where it would have to go
    anyway."""
    if get_worker_info() is None:
        keep_freed_memory()
        return torch.empty(shape, dtype=dtype)
    return empty_shared(shape, dtype)


def pack_targets(targets: Sequence[Any], kind: str | None = None) -> Any:
    """Return numbers as a tensor, everything else as a list. Of the kind "classification", none are a tensor of
    none."""
    if not targets and kind == "classification":
        return torch.empty(0, dtype=torch.int64)
    return _numbers(targets) if targets and isinstance(targets[0], _NUMBERS) else list(targets)


def collate(batch: Any) -> Any:
    """Collate, as a `collate_fn`, everything our datasets give, and for what their transforms make of it.

    A packed batch stays as it is. Samples that are tuples of one length, such as `(image, target)`, become a tuple of
    as many parts, a named tuple one of its kind; other samples are one part. A part is

    - a tensor, where its values are tensors or arrays of one shape and dtype: they are stacked;
    - a tensor, where they are numbers, Python's or NumPy's: int64, float64 or bool for Python's, as in PyTorch's own;
    - else a list: images of several sizes, boxes and other dicts, bytes, strings, what a transform nests.

    Of a batch all of whose samples were skipped, each part is an empty list.
    """
    if get_worker_info() is not None:
        hand_over_segments()
    if isinstance(batch, PackedBatch):
        return batch
    if isinstance(batch, EmptyBatch):
        return batch.collated()
    if not batch:
        return []
    first = batch[0]
    if (
        isinstance(first, tuple)
        and first
        and all(isinstance(each, tuple) and len(each) == len(first) for each in batch)
    ):
        parts = [_stacked(part) for part in zip(*batch, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return _stacked(batch)


def collate_ultralytics(batch: Any) -> dict[str, Any]:
    """Collate decoded samples of `style="ultralytics"` into the batch that Ultralytics' models are trained with: `img`
    (n, 3, height, width), and of all objects one after another `cls`, `bboxes` and the like, with `batch_idx`, the
    number of their image. Of classes it has `img` and `cls`. `UsageError` for images of several sizes."""
    images, targets = collate(batch)
    if not isinstance(images, torch.Tensor):
        raise UsageError("the images of a batch have several sizes", hint='Add decode="rgb" and size=640, for one.')
    found: dict[str, Any] = {"img": images.permute(0, 3, 1, 2).contiguous()}
    if isinstance(targets, torch.Tensor):
        return found | {"cls": targets}
    for name in targets[0]:
        values = [target[name] for target in targets]
        found[name] = list(chain.from_iterable(values)) if isinstance(values[0], list) else torch.cat(values)
    counts = torch.tensor([len(target["cls"]) for target in targets])
    return found | {"batch_idx": torch.arange(len(targets), dtype=torch.float32).repeat_interleave(counts)}


def _stacked(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        alike = all(
            isinstance(value, torch.Tensor) and value.shape == first.shape and value.dtype == first.dtype
            for value in values
        )
        return _stack(values) if alike else list(values)
    if isinstance(first, np.ndarray):
        if all(isinstance(value, np.ndarray) and value.dtype.kind in "biufc" for value in values):
            return _stacked([torch.from_numpy(np.asarray(value, order="C")) for value in values])
        return list(values)
    return _numbers(values) if isinstance(first, _NUMBERS) else list(values)


def _numbers(values: Sequence[Any]) -> Any:
    if all(isinstance(value, _NUMBERS) for value in values):
        with suppress(TypeError, OverflowError):
            return torch.from_numpy(np.array(values))
    return list(values)


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


# torch.utils.data.default_collate, "collate_fn_map": a packed batch passes a DataLoader that was given no collate_fn,
# and so does one of which all samples were skipped.
default_collate_fn_map[PackedSample] = lambda batch, *, collate_fn_map=None: batch
default_collate_fn_map[EmptyBatch] = lambda batch, *, collate_fn_map=None: batch.collated()
