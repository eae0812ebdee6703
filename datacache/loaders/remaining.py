"""What is left of an epoch when a training stops in the middle of it, and the states that say so.

An epoch's order has places 0 … size-1. A *stage* is a stretch of training with one number of ranks: place k of rank r
is place k*world + r of what the stages before left over. What a stage leaves is given by how many places each rank
took, so a state is a few numbers per rank, however large the dataset. Where ranks stopped at different points, what is
left is a list of single places (those between the slowest and the fastest rank), then all the rest.

Used by `order.py` and `sampler.py`. Pure NumPy; immutable, so any thread may use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from datacache.core.errors import UsageError

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
        """The epoch's places at these positions of what is left."""
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
    """The epoch, and the stages that lie behind trainings which saved these states: one rank's (all ranks took the same
    number), or the list of all ranks'. `order` is the order they have to be of, as `EpochOrder.identity()` gives it."""
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
