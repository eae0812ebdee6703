"""Imports of videos: what becomes a snapshot, what is left out, and what is done only once."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from datacache import api
from datacache.core.errors import ImportFailedError, ObjectNotFoundError, StoreUnavailableError, UsageError
from datacache.core.ids import ObjectRef
from datacache.imports.videos import ranges, video
from datacache.settings import Settings
from datacache.store.base import ObjectInfo
from datacache.store.local.store import LocalStore
from tests.imports.conftest import files_of
from tests.imports.videos.films import ffmpeg, ffmpeg_frames, make_film
from tests.promises import promise
from tests.servers import RcloneS3

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A film of six seconds with six key frames."""
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    return make_film(path, "-c:v", "libx264", "-preset", "ultrafast", "-bf", "3", "-g", "25")


@pytest.fixture
def settings(settings: Settings, tmp_path: Path) -> Settings:
    return replace(settings, objects=str(tmp_path / "objects"))


@pytest.fixture
def films(film: Path, tmp_path: Path) -> Path:
    """A folder with three videos and what is none."""
    folder = tmp_path / "films"
    (folder / "more").mkdir(parents=True)
    for name in ("a.mp4", "more/b.mp4", "more/new\nline.MP4"):
        shutil.copyfile(film, folder / name)
    (folder / "notes.txt").write_text("no video")
    return folder


def test_frames_are_images_named_by_video_and_time(films: Path, film: Path, settings: Settings) -> None:
    made = api.import_frames("frames", str(films), frames="every=2s", max_side=80, settings=settings, tags=["v1"])
    found = files_of(settings, "frames@v1")
    lines = [json.loads(line) for line in found.pop("videos.jsonl").splitlines()]
    names = [f"{n:06}.000.jpg" for n in (0, 2, 4)]
    videos = ("a.mp4", "more/b.mp4", "more/new\nline.MP4")
    assert sorted(found) == [f"{path}/{name}" for path in videos for name in names]
    assert made[1:] == (3, 0, 9, 0)
    assert [(line["video"], line["codec"], line["width"], line["images"]) for line in lines] == [
        (name, "h264", 160, 3) for name in videos
    ]
    assert all(line["url"].startswith("file:///") and line["etag"] for line in lines)
    assert made.record.lineage is not None
    assert made.record.lineage.parameters["frames"] == "every=2s"
    for name, expected in zip(names, ffmpeg_frames(film, "fps=1/2:round=up"), strict=True):
        image = PIL.Image.open(io.BytesIO(found[f"a.mp4/{name}"])).convert("L")
        assert image.size == (80, 45)
        luma = np.frombuffer(expected, np.uint8)[: 160 * 90].reshape(90, 160)
        full = (luma.astype(float) - 16) * 255 / 219
        smaller = PIL.Image.fromarray(full.clip(0, 255).astype(np.uint8)).resize((80, 45), PIL.Image.Resampling.BICUBIC)
        assert np.abs(np.asarray(image, int) - np.asarray(smaller, int)).mean() < 4


@promise("The same videos and options give the same snapshot, whatever the number of processes")
def test_the_same_videos_give_the_same_snapshot(
    films: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video, "STRETCH_S", 2)
    ids = {
        api.import_frames(name, str(films), frames="fps=3", processes=processes, settings=settings).record.id
        for name, processes in (("one", 1), ("two", 2), ("three", 3))
    }
    assert len(ids) == 1
    one = api.import_frames("single", str(films / "a.mp4"), frames="fps=3", settings=settings)
    assert one.images == 18
    assert sorted(files_of(settings, "single"))[0] == "a.mp4/000000.000.jpg"


@promise("A video of which no frames can be taken is left out and reported, and the others are not")
def test_broken_videos_are_left_out_and_told(films: Path, settings: Settings) -> None:
    good = api.import_frames("frames", str(films), frames="every=3s", settings=settings)
    (films / "broken.mp4").write_bytes(b"\0" * 10_000)
    ffmpeg("-f", "lavfi", "-i", "sine=d=1", str(films / "sound.mp4"))
    (films / "cut.mkv").write_bytes(b"")  # empty, so nothing is there
    failed: list[api.FailedVideo] = []
    made = api.import_frames("frames", str(films), frames="every=3s", settings=settings, on_failure=failed.append)
    assert [(failure.video, failure.code) for failure in failed] == [
        ("broken.mp4", "format"),
        ("sound.mp4", "no-video"),
    ]
    assert made.record.id == good.record.id
    assert made[1:4] == (5, 2, 6)
    for path in films.rglob("*.[mM][pP]4"):
        path.write_bytes(b"nothing")
    with pytest.raises(ImportFailedError, match="no frames can be taken"):
        api.import_frames("frames", str(films), frames="every=3s", settings=settings)
    with pytest.raises(ObjectNotFoundError, match="there is no folder"):
        api.import_frames("frames", str(films / "none"), frames="every=3s", settings=settings)
    with pytest.raises(UsageError, match="frames"):
        api.import_frames("frames", str(films), frames="some", settings=settings)


def test_nothing_is_made_where_the_store_does_not_give_a_video(
    films: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = LocalStore.read

    def break_off(self: LocalStore, ref: ObjectRef, start: int, stop: int) -> bytes | memoryview:
        if ref.key.endswith("b.mp4"):
            raise StoreUnavailableError(f"{ref.url}: the store is away", url=ref.url)
        return read(self, ref, start, stop)

    monkeypatch.setattr(LocalStore, "read", break_off)
    settings = replace(settings, store_timeout_s=1.0)
    failed: list[api.FailedVideo] = []
    with pytest.raises(ImportFailedError, match="could not be read"):
        api.import_frames("frames", str(films), frames="every=3s", settings=settings, on_failure=failed.append)
    assert [(failure.video, failure.code) for failure in failed] == [("more/b.mp4", "unavailable")]
    assert api.list_datasets(settings) == []
    monkeypatch.setattr(LocalStore, "read", read)
    made = api.import_frames("frames", str(films), frames="every=3s", settings=settings)
    assert made.resumed == 2  # the two others are not decoded again
    assert list((settings.home / "imports").iterdir()) == []


_KILLED = """
import os, signal, sys
from datacache import api
from datacache.imports import journal
from datacache.imports.videos import video
video.STRETCH_S = 2
append, left = journal.RecordFile.append, int(sys.argv[2])
def note(self, row):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    append(self, row)
journal.RecordFile.append = note
api.import_frames("frames", sys.argv[1], frames="fps=2", processes=2)
"""


@promise("An import of videos that was killed goes on where it was")
@pytest.mark.parametrize("after", [0, 2, 7])
def test_a_killed_import_of_videos_goes_on_where_it_was(
    after: int, films: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video, "STRETCH_S", 2)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DATACACHE_OBJECTS": str(settings.objects)}
    died = subprocess.run([sys.executable, "-c", _KILLED, str(films), str(after)], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    assert api.list_datasets(settings) == []
    made = api.import_frames("frames", str(films), frames="fps=2", settings=settings)
    assert made.resumed == after
    clean = api.import_frames("clean", str(films), frames="fps=2", settings=settings)
    assert (clean.record.id, clean.resumed) == (made.record.id, 0)


def test_a_video_in_a_bucket_is_read_in_ranges(
    film: Path, rclone_s3: RcloneS3, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranges, "RANGE_BYTES", 1 << 14)
    bucket = rclone_s3.make_bucket("films")
    (bucket / "film.mp4").write_bytes(film.read_bytes())
    made = api.import_frames("frames", "s3://films", frames="every=1s", settings=settings)
    local = api.import_frames("local", str(film), frames="every=1s", settings=settings)
    images = [files_of(settings, name) for name in ("frames", "local")]
    assert json.loads(images[0].pop("videos.jsonl"))["url"] == "s3://films/film.mp4"
    images[1].pop("videos.jsonl")
    assert images[0] == images[1]
    assert made.images == local.images == 6


def test_a_video_whose_path_leads_out_is_left_out(
    films: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = LocalStore.list

    def with_more(self: LocalStore, prefix: str, **options: str) -> Iterator[list[ObjectInfo]]:
        for page in listed(self, prefix, **options):
            yield [*page, page[0]._replace(key=f"{prefix}../a.mp4")]  # a legal key of a bucket

    monkeypatch.setattr(LocalStore, "list", with_more)
    failed: list[api.FailedVideo] = []
    made = api.import_frames("frames", str(films), frames="every=3s", settings=settings, on_failure=failed.append)
    assert {(failure.video, failure.code) for failure in failed} == {("../a.mp4", "path")}
    assert made.images == 6


def test_annotated_frames_are_converted_as_any_images(films: Path, tmp_path: Path, settings: Settings) -> None:
    api.import_frames("frames", str(films / "a.mp4"), frames="every=3s", settings=settings)
    with api.open_snapshot("frames", settings) as snapshot:
        for path in snapshot.paths():
            if path.endswith(".jpg"):
                (tmp_path / "labels" / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "labels" / path).with_suffix(".xml").write_text(
                    "<annotation><size><width>160</width><height>90</height><depth>3</depth></size><object>"
                    "<name>car</name><bndbox><xmin>10</xmin><ymin>20</ymin><xmax>50</xmax><ymax>60</ymax></bndbox>"
                    "</object></annotation>"
                )
    api.import_export("labelled", tmp_path / "labels", images="frames", settings=settings)
    made = api.convert("labelled", to="yolo", name="yolo", settings=settings)
    assert made.report.images == 2
    assert any(path.endswith("000003.000.txt") for path in files_of(settings, "yolo"))
