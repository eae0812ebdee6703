"""Predict in the processes of an engine, each of which loads the model once, decodes batches and runs it on them.

Used by `predict` where it is given an engine. A task is a batch of images, with the bounds that it has on one machine,
so not even last digits differ. The first task is None, and asks for the model's classes. A process that has another
model than the client says so and predicts nothing. One batch at a time in a process, in any of its threads.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datacache.core.engine import Engine, map_on
from datacache.core.errors import DatacacheError, PredictError, UsageError
from datacache.loaders.selection import Selection
from datacache.loaders.source import SnapshotSource
from datacache.models.predicting.checksums import checksum_of, checksum_of_files
from datacache.models.predicting.results import BatchOutcome, Size
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings

if TYPE_CHECKING:
    from datacache.models.detectors import Detector

OpenWeights = Callable[[str, Settings], AbstractContextManager[Path]]


class Elsewhere(NamedTuple):
    """The engine, and how its processes come by weights."""

    engine: Engine
    open_weights: OpenWeights
    settings: Settings


class EngineJob(NamedTuple):
    """A prediction, as all processes of an engine are to make it."""

    snapshot: Snapshot
    model: str
    model_checksum: str
    """Of its file or module; '' where nobody knows it."""
    weights: str
    """A path that all machines have, a URL, or a file of a snapshot; '' for none."""
    weights_checksum: str
    device: str
    classes: Sequence[str] | None
    size: Size | None
    threads: int
    run: str
    """Another one for each run of a model that nobody could tell from another; else ''."""
    open_weights: OpenWeights
    settings: Settings


class _BatchTask(NamedTuple):
    """Images to predict on: the number of the first one, and the columns of `Selection`."""

    start: int
    rows: NDArray[np.int64]
    sizes: NDArray[np.int64]
    ids: bytes


def run_on_engine(
    engine: Engine,
    job: EngineJob,
    source: SnapshotSource,
    batches: Iterable[range],
    *,
    ready: Callable[[Sequence[str]], None],
) -> Iterator[BatchOutcome]:
    """Yield the outcome of each batch, in their order. `ready` is told the model's classes before.

    `PredictError` where the model fails, `UsageError` where it cannot be loaded or is another one, both with the
    process and its machine; `DatacacheError` where the engine has lost the same batches again and again.
    """
    tasks = (_BatchTask(batch.start, *_columns(source.part(batch))) for batch in batches)
    answers = map_on(engine, ModelWorker(job), chain([None], tasks))
    ready(next(answers))
    yield from answers


def _columns(part: Selection) -> tuple[NDArray[np.int64], NDArray[np.int64], bytes]:
    return part.rows, part.sizes, part.ids


def path_for_all(name: str, path: Path) -> str:
    """Return what other machines find a file by: its whole path where `name` is a path here, else `name`."""
    return os.path.abspath(path) if Path(os.path.expanduser(name)) == path else name


# --- in the processes elsewhere --------------------------------------------------------------------------------------

_one_at_a_time = threading.Lock()
"""Guards models and `_imported`: those of Dask have several threads where they are told to."""
_imported: dict[str, str] = {}
"""The checksum that the module of each model had when this process first loaded one of it."""


class ModelWorker:
    """Loads the model when the first task comes. Pickled as its job alone."""

    def __init__(self, job: EngineJob) -> None:
        self._job = job
        self._detector: Detector | None = None
        self._opened = ExitStack()
        """Weights, which some models read from later."""

    def __reduce__(self) -> tuple[object, ...]:
        return ModelWorker, (self._job,)

    def work(self, batch: _BatchTask | None) -> Any:
        """Return the outcome of a batch; for None, the classes of the model."""
        where = f"process {os.getpid()} on {socket.gethostname()}"
        with _one_at_a_time:
            try:
                if self._detector is None:
                    self._detector = self._load()
                return self._detector.classes if batch is None else self._predict(self._detector, batch)
            except DatacacheError as exc:
                exc.message = f"{where}: {exc.message}"
                raise
            except Exception as exc:
                raise PredictError(f"{where} failed to run the model: {type(exc).__name__}: {exc}") from exc

    def _load(self) -> Detector:
        job = self._job
        own = checksum_of(job.model)
        _check("model", job.model, job.model_checksum, own)
        if not os.path.isfile(job.model):
            module = job.model.partition(":")[0]
            if _imported.setdefault(module, own) != own:
                raise UsageError(
                    f"{module} was another one when it was loaded here",
                    hint="Start the engine's processes anew: a Python keeps the modules that it has.",
                )
        from datacache.models.detectors import load_detector
        from datacache.models.predicting.stages import device_for

        weights: Path | None = None
        with ExitStack() as opened:
            if job.weights:
                weights = opened.enter_context(job.open_weights(job.weights, job.settings))
                if weights.is_file():  # else whoever loads them says so
                    _check("weights", job.weights, job.weights_checksum, checksum_of_files(weights))
            detector = load_detector(
                job.model,
                weights=weights,
                device=job.device or device_for(job.model),
                classes=job.classes,
                size=job.size,
                threads=job.threads,
            )
            self._opened = opened.pop_all()
        return detector

    def _predict(self, detector: Detector, batch: _BatchTask) -> BatchOutcome:
        from datacache.models.predicting.stages import run_model

        selection = Selection(rows=batch.rows, sizes=batch.sizes, ids=batch.ids, kind=None)
        source = SnapshotSource(self._job.snapshot, selection)
        [outcome] = run_model(detector, source, [range(len(source))], decoders=0)
        predicted = [each._replace(image=batch.start + each.image) for each in outcome.predicted]
        return BatchOutcome(batch.start, predicted, outcome.problems, outcome.busy_s)


def _check(what: str, name: str, wanted: str, own: str) -> None:
    if wanted and own and wanted != own:
        raise UsageError(f"the {what} {name} is another one here than at the client", hint="Have the same everywhere.")
