"""Which image goes to which split: by a hash of its path and a seed, or as the data set's own lists say.

A hash depends on nothing but the path and the seed, so images that are added move none of the others, and every version
of a data set has the same image in the same split. Pure functions, any thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

from xxhash import xxh3_64_intdigest

from datacache.annotations.model import Annotation
from datacache.annotations.split_lists import ListedSplits
from datacache.catalog.refs import check_tag
from datacache.core.errors import UsageError

_HASHES = 2**64


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Names of splits and how images are dealt to them. Without names, everything is in one set that has no name."""

    names: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    """Of splits by hash; they add up to 1."""
    seed: int = 0
    listed: ListedSplits | None = field(default=None, repr=False)
    """For splits that the data set brings."""

    def of(self, annotation: Annotation) -> str | None:
        """Return the split of an image; '' where there are no splits, None where the lists leave it out."""
        if not self.names:
            return ""
        path = annotation.path
        if self.listed is not None:
            return self.listed.of(_encode(path), _encode(annotation.source)) or None
        place = xxh3_64_intdigest(_encode(path), self.seed) / _HASHES
        bounds = accumulate(self.shares)
        # The last one takes what rounding would leave to nobody.
        return next(
            (name for name, bound in zip(self.names[:-1], bounds, strict=False) if place < bound), self.names[-1]
        )


def stem(path: str) -> str:
    """Return a path without its extension."""
    folder, slash, name = path.rpartition("/")
    return folder + slash + (name.rpartition(".")[0] or name)


def parse_splits(text: str, seed: int) -> Splits:
    """Parse `train=0.8,val=0.2` into splits by hash. The shares add up to 1. `UsageError` says which part is wrong."""
    names: list[str] = []
    shares: list[float] = []
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if not equals or not 0 < share <= 1:
            raise UsageError(f"--split: {part.strip()!r} is no share", hint="Write --split train=0.8,val=0.2")
        check_tag(name)  # a split names a folder and a file
        if name in names:
            raise UsageError(f"--split: {name!r} is given twice")
        names.append(name)
        shares.append(share)
    if abs(math.fsum(shares) - 1) > 1e-6:
        raise UsageError(f"--split: the shares add up to {math.fsum(shares):g}, not to 1")
    return Splits(names=tuple(names), shares=tuple(shares), seed=seed)


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
