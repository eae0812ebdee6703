"""A VOC data set to convert, drawn, and what is needed to look at the result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from PIL import Image

from datacache import api
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings
from dataset_cli.demo.faces import draw_faces

COUNT = 30
Objects = list[tuple[str, int]]
OBJECT = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>8</ymin><xmax>{}</xmax><ymax>24</ymax></bndbox></object>"
_numbers = itertools.count()


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 drawn images with VOC annotations and splits. Not to be changed."""
    folder = tmp_path_factory.mktemp("drawn")
    draw_faces(folder, count=COUNT)
    return folder


@pytest.fixture
def faces(drawn: Path, tmp_path: Path) -> Path:
    """A copy of them, to change."""
    import shutil

    return Path(shutil.copytree(drawn, tmp_path / "faces"))


@pytest.fixture
def number() -> int:
    """Makes names of data sets a test's own where several share a home."""
    return next(_numbers)


@pytest.fixture
def make(settings: Settings, number: int) -> Callable[[Path], str]:
    """Makes a snapshot of a folder; its reference."""

    def made(folder: Path, name: str = f"faces-{number}") -> str:
        return api.create_snapshot(name, folder.as_uri(), settings=settings).ref

    return made


@pytest.fixture
def files(settings: Settings) -> Callable[[str], dict[str, bytes]]:
    """All files of a snapshot."""

    def read(ref: str) -> dict[str, bytes]:
        with api.open_snapshot(ref, settings) as snapshot:
            return {path: snapshot.read(path) for path in snapshot.paths()}

    return read


@pytest.fixture
def opened(settings: Settings) -> Callable[[str], Snapshot]:
    """Opens a snapshot."""
    return lambda ref: api.open_snapshot(ref, settings)


@pytest.fixture
def data_set(tmp_path: Path, settings: Settings) -> Callable[..., str]:
    """Makes a data set of Pascal VOC: of each image its colour, and the label and left side of its objects."""

    def made(name: str, images: Mapping[str, tuple[int, Objects]], splits: Mapping[str, str] | None = None) -> str:
        folder = tmp_path / name
        for kind in ("JPEGImages", "Annotations", "ImageSets/Main"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
        for stem, (colour, objects) in images.items():
            # Bitmaps are as large as each other, so sizes tell nothing.
            Image.new("RGB", (64, 48), (colour, 99, 200)).save(folder / "JPEGImages" / f"{stem}.bmp")
            xml = "".join(OBJECT.format(label, x, x + 10) for label, x in objects)
            size = "<size><width>64</width><height>48</height></size>"
            (folder / "Annotations" / f"{stem}.xml").write_text(f"<annotation>{size}{xml}</annotation>")
        for split, names in (splits or {}).items():
            (folder / "ImageSets" / "Main" / f"{split}.txt").write_text(names.replace(" ", "\n"))
        return api.create_snapshot(name, folder.as_uri(), settings=settings).ref

    return made
