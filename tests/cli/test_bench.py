"""`dsctl bench loader` on a snapshot and on shards, with real workers; and without PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from datacache import api
from datacache.settings import load_settings
from dataset_cli.demo.faces import draw_faces

QUICK = ("--seconds", "0.05", "--batch-size", "8")


@pytest.fixture
def faces(home, tmp_path) -> str:
    """A snapshot of 24 drawn images."""
    draw_faces(tmp_path / "faces", count=24, width=160, height=120)
    api.create_snapshot("faces", str(tmp_path / "faces"))
    return "faces@latest"


def test_the_table_of_a_snapshot_names_the_best_number_of_workers(dsctl, faces):
    done = dsctl("bench", "loader", faces, "--size", "96x64", "--workers", "0,1", *QUICK)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("faces@latest  24 samples, batches of 8")
    assert lines[1].split()[:2] == ["WORKERS", "SAMPLES/S"]
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert lines[-1].startswith("Best: num_workers=")
    found = dsctl("bench", "loader", faces, "--size", "96x64", "--workers", "0", *QUICK, "--json").json
    assert found["size"] == [64, 96]  # height and width, as `SnapshotDataset(size=…)` takes them
    assert all(line.startswith("opening faces@latest: ") for line in done.err.splitlines())  # how far, when it is slow


def test_shards_are_measured_in_their_folder_and_as_a_snapshot(dsctl, faces, tmp_path):
    folder = tmp_path / "shards"
    api.shard(faces, to=str(folder), name="sharded", processes=1, settings=load_settings())
    for where, packed in ((str(folder), ["--packed"]), ("sharded@latest", [])):
        done = dsctl("bench", "loader", where, "--decode", "bytes", *packed, "--workers", "0", *QUICK, "--json")
        assert done.code == 0, done.err
        found = done.json
        assert (found["samples"], found["decode"], found["choice"]["num_workers"]) == (24, "bytes", 0)
        (row,) = found["rows"]
        assert row["workers"] == 0
        assert min(row["samples_per_s"], row["bytes_per_s"], row["cpu_s_per_sample"]) > 0
        assert 0 <= row["miss_share"] <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["faces@v1", "--workers", "two"], "--workers two"),
        (["faces@v1", "--size", "224"], "--size: '224' is no size"),
        (["faces@v1", "--size", "0x224"], "Write width x height in pixels: --size 640x480."),
        (["./nothing-here", "--workers", "0"], "nothing-here"),
    ],
)
def test_what_cannot_be_measured_is_said_plainly(dsctl, arguments, message):
    done = dsctl("bench", "loader", *arguments)
    assert done.code in (1, 2)
    assert message in done.err
    assert "Traceback" not in done.err


def test_without_pytorch_it_is_said_how_to_get_it(dsctl, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    root = Path(__file__).resolve().parents[2]
    done = dsctl("bench", "loader", "faces@v1", "--json", PYTHONPATH=f"{tmp_path}:{root}")
    assert done.code == 2
    assert done.error["hint"] == "pip install 'dsctl[torch]'"
