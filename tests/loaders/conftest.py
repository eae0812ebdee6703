"""A small data set of drawn faces, snapshotted, for what feeds a training from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from datacache import api
from datacache.settings import Settings
from datacache.testing.faces import draw_faces

COUNT = 40


@pytest.fixture(scope="session")
def drawn_faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 drawn images with VOC annotations and splits. Not to be changed."""
    folder = tmp_path_factory.mktemp("faces")
    draw_faces(folder, count=COUNT)
    return folder


@pytest.fixture
def faces_ref(drawn_faces: Path, settings: Settings) -> str:
    """A snapshot of them."""
    return api.create_snapshot("faces", drawn_faces.as_uri(), settings=settings).ref
