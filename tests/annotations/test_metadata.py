"""Labels, captions and boxes in `metadata.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from datacache import api
from datacache.annotations.formats.metadata import NAME, parse, write
from datacache.annotations.model import Annotation, Box, Draft
from datacache.core.errors import AnnotationError
from datacache.settings import Settings
from tests.annotations.shapes import cases, hundredths

Files = Callable[[str, bytes], Path]


def lines(*values: object) -> bytes:
    return b"".join(value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n" for value in values)


def test_labels_are_strings_numbers_or_lists_of_them() -> None:
    data = lines(
        {"file_name": "a.jpg", "label": "猫", "other": [1]},
        {"file_name": "b/c.jpg", "label": ["x", 3]},
        {"file_name": "d.jpg", "label": 0},
        {"file_name": "e.jpg"},
        {"file_name": "f.jpg", "label": None},
    )
    found = parse(data, "metadata.jsonl")
    assert [draft for draft, _ in found.images] == [
        Draft("metadata.jsonl", "a.jpg", labels=("猫",), line=1),
        Draft("metadata.jsonl", "b/c.jpg", labels=("x", "3"), line=2),
        Draft("metadata.jsonl", "d.jpg", labels=("0",), line=3),
        Draft("metadata.jsonl", "e.jpg", line=4),
        Draft("metadata.jsonl", "f.jpg", line=5),
    ]
    assert not any(problems for _, problems in found.images)
    assert [problem[:4] for problem in found.problems] == [("classes-missing", "noted", "metadata.jsonl", 2)]
    assert (found.problems[0].message[:22], found.classes) == ("2 labels are numbers, ", ())


def test_whole_numbers_are_classes_however_they_are_written() -> None:
    objects = {"bbox": [[1, 2, 3, 4]] * 3, "categories": [0, 1.0, "2"]}
    found = parse(lines({"file_name": "a.jpg", "label": [7.0, 1.5], "objects": objects}), "m")
    [(draft, problems)] = found.images
    assert (draft.labels, [box.label for box in draft.boxes]) == (("7",), ["0", "1", "2"])
    assert [problem.code for problem in problems] == ["entry-malformed"]
    assert [(problem.code, problem.message[:20]) for problem in found.problems] == [
        ("classes-missing", "3 labels are numbers")
    ]
    assert parse(lines({"file_name": "a.jpg", "label": "0"}), "m").problems == []


def test_what_is_wrong_is_left_out_and_reported_with_its_line() -> None:
    data = lines(
        b"\xef\xbb\xbf\r\n",
        {"file_name": "a.jpg", "label": ["x", 1.5, {"y": 1}, True]},
        b"{not json\r\n",
        [1],
        {"label": "x"},
        {"file_name": 5},
        {"file_name": "a.jpg", "label": "z"},
        b"[" * 100_000 + b"\n",
    )
    found = parse(data, "m")
    [(draft, problems)] = found.images
    assert draft == Draft("m", "a.jpg", labels=("x", "z"), line=2)
    assert [(problem.code, problem.action, problem.line) for problem in problems] == [
        ("entry-malformed", "skipped", 2),
        ("entry-malformed", "skipped", 2),
        ("entry-malformed", "skipped", 2),
        ("image-repeated", "noted", 7),
    ]
    assert [(problem.code, problem.line) for problem in found.problems] == [
        ("entry-malformed", 3),
        ("entry-malformed", 4),
        ("image-unnamed", 5),
        ("image-unnamed", 6),
        ("entry-malformed", 8),
    ]


# As in Hugging Face's documentation of image folders.
CAPTIONS = {"file_name": "0001.png", "text": "This is a golden retriever playing with a ball"}
OBJECTS = {"file_name": "0001.png", "objects": {"bbox": [[302.0, 109.0, 73.0, 52.0]], "categories": [0]}}


def test_captions_and_boxes_are_read_as_hugging_face_has_them() -> None:
    data = lines(CAPTIONS, OBJECTS, {"file_name": "b.jpg", "caption": ["One.", "Two."], "objects": None, "text": None})
    (one, problems), (two, _) = parse(data, "m").images
    assert one.captions == (CAPTIONS["text"],)
    assert one.boxes == (Box("0", 302, 109, 375, 161, line=2),)
    assert [problem.code for problem in problems] == ["image-repeated"]
    assert (two.captions, two.boxes) == (("One.", "Two."), ())


@pytest.mark.parametrize(
    ("field", "codes"),
    [
        ({"text": [5, None, "x"]}, ["entry-malformed"]),
        ({"objects": 5}, ["entry-malformed"]),
        ({"objects": {"bbox": [[1, 2, 3, 4]]}}, ["entry-malformed"]),
        ({"objects": {"bbox": [[1, 2, 3, 4]], "category": []}}, ["entry-malformed"]),
        ({"objects": {"bbox": [[1, 2, 3], 5, ["x", 1, 2, 3]], "category": ["a", "b", "c"]}}, ["box-text"] * 3),
    ],
)
def test_captions_and_boxes_that_are_none_are_left_out(field: dict[str, object], codes: list[str]) -> None:
    [(draft, problems)] = parse(lines({"file_name": "a.jpg", **field}), "m").images
    assert draft.boxes == ()
    assert [(problem.code, problem.action, problem.line) for problem in problems] == [(c, "skipped", 1) for c in codes]


texts = st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple)


@cases
@given(st.data())
def test_any_annotation_is_the_same_there_and_back(data: st.DataObject) -> None:
    boxes = []
    for _ in range(data.draw(st.integers(0, 3))):
        x, y, width, height = (data.draw(hundredths(3000)) for _ in range(4))
        boxes.append(Box(data.draw(st.text(max_size=5)), x, y, x + width, y + height, line=1))
    drawn = Annotation("a.jpg", 1, 1, tuple(boxes), data.draw(texts), "m", data.draw(texts))
    written = b"".join(write([drawn], objects=True))
    ((draft, problems),) = parse(written, "m").images
    assert problems == []
    assert (draft.boxes, draft.labels, draft.captions) == (drawn.boxes, drawn.labels, drawn.captions)
    assert b"".join(write([drawn._replace(boxes=draft.boxes)], objects=True)) == written


def test_an_image_folder_is_the_same_there_and_back(tmp_path: Path, settings: Settings) -> None:
    rows = {
        "train/a.jpg": {
            "label": "x",
            "text": "One.",
            "objects": {"bbox": [[1.5, 2.0, 3.0, 4.0]], "categories": ["cat"]},
        },
        "train/b.jpg": {"label": ["x", "y"], "objects": {"bbox": [], "categories": []}},
        "val/sub/c.jpg": {"text": ["One.", "Two."], "objects": {"bbox": [], "categories": []}},
    }
    for path in (*rows, "val/d.jpg"):
        (tmp_path / "set" / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10)).save(tmp_path / "set" / path)
    for split in ("train", "val"):
        said = (
            {"file_name": path.removeprefix(f"{split}/"), **row} for path, row in rows.items() if path.startswith(split)
        )
        (tmp_path / "set" / split / "metadata.jsonl").write_bytes(lines(*said))
    first = api.create_snapshot("first", (tmp_path / "set").as_uri(), settings=settings).ref

    def files(ref: str) -> dict[str, bytes]:
        with api.open_snapshot(ref, settings) as snapshot:
            return {path: snapshot.read(path) for path in snapshot.paths()}

    done = api.convert(first, to="imagefolder", name="second", settings=settings, keep_unannotated=True)
    assert done.report.counts == {"image-unannotated": 1}
    assert files(done.record.ref) == files(first)
    plain = api.convert(first, to="imagefolder", name="third", settings=settings, split="none")
    assert sorted(files(plain.record.ref)) == [
        "images/a.jpg",
        "images/b.jpg",
        "images/metadata.jsonl",
        "images/sub/c.jpg",
    ]
    coco = api.convert(first, to="coco", name="fourth", settings=settings, keep_unannotated=True)
    back = api.convert(coco.record.ref, to="imagefolder", name="fifth", settings=settings, keep_unannotated=True)

    def said_of(ref: str) -> list[dict[str, object]]:
        found = (json.loads(line) for path, data in files(ref).items() if "jsonl" in path for line in data.splitlines())
        named = ({**row, "file_name": row["file_name"].rpartition("/")[2]} for row in found)
        return sorted((row for row in named if row["file_name"] != "d.jpg"), key=lambda row: row["file_name"])

    assert said_of(back.record.ref) == said_of(first)  # but for the background, which COCO lists


def test_a_file_that_is_no_text_is_an_error() -> None:
    with pytest.raises(AnnotationError) as refused:
        parse(b"\xff\xff\xff", "m")
    assert (refused.value.code, refused.value.file) == ("encoding", "m")


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300) | st.lists(st.binary(max_size=40)).map(b'\n{"file_name":'.join))
def test_any_bytes_give_drafts_or_our_error(data: bytes) -> None:
    try:
        found = parse(data, "m")
    except AnnotationError:
        return
    assert all(draft.name for draft, _ in found.images)


def test_what_an_import_writes_is_read_back(tmp_path: Path, settings: Settings) -> None:
    rows = [{"url": f"{n}.jpg", "path": f"p/{n}.jpg", "label": label} for n, label in enumerate(["a", ["b", "c"], 7])]
    for n in range(3):
        (tmp_path / f"{n}.jpg").write_bytes(b"%d" % n)
    (tmp_path / "list.jsonl").write_bytes(lines(*rows))
    api.import_jsonl("faces", tmp_path / "list.jsonl", settings=settings)
    with api.open_snapshot("faces", settings) as opened:
        found = parse(opened.read(NAME.decode()), "metadata.jsonl")
    assert {draft.name: draft.labels for draft, _ in found.images} == {
        "p/0.jpg": ("a",),
        "p/1.jpg": ("b", "c"),
        "p/2.jpg": ("7",),
    }
