"""The examples run, on little data and in a short time; and what they are made of is right."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from PIL import Image

from datacache import api
from datacache.core.errors import ObjectNotFoundError
from datacache.loaders.tasks.queue import list_queues
from datacache.settings import Settings, load_settings
from datacache.torch import ShardDataset
from dataset_cli.demo import story
from dataset_cli.demo.detector import CentreNetwork, Found, look, loss, overlap, score, train
from dataset_cli.demo.faces import draw_faces
from tests.promises import promise
from tests.servers import RcloneS3

ROOT = Path(__file__).resolve().parent.parent
CLASSES = ("cat", "dog")


def boxes(*edges: tuple[float, float, float, float]) -> torch.Tensor:
    return torch.tensor(edges, dtype=torch.float32).reshape(-1, 4)


def mask_detection(
    *arguments: str | Path, script: str = "train.py", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the example as a user does, on one thread: tests have the processors not for themselves."""
    return subprocess.run(
        [sys.executable, ROOT / "examples" / "mask_detection" / script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_mask_detection_learns_and_its_model_in_the_bucket_finds_faces(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    small = ("--out", out, "--workers", "0", "--size", "64x80")
    done = mask_detection("--count", "60", "--epochs", "6", "--batch-size", "8", *small)
    assert done.returncode == 0, done.stderr
    assert "read back, it finds the same boxes" in done.stdout
    with Image.open(out / "predictions.png") as picture:
        assert picture.width > 600
    settings = load_settings()
    assert settings.home == home
    [model] = (out / "bucket" / "models").iterdir()
    network, about = story.get_model(model.as_uri(), settings)
    assert about["classes"] == ["with_mask", "without_mask"]
    assert len(about["losses"]) == 6
    assert about["losses"][-1] < about["losses"][0] / 2
    with api.open_snapshot(about["snapshot"], settings) as snapshot:
        assert snapshot.record.files == 60 + 60 + 4
    test = ShardDataset(about["shards"]["test"], decode="rgb", size=tuple(about["size"]), settings=settings)
    found, targets = look(network, test)
    assert sum(len(each.labels) for each in found) >= sum(len(target["labels"]) for target in targets)
    assert score(found, targets, test.classes, story.LEAST)[-1].f1 == pytest.approx(
        about["scores"]["all"]["f1"], abs=0.05
    )
    again = mask_detection("--data", "drawn-faces@example", "--epochs", "1", *small)
    assert again.returncode == 0, again.stderr
    assert re.search(rf"snapshot +{about['snapshot']}:", again.stdout)
    assert len(list((out / "bucket" / "shards").iterdir())) == 2


def test_once_around_the_loop_the_second_detector_is_better(home: Path, tmp_path: Path) -> None:
    small = ("--count", "48", "--test", "30", "--epochs", "12", "--size", "64", "80", "--wrong", "0.8")
    done = mask_detection("--out", tmp_path / "out", *small, "--correct", "0.8", "--control", script="loop.py")
    assert done.returncode == 0, done.stderr
    [(before, after)] = re.findall(r"^done .* mAP ([\d.]+) .* mAP ([\d.]+) ", done.stdout, re.MULTILINE)
    assert float(after) > float(before), done.stdout
    settings = load_settings()
    assert settings.home == home
    [(found, labels)] = re.findall(r"/match/(\S+)\?with=(\S+)&score=", done.stdout)
    [marked] = re.findall(r"^correct +(loop-faces\S+):", done.stdout, re.MULTILINE)
    with api.open_snapshot(found, settings) as predicted, api.open_snapshot(marked, settings) as corrected:
        assert predicted.record.lineage.parameters["weights"].endswith(f"/{labels.replace('@', '-')}.pt")
        assert corrected.record.lineage.parameters["authors"] == {"somebody": 38}
    versions = [api.list_snapshots(name, settings) for name in ("loop-faces-0", "loop-chance-0")]
    assert [[each.lineage.command for each in some] for some in versions] == [["create", "mark", "mark"]] * 2
    same_start = [one.id == other.id for one, other in zip(*versions, strict=True)]
    assert same_start == [True, True, False], "the control corrects other images of the same labels"
    assert re.search(r"^control .* mAP [\d.]+ ", done.stdout, re.MULTILINE)


def test_mask_detection_works_with_a_bucket(rclone_s3: RcloneS3, home: Path, tmp_path: Path) -> None:
    folder = rclone_s3.make_bucket("mask-detection")
    done = mask_detection(
        *("--bucket", "s3://mask-detection/a", "--out", tmp_path, "--count", "12", "--test", "0.4"),
        *("--epochs", "1", "--workers", "0", "--size", "64x80"),
        **rclone_s3.env(),
    )
    assert done.returncode == 0, done.stderr
    assert "read back, it finds the same boxes" in done.stdout
    assert sorted(path.name for path in (folder / "a").iterdir()) == [
        "drawn-faces-12-0",
        "models",
        "shards",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.png"]


def test_mask_detection_takes_the_classes_of_other_data(blood_cells: Path, home: Path, tmp_path: Path) -> None:
    small = ("--epochs", "1", "--workers", "0", "--size", "64x80", "--show", "2")
    done = mask_detection("--data", blood_cells, "--out", tmp_path, *small)
    assert done.returncode == 0, done.stderr
    assert "classes: Platelets, RBC, WBC" in done.stdout
    assert re.search(r"RBC +\d", done.stdout)


def test_mask_detection_says_what_is_wrong(home: Path, tmp_path: Path) -> None:
    done = mask_detection("--data", "nothing@v1", "--out", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_the_commands_and_the_code_of_the_readme_run_as_they_are_written(home: Path, tmp_path: Path) -> None:
    text = (ROOT / "examples" / "mask_detection" / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert [link for link in links if not (ROOT / "examples" / "mask_detection" / link).exists()] == []
    draw_faces(tmp_path / "faces", count=40)
    program = tmp_path / "bin" / "dsctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dataset_cli "$@"\n')
    program.chmod(0o755)
    [commands] = re.findall(r"^```bash\n(dsctl .*?)^```$", text, re.MULTILINE | re.DOTALL)
    [code] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for line in (["bash", "-eux", "-c", commands.replace("s3://mask", str(tmp_path))], [sys.executable, "-c", code]):
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr


def test_the_notebook_runs_as_it_is_committed_without_outputs(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebook" / "first_hour.ipynb", 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    unfinished = nbformat.v4.new_code_cell(
        "from datacache.core.progress import bar\n"
        "drawing = bar('')\n"
        "drawing.__enter__().update('all of <b>it</b>', 2, 2)"
    )
    notebook.cells.append(unfinished)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output.get("data", {}) for cell in cells for output in cell.outputs]
    assert "{'relabelled': {'with_mask': 1}}" in [each.get("text/plain") for each in shown]
    assert shown[-1]["text/plain"].startswith("(torch.Size([8, 96, 128, 3])")
    assert sum("<img" in each.get("text/html", "") or "image/png" in each for each in shown) == 4
    [progress] = unfinished.outputs
    assert progress.data["text/html"] == '<progress value="1.0000"></progress> all of &lt;b&gt;it&lt;/b&gt;'


def checkpoints(script: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "examples" / "checkpoints" / script, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_checkpoints_saved_into_a_folder_are_verified_in_the_bucket(rclone_s3: RcloneS3, tmp_path: Path) -> None:
    folder = rclone_s3.make_bucket("checkpoints") / "runs"
    folder.mkdir()
    record = tmp_path / "record.jsonl"
    saved = checkpoints("save.py", folder, "--every", "0", "--count", "3", "--megabytes", "1", "--record", record)
    assert saved.returncode == 0, saved.stderr
    assert "3 checkpoints saved, 0 attempts failed" in saved.stdout
    assert sorted(os.listdir(folder)) == ["latest.pt", *(f"step-00000{number}.pt" for number in (1, 2, 3))]
    verified = checkpoints("verify.py", "s3://checkpoints/runs", "--record", record, **rclone_s3.env())
    assert verified.returncode == 0, verified.stderr
    assert "4 acknowledged files, 4 of them in the bucket as saved" in verified.stdout


def test_checkpoints_that_are_missing_torn_old_or_others_are_named_and_those_not_saved_are_not(tmp_path: Path) -> None:
    record, folder = tmp_path / "record.jsonl", tmp_path / "runs"
    paths = {number: folder / f"step-00000{number}.pt" for number in (1, 2, 3, 4)}
    (paths[4] / "in the way").mkdir(parents=True)
    saved = checkpoints("save.py", folder, "--every", "0", "--count", "4", "--megabytes", "1", "--record", record)
    assert saved.returncode == 0, saved.stderr
    assert "step-000004.pt of step 4 was not saved" in saved.stderr
    assert "4 checkpoints saved, 1 attempts failed" in saved.stdout
    (folder / "step-000005.pt").unlink()
    (folder / "latest.pt").write_bytes(paths[2].read_bytes())
    other = torch.load(paths[3])
    other["model"]["0.bias"] += 1
    torch.save(other, paths[3])
    paths[2].write_bytes(paths[2].read_bytes()[:-1000])
    paths[1].unlink()
    verified = checkpoints("verify.py", folder, "--record", record)
    assert verified.returncode == 1
    assert "5 acknowledged files, 0 of them" in verified.stdout
    for number, wrong in ((1, "not in the bucket"), (2, "cannot be loaded"), (3, "not the weights that were saved")):
        assert f"step-00000{number}.pt: {wrong}" in verified.stderr
    assert "latest.pt: step 2, but step 5 was acknowledged" in verified.stderr
    assert "step-000004.pt" not in verified.stderr


@promise(
    "Restored with the model at each restart, a queue gives each record to the training that the model has had once"
)
@pytest.mark.slow
def test_elastic_training_uses_each_record_once_though_workers_and_their_agents_are_killed(
    home: Path, tmp_path: Path
) -> None:
    small = ["--kills", "2", "--nodes", "1", "--workers", "2", "--slow", "0.2", "--pause", "0.1", "--apart", "192"]
    small += ["--count", "512", "--test", "256", "--epochs", "2", "--checkpoint-every", "2"]
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "elastic_training" / "compare.py", "kills", *small, "--out", tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 workers and 1 agents killed; Used(records=1024," in done.stdout
    assert "missed=0, repeated=0," in done.stdout
    assert "each record was used as often as it may" in done.stdout
    begun = [json.loads(path.read_text().splitlines()[0]) for path in (tmp_path / "kills2-0-log").glob("*.jsonl")]
    assert {line["world"] for line in begun} == {2}
    assert max(line["start"] for line in begun) > 0  # restored, and not begun anew
    [queue] = list_queues(api.open_tasks("any").store)
    assert queue.finished
    assert not queue.failed


def test_a_parameter_server_goes_on_though_a_worker_is_killed(home: Path, tmp_path: Path) -> None:
    folder = ROOT / "examples" / "elastic_training"
    small = ["--count", "512", "--test", "64", "--epochs", "2"]
    for command in (["prepare.py", *small], ["parameter_server.py", "--kills", "1"]):
        done = subprocess.run(
            [sys.executable, folder / command[0], *command[1:], "--out", tmp_path],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "1 workers killed, 3 started; 0 records missed" in done.stdout
    [queue] = list_queues(api.open_tasks("any").store)
    assert queue.finished


def test_the_same_seed_gives_the_same_detector(faces_shards: str, settings: Settings) -> None:
    dataset = ShardDataset(faces_shards, decode="rgb", size=(64, 80), settings=settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one, other = (train(dataset, epochs=2, seconds=None, workers=0, seed=3) for _ in range(2))
        another, _ = train(dataset, epochs=2, seconds=None, workers=0, seed=4)
    finally:
        torch.set_num_threads(threads)
    assert [epoch.loss for epoch in one[1]] == [epoch.loss for epoch in other[1]]
    assert all(map(torch.equal, one[0].state_dict().values(), other[0].state_dict().values()))
    assert not all(map(torch.equal, one[0].state_dict().values(), another.state_dict().values()))
    assert story.same(look(one[0], dataset)[0], look(other[0], dataset)[0])


def test_training_ends_when_its_time_is_over(faces_shards: str, settings: Settings) -> None:
    dataset = ShardDataset(faces_shards, decode="rgb", size=(64, 80), settings=settings)
    _, epochs = train(dataset, epochs=10_000, seconds=0.5, workers=0)
    assert 1 <= len(epochs) < 10_000


@pytest.fixture
def faces_shards(settings: Settings, tmp_path: Path) -> str:
    """Shards of 16 drawn images."""
    assert story.draw_into(str(tmp_path / "faces"), count=16, seed=0, settings=settings)
    assert not story.draw_into(str(tmp_path / "faces"), count=16, seed=0, settings=settings)
    ref = api.create_snapshot("faces", str(tmp_path / "faces"), settings=settings).ref
    record = api.shard(ref, to=str(tmp_path / "shards"), name="faces-shards", settings=settings).record
    assert record is not None
    return record.ref


def test_the_loss_is_least_for_the_outputs_that_mean_the_boxes() -> None:
    target = [{"boxes": boxes((16, 8, 48, 56), (80, 16, 112, 32)), "labels": torch.tensor([1, 0])}]
    heat = torch.full((1, 2, 8, 16), -20.0)
    sizes, offsets = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)
    for label, x, y, wide, high in ((1, 4, 4, 32, 48), (0, 12, 3, 32, 16)):
        heat[0, label, y, x] = 20.0
        for near_y in range(y - 1, y + 2):
            for near_x in range(x - 1, x + 2):
                sizes[0, :, near_y, near_x] = torch.tensor([wide / 8, high / 8]).log()
                offsets[0, :, near_y, near_x] = torch.tensor([float(x - near_x), float(y - near_y)])
    assert float(loss((heat, sizes, offsets), target)) < 1e-3
    for wrong in ((heat.flip(1), sizes, offsets), (heat, sizes + 0.1, offsets), (heat, sizes, offsets + 0.1)):
        assert float(loss(wrong, target)) > 0.1
    nothing = [{"boxes": boxes(), "labels": torch.zeros(0, dtype=torch.long)}]
    assert math.isfinite(float(loss((heat, sizes, offsets), nothing)))


def test_boxes_found_lie_in_the_image_and_are_distinct() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (2, 64, 80, 3), dtype=torch.uint8)
    for found in CentreNetwork(2).find(images):
        assert found.boxes.shape == (len(found.labels), 4)
        assert bool((found.boxes >= 0).all())
        assert float(found.boxes[:, 0::2].max()) <= 80
        assert found.scores.tolist() == sorted(found.scores.tolist(), reverse=True)
        assert float(overlap(found.boxes, found.boxes).triu(1).max()) <= 0.6


def test_average_precision_and_f1_are_those_of_an_example_by_hand() -> None:
    there = [
        {"boxes": boxes((0, 0, 10, 10), (20, 0, 30, 10), (40, 0, 50, 10)), "labels": torch.tensor([0, 0, 0])},
        {"boxes": boxes(), "labels": torch.zeros(0, dtype=torch.long)},
    ]
    found = [
        Found(  # right, the same box again, right, of another class
            boxes((0, 0, 10, 9), (0, 0, 10, 8), (21, 0, 30, 10), (40, 0, 50, 10)),
            torch.tensor([0, 0, 0, 1]),
            torch.tensor([0.9, 0.8, 0.7, 0.2]),
        ),
        Found(boxes((0, 0, 5, 5)), torch.tensor([0]), torch.tensor([0.6])),
    ]
    cat, dog, both = score(found, there, CLASSES, 0.65)
    # Precision after each: 1, 1/2, 2/3, 2/4; recall 1/3, 1/3, 2/3, 2/3.
    assert cat.average_precision == pytest.approx(1 / 3 + 1 / 3 * 2 / 3)
    assert (cat.boxes, cat.precision, cat.recall) == (3, pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert math.isnan(dog.average_precision)
    assert both.f1 == pytest.approx(2 * 2 / (3 + 3))
    assert both.average_precision == cat.average_precision
    nothing = score([Found(boxes(), torch.zeros(0).long(), torch.zeros(0))], there[:1], CLASSES, 0.5)
    assert (nothing[0].average_precision, nothing[0].f1) == (0.0, 0.0)


def test_a_model_that_is_not_there_is_said_so(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError):
        story.get_model(str(tmp_path / "none.pt"), settings)
