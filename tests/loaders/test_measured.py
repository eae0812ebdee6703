"""Test what users see of their dataset in a loader's workers: the dataset."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from datacache.loaders.loader import loader
from datacache.loaders.tuning.clock import Clocks, Measured


class Shifted(Dataset):
    """Numbers from somewhere on."""

    def __init__(self, shift: int) -> None:
        self.shift, self.clocks = shift, "the user's"

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.tensor(at + self.shift)


def _begin(_worker: int) -> None:
    subset = get_worker_info().dataset
    assert isinstance(subset, Subset)
    assert isinstance(subset.dataset, Shifted)
    assert subset.dataset.clocks == "the user's"
    subset.dataset.shift = 100
    subset.indices = subset.indices[::-1]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_init_fn_finds_the_users_dataset_and_may_change_it(context: str) -> None:
    dataset = Subset(Shifted(0), range(4))
    with loader(
        dataset, 4, shuffle=False, num_workers=1, worker_init_fn=_begin, multiprocessing_context=context
    ) as batches:
        assert [batch.tolist() for batch in batches] == [[103, 102, 101, 100]]


def test_what_is_set_is_set_on_the_dataset() -> None:
    clocks = Clocks(0)
    inner = Subset(Shifted(1), [1, 2])
    data = Measured(inner, clocks)
    assert isinstance(data, Subset)
    assert data.dataset.shift == 1
    data.colour = "blue"
    assert inner.colour == "blue"
    del data.colour
    assert not hasattr(inner, "colour")
    assert copy.copy(data).indices == [1, 2]
    assert data.__getitems__([0, 1]) == [torch.tensor(2), torch.tensor(3)]
    assert clocks.usage().batches == 1
