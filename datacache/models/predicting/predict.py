"""Predict on the images of a snapshot, and make a snapshot of what is found.

Used by `api.predict`. Everything is in the log of the job once it is done (`results`), and the snapshot is made of the
log, in the order of the images. So its id depends on what the model says of each image alone: not on the number of
processes, nor on who was killed. One thread.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from datacache.annotations.model import Annotation, Box, Problem
from datacache.annotations.query import Query
from datacache.annotations.shapes.outline import NOTHING
from datacache.catalog.base import Catalog
from datacache.catalog.commit import check_target
from datacache.catalog.objects import ObjectWriter
from datacache.core.cores import cores
from datacache.core.engine import Engine
from datacache.core.errors import DatacacheError, PredictError, UsageError
from datacache.core.joblog import JobLog
from datacache.loaders.decode import height_and_width
from datacache.loaders.selection import select
from datacache.loaders.source import SnapshotSource
from datacache.manifest.model import Lineage, Naming, SnapshotRecord
from datacache.models.predicting.checksums import checksum_of, checksum_of_files
from datacache.models.predicting.elsewhere import Elsewhere, EngineJob, path_for_all, run_on_engine
from datacache.models.predicting.processes import ModelJob, run_in_processes
from datacache.models.predicting.results import Results
from datacache.models.predicting.snapshots import COMMAND, Predictions
from datacache.reader.snapshot import Snapshot

Progress = Callable[[str, int, int], None]
"""Step, images done, images in all."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """The options of a prediction, checked."""

    weights: Path | None = None
    weights_name: str = ""
    """The path or the reference that they were given as."""
    devices: Sequence[str] = ("",)
    """'' is a GPU where there is one, else the processor; of a module of PyTorch, the device that it is on."""
    processes: int = 1
    """Of each device."""
    decoders: int | None = None
    """Of each of these; None: the cores that are left, one at least."""
    threads: int | None = None
    """PyTorch's threads of each on the processor; None: as PyTorch has it, fewer where there are several."""
    classes: Sequence[str] | None = None
    size: Any = None
    """Height and width, as the datasets of `datacache.torch` take them."""
    batch_size: int = 16
    least_score: float = 0.05
    split: str = ""
    """Only the images of this split; '': all."""

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "processes": 1, "decoders": 0, "threads": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise UsageError(f"{name}={value!r}: it is a number from {smallest} on")
        if not 0 <= self.least_score <= 1:
            raise UsageError(f"the least score is from 0 to 1, not {self.least_score}")
        for name in ("devices", "classes"):
            if isinstance(getattr(self, name), str):
                raise UsageError(f"{name} are a list, not the text {getattr(self, name)!r}")
        object.__setattr__(self, "size", height_and_width(self.size))
        if not self.devices:
            raise UsageError("there is no device to predict on", hint="Name one: cpu, or cuda:0.")


@dataclass
class PredictReport:
    """The counts and problems of a prediction."""

    images: int
    """That were asked for."""
    predicted: int = 0
    resumed: int = 0
    """Images that an earlier run has done."""
    objects: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    """Class → objects, or images that were classified."""
    problems: list[Problem] = field(default_factory=list)
    """Of images that are left out."""
    seconds: float = 0.0
    """From the moment at which the first model was loaded to the last result."""
    busy: float = 0.0
    """The part of this time in which a model's process had its model at work."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as `dsctl predict --json` prints it."""
        rest = {"classes": dict(self.classes), "problems": [problem._asdict() for problem in self.problems]}
        return {**vars(self), **rest}


class Predicted(NamedTuple):
    """The snapshot of predictions, and how it was made."""

    record: SnapshotRecord
    report: PredictReport


def predict(
    catalog: Catalog,
    snapshot: Snapshot,
    model: str | Callable[..., Any],
    naming: Naming,
    *,
    options: PredictOptions,
    home: Path,
    open_objects: Callable[[], ObjectWriter],
    elsewhere: Elsewhere | None = None,
    progress: Progress = lambda _what, _done, _total: None,
) -> Predicted:
    """Predict on `snapshot` and commit the result; what a killed run of the same has done is taken over.

    A `model` that is named is loaded by processes of its own, or by those of an engine; a callable runs here.
    `UsageError` for what cannot be meant, `PredictError` where the model fails, a process ends before its time, or no
    image could be predicted; the store's and the catalog's errors.
    """
    if not isinstance(model, str) and (len(options.devices) > 1 or options.processes > 1):
        raise UsageError(
            "a model that is an object of this process cannot run in several",
            hint="Name it: MODULE:CALLABLE, or a file.",
        )
    if elsewhere is not None:
        check_for_engine(model, options)
    check_target(catalog, naming, Lineage(COMMAND, {}, (snapshot.ref,)))
    selection = select(snapshot, catalog, target=None, query=Query(), split=options.split, progress=progress)
    source = SnapshotSource(snapshot, selection)
    sums = {
        "model": checksum_of(model),
        "weights": "" if options.weights is None else checksum_of_files(options.weights),
    }
    kept = sums["model"] or options.weights is not None
    token = "" if kept else secrets.token_hex(16)  # nobody can tell whether it is the same model again
    identity = {
        "format": 1,
        "snapshot": snapshot.record.id,
        "model": _name_of(model),
        "checksums": token or sums,
        "classes": options.classes and list(options.classes),
        "size": options.size,
        "batch_size": options.batch_size,
        "least_score": options.least_score,
        "split": options.split,
    }
    taken = PredictError(
        "another process is at this very prediction",
        hint="Wait for the other process, or end it and run this again: it goes on where that was.",
    )
    log = JobLog(home / "predictions", identity, taken=taken)
    with closing(log):
        try:
            results = Results(log, len(source), options.batch_size, options.least_score, path=source.path)
            report = PredictReport(len(source), resumed=results.done)
            if results.done < len(source):
                remote = elsewhere and (
                    elsewhere.engine,
                    _engine_job(elsewhere, source, model, options=options, sums=sums, token=token),
                )
                with _left_in_its_mode(model):
                    _run(model, source, options, results, remote=remote, report=report, progress=progress)
            parameters = {
                "model": _name_of(model),
                "model_checksum": sums["model"],
                "weights": options.weights_name,
                "weights_checksum": sums["weights"],
                "least_score": options.least_score,
                "size": options.size and list(options.size),
                "split": options.split,
            }
            parameters = {name: value for name, value in parameters.items() if value}
            predictions = _predictions(source, results, report)
            lineage = Lineage(COMMAND, parameters | {"classes": list(results.classes or ())}, (snapshot.ref,))
            record = predictions.commit(catalog, snapshot, naming, lineage, open_objects)
        except BaseException:
            if not kept:
                log.remove()
            raise
        log.remove()
    return Predicted(record, report)


def _run(
    model: str | Callable[..., Any],
    source: SnapshotSource,
    options: PredictOptions,
    results: Results,
    *,
    remote: tuple[Engine, EngineJob] | None,
    report: PredictReport,
    progress: Progress,
) -> None:
    """Have the images predicted that are not done, by processes of an engine where `remote` is given."""
    began = 0.0

    def ready(classes: Sequence[str]) -> None:
        nonlocal began
        began = began or time.perf_counter()
        results.begin(classes)

    count = len(options.devices) * options.processes
    decoders = options.decoders
    if decoders is None:
        decoders = max(1, (cores() - count) // count)
    if remote is not None:
        outcomes = run_on_engine(*remote, source, results.batches(), ready=ready)
    elif isinstance(model, str):
        threads = options.threads or (max(1, cores() // count) if count > 1 else None)
        jobs = [
            ModelJob(source, model, options.weights, device, options.classes, options.size, decoders, threads)
            for device in options.devices
            for _ in range(options.processes)
        ]
        outcomes = run_in_processes(jobs, results.batches(), ready=ready)
    else:
        from datacache.models.detectors import load_detector
        from datacache.models.predicting.stages import device_for, run_model

        device = options.devices[0] or device_for(model)
        detector = load_detector(
            model, weights=options.weights, device=device, classes=options.classes, size=options.size
        )
        ready(detector.classes)
        outcomes = run_model(detector, source, results.batches(), decoders=decoders)
    progress("predicting", results.done, len(source))
    busy_s = 0.0
    for outcome in outcomes:
        results.add(outcome)
        busy_s += outcome.busy_s
        report.seconds = time.perf_counter() - began
        progress("predicting", results.done, len(source))
    if remote is not None:
        with suppress(DatacacheError):  # all is done, so an engine that has ended since does no harm
            count = remote[0].width()
    report.busy = busy_s / count / report.seconds if report.seconds else 0.0


def check_for_engine(model: str | Callable[..., Any], options: PredictOptions) -> None:
    """Raise `UsageError` for what an engine has no use for."""
    if not isinstance(model, str):
        raise UsageError(
            "a model that is an object of this process cannot run on an engine",
            hint="Name it: MODULE:CALLABLE, or a file.",
        )
    if len(options.devices) > 1 or options.processes > 1 or options.decoders is not None:
        raise UsageError(
            "an engine has processes of its own, each of which decodes and has the model on one device",
            hint="Give neither several devices nor numbers of processes and decoders.",
        )


def _engine_job(
    elsewhere: Elsewhere,
    source: SnapshotSource,
    model: str | Callable[..., Any],
    *,
    options: PredictOptions,
    sums: dict[str, str],
    token: str,
) -> EngineJob:
    assert isinstance(model, str)
    return EngineJob(
        snapshot=source.snapshot,
        model=os.path.abspath(model) if os.path.isfile(model) else model,
        model_checksum=sums["model"],
        weights="" if options.weights is None else path_for_all(options.weights_name, options.weights),
        weights_checksum=sums["weights"],
        device=options.devices[0],
        classes=options.classes and tuple(options.classes),
        size=options.size,
        threads=options.threads or 1,
        run=token,
        open_weights=elsewhere.open_weights,
        settings=elsewhere.settings,
    )


@contextmanager
def _left_in_its_mode(model: object) -> Iterator[None]:
    """Have those parts of a module of PyTorch train again that did before it predicted."""
    modules = getattr(model, "modules", None)
    training = [part for part in modules() if part.training] if hasattr(model, "training") and modules else []
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _predictions(source: SnapshotSource, results: Results, report: PredictReport) -> Predictions:
    """Return what was predicted of all images, in their order, and count it."""
    report.problems = sorted(results.problems, key=lambda problem: problem.file)
    report.predicted = len(source) - len(report.problems)
    if not report.predicted:
        first = report.problems[0]
        raise PredictError(
            f"none of {len(source):,} images could be predicted, and nothing was made: {first.file}: {first.message}",
            hint="See what is wrong with them: dsctl stats REF --problems --decode",
        )
    classes = results.classes or ()
    predictions = Predictions(classes)
    for image, width, height, objects, likeliest in results.read():
        row, path = source.row(image), source.path(image)
        if objects is None:
            named = [(classes[label], score) for label, score in likeliest]
            predictions.classify(row, path, named, least_score=results.least_score)
            continue
        boxes = [
            Box(classes[label], x1, y1, x2, y2, extra=NOTHING._replace(score=score))
            for label, x1, y1, x2, y2, score in objects
        ]
        predictions.add(row, Annotation(path, width, height, tuple(boxes)))
    report.objects, report.classes = predictions.objects, predictions.counts
    return predictions


# --- which model it is ----------------------------------------------------------------------------------------------


def _name_of(model: str | Callable[..., Any]) -> str:
    if isinstance(model, str):
        return model
    named = model if hasattr(model, "__qualname__") else type(model)
    return f"{named.__module__}:{named.__qualname__}"
