"""A random permutation that needs no memory: any place of it is computed on its own.

A Feistel network over a rectangle of numbers that is hardly larger than the range; the few values outside the range are
sent through it again until they fall inside (both from Black and Rogaway 2002, "Ciphers with arbitrary finite domains":
the generalised Feistel network, and cycle walking). Up to `_SMALL` values, for which a network is too coarse, they are
sorted by a hash instead. The round function and the hash are the finaliser of SplitMix64 (Steele, Lea and Flood 2014,
"Fast splittable pseudorandom number generators"; its constants are David Stafford's "Mix13"), written out here so that
orders never depend on NumPy's version: states of trainings rely on them, and they may never change.

Good enough for shuffling, not for secrets. Pure NumPy; immutable, so any thread may use it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from datacache.core.errors import UsageError

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
