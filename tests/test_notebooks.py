"""What a notebook shows of snapshots, of images that are found, and of two versions."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

import datacache
from datacache.annotations.pictures.draw import colours_of
from datacache.api.notebooks import PicturedSnapshot
from datacache.core.errors import DraftConflictError, ObjectNotFoundError, PathNotFoundError, UsageError
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings
from tests.web.conftest import write_coco
from tests.web.test_pages import HOSTILE as NAMES
from tests.web.test_pages import shown_as

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def snap(settings: Settings, tmp_path: Path) -> Iterator[PicturedSnapshot]:
    folder = tmp_path / "pets"
    folder.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (100, 50), (200, 30, 30)).save(folder / f"{name}.png")
    (folder / "classes.txt").write_text(f"cat\n{HOSTILE}\n")
    (folder / "a.txt").write_text("0 0.5 0.5 0.2 0.4\n1 0.2 0.2 0.1 0.1\n")
    (folder / "b.txt").write_text("0 0.5 0.5 0.2 0.4\n")
    datacache.create_snapshot("pets", str(folder), copy=True, message=HOSTILE, settings=settings)
    (folder / "b.txt").write_text("0 0.5 0.6 0.2 0.4\n")
    datacache.create_snapshot("pets", str(folder), copy=True, message=HOSTILE, settings=settings)
    with datacache.open_snapshot("pets", settings) as opened:
        yield opened


class _Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, _attributes: object) -> None:
        self.found.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_pictures_show_the_images_that_fit(snap: PicturedSnapshot, tmp_path: Path) -> None:
    picture = snap.show()
    picture.save(tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.format == "PNG"
    assert picture._repr_png_() != snap.show(labels=[HOSTILE])._repr_png_()
    assert snap.filter(labels=[HOSTILE]).paths == ["a.png"]
    assert snap.filter(where="objects < 2").show()._repr_png_() == snap.show(max_objects=1)._repr_png_()
    with pytest.raises(UsageError, match="nothing to draw"):
        snap.show(min_objects=9)


def test_html_has_texts_as_texts(snap: PicturedSnapshot, settings: Settings) -> None:
    shown = [snap, snap.filter(), datacache.stats("pets", settings=settings)]
    for html in (each._repr_html_() for each in shown):
        tags = _Tags(html)
        assert "script" not in tags.found
        assert HOSTILE in tags.text


def test_a_list_of_images_shows_some_of_them(snap: PicturedSnapshot) -> None:
    html = snap.filter(labels=["cat"])._repr_html_()
    assert "2 images of pets@" in html
    data = re.search(r'src="data:image/png;base64,([^"]+)"', html)
    assert data is not None
    assert "img" not in _Tags(snap.filter(min_objects=9)._repr_html_()).found


def test_two_versions_show_what_changed(snap: PicturedSnapshot, settings: Settings) -> None:
    found = datacache.diff("pets", settings=settings)
    assert [image.path for image in found.images] == ["b.png"]
    assert found.objects() == {"moved": {"cat": 1}}
    with Image.open(io.BytesIO(found.show().data)) as picture:
        assert picture.width > 100
    assert "moved" in _Tags(found._repr_html_()).text
    same = datacache.diff("pets", "pets", settings=settings)
    assert (same.images, same.objects()) == ([], {})
    with pytest.raises(UsageError, match="annotated the same"):
        same.show()


def test_fifty_hostile_names_and_labels_are_texts_of_a_table(settings: Settings, tmp_path: Path) -> None:
    names = [f"{number:02}{text.replace('/', '∕')}.jpg" for number, text in enumerate(NAMES)]
    folder = tmp_path / "hostile"
    write_coco(folder, {name.encode(): [(text, [1, 1, 9, 9])] for name, text in zip(names, NAMES, strict=True)})
    datacache.create_snapshot("hostile", str(folder), copy=True, message="\n".join(NAMES), settings=settings)
    write_coco(folder, {name.encode(): [(text, [1, 1, 29, 9])] for name, text in zip(names, NAMES, strict=True)})
    datacache.create_snapshot("hostile", str(folder), copy=True, message="\n".join(NAMES), settings=settings)
    counts = datacache.stats("hostile", settings=settings)
    with datacache.open_snapshot("hostile", settings) as snap:
        shown = [snap, snap.filter(where="objects == 1"), counts, datacache.diff("hostile", settings=settings)]
        html = "".join(each._repr_html_() for each in shown)
        allowed = {"table", "caption", "tr", "th", "td", "img"}
        assert set(_Tags(html).found) == allowed
        assert not re.search(r"[\u202a-\u202e\u2066-\u2069\x00-\x09\x0b-\x1f]", html)
        text = _Tags(html).text
        for name, label in zip(names[:20], NAMES, strict=False):
            assert shown_as(name) in text
            assert shown_as(label).strip() in text


def test_a_comparison_has_the_colours_and_skeletons_of_the_data_set(settings: Settings, tmp_path: Path) -> None:
    alone = {name: colours_of([name])[name] for name in (f"class {number}" for number in range(40))}
    first, second = next(
        (one, other)
        for one in alone
        for other in alone
        if one != other and colours_of([one, other])[other] != alone[other]
    )
    folder = tmp_path / "poses"
    for x in (10.0, 40.0):
        write_coco(folder, {b"a.jpg": [(first, [1, 1, 9, 9])], b"b.jpg": [(second, [x, 10.0, 50.0, 60.0])]})
        coco = json.loads((folder / "coco.json").read_text())
        for category in coco["categories"]:
            category |= {"keypoints": ["head", "foot"], "skeleton": [[1, 2]]}
        for each in coco["annotations"]:
            each |= {"keypoints": [x + 5, 15, 2, x + 45, 65, 2], "num_keypoints": 2}
        (folder / "coco.json").write_text(json.dumps(coco))
        datacache.create_snapshot("poses", str(folder), copy=True, settings=settings)
    found = datacache.diff("poses", settings=settings)
    found.images = [image for image in found.images if image.path == "b.jpg"]
    joined = found.show()
    with Image.open(io.BytesIO(joined.data)) as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
    assert colours_of([first, second])[second] in colours
    assert alone[second] not in colours
    found._skeletons = {}
    assert found.show().data != joined.data, "the keypoints are not joined"


def test_an_image_that_is_gone_is_a_tile_that_says_so(
    snap: PicturedSnapshot, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = datacache.diff("pets", settings=settings)
    before = snap.show().data, changed.show().data

    def read(_: Snapshot, path: str) -> bytes:
        raise ObjectNotFoundError(f"{path} is gone", url=path)

    monkeypatch.setattr(Snapshot, "read", read)
    gone = snap.show().data, changed.show().data
    assert all(one != other for one, other in zip(before, gone, strict=True))
    assert _Tags(snap._repr_html_()).found.count("img") == 1


def test_showing_a_snapshot_that_is_large_reads_no_annotations(
    snap: PicturedSnapshot, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datacache.api.notebooks._FILES_READ_AT_ONCE", 1)
    assert "img" not in _Tags(snap._repr_html_()).found
    datacache.stats(snap.ref, settings=settings)
    assert "img" in _Tags(snap._repr_html_()).found


def test_results_show_what_was_made(snap: PicturedSnapshot, settings: Settings, tmp_path: Path) -> None:
    done = datacache.convert("pets", to="coco", name="pets-coco", settings=settings)
    assert "pets-coco@" in _Tags(done._repr_html_()).text
    sharded = datacache.shard("pets-coco", to=str(tmp_path / "shards"), name="pets-shards", settings=settings)
    assert "pets-shards@" in _Tags(sharded._repr_html_()).text
    assert repr(snap.filter()) == f"<ImageList of {snap.record.ref}: 2 images, 'a.png', 'b.png', …>"
    assert datacache.query("pets", settings=settings)._repr_html_() == snap.filter()._repr_html_()
    assert str(tmp_path) in _Tags(snap._repr_html_()).text, "where it was made from"


def test_an_image_is_marked_and_committed_from_python(snap: PicturedSnapshot, settings: Settings) -> None:
    marks = snap.marks("a.png")
    assert [mark.label for mark in marks] == ["cat", HOSTILE]
    marks[1] = marks[1]._replace(label="dog")
    marks.add("cat", 60, 10, 70, 20)
    marks.save(author="ann", done=False)
    del marks[0]
    marks.save(author="ann")
    again = snap.marks("a.png")
    assert again == marks
    again.save(author="ann")
    with pytest.raises(DraftConflictError, match="ann has saved"):
        snap.marks("a.png").save(author="bob")
    with pytest.raises(DraftConflictError, match="ann has saved"):
        snap.marks("a.png").discard(author="bob")
    with pytest.raises(DraftConflictError):
        marks.save(author="ann")
    done = datacache.commit_marks("pets", message="a dog", settings=settings)
    assert (done.images, done.left) == (1, ())
    assert "images marked" in _Tags(done._repr_html_()).text
    assert [(image.path[-5:], image.labels) for image in datacache.query("pets", settings=settings)] == [
        ("a.png", {"cat": 1, "dog": 1}),
        ("b.png", {"cat": 1}),
    ]
    with pytest.raises(PathNotFoundError, match=r"no image 'c\.png'"):
        snap.marks("c.png")


def test_marks_that_are_discarded_are_those_of_the_version_again(snap: PicturedSnapshot, settings: Settings) -> None:
    marks = snap.marks("a.png")
    of_version = list(marks)
    del marks[:]
    marks.save(author="ann")
    assert snap.marks("a.png") == []
    marks.discard(author="ann")
    assert marks == of_version
    assert snap.marks("a.png") == of_version
    marks.add("cat", 60, 10, 70, 20)
    marks.save(author="bob")


def test_problems_are_a_table(settings: Settings, tmp_path: Path) -> None:
    write_coco(tmp_path / "bad", {f"{HOSTILE.replace('/', '')}.jpg".encode(): [("cat", [90, 10, 40, 9])] * 2})
    datacache.create_snapshot("bad", str(tmp_path / "bad"), settings=settings)
    found = datacache.problems("bad", settings=settings)
    assert len(found) > 1
    html = found._repr_html_()
    assert {problem.code for problem in found} <= set(re.findall(r"[a-z-]+", _Tags(html).text))
    assert "script" not in _Tags(html).found
    assert repr(found).startswith(f"<ProblemList of {len(found)} problems: ")
