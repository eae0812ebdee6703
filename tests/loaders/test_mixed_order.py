"""The order of a mix: shares in every stretch, each sample as often as others, on any ranks and after any resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datacache.core.errors import UsageError
from datacache.loaders.mixed_order import MixedOrder, Stop, places_of, seed_of_part
from datacache.loaders.order import EpochOrder, RankOrder, Shuffle, stages_of
from tests.promises import promise


def mixed(
    sizes: Sequence[int],
    weights: Sequence[float],
    *,
    stop: Stop = "all",
    seed: int = 0,
    epoch: int = 0,
    shuffle: Shuffle = "global",
) -> MixedOrder:
    parts = [
        EpochOrder(
            size,
            seed=seed_of_part(number, seed),
            shuffle=shuffle,
            groups=[1] * size if shuffle == "blocks" else None,
            window=3,
        )
        for number, size in enumerate(sizes)
    ]
    return MixedOrder(parts, places_of(sizes, weights, stop), seed=seed, epoch=epoch, shuffled=shuffle != "none")


def whole(order: EpochOrder) -> np.ndarray:
    return order.take(0, order.size)


def parts_of(samples: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    return np.searchsorted(np.cumsum(sizes), samples, side="right")


mixes = st.lists(st.tuples(st.integers(1, 300), st.floats(0.01, 1)), min_size=2, max_size=5)


@promise("A mix has each part's share in every stretch of an epoch, to within three samples")
@settings(max_examples=60, deadline=None)
@given(
    parts=mixes, seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 5), shuffle=st.sampled_from(["global", "none"])
)
def test_every_stretch_of_whole_windows_has_each_parts_share(
    parts: list[tuple[int, float]], seed: int, epoch: int, shuffle: Shuffle
) -> None:
    sizes, weights = zip(*parts, strict=True)
    order = mixed(sizes, weights, stop="first", seed=seed, epoch=epoch, shuffle=shuffle)
    part = parts_of(whole(order), sizes)
    for number, places in enumerate(places_of(sizes, weights, "first")):
        counted = np.concatenate([[0], np.cumsum(part == number)])
        assert counted[-1] == places
        over = (counted - np.arange(order.size + 1) * places / order.size)[::16]
        assert over.max() - over.min() < (1 if len(sizes) == 2 else 3)


def test_a_batch_of_64_has_45_of_the_one_and_19_of_the_other_or_one_more_or_less() -> None:
    sizes = 5000, 900
    order = mixed(sizes, (0.7, 0.3), seed=3)
    batches = parts_of(whole(order), sizes)[: order.size // 64 * 64].reshape(-1, 64)
    assert set(Counter(batches.sum(axis=1).tolist())) == {19, 20}


def test_no_rank_gets_one_part_alone() -> None:
    sizes = 3000, 3000
    order = mixed(sizes, (1, 1), seed=1)
    for world in (2, 3, 4, 8, 16, 34, 89):
        for rank in (0, world - 1):
            part = parts_of(RankOrder(order, rank=rank, world=world).take(0, 64), sizes)
            assert 14 < part.sum() < 50, (world, rank)


@promise("Of a mix, a part's samples come equally often, to within one time")
@settings(max_examples=40, deadline=None)
@given(parts=mixes, stop=st.sampled_from(["all", "first"]), shuffle=st.sampled_from(["global", "blocks", "none"]))
def test_no_sample_comes_again_before_all_of_its_part_have_come(
    parts: list[tuple[int, float]], stop: Stop, shuffle: Shuffle
) -> None:
    sizes, weights = zip(*parts, strict=True)
    if sum(places_of(sizes, weights, stop)) > 20_000:
        return
    order: EpochOrder = mixed(sizes, weights, stop=stop, seed=9, shuffle=shuffle)
    given_out = np.concatenate([whole(order.of_epoch(epoch)) for epoch in range(3)])
    first = 0
    for size in sizes:
        own = given_out[(given_out >= first) & (given_out < first + size)] - first
        for begin in range(0, len(own), size):
            samples = own[begin : begin + size]
            assert len(set(samples.tolist())) == len(samples)
        first += size


@promise("An epoch of a mix ends when every part has come whole")
@settings(max_examples=60, deadline=None)
@given(parts=mixes, epoch=st.integers(0, 3))
def test_an_epoch_has_the_largest_part_once_or_the_smallest(parts: list[tuple[int, float]], epoch: int) -> None:
    sizes, weights = zip(*parts, strict=True)
    for stop, decides in (("all", max), ("first", min)):
        places = places_of(sizes, weights, stop)  # type: ignore[arg-type]
        number = decides(range(len(sizes)), key=lambda part: sizes[part] / weights[part])
        assert places[number] == sizes[number]
        assert all(has >= size for has, size in zip(places, sizes, strict=True)) or stop == "first"
        if sum(places) < 20_000:
            samples = whole(mixed(sizes, weights, stop=stop, epoch=epoch))  # type: ignore[arg-type]
            first = sum(sizes[:number])
            assert sorted(s for s in samples.tolist() if first <= s < first + sizes[number]) == list(
                range(first, first + sizes[number])
            )


def test_a_part_begins_anew_in_another_order() -> None:
    order = mixed((500, 100), (0.5, 0.5), seed=4)
    small = [sample - 500 for sample in whole(order).tolist() if sample >= 500]
    passes = [small[begin : begin + 100] for begin in range(0, 500, 100)]
    assert all(sorted(each) == list(range(100)) for each in passes)
    assert len({tuple(each) for each in passes}) == 5


@promise("A mix resumes as one data set does")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_place_is_given_once_on_any_ranks_and_after_any_resume(data: st.DataObject) -> None:
    sizes, weights = zip(*data.draw(mixes), strict=True)
    stop = data.draw(st.sampled_from(["all", "first"]))
    if sum(places_of(sizes, weights, stop)) > 5000:
        stop = "first"
    order = mixed(sizes, weights, stop=stop, seed=data.draw(st.integers(0, 99)), epoch=data.draw(st.integers(0, 9)))
    seen: list[int] = []
    stages: list[Any] = []
    for _ in range(data.draw(st.integers(0, 4))):
        world = data.draw(st.integers(1, 6))
        ranks = [RankOrder(order, rank=rank, world=world, even="uneven", stages=stages) for rank in range(world)]
        states = []
        for rank in ranks:
            taken = data.draw(st.integers(0, len(rank)))
            seen += rank.take(0, taken).tolist()
            states.append(json.loads(json.dumps(rank.state_dict(taken))))
        epoch, stages = stages_of(states, order.identity())
        assert epoch == order.epoch
    world = data.draw(st.integers(1, 6))
    for rank in range(world):
        own = RankOrder(order, rank=rank, world=world, even="uneven", stages=stages)
        seen += own.take(0, len(own)).tolist()
    assert Counter(seen) == Counter(whole(order).tolist())


@settings(max_examples=40, deadline=None)
@given(parts=mixes, data=st.data())
def test_any_places_of_an_order_are_those_of_the_whole(parts: list[tuple[int, float]], data: st.DataObject) -> None:
    sizes, weights = zip(*parts, strict=True)
    order = mixed(sizes, weights, stop="first", seed=1, epoch=2)
    places = np.array(data.draw(st.lists(st.integers(0, order.size - 1), max_size=50)), np.int64)
    assert order.at(places).tolist() == whole(order)[places].tolist()


@promise("The same seed means the same order in every release")
def test_the_order_of_a_mix_never_changes_between_releases() -> None:
    assert mixed((10, 4), (0.7, 0.3), seed=1).take(0, 14).tolist() == [4, 9, 10, 12, 13, 0, 11, 7, 5, 1, 2, 6, 3, 8]
    assert mixed((3000, 2000, 50), (5, 4, 1), seed=1, epoch=7).take(4990, 5000).tolist() == [
        4329,
        728,
        4350,
        3760,
        4976,
        2080,
        3309,
        3668,
        570,
        1913,
    ]
    assert mixed((7, 5), (1, 1), shuffle="none").take(0, 14).tolist() == [0, 7, 1, 8, 2, 9, 3, 10, 4, 11, 5, 7, 6, 8]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [whole(mixed((50, 30), (1, 1), seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert len({tuple((order < 50).tolist()) for order in orders}) == 4


def test_two_parts_of_one_data_set_do_not_go_in_step() -> None:
    samples = whole(mixed((100, 100), (1, 1)))
    assert [s for s in samples.tolist() if s < 100] != [s - 100 for s in samples.tolist() if s >= 100]


def test_a_large_epoch_is_dealt_exactly_to_its_end() -> None:
    sizes = (2**30 - 1, 3)
    order = mixed(sizes, (1, 1))
    assert order.size == 2**31 - 2
    last = parts_of(order.take(order.size - 14, order.size), sizes)  # the last window has 14 places
    assert last.sum() == 7
    with pytest.raises(UsageError, match=r"would have 2,147,483,652 samples.*\n?.*stop='first'|2\*\*31 are the most"):
        mixed((2**30 + 2, 3), (1, 1))
    assert places_of((2**30 + 2, 3), (1, 1), "first") == [3, 3]


def test_weights_may_be_numbers_of_numpy() -> None:
    assert places_of((20, 7), (np.float32(2), np.int64(1))) == [20, 10]


@pytest.mark.parametrize("weight", [0, -0.5, float("nan"), float("inf"), None, "1"])
def test_a_weight_that_is_none_is_an_error_that_names_the_part(weight: Any) -> None:
    with pytest.raises(UsageError, match=f"part 1 of this mix has the weight {weight!r}"):
        places_of((10, 10), (1, weight))


def test_weights_may_have_any_sum_and_the_smallest_part_has_a_place() -> None:
    assert places_of((10, 10), (0.7, 0.3)) == places_of((10, 10), (70, 30)) == [23, 10]
    assert places_of((10, 1000), (1, 1e-9), "first") == [10, 1]
    with pytest.raises(UsageError, match="stop='last'"):
        places_of((1,), (1,), "last")  # type: ignore[arg-type]


@promise("A state that does not fit is an error that says what differs")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (mixed((50, 30), (1, 1)), "its size is 100, not 150"),
        (mixed((75, 75), (1, 1)), "its parts is"),
        (EpochOrder(150), "its shuffle is 'global', not 'mixed, global'"),
        (mixed((75, 50), (1, 1), shuffle="none"), "its shuffle is 'mixed, none', not 'mixed, global'"),
    ],
)
def test_a_state_of_another_mix_is_an_error(other: EpochOrder, message: str) -> None:
    order = mixed((75, 50), (1, 1))
    assert order.size == 150
    state = RankOrder(other).state_dict(3)
    with pytest.raises(UsageError, match=message):
        stages_of(state, order.identity())
