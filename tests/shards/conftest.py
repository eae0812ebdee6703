"""Drawn data to shard, and shards to look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datacache import api
from datacache.settings import Settings
from datacache.shards.build import Sharded
from dataset_cli.demo.faces import draw_faces

COUNT = 24


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 drawn images with VOC annotations. Not to be changed."""
    folder = tmp_path_factory.mktemp("drawn")
    draw_faces(folder, count=COUNT, width=160, height=120)
    return folder


@pytest.fixture
def make(settings: Settings, tmp_path: Path) -> Callable[..., str]:
    """Makes a snapshot of a folder, or of files by path; its reference."""

    def made(what: Path | dict[str, bytes], name: str = "faces") -> str:
        if isinstance(what, dict):
            folder = tmp_path / "source" / name
            for path, data in what.items():
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
            what = folder
        return api.create_snapshot(name, str(what), settings=settings, replace=True).ref

    return made


@pytest.fixture
def shard(settings: Settings, tmp_path: Path) -> Callable[..., tuple[Path, Sharded]]:
    """Shards a snapshot in this process; the folder and the result."""

    def sharded(ref: str, to: str = "shards", **options: Any) -> tuple[Path, Sharded]:
        folder = tmp_path / to
        options = {"max_size_bytes": 20_000, "processes": 1} | options
        return folder, api.shard(ref, to=str(folder), settings=settings, **options)

    return sharded


@pytest.fixture
def image(drawn: Path) -> bytes:
    """An image."""
    return (drawn / "JPEGImages" / "000001.jpg").read_bytes()


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}
