"""Test what the kubelet sees in its folder of plugins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from csi_driver.wire import registration_pb2 as wire
from tests.csi_driver.conftest import StartDriver
from tests.csi_driver.driver import Client

OPTIONS = "--mode=controller"  # which services there are makes no difference to the registration


@pytest.fixture
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reg")


@pytest.fixture
def kubelet(plugins: Path) -> Iterator[Client]:
    client = Client(plugins / "datacache.io-reg.sock", wire.DESCRIPTOR)
    yield client
    client.close()


def test_the_kubelet_learns_who_is_there_and_where(start_driver: StartDriver, plugins: Path, kubelet: Client) -> None:
    driver = start_driver(OPTIONS, f"--register={plugins}")
    info = kubelet.GetInfo()
    assert (info.type, info.name, list(info.supported_versions)) == ("CSIPlugin", "datacache.io", ["1.0.0"])
    assert info.endpoint == str(driver.socket)
    before = len(driver.log)
    kubelet.NotifyRegistrationStatus(plugin_registered=True)
    kubelet.NotifyRegistrationStatus(plugin_registered=False, error="no such version")
    text = "".join(driver.lines(before, 4))
    assert "has registered" in text
    assert "no such version" in text
    assert driver.stop() == 0
    assert list(plugins.iterdir()) == []


def test_the_endpoint_may_be_another_one_on_the_host(start_driver: StartDriver, plugins: Path, kubelet: Client) -> None:
    path = "/var/lib/kubelet/plugins/datacache.io/csi.sock"
    start_driver(OPTIONS, f"--register={plugins}", f"--kubelet-endpoint={path}")
    assert kubelet.GetInfo().endpoint == path


def test_an_upgrade_is_never_without_a_registration(start_driver: StartDriver, plugins: Path, kubelet: Client) -> None:
    socket = plugins / "datacache.io-reg.sock"
    old = start_driver(OPTIONS, f"--register={plugins}", "--kubelet-endpoint=/old")
    number = socket.stat().st_ino
    start_driver(OPTIONS, f"--register={plugins}", "--kubelet-endpoint=/new")
    assert socket.stat().st_ino != number
    assert old.stop() == 0
    assert socket.exists()  # not the old one's any more, so it was left alone
    assert kubelet.GetInfo().endpoint == "/new"
    assert os.listdir(plugins) == [socket.name]


def test_what_a_killed_driver_left_is_replaced(start_driver: StartDriver, plugins: Path, kubelet: Client) -> None:
    old = start_driver(OPTIONS, f"--register={plugins}", "--kubelet-endpoint=/old")
    old.kill()
    assert os.listdir(plugins) == ["datacache.io-reg.sock"]
    start_driver(OPTIONS, f"--register={plugins}", "--kubelet-endpoint=/new")
    assert kubelet.GetInfo().endpoint == "/new"
