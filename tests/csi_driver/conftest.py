"""Drivers for the tests, as processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from csi_driver.node.service import NodeService
from datacache.settings import Settings
from tests.csi_driver.api_server import ApiServer
from tests.csi_driver.driver import Driver
from tests.csi_driver.kubelet import Kubelet, make_masks
from tests.servers import Mongod, RcloneS3

StartDriver = Callable[..., Driver]


@pytest.fixture(autouse=True)
def _servers_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Secrets name the servers of the tests."""
    monkeypatch.setenv("DATACACHE_ALLOW_NETWORK", "127.0.0.0/8")


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
    return make_masks(tmp_path / "masks")


@pytest.fixture
def service(settings: Settings) -> Iterator[NodeService]:
    """The Node service of `home`, in this process."""
    service = NodeService(settings, "node-1")
    yield service
    service.close()


@pytest.fixture
def kubelet(service: NodeService, tmp_path: Path) -> Kubelet:
    """A node's kubelet, whose volumes are in `tmp_path/kubelet`."""
    return Kubelet(service, tmp_path / "kubelet")


@pytest.fixture
def bucket(rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty bucket that the driver's own credentials open: its name is the folder's."""
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    return rclone_s3.make_bucket(f"node-{os.urandom(6).hex()}")


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
