"""Predicting on engines: the same snapshot as on this machine, and what processes elsewhere refuse."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datacache import api
from datacache.catalog.open import open_catalog_url, open_task_store
from datacache.core import engine
from datacache.core.errors import PredictError, UsageError
from datacache.executors.queue import trusted
from datacache.executors.queue.worker import ParcelDone, QueueWorker, WorkPlan
from datacache.models.detectors import load_detector
from datacache.models.predicting import elsewhere
from datacache.models.predicting.checksums import checksum_of
from datacache.models.predicting.elsewhere import EngineJob, ModelWorker
from datacache.settings import Settings
from dataset_cli.main import run
from tests.executors.trusting import spawned_pool
from tests.models.finder import Finder
from tests.models.test_detectors import onnx_model
from tests.promises import promise
from tests.servers import DaskCluster

MODEL = "tests.models.finder"
_loads = partial(trusted.loads, models=True)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Iterator[Executor]:
    with spawned_pool(tmp_path / "elsewhere", monkeypatch, models=True) as made:
        yield made


def predict(ref: str, settings: Settings, on: str | Executor | None, **options: Any) -> api.Predicted:
    given = {"model": f"{MODEL}:Finder", "name": "found", "batch_size": 5} | options
    return api.predict(ref, given.pop("model"), on=on, settings=settings, **given)


@promise("A prediction gives the same snapshot wherever its batches are done")
def test_processes_elsewhere_give_the_same_snapshot_and_the_same_problems(
    faces_folder: Path, tmp_path: Path, settings: Settings, pool: Executor
) -> None:
    folder = tmp_path / "faces"
    folder.mkdir()
    for path in (faces_folder / "JPEGImages").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    broken = sorted(folder.iterdir())[7]
    broken.write_bytes(b"no image")
    (folder / "weights.bin").write_bytes(b"of the model")
    ref = api.create_snapshot("faces", folder.as_uri(), settings=settings).ref
    how = {"model": f"{MODEL}:Slow", "weights": f"{ref}/weights.bin"}
    here = predict(ref, settings, None, decoders=1, **how)
    there = predict(ref, settings, pool, **how)
    assert there.record.id == here.record.id
    assert [(problem.code, problem.file) for problem in there.report.problems] == [("image-broken", broken.name)]
    assert there.report.problems == here.report.problems
    assert there.report.predicted == 23
    assert predict(ref, settings, pool, model=f"{MODEL}:SmallFinder", name="small").report.objects == 23
    left = [path for name in ("jobs", "predictions") for path in (settings.home / name).iterdir()]
    assert not left


def test_an_error_of_the_model_names_images_and_machine_and_a_second_start_goes_on(
    faces: str, settings: Settings, pool: Executor, tmp_path: Path
) -> None:
    weights, fails = tmp_path / "weights.bin", tmp_path / "fails"
    weights.write_bytes(b"of the model")
    fails.touch()
    how = {"model": f"{MODEL}:Failing", "weights": weights}
    with pytest.raises(PredictError, match="the model is confused") as raised:
        predict(faces, settings, pool, **how)
    assert f" on {socket.gethostname()}: the model failed at the images JPEGImages/" in str(raised.value)
    assert len(raised.value.images) in (4, 5)
    fails.unlink()
    made = predict(faces, settings, pool, **how)
    assert made.report.resumed > 0
    assert made.record.id == predict(faces, settings, None, name="here", decoders=0, **how).record.id


def a_job(settings: Settings, model: str, **other: Any) -> EngineJob:
    values: dict[str, Any] = dict.fromkeys(EngineJob._fields) | {"settings": settings, "model": model}
    values |= {"model_checksum": "", "weights": "", "weights_checksum": "", "device": "cpu", "threads": 1}
    return EngineJob(**values | {"open_weights": api.weights.weights_path} | other)


def test_a_process_with_another_model_or_weights_predicts_nothing(tmp_path: Path, settings: Settings) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"of the model")
    job = a_job(settings, f"{MODEL}:Slow", weights=str(weights))
    assert ModelWorker(job).work(None) == Finder.classes
    for wrong, what in (({"model_checksum": "other"}, "model"), ({"weights_checksum": "other"}, "weights")):
        with pytest.raises(UsageError, match=rf"^process {os.getpid()} on .*: the {what} .* is another one here"):
            ModelWorker(job._replace(**wrong)).work(None)


def test_weights_are_let_go_where_their_model_cannot_be_loaded(settings: Settings) -> None:
    held: list[str] = []

    @contextmanager
    def opened(where: str, _settings: Settings) -> Iterator[Path]:
        held.append(where)
        try:
            yield Path(where)
        finally:
            held.remove(where)

    worker = ModelWorker(a_job(settings, f"{MODEL}:Finder", weights="/nowhere/weights.bin", open_weights=opened))
    with pytest.raises(UsageError, match="no weights"):
        worker.work(None)
    assert not held


def test_a_process_gives_a_model_of_onnx_as_many_threads_as_it_is_told(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime has threads for the whole time that a model is loaded."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _threads: None)  # of this process, for good
    model = str(onnx_model(tmp_path / "m.onnx", [1, 24, 32, 3], {"output": ([1, 2], np.ones((1, 2), np.float32))}))
    loaded = []

    def threads_of(threads: int) -> int:
        before = len(os.listdir("/proc/self/task"))
        loaded.append(ModelWorker(a_job(settings, model, classes=["a", "b"], threads=threads)))
        assert loaded[-1].work(None) == ("a", "b")
        return len(os.listdir("/proc/self/task")) - before

    threads_of(1)  # what the library itself begins with
    assert [threads_of(1), threads_of(5)] == [0, 4], "the caller is one of them"


def test_a_module_that_has_changed_since_it_was_loaded_is_not_taken_for_the_new_one(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "_imported", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    module, model = tmp_path / "changing_model.py", "changing_model:Finder"
    module.write_text(f"from {MODEL} import Finder\n")
    assert ModelWorker(a_job(settings, model, model_checksum=checksum_of(model))).work(None) == Finder.classes
    module.write_text(f"from {MODEL} import SmallFinder as Finder\n")
    with pytest.raises(UsageError, match="changing_model was another one when it was loaded here"):
        ModelWorker(a_job(settings, model, model_checksum=checksum_of(model))).work(None)


def test_what_an_engine_has_no_use_for_is_refused(faces: str, settings: Settings, pool: Executor) -> None:
    with pytest.raises(UsageError, match="an object of this process cannot run on an engine"):
        predict(faces, settings, pool, model=Finder())
    for option in ({"processes": 2}, {"decoders": 0}, {"devices": ["cpu", "cuda:0"]}):
        with pytest.raises(UsageError, match="an engine has processes of its own"):
            predict(faces, settings, pool, **option)


def test_dask_gives_the_same_snapshot(faces: str, settings: Settings, tmp_path: Path) -> None:
    with DaskCluster(tmp_path / "dask", workers=2) as dask:
        there = predict(faces, settings, dask.url)
    assert there.record.id == predict(faces, settings, None, model=Finder(), decoders=0, name="here").record.id


@contextmanager
def working(settings: Settings, **plan: Any) -> Iterator[list[ParcelDone]]:
    """Have a thread work as a process of `dsctl tasks work` would. Gives what it has done."""
    done: list[ParcelDone] = []
    with closing(open_catalog_url(settings.catalog)) as catalog, closing(open_task_store(settings.catalog)) as store:
        worker = QueueWorker(catalog, store, f"w {plan}", WorkPlan(**plan))
        thread = threading.Thread(target=worker.run, args=(done.append,))
        thread.start()
        try:
            yield done
        finally:
            worker.stop.set()
            thread.join()


@promise("A worker of the queue loads no model unless it is told that it may")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (elsewhere.__name__, "ModelWorker"),
        ("datacache.models.predicting", "elsewhere.ModelWorker"),
        ("datacache.api.weights", "weights_path"),
        ("datacache.api", "weights.weights_path"),
    ],
)
def test_what_loads_models_is_not_named_in_a_pickle_unless_that_is_allowed(
    module: str, name: str, settings: Settings
) -> None:
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    named, listed = b"\x80\x04" + words + b"\x93", b"\x80\x04]" + words + b"\x93a."
    job = a_job(settings, "m:f")
    for packed in (named + b".", listed, engine.pickled(job), engine.pickled(ModelWorker(job))):
        with pytest.raises(UsageError, match="may load no models"):
            trusted.loads(packed)
    assert callable(_loads(named + b"."))
    with pytest.raises(trusted.UntrustedPickleError, match="changes"):
        _loads(named + b"}\x8c\x04markK\x01sb.")


def test_models_are_loaded_by_what_a_prediction_sends_and_by_nothing_else() -> None:
    for wrong in (load_detector, import_module, ExitStack):
        with pytest.raises(trusted.UntrustedPickleError, match="may not travel"):
            _loads(pickle.dumps(wrong))


@promise("A worker of the queue loads no model unless it is told that it may")
def test_workers_of_the_queue_load_models_only_where_that_is_allowed(
    faces: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["predict", faces, "--model", f"{MODEL}:Finder", "--as", "found", "--batch", "5", "--on", "queue"]
    with working(settings) as without, ExitStack() as later:
        warned: list[str] = []

        def start(text: str, *words: object) -> None:
            warned.append(text % words)
            later.enter_context(working(settings, allow_models=True))

        monkeypatch.setattr(logging.getLogger("datacache.executors.open"), "warning", start)
        assert run(command) == 0
    [said] = warned
    assert "has no worker" in said
    assert "dsctl tasks work --allow-models" in said
    assert without == [], "it passes the job over, and does not fail it"
    here = predict(faces, settings, None, model=Finder(), decoders=0, name="here")
    with api.open_snapshot("found", settings) as found:
        assert found.record.id == here.record.id
