"""Labels of whole images in `metadata.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datacache import api
from datacache.annotations.formats.metadata import NAME, parse
from datacache.annotations.model import Draft
from datacache.core.errors import AnnotationError
from datacache.settings import Settings

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
    assert (found.problems, found.classes) == ([], ())


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
