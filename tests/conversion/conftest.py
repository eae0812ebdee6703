"""A VOC data set to convert, drawn, and what is needed to look at the result."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from datacache import api
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings
from dataset_cli.demo.faces import draw_faces

COUNT = 30
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
