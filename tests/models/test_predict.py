"""Predicting on a snapshot: what the result has, what is left out, and what is left of it after kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from datacache import api
from datacache.annotations.table.ranges import Row
from datacache.core.errors import OtherKindError, PathNotFoundError, PredictError, UsageError
from datacache.core.joblog import JobLog
from datacache.models.outputs import Found
from datacache.models.predicting import stages
from datacache.models.predicting.checksums import checksum_of
from datacache.models.predicting.predict import Predicted
from datacache.models.predicting.results import BatchOutcome, PredictedImage, Results
from datacache.models.predicting.stages import device_for
from datacache.settings import Settings
from tests.models.finder import Failing, Finder, SmallFinder, Sorter
from tests.promises import promise

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tests.models.finder"


def rows_of(ref: str, settings: Settings) -> dict[str, Row]:
    with api.open_annotations(ref, settings=settings) as (_snapshot, table):
        return {row.path: row for row in table.rows()}


def predict(ref: str, settings: Settings, model: str | Callable[..., Any] | None = None, **options: Any) -> Predicted:
    return api.predict(
        ref, model or Finder(), **{"name": "found", "batch_size": 5, "settings": settings, "decoders": 0} | options
    )


# --- the snapshot ---------------------------------------------------------------------------------------------------


def test_predictions_are_objects_with_scores_in_the_same_images(faces: str, settings: Settings) -> None:
    made = predict(faces, settings)
    assert (made.report.images, made.report.predicted, made.report.objects) == (24, 24, 48)
    found, labelled = rows_of("found", settings), rows_of(faces, settings)
    assert list(found) == list(labelled)
    with api.open_snapshot(faces, settings) as images, api.open_snapshot("found", settings) as predicted:
        for path, row in found.items():
            assert predicted.read(path) == images.read(path)
            assert row.annotation is not None
            first, second = row.annotation.boxes
            assert (first.label, second.label) == ("mask", "no_mask")
            assert first.extra is not None
            assert second.extra is not None
            assert second.extra.score == pytest.approx(1 / 3, abs=1e-7)
            assert first.y2 / row.annotation.height == pytest.approx(first.extra.score, abs=1e-6)
    with api.open_annotations("found", settings=settings) as (_, table):
        assert api.has_scores(table)


def test_lineage_says_which_model_on_which_snapshot(faces: str, settings: Settings, tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"of the model")
    made = predict(faces, settings, Failing, weights=weights)
    lineage = made.record.lineage
    assert lineage is not None
    with api.open_snapshot(faces, settings) as snapshot:
        assert (lineage.command, lineage.inputs) == ("predict", (snapshot.ref,))
    said = lineage.parameters
    assert said["model"] == f"{MODEL}:Failing"
    assert said["weights"] == str(weights)
    assert said["weights_checksum"].startswith("xxh3-128:")
    assert said["classes"] == ["mask", "no_mask"]


def test_weights_beside_a_model_of_onnx_are_part_of_the_model(tmp_path: Path) -> None:
    """Else a run that was killed would go on with other weights."""
    weight = numpy_helper.from_array(np.ones((64, 64), np.float32), "weight")
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 64]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "weight"], ["y"])], "g", infos[:1], infos[1:], [weight])
    path, sums = tmp_path / "model.onnx", []
    onnx.save(helper.make_model(graph), path, save_as_external_data=True, location="model.bin", size_threshold=0)
    for byte in (b"\0", b"\1"):
        (tmp_path / "model.bin").write_bytes(byte * (tmp_path / "model.bin").stat().st_size)
        sums.append(checksum_of(str(path)))
    (tmp_path / "model.bin").unlink()
    sums.append(checksum_of(str(path)))
    assert len(set(sums)) == 3


@promise("The same images and the same model give the same snapshot of predictions")
def test_the_id_depends_on_neither_batches_nor_processes(faces: str, settings: Settings) -> None:
    ids = {
        predict(faces, settings).record.id,
        predict(faces, settings, batch_size=24, decoders=2).record.id,
        predict(faces, settings, f"{MODEL}:Finder", processes=2, decoders=1, batch_size=2).record.id,
    }
    assert len(ids) == 1


def test_results_are_read_in_the_order_of_images_whichever_came_first(tmp_path: Path) -> None:
    nothing = Found(np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32))
    with closing(JobLog(tmp_path, {}, taken=PredictError("taken"))) as log:
        results = Results(log, 3, 1, 0.0)
        results.begin(["mask"])
        for image in (2, 0, 1):
            results.add(BatchOutcome(image, [PredictedImage(image, (9, 9), (9, 9), nothing)], [], 0.0))
        assert [kept.image for kept in results.read()] == [0, 1, 2]


def test_boxes_of_a_resized_image_are_in_pixels_of_the_image_itself(faces: str, settings: Settings) -> None:
    predict(faces, settings, SmallFinder(), decoders=1)
    for row in rows_of("found", settings).values():
        assert row.annotation is not None
        width, height = row.annotation.width, row.annotation.height
        [box] = row.annotation.boxes
        assert box[1:5] == pytest.approx((width / 4, height / 4, width / 2, height))


def test_objects_below_the_least_score_are_left_out(faces: str, settings: Settings) -> None:
    made = predict(faces, settings, least_score=0.34)
    assert made.report.classes.keys() == {"mask"}


def test_only_the_images_of_a_split_are_asked_for(faces: str, faces_folder: Path, settings: Settings) -> None:
    predict(faces, settings, split="val")
    names = (faces_folder / "ImageSets" / "Main" / "val.txt").read_text().split()
    assert 0 < len(names) < 24
    assert list(rows_of("found", settings)) == [f"JPEGImages/{name}.jpg" for name in sorted(names)]


def test_classes_of_images_are_labels_with_scores_of_the_likeliest(faces: str, settings: Settings) -> None:
    made = predict(faces, settings, Sorter(), least_score=0.6)
    rows = rows_of("found", settings)
    with api.open_snapshot("found", settings) as snapshot:
        lines = [json.loads(line) for line in snapshot.read("metadata.jsonl").splitlines()]
    assert [line["file_name"] for line in lines] == list(rows)
    for line in lines:
        annotation = rows[line["file_name"]].annotation
        assert annotation is not None
        best = max(line["scores"], key=line["scores"].__getitem__)
        assert line["score"] == line["scores"][best]
        assert annotation.labels == ((best,) if line["score"] >= 0.6 else ())
    assert 0 < made.report.classes.total() < 24


def test_a_data_set_of_something_else_is_not_replaced(faces: str, settings: Settings) -> None:
    with pytest.raises(OtherKindError):
        predict(faces, settings, name="faces")


def test_a_module_that_trains_predicts_as_one_that_does_not_and_trains_on(faces: str, settings: Settings) -> None:
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Dropout(0.9))
    model = torch.nn.Sequential(*layers, torch.nn.Linear(3, 2))
    model.classes = ["mask", "no_mask"]  # type: ignore[assignment]
    model[3].eval()
    training = predict(faces, settings, model, size=(60, 80)).record.id
    assert [part.training for part in model.modules()] == [True, True, True, True, False]
    assert predict(faces, settings, model.eval(), size=(60, 80)).record.id == training


def test_a_module_predicts_on_the_device_that_it_is_on() -> None:
    assert device_for(torch.nn.Linear(1, 1, device="meta")) == "meta"
    assert device_for(Finder()) == device_for("a.onnx") == ("cuda" if torch.cuda.is_available() else "cpu")


# --- what is wrong --------------------------------------------------------------------------------------------------


@promise("An image that cannot be decoded is reported, and the others are predicted")
def test_images_that_cannot_be_decoded_are_reported_and_left_out(
    faces_folder: Path, tmp_path: Path, settings: Settings
) -> None:
    folder = tmp_path / "faces"
    subprocess.run(["cp", "-r", faces_folder / "JPEGImages", folder], check=True)
    broken = sorted(folder.glob("*.jpg"))[:4]
    broken[0].write_bytes(broken[0].read_bytes()[:2000])
    broken[1].write_bytes(b"no image")
    # A PNG that says it has 60,000 x 60,000 pixels.
    broken[2].write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\xea\x60\0\0\xea\x60\x08\x02\0\0\0" + bytes(4))
    api.create_snapshot("faces", folder.as_uri(), settings=settings)
    broken[3].unlink()
    made = predict("faces", settings, decoders=1)
    assert [(problem.code, problem.action, problem.file) for problem in made.report.problems] == [
        ("image-truncated", "skipped", broken[0].name),
        ("image-broken", "skipped", broken[1].name),
        ("image-too-large", "skipped", broken[2].name),
        ("image-gone", "skipped", broken[3].name),
    ]
    assert made.report.predicted == 20
    assert len(rows_of("found", settings)) == 20


@promise("However large images are, few of them are decoded at a time")
@pytest.mark.parametrize("decoders", [0, 2])
def test_a_batch_of_large_images_is_predicted_in_parts(
    faces: str, settings: Settings, monkeypatch: pytest.MonkeyPatch, decoders: int
) -> None:
    given: list[list[int]] = []

    class Weighing(Finder):
        def __call__(self, images: Any) -> Any:
            given.append([image.nbytes for image in images])
            return super().__call__(images)

    whole = predict(faces, settings, Weighing())
    largest = max(map(max, given))
    assert [len(images) for images in given] == [5, 5, 5, 5, 4]
    given.clear()
    monkeypatch.setattr(stages, "PART_BYTES", largest + 1)
    assert predict(faces, settings, Weighing(), decoders=decoders).record.id == whole.record.id
    assert len(given) > 10
    assert all(sum(images[:-1]) <= largest for images in given)
    given.clear()
    predict(faces, settings, Weighing(), size=(64, 64))
    assert [len(images) for images in given] == [5, 5, 5, 5, 4]  # whoever asks for a size knows what it takes


def test_where_no_image_can_be_predicted_nothing_is_made(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "a.jpg").write_bytes(b"no image")
    api.create_snapshot("faces", tmp_path.as_uri(), settings=settings)
    with pytest.raises(PredictError, match=r"a\.jpg"):
        predict("faces", settings)
    assert [dataset.name for dataset in api.list_datasets(settings=settings)] == ["faces"]


def test_a_model_that_fails_names_its_images_and_later_runs_go_on_behind_them(
    faces: str, settings: Settings, tmp_path: Path
) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"")
    (tmp_path / "fails").touch()
    with pytest.raises(PredictError, match=r"JPEGImages/000006\.jpg.*: ArithmeticError: the model is confused") as info:
        predict(faces, settings, Failing, weights=weights)
    assert len(info.value.images) == 5
    (tmp_path / "fails").unlink()
    steps: list[int] = []

    def count(what: str, done: int, _total: int) -> None:
        if what == "predicting":
            steps.append(done)

    made = predict(faces, settings, Failing, weights=weights, progress=count)
    assert made.report.resumed == 5
    assert steps == [5, 10, 15, 20, 24]  # and the first five are not asked for again
    assert made.record.id == predict(faces, settings).record.id
    assert predict(faces, settings, Failing, weights=weights).report.resumed == 0  # what is done is forgotten


def test_more_objects_in_an_image_than_any_has_are_refused(faces: str, settings: Settings) -> None:
    def anchors(images: list[Any]) -> list[Any]:
        boxes = np.tile(np.array([1, 1, 9, 9], np.float32), (200_000, 1))
        return [(boxes, np.zeros(len(boxes), int), np.linspace(0, 1, len(boxes), dtype=np.float32)) for _ in images]

    with pytest.raises(PredictError, match=r"190,000 objects in JPEGImages/000001\.jpg") as info:
        predict(faces, settings, anchors, classes=["cell"], batch_size=1)
    assert "higher score" in info.value.hint
    assert predict(faces, settings, anchors, classes=["cell"], batch_size=12, least_score=0.9999).report.objects > 240


def test_other_weights_do_not_go_on_where_those_before_were(faces: str, settings: Settings, tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"")
    (tmp_path / "fails").touch()
    with pytest.raises(PredictError):
        predict(faces, settings, Failing, weights=weights)
    (tmp_path / "fails").unlink()
    weights.write_bytes(b"others")
    assert predict(faces, settings, Failing, weights=weights).report.resumed == 0


def test_weights_may_be_a_file_of_a_snapshot(faces: str, settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "best.pt").write_bytes(b"of the model")
    api.create_snapshot("weights", tmp_path.as_uri(), settings=settings)
    made = predict(faces, settings, Failing, weights="weights@latest/runs/best.pt")
    assert made.record.lineage is not None
    by_path = predict(faces, settings, Failing, weights=tmp_path / "runs" / "best.pt")
    assert by_path.record.lineage is not None
    sums = {each.record.lineage.parameters["weights_checksum"] for each in (made, by_path) if each.record.lineage}
    assert len(sums) == 1
    with pytest.raises(PathNotFoundError, match=r"weights@\w+ has no file 'runs/worst\.pt'"):
        predict(faces, settings, Failing, weights="weights@latest/runs/worst.pt")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"least_score": 2}, "from 0 to 1"),
        ({"classes": "mask"}, "a list"),
        ({"devices": ()}, "no device"),
        ({"processes": 2}, "Name it"),
        ({"split": "nowhere"}, "no split"),
    ],
)
def test_what_cannot_be_meant_is_refused(faces: str, settings: Settings, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as info:
        predict(faces, settings, **options)
    assert said in f"{info.value} {info.value.hint}"


def test_a_prediction_that_another_process_is_at_is_refused(faces: str, settings: Settings, tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"")
    seen: list[str] = []

    def again(what: str, done: int, _total: int) -> None:
        if what == "predicting" and done == 10:
            with pytest.raises(PredictError, match="another process") as info:
                predict(faces, settings, Failing, weights=weights)
            seen.append(info.value.hint)

    predict(faces, settings, Failing, weights=weights, progress=again)
    assert len(seen) == 1


# --- kills ----------------------------------------------------------------------------------------------------------


class Killed:
    """`dsctl predict` whose processes are killed, run until nobody is killed any more."""

    def __init__(self, folder: Path, model: str = "Killing") -> None:
        self.kills, self._weights, self._model = folder / "kills.json", folder / "weights.bin", model
        self._weights.write_bytes(b"")

    @contextmanager
    def running(self, batch: int) -> Iterator[subprocess.Popen[str]]:
        words = [sys.executable, "-m", "dataset_cli", "predict", "faces", "--as", "found", "--json"]
        words += ["--model", f"{MODEL}:{self._model}", "--weights", str(self._weights)]
        words += ["--batch", str(batch), "--decoders", "1"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes) as process:
            try:
                yield process
            finally:
                process.kill()  # leaving the block waits for it

    def run(self, batch: int) -> subprocess.CompletedProcess[str]:
        with self.running(batch) as process:
            out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@promise("A prediction whose processes are killed goes on when it is run again, and its snapshot is the same")
def test_whichever_process_is_killed_the_next_run_goes_on_to_the_same_snapshot(
    faces: str, settings: Settings, tmp_path: Path
) -> None:
    wanted = predict(faces, settings, name="whole", batch_size=3).record.id
    killed = Killed(tmp_path)
    kills = ["model", "command", "decoder"]
    killed.kills.write_text(json.dumps(kills))
    for kill in kills:
        done = killed.run(3)
        if kill == "command":
            assert done.returncode == -signal.SIGKILL
            continue
        assert done.returncode == 1
        error = json.loads(done.stderr.splitlines()[-1])["error"]
        assert error["type"] == "PredictError"
        assert {"model": "the model's process", "decoder": "a decoder"}[kill] in error["message"]
        assert "run it again" in error["hint"]
    done = killed.run(3)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["snapshot"]["id"] == wanted
    assert result["report"]["resumed"] >= 3 * len(kills)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_fifty_kills_at_any_moment_lead_to_the_same_snapshot(faces: str, settings: Settings, tmp_path: Path) -> None:
    wanted = predict(faces, settings, name="whole", batch_size=1).record.id
    killed, draw = Killed(tmp_path, "Slow"), Random(1)
    kills, whole = Counter[str](), 0
    for _ in range(100):
        if kills.total() == 50:
            break
        # Of the command, its model's process and that one's decoder: the victim, and what is to be there by then.
        victim = min(range(3), key=lambda at: kills[_TREE[at]])
        last, wait_s = draw.randrange(victim, 3), draw.uniform(0, 0.6)
        with killed.running(1) as process:
            while len(tree := _tree(process.pid)) <= last and process.poll() is None:
                time.sleep(0.01)
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
            if process.poll() is None and victim < len(tree):
                with suppress(ProcessLookupError):
                    os.kill(tree[victim], signal.SIGKILL)
            out, err = process.communicate(timeout=120)
        if process.returncode == 0:
            whole += 1
            assert json.loads(out)["snapshot"]["id"] == wanted
            continue
        kills[_TREE[victim]] += 1
        if victim:
            assert process.returncode == 1, err
            assert json.loads(err.splitlines()[-1])["error"]["type"] == "PredictError", err
        else:
            assert process.returncode == -signal.SIGKILL, err
    assert kills.total() == 50, f"{whole} runs were over too soon"
    assert json.loads(killed.run(1).stdout)["snapshot"]["id"] == wanted


_TREE = ("command", "model", "decoder")


def _tree(pid: int) -> list[int]:
    """Return the processes from `pid` down, the first child of each."""
    tree = [pid]
    with suppress(OSError):
        while children := Path(f"/proc/{tree[-1]}/task/{tree[-1]}/children").read_text().split():
            tree.append(int(children[0]))
    return tree


# --- labels of predictions ------------------------------------------------------------------------------------------


def test_predictions_of_a_high_score_become_labels_that_say_so(faces: str, settings: Settings) -> None:
    predict(faces, settings)
    before = rows_of("found", settings)
    made = api.accept_predictions("found", name="labels", least_score=0.6, settings=settings)
    after = rows_of("labels", settings)
    assert list(after) == list(before)
    accepted = 0
    for path, row in before.items():
        assert row.annotation is not None
        wanted = [(box, box.extra.score) for box in row.annotation.boxes if box.extra and (box.extra.score or 0) >= 0.6]
        accepted += len(wanted)
        now = after[path].annotation
        assert now is not None
        assert [box[:5] for box in now.boxes] == [box[:5] for box, _ in wanted]
        assert [box.attributes for box in now.boxes] == [(("accepted", repr(score)),) for _, score in wanted]
        assert all(box.extra is None for box in now.boxes)
        assert bool(now.source) == bool(wanted)  # of an image without labels nothing is said
    assert 0 < accepted == made.accepted < 24
    assert made.left_out == 48 - accepted
    assert made.labelled == accepted
    with api.open_annotations("labels", settings=settings) as (_, table):
        assert not api.has_scores(table)
    assert made.record.lineage is not None
    assert made.record.lineage.parameters["accept"] == 0.6
    again = api.accept_predictions("found", name="labels", least_score=0.6, settings=settings)
    assert again.record.id == made.record.id


def test_predictions_that_are_converted_can_be_accepted_too(faces: str, settings: Settings) -> None:
    predict(faces, settings)
    api.convert("found", to="yolo-predictions", name="yolo", settings=settings)
    made = api.accept_predictions("yolo", name="labels", least_score=0.5, settings=settings)
    assert made.accepted == api.accept_predictions("found", name="others", least_score=0.5, settings=settings).accepted


def test_classes_of_a_high_score_become_labels(faces: str, settings: Settings) -> None:
    predict(faces, settings, Sorter())
    made = api.accept_predictions("found", name="labels", least_score=0.6, settings=settings)
    labels = [row.annotation.labels for row in rows_of("labels", settings).values() if row.annotation]
    assert len(labels) == 24
    assert sum(map(bool, labels)) == made.accepted == made.labelled
    assert 0 < made.accepted < 24


def test_where_nothing_can_be_accepted_nothing_is_made(faces: str, settings: Settings) -> None:
    with pytest.raises(UsageError, match="has no scores"):
        api.accept_predictions(faces, name="labels", least_score=0.5, settings=settings)
    predict(faces, settings)
    with pytest.raises(UsageError, match="no prediction of found"):
        api.accept_predictions("found", name="labels", least_score=1, settings=settings)
