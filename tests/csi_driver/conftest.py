"""Drivers for the tests, as processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datacache.api import create_snapshot
from datacache.settings import Settings, load_settings
from tests.csi_driver.api_server import ApiServer
from tests.csi_driver.driver import Driver
from tests.servers import Mongod

StartDriver = Callable[..., Driver]


@pytest.fixture
def start_driver(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartDriver]:
    """Start drivers of `home` with these options, each on a socket of its own; they end with the test."""
    drivers: list[Driver] = []

    def start(*options: str, variables: dict[str, str] | None = None) -> Driver:
        driver = Driver(tmp_path_factory.mktemp("csi"), *options, variables=variables)
        drivers.append(driver)
        return driver.start()

    yield start
    for driver in drivers:
        driver.__exit__()


@pytest.fixture(params=["sqlite", "mongodb"])
def any_catalog(request: pytest.FixtureRequest, mongod: Mongod, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The catalog of `home`'s settings: one after the other, both kinds."""
    url = mongod.database_url() if request.param == "mongodb" else f"sqlite:///{home}/catalog.db"
    monkeypatch.setenv("DATACACHE_CATALOG", url)
    return url


@pytest.fixture
def masks(home: Path, tmp_path: Path) -> dict[str, str]:
    """The data set `mask`, see `make_masks`: its tags' ids. `tmp_path / "masks"` is what it was made of."""
    return make_masks(tmp_path / "masks", load_settings())


def make_masks(folder: Path, settings: Settings) -> dict[str, str]:
    """A data set `mask` with the tags v1, v2 and v3, each with train/, train/deep/, val/ and README: their ids."""
    for name in ("train/a.jpg", "train/deep/b.jpg", "val/c.jpg", "README"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(1000))
    ids = {}
    for tag in ("v1", "v2", "v3"):
        (folder / "VERSION").write_text(tag)
        ids[tag] = create_snapshot("mask", str(folder), tags=[tag], settings=settings).id
    return ids


@pytest.fixture
def cluster() -> Iterator[ApiServer]:
    """The API of a cluster."""
    api = ApiServer()
    yield api
    api.close()


@pytest.fixture
def kubeconfig(cluster: ApiServer, tmp_path: Path) -> Path:
    """The file that leads to it."""
    return cluster.write_kubeconfig(tmp_path / "kubeconfig")
