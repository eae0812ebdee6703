"""Fifty epochs with persistent workers: nothing grows, in the training or in its workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from datacache import api
from datacache.loaders.dataset import SampleDataset
from datacache.settings import Settings
from datacache.torch import ShardDataset, SnapshotDataset, collate
from tests.promises import promise

pytestmark = pytest.mark.shared_home

_EPOCHS, _WARM = 50, 15
_MAY_GROW_KIB = 4096
"""A tenth of what keeping one small image an epoch and sample would come to."""


def _anonymous_kib(pid: int | str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def _open_files(pid: int | str) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _snapshot(ref: str, _settings: Settings, _folder: Path) -> SampleDataset:
    return SnapshotDataset(ref, decode="rgb", size=(120, 160))


def _packed(ref: str, _settings: Settings, _folder: Path) -> SampleDataset:
    return SnapshotDataset(ref, packed=True)


def _shards(ref: str, settings: Settings, folder: Path) -> SampleDataset:
    api.shard(ref, to=str(folder), max_size_bytes=100_000, name="set", settings=settings)
    return ShardDataset("set", packed=True)


@promise("Memory and open files stay flat over fifty epochs with persistent workers")
@pytest.mark.slow
@pytest.mark.parametrize("make", [_snapshot, _packed, _shards], ids=lambda make: make.__name__.strip("_"))
def test_memory_and_files_stay_flat_over_fifty_epochs(
    faces_ref: str, settings: Settings, tmp_path: Path, make: Callable[[str, Settings, Path], SampleDataset]
) -> None:
    dataset = make(faces_ref, settings, tmp_path / "set")
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=collate)
    memory: dict[str, list[int]] = {}
    files: dict[str, list[int]] = {}
    for _ in range(_EPOCHS):
        for _batch in loader:
            pass
        pids = ["self", *(str(worker.pid) for worker in loader._iterator._workers)]
        for pid in pids:
            memory.setdefault(pid, []).append(_anonymous_kib(pid))
            files.setdefault(pid, []).append(_open_files(pid))
    assert len(memory) == 3
    for pid, sizes in memory.items():
        assert max(sizes[-5:]) - max(sizes[_WARM - 5 : _WARM]) < _MAY_GROW_KIB, (pid, sizes)
    for pid, counts in files.items():
        assert max(counts[-5:]) <= max(counts[:_WARM]) + 2, (pid, counts)
