"""Plain files: the map-style dataset everybody writes first. Decoded images are stacked by PyTorch's own collate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.loader_peers.plan import Loader, ReadPlan, as_list, image_files


class PlainFiles(Dataset):
    """Files by number."""

    def __init__(self, folder: Path) -> None:
        self._paths = [str(path) for path in image_files(folder)]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, sample: int) -> bytes:
        with open(self._paths[sample], "rb") as file:
            return file.read()


class DecodedFiles(Dataset):
    """Read and decode images from plain files."""

    def __init__(self, files: PlainFiles, size: int) -> None:
        from benchmarks.loader_peers.bare_decode import decoded

        self._files, self._size, self._decoded = files, size, decoded

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, sample: int) -> Any:
        return self._decoded(self._files[sample], self._size)


def open_loader(source: str, plan: ReadPlan) -> Loader:
    """Open files, shuffled by PyTorch's sampler."""
    files = PlainFiles(Path(source))
    dataset, collate = (DecodedFiles(files, plan.size), default_collate) if plan.size else (files, as_list)
    loader = DataLoader(dataset, batch_size=plan.batch_size, shuffle=True, collate_fn=collate, **plan.workers_stay())
    return lambda _number: loader
