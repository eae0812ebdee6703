"""The order of an epoch, each rank's share of it, and what is left of it when a training stops in the middle.

`EpochOrder` is the order of all samples in one epoch: a function of size, seed, epoch and shuffle alone, so it is the
same for any number of ranks and workers. `RankOrder` is what one rank takes: its place k is place k*world + rank of
what is left of the epoch. With the same global batch (ranks x batch size), the global batches are the same, too.

A *stage* is a stretch of training with one number of ranks: place k of rank r is place k*world + r of what the stages
before left over. What a stage leaves is given by how many places each rank took, so a state is a few numbers per rank,
however large the dataset. Where ranks stopped at different points, what is left (`Remaining`) is a list of single
places (those between the slowest and the fastest rank), then all the rest.

All is computed where it is asked for: memory is that of the slice asked for (and, for "blocks", of the groups).
`Permutation` needs none: any place of it is computed on its own, by a Feistel network over a rectangle of numbers that
is hardly larger than the range; the few values outside the range are sent through it again until they fall inside (both
from Black and Rogaway 2002, "Ciphers with arbitrary finite domains": the generalised Feistel network, and cycle
walking). Up to `_SMALL` values, for which a network is too coarse, they are sorted by a hash instead. The round
function and the hash are the finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators"; its constants are David Stafford's "Mix13"), written out here so that orders never depend on NumPy's
version: states of trainings rely on them, and they may never change. Good enough for shuffling, not for secrets.

Used by samplers, streams and task queues; `mixed_order` has the order of several data sets. Pure NumPy; immutable, so
any thread may use them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datacache.core.errors import UsageError
from datacache.loaders.processes import rank_and_world

Shuffle: TypeAlias = Literal["global", "blocks", "none"]
Even: TypeAlias = Literal["pad", "drop", "uneven"]
"""See `RankOrder`."""

# What a key is for. Part of what a seed means: never to be changed.
_GLOBAL: Final = 1
_GROUPS: Final = 2
_WINDOW: Final = 3

_WINDOW_GROUPS: Final = 16
_WINDOW_SAMPLES: Final = 1024
"""A reader waits for nearly all bytes of the first window: of images of 107 KB 110 MB."""


class OrderOptions(TypedDict, total=False):
    """Say which samples a process reads, and in which order; see `Ordering`."""

    seed: int
    shuffle: Shuffle | bool
    rank: int | None
    world: int | None
    even: Even
    multiple_of: int
    lookahead: bool


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """Which samples a process reads, and in which order: arguments that samplers, loaders and streams share."""

    seed: int = 0
    shuffle: Shuffle | bool = "global"
    """See `EpochOrder`. True is "global", False "none"."""
    rank: int | None = None
    world: int | None = None
    """If not given, asked for each time, see `rank_and_world`: ranks are often known later than loaders."""
    even: Even = "pad"
    """See `RankOrder`."""
    multiple_of: int = 1
    """See `RankOrder`."""
    lookahead: bool = True
    """Publish the order to the node's daemon."""

    def of(self, dataset: Any, *, groups: ArrayLike | None = None, window: int | None = None) -> EpochOrder:
        """Return the order of a dataset, or of a number of samples, in epoch 0."""
        shuffle = self.shuffle
        if isinstance(shuffle, bool):
            shuffle = "global" if shuffle else "none"
        if hasattr(dataset, "mixed_order"):
            if groups is not None:
                raise UsageError("the parts of a mix know their groups", hint="Leave out `groups`.")
            return cast("EpochOrder", dataset.mixed_order(seed=self.seed, shuffle=shuffle, window=window))
        if shuffle == "blocks" and groups is None and hasattr(dataset, "groups"):
            groups = dataset.groups()
        size = dataset if isinstance(dataset, int) else len(dataset)
        return EpochOrder(size, seed=self.seed, shuffle=shuffle, groups=groups, window=window)

    def share(self, order: EpochOrder, ranks: tuple[int, int] | None = None, stages: Sequence[Stage] = ()) -> RankOrder:
        """Return what a rank, by default this process's, takes of what `stages` left of an order."""
        rank, world = ranks or self.ranks()
        how: Any = {"even": self.even, "multiple_of": self.multiple_of}
        return RankOrder(order, rank=rank, world=world, stages=stages, **how)

    def ranks(self) -> tuple[int, int]:
        """Return this process's rank, and the number of ranks."""
        return rank_and_world(self.rank, self.world)


class EpochOrder:
    """The order of `size` samples in an epoch.

    `shuffle`: "global" (one order of all samples), "none" (as they are numbered), or "blocks": `groups`, the sizes of
    runs of samples that are stored together (shards, say), come in random order, `window` of them at a time, and the
    samples of a window in random order. It needs fewer bytes at hand than "global", and reads each group in one go.
    The default `window` is 16 groups, or more, so that there are about 1,024 samples in it.
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
        """Return the samples at places start … stop-1, cut off at the end as a slice is."""
        return self.at(_places(start, stop, self.size))

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at any places (each 0 … size-1). Quickest in ascending order."""
        if self._permutation is not None:
            return self._permutation(places)
        if self._blocks is not None:
            return self._blocks.at(places)
        return places.copy()

    def identity(self) -> dict[str, Any]:
        """Return what a state has to agree with to be one of this order (of any epoch)."""
        identity: dict[str, Any] = {"size": self.size, "seed": self.seed, "shuffle": self.shuffle}
        if self._blocks is not None:
            identity |= {"window": self._blocks.window, "groups": self._blocks.digest}
        return identity

    def of_epoch(self, epoch: int) -> EpochOrder:
        return self._with(epoch, None if self._blocks is None else self._blocks.window)

    def with_window_of(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> EpochOrder:
        """Return the order with the window that states of it have: earlier releases had another default."""
        state = next(iter(states), None) if isinstance(states, list | tuple) else states
        window = state.get("window") if isinstance(state, Mapping) else None
        return self._with(self.epoch, window) if self._blocks is not None and _is_count(window) and window else self

    def _with(self, epoch: int, window: int | None) -> EpochOrder:
        groups = None if self._blocks is None else self._blocks.groups
        return EpochOrder(self.size, seed=self.seed, epoch=epoch, shuffle=self.shuffle, groups=groups, window=window)


class RankOrder:
    """One rank's share of what `stages` have left of an epoch.

    `even` says what is done where the samples cannot be divided by the number of ranks: "pad": the last ranks repeat
    the first samples of what is left, so that all have the same number (as PyTorch's DistributedSampler does it);
    "drop": the last samples are left out in this epoch; "uneven": the first ranks have one more. Where each rank's
    number of samples is to be a multiple of `multiple_of`, "pad" repeats and "drop" leaves out so many more.
    """

    def __init__(
        self,
        order: EpochOrder,
        *,
        rank: int = 0,
        world: int = 1,
        even: Even = "pad",
        multiple_of: int = 1,
        stages: Sequence[Stage] = (),
    ) -> None:
        if not 0 <= rank < world:
            raise UsageError(f"There is no rank {rank} of {world}.", hint="Ranks are 0 … world-1.")
        if even not in ("pad", "drop", "uneven"):
            raise UsageError(f"`even` is 'pad', 'drop' or 'uneven', not {even!r}.")
        if multiple_of < 1:
            raise UsageError(f"multiple_of={multiple_of!r}: it is a number from 1 on")
        if even == "uneven" and multiple_of > 1:
            raise UsageError("uneven ranks have no multiple of anything", hint="even='pad' or 'drop'.")
        self.order = order
        self.rank = rank
        self.world = world
        self.even: Even = even
        self._left = Remaining(order.size, stages)
        self.left = left = len(self._left)
        """How many samples `stages` left to all ranks together."""
        if even == "pad":
            self._length = -(-left // (world * multiple_of)) * multiple_of
        elif even == "drop":
            self._length = left // (world * multiple_of) * multiple_of
        else:
            self._length = max(0, -(-(left - rank) // world))

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"RankOrder({self.order!r}, rank={self.rank}, world={self.world}, even={self.even!r})"

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self._left.stages

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at this rank's places start … stop-1, cut off at the end as a slice is."""
        positions = _places(start, stop, self._length) * self.world + self.rank
        if len(positions) and positions[-1] >= self.left:
            positions %= self.left
        return self.order.at(self._left.places(positions))

    def state_dict(self, taken: int) -> State:
        """Return what has to be kept to go on after this rank took its first `taken` samples. JSON, and small."""
        if not 0 <= taken <= self._length:
            raise UsageError(f"Rank {self.rank} has {self._length} samples and cannot have taken {taken}.")
        return {
            "version": STATE_VERSION,
            **self.order.identity(),
            "epoch": self.order.epoch,
            "world": self.world,
            "rank": self.rank,
            "taken": min(taken, -(-self.left // self.world)),  # what was repeated to fill up is not to be taken again
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
    """Apply SplitMix64's finaliser to one 64-bit number."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """Return a 64-bit key for a sequence of numbers (a purpose, a seed, an epoch, …)."""
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
        """Go through the network until all are inside. Less than one in 16 is ever outside."""
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
    """Return the highest bits of `mix(values ^ key)`, without its last step, which mixes the lower ones."""
    mixed = _nearly_mixed(values ^ key)
    mixed >>= np.uint64(64) - bits
    return mixed


def _nearly_mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values ^= values >> np.uint64(30)
    values *= np.uint64(_MULTIPLIER_1)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_MULTIPLIER_2)
    return values


def _by_hash(size: int, key: int) -> NDArray[np.int64]:
    return np.argsort(sort_keys(np.arange(size, dtype=np.uint64), key), kind="stable").astype(np.int64)


def sort_keys(numbers: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return SplitMix64's outputs for this key at these places of its sequence, no two of which are the same: sorting
    by them shuffles."""
    mixed = _nearly_mixed((numbers + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key & _MASK))
    mixed ^= mixed >> np.uint64(31)
    return mixed


# --- what is left ---------------------------------------------------------------------------------------------------

STATE_VERSION: Final = 1

State: TypeAlias = dict[str, Any]
"""JSON: version; size, seed, shuffle (for blocks window and groups, too): of which order; epoch, world, rank, taken,
stages: what is behind the rank that saved it."""


@dataclass(frozen=True, slots=True)
class Stage:
    """`taken` are the places that each of `world` ranks took; one number if all took the same."""

    world: int
    taken: tuple[int, ...] | int


class Remaining:
    """The places of an epoch that stages have left over, in the epoch's order: `singles`, then `start` … size-1."""

    __slots__ = ("size", "stages", "singles", "start")

    def __init__(self, size: int, stages: Sequence[Stage] = ()) -> None:
        self.size = size
        self.stages: tuple[Stage, ...] = ()
        self.singles: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.start = 0
        for stage in stages:
            self._take(stage)

    def __len__(self) -> int:
        return len(self.singles) + self.size - self.start

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the epoch's places at these positions of what is left."""
        places = positions + (self.start - len(self.singles))
        if len(self.singles):
            single = positions < len(self.singles)
            places[single] = self.singles[positions[single]]
        return places

    def _take(self, stage: Stage) -> None:
        world, taken = stage.world, stage.taken
        most = -(-len(self) // world)
        slowest, fastest = (taken, taken) if isinstance(taken, int) else (min(taken), max(taken))
        if not 0 <= slowest <= fastest <= most:
            raise UsageError(
                f"This state says that a rank took {fastest if fastest > most else slowest} samples, "
                f"and there were {most} for each of {world} ranks."
            )
        first, stop = min(slowest * world, len(self)), min(fastest * world, len(self))
        missed = np.empty(0, dtype=np.int64)
        if not isinstance(taken, int) and first < stop:
            turns = np.arange(slowest, fastest, dtype=np.int64)[:, np.newaxis]
            missed = first + np.flatnonzero(turns >= np.array(taken, dtype=np.int64))
            missed = self.places(missed[missed < stop])
        start = self.start + max(0, stop - len(self.singles))
        self.singles = np.concatenate([missed, self.singles[stop:]])
        self.start = start
        if len(self.singles):
            self.stages = (*self.stages, stage)
        else:  # however it came about: the first `start` places are done
            self.stages = (Stage(1, start),) if start else ()


def stages_of(
    states: Mapping[str, Any] | Sequence[Mapping[str, Any]], order: Mapping[str, Any]
) -> tuple[int, list[Stage]]:
    """Return the epoch, and the stages that lie behind trainings which saved these states: one rank's (all ranks took
    the same number), or the list of all ranks'. `order` is the order they have to be of, as `EpochOrder.identity()`
    gives it."""
    one = isinstance(states, Mapping)
    every: list[Any] = list(states) if isinstance(states, list | tuple) else [states]
    if not every:
        raise UsageError(
            "There is no state in this list.", hint="Give one rank's state, or a list of all ranks' states."
        )
    for state in every:
        _check_state(state, order)
    first = every[0]
    for state in every:
        for name in ("epoch", "world", "stages"):
            if state[name] != first[name]:
                raise UsageError(
                    f"These states are not of one moment: {name} is {first[name]} for rank {first['rank']} "
                    f"and {state[name]} for rank {state['rank']}.",
                    hint="Save the states of all ranks at the same step.",
                )
    stages = [_stage(stage) for stage in first["stages"]]
    if one:
        return int(first["epoch"]), [*stages, Stage(first["world"], first["taken"])]
    taken = {int(state["rank"]): int(state["taken"]) for state in every}
    missing = sorted(set(range(first["world"])) - set(taken))
    if missing or len(every) != first["world"]:
        what = f"rank {missing[0]} is missing" if missing else "a rank is there twice"
        raise UsageError(
            f"These are {len(every)} states of {first['world']} ranks: {what}.",
            hint="Give the states of all ranks, or one that is not in a list where all ranks took the same number.",
        )
    return int(first["epoch"]), [*stages, Stage(first["world"], tuple(taken[rank] for rank in range(first["world"])))]


def as_json(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    return [
        {"world": stage.world, "taken": stage.taken if isinstance(stage.taken, int) else list(stage.taken)}
        for stage in stages
    ]


def _check_state(state: Any, order: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or "version" not in state or "stages" not in state:
        raise UsageError("This is not the state of a sampler.", hint="Give what `state_dict()` returned.")
    if state["version"] != STATE_VERSION:
        raise UsageError(
            f"This state has version {state['version']}, and this release knows version {STATE_VERSION}.",
            hint="Resume with the release that saved it, or a newer one.",
        )
    for name, value in order.items():
        if state.get(name) != value:
            raise UsageError(
                f"This state is of another order: its {name} is {state.get(name)!r}, not {value!r}.",
                hint="Resume with the dataset, the seed and the shuffle it was saved with.",
            )
    numbers = [state.get(name) for name in ("epoch", "world", "rank", "taken")]
    if not all(_is_count(number) for number in numbers) or not state["rank"] < state["world"]:
        raise UsageError("This is not the state of a sampler: its epoch, world, rank and taken cannot be.")
    if not isinstance(state["stages"], list | tuple):
        raise UsageError("This is not the state of a sampler: its stages are no list.")


def _stage(raw: Any) -> Stage:
    if isinstance(raw, Mapping) and _is_count(raw.get("world")) and raw["world"] > 0:
        taken = raw.get("taken")
        if isinstance(taken, int) and _is_count(taken):
            return Stage(raw["world"], taken)
        if isinstance(taken, list | tuple) and len(taken) == raw["world"] and all(map(_is_count, taken)):
            return Stage(raw["world"], tuple(taken))
    raise UsageError(f"This is not the state of a sampler: {raw!r} is no stage of a training.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
