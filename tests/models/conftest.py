"""A small data set of drawn faces, snapshotted."""

from __future__ import annotations

from pathlib import Path

import pytest

from datacache import api
from datacache.settings import Settings
from dataset_cli.demo.faces import draw_faces


@pytest.fixture(scope="session")
def faces_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 drawn images with VOC annotations and splits. Not to be changed."""
    folder = tmp_path_factory.mktemp("faces")
    draw_faces(folder, count=24)
    return folder


@pytest.fixture
def faces(faces_folder: Path, settings: Settings) -> str:
    """A snapshot of them."""
    return api.create_snapshot("faces", faces_folder.as_uri(), settings=settings).ref
