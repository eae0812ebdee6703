"""The order of an epoch, and each rank's share of it.

`EpochOrder` is the order of all samples in one epoch: a function of size, seed, epoch and shuffle alone, so it is the
same for any number of ranks and workers. `RankOrder` is what one rank takes: its place k is place k*world + rank of
what is left of the epoch. With the same global batch (ranks x batch size), the global batches are the same, too.

Both are computed where they are asked for: memory is that of the slice asked for (and, for "blocks", of the groups).
Used by `sampler.py`, `shard_dataset.py` and `lookahead.py`. Pure NumPy; immutable, so any thread may use them.

A random permutation that needs no memory: any place of it is computed on its own.

A Feistel network over a rectangle of numbers that is hardly larger than the range; the few values outside the range are
sent through it again until they fall inside (both from Black and Rogaway 2002, "Ciphers with arbitrary finite domains":
the generalised Feistel network, and cycle walking). Up to `_SMALL` values, for which a network is too coarse, they are
sorted by a hash instead. The round function and the hash are the finaliser of SplitMix64 (Steele, Lea and Flood 2014,
"Fast splittable pseudorandom number generators"; its constants are David Stafford's "Mix13"), written out here so that
orders never depend on NumPy's version: states of trainings rely on them, and they may never change.

Good enough for shuffling, not for secrets. Pure NumPy; immutable, so any thread may use it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datacache.core.errors import UsageError
from datacache.loaders.remaining import STATE_VERSION, Remaining, Stage, State, as_json

Shuffle: TypeAlias = Literal["global", "blocks", "none"]
Even: TypeAlias = Literal["pad", "drop", "uneven"]

# What a key is for. Part of what a seed means: never to be changed.
_GLOBAL: Final = 1
_GROUPS: Final = 2
_WINDOW: Final = 3

_WINDOW_GROUPS: Final = 16
_WINDOW_SAMPLES: Final = 4096


class EpochOrder:
    """The order of `size` samples in an epoch.

    `shuffle`: "global" (one order of all samples), "none" (as they are numbered), or "blocks": `groups`, the sizes of
    runs of samples that are stored together (shards, say), come in random order, `window` of them at a time, and the
    samples of a window in random order. It needs fewer bytes at hand than "global", and reads each group in one go.
    The default `window` is 16 groups, or more, so that there are about 4,096 samples in it.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        shuffle: Shuffle = "global",
        groups: ArrayLike | None = None,
        window: int | None = None,
    ) -> None:
        if not 0 <= size <= MAX_SIZE:
            raise UsageError(f"An order has 0 to 2**40 samples, not {size}.")
        if not 0 <= seed < 1 << 64 or epoch < 0:
            raise UsageError(f"A seed is 0 to 2**64-1 and an epoch 0 or more, not {seed} and {epoch}.")
        if shuffle not in ("global", "blocks", "none"):
            raise UsageError(f"A shuffle is 'global', 'blocks' or 'none', not {shuffle!r}.")
        self.size = size
        self.seed = seed
        self.epoch = epoch
        self.shuffle: Shuffle = shuffle
        self._permutation: Permutation | None = None
        self._blocks: _Blocks | None = None
        if shuffle == "global":
            self._permutation = Permutation(size, derive_key(_GLOBAL, seed, epoch))
        elif shuffle == "blocks":
            self._blocks = _Blocks(size, seed, epoch, groups, window)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"EpochOrder({self.size}, seed={self.seed}, epoch={self.epoch}, shuffle={self.shuffle!r})"

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """The samples at places start … stop-1, cut off at the end as a slice is."""
        return self.at(_places(start, stop, self.size))

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at any places (each 0 … size-1). Quickest in ascending order."""
        if self._permutation is not None:
            return self._permutation(places)
        if self._blocks is not None:
            return self._blocks.at(places)
        return places.copy()

    def identity(self) -> dict[str, Any]:
        """What a state has to agree with to be one of this order (of any epoch)."""
        identity: dict[str, Any] = {"size": self.size, "seed": self.seed, "shuffle": self.shuffle}
        if self._blocks is not None:
            identity |= {"window": self._blocks.window, "groups": self._blocks.digest}
        return identity

    def of_epoch(self, epoch: int) -> EpochOrder:
        """The same order in another epoch."""
        groups, window = (None, None) if self._blocks is None else (self._blocks.groups, self._blocks.window)
        return EpochOrder(self.size, seed=self.seed, epoch=epoch, shuffle=self.shuffle, groups=groups, window=window)


class RankOrder:
    """What one rank takes of what `stages` have left of an epoch.

    `even` says what is done where the samples cannot be divided by the number of ranks: "pad": the last ranks repeat
    the first samples of what is left, so that all have the same number (as PyTorch's DistributedSampler does it);
    "drop": the last samples are left out in this epoch; "uneven": the first ranks have one more.
    """

    def __init__(
        self, order: EpochOrder, *, rank: int = 0, world: int = 1, even: Even = "pad", stages: Sequence[Stage] = ()
    ) -> None:
        if not 0 <= rank < world:
            raise UsageError(f"There is no rank {rank} of {world}.", hint="Ranks are 0 … world-1.")
        if even not in ("pad", "drop", "uneven"):
            raise UsageError(f"`even` is 'pad', 'drop' or 'uneven', not {even!r}.")
        self.order = order
        self.rank = rank
        self.world = world
        self.even: Even = even
        self._left = Remaining(order.size, stages)
        left = len(self._left)
        if even == "pad":
            self._length = -(-left // world)
        elif even == "drop":
            self._length = left // world
        else:
            self._length = max(0, -(-(left - rank) // world))

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"RankOrder({self.order!r}, rank={self.rank}, world={self.world}, even={self.even!r})"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What is behind this rank's share."""
        return self._left.stages

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """The samples at this rank's places start … stop-1, cut off at the end as a slice is."""
        positions = _places(start, stop, self._length) * self.world + self.rank
        left = len(self._left)
        if len(positions) and positions[-1] >= left:
            positions %= left
        return self.order.at(self._left.places(positions))

    def state_dict(self, taken: int) -> State:
        """What has to be kept to go on after this rank took its first `taken` samples. JSON, and small."""
        if not 0 <= taken <= self._length:
            raise UsageError(f"Rank {self.rank} has {self._length} samples and cannot have taken {taken}.")
        return {
            "version": STATE_VERSION,
            **self.order.identity(),
            "epoch": self.order.epoch,
            "world": self.world,
            "rank": self.rank,
            "taken": taken,
            "stages": as_json(self.stages),
        }


class _Blocks:
    """The order of a "blocks" shuffle. Memory: three numbers per group."""

    def __init__(self, size: int, seed: int, epoch: int, groups: ArrayLike | None, window: int | None) -> None:
        if groups is None:
            raise UsageError(
                "A shuffle of blocks needs to know which samples lie together.",
                hint="Give `groups`, or shuffle='global'; a dataset over shards knows its groups.",
            )
        sizes = np.asarray(groups, dtype=np.int64)
        if sizes.ndim != 1 or (len(sizes) and int(sizes.min()) < 0) or int(sizes.sum()) != size:
            raise UsageError(f"`groups` are the sizes of runs of samples, {size} together.")
        if window is None:
            window = max(_WINDOW_GROUPS, -(-_WINDOW_SAMPLES * len(sizes) // max(1, size)))
        if window < 1:
            raise UsageError(f"A window has 1 group or more, not {window}.")
        self.groups = sizes
        self.window = window
        self.digest = hashlib.blake2b(sizes.astype("<i8").tobytes(), digest_size=8).hexdigest()
        self._seed = seed
        self._epoch = epoch
        permuted = Permutation(len(sizes), derive_key(_GROUPS, seed, epoch))(np.arange(len(sizes), dtype=np.int64))
        self._ends = np.cumsum(sizes[permuted])
        self._shifts = (np.cumsum(sizes) - sizes)[permuted] - (self._ends - sizes[permuted])
        self._bounds = np.concatenate([[0], self._ends[window - 1 :: window], [size]]).astype(np.int64)

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        windows = np.searchsorted(self._bounds, places, side="right") - 1
        shuffled = np.empty(len(places), dtype=np.int64)
        cuts = [0, *(np.flatnonzero(np.diff(windows)) + 1).tolist(), len(places)]
        for first, stop in itertools.pairwise(cuts):
            if first == stop:
                continue
            window = int(windows[first])
            low, high = int(self._bounds[window]), int(self._bounds[window + 1])
            permutation = Permutation(high - low, derive_key(_WINDOW, self._seed, self._epoch, window))
            shuffled[first:stop] = permutation(places[first:stop] - low) + low
        return shuffled + self._shifts[np.searchsorted(self._ends, shuffled, side="right")]


def _places(start: int, stop: int, length: int) -> NDArray[np.int64]:
    if start < 0 or stop < start:
        raise UsageError(f"There are no places {start} to {stop}.")
    return np.arange(min(start, length), min(stop, length), dtype=np.int64)


MAX_SIZE: Final = 1 << 40

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MULTIPLIER_1: Final = 0xBF58476D1CE4E5B9
_MULTIPLIER_2: Final = 0x94D049BB133111EB
_MASK: Final = (1 << 64) - 1

_ROUNDS: Final = 8  # even: each half is changed half of the times
_SMALL: Final = 1024
_CHUNK: Final = 8192  # positions at a time: the temporary arrays of a round stay in the processor's cache


def mix(value: int) -> int:
    """SplitMix64's finaliser of one 64-bit number."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """A 64-bit key for a sequence of numbers (a purpose, a seed, an epoch, …)."""
    key = 0
    for part in parts:
        key = mix((key ^ (part & _MASK)) + _GOLDEN)
    return key


class Permutation:
    """A bijection of 0 … size-1 for a key. `permutation(positions)` gives the values at these positions, as int64."""

    __slots__ = ("size", "_table", "_low_bits", "_rows", "_keys")

    def __init__(self, size: int, key: int) -> None:
        if not 0 <= size <= MAX_SIZE:
            raise UsageError(f"A permutation has 0 to 2**40 values, not {size}.")
        self.size = size
        self._table: NDArray[np.int64] | None = None
        if size <= _SMALL:
            self._table = _by_hash(size, key)
            return
        # Numbers are (row, column): the columns are a power of two, and there are just as many rows as are needed.
        low_bits = ((size - 1).bit_length() + 1) // 2
        self._low_bits = np.uint64(low_bits)
        self._rows = np.uint64(-(-size >> low_bits))
        self._keys = [np.uint64(mix(key + i * _GOLDEN)) for i in range(1, _ROUNDS + 1)]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(positions) and (int(positions.min()) < 0 or int(positions.max()) >= self.size):
            raise UsageError(f"A permutation of {self.size} values was asked for a position outside of them.")
        if self._table is not None:
            return self._table[positions]
        values = np.empty(len(positions), dtype=np.int64)
        for first in range(0, len(positions), _CHUNK):
            chunk = positions[first : first + _CHUNK].astype(np.uint64)
            values[first : first + _CHUNK] = self._walk(chunk).astype(np.int64)
        return values

    def _walk(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Through the network until all are inside. Less than one in 16 is ever outside."""
        size = np.uint64(self.size)
        values = self._network(values)
        outside = np.flatnonzero(values >= size)
        while len(outside):
            again = self._network(values[outside])
            values[outside] = again
            outside = outside[again >= size]
        return values

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low_bits, rows = self._low_bits, self._rows
        high = values >> low_bits
        low = values & ((np.uint64(1) << low_bits) - np.uint64(1))
        for i in range(0, _ROUNDS, 2):
            high += (_hash_bits(low, self._keys[i], np.uint64(32)) * rows) >> np.uint64(32)
            np.minimum(high, high - rows, out=high)  # modulo: below `rows` the difference wraps round and is huge
            low ^= _hash_bits(high, self._keys[i + 1], low_bits)
        high <<= low_bits
        high |= low
        return high


def _hash_bits(values: NDArray[np.uint64], key: np.uint64, bits: np.uint64) -> NDArray[np.uint64]:
    """The highest bits of `mix(values ^ key)`, without its last step, which mixes the lower ones."""
    mixed = values ^ key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_MULTIPLIER_1)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_MULTIPLIER_2)
    mixed >>= np.uint64(64) - bits
    return mixed


def _by_hash(size: int, key: int) -> NDArray[np.int64]:
    """Sorted by SplitMix64's outputs for this key, no two of which are the same."""
    mixed = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key & _MASK)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_MULTIPLIER_1)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_MULTIPLIER_2)
    mixed ^= mixed >> np.uint64(31)
    return np.argsort(mixed, kind="stable").astype(np.int64)
