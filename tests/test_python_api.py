"""The package `datacache` as Python sees it: its names, and what the commands do, from Python."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import datacache
from datacache.core.errors import PathNotFoundError, SnapshotNotFoundError, TagExistsError
from datacache.settings import Settings
from dataset_cli.demo.faces import draw_faces
from tests.promises import promise


@pytest.fixture
def ref(tmp_path: Path, settings: Settings) -> str:
    """A snapshot of drawn faces with VOC annotations."""
    draw_faces(tmp_path / "bucket", count=8)
    return datacache.create_snapshot("faces", (tmp_path / "bucket").as_uri(), settings=settings, tags=["v1"]).ref


@promise("Python offers what the commands do")
def test_completion_offers_what_can_be_used_and_nothing_else() -> None:
    offered = {name for name in dir(datacache) if not name.startswith("__")}
    assert offered == set(datacache.__all__)
    assert all(callable(getattr(datacache, name)) for name in offered)
    with pytest.raises(AttributeError, match="nothing"):
        _ = datacache.nothing  # type: ignore[attr-defined]


def test_importing_it_imports_nothing_heavy() -> None:
    program = "import sys, datacache; print(*(m for m in ('numpy', 'pymongo', 'obstore', 'PIL') if m in sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == ""


def test_a_snapshot_is_read_by_path_and_shows_no_internals(ref: str, settings: Settings) -> None:
    with datacache.open_snapshot(ref, settings) as snapshot:
        path = snapshot.paths()[0]
        assert snapshot[path] == snapshot.read(path)
        with pytest.raises(FileNotFoundError):
            snapshot["missing"]
        offered = {name for name in dir(snapshot) if not name.startswith("__")}
        assert offered == {
            "close",
            "open",
            "paths",
            "read",
            "read_range",
            "record",
            "ref",
            "scan",
            "stat",
            "view",
            "filter",
            "marks",
            "show",
        }
        assert all(hasattr(snapshot, name) for name in offered)


@promise("Python offers what the commands do")
def test_what_the_commands_list_tag_count_and_draw_python_does(ref: str, settings: Settings) -> None:
    (dataset,) = datacache.list_datasets(settings)
    assert (dataset.name, list(dataset.tags)) == ("faces", ["v1"])
    assert dataset.tags["v1"].startswith(ref.partition("@")[2])
    assert [record.ref for record in datacache.list_snapshots("faces", settings)] == [
        datacache.tag_snapshot("faces@v1", "good", settings=settings).ref
    ]
    assert datacache.tag_snapshot("faces@good", "v1", settings=settings).ref
    with pytest.raises(SnapshotNotFoundError):
        datacache.list_snapshots("none", settings)
    counts = datacache.stats("faces@good", settings=settings)
    assert counts.images == 8
    masked = datacache.query("faces", labels=["with_mask"], settings=settings)
    assert 0 < len(masked) <= 8
    assert all(image.labels["with_mask"] for image in masked)
    picture = datacache.preview("faces", paths=[masked[0].path], settings=settings)
    assert picture.startswith(b"\x89PNG")
    with pytest.raises(PathNotFoundError, match=r"missing\.jpg"):
        datacache.preview("faces", paths=["missing.jpg"], settings=settings)


def test_a_tag_is_moved_only_when_asked_to(ref: str, tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "bucket" / "more.txt").write_text("more")
    second = datacache.create_snapshot("faces", (tmp_path / "bucket").as_uri(), settings=settings)
    with pytest.raises(TagExistsError):
        datacache.tag_snapshot(second.ref, "v1", settings=settings)
    assert datacache.tag_snapshot(second.ref, "v1", move=True, settings=settings) == second


def test_a_folder_is_mounted_and_unmounted_from_python(ref: str, tmp_path: Path, settings: Settings) -> None:
    folder = tmp_path / "mnt"
    folder.mkdir()
    datacache.mount(ref, folder, settings=settings)
    try:
        assert sum(path.is_file() for path in folder.rglob("*")) == len(datacache.open_snapshot(ref, settings))
    finally:
        datacache.unmount(folder, settings=settings)
    assert list(folder.iterdir()) == []


def test_access_tags_garbage_and_removal_from_python(ref: str, settings: Settings) -> None:
    datacache.tag_snapshot(ref, "good", settings=settings)
    before, now = datacache.set_dataset_access("faces", everybody=False, allow=["team"], settings=settings)
    assert before.everybody
    assert (now.everybody, now.allowed) == (False, ("team",))
    assert datacache.dataset_access("faces", settings) == now
    datacache.untag_snapshot("faces", "good", settings=settings)
    with pytest.raises(SnapshotNotFoundError):
        datacache.untag_snapshot("faces", "good", settings=settings)
    assert datacache.remove_snapshot("faces@v1", settings=settings).of_snapshot
    assert datacache.collect_garbage(grace_s=0, settings=settings).catalog.blobs > 0


def test_the_cache_is_filled_kept_and_emptied_from_python(ref: str, settings: Settings) -> None:
    try:
        job = datacache.warm(ref, settings=settings)
        assert (job["state"], job["bytes_done"]) == ("done", job["bytes_total"])
        assert job["id"] in {each["id"] for each in datacache.jobs(settings)}
        datacache.pin(ref, settings)
        assert len(datacache.cache_status(settings)["pins"]) == 1
        datacache.unpin(ref, settings)
        assert datacache.evict("faces", settings)["freed_bytes"] > 0
        with pytest.raises(SnapshotNotFoundError):
            datacache.cancel_job("none", settings)
    finally:
        datacache.connect(settings).stop()


def test_a_misspelt_keyword_is_an_error(ref: str, settings: Settings) -> None:
    with pytest.raises(TypeError, match="lables"):
        datacache.query(ref, lables=["with_mask"], settings=settings)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="tag"):
        datacache.convert(ref, to="yolo", name="y", tag="v1", settings=settings)  # type: ignore[call-arg]


@pytest.mark.parametrize("package", ["datacache", "datacache.api", "fuse_mount"])
def test_every_name_of_a_front_is_there(package: str) -> None:
    """Import each at its first use, as the imports for type checkers say."""
    module = importlib.import_module(package)
    assert len(module.__all__) > 30
    for name in module.__all__:
        assert getattr(module, name) is not None, name
