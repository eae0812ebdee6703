"""Streams of shards in real DataLoaders: which epoch each iteration is, and whose share of it a rank gets."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from datacache import api
from datacache.core.errors import UsageError
from datacache.loaders.shard_dataset import Epochs
from datacache.settings import Settings
from datacache.torch import ShardDataset
from tests.loaders.conftest import COUNT
from tests.promises import promise

pytestmark = pytest.mark.shared_home


@pytest.fixture
def dataset(faces_ref: str, settings: Settings, tmp_path: Path) -> ShardDataset:
    api.shard(faces_ref, to=str(tmp_path / "shards"), max_size_bytes=100_000, settings=settings)
    return ShardDataset(tmp_path / "shards", target="path", packed=True)


def _orders(dataset: ShardDataset, epochs: int) -> list[list[str]]:
    """Return what the epochs are, each by a stream of its own."""
    found = []
    for epoch in range(epochs):
        stream = dataset.stream(6, seed=3)
        stream.set_epoch(epoch)
        found.append(_keys(stream))
    assert all(sorted(order) == sorted(found[0]) for order in found)
    assert len({tuple(order) for order in found}) == epochs
    return found


def _keys(batches: Any) -> list[str]:
    return [key for batch in batches for key in batch.targets]


_WAYS = {
    "here": {},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "fork, persistent": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},  # each takes seconds to start
    "spawn, persistent": {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
}


@promise("Each iteration of a stream is the next epoch, or the one that was set")
@pytest.mark.parametrize("way", _WAYS.values(), ids=_WAYS)
def test_each_iteration_is_the_next_epoch_or_the_one_that_was_set(dataset: ShardDataset, way: dict[str, Any]) -> None:
    expected = _orders(dataset, 6)
    stream = dataset.stream(6, seed=3)
    loader = DataLoader(stream, batch_size=None, **way)
    anew = way.get("multiprocessing_context") == "spawn" and not way.get("persistent_workers")
    assert _keys(stream if anew else loader) == expected[0]  # starting those takes seconds
    assert _keys(loader) == expected[1]
    stream.set_epoch(4)
    assert _keys(loader) == expected[4]
    if not anew:
        assert _keys(loader) == expected[5]
        stream.set_epoch(1)
        assert _keys(loader) == expected[1]


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iteration_that_was_given_up_is_an_epoch(dataset: ShardDataset, persistent: bool) -> None:
    expected = _orders(dataset, 12)
    loader = DataLoader(
        dataset.stream(6, seed=3), batch_size=None, num_workers=2, persistent_workers=persistent, prefetch_factor=1
    )
    for _ in range(10):
        next(iter(loader))
    assert _keys(loader) == expected[10]
    assert _keys(loader) == expected[11]


def test_seeding_pytorch_for_every_epoch_makes_them_no_less_different(dataset: ShardDataset) -> None:
    expected = _orders(dataset, 3)
    loader = DataLoader(dataset.stream(6, seed=3), batch_size=None, num_workers=2)
    for epoch in range(3):
        torch.manual_seed(7)
        assert _keys(loader) == expected[epoch]


def test_a_copy_goes_on_by_itself_and_its_workers_agree(dataset: ShardDataset) -> None:
    expected = _orders(dataset, 3)
    stream = dataset.stream(6, seed=3)
    assert _keys(stream) == expected[0]
    for other in (copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))):
        loader = DataLoader(other, batch_size=None, num_workers=2)
        assert [_keys(loader) for _ in range(2)] == expected[1:]
    assert _keys(stream) == expected[1]


def test_an_epoch_is_no_negative_number(dataset: ShardDataset) -> None:
    with pytest.raises(UsageError, match="epoch"):
        dataset.stream(6).set_epoch(-1)


def test_an_epoch_set_before_the_rank_is_known_counts() -> None:
    epochs = Epochs()
    epochs.set(5, 0)
    assert [epochs.begin(3) for _ in range(2)] == [5, 6]
    epochs.set(2, 3)
    assert [epochs.begin(3) for _ in range(2)] == [2, 3]


# --- ranks --------------------------------------------------------------------------------------------------------


_WAYS_OF_RANKS = {
    "here": {},
    "fork": _WAYS["fork"],
    "spawn": _WAYS["spawn, persistent"],
}


def _rank(rank: int, stream: Any, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    seen = {}
    for name, way in _WAYS_OF_RANKS.items():
        stream.set_epoch(0)
        if name == "spawn" and not rank:  # which takes seconds, and nobody takes another rank for the first
            way = _WAYS["fork"]
        loader = DataLoader(stream, batch_size=None, **way)
        assert len(loader) == len(stream) == -(-COUNT // 12)
        seen[name] = [_keys(loader) for _ in range(2)]
        del loader
    torch.distributed.barrier()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


@promise("Each iteration of a stream is the next epoch, or the one that was set")
def test_ranks_that_are_made_after_the_stream_share_each_epoch_out(dataset: ShardDataset, tmp_path: Path) -> None:
    stream = dataset.stream(6, seed=3)
    torch.multiprocessing.spawn(_rank, args=(stream, str(tmp_path)), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    expected = _orders(dataset, 2)
    for way in _WAYS_OF_RANKS:
        for epoch in range(2):
            mixed = [""] * COUNT
            mixed[0::2], mixed[1::2] = first[way][epoch], second[way][epoch]
            assert mixed == expected[epoch], (way, epoch)


def test_a_rank_is_what_the_variables_say_when_it_is_iterated(
    dataset: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = dataset.stream(6, seed=3)
    whole = _keys(stream)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    stream.set_epoch(0)
    assert len(stream) == 4
    assert _keys(stream) == whole[1::2]
    with pytest.raises(UsageError, match="no rank"):
        dataset.stream(6, rank=2, world=2)
