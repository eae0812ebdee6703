"""What a notebook shows of snapshots, of images that are found, and of two versions."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

import datacache
from datacache.api.notebooks import PicturedSnapshot
from datacache.core.errors import UsageError
from datacache.settings import Settings

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
