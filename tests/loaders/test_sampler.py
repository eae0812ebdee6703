"""The sampler in real DataLoaders, under torch.distributed and in Lightning's Trainer."""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset, Subset, random_split

from datacache.core.errors import UsageError
from datacache.daemon.orders.plan_file import PlanFile
from datacache.loaders.lookahead import PlanSource
from datacache.loaders.order import EpochOrder
from datacache.loaders.sampler import EpochSampler, _plannable
from datacache.tiers.memory import lookahead_dir
from tests.promises import promise


class Numbers(Dataset):
    """Each sample is its number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int) -> int:
        return at

    def groups(self) -> np.ndarray:
        return np.full(self.size // 10, 10)


class Unplannable(Numbers):
    def plan_source(self) -> PlanSource:
        raise RuntimeError("no plan today")


def samples(loader: DataLoader) -> list[int]:
    return [int(sample) for batch in loader for sample in batch]


# --- the sampler ----------------------------------------------------------------------------------------------------


def test_it_gives_the_epochs_order_as_python_integers() -> None:
    sampler = EpochSampler(40_000, seed=3, rank=1, world=2)
    given = list(sampler)
    assert given == EpochOrder(40_000, seed=3).take(0, 40_000)[1::2].tolist()
    assert len(sampler) == 20_000
    assert type(given[0]) is int


def test_each_epoch_has_an_order_of_its_own_and_the_same_one_again() -> None:
    sampler = EpochSampler(100, rank=0, world=1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert sampler.epoch == 1
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_shuffle_may_be_true_or_false_or_by_the_datasets_groups() -> None:
    assert list(EpochSampler(10, shuffle=False, rank=0, world=1)) == list(range(10))
    assert list(EpochSampler(50, shuffle=True, rank=0, world=1)) == list(EpochSampler(50, rank=0, world=1))
    blocks = list(EpochSampler(Numbers(1000), shuffle="blocks", window=2, rank=0, world=1))
    assert sorted(blocks) == list(range(1000))
    assert len({sample // 10 for sample in blocks[:20]}) == 2
    with pytest.raises(UsageError, match="lie together"):
        EpochSampler(10, shuffle="blocks")


def test_a_state_of_another_default_window_goes_on_with_that_window() -> None:
    former = EpochSampler(Numbers(1000), shuffle="blocks", window=7, rank=0, world=1)
    first = iter(former)
    for _ in range(100):
        next(first)
    sampler = EpochSampler(Numbers(1000), shuffle="blocks", rank=0, world=1)
    sampler.load_state_dict(former.state_dict(100))
    assert list(sampler) == list(first)
    sampler.set_epoch(1)
    former.set_epoch(1)
    assert list(sampler) == list(former)
    with pytest.raises(UsageError, match="its window is 7, not 8"):
        EpochSampler(Numbers(1000), shuffle="blocks", window=8).load_state_dict(former.state_dict(0))


def test_ranks_and_worlds_are_as_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(EpochSampler(10)) == 10
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(EpochSampler(9, shuffle=False)) == [1, 4, 7]
    assert list(EpochSampler(9, shuffle=False, rank=0, world=2)) == [0, 2, 4, 6, 8]
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(UsageError, match="WORLD_SIZE"):
        EpochSampler(10)
    with pytest.raises(UsageError, match="both"):
        EpochSampler(10, rank=1)


def test_a_rank_that_is_known_later_than_the_sampler_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = EpochSampler(9, shuffle=False)
    assert sampler.remaining == 9
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert sampler.remaining == 3
    assert list(sampler) == [1, 4, 7]


def test_what_was_handed_out_counts_as_used_unless_a_number_is_given() -> None:
    sampler = EpochSampler(50_000, rank=0, world=1)
    assert sampler.state_dict()["taken"] == 0
    given = iter(sampler)
    for taken in range(1, 20_001):
        next(given)
        if taken in (1, 16_384, 16_385, 20_000):
            assert sampler.state_dict()["taken"] == taken
    assert sampler.state_dict(consumed=64)["taken"] == 64
    with pytest.raises(UsageError, match="cannot have taken"):
        sampler.state_dict(consumed=50_001)


@promise("A training resumes in the middle of an epoch with exactly the samples not yet seen")
def test_it_goes_on_in_the_middle_of_an_epoch_on_another_number_of_ranks() -> None:
    before = [EpochSampler(1000, seed=5, rank=rank, world=4) for rank in range(4)]
    seen: list[int] = []
    states = []
    for sampler, taken in zip(before, (30, 31, 31, 29), strict=True):
        sampler.set_epoch(7)
        given = iter(sampler)
        seen += [next(given) for _ in range(taken)]
        states.append(json.loads(json.dumps(sampler.state_dict())))
    after = [EpochSampler(1000, seed=5, rank=rank, world=3, even="uneven") for rank in range(3)]
    for sampler in after:
        sampler.load_state_dict(states)
        sampler.set_epoch(7)  # as Lightning does: the epoch it is already in
        assert sampler.epoch == 7
        rest = list(sampler)
        seen += rest
    assert sorted(seen) == list(range(1000))


def test_after_the_rest_of_an_epoch_come_whole_ones() -> None:
    first = EpochSampler(100, rank=0, world=1)
    given = iter(first)
    taken = [next(given) for _ in range(60)]
    sampler = EpochSampler(100, rank=0, world=1)
    sampler.load_state_dict(first.state_dict())
    assert sampler.remaining == 40
    rest = list(sampler)
    assert sorted(taken + rest) == list(range(100))
    assert sampler.state_dict()["taken"] == 40
    assert sampler.remaining == 100
    assert list(sampler) == taken + rest
    sampler.load_state_dict(first.state_dict())
    sampler.set_epoch(1)
    assert len(list(sampler)) == 100


def test_its_length_is_that_of_a_whole_epoch_also_in_the_middle_of_one() -> None:
    sampler = EpochSampler(100, rank=0, world=3)
    sampler.load_state_dict(EpochSampler(100, rank=0, world=1).state_dict(consumed=70))
    assert (len(sampler), sampler.remaining) == (34, 10)
    given = iter(sampler)
    next(given)
    assert (len(sampler), sampler.remaining) == (34, 10)


def test_a_state_of_the_end_of_an_epoch_has_nothing_left() -> None:
    first = EpochSampler(100, rank=0, world=1)
    list(first)
    sampler = EpochSampler(100, rank=0, world=1)
    sampler.load_state_dict(first.state_dict())
    assert list(sampler) == []
    sampler.set_epoch(1)
    assert len(list(sampler)) == 100


def test_a_wrong_state_changes_nothing() -> None:
    sampler = EpochSampler(100, rank=0, world=1)
    given = iter(sampler)
    next(given)
    with pytest.raises(UsageError, match="its size is 90, not 100"):
        sampler.load_state_dict(EpochSampler(90, rank=0, world=1).state_dict())
    with pytest.raises(UsageError, match="took 101 samples, and there were 100"):
        sampler.load_state_dict(sampler.state_dict() | {"taken": 101})
    assert sampler.state_dict()["taken"] == 1


def test_it_can_be_pickled_in_the_middle_of_an_epoch() -> None:
    sampler = EpochSampler(Numbers(100), seed=2, rank=0, world=1)
    given = iter(sampler)
    for _ in range(5):
        next(given)
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy.state_dict() == sampler.state_dict()
    assert list(copy) == list(sampler)


# --- in a DataLoader --------------------------------------------------------------------------------------------------


@promise("An epoch's order follows from size, seed, epoch and shuffle alone")
def test_a_dataloader_with_workers_gives_its_order_epoch_after_epoch() -> None:
    sampler = EpochSampler(Numbers(60), seed=1, rank=0, world=1)
    loader = DataLoader(
        Numbers(60),
        batch_size=8,
        sampler=sampler,
        num_workers=2,
        persistent_workers=True,
    )
    assert len(loader) == 8
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert samples(loader) == EpochOrder(60, seed=1, epoch=epoch).take(0, 60).tolist()


def test_with_workers_a_state_needs_the_number_of_samples_that_were_used() -> None:
    sampler = EpochSampler(Numbers(96), rank=0, world=1)
    batches = iter(DataLoader(Numbers(96), batch_size=8, sampler=sampler, num_workers=2))
    seen = [int(sample) for _ in range(3) for sample in next(batches)]
    assert sampler.state_dict()["taken"] > 24  # the workers are ahead
    state = sampler.state_dict(consumed=24)
    resumed = EpochSampler(Numbers(96), rank=0, world=1)
    resumed.load_state_dict(state)
    seen += samples(DataLoader(Numbers(96), batch_size=8, sampler=resumed, num_workers=2))
    assert sorted(seen) == list(range(96))


def _rank(rank: int, world: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    sampler = EpochSampler(11, seed=1)
    Path(folder, f"{rank}.json").write_text(json.dumps(list(sampler)))
    torch.distributed.destroy_process_group()


def test_ranks_are_those_of_torch_distributed(tmp_path: Path) -> None:
    mp.start_processes(_rank, args=(2, str(tmp_path)), nprocs=2, start_method="fork")
    whole = EpochOrder(11, seed=1).take(0, 11).tolist()
    assert json.loads((tmp_path / "0.json").read_text()) == whole[0::2]
    assert json.loads((tmp_path / "1.json").read_text()) == [*whole[1::2], whole[0]]


def test_lightning_trains_with_it_and_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self, sampler: EpochSampler) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.sampler = sampler
            self.seen: dict[int, list[int]] = {}

        def training_step(self, batch: Any, _number: int) -> Any:
            self.seen.setdefault(self.current_epoch, []).extend(batch.tolist())
            return self.layer(batch.float()[:, None]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_train_batch_end(self, _outputs: Any, _batch: Any, number: int) -> None:
            if self.current_epoch == 1 and number == 1 and not (tmp_path / "middle").exists():
                self.trainer.save_checkpoint(tmp_path / "middle")

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            used = len(self.seen[self.current_epoch])
            checkpoint["order"] = self.sampler.state_dict(consumed=used)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.sampler.load_state_dict(checkpoint["order"])

    def fit(**resume: Any) -> dict[int, list[int]]:
        model = Model(EpochSampler(24, seed=4))
        trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        loader = DataLoader(Numbers(24), batch_size=4, sampler=model.sampler)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(model, loader, weights_only=False, **resume)
        return model.seen

    orders = [EpochOrder(24, seed=4, epoch=epoch).take(0, 24).tolist() for epoch in range(3)]
    assert fit() == dict(enumerate(orders))
    assert fit(ckpt_path=tmp_path / "middle") == {1: orders[1][8:], 2: orders[2]}


# --- lookahead --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ordered_at_a_time", "position"), [(16384, 128), (100, 100)])
def test_the_order_is_published_while_it_is_iterated(
    tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch, ordered_at_a_time: int, position: int
) -> None:
    monkeypatch.setattr("datacache.loaders.sampler._CHUNK", ordered_at_a_time)
    from datacache.api import create_snapshot
    from datacache.torch import SnapshotDataset

    files = tmp_path / "files"
    files.mkdir()
    for number in range(300):
        (files / f"{number:03}.txt").write_text(str(number))
    create_snapshot("numbers", f"file://{files}", settings=settings)
    dataset = SnapshotDataset("numbers@latest", target=None, settings=settings)
    sampler = EpochSampler(dataset, rank=0, world=1)
    published = lookahead_dir(settings.home, settings.ram_dir)
    given = iter(sampler)
    for _ in range(130):
        next(given)
    (plan,) = published.iterdir()
    assert PlanFile(plan).position == position
    assert len(list(given)) == 170
    assert PlanFile(plan).position == 300  # it stays: the last batches are still being read
    sampler.set_epoch(1)
    given = iter(sampler)
    next(given)
    (second,) = published.iterdir()
    assert second != plan
    sampler.close()
    assert list(published.iterdir()) == []
    assert len(list(given)) == 299
    list(EpochSampler(dataset, rank=0, world=1, lookahead=False))
    assert list(published.iterdir()) == []


def test_an_order_that_is_given_up_is_not_published_any_longer(tmp_path: Path, settings: Any) -> None:
    from datacache.api import create_snapshot
    from datacache.torch import SnapshotDataset

    (tmp_path / "a").mkdir()
    for number in range(200):
        (tmp_path / "a" / f"{number:03}.txt").write_text(str(number))
    create_snapshot("numbers", f"file://{tmp_path}/a", settings=settings)
    sampler = EpochSampler(SnapshotDataset("numbers@latest", target=None, settings=settings), rank=0, world=1)
    late, given = iter(sampler), iter(sampler)
    next(late)
    next(given)
    late.close()  # takes back no order but its own
    assert len(os.listdir(lookahead_dir(settings.home, settings.ram_dir))) == 1
    given.close()
    assert os.listdir(lookahead_dir(settings.home, settings.ram_dir)) == []
    assert len(list(sampler)) == 200
    copy = pickle.loads(pickle.dumps(sampler))  # its order is the original's to publish and to take back
    assert copy.state_dict() == sampler.state_dict()
    del copy
    gc.collect()
    assert len(os.listdir(lookahead_dir(settings.home, settings.ram_dir))) == 1
    del sampler, given
    gc.collect()
    assert os.listdir(lookahead_dir(settings.home, settings.ram_dir)) == []


def test_this_ranks_next_epoch_is_published_behind_the_one_that_is_read(
    tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datacache.api import create_snapshot
    from datacache.torch import SnapshotDataset

    (tmp_path / "a").mkdir()
    for number in range(50):
        (tmp_path / "a" / f"{number:03}.txt").write_text(str(number))
    create_snapshot("numbers", f"file://{tmp_path}/a", settings=settings)
    dataset, asked = SnapshotDataset("numbers@latest", target=None, settings=settings), []
    plan_items = dataset.plan_items

    def asked_for(samples: np.ndarray) -> np.ndarray:
        asked.append(samples.tolist())
        return plan_items(samples)

    monkeypatch.setattr(dataset, "plan_items", asked_for)
    sampler = EpochSampler(dataset, seed=6, rank=1, world=2)
    sampler.set_epoch(3)
    given = iter(sampler)
    next(given)
    assert sampler._lookahead is not None
    assert sampler._lookahead.wait_sent()
    orders = [EpochOrder(50, seed=6, epoch=epoch).take(0, 50)[1::2].tolist() for epoch in (3, 4)]
    assert asked[-2:] == orders
    sampler.close()


class Planned(Numbers):
    """Tell by a sample's number what it reads of it."""

    def plan_source(self) -> PlanSource | None:
        return None

    def plan_items(self, samples: np.ndarray) -> np.ndarray:
        return samples.astype(np.uint32)[:, None] + 1000


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, tuple], ids=lambda kind: kind.__name__)
def test_what_a_subset_reads_is_what_its_dataset_says_of_those_samples(kind: Any) -> None:
    inner = Subset(Planned(20), kind([3, 5, 7, -1, 11]))
    outer = Subset(inner, kind([4, 0, -2]))
    for subset in (inner, outer, Subset(Planned(20), range(10, 20)), random_split(Planned(20), [15, 5])[1]):
        plan = _plannable(subset)
        assert plan.plan_source() is None
        order = np.arange(len(subset) - 1, -1, -1)
        read = [int(subset[at]) % 20 for at in order.tolist()]
        assert plan.plan_items(order).tolist() == [[1000 + sample] for sample in read]


def test_the_order_of_a_subset_is_published_as_well(tmp_path: Path, settings: Any) -> None:
    from datacache.api import create_snapshot
    from datacache.torch import SnapshotDataset

    (tmp_path / "a").mkdir()
    for number in range(50):
        (tmp_path / "a" / f"{number:03}.txt").write_text(str(number))
    create_snapshot("numbers", f"file://{tmp_path}/a", settings=settings)
    dataset = SnapshotDataset("numbers@latest", target=None, settings=settings)
    sampler = EpochSampler(Subset(dataset, range(40)), rank=0, world=1)
    assert len(list(sampler)) == 40
    (plan,) = lookahead_dir(settings.home, settings.ram_dir).iterdir()
    assert PlanFile(plan).position == 40
    sampler.close()


def test_an_order_that_nobody_can_publish_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        sampler = EpochSampler(Subset(Numbers(20), range(5)), rank=0, world=1)
        assert sorted(sampler) == sorted(sampler) == list(range(5))
        EpochSampler(Numbers(20), lookahead=False)
        EpochSampler(20)
    (said,) = [record.message for record in caplog.records if "no order" in record.message]
    assert "Numbers" in said


def test_what_cannot_be_published_is_said_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sampler = EpochSampler(Unplannable(20), rank=0, world=1)
    with caplog.at_level(logging.WARNING):
        assert sorted(sampler) == sorted(sampler) == list(range(20))
    assert [record.message for record in caplog.records if "not published" in record.message] == [
        "the order of samples is not published; they are read as they are asked for"
    ]
