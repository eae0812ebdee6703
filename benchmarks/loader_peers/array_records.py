"""ArrayRecord: random access, a group of its own for each record, uncompressed, in one file: of the ways to write them
these took the least CPU time.

A DataLoader calls `__getitems__` where there is one, which reads a batch with threads; record by record
(`options["one_by_one"]`) took less CPU time for images of 107 KB. Both are measured.
"""

from __future__ import annotations

from pathlib import Path

from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter
from torch.utils.data import DataLoader, Dataset

from benchmarks.loader_peers.plan import Loader, ReadPlan, as_list, image_files

OPTIONS = "group_size:1,uncompressed"


def write(images: Path, target: Path) -> None:
    """Write `images.array_record` into `target`."""
    writer = ArrayRecordWriter(str(target / "images.array_record"), OPTIONS)
    for path in image_files(images):
        writer.write(path.read_bytes())
    writer.close()


class OneByOne(Dataset):
    """Records without a way to ask for several."""

    def __init__(self, records: ArrayRecordDataSource) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, sample: int) -> bytes:
        return self._records[sample]


def open_loader(source: str, plan: ReadPlan) -> Loader:
    """Open them, shuffled by PyTorch's sampler."""
    records = ArrayRecordDataSource([f"{source}/images.array_record"])
    if plan.options.get("one_by_one"):
        records = OneByOne(records)
    loader = DataLoader(records, batch_size=plan.batch_size, shuffle=True, collate_fn=as_list, **plan.workers_stay())
    return lambda _number: loader
