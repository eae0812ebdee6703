"""A real Lightning Trainer over `loader()`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from datacache.loaders.order import EpochOrder
from datacache.torch import loader

SIZE = 22


class Numbers(Dataset):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, at: int) -> int:
        return at


def make_model() -> Any:
    """Make a model that notes the batches it gets."""
    import lightning  # which takes seconds, in each process that collects tests

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: dict[int, list[int]] = {}
            self.checked: list[int] = []

        def training_step(self, batch: Any, _number: int) -> Any:
            self.seen.setdefault(self.current_epoch, []).extend(batch.tolist())
            return self.layer(batch.float()[:, None]).mean()

        def validation_step(self, batch: Any, _number: int) -> None:
            self.checked.extend(batch.tolist())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Model()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trainer_gets_each_epoch_whole_and_in_turn(workers: int, tmp_path: Path) -> None:
    import lightning

    model = make_model()
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        default_root_dir=tmp_path,
    )
    with (
        loader(Numbers(), 4, seed=4, num_workers=workers) as batches,
        loader(Numbers(), 11, shuffle=False, num_workers=0) as validation,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        trainer.fit(model, batches, validation)
        assert trainer.global_step == 3 * len(batches) == 18
    assert model.seen == {epoch: EpochOrder(SIZE, seed=4, epoch=epoch).take(0, SIZE).tolist() for epoch in range(3)}
    assert model.checked == [*range(11), *list(range(SIZE)) * 3]
