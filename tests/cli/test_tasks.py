"""`dsctl tasks`, as a user has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from datacache import api
from datacache.core.errors import LeaseLostError
from datacache.loaders.tasks.queue import TaskQueue
from datacache.settings import Settings
from tests.cli.conftest import Dsctl
from tests.conformance.tasks import fetch, use_all
from tests.promises import promise

IMAGES = 25


@pytest.fixture
def pictures(settings: Settings, tmp_path: Path) -> str:
    """A snapshot of files that are no images, so that all of them are samples."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(IMAGES):
        (folder / f"{number:03}.bin").write_bytes(str(number).encode())
    api.create_snapshot("pictures", str(folder), settings=settings)
    return "pictures@latest"


def make(dsctl: Dsctl, ref: str, *options: str) -> None:
    done = dsctl("tasks", "create", "job", ref, "--records", "10", "--no-shuffle", *options)
    assert done.code == 0, done.err
    assert "3 tasks of up to 10 records, 25 records" in done.out


def test_a_queue_is_made_once_and_listed(dsctl: Dsctl, pictures: str, settings: Settings) -> None:
    assert "no task queues yet" in dsctl("tasks", "list").out
    make(dsctl, pictures, "--epochs", "2")
    queue = api.open_tasks("job", settings)
    queue.report_done(fetch(queue))
    make(dsctl, pictures, "--epochs", "2")
    (row,) = dsctl("tasks", "list", "--json").json
    assert (row["name"], row["epoch"], row["epochs"], row["todo"], row["done"]) == ("job", 0, 2, 2, 1)
    assert row["dataset"].startswith("pictures@")
    table = dsctl("tasks", "list").out
    assert "job" in table
    assert "1 of 2" in table
    other = dsctl("tasks", "create", "job", pictures, "--records", "11")
    assert other.code == 1
    assert "with other" in other.err
    assert "dsctl tasks rm job" in other.err


def test_show_has_workers_with_their_leases_and_failures_with_their_errors(
    dsctl: Dsctl, pictures: str, settings: Settings
) -> None:
    make(dsctl, pictures, "--max-failures", "1", "--lease", "10m")
    queue = api.open_tasks("job", settings)
    bad = fetch(queue, "node7:12")
    queue.report_batch_done(bad, 3)
    queue.report_failed(bad, "the first line\nand the second \x1b[31m")
    queue.report_batch_done(fetch(queue, "node8:99"), 4)
    text = dsctl("tasks", "show", "job").out
    assert "1 todo, 1 doing, 0 done, 1 failed" in text
    assert "7 of 25 used (28.0%)" in text
    assert "node8:99" in text
    assert "4 of 10" in text
    assert "left" in text
    assert re.search(r"failed: task 0 of epoch 1, files-000000000-\w+ records 0 to 9, after 3 of 10", text)
    assert "and the second \\x1b[31m" in text
    value = dsctl("tasks", "show", "job", "--json").json
    assert [(lease["worker"], lease["position"], lease["token"]) for lease in value["leases"]] == [("node8:99", 4, 1)]
    assert value["leases"][0]["left_s"] > 500
    assert [failure["errors"] for failure in value["failures"]] == [["the first line\nand the second \x1b[31m"]]
    assert "node8:99" not in dsctl("tasks", "show", "job", "--failed").out
    assert dsctl("tasks", "retry", "job").out == "put 1 failed task back\n"
    assert dsctl("tasks", "show", "job", "--failed").out == "no task has failed\n"
    assert dsctl("tasks", "show", "other").err.startswith("error: there is no task queue other\nhint: See: dsctl tasks")


def test_a_checkpoint_is_saved_and_restored(dsctl: Dsctl, pictures: str, settings: Settings, tmp_path: Path) -> None:
    make(dsctl, pictures)
    queue = api.open_tasks("job", settings)
    queue.report_done(fetch(queue))
    file = tmp_path / "checkpoint.json"
    file.write_text(dsctl("tasks", "checkpoint", "job").out)
    use_all(queue)
    assert dsctl("tasks", "show", "job", "--json").json["finished"] is True
    restored = dsctl("tasks", "restore", "job", file)
    assert restored.out == "job is back in epoch 1, 1 of 3 tasks done\n"
    assert len(use_all(queue)) == 15
    file.write_bytes(b"\xff\xfe")
    assert "no checkpoint" in dsctl("tasks", "restore", "job", file).err


def test_reset_and_removal_must_be_confirmed_and_take_the_leases(
    dsctl: Dsctl, pictures: str, settings: Settings
) -> None:
    make(dsctl, pictures, "--epochs", "2")
    queue = api.open_tasks("job", settings)
    for command, option in (("reset", ""), ("reset", "--epoch"), ("rm", "")):
        task = fetch(queue)
        words = ["tasks", command, "job", *([option] if option else [])]
        refused = dsctl(*words)
        assert refused.code == 2
        assert "--yes" in refused.err
        queue.renew(task)
        assert dsctl(*words, "--yes").code == 0
        with pytest.raises(LeaseLostError):
            queue.renew(task)
    assert not queue.exists()
    assert dsctl("tasks", "list", "--json").json == []


def test_shards_are_cut_at_their_borders(dsctl: Dsctl, pictures: str, settings: Settings, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    assert dsctl("shard", pictures, "--to", shards, "--max-size", "4KB", "--as", "sharded").code == 0
    names = {path.name for path in shards.glob("*.tar")}
    assert len(names) > 1
    for number, where in enumerate((str(shards), f"file://{shards}", "sharded@latest")):
        made = dsctl("tasks", "create", f"job{number}", where, "--records", "1000", "--json")
        assert made.code == 0, made.err
        assert (made.json["tasks"], made.json["records"]) == (len(names), IMAGES)
        used = use_all(TaskQueue(api.open_tasks("job0", settings).store, f"job{number}"))
        assert {name for _epoch, name, _record in used} == names


@promise("Garbage collection and removals leave documents and tasks alone")
def test_garbage_collection_leaves_tasks_alone(dsctl: Dsctl, pictures: str, settings: Settings) -> None:
    make(dsctl, pictures)
    task = fetch(queue := api.open_tasks("job", settings))
    assert dsctl("snapshot", "rm", pictures, "--yes").code == 0
    api.collect_garbage(grace_s=0, settings=settings)
    queue.report_done(task)
    assert len(use_all(queue)) == 15


def test_it_works_without_pytorch(dsctl: Dsctl, pictures: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    root = Path(__file__).resolve().parents[2]
    done = dsctl("tasks", "create", "job", pictures, PYTHONPATH=f"{tmp_path}:{root}")
    assert done.code == 0, done.err
