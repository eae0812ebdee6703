"""`dsctl bench loader`: how fast a training would get its samples on this machine, and what holds that up.

With `--json`: `{"dataset", "samples", "batch_size", "decode", "size": [height, width] | null, "processors", "rows":
[{"workers", "samples_per_s", "bytes_per_s", "cpu_s_per_sample", "miss_share", "bottleneck", "text", …}], "choice":
{"num_workers", "text"}}`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from datacache import api
from datacache.core.counters import count
from datacache.core.errors import UsageError
from datacache.settings import format_bytes
from dataset_cli.app import App, ImageSize, command
from dataset_cli.output import printable

if TYPE_CHECKING:
    from dataset_cli.output import Progress

_TARGETS = ("auto", "detection", "classification", "folder", "path", "none")


@click.group()
def bench() -> None:
    """Measure what this machine does with your data."""


@command(bench)
@click.argument("dataset")
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Samples in a batch.")
@click.option("--decode", type=click.Choice(["rgb", "bytes"]), default="rgb", show_default=True, help="Pixels, or not.")
@click.option("--size", type=ImageSize(), metavar="WxH", help="Resize images to this width and height.")
@click.option("--packed", is_flag=True, help="With --decode bytes: a batch is one tensor.")
@click.option("--target", type=click.Choice(_TARGETS), default="auto", show_default=True, help="What is learned.")
@click.option("--workers", metavar="LIST", help="Numbers to try, as 0,1,4 (default: 0, 1, 2, 4, … processors).")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=3.0, show_default=True, help="For each.")
def loader(app: App, /, *, dataset: str, workers: str | None, seconds: float, batch_size: int, **how: Any) -> None:
    """Measure loading a data set with PyTorch.

    DATASET is a snapshot (NAME@REF), of shards or not, or a shard set's URL or folder. Samples are drawn at random,
    as a training does it. Needs PyTorch.

    \b
    dsctl bench loader mask@v1 --size 224x224
    dsctl bench loader ./mask-shards --decode bytes --packed
    """
    counts = _counts(workers)
    try:
        import torch as _torch  # noqa: F401 - asked for before anything is opened
    except ModuleNotFoundError as exc:
        text = "this measures PyTorch's DataLoader, and PyTorch is not installed"
        raise UsageError(text, hint="pip install 'dsctl[torch]'") from exc
    from datacache.torch import ShardDataset, SnapshotDataset

    how["target"] = None if how["target"] == "none" else how["target"]
    with app.out.progress(f"opening {dataset}") as bar:
        is_snapshot = isinstance(api.open_samples(dataset, app.settings), api.Snapshot)
        samples = (SnapshotDataset if is_snapshot else ShardDataset)(dataset, settings=app.settings, **how)
        rows = [_measure(samples, number, batch_size, seconds, bar) for number in counts]
    chosen, processors = api.best_report(rows), api.processor_count()
    best = chosen.stretch.workers
    why = "" if len(rows) == 1 else ": more are not clearly faster" if chosen is not rows[-1] else ": the most tried"
    text = f"Best: num_workers={best}{why}. {chosen.words}"
    app.out.result(
        {
            "dataset": dataset,
            "samples": len(samples),
            "batch_size": batch_size,
            "decode": how["decode"],
            "size": how["size"],
            "processors": processors,
            "rows": [row.as_dict() for row in rows],
            "choice": {"num_workers": best, "text": text},
        },
        f"{printable(dataset)}  {len(samples):,} samples, batches of {batch_size}, {count(processors, 'processor')}",
    )
    app.out.table(
        ["WORKERS", "SAMPLES/S", "READ", "CPU A SAMPLE", "MISSES", "HELD UP BY"],
        [
            [
                str(row.stretch.workers),
                f"{row.samples_per_s:,.0f}",
                f"{format_bytes(row.bytes_per_s)}/s",
                f"{1000 * row.cpu_s_per_sample:.2f} ms",
                f"{100 * row.miss_share:.0f} %",
                row.bottleneck,
            ]
            for row in rows
        ],
        right=(0, 1, 2, 3, 4),
    )
    app.out.lines(["", text])


def _measure(samples: Any, workers: int, batch_size: int, seconds: float, bar: Progress) -> api.Report:
    began, done = time.monotonic(), 0

    def show() -> None:
        nonlocal done
        done += 1
        bar.update(f"{workers} workers, {done:,} batches", min(seconds, time.monotonic() - began), seconds)

    bar.update(f"{workers} workers", 0, seconds)
    return api.measure_loading(samples, workers=workers, batch_size=batch_size, seconds=seconds, on_batch=show)


def _counts(text: str | None) -> list[int]:
    if text is None:
        return api.worker_counts()
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() and int(number) <= 1024 for number in numbers):
        raise UsageError(f"--workers {text}: not numbers of workers", hint="For example --workers 0,2,4")
    return sorted({int(number) for number in numbers})
