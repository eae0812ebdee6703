"""Run the code of docs/LOADER_BUGS.md, and look for the tests that it names."""

from __future__ import annotations

import gc
import multiprocessing
import re
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from datacache.annotations.model import Annotation, Box
from datacache.loaders.selection import BoxColumns

ROOT = Path(__file__).resolve().parent.parent.parent
_PAGE = (ROOT / "docs" / "LOADER_BUGS.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", _PAGE, re.MULTILINE | re.DOTALL))


def _run(code: str, title: str) -> None:
    exec(compile(code, title, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("title", SECTIONS)
def test_the_code_of_each_bug_runs(title: str, home: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_run, args=(SECTIONS[title], title))
    process.start()
    try:
        process.join(200)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def test_there_are_five_and_the_tests_they_name_exist() -> None:
    assert len(SECTIONS) == len(re.findall(r"^## ", _PAGE, re.MULTILINE)) == 5
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", _PAGE)
    assert len(named) == 5
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")


class _Boxes(Dataset):
    """Looks at the boxes of samples, and gives what its process shares with no other one."""

    def __init__(self, samples: int) -> None:
        self.columns = BoxColumns(("face",))
        boxes = tuple(Box("face", 1.0, 2.0, 3.0, 4.0 + number) for number in range(20))
        for _ in range(samples):
            self.columns.add("", Annotation("", 10, 10, boxes))
        self.columns.finish()

    def __len__(self) -> int:
        return len(self.columns._ends) - 1

    def __getitems__(self, samples: list[int]) -> list[Any]:
        for sample in samples:
            self.columns.get(sample)
        found: dict[str, Any] = {}
        exec(SECTIONS["Workers eat up the memory, one sample after another"].partition("class Paths")[0], found)
        return [found["own_mib"]()]


def _without_collections(_worker: int) -> None:
    gc.disable()


def test_workers_share_what_a_dataset_knows_of_its_samples() -> None:
    dataset = _Boxes(40_000)
    assert dataset.columns._boxes.nbytes > 12 * 2**20
    # A collection of garbage would write to every object that the worker has from the tests' process.
    batches = DataLoader(
        dataset,
        batch_size=4000,
        num_workers=1,
        timeout=120,
        worker_init_fn=_without_collections,
        multiprocessing_context="fork",
    )
    first, *_, last = (int(batch) for batch in batches)
    assert last - first < 4
