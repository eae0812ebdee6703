"""Lists of a large JSON file, element by element."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datacache.annotations.formats import json_stream
from datacache.annotations.formats.json_stream import JsonFile
from datacache.core.errors import AnnotationError

texts = st.text(st.sampled_from('a"\\[]{},: 口\u2028\ud800\n'), max_size=6)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read so little at once that everything lies across an edge."""
    monkeypatch.setattr(json_stream, "_WINDOW", 7)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let elements be short."""
    monkeypatch.setattr(json_stream, "MAX_ELEMENT", 200)
    monkeypatch.setattr(json_stream, "MAX_SKIPPED", 400)


def elements(data: bytes, name: str = "a") -> list[Any]:
    return list(JsonFile(data, "f").elements(name))


@given(
    st.dictionaries(texts, values, max_size=3),
    st.lists(values, max_size=4),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "gb18030"]),
)
@settings(max_examples=150, deadline=None)
def test_the_elements_are_those_that_json_has(others, wanted, indent, ascii_only, encoding):
    text = json.dumps({**others, "wanted": wanted, "a": [1, 2]}, indent=indent, ensure_ascii=ascii_only)
    data = text.encode(encoding, "replace")
    file = JsonFile(data, "f")
    expected = json.loads(data.decode(encoding))
    assert file.whole
    assert [list(file.elements(name)) for name in ("wanted", "a")] == [expected["wanted"], [1, 2]]


def test_what_was_read_does_not_wait_for_the_collector():
    data = json.dumps([{"id": number, "name": "a"} for number in range(50)]).encode()
    gc.collect()
    gc.disable()
    try:
        assert len(elements(data, "")) == 50
        assert not gc.collect()  # an error that its own frame holds holds the text, too
    finally:
        gc.enable()


@pytest.mark.parametrize("window", range(1, 12))
def test_a_number_that_is_cut_by_the_end_of_a_piece_is_one(window, monkeypatch):
    monkeypatch.setattr(json_stream, "_WINDOW", window)
    assert elements(b'{"a": [0.5, 1e+2, 3.25e-1, 0], "z": 1}') == [0.5, 100.0, 0.325, 0]
    assert elements(b"[0.5, 2, [1E1]]", "") == [0.5, 2, [10.0]]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"a":' * 50 + b"1" + b"}" * 50, "is longer than"),
        (b"[" + b"1" * 300 + b"]", "is longer than"),
    ],
)
@pytest.mark.usefixtures("short")
def test_an_element_that_cannot_be_read_is_passed_over_with_its_place(bad, reason):
    before, passed_over, after = elements(b'{"a": [{"id": 1}, ' + bad + b', {"id": 3}], "b": 0}')
    assert (before, after) == ({"id": 1}, {"id": 3})
    assert "byte 18" in passed_over.reason
    assert reason in passed_over.reason


@pytest.mark.usefixtures("short")
def test_behind_an_element_that_is_too_long_to_be_passed_over_nothing_is_read():
    data = b'{"a": [1, ["' + b"x" * 2000 + b'"], 3], "b": []}'
    file = JsonFile(data, "f")
    assert not file.whole
    first, lost = file.elements("a")
    assert first == 1
    assert "what follows is not read" in lost.reason
    assert file.kind("b") == ""


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b'{"a": [1,\n2,]}', 2),
        (b'{"a": [1\n2]}', 2),
        (b'{"a": [1], }', 1),
        (b'{"a": [1] "b": 2}', 1),
        (b'{"a": [1]} x', 1),
        (b'{"a" [1]}', 1),
        (b'{"a": [1', 1),
        (b'{"a": [{"b": x}\n]}', 1),
        (b'{"a": ["\\', 1),
    ],
)
def test_what_is_no_json_is_an_error_with_its_line(data, line):
    with pytest.raises(AnnotationError) as caught:
        elements(data)
    assert (caught.value.code, caught.value.line) == ("json-broken", line)


_IN_LITTLE_MEMORY = """
import resource
from datacache.annotations.formats import coco

class Huge:
    def __init__(self, head, count, tail):
        self.head, self.count, self.tail = head, count, tail
    def __len__(self):
        return len(self.head) + self.count + len(self.tail)
    def __getitem__(self, part):
        start, stop, _ = part.indices(len(self))
        a, b = len(self.head), len(self.head) + self.count
        middle = b"1," * ((min(stop, b) - max(start, a)) // 2 + 1)
        shift = (max(start, a) - a) % 2
        return self.head[start:stop] + middle[shift:][: max(0, min(stop, b) - max(start, a))] + self.tail[
            max(0, start - b) : max(0, stop - b)]

box = b'{"image_id": 1, "category_id": 1, "bbox": [1, 1, 2, 2]'
head = b'{"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [' + box + b'}, ' + box + b', "segmentation": [['
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 200 * 2**20,) * 2)
for count in (2 * 10**7, 2**31):
    found = coco.parse(Huge(head, count, b'1]]}, ' + box + b'}]}'), "f")
    print(len(found.images[0][0].boxes), [p.code for p in found.problems if p.action == "skipped"])
"""


def test_outlines_of_millions_of_points_take_little_memory_and_cost_no_other_object():
    command = [sys.executable, "-c", _IN_LITTLE_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "2 ['entry-malformed']\n1 ['entry-malformed']\n", done.stderr


_LONG_LINES = """
import os, resource, sys
from datacache.annotations.formats import keras_yolo, metadata, open_images

class Stored:
    def __init__(self, path):
        self.file, self.size = os.open(path, os.O_RDWR | os.O_CREAT), 0
    def __len__(self):
        return self.size
    def __getitem__(self, part):
        start, stop, _ = part.indices(self.size)
        return os.pread(self.file, stop - start, start)
    def hold(self, head, count, tail):
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, head, 0)
        os.pwrite(self.file, tail, len(head) + count)
        self.size = len(head) + count + len(tail)

size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 200 * 2**20,) * 2)
row, stored = b"%s,/m/1,1,0,0.5,0,0.5\\n", Stored(sys.argv[1])
for parse, head, line in (
    (metadata.parse, b"", b'{"file_name": "%s"}\\n'),
    (lambda *of: keras_yolo.parse(*of, ()), b"", b"%s 1,2,3,4,0\\n"),
    (lambda *of: open_images.parse(*of, {}), b"ImageID,LabelName,Confidence,XMin,XMax,YMin,YMax\\n", row),
):
    for count in (9 * 2**20, 2**31):
        stored.hold(head + line % b"a.jpg", count, b"\\n" + line % b"b.jpg")
        found = parse(stored, "f")
        print([draft.name for draft, _ in found.images], [(p.code, p.line - len(head.split())) for p in found.problems])
"""


def test_a_line_that_is_too_long_takes_little_memory_and_costs_no_other_line(tmp_path):
    command = [sys.executable, "-c", _LONG_LINES, str(tmp_path / "sparse")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    read_on, left_out = "['a.jpg', 'b.jpg'] [('line-malformed', 2)]\n", "['a.jpg'] [('line-malformed', 2)]\n"
    assert done.stdout == (read_on + left_out) * 3, done.stderr
