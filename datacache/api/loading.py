"""Measure how fast a training would get its samples with several numbers of worker processes. Needs PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datacache.loaders.tuning.report import Report


def processor_count() -> int:
    """Return how many processors this process may keep busy."""
    from datacache.loaders.processes import processors

    return processors()


def worker_counts() -> list[int]:
    """Return the numbers of workers that are worth trying on this machine."""
    from datacache.loaders.tuning.autotune import candidates

    return candidates(processor_count())


def measure_loading(
    dataset: Any,
    *,
    workers: int,
    batch_size: int,
    seconds: float,
    on_batch: Callable[[], None] = lambda: None,
) -> Report:
    """Load random batches of a dataset for some seconds and return what that was like."""
    from datacache.loaders.loader import default_collate
    from datacache.loaders.tuning.autotune import measure

    return measure(
        dataset,
        _random_batches(len(dataset), batch_size, workers),
        default_collate(dataset),
        batch_size=batch_size,
        workers=workers,
        seconds=seconds,
        on_batch=on_batch,
    )


def best_report(reports: Sequence[Report]) -> Report:
    """Return the report with the fewest workers beyond which more are not clearly faster."""
    from datacache.loaders.tuning.autotune import best

    return best(reports)


def _random_batches(size: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield other numbers for each number of workers, so that one does not warm the cache for the next."""
    import numpy as np

    draw = np.random.default_rng(seed)
    while True:
        yield draw.integers(0, size, batch_size).tolist()
