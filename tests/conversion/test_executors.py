"""A conversion on an executor gives the snapshot that processes of this machine give."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import pytest

from datacache import api
from datacache.core.errors import UsageError
from datacache.settings import Settings
from tests.promises import promise


@pytest.fixture
def elsewhere(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    """Processes that have nothing of this one but its environment."""
    monkeypatch.setenv("DATACACHE_HOME", str(settings.home))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@promise("A conversion gives the same snapshot wherever its tasks are done")
def test_a_conversion_elsewhere_gives_the_same_snapshot(
    settings: Settings, faces: Path, make: Callable[[Path], str], elsewhere: Executor
) -> None:
    ref = make(faces)

    def convert(name: str, **how: object) -> api.Conversion:
        return api.convert(
            ref, to="yolo", name=name, split="train=0.5,val=0.5", resize="32x32", settings=settings, **how
        )

    here, there = convert("here", processes=1), convert("there", on=elsewhere)
    assert there.record.id == here.record.id
    assert there.report.as_json() == here.report.as_json()


def test_an_engine_that_cannot_be_had_is_named(settings: Settings, faces: Path, make: Callable[[Path], str]) -> None:
    ref = make(faces)
    for on in ("spark://host:1", "dask://", "nonsense"):
        with pytest.raises(UsageError, match=f"{on} is no engine"):
            api.convert(ref, to="yolo", name="none", on=on, settings=settings)
    with pytest.raises(UsageError, match="has processes of its own"):
        api.convert(ref, to="yolo", name="none", on="dask://localhost:1", processes=3, settings=settings)
