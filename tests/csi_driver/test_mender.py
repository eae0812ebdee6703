"""Mounts whose processes are all gone, and what drivers leave that are killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

import fuse_mount
from csi_driver.metrics import COUNTS
from csi_driver.node import binds
from csi_driver.node.mounts import SharedMounts
from csi_driver.node.records import NodeVolume, SharedMount
from csi_driver.node.service import NodeService
from csi_driver.status import RequestError
from csi_driver.wire import csi_pb2 as csi
from datacache.settings import Settings
from datacache.store.credentials import CredentialFiles
from tests import leftovers
from tests.csi_driver.api_server import ApiServer
from tests.csi_driver.conftest import StartDriver
from tests.csi_driver.kubelet import Kubelet, mounted_below, needs_root
from tests.fuse_mount.bucket_mount import _kill
from tests.promises import promise

pytestmark = needs_root
_ROUNDS = int(os.environ.get("DATACACHE_TEST_KILLS") or 8) // 4
"""How often each call is killed."""


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A folder whose mounts are seen in other mount namespaces, as a kubelet's is."""
    folder = tmp_path / "kubelet"
    folder.mkdir()
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "--make-rshared", folder], check=True)
    yield folder
    leftovers.unmount_under(folder)
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def kubelet(service: NodeService, shared: Path) -> Kubelet:
    return Kubelet(service, shared)


class Pod:
    """A shell in a mount namespace of its own with the volume at a place of its own, as a runtime makes a container
    with HostToContainer."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume.with_name("in the container")
        self._volume.mkdir()
        command = ["unshare", "-m", "--propagation", "slave", "sh", "-c", 'mount --bind "$0" "$1" && exec sh']
        self._shell = subprocess.Popen(
            [*command, volume, self._volume], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self, name: str) -> str:
        """The first line of a file of the volume, or ''."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"echo $(cat '{self._volume}/{name}' 2>/dev/null)\n")
        self._shell.stdin.flush()
        return self._shell.stdout.readline().strip()

    def close(self) -> None:
        self._shell.kill()
        self._shell.communicate()


@pytest.fixture
def pod(kubelet: Kubelet, masks: dict[str, str]) -> Iterator[Pod]:
    """With v1 of the masks, under the volume `v`."""
    pod = Pod(kubelet.show("v", {"dataset": f"mask@{masks['v1']}"}))
    assert pod.read("VERSION") == "v1"
    yield pod
    pod.close()


def kill_mounts(settings: Settings) -> None:
    """All processes of all mounts of the home, and whatever could bring them back."""
    while found := _processes_of(settings.home, b"fuse_mount", b"datacache.daemon"):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes_of(home: Path, *programs: bytes) -> list[int]:
    """Those of a home that run one of these programs."""
    found = []
    for pid in leftovers.processes_with("DATACACHE_HOME", lambda value: value == str(home)):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for one that has ended
            if any(program in words for program in programs):
                found.append(pid)
    return found


def test_a_mount_that_lost_all_its_processes_is_mounted_anew_under_running_pods(
    pod: Pod, service: NodeService, kubelet: Kubelet, settings: Settings
) -> None:
    target = kubelet.target("v")
    assert not kubelet.stats("v", target).volume_condition.abnormal
    mends = _mends()
    for name in ("README", "val/c.jpg"):  # what was read before may be in the page cache
        kill_mounts(settings)
        assert pod.read(name) == ""
        assert kubelet.stats("v", target).volume_condition.abnormal
        service.mender.mend()
        assert pod.read(name) == f"v1 {name}"
        assert (target / name).read_text() == f"v1 {name}"
    assert _mends() == mends + 2
    condition = kubelet.stats("v", target).volume_condition
    assert condition.abnormal
    assert "HostToContainer" in condition.message
    kubelet.publish("v", _context(service, "v"))  # a kubelet that was started again
    assert kubelet.stats("v", target).volume_condition == condition
    again = kubelet.publish("v", _context(service, "v"), "pod-2")
    assert not kubelet.stats("v", again).volume_condition.abnormal
    kubelet.hide("v", "pod-1", "pod-2")
    assert mounted_below(kubelet.folder) == mounted_below(settings.home) == []


def _mends() -> int:
    return next(
        int(line.split()[1]) for line in COUNTS.render() if line.startswith("datacache_csi_mounts_mended_total")
    )


def _context(service: NodeService, volume: str) -> dict[str, str]:
    record = service.records.get(volume)
    assert record is not None
    return record.context


@promise("Each pod whose volume was lost and mounted anew has an Event that says so")
def test_each_pod_of_a_lost_mount_gets_an_event_also_if_the_api_is_away_at_first(
    masks: dict[str, str],
    start_driver: StartDriver,
    shared: Path,
    settings: Settings,
    cluster: ApiServer,
    kubeconfig: Path,
) -> None:
    cluster.fail, cluster.failing = 503, "events"
    kubelet = Kubelet(start_driver("--mode=node", f"--kubeconfig={kubeconfig}").client, shared)
    context = {"dataset": f"mask@{masks['v1']}"}
    kubelet.stage("v", context)
    for number in (1, 2):
        pod = {"namespace": "lab", "name": f"train-{number}", "uid": f"uid-{number}"}
        whose = {f"csi.storage.k8s.io/pod.{name}": value for name, value in pod.items()}
        kubelet.publish("v", context | whose, f"pod-{number}")
    kill_mounts(settings)
    cluster.wait_for("events")
    cluster.fail = 0
    wait_until(lambda: len(cluster.events) == 2)
    for event in cluster.events.values():
        assert (event["type"], event["reason"], event["involvedObject"]["kind"]) == (
            "Warning",
            "VolumeMountedAnew",
            "Pod",
        )
        assert "HostToContainer" in event["message"]
    told = {(each["involvedObject"]["name"], each["involvedObject"]["uid"]) for each in cluster.events.values()}
    assert told == {("train-1", "uid-1"), ("train-2", "uid-2")}
    kubelet.hide("v", "pod-1", "pod-2")


def wait_until(ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.05)


def test_calls_on_a_dead_mount_repair_it(masks: dict[str, str], kubelet: Kubelet, settings: Settings) -> None:
    context = {"dataset": f"mask@{masks['v1']}"}
    kubelet.show("v", context)
    with closing(Pod(kubelet.publish("inline", context, inline=True))) as pod:
        assert pod.read("VERSION") == "v1"
        kill_mounts(settings)
        assert (kubelet.publish("v", context, "pod-2") / "VERSION").read_text() == "v1"
        assert (kubelet.publish("v", context) / "VERSION").read_text() == "v1"
        kubelet.publish("inline", context, inline=True)
        assert pod.read("README") == "v1 README"
    kubelet.unpublish("inline")
    kubelet.stage("v", context)
    kill_mounts(settings)
    kubelet.hide("v", "pod-1", "pod-2")
    assert mounted_below(kubelet.folder) == mounted_below(settings.home) == []


def test_what_was_written_to_a_bucket_whose_mount_died_is_in_it_in_the_end(
    bucket: Path, service: NodeService, kubelet: Kubelet, settings: Settings
) -> None:
    target = kubelet.show("w", {"bucket": f"s3://{bucket.name}/out"})
    (target / "a").write_text("before")
    with open(target / "a", "rb+") as file:
        os.fsync(file.fileno())
    kill_mounts(settings)
    service.mender.mend()
    assert (target / "a").read_text() == "before"
    (target / "b").write_text("after")
    kill_mounts(settings)
    kubelet.hide("w")
    out = bucket / "out"
    assert {path.name: path.read_text() for path in out.iterdir()} == {"a": "before", "b": "after"}


def test_what_was_written_before_a_node_was_started_again_is_uploaded(
    bucket: Path, service: NodeService, kubelet: Kubelet, settings: Settings
) -> None:
    target = kubelet.show("w", {"bucket": f"s3://{bucket.name}/out"})
    (target / "a").write_text("before")
    kill_mounts(settings)
    for path in (*mounted_below(kubelet.folder), *mounted_below(settings.home)):
        binds.clear(path)
    service.mender.tidy(first=True)
    while service.records.get("w") is not None:
        kubelet.hide("w")
    assert (bucket / "out" / "a").read_text() == "before"
    assert mounted_below(settings.home) == []


def test_a_mount_that_does_not_answer_holds_no_call_up(
    masks: dict[str, str], kubelet: Kubelet, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("csi_driver.node.mounts._ANSWER_S", 0.3)
    context = {"dataset": f"mask@{masks['v1']}", "subpath": "train"}
    target = kubelet.show("v", context)
    (info,) = fuse_mount.list_mounts(settings)
    os.kill(info.pid, signal.SIGSTOP)  # first, as it starts the others
    stopped = _processes_of(settings.home, b"fuse_mount")
    assert {info.pid, *info.workers} <= {*stopped}
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    for pid in stopped:  # a signal is sent, and a thread may run on for a moment
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            threading.Event().wait(0.01)
    try:
        condition = kubelet.stats("v", target).volume_condition
        assert (condition.abnormal, "does not answer" in condition.message) == (True, True)
        request = kubelet.publish_request("v", context, "pod-2")
        assert kubelet.code("NodePublishVolume", request)[0] in ("OK", "UNAVAILABLE")
        kubelet.unpublish("v")
        assert not target.exists()
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    kubelet.hide("v", "pod-2")


def test_what_a_driver_left_that_was_killed_is_cleaned_up(
    masks: dict[str, str], service: NodeService, kubelet: Kubelet, settings: Settings
) -> None:
    context = {"dataset": f"mask@{masks['v1']}"}
    kubelet.show("lost", context)
    binds.clear(str(kubelet.target("lost")))
    kubelet.staging("lost").rmdir()
    kubelet.show("kept", {"dataset": f"mask@{masks['v2']}"})
    stray = settings.home / "csi" / "mounts" / "stray"
    stray.mkdir()
    fuse_mount.mount_snapshot(f"mask@{masks['v3']}", stray, settings=settings)
    service.mender.tidy(first=True)
    assert len(mounted_below(settings.home)) == 1
    assert len(os.listdir(settings.home / "csi" / "mounts")) == 1
    assert [record.volume_id for record in service.records.all()] == ["kept"]
    assert (kubelet.target("kept") / "VERSION").read_text() == "v2"
    kubelet.hide("lost")
    kubelet.hide("kept")


def _staged(name: str, mount: SharedMount) -> NodeVolume:
    return NodeVolume(volume_id=name, context={"dataset": mount.source}, mount=mount, mode=3, staging="/staging")


def test_a_volume_that_comes_while_strays_are_cleaned_up_keeps_its_credentials(
    service: NodeService, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, read = CredentialFiles(settings.credentials_dir), service.records.all
    keys = {"access_key_id": "some", "secret_access_key": "thing"}
    files.put("csi-volume stray", "s3://lab", keys)
    (settings.home / "csi" / "mounts" / "stray").mkdir()

    def read_before_another_comes() -> list[NodeVolume]:
        there = read()
        name = f"v{len(there)}"
        service.records.put(_staged(name, SharedMount(source=f"mask@{name}", bucket=False)))
        files.put(f"csi-volume {name}", "s3://lab", keys)
        return there

    monkeypatch.setattr(service.records, "all", read_before_another_comes)
    service.preparation.forget_strays()
    assert os.listdir(settings.home / "csi" / "mounts") == []
    assert files.owners() == {f"csi-volume {record.volume_id}" for record in read()} != set()


def test_a_mount_that_gets_a_volume_while_strays_are_ended_stays(
    service: NodeService, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [SharedMount(source=f"mask@{number}", bucket=False) for number in range(2)]
    first, second = sorted(shared, key=lambda mount: mount.key)
    for mount in shared:
        (settings.home / "csi" / "mounts" / mount.key).mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "stray", settings.home / "csi" / "mounts" / mount.key], check=True)
    end_at = SharedMounts.end_at

    def end_while_another_comes(mounts: SharedMounts, point: str) -> None:
        with pytest.raises(RequestError), service.records.lock_mount(first.key, timeout_s=0.0):
            pass
        service.records.put(_staged("v", second))
        end_at(mounts, point)

    monkeypatch.setattr(SharedMounts, "end_at", end_while_another_comes)
    service.preparation.forget_strays()
    [left] = mounted_below(settings.home)
    assert left.endswith(second.key)
    binds.clear(left)


@pytest.mark.slow
def test_a_driver_that_is_killed_in_the_middle_of_calls_goes_on_where_it_was(
    masks: dict[str, str],
    start_driver: StartDriver,
    shared: Path,
    settings: Settings,
    bucket: Path,
) -> None:
    driver = start_driver("--mode=node")
    kubelet = Kubelet(driver.client, shared)
    dice = random.Random(11)
    contexts = [{"dataset": f"mask@{masks['v1']}"}, {"bucket": f"s3://{bucket.name}/out"}]
    longest_s = {"NodeStageVolume": 1.0, "NodePublishVolume": 0.03, "NodeUnpublishVolume": 0.03}
    for number in range(_ROUNDS):
        context = contexts[number % 2]
        for rpc, request in _life(kubelet, context):
            delay_s = dice.uniform(0.0, longest_s.get(rpc, 0.5))
            killer = threading.Timer(delay_s, _kill, [driver.process.pid])
            killer.start()
            with contextlib.suppress(grpc.RpcError):
                getattr(driver.client, rpc)(request, timeout_s=2.0)
            killer.join()
            driver.kill()
            driver.start()
            while (code := kubelet.code(rpc, request))[0] in ("ABORTED", "UNAVAILABLE"):
                pass
            assert code == ("OK", ""), f"{rpc}, round {number}, killed after {delay_s}"
            target = kubelet.target("v")
            if rpc == "NodePublishVolume" and "dataset" in context:
                assert (target / "VERSION").read_text() == "v1"
            elif rpc == "NodePublishVolume":
                (target / str(number)).write_text(str(number))
        assert mounted_below(shared) == []
        if "bucket" in context:
            assert (bucket / "out" / str(number)).read_text() == str(number)
    assert mounted_below(settings.home) == []
    assert not list((settings.home / "csi").rglob("*.json"))


def _life(kubelet: Kubelet, context: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """The calls on a volume, in turn."""
    yield "NodeStageVolume", kubelet.stage_request("v", context)
    yield "NodePublishVolume", kubelet.publish_request("v", context)
    target, staging = str(kubelet.target("v")), str(kubelet.staging("v"))
    yield "NodeUnpublishVolume", csi.NodeUnpublishVolumeRequest(volume_id="v", target_path=target)
    yield "NodeUnstageVolume", csi.NodeUnstageVolumeRequest(volume_id="v", staging_target_path=staging)
