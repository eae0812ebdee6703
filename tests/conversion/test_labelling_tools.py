"""Data sets of labelling tools: found by what they are, brought to their images, and converted there and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from datacache import api
from datacache.annotations.model import Annotation
from datacache.annotations.table.table import Table
from datacache.conversion.index import Annotations, Reading
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings

pytestmark = pytest.mark.shared_home
Make = Callable[..., str]


@pytest.fixture
def read(settings: Settings, opened: Callable[[str], Snapshot]) -> Callable[[str], tuple[Table, list[Annotation]]]:
    """Reads the annotations of a snapshot."""

    def found(ref: str) -> tuple[Table, list[Annotation]]:
        with opened(ref) as snapshot:
            table = Annotations(snapshot, api.open_catalog(settings), Reading()).table(processes=1)
            return table, [row.annotation for row in table.rows() if row.annotation is not None]

    return found


def draw(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 48)).save(folder / name)


VIDEO = """<?xml version="1.0" encoding="utf-8"?>
<annotations><version>1.1</version>
<meta><task><size>3</size><original_size><width>64</width><height>48</height></original_size></task></meta>
<track id="0" label="car" source="manual">
<box frame="0" xtl="1" ytl="2" xbr="11" ybr="12" outside="0" occluded="0" keyframe="1"></box>
<box frame="2" xtl="5" ytl="2" xbr="15" ybr="12" outside="0" occluded="0" keyframe="1"></box>
</track></annotations>
"""


def test_frames_of_a_video_are_found_whatever_their_extension(tmp_path: Path, make: Make, read) -> None:
    draw(tmp_path / "v", "images/frame_000000.PNG", "images/frame_000001.PNG", "images/frame_000002.jpg")
    (tmp_path / "v" / "annotations.xml").write_text(VIDEO)
    table, found = read(make(tmp_path / "v"))
    assert table.meta["format"] == "cvat"
    assert [(a.path, a.boxes[0].x1) for a in found] == [
        ("images/frame_000000.PNG", 1),
        ("images/frame_000001.PNG", 3),
        ("images/frame_000002.jpg", 5),
    ]
    assert [(p.code, p.action) for p in table.problems()] == [("track-interpolated", "noted")]


@pytest.mark.parametrize("to", ["cvat", "labelme"])
@pytest.mark.parametrize("split", ["none", "train=0.5,val=0.5"])
def test_a_set_of_boxes_is_the_same_there_and_back(
    to: str, split: str, faces: Path, make: Make, settings: Settings, number: int, read
) -> None:
    def convert(ref: str, to: str, name: str, **options: object) -> str:
        return api.convert(ref, to=to, name=f"{name}-{number}", settings=settings, strict=True, **options).record.ref  # type: ignore[arg-type]

    first = make(faces)
    there = convert(first, to, f"{to}-{len(split)}", split=split)
    back = convert(there, "voc", f"{to}-back-{len(split)}")
    (_, before), (table, between), (_, after) = read(first), read(there), read(back)
    assert table.meta["format"] == to
    sides = [[box._replace(line=0) for box in annotation.boxes] for annotation in before]

    def by_name(found: list[Annotation]) -> list[list[object]]:
        ordered = sorted(found, key=lambda annotation: annotation.path.rpartition("/")[2])
        return [[box._replace(line=0) for box in annotation.boxes] for annotation in ordered]

    assert by_name(between) == by_name(after) == sides
    if split != "none":
        assert {annotation.path.split("/")[1] for annotation in between} == {"train", "val"}
