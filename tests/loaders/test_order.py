"""The order of an epoch: a permutation without memory, the same for any number of ranks, gone on with on any number."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from datacache.core.errors import UsageError
from datacache.loaders.order import EpochOrder, Even, Permutation, RankOrder, Stage, derive_key, mix, stages_of
from tests.promises import promise


def every(size: int) -> np.ndarray:
    return np.arange(size, dtype=np.int64)


def resumed(order: EpochOrder, states: Any, world: int, even: Even = "uneven") -> list[RankOrder]:
    _, stages = stages_of(states, order.identity())
    return [RankOrder(order, rank=rank, world=world, even=even, stages=stages) for rank in range(world)]


# --- permutation ----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(size=st.one_of(st.integers(0, 5000), st.sampled_from([65535, 65536, 65537])), key=st.integers(0, 2**64 - 1))
def test_each_value_is_at_exactly_one_position(size: int, key: int) -> None:
    assert np.array_equal(np.sort(Permutation(size, key)(every(size))), every(size))


@promise("The same seed means the same order in every release")
def test_the_permutation_never_changes_between_releases() -> None:
    assert mix(1) == 0x5692161D100B05E5
    assert derive_key(1, 2, 3) == 15020427595393229491
    assert Permutation(10, 7)(every(10)).tolist() == [1, 8, 5, 7, 0, 9, 4, 6, 3, 2]
    assert Permutation(1_000_000, 7)(np.array([0, 1, 2, 999_999])).tolist() == [995501, 729738, 420415, 10687]
    assert Permutation(2**40, 7)(np.array([0, 1, 2**40 - 1])).tolist() == [182919782416, 314963825932, 969301406431]
    assert EpochOrder(5000, seed=1, epoch=2).take(0, 5).tolist() == [3092, 3267, 2981, 396, 4900]
    blocks = EpochOrder(5000, seed=1, epoch=2, shuffle="blocks", groups=[500] * 10, window=3)
    assert blocks.take(0, 5).tolist() == [269, 4889, 32, 3456, 4860]


def test_the_hash_is_that_of_splitmix64() -> None:
    # The first outputs for seed 1234567, as Vigna's splitmix64.c prints them.
    golden = 0x9E3779B97F4A7C15
    assert [mix(1234567 + (i + 1) * golden) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("size", [3, 10, 1000, 1025, 3000])
def test_every_position_gets_every_value_about_equally_often(size: int) -> None:
    keys, bins = 4000, min(size, 50)
    positions = np.array([0, 1, size // 2, size - 1])
    counts = np.zeros((len(positions), bins))
    for key in range(keys):
        values = Permutation(size, derive_key(key))(positions)
        counts[np.arange(len(positions)), values * bins // size] += 1
    widths = np.bincount(every(size) * bins // size)
    expected = keys * widths / size
    chi_square = ((counts - expected) ** 2 / expected).sum(axis=1)
    assert (chi_square < 2 * (bins - 1) + 25).all()  # far beyond the 99.9 % quantile; the keys are fixed


@pytest.mark.parametrize("size", [1000, 1025, 4096, 100_000])
def test_neighbours_have_nothing_to_do_with_each_other(size: int) -> None:
    for key in range(5):
        values = Permutation(size, derive_key(key))(every(size))
        other = Permutation(size, derive_key(key + 1))(every(size))
        bound = 5 / size**0.5
        for a, b in ((values[:-1], values[1:]), (values, every(size)), (values, other)):
            assert abs(np.corrcoef(a, b)[0, 1]) < bound
        steps = Counter(np.diff(values).tolist())
        assert max(steps.values()) < 15


@promise("A state stays small and an order takes no memory, however large the dataset")
def test_a_large_permutation_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        values = EpochOrder(2**40, seed=1).take(2**39, 2**39 + 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(values.tolist())) == 1000
    assert peak < 1_000_000


def test_a_position_outside_of_a_permutation_is_an_error() -> None:
    for position in (-1, 10):
        with pytest.raises(UsageError, match="outside"):
            Permutation(10, 1)(np.array([position]))
    with pytest.raises(UsageError, match=r"2\*\*40"):
        Permutation(2**40 + 1, 1)


# --- the order of an epoch ------------------------------------------------------------------------------------------


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(EpochOrder(50, seed=seed, epoch=epoch).take(0, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    kinds: list[dict[str, Any]] = [{}, {"shuffle": "none"}, {"shuffle": "blocks", "groups": [5] * 10, "window": 2}]
    for kind in kinds:
        fourth = EpochOrder(50, seed=3, epoch=4, **kind)
        assert fourth.take(0, 50).tolist() == EpochOrder(50, seed=3, **kind).of_epoch(4).take(0, 50).tolist()


def test_without_shuffle_samples_come_as_they_are_numbered() -> None:
    assert EpochOrder(10, shuffle="none", epoch=3).take(2, 5).tolist() == [2, 3, 4]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slices_of_an_order_are_the_order(data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(0, 300), max_size=20))
    size = sum(groups)
    kinds: list[dict[str, Any]] = [
        {"shuffle": "global"},
        {"shuffle": "none"},
        {"shuffle": "blocks", "groups": groups, "window": data.draw(st.integers(1, 6))},
    ]
    for kind in kinds:
        order = EpochOrder(size, seed=5, **kind)
        whole = order.take(0, size)
        assert np.array_equal(np.sort(whole), every(size))
        start = data.draw(st.integers(0, size + 2))
        stop = data.draw(st.integers(start, size + 5))
        assert np.array_equal(order.take(start, stop), whole[start:stop])


def test_blocks_come_a_window_of_groups_at_a_time() -> None:
    order = EpochOrder(1000, seed=1, shuffle="blocks", groups=[10] * 100, window=5)
    whole = order.take(0, 1000)
    windows = whole.reshape(20, 50)
    groups = [set((window // 10).tolist()) for window in windows]
    assert all(len(window) == 5 for window in groups)
    assert set.union(*groups) == set(range(100))
    assert sorted(groups[0]) != [0, 1, 2, 3, 4]
    assert all(len(set((window[:10] // 10).tolist())) > 1 for window in windows)  # shuffled within
    assert not np.array_equal(whole, order.of_epoch(1).take(0, 1000))


def test_small_groups_share_a_window_of_a_thousand_samples() -> None:
    order = EpochOrder(100_000, shuffle="blocks", groups=[10] * 10_000)
    assert len(set((order.take(0, 1024) // 10).tolist())) == 103


def test_blocks_need_groups_that_add_up() -> None:
    with pytest.raises(UsageError, match="lie together"):
        EpochOrder(10, shuffle="blocks")
    with pytest.raises(UsageError, match="10 together"):
        EpochOrder(10, shuffle="blocks", groups=[5, 4])
    with pytest.raises(UsageError, match="10 together"):
        EpochOrder(10, shuffle="blocks", groups=[-1, 11])


def test_an_order_that_cannot_be_is_an_error() -> None:
    for wrong in ({"size": -1}, {"size": 5, "seed": -1}, {"size": 5, "epoch": -1}, {"size": 5, "shuffle": "all"}):
        with pytest.raises(UsageError):
            EpochOrder(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no rank 2 of 2"):
        RankOrder(EpochOrder(5), rank=2, world=2)
    with pytest.raises(UsageError, match="no places"):
        EpochOrder(5).take(3, 2)


# --- the share of a rank --------------------------------------------------------------------------------------------


@promise("An epoch's order follows from size, seed, epoch and shuffle alone")
def test_the_global_order_and_the_global_batches_are_the_same_for_any_number_of_ranks() -> None:
    order = EpochOrder(960, seed=9)
    whole = order.take(0, 960)
    for world in (1, 2, 3, 8):
        shares = [RankOrder(order, rank=rank, world=world).take(0, 960) for rank in range(world)]
        assert np.array_equal(np.stack(shares, axis=1).ravel(), whole)
        batch = 48 // world
        for at in range(0, 960 // world, batch):
            together = np.concatenate([share[at : at + batch] for share in shares])
            assert set(together.tolist()) == set(whole[at * world : at * world + 48].tolist())


@promise('Every sample comes once per epoch, on any number of ranks (`even="pad"` repeats some)')
@pytest.mark.parametrize("size", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("world", [1, 3, 8])
@pytest.mark.parametrize("even", ["pad", "drop"])
def test_ranks_are_made_even_as_by_pytorchs_distributed_sampler(size: int, world: int, even: Even) -> None:
    order = EpochOrder(size, shuffle="none")
    for rank in range(world):
        mine = RankOrder(order, rank=rank, world=world, even=even)
        if size == 0 or (even == "drop" and size < world):
            assert len(mine) == 0
            continue
        theirs = DistributedSampler(
            list(range(size)), num_replicas=world, rank=rank, shuffle=False, drop_last=even == "drop"
        )
        assert mine.take(0, size).tolist() == list(theirs)
        assert len(mine) == len(theirs)


@promise('Every sample comes once per epoch, on any number of ranks (`even="pad"` repeats some)')
def test_uneven_ranks_together_have_every_sample_once() -> None:
    shares = [RankOrder(EpochOrder(100), rank=rank, world=7, even="uneven") for rank in range(7)]
    assert [len(share) for share in shares] == [15, 15, 14, 14, 14, 14, 14]
    assert sorted(np.concatenate([share.take(0, 99) for share in shares]).tolist()) == list(range(100))


# --- going on -------------------------------------------------------------------------------------------------------


@promise("A training resumes in the middle of an epoch with exactly the samples not yet seen")
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_sample_is_seen_once_however_often_the_number_of_ranks_changes(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 400))
    kind: dict[str, Any] = data.draw(
        st.sampled_from([{"shuffle": "global"}, {"shuffle": "blocks", "groups": [size // 3, size - size // 3]}])
    )
    even: Even = data.draw(st.sampled_from(["uneven", "pad"]))
    order = EpochOrder(size, seed=1, epoch=4, **kind)
    states: Any = None
    seen: Counter[int] = Counter()
    padded = 0
    for _ in range(data.draw(st.integers(0, 5))):
        world = data.draw(st.integers(1, 9))
        ranks = _ranks(order, states, world, even)
        most = max(len(rank) for rank in ranks)
        if data.draw(st.booleans()):  # in lockstep: the state of any of them is enough
            taken = [data.draw(st.integers(0, most))] * world
        else:
            taken = [data.draw(st.integers(0, len(rank))) for rank in ranks]
        padded += _padding(ranks)
        for rank, count in zip(ranks, taken, strict=True):
            seen.update(rank.take(0, count).tolist())
        saved = [rank.state_dict(min(count, len(rank))) for rank, count in zip(ranks, taken, strict=True)]
        states = json.loads(json.dumps(saved))
        if len(set(taken)) == 1:
            states = states[0]  # the first rank is never shorter than another
        else:
            random.Random(size).shuffle(states)
    rest = _ranks(order, states, data.draw(st.integers(1, 9)), even)
    padded += _padding(rest)
    for rank in rest:
        seen.update(rank.take(0, size).tolist())
    assert set(seen) == set(range(size))
    assert seen.total() - size <= padded


def _ranks(order: EpochOrder, states: Any, world: int, even: Even) -> list[RankOrder]:
    if states is None:
        return [RankOrder(order, rank=rank, world=world, even=even) for rank in range(world)]
    return resumed(order, states, world, even)


def _padding(ranks: list[RankOrder]) -> int:
    left = sum(len(RankOrder(r.order, rank=r.rank, world=r.world, even="uneven", stages=r.stages)) for r in ranks)
    return sum(map(len, ranks)) - left


@promise("With `multiple_of` each rank's batches in an epoch are a multiple of it, and full")
@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(0, 300),
    world=st.integers(1, 5),
    multiple=st.integers(1, 20),
    even=st.sampled_from(["pad", "drop"]),
)
def test_each_rank_has_the_multiple_that_is_asked_for(size: int, world: int, multiple: int, even: Even) -> None:
    order = EpochOrder(size, seed=1)
    ranks = [RankOrder(order, rank=rank, world=world, even=even, multiple_of=multiple) for rank in range(world)]
    taken = [rank.take(0, len(rank)).tolist() for rank in ranks]
    lengths = {len(each) for each in taken}
    assert len(lengths) == 1
    (length,) = lengths
    assert length % multiple == 0
    assert 0 <= (length * world - size) * (1 if even == "pad" else -1) < world * multiple
    together = [sample for step in zip(*taken, strict=True) for sample in step]
    whole = order.take(0, size).tolist()
    assert together[:size] == whole[: length * world]
    assert together[size:] == [whole[at % size] for at in range(size, length * world)]
    states = [rank.state_dict(len(rank)) for rank in ranks]
    assert sum(map(len, resumed(order, states, 2))) == max(0, size - length * world)


def test_a_multiple_of_nothing_is_an_error() -> None:
    with pytest.raises(UsageError, match="multiple_of=0"):
        RankOrder(EpochOrder(10), multiple_of=0)
    with pytest.raises(UsageError, match="uneven ranks have no multiple"):
        RankOrder(EpochOrder(10), even="uneven", multiple_of=2)


def test_what_is_left_comes_in_the_epochs_order() -> None:
    order = EpochOrder(100, seed=2)
    ranks = [RankOrder(order, rank=rank, world=4) for rank in range(4)]
    states = [rank.state_dict(taken) for rank, taken in zip(ranks, (3, 5, 5, 4), strict=True)]
    (rest,) = resumed(order, states, 1)
    missed = [3 * 4, 4 * 4, 4 * 4 + 3]
    assert rest.take(0, 100).tolist() == order.at(np.array([*missed, *range(20, 100)])).tolist()


@promise("After lockstep, the global batches go on as if nothing had happened")
def test_after_lockstep_the_global_batches_go_on_as_if_nothing_had_happened() -> None:
    order = EpochOrder(1000, seed=3)
    state = RankOrder(order, rank=5, world=8).state_dict(10)
    ranks = resumed(order, state, 2)
    assert np.array_equal(np.stack([rank.take(0, 99) for rank in ranks], axis=1).ravel(), order.take(80, 80 + 198))


@promise("A state stays small and an order takes no memory, however large the dataset")
def test_a_state_is_small() -> None:
    order = EpochOrder(10**9, seed=3)
    ranks = [RankOrder(order, rank=rank, world=256) for rank in range(256)]
    states: Any = [rank.state_dict(100_000 + rank.rank % 7) for rank in ranks]
    for world in (64, 512, 64):
        ranks = resumed(order, states, world)
        states = [rank.state_dict(rank.rank % 3) for rank in ranks]
    assert len(json.dumps(states[0])) < 5000
    (rank,) = resumed(order, [rank.state_dict(20) for rank in ranks], 1)
    assert len(json.dumps(rank.state_dict(0))) < 200  # what was left out has been made up for: only a number remains


def _state(**changes: Any) -> dict[str, Any]:
    return {**RankOrder(EpochOrder(100, seed=1), rank=0, world=2).state_dict(3), **changes}


@promise("A state that does not fit is an error that says what differs")
@pytest.mark.parametrize(
    ("states", "message"),
    [
        (_state(size=120), "its size is 120, not 100"),
        (_state(seed=2), "its seed is 2, not 1"),
        (_state(shuffle="none"), "its shuffle is 'none', not 'global'"),
        (_state(version=2), "version 2"),
        (_state(taken=51), "took 51 samples, and there were 50"),
        (_state(taken=-1), "cannot be"),
        (_state(rank=2), "cannot be"),
        (_state(world="2"), "cannot be"),
        (_state(stages=[{"world": 2, "taken": [1]}]), "no stage"),
        (_state(stages=[{"world": 0, "taken": 1}]), "no stage"),
        (_state(stages=7), "no list"),
        ({"batch": 3}, "not the state"),
        ([], "no state"),
        (["x"], "not the state"),
        ("x", "not the state"),
        ([_state()], "rank 1 is missing"),
        ([_state(), _state()], "rank 1 is missing"),
        ([_state(), _state(rank=1), _state(rank=1)], "twice"),
        ([_state(), _state(rank=1, epoch=1)], "epoch is 0 for rank 0 and 1 for rank 1"),
        ([_state(), _state(rank=1, world=3)], "world is 2 for rank 0 and 3 for rank 1"),
        ([_state(), _state(rank=1, stages=[{"world": 2, "taken": 1}])], "stages is"),
    ],
)
def test_a_wrong_state_is_an_error_that_says_what_differs(states: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resumed(EpochOrder(100, seed=1), states, 3)


def test_a_state_of_other_groups_or_another_window_is_an_error() -> None:
    state = RankOrder(EpochOrder(10, shuffle="blocks", groups=[5, 5], window=2)).state_dict(3)
    with pytest.raises(UsageError, match="its groups is"):
        resumed(EpochOrder(10, shuffle="blocks", groups=[4, 6], window=2), state, 1)
    with pytest.raises(UsageError, match="its window is 2, not 1"):
        resumed(EpochOrder(10, shuffle="blocks", groups=[5, 5], window=1), state, 1)


def test_a_rank_cannot_have_taken_more_than_it_has() -> None:
    with pytest.raises(UsageError, match="has 5 samples and cannot have taken 6"):
        RankOrder(EpochOrder(10), rank=0, world=2).state_dict(6)


def test_stages_can_be_given_by_hand() -> None:
    rank = RankOrder(EpochOrder(10, shuffle="none"), stages=[Stage(2, 3), Stage(2, (1, 0))])
    assert rank.take(0, 10).tolist() == [7, 8, 9]


def test_orders_need_neither_pytorch_nor_tensorflow() -> None:
    code = (
        "import sys, datacache.loaders.order, datacache.loaders.sampler;"
        "sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
