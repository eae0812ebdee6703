"""A small data set of drawn faces, snapshotted, for what feeds a training from it."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from datacache import api
from datacache.settings import Settings
from dataset_cli.demo.faces import draw_faces

if TYPE_CHECKING:
    from datacache.loaders.dataset import SampleDataset

COUNT = 40


@pytest.fixture(scope="session", autouse=True)
def _resource_tracker() -> None:
    """Python's tracker of shared memory is started by the first spawned process that needs it and stays: started in a
    test, it would count as a process of that test's home, which the home waits for."""
    resource_tracker.ensure_running()


@pytest.fixture(scope="session")
def drawn_faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 drawn images with VOC annotations and splits. Not to be changed."""
    folder = tmp_path_factory.mktemp("faces")
    draw_faces(folder, count=COUNT)
    return folder


@pytest.fixture
def faces_ref(drawn_faces: Path, settings: Settings) -> str:
    """A snapshot of them."""
    return api.create_snapshot("faces", drawn_faces.as_uri(), settings=settings).ref


def read_until_here(dataset: SampleDataset, samples: Sequence[int]) -> None:
    """Read samples until none has to be fetched: the daemon answers with a block before the cache has it."""
    from datacache.loaders.tuning.clock import Clocks, Measured

    for _ in range(100):
        clocks = Clocks(0)
        Measured(dataset, clocks).__getitems__(samples)
        if not clocks.usage().misses:
            return
    pytest.fail("what was read is not kept on this node")
