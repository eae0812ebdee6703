"""The order of an epoch that draws from several data sets by weight.

`MixedOrder` is an `EpochOrder`, so ranks share it, states resume it and daemons follow it as they do one data set's.

Shares are dealt, not drawn: among the first k places of an epoch, a part that has q of all E places comes k*q/E times,
rounded. The parts are taken one after another, the largest first, each out of the places that those before it left
over, so that every place and every count is a division, however far into an epoch it is asked for. Dealt shares are
periodic: of two equal parts, every second place would be one's, and of two ranks each would get one part. So places
are shuffled within windows of 16. Stretches that begin and end with a window have the shares to within one sample of
two parts, and three of more (the largest difference in thousands of mixes of three to eight was 2.4). Drawn ones of 64
samples would be off by four.

What comes at a part's places is the part's own order, pass after pass, which goes on from epoch to epoch: none of its
samples comes again before all others of it have come.

Used by `mixed`. Pure NumPy; immutable, so any thread may use it. As with all orders, states of trainings rely on it:
what it gives may never change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Rational, Real
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from datacache.core.errors import UsageError
from datacache.loaders.order import EpochOrder, derive_key, sort_keys

Stop: TypeAlias = Literal["all", "first"]
"""What ends an epoch: that every part has come whole, or that the first one has."""

MAX_PLACES: Final = 1 << 31
"""Places by places have to fit into 64 bits."""
_WINDOW: Final = 16
_PART, _OFFSET, _WITHIN = 4, 5, 6  # what a key is for: part of what a seed means, beside those of `order`


def places_of(sizes: Sequence[int], weights: Sequence[float], stop: Stop = "all") -> list[int]:
    """Return how many places of an epoch each part has, at least 1: of its share the nearest whole number.

    With `stop` "all", the part that is largest for its weight comes once and the others again and again; with "first"
    the part that is smallest for its weight comes once, and of the others so much as their weights say. `UsageError`
    for weights that are none.
    """
    if stop not in ("all", "first"):
        raise UsageError(f"stop={stop!r}: an epoch ends with all parts or with the first one", hint="'all' or 'first'.")
    given: Sequence[Any] = weights  # those of NumPy are numbers, too
    for number, weight in enumerate(given):
        if not (isinstance(weight, Real) and math.isfinite(weight) and float(weight) > 0):
            raise UsageError(
                f"part {number} of this mix has the weight {weight!r}",
                hint="Weights are numbers above 0, of any sum. A part that should not come is left out.",
            )
    exact = [Fraction(weight if isinstance(weight, Rational) else float(weight)) for weight in given]
    decides = (max if stop == "all" else min)(size / weight for size, weight in zip(sizes, exact, strict=True))
    places = [max(1, round(decides * weight)) for weight in exact]
    if sum(places) > MAX_PLACES:
        raise UsageError(
            f"an epoch of this mix would have {sum(places):,} samples, and 2**31 are the most",
            hint="stop='first' ends it with the first part that has come whole; or give a large part more weight.",
        )
    return places


class MixedOrder(EpochOrder):
    """The order of samples of several parts, numbered one part after another."""

    def __init__(
        self,
        parts: Sequence[EpochOrder],
        places: Sequence[int],
        *,
        seed: int = 0,
        epoch: int = 0,
        shuffled: bool = True,
    ) -> None:
        """`parts` are orders of the parts, of any epoch; `places` how often each part comes in an epoch."""
        super().__init__(sum(places), seed=seed, epoch=epoch, shuffle="none")
        self._parts, self._places, self._shuffled = tuple(parts), tuple(places), shuffled
        self._starts = np.cumsum([0, *(part.size for part in parts)]).tolist()
        self._largest_first = sorted(range(len(places)), key=lambda part: (-places[part], part))
        self._key = derive_key(_WITHIN, seed, epoch)
        left, self._offsets = self.size, []
        for part in self._largest_first:
            self._offsets.append(derive_key(_OFFSET, seed, epoch, part) % left if shuffled else left // 2)
            left -= places[part]
        self._latest: dict[int, EpochOrder] = {}  # by part: a pass over it

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(places):
            return places.copy()
        windows, row = np.unique(places // _WINDOW, return_inverse=True)
        begin = windows[:, np.newaxis] * _WINDOW
        counts = self._before(np.minimum(begin + np.arange(_WINDOW + 1), self.size))
        parts = np.diff(counts, axis=2).argmax(axis=0)
        if self._shuffled:
            every = begin + np.arange(_WINDOW)
            keys = sort_keys(every.astype(np.uint64), self._key)
            keys[every >= self.size] = ~np.uint64(0)
            parts = np.take_along_axis(parts, np.argsort(keys, axis=1, kind="stable"), axis=1)
        column = places % _WINDOW
        here = parts[row, column]
        samples = np.empty(len(places), np.int64)
        for part in range(len(self._parts)):
            mine, of_part = here == part, parts == part
            within = np.cumsum(of_part, axis=1) - of_part
            turns = counts[part, row, 0][mine] + within[row, column][mine]
            samples[mine] = self._starts[part] + self._turns(part, turns)
        return samples

    def __repr__(self) -> str:
        return f"MixedOrder({self._parts}, {self._places}, seed={self.seed}, epoch={self.epoch})"

    def identity(self) -> dict[str, Any]:
        parts = [part.identity() | {"places": places} for part, places in zip(self._parts, self._places, strict=True)]
        shuffle = f"mixed, {parts[0]['shuffle']}"
        for part in parts:
            del part["seed"], part["shuffle"]
        return {"size": self.size, "seed": self.seed, "shuffle": shuffle, "parts": parts}

    def _with(self, epoch: int, _window: int | None) -> EpochOrder:
        return MixedOrder(self._parts, self._places, seed=self.seed, epoch=epoch, shuffled=self._shuffled)

    def _before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of the first `places` places each part has, the parts being the first dimension."""
        found = np.empty((len(self._places), *places.shape), np.int64)
        all_left = self.size
        for part, offset in zip(self._largest_first, self._offsets, strict=True):
            found[part] = (places * self._places[part] + offset) // all_left
            places = places - found[part]
            all_left -= self._places[part]
        return found

    def _turns(self, part: int, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which of a part's samples come at its turns of this epoch."""
        size = self._parts[part].size
        passes_before, first = divmod(self.epoch * self._places[part], size)
        passes, at = np.divmod(turns + first, size)
        samples = np.empty(len(turns), np.int64)
        for number in np.unique(passes).tolist():
            mine = passes == number
            samples[mine] = self._pass(part, passes_before + number).at(at[mine])
        return samples

    def _pass(self, part: int, number: int) -> EpochOrder:
        latest = self._latest.get(part)
        if latest is None or latest.epoch != number:
            latest = self._latest[part] = self._parts[part].of_epoch(number)
        return latest


def seed_of_part(part: int, seed: int) -> int:
    """Return the seed of a part's own order, so that two parts of one data set do not go in step."""
    return derive_key(_PART, seed, part)
