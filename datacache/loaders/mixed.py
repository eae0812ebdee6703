"""Draw from several datasets as if they were one, by weight. `datacache.torch.mix` opens the parts.

Needs PyTorch. As other datasets it is read-only: any thread, workers made by `fork` or `spawn`, and pickled. A batch is
read out of all parts into the place where it is needed; no part makes a batch of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from datacache.core.errors import UsageError
from datacache.core.ids import BLOCK_BYTES
from datacache.loaders.dataset import Options, SampleDataset
from datacache.loaders.lookahead import PlanSource
from datacache.loaders.mixed_order import MixedOrder, Stop, places_of, seed_of_part
from datacache.loaders.order import EpochOrder, Shuffle
from datacache.loaders.selection import NO_CLASS
from datacache.loaders.source import Read, SampleSource

_OWN_OPTIONS = {"size", "transform"}
"""What parts may differ in."""


class MixedDataset(SampleDataset):
    """The samples of several datasets, numbered one part after another; behind them come the numbers of those that a
    part repeats in an epoch, so that a plain sampler that gives each number once has the shares of an epoch, too."""

    def __init__(
        self,
        parts: Sequence[SampleDataset],
        weights: Sequence[float],
        *,
        classes: Sequence[str] | None = None,
        stop: Stop = "all",
    ) -> None:
        """`UsageError` says which part does not fit."""
        _check(parts)
        self.parts = tuple(parts)
        self.places = tuple(places_of([len(part) for part in parts], weights, stop))
        """How often each part comes in an epoch."""
        ids = tuple(dict.fromkeys(name for part in parts for name in part.classes)) if classes is None else classes
        SampleSource.__init__(self, np.concatenate([part.sizes for part in parts]), parts[0].kind, tuple(ids))
        SampleDataset.__init__(self, replace(parts[0].options, transform=None), parts[0].settings)
        self.style = parts[0].style
        self._class_ids = [_class_ids(part, self.classes) for part in parts]
        self._starts = [0, *accumulate(len(part) for part in parts)]
        repeats = (max(0, places - len(part)) for part, places in zip(parts, self.places, strict=True))
        self._repeats = [len(self._sizes), *(len(self._sizes) + end for end in accumulate(repeats))]

    # --- samples ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._repeats[-1]

    def part_of(self, sample: int) -> tuple[int, int]:
        """Return the part that a sample is of, and its number there."""
        if sample >= self._starts[-1]:
            part = bisect_right(self._repeats, sample) - 1
            return part, (sample - self._repeats[part]) % len(self.parts[part])
        part = bisect_right(self._starts, sample) - 1
        return part, sample - self._starts[part]

    def path(self, sample: int) -> str:
        part, own = self.part_of(sample)
        return self.parts[part].path(own)

    def target(self, sample: int) -> Any:
        """Return a sample's target, before any transform, with the class ids of the mix."""
        part, own = self.part_of(sample)
        target, ids = self.parts[part].target(own), self._class_ids[part]
        if isinstance(target, dict):
            if "image_id" in target:
                target["image_id"] += self._starts[part]
            for name in ("labels", "cls") if ids is not None else ():
                if name in target:
                    target[name] = torch.from_numpy(ids)[target[name].long()].to(target[name].dtype)
        elif ids is not None and isinstance(target, int):
            return int(ids[target])
        return target

    def mixed_order(self, *, seed: int, shuffle: Shuffle, window: int | None) -> EpochOrder:
        """Return the order of epoch 0; see `Ordering.of`."""
        orders = []
        for number, part in enumerate(self.parts):
            groups = part.groups() if shuffle == "blocks" else None
            own = seed_of_part(number, seed)
            orders.append(EpochOrder(len(part), seed=own, shuffle=shuffle, groups=groups, window=window))
        return MixedOrder(orders, self.places, seed=seed, shuffled=shuffle != "none")

    def spans(self) -> NoReturn:
        """Raise `UsageError`: a queue of tasks has no weights."""
        raise UsageError("a mix is not dealt out as tasks", hint="Make a queue of one data set, or use loader().")

    # --- what is read ahead -------------------------------------------------------------------------------------------

    def plan_source(self) -> PlanSource | None:
        """Return the source of a part that is fetched; None if none is."""
        return next(filter(None, (part.plan_source() for part in self.parts)), None)

    def plan_parts(self) -> list[PartPlan]:
        """Return what is published of an order: for each part what is read of that one."""
        return [PartPlan(self, number) for number, part in enumerate(self.parts) if part.plan_source() is not None]

    def plan_items(self, samples: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Raise `TypeError`: the parts have a source each, see `plan_parts`."""
        raise TypeError("a mix has a plan for each of its parts")

    def split(self, samples: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield each part that any of these samples is of: which it is, their positions, and their numbers there."""
        starts, repeats = np.array(self._starts), np.array(self._repeats)
        again = samples >= starts[-1]
        number = np.where(
            again,
            np.searchsorted(repeats, samples, side="right"),
            np.searchsorted(starts, samples, side="right"),
        )
        number -= 1
        for part in np.unique(number).tolist():
            at = np.flatnonzero(number == part)
            own = samples[at] - np.where(again[at], repeats[part], starts[part])
            yield part, at, own % len(self.parts[part])

    # --- inside -------------------------------------------------------------------------------------------------------

    def _number(self, sample: int) -> int:
        part, own = self.part_of(super()._number(sample))
        return self._starts[part] + own

    def _options_of(self, sample: int) -> Options:
        return self.parts[self.part_of(sample)[0]].options

    def view_here(self, sample: int) -> bytes | memoryview | None:
        part, own = self.part_of(sample)
        return self.parts[part].view_here(own)

    def copy_here(self, samples: NDArray[np.int64], out: memoryview, starts: Sequence[int]) -> list[int]:
        left: list[int] = []
        for part, at, own in self.split(samples):
            missing = self.parts[part].copy_here(own, out, [starts[each] for each in at.tolist()])
            left += at[missing].tolist() if missing else []
        return sorted(left)

    def fetch(self, samples: Sequence[int]) -> list[Read]:
        shares = list(self.split(np.array(samples, np.int64)))
        found: list[Any] = [None] * len(samples)
        with ThreadPoolExecutor(len(shares)) as threads:  # all parts at once: the slowest is waited for, not each
            fetched = threads.map(lambda share: self.parts[share[0]].fetch(share[2].tolist()), shares)
            for (_, at, _), reads in zip(shares, fetched, strict=True):
                for each, read in zip(at.tolist(), reads, strict=True):
                    found[each] = read
        return found

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{places / sum(self.places):.1%} {part!r}" for part, places in zip(self.parts, self.places, strict=True)
        )
        return f"<MixedDataset: {sum(self.places):,} samples an epoch; {parts}>"


class PartPlan:
    """Says of a mix's samples what they read of one part: nothing, where they are of another one."""

    def __init__(self, mixed: MixedDataset, part: int) -> None:
        self._mixed, self._number, self._part = mixed, part, mixed.parts[part]
        self.settings = mixed.settings

    def __len__(self) -> int:
        return len(self._mixed)

    def plan_source(self) -> PlanSource | None:
        return self._part.plan_source()

    def plan_items(self, samples: NDArray[np.int64]) -> NDArray[np.uint32]:
        items = np.zeros((len(samples), 3), np.uint32)
        for part, at, own in self._mixed.split(samples):
            if part == self._number:
                read = self._part.plan_items(own)
                items[at, : read.shape[1]] = read
                if read.shape[1] == 1:  # whole objects
                    items[at, 2] = -(-self._part.sizes[own] // BLOCK_BYTES)
        return items


def _check(parts: Sequence[SampleDataset]) -> None:
    if not parts:
        raise UsageError("a mix of nothing has no samples", hint='mix({"mask@v3": 0.7, "faces@v1": 0.3})')
    first = parts[0]
    for part in parts:
        if not len(part):
            raise UsageError(f"{part!r} has no samples", hint="Leave it out of the mix.")
        if (part.kind, part.style) != (first.kind, first.style):
            raise UsageError(
                f"the parts of a mix have targets of one kind, and {part!r} has others than {first!r}",
                hint='Say which: target="detection", for one. See: dsctl stats',
            )
        for option in fields(Options):
            values = getattr(first.options, option.name), getattr(part.options, option.name)
            if option.name not in _OWN_OPTIONS and values[0] != values[1]:
                raise UsageError(
                    f"the parts of a mix are read in one way, and {option.name} is {values[0]!r} for {first!r} and"
                    f" {values[1]!r} for {part!r}"
                )


def _class_ids(part: SampleDataset, classes: Sequence[str]) -> NDArray[np.int64] | None:
    """Return the mix's id of each class of a part, then that of none; None if they are the same."""
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in part.classes if name not in numbers]
    if unknown:
        raise UsageError(
            f"{part!r} has the class {unknown[0]!r}, which `classes` does not name",
            hint="Name all classes of all parts, or leave `classes` out; dsctl convert renames and drops classes.",
        )
    ids = [numbers[name] for name in part.classes]
    return None if ids == list(range(len(ids))) else np.array([*ids, NO_CLASS], np.int64)
