"""The common part of `SnapshotDataset` and `ShardDataset`: samples by number, one or a whole batch, decoded or raw.

Needs PyTorch. A dataset is read-only but for its count of skipped samples: any thread, workers made by `fork` or
`spawn`, and pickled. It keeps nothing of what it has read, and what it gives is the caller's own: no view of cached
bytes leaves it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, get_worker_info

from datacache.core.errors import DatacacheError, UsageError
from datacache.loaders.decode import Size, decode_rgb, height_and_width
from datacache.loaders.packed import EmptyBatch, PackedBatch, empty, pack_targets
from datacache.loaders.source import Read, SampleOptions, SampleSource
from datacache.loaders.tuning import clock as timing
from datacache.settings import Settings

log = logging.getLogger("datacache.loader")
_SKIPPERS = 128
"""Slots in which workers count what they skipped, each its own."""


@dataclass(frozen=True, kw_only=True)
class Options(SampleOptions):
    """How samples are given; the arguments of the datasets."""

    decode: str = "bytes"
    """`bytes`: as they are stored. `rgb`: a uint8 tensor of height x width x 3."""
    size: int | Sequence[int] | str | None = None
    """Height and width that images are resized to, as torch has it; a number is both. Text is width x height, as
    `dsctl convert --resize` has it: `"640x480"`."""
    transform: Callable[..., Any] | None = None
    """Called with `(image, target)`, or with `image` where there are no targets; gives the sample."""
    packed: bool = False
    """Batches are `PackedBatch`es of stored bytes."""

    def __post_init__(self) -> None:
        if self.decode not in ("bytes", "rgb"):
            raise UsageError(f"decode={self.decode!r}: there is no such way", hint="decode='bytes' or decode='rgb'.")
        SampleOptions.__post_init__(self)
        if self.resized is not None and self.decode != "rgb":
            raise UsageError("size= is of decoded images", hint="Add decode='rgb'.")
        if self.packed and (self.decode != "bytes" or self.transform is not None):
            raise UsageError(
                "packed=True gives stored bytes", hint="Without decode='rgb' and transform, or not packed."
            )

    @cached_property
    def resized(self) -> Size | None:
        """Return what `size` means. Raise `UsageError` if it is no size."""
        return height_and_width(self.size)


class SampleDataset(SampleSource, Dataset):
    """A map-style dataset. `ds[i]` is `(image, target)`, or the image alone where there are no targets."""

    def __init__(self, options: Options, settings: Settings) -> None:
        self.options, self.settings = options, settings
        self._skipped = torch.zeros(_SKIPPERS, dtype=torch.int64).share_memory_()
        self._parts = 0 if self.kind is None else 2  # of a sample; transforms may make more or fewer

    # --- what users and DataLoaders call ------------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """How many samples were left out of batches so far (`on_error="skip"`), in all processes."""
        return int(self._skipped.sum())

    def __getitem__(self, sample: int) -> Any:
        sample = self._number(sample)
        return self._sample(sample, self._expect(self.read_each([sample])[0]))

    def __getitems__(self, samples: Sequence[int]) -> Any:
        """Return a whole batch: what is not on this node is fetched at once. A list of samples, or a `PackedBatch`."""
        numbers = [self._number(sample) for sample in samples]
        return self._pack(numbers) if self.options.packed else self._batch(numbers)

    def target(self, sample: int) -> Any:
        """Return a sample's target, before any transform; boxes as tensors, which share its arrays' memory."""
        target = super().target(sample)
        if isinstance(target, dict):
            return {
                name: [torch.from_numpy(each) for each in values]
                if isinstance(values, list)
                else torch.from_numpy(values)
                for name, values in target.items()
            }
        return target

    def read(self, sample: int) -> bytes:
        """Return a sample's stored bytes."""
        return bytes(self._expect(self.read_each([self._number(sample)])[0]))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _number(self, sample: int) -> int:
        sample = int(sample)
        if sample < 0:
            sample += len(self)
        if not 0 <= sample < len(self):
            raise IndexError(f"there is no sample {sample} of {len(self):,}")
        return sample

    def _batch(self, samples: Sequence[int]) -> list[Any]:
        made = []
        for sample, found in zip(samples, self.read_each(samples), strict=True):
            try:
                made.append(self._sample(sample, self._expect(found)))
            except DatacacheError as exc:
                self._unless_skipped(exc)
        if not made:
            return EmptyBatch(self._parts)
        self._parts = len(made[0]) if isinstance(made[0], tuple) else 0
        return made

    def _pack(self, samples: Sequence[int]) -> PackedBatch:
        clock = timing.clock()
        began = clock.start()
        numbers = np.array(samples, np.int64)
        offsets = np.zeros(len(numbers) + 1, np.int64)
        np.cumsum(self._sizes[numbers], out=offsets[1:])
        total = int(offsets[-1])
        data = empty((total,))
        starts = offsets[:-1].tolist()
        out = memoryview(data.numpy())
        left = self.copy_here(numbers, out, starts)
        began = clock.lap(timing.READ, began)
        lost: list[int] = []
        if left:
            for at, found in zip(left, self.fetch([samples[at] for at in left]), strict=True):
                if isinstance(found, DatacacheError):
                    self._unless_skipped(found)
                    lost.append(at)
                else:
                    out[starts[at] : starts[at] + len(found)] = found
            began = clock.lap(timing.MISS, began)
        clock.count(len(samples), total, len(left))
        targets: list[Any] = []
        if self.kind is not None:
            gone = set(lost)
            for at, sample in enumerate(samples):
                try:
                    targets += () if at in gone else [self.target(sample)]
                except DatacacheError as exc:
                    self._unless_skipped(exc)
                    lost.append(at)
            clock.lap(timing.READ, began)
        if lost:
            data, offsets = _without(data, offsets, set(lost))
        return PackedBatch(
            data, torch.from_numpy(offsets), None if self.kind is None else pack_targets(targets, self.kind)
        )

    def _sample(self, sample: int, data: bytes | memoryview) -> Any:
        options = self._options_of(sample)
        clock = timing.clock()
        began = clock.start()
        target = None if self.kind is None else self.target(sample)
        image: Any
        if options.decode == "rgb":
            pixels, own = decode_rgb(data, lambda: self.path(sample), options.resized)
            image = torch.from_numpy(pixels)
            if options.resized is not None:
                target = _scaled(target, own, options.resized)
            began = clock.lap(timing.DECODE, began)
        else:
            image = bytes(data)
            began = clock.lap(timing.READ, began)
        if options.transform is None:
            return image if self.kind is None else (image, target)
        given = options.transform(image) if self.kind is None else options.transform(image, target)
        clock.lap(timing.TRANSFORM, began)
        return given

    def _options_of(self, _sample: int) -> Options:
        """Return how a sample is decoded and transformed."""
        return self.options

    @staticmethod
    def _expect(found: Read) -> bytes | memoryview:
        if isinstance(found, DatacacheError):
            raise found
        return found

    def _unless_skipped(self, error: DatacacheError) -> None:
        """Raise what is wrong with a sample, or count it."""
        if not self.options.skips(error):
            raise error
        worker = get_worker_info()
        number = 0 if worker is None else 1 + worker.id % (_SKIPPERS - 1)
        if not int(self._skipped[number]):
            log.warning("a sample is left out, and so will be others like it: %s", error)
        self._skipped[number] += 1


def _scaled(target: Any, own: Size, size: Size) -> Any:
    """Scale boxes and shapes to an image resized from `own` to `size`, and return them."""
    if isinstance(target, dict) and "boxes" in target and own != size:
        height, width = size[0] / own[0], size[1] / own[1]
        target["boxes"] *= torch.tensor([width, height, width, height])
        scales = ("corners", (width, height)), ("keypoints", (width, height, 1.0)), ("area", (width * height,))
        for name, factors in scales:
            if name in target:
                target[name] *= torch.tensor(factors)
    if isinstance(target, dict) and "masks" in target and target["masks"].shape[1:] != size:
        masks = target["masks"]
        target["masks"] = interpolate(masks[None], size)[0] if masks.numel() else masks.new_zeros((len(masks), *size))
    return target


def _without(data: Any, offsets: NDArray[np.int64], lost: set[int]) -> tuple[Any, NDArray[np.int64]]:
    bounds = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    kept = [bound for at, bound in enumerate(bounds) if at not in lost]
    ends = [0, *accumulate(stop - start for start, stop in kept)]
    out = empty((ends[-1],))
    for at, (start, stop) in enumerate(kept):
        out[ends[at] : ends[at + 1]] = data[start:stop]
    return out, np.array(ends, np.int64)
