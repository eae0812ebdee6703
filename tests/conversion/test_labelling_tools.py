"""Data sets of labelling tools: found by what they are, brought to their images, and converted there and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from datacache import api
from datacache.annotations.model import Annotation, Box
from datacache.annotations.table.table import Table
from datacache.conversion.index import Annotations, Reading
from datacache.core.errors import UsageError
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


def test_frames_that_have_other_names_are_the_images_in_their_order(tmp_path: Path, make: Make, read) -> None:
    draw(tmp_path / "v", "images/b.png", "images/c.png", "images/a.jpg", "images/._x.png")
    (tmp_path / "v" / "annotations.xml").write_text(VIDEO)
    table, found = read(make(tmp_path / "v"))
    assert [(a.path, a.boxes[0].x1) for a in found] == [
        ("images/a.jpg", 1),
        ("images/b.png", 3),
        ("images/c.png", 5),
    ]
    assert {(p.code, p.action) for p in table.problems()} == {
        ("track-interpolated", "noted"),
        ("frames-in-order", "noted"),
        ("not-data", "noted"),
    }


@pytest.mark.parametrize("names", [("a.png", "b.png"), ("frame_000000.png", "b.png", "c.png")])
def test_frames_are_no_other_images(names: tuple[str, ...], tmp_path: Path, make: Make, read) -> None:
    draw(tmp_path / "v", *names)
    (tmp_path / "v" / "annotations.xml").write_text(VIDEO)
    table, _ = read(make(tmp_path / "v"))
    assert "annotation-without-image" in {p.code for p in table.problems()}
    assert "frames-in-order" not in {p.code for p in table.problems()}


def test_images_of_a_subset_of_any_name_may_lie_without_its_folder(tmp_path: Path, make: Make, read) -> None:
    draw(tmp_path / "s", "images/a.png", "images/b.png", "images/two/c.png", "images/c.png")
    image = '<image name="{}" subset="{}" width="64" height="48"><tag label="x"></tag></image>'
    images = "".join(image.format(*pair) for pair in (("a.png", "one"), ("b.png", "one"), ("c.png", "two")))
    (tmp_path / "s" / "annotations.xml").write_text(f"<annotations><version>1.1</version>{images}</annotations>")
    table, found = read(make(tmp_path / "s"))
    assert [a.path for a in found if a.labels] == ["images/a.png", "images/b.png", "images/two/c.png"]
    assert list(table.problems()) == []


def test_subsets_are_splits_where_no_folders_are(tmp_path: Path, make: Make, settings: Settings, number: int) -> None:
    draw(tmp_path / "s", "images/a&b.png", "images/b.png", "images/c.png")
    image = '<image name="{}" subset="{}" width="64" height="48"><tag label="x"></tag></image>'
    pairs = (("a&amp;b.png", "Train"), ("b.png", "Validation"), ("c.png", "default"))
    images = "".join(image.format(*pair) for pair in pairs)
    (tmp_path / "s" / "annotations.xml").write_text(
        f"<annotations><version>1.1</version>{images}</annotations>", encoding="utf-8"
    )
    (tmp_path / "s" / "metadata.jsonl").write_text('{"file_name": "images/b.png", "text": "a car"}')
    done = api.convert(make(tmp_path / "s"), to="coco", name=f"s-{number}", settings=settings)
    assert done.report.splits == {"train": 1, "val": 1}
    left_out = [p[:3] for p in done.report.problems if p.action == "skipped"]
    assert left_out == [("not-in-split", "skipped", "images/c.png")]


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


KINDS = """<?xml version="1.0" encoding="utf-8"?>
<annotations><version>1.1</version>
<meta><task><size>1</size><labels>
<label><name>person</name><type>skeleton</type></label>
<label><name>nose</name><parent>person</parent></label>
<label><name>left eye</name><parent>person</parent></label>
<label><name>right eye</name><parent>person</parent></label>
</labels></task></meta>
<image id="0" name="a.png" width="64" height="48">
<box label="plain" source="manual" occluded="1" xtl="1.00" ytl="2.00" xbr="9.00" ybr="9.50" z_order="0"></box>
<box label="turned" source="auto" occluded="0" xtl="20.00" ytl="10.00" xbr="40.00" ybr="20.00" rotation="30.00"></box>
<polygon label="plain" source="manual" group_id="2" occluded="0" points="10.00,10.00;30.00,10.00;20.00,40.00">
<attribute name="wet">yes</attribute></polygon>
<mask label="plain" source="manual" occluded="0" rle="0, 2, 1, 3" left="5" top="6" width="3" height="2"></mask>
<skeleton label="person" source="manual" occluded="0" z_order="0">
<points label="nose" outside="0" occluded="0" points="30.00,10.00"></points>
<points label="left eye" outside="0" occluded="1" points="26.00,8.00"></points>
<points label="right eye" outside="1" occluded="0" points="0.00,0.00"></points>
</skeleton>
<tag label="night" source="manual"></tag>
</image></annotations>
"""


def test_every_kind_of_object_is_the_same_there_and_back(
    tmp_path: Path, make: Make, settings: Settings, number: int, read
) -> None:
    draw(tmp_path / "kinds", "images/a.png")
    (tmp_path / "kinds" / "annotations.xml").write_text(KINDS)
    first, names = make(tmp_path / "kinds"), itertools.count()

    def convert(ref: str, to: str) -> tuple[str, list[tuple[str, str]]]:
        done = api.convert(ref, to=to, name=f"kinds-{next(names)}-{number}", settings=settings)
        return done.record.ref, [(problem.code, problem.action) for problem in done.report.problems]

    def objects(ref: str) -> list[object]:
        table, (annotation,) = read(ref)
        return [table.meta["format"], annotation.labels, *(box._replace(line=0) for box in annotation.boxes)]

    there, problems = convert(first, "cvat")
    assert (problems, objects(there)) == ([], objects(first))
    through, problems = convert(first, "labelme")
    assert problems == [("details-left-out", "changed")]  # the author
    back, problems = convert(through, "cvat")
    assert problems == []
    _, labels, plain, _, *others = objects(first)
    found = objects(back)
    # Corners have two decimals after CVAT's way of writing them; LabelMe's keypoints have no names.
    assert found[:3] + found[4:6] == ["cvat", labels, plain, *others[:2]]
    assert [box.label for box in found[2:]] == ["plain", "turned", "plain", "plain", "person"]  # type: ignore[attr-defined]
    coco, problems = convert(first, "coco")
    assert {code for code, _ in problems} == {"rotation-outlined", "details-left-out"}
    person, before = objects(coco)[-1], others[2]
    assert isinstance(person, Box)
    assert isinstance(before, Box)
    assert person.extra is not None
    assert person.extra._replace(area=None) == before.extra


def test_tracks_of_a_video_are_the_same_there_and_back(
    tmp_path: Path, make: Make, settings: Settings, number: int, read
) -> None:
    draw(tmp_path / "v", *(f"images/frame_{n:06d}.png" for n in (0, 1, 2, 3, 7)))
    tracks = """<track id="4" label="car" source="auto" group_id="1">
<box frame="0" keyframe="1" outside="0" occluded="1" xtl="1.00" ytl="2.00" xbr="11.00" ybr="12.00" z_order="0"></box>
<box frame="1" keyframe="0" outside="0" occluded="0" xtl="3.00" ytl="2.00" xbr="13.00" ybr="12.00" z_order="2">
<attribute name="wet">yes</attribute></box>
<box frame="2" keyframe="1" outside="1" occluded="0" xtl="3.00" ytl="2.00" xbr="13.00" ybr="12.00" z_order="0"></box>
<box frame="7" keyframe="1" outside="0" occluded="0" xtl="5.00" ytl="2.00" xbr="15.00" ybr="12.00" z_order="0"></box>
</track><track id="5" label="way" source="manual">
<polygon frame="3" keyframe="1" outside="0" points="1.00,1.00;9.00,1.00;9.00,9.00"></polygon>
<polygon frame="4" keyframe="1" outside="1" points="1.00,1.00;9.00,1.00;9.00,9.00"></polygon>
</track></annotations>"""
    (tmp_path / "v" / "annotations.xml").write_text(VIDEO[: VIDEO.index("<track")].replace(">3<", ">8<") + tracks)
    first = make(tmp_path / "v")
    done = api.convert(
        first, to="cvat-video", name=f"v-{number}", settings=settings, keep_unannotated=True, strict=True
    )
    assert done.report.counts == {"image-unannotated": 1}
    (before, one), (after, other) = read(first), read(done.record.ref)
    assert [*after.problems(), *before.problems()] == []

    def plain(found: list[Annotation]) -> list[object]:
        return [(a.path, a.width, a.height, [box._replace(line=0) for box in a.boxes]) for a in found]

    assert plain(other) == plain(one)
    assert [len(annotation.boxes) for annotation in other] == [1, 1, 0, 1, 1]


def test_objects_without_a_track_become_tracks_of_one_frame(
    faces: Path, make: Make, settings: Settings, number: int, read
) -> None:
    first = make(faces)
    done = api.convert(first, to="cvat-video", name=f"v-{number}", settings=settings, split="none")
    assert {problem.code for problem in done.report.problems} == {"track-made"}
    (_, one), (table, other) = read(first), read(done.record.ref)
    assert [(a.label, a[1:5]) for annotation in one for a in annotation.boxes] == [
        (a.label, a[1:5]) for annotation in other for a in annotation.boxes
    ]
    assert (table.meta["format"], list(table.problems())) == ("cvat", [])
    with pytest.raises(UsageError, match="splits"):
        api.convert(first, to="cvat-video", name=f"w-{number}", settings=settings, split="train=0.5,val=0.5")


def test_the_frames_of_a_video_have_one_size(tmp_path: Path, make: Make, settings: Settings, number: int) -> None:
    draw(tmp_path / "v", "a.png")
    Image.new("RGB", (48, 64)).save(tmp_path / "v" / "b.png")
    ref = make(tmp_path / "v")
    with pytest.raises(UsageError, match="is 48x64, and those before are 64x48"):
        api.convert(ref, to="cvat-video", name=f"v-{number}", settings=settings, keep_unannotated=True)
