"""Which node owns a block: weighted rendezvous hashing. Computation only, no clock.

Each member of a view has a score for each block; the lowest is the owner's, the next that of who stands in for it, and
so on. A member that goes leaves its blocks to others and moves no other block; one that comes takes its share and moves
no other block. All nodes and versions compute the same:

    h = xxh3_64(block id)                        s = xxh3_64(member's id, UTF-8)
    m = splitmix64's finalizer of (h xor s)      (xor >> 30, * BF58476D1CE4E5B9, >> 27, * 94D049BB133111EB, >> 31)
    u = (m >> 11 + 1/2) / 2^53                   score = -ln(u) / weight

-ln(u) is exponentially distributed, so a member is first with a probability in proportion to its weight (Schindelhauer
and Schomaker, "Weighted Distributed Hash Tables", 2005). Machines may differ in the last bit of a logarithm: then two
nodes disagree about one block of some 10^14, which costs a GET.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from datacache.cluster.members import DRAINING, SERVING, Member

if TYPE_CHECKING:  # daemons and mounts of a node that is in no cluster start without it, in half the time
    import numpy as np
    from numpy.typing import NDArray

_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LN_2_53 = 53 * math.log(2.0)
_AT_A_TIME = 1 << 18
"""Scores that `owners` computes at a time: 2 MiB, which stay in a processor's cache."""


class Placement:
    """The owners of blocks among the members of one view. Immutable; any thread.

    Members of `zone` come first, in the order of their scores, then those of other zones: each zone has an owner of its
    own for a block. One of these is the owner among all zones, whom the others ask.
    """

    def __init__(self, members: Iterable[Member], zone: str = "") -> None:
        members = sorted(members, key=lambda member: member.id)
        serving = [member for member in members if member.state == SERVING and member.weight > 0]
        self._groups = [
            group
            for group in (
                _Group([member for member in serving if member.zone == zone]),
                _Group([member for member in serving if member.zone != zone]),
            )
            if group.members
        ]
        self._all = _Group(serving if len(self._groups) > 1 else [])
        leaving = [member for member in members if member.state == DRAINING and member.weight > 0]
        self._leaving = _Group([member for member in leaving if member.zone == zone])

    def ranked(self, id: bytes, count: int = 3) -> list[Member]:
        """Return whom to ask for a block: its owner, then who stands in for it. Fewer than `count` where there are no
        more."""
        hashed = xxh3_64_intdigest(id)
        found: list[Member] = []
        for group in self._groups:
            found += [member for _score, member in group.best(hashed, count - len(found))]
            if len(found) >= count:
                break
        return found

    def ranked_across(self, id: bytes, count: int = 3) -> list[Member]:
        """Return the best in rank among all members, whatever their zone. None if all are of one zone."""
        return [member for _score, member in self._all.best(xxh3_64_intdigest(id), count)]

    def owners(self, ids: Sequence[bytes]) -> list[Member]:
        """Return the owner of each of many blocks, as `ranked` does for one; `LookupError` if no member serves."""
        if not self._groups:
            raise LookupError("no member of the cluster serves")
        return self._groups[0].owners(ids)

    def leaving(self, id: bytes) -> list[Member]:
        """Return the member that owned a block until it began to drain, if there is one: its score is better than the
        owner's."""
        if not (self._groups and self._leaving.members):
            return []
        hashed = xxh3_64_intdigest(id)
        [(score, _)] = self._groups[0].best(hashed, 1)
        return [member for better, member in self._leaving.best(hashed, 1) if better < score]


class _Group:
    """Members whose scores are compared with each other."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        if not members:
            return
        import numpy as np

        self._seeds = np.array([xxh3_64_intdigest(member.id.encode()) for member in members], dtype=np.uint64)
        self._shares = 1.0 / np.array([member.weight for member in members], dtype=np.float64)

    def best(self, hashed: int, count: int) -> list[tuple[float, Member]]:
        """Return the lowest scores and whose they are, at most `count`."""
        if not self.members:
            return []
        import numpy as np

        scores = self._scores(np.uint64(hashed) ^ self._seeds)
        found = []
        for _ in range(min(count, len(self.members))):  # for the few that are asked for, faster than sorting
            index = int(scores.argmin())
            found.append((float(scores[index]), self.members[index]))
            scores[index] = np.inf
        return found

    def owners(self, ids: Sequence[bytes]) -> list[Member]:
        """Return who has the lowest score, for each of many blocks."""
        import numpy as np

        step = max(1, _AT_A_TIME // len(self.members))
        found: list[Member] = []
        for begin in range(0, len(ids), step):
            hashes = np.array([xxh3_64_intdigest(id) for id in ids[begin : begin + step]], dtype=np.uint64)
            indexes = self._scores(hashes[:, None] ^ self._seeds).argmin(axis=1)
            found += [self.members[index] for index in indexes.tolist()]
        return found

    def _scores(self, mixed: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return the scores; `mixed` is used up."""
        import numpy as np

        mixed ^= mixed >> 30
        mixed *= _MIX_1
        mixed ^= mixed >> 27
        mixed *= _MIX_2
        mixed ^= mixed >> 31
        mixed >>= 11
        scores = mixed.astype(np.float64)
        scores += 0.5
        np.log(scores, out=scores)
        np.subtract(_LN_2_53, scores, out=scores)
        scores *= self._shares
        return scores
