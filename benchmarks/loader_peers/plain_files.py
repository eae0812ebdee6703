"""Plain files: the map-style dataset everybody writes first."""

from __future__ import annotations

from pathlib import Path

from torch.utils.data import DataLoader, Dataset

from benchmarks.loader_peers.plan import Loader, Plan, as_list, image_files


class Files(Dataset):
    """Files by number."""

    def __init__(self, folder: Path) -> None:
        self._paths = [str(path) for path in image_files(folder)]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, sample: int) -> bytes:
        with open(self._paths[sample], "rb") as file:
            return file.read()


def open_loader(source: str, plan: Plan) -> Loader:
    """Shuffled by PyTorch's sampler."""
    loader = DataLoader(
        Files(Path(source)), batch_size=plan.batch_size, shuffle=True, collate_fn=as_list, **plan.workers_stay()
    )
    return lambda _number: loader
