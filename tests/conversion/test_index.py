"""Reading the annotations of a snapshot into a table: once, incrementally, whatever the layout."""

from __future__ import annotations

import json
import pkgutil
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datacache import api
from datacache.annotations.model import Annotation
from datacache.annotations.table.table import Table
from datacache.conversion import source
from datacache.core.errors import ObjectChangedError, StoreUnavailableError, UsageError
from datacache.settings import Settings
from tests.promises import promise

Make = Callable[..., str]


@pytest.fixture
def table(settings: Settings) -> Callable[..., Table]:
    def read(ref: str, **options: object) -> Table:
        with api.open_annotations(ref, settings=settings, **options) as (_snapshot, found):  # type: ignore[arg-type]
            return found

    return read


def test_a_table_is_made_once_and_needs_neither_bucket_nor_cache_afterwards(
    faces: Path, make: Make, table: Callable[..., Table], settings: Settings
) -> None:
    ref = make(faces)
    first = [row.annotation for row in table(ref).rows()]
    shutil.rmtree(faces)
    api.connect(settings).evict(None)
    assert [row.annotation for row in table(ref).rows()] == first
    assert len(first) == 30


@promise("A converted version costs what changed")
def test_the_next_version_reads_only_what_changed(
    faces: Path, make: Make, table: Callable[..., Table], settings: Settings
) -> None:
    for copy in range(20):
        for number in range(1, 31):
            for folder, suffix in (("JPEGImages", "jpg"), ("Annotations", "xml")):
                source = faces / folder / f"{number:06}.{suffix}"
                source.with_name(f"{copy:02}-{source.name}").hardlink_to(source)
    old = table(make(faces))
    text = (faces / "Annotations" / "00-000001.xml").read_text()
    (faces / "Annotations" / "00-000001.xml").unlink()
    (faces / "Annotations" / "00-000001.xml").write_text(text.replace("with_mask", "masked"))
    ref = make(faces)
    # What the new version would read again is gone from everywhere but for the first range.
    api.connect(settings).evict(None)
    with api.open_snapshot(ref, settings) as snapshot:
        ends = [info.first_path for info in snapshot.manifest.root.ranges]
    last = sorted((faces / "JPEGImages").iterdir())[-1]
    last.unlink()
    last.write_bytes(b"other bytes")
    assert len(ends) > 1
    new = table(ref)
    assert len(set(new.blobs()) - set(old.blobs())) <= 3
    assert new.labels["masked"].images == 1
    assert new.images == old.images == 630


@promise("A conversion that meets a changed object is an error")
def test_an_object_that_changed_in_the_bucket_is_an_error_and_no_table(
    faces: Path, make: Make, table: Callable[..., Table]
) -> None:
    ref = make(faces)
    (faces / "Annotations" / "000004.xml").write_text("<annotation/>")
    with pytest.raises(ObjectChangedError, match=r"000004\.xml"):
        table(ref)


def test_sizes_can_be_trusted_and_then_no_image_is_opened(
    faces: Path, make: Make, table: Callable[..., Table], settings: Settings
) -> None:
    ref = make(faces)
    for path in (faces / "JPEGImages").iterdir():
        path.unlink()
    rows = list(table(ref, trust_sizes=True).rows())
    assert {(row.annotation.width, row.annotation.height) for row in rows if row.annotation} == {(320, 240)}


@pytest.mark.parametrize("trust_sizes", [False, True])
def test_images_without_an_annotation_are_usable_when_they_go_on_behind_their_end(
    faces: Path, make: Make, table: Callable[..., Table], trust_sizes: bool
) -> None:
    names = ("000001.jpeg", "none.jpg")  # 000001.xml is of 000001.jpg
    for name in names:
        (faces / "JPEGImages" / name).write_bytes((faces / "JPEGImages" / "000001.jpg").read_bytes() + b"more")
    found = table(make(faces), trust_sizes=trust_sizes)
    for path in (f"JPEGImages/{name}" for name in names):
        row = found.row(path)
        assert row is not None
        assert row.annotation == Annotation(path, 320, 240)
        assert [problem.code for problem in row.problems] == ["image-goes-on"]


def test_annotations_that_lie_elsewhere_are_found_by_name(faces: Path, make: Make, table: Callable[..., Table]) -> None:
    (faces / "Annotations").rename(faces / "from_the_tool")
    (faces / "JPEGImages").rename(faces / "camera_7")
    found = table(make(faces))
    files = [f"from_the_tool/{number:06}.xml" for number in range(1, 31)]
    assert [row.annotation.source for row in found.rows() if row.annotation] == files
    assert sorted((problem.code, problem.file) for problem in found.problems()) == [
        ("image-by-name", file) for file in files
    ]


def test_coco_and_its_problems_are_read_too(faces: Path, make: Make, table: Callable[..., Table]) -> None:
    shutil.rmtree(faces / "Annotations")
    shutil.rmtree(faces / "ImageSets")
    content = {
        "images": [
            {"id": 1, "file_name": "000001.jpg", "width": 320, "height": 240},
            {"id": 2, "file_name": "gone.jpg", "width": 320, "height": 240},
        ],
        "categories": [{"id": 1, "name": "face"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 20, 30, 400], "iscrowd": 0}],
    }
    (faces / "annotations.json").write_text(json.dumps(content))
    found = table(make(faces))
    row = found.row("JPEGImages/000001.jpg")
    assert row is not None
    assert row.annotation is not None
    assert [box[:5] for box in row.annotation.boxes] == [("face", 10.0, 20.0, 40.0, 240.0)]
    problems = [(problem.code, problem.action) for problem in found.problems()]
    assert problems == [("annotation-without-image", "skipped"), ("box-clipped", "repaired")]
    assert found.images == 30


@pytest.mark.parametrize("failing", ["datacache.annotations.formats.voc.parse", "datacache.conversion.index.check"])
def test_an_image_at_which_the_reader_fails_is_named_and_all_others_are_read(
    failing: str, faces: Path, make: Make, table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = make(faces)
    expected = [row for row in table(ref).rows() if row.path != "JPEGImages/000007.jpg"]
    works = pkgutil.resolve_name(failing)

    def fails(*args: Any, **options: Any) -> object:
        if "Annotations/000007.xml" in args or "JPEGImages/000007.jpg" in args:
            raise RecursionError("too deep")
        return works(*args, **options)

    monkeypatch.setattr(failing, fails)
    found = table(ref, trust_sizes=True)
    assert [row for row in found.rows() if row.path != "JPEGImages/000007.jpg"] == expected
    (problem,) = found.problems()
    assert problem[:4] == ("unforeseen", "skipped", "Annotations/000007.xml", 0)
    assert "RecursionError: too deep" in problem.message
    assert "'JPEGImages/000007.jpg' is left out" in problem.message


def test_what_fails_at_a_list_is_a_problem_of_that_file_and_no_error_of_a_store_is(
    faces: Path, make: Make, table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    error: Exception = ValueError("what is this")

    def fails(*_args: object) -> object:
        raise error

    monkeypatch.setitem(source._PARSERS, "coco", fails)
    shutil.rmtree(faces / "Annotations")
    (faces / "annotations.json").write_text('{"images": [], "annotations": [], "categories": []}')
    ref = make(faces)
    (problem,) = table(ref).problems()
    assert problem[:4] == ("unforeseen", "skipped", "annotations.json", 0)
    error = StoreUnavailableError("gone")
    with pytest.raises(StoreUnavailableError):
        table(ref, format="coco")


def test_large_images_are_known_by_their_ends(tmp_path: Path, make: Make, table: Callable[..., Table]) -> None:
    from datacache.core.ids import BLOCK_BYTES

    folder = tmp_path / "large"
    folder.mkdir()
    header = (2000).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    whole = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"x" * (2 * BLOCK_BYTES)) + chunk(b"IEND", b"")
    )
    (folder / "a.png").write_bytes(whole)
    (folder / "b.png").write_bytes(whole[:-100])
    for name in "ab":
        (folder / f"{name}.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    rows = {row.path: row for row in table(make(folder, "large")).rows()}
    assert rows["a.png"].annotation is not None
    assert rows["a.png"].annotation.width == 2000
    assert [problem.code for problem in rows["b.png"].problems] == ["image-truncated"]


def test_decoding_finds_a_jpeg_that_was_cut_and_given_an_end(
    faces: Path, make: Make, table: Callable[..., Table]
) -> None:
    image = faces / "JPEGImages" / "000001.jpg"
    data = image.read_bytes()
    image.unlink()
    image.write_bytes(data[: len(data) // 2] + b"\xff\xd9")
    (faces / "JPEGImages" / "000002.jpg").write_bytes(data + b"more")
    ref = make(faces)
    assert table(ref).row("JPEGImages/000001.jpg").annotation is not None  # type: ignore[union-attr]
    decoded = table(ref, decode=True)
    row = decoded.row("JPEGImages/000001.jpg")
    assert row is not None
    assert row.annotation is None
    assert [(p.code, p.action) for p in row.problems] == [("image-truncated", "skipped")]
    assert decoded.images - 1 == sum(row.annotation is not None for row in decoded.rows())
    with pytest.raises(UsageError, match="decoded or not opened"):
        table(ref, decode=True, trust_sizes=True)


def test_files_that_systems_leave_behind_are_counted_in_a_line(
    faces: Path, make: Make, table: Callable[..., Table]
) -> None:
    for name in ("JPEGImages/._000001.jpg", "Annotations/._000001.xml", "__MACOSX/x/a.xml"):
        (faces / name).parent.mkdir(parents=True, exist_ok=True)
        (faces / name).write_bytes(b"\0\5\x16\7")
    (problem,) = table(make(faces)).problems()
    assert (problem.code, problem.action, problem.file) == ("not-data", "noted", "Annotations/._000001.xml")
    assert problem.message.startswith("3 files are passed over")


def test_a_format_that_is_not_there_is_refused(drawn: Path, make: Make, table: Callable[..., Table]) -> None:
    with pytest.raises(UsageError, match="coco"):
        table(make(drawn), format="coco")


def test_labels_of_whole_images_come_from_metadata_beside_boxes_and_alone(
    faces: Path, make: Make, table: Callable[..., Table]
) -> None:
    (faces / "Annotations" / "000002.xml").unlink()
    lines = [
        {"file_name": "JPEGImages/000001.jpg", "label": "indoors"},
        {"file_name": "JPEGImages/000002.jpg", "label": ["outdoors", "rain"]},
        {"file_name": "JPEGImages/gone.jpg", "label": "indoors"},
    ]
    (faces / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = table(make(faces))
    first, second = found.row("JPEGImages/000001.jpg"), found.row("JPEGImages/000002.jpg")
    assert first is not None
    assert first.annotation is not None
    assert first.annotation.labels == ("indoors",)
    assert first.annotation.boxes
    assert first.annotation.source == "Annotations/000001.xml"
    assert second is not None
    assert second.annotation is not None
    assert second.annotation.labels == ("outdoors", "rain")
    assert [(p.code, p.file, p.line) for p in found.problems()] == [("annotation-without-image", "metadata.jsonl", 3)]
    assert found.labels["indoors"].images == 1
