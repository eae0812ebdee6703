"""Volumes staged, published and taken away again, with real mounts."""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fuse_mount
from csi_driver.node.records import NodeVolume, PublishedTarget, SharedMount
from csi_driver.node.service import NodeService
from csi_driver.volumes import MountOptions
from csi_driver.wire import csi_pb2 as csi
from datacache import open_snapshot
from datacache.api import open_catalog
from datacache.catalog import refs
from datacache.catalog.access import set_access
from datacache.core.errors import UploadError
from datacache.settings import Settings
from tests import leftovers
from tests.csi_driver.driver import capability
from tests.csi_driver.kubelet import Kubelet, mounted_below, needs_root
from tests.promises import promise
from tests.servers import RcloneS3

pytestmark = needs_root
WRITE = capability("MULTI_NODE_MULTI_WRITER")


# --- data sets ------------------------------------------------------------------------------------------------------


def test_a_data_set_is_a_read_only_folder_for_any_user_until_it_is_taken_away(
    masks: dict[str, str], kubelet: Kubelet, settings: Settings
) -> None:
    access = {"volume_capability": capability("SINGLE_NODE_WRITER")}
    target = kubelet.show("v", {"dataset": f"mask@{masks['v2']}"}, **access)
    assert (target / "VERSION").read_text() == "v2"
    with pytest.raises(OSError, match="Read-only"):
        (target / "new").touch()
    said = subprocess.run(
        ["cat", "VERSION"], cwd=target, user=1234, group=4321, extra_groups=[], capture_output=True, check=True
    )
    assert said.stdout == b"v2"
    answer = kubelet.stats("v", target)
    assert {each.unit: each.total for each in answer.usage}[csi.VolumeUsage.INODES] == len(open_snapshot("mask@v2"))
    assert not answer.volume_condition.abnormal
    kubelet.hide("v")
    assert not target.exists()
    assert mounted_below(kubelet.folder) == mounted_below(settings.home) == []
    assert not list((settings.home / "csi").rglob("*.json"))
    assert os.listdir(settings.home / "csi" / "mounts") == []


def test_nothing_is_mounted_at_the_staging_path(masks: dict[str, str], kubelet: Kubelet) -> None:
    """A kubelet looks for other mounts of the file system there, and does not unstage while it finds one."""
    target = kubelet.show("v", {"dataset": f"mask@{masks['v1']}"})
    assert not os.path.ismount(kubelet.staging("v"))
    assert kubelet.stats("v", kubelet.staging("v")).usage[0].total == kubelet.stats("v", target).usage[0].total
    kubelet.hide("v")


def test_volumes_of_one_snapshot_share_a_mount_and_the_last_one_ends_it(
    masks: dict[str, str], kubelet: Kubelet, settings: Settings
) -> None:
    context = {"dataset": f"mask@{masks['v1']}"}
    targets = [kubelet.show(volume, context, pod) for volume, pod in (("a", "p1"), ("b", "p2"))]
    targets.append(kubelet.publish("b", context, "p3"))
    assert len({target.stat().st_dev for target in targets}) == 1
    assert len(mounted_below(settings.home)) == 1
    kubelet.hide("a", "p1")
    assert (targets[1] / "VERSION").read_text() == "v1"
    kubelet.hide("b", "p2", "p3")
    assert mounted_below(settings.home) == mounted_below(kubelet.folder) == []


def test_everything_can_be_asked_again(masks: dict[str, str], kubelet: Kubelet) -> None:
    context = {"dataset": f"mask@{masks['v1']}"}
    for _ in range(3):
        target = kubelet.show("v", context)
    assert mounted_below(kubelet.folder) == [str(target)]
    for _ in range(3):
        kubelet.unpublish("v")
    assert not target.exists()
    for _ in range(3):
        kubelet.unstage("v")
    kubelet.hide("never-seen")


def test_a_reference_that_moves_is_resolved_once_for_all_nodes(
    masks: dict[str, str], kubelet: Kubelet, settings: Settings
) -> None:
    target = kubelet.show("static", {"dataset": "mask@v1"})
    with closing(open_catalog(settings)) as catalog:
        catalog.set_tag("mask", "v1", masks["v3"], move=True)
    kubelet.hide("static")
    assert kubelet.show("static", {"dataset": "mask@v1"}) == target
    assert (target / "VERSION").read_text() == "v1"
    kubelet.hide("static")
    with closing(open_catalog(settings)) as catalog:
        assert refs.forget_volume(catalog, "static")
    assert (kubelet.show("static", {"dataset": "mask@v1"}) / "VERSION").read_text() == "v3"
    assert (kubelet.publish("inline", {"dataset": "mask@v1"}, inline=True) / "VERSION").read_text() == "v3"


def test_a_subpath_is_all_a_pod_sees(masks: dict[str, str], kubelet: Kubelet) -> None:
    target = kubelet.show("v", {"dataset": f"mask@{masks['v1']}", "subpath": "train/deep"})
    assert os.listdir(target) == ["b.jpg"]
    for wrong in ("train/no", "README"):
        context = {"dataset": f"mask@{masks['v1']}", "subpath": wrong}
        kubelet.stage(f"w-{wrong}", context)
        code, words = kubelet.code("NodePublishVolume", kubelet.publish_request(f"w-{wrong}", context))
        assert (code, wrong in words) == ("INVALID_ARGUMENT", True)


def test_warm_waits_until_all_is_here_and_pin_lasts_as_long_as_the_volume(
    masks: dict[str, str], kubelet: Kubelet, settings: Settings
) -> None:
    from datacache.api import connect

    target = kubelet.show("v", {"dataset": f"mask@{masks['v1']}", "warm": "wait", "pin": "true"})
    status = connect(settings).cache_status()
    assert [job["state"] for job in status["jobs"] if not job["background"]] == ["done"]
    assert status["pins"] == [f"mask@{masks['v1'][:12]}"]
    assert (target / "README").read_text() == "v1 README"
    connect(settings).unpin(f"mask@{masks['v1']}")  # as a driver that was killed before it pinned leaves it
    kubelet.stage("v", {"dataset": f"mask@{masks['v1']}", "pin": "true", "warm": "wait"})
    assert connect(settings).cache_status()["pins"] == status["pins"]
    kubelet.hide("v")
    assert connect(settings).cache_status()["pins"] == []


# --- buckets --------------------------------------------------------------------------------------------------------


def test_what_a_pod_writes_is_in_the_bucket_when_its_volume_is_unstaged(
    bucket: Path, kubelet: Kubelet, settings: Settings
) -> None:
    context = {"bucket": f"s3://{bucket.name}/out"}
    target = kubelet.show("w", context)
    (target / "result.txt").write_text("42")
    kubelet.hide("w")
    assert (bucket / "out" / "result.txt").read_text() == "42"
    assert mounted_below(settings.home) == mounted_below(kubelet.folder) == []


def test_a_bucket_can_be_published_read_only(bucket: Path, kubelet: Kubelet) -> None:
    context = {"bucket": f"s3://{bucket.name}/out"}
    writer = kubelet.show("w", context)
    (writer / "a").write_text("x")
    reader = kubelet.publish("w", context, "pod-2", readonly=True)
    assert (reader / "a").read_text() == "x"
    with pytest.raises(OSError, match="Read-only") as caught:
        (reader / "b").touch()
    assert caught.value.errno == errno.EROFS
    assert os.statvfs(reader).f_flag & (os.ST_NOSUID | os.ST_NODEV)
    code, _ = kubelet.code("NodePublishVolume", kubelet.publish_request("w", context, "pod-2"))
    assert code == "ALREADY_EXISTS"


def test_the_group_of_a_pod_can_write_to_a_bucket(bucket: Path, kubelet: Kubelet) -> None:
    grouped = capability("MULTI_NODE_MULTI_WRITER")
    grouped.mount.volume_mount_group = "5000"
    context = {"bucket": f"s3://{bucket.name}/out", "subpath": "deep/er"}
    target = kubelet.show("w", context, volume_capability=grouped)
    command = ["sh", "-c", "echo hello > file && stat -c %g file"]
    said = subprocess.run(
        command, cwd=target, user=1234, group=1234, extra_groups=[5000], capture_output=True, check=True
    )
    assert (target / "file").read_text() == "hello\n"
    assert said.stdout == b"5000\n"
    other = capability("MULTI_NODE_MULTI_WRITER")
    other.mount.volume_mount_group = "6000"
    request = kubelet.publish_request("w", context, "pod-2", volume_capability=other)
    code, words = kubelet.code("NodePublishVolume", request)
    assert code == "FAILED_PRECONDITION"
    assert "fsGroup" in words


@promise("An unstaged bucket volume leaves no staging area on the node")
def test_a_volume_that_is_unstaged_leaves_no_staging_area(bucket: Path, kubelet: Kubelet, settings: Settings) -> None:
    target = kubelet.show("w", {"bucket": f"s3://{bucket.name}/out"})
    (target / "a").write_text("x")
    assert len(list((settings.home / "staging").iterdir())) == 1
    kubelet.hide("w")
    assert (bucket / "out" / "a").read_text() == "x"
    assert list((settings.home / "staging").iterdir()) == []


@promise("A bucket without fsGroup is root's (0755): others read it, and only root writes")
def test_without_a_group_a_bucket_is_roots_and_others_may_read(bucket: Path, kubelet: Kubelet) -> None:
    target = kubelet.show("w", {"bucket": f"s3://{bucket.name}/out"}, volume_capability=of_group(""))
    found = target.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (0, 0, 0o755)
    tried = subprocess.run(["touch", "file"], cwd=target, user=1234, group=1234, extra_groups=[], check=False)
    assert tried.returncode != 0
    assert list(target.iterdir()) == []


@promise("A data set's volume reports no fill level, so that alerts on full volumes stay quiet")
def test_a_data_set_is_never_about_to_be_full(masks: dict[str, str], kubelet: Kubelet) -> None:
    target = kubelet.show("v", {"dataset": f"mask@{masks['v1']}"})
    for usage in kubelet.stats("v", target).usage:
        assert usage.total == usage.available > 0
        assert usage.used == 0


def of_group(group: str) -> csi.VolumeCapability:
    """Return what a kubelet asks for a pod with this fsGroup; '' for none."""
    asked = capability("MULTI_NODE_MULTI_WRITER")
    asked.mount.volume_mount_group = group
    return asked


def group_of_new_file(folder: Path, name: str) -> int:
    (folder / name).touch()
    return (folder / name).stat().st_gid


@promise("A pod with another fsGroup gets a bucket volume when its other pods have ended")
@pytest.mark.parametrize("staged_again", [False, True], ids=["", "after a restart of the kubelet"])
def test_a_pod_with_another_fsgroup_gets_the_bucket_when_the_others_have_ended(
    bucket: Path, kubelet: Kubelet, settings: Settings, staged_again: bool
) -> None:
    context = {"bucket": f"s3://{bucket.name}/out"}
    target = kubelet.show("w", context, volume_capability=of_group("5000"))
    assert group_of_new_file(target, "first") == 5000
    request = kubelet.publish_request("w", context, "pod-2", volume_capability=of_group("6000"))
    code, words = kubelet.code("NodePublishVolume", request)
    assert (code, "gid=5000" in words, "gid=6000" in words) == ("FAILED_PRECONDITION", True, True)
    again = kubelet.stage_request("w", context, volume_capability=of_group("6000"))
    assert kubelet.code("NodeStageVolume", again)[0] == "ALREADY_EXISTS"
    kubelet.unpublish("w")
    if staged_again:
        kubelet.stage("w", context, volume_capability=of_group("6000"))
    target = kubelet.publish("w", context, "pod-2", volume_capability=of_group("6000"))
    assert group_of_new_file(target, "second") == 6000
    assert (bucket / "out" / "first").exists()
    kubelet.hide("w", "pod-2")
    assert (bucket / "out" / "second").exists()
    assert mounted_below(settings.home) == mounted_below(kubelet.folder) == []
    assert not list((settings.home / "csi").rglob("*.json"))


@promise("A pod with another fsGroup gets a bucket volume when its other pods have ended")
@pytest.mark.parametrize("first", ["5000", ""])
def test_of_pods_with_and_without_a_group_the_order_does_not_decide(bucket: Path, kubelet: Kubelet, first: str) -> None:
    context = {"bucket": f"s3://{bucket.name}/out"}
    second = "" if first else "5000"
    kubelet.show("w", context, volume_capability=of_group(first))
    request = kubelet.publish_request("w", context, "pod-2", volume_capability=of_group(second))
    code, words = kubelet.code("NodePublishVolume", request)
    assert (code, "fsGroup" in words) == ("FAILED_PRECONDITION", True)
    kubelet.unpublish("w")
    target = kubelet.publish("w", context, "pod-2", volume_capability=of_group(second))
    assert group_of_new_file(target, "file") == int(second or 0)


@promise("A pod with another fsGroup gets a bucket volume when its other pods have ended")
def test_options_of_the_class_hold_for_pods_of_every_group(bucket: Path, kubelet: Kubelet) -> None:
    context = {"bucket": f"s3://{bucket.name}/out"}
    for pod, group in (("pod-1", "5000"), ("pod-2", ""), ("pod-3", "6000")):
        asked = of_group(group)
        asked.mount.mount_flags.extend(["gid=7000", "umask=002"])
        target = kubelet.show("w", context, pod, volume_capability=asked)
        assert group_of_new_file(target, pod) == 7000


@promise("A volume's credentials go along with its mount, and nothing of them is left")
def test_credentials_of_a_volume_go_along_to_the_mount_of_another_group(
    rclone_s3: RcloneS3, kubelet: Kubelet, settings: Settings
) -> None:
    name = f"moved-{os.urandom(6).hex()}"
    rclone_s3.make_bucket(name)
    context = {"bucket": f"s3://{name}/out", "credentials": "secret"}
    kubelet.stage("w", context, volume_capability=of_group("5000"), secrets=secret_of(rclone_s3))
    target = kubelet.publish("w", context, volume_capability=of_group("6000"))
    assert group_of_new_file(target, "file") == 6000
    assert len(list(settings.credentials_dir.rglob("*.json"))) == 1
    kubelet.hide("w")
    assert (rclone_s3.root / name / "out" / "file").exists()
    assert everything_below(settings.credentials_dir) == b""


@promise("A bucket's mount that no pod has stands in no other volume's way")
def test_a_bucket_prefix_is_mounted_in_one_way_on_a_node_as_its_pods_have_it(
    bucket: Path, kubelet: Kubelet, settings: Settings
) -> None:
    context = {"bucket": f"s3://{bucket.name}/out"}
    mine, other = capability("MULTI_NODE_MULTI_WRITER"), capability("MULTI_NODE_MULTI_WRITER", flags=("uid=1000",))
    target = kubelet.show("a", context)
    (target / "mine").write_text("x")
    code, words = kubelet.code("NodeStageVolume", kubelet.stage_request("b", context, volume_capability=other))
    assert code == "FAILED_PRECONDITION"
    assert "uid=0" in words
    kubelet.unpublish("a")
    target = kubelet.show("b", context, volume_capability=other)
    assert (bucket / "out" / "mine").exists()
    assert target.stat().st_uid == 1000
    request = kubelet.publish_request("a", context, volume_capability=mine)
    assert kubelet.code("NodePublishVolume", request)[0] == "FAILED_PRECONDITION"
    kubelet.unpublish("b")
    kubelet.publish("a", context)  # which is staged still, as far as the kubelet knows
    kubelet.unstage("b")
    kubelet.hide("a")
    assert mounted_below(settings.home) == []


@promise("A bucket's mount that no pod has stands in no other volume's way")
def test_a_volume_whose_mount_gave_way_stays_staged_when_the_driver_starts_again(
    bucket: Path, kubelet: Kubelet, service: NodeService
) -> None:
    context = {"bucket": f"s3://{bucket.name}/out"}
    other = capability("MULTI_NODE_MULTI_WRITER", flags=("uid=1000",))
    kubelet.stage("a", context)
    kubelet.show("b", context, volume_capability=other)
    service.mender.tidy(first=True)
    kubelet.hide("b")
    kubelet.publish("a", context)


def test_a_subpath_cannot_leave_a_bucket_through_a_symbolic_link(bucket: Path, kubelet: Kubelet) -> None:
    whole = kubelet.show("w", {"bucket": f"s3://{bucket.name}/out"})
    (whole / "etc").symlink_to("/etc")
    (whole / "up").symlink_to("..")
    (whole / "inside").mkdir()
    (whole / "link").symlink_to("inside")
    for wrong in ("etc", "etc/ssl", "up", "link"):
        context = {"bucket": f"s3://{bucket.name}/out", "subpath": wrong}
        kubelet.stage(f"v-{wrong.replace('/', '-')}", context)
        request = kubelet.publish_request(f"v-{wrong.replace('/', '-')}", context)
        code, words = kubelet.code("NodePublishVolume", request)
        assert (code, "symbolic link" in words or "no folder" in words) == ("INVALID_ARGUMENT", True), wrong


def test_a_volume_is_unstaged_only_when_the_bucket_has_everything(
    bucket: Path, service: NodeService, kubelet: Kubelet, settings: Settings
) -> None:
    service.preparation.flush_s = 0.5
    long = capability("MULTI_NODE_MULTI_WRITER", flags=("ttl=600",))
    target = kubelet.show("w", {"bucket": f"s3://{bucket.name}/out"}, volume_capability=long)
    assert os.listdir(target) == []
    folder = bucket
    folder.rename(folder.with_name(f"{bucket.name}-away"))
    (target / "a").write_text("x")
    with pytest.raises(UploadError):
        fuse_mount.flush_mount(fuse_mount.list_bucket_mounts(settings)[0], timeout_s=0.5, progress=lambda _: None)
    condition = kubelet.stats("w", target).volume_condition
    assert (condition.abnormal, "not uploaded" in condition.message) == (True, True)
    kubelet.unpublish("w")
    request = csi.NodeUnstageVolumeRequest(volume_id="w", staging_target_path=str(kubelet.staging("w")))
    code, words = kubelet.code("NodeUnstageVolume", request)
    assert code == "UNAVAILABLE"
    assert "1 file" in words
    folder.with_name(f"{bucket.name}-away").rename(folder)
    while kubelet.code("NodeUnstageVolume", request)[0] == "UNAVAILABLE":
        pass
    assert (folder / "out" / "a").read_text() == "x"
    assert mounted_below(settings.home) == []


def test_a_volume_grows_while_it_is_used(bucket: Path, kubelet: Kubelet) -> None:
    target = kubelet.show("w", {"bucket": f"s3://{bucket.name}/out", "quota": str(2**20)})
    usage = kubelet.stats("w", target).usage
    assert [each.total for each in usage if each.unit == csi.VolumeUsage.BYTES] == [2**20]
    with pytest.raises(OSError, match=r"quota|space"):
        (target / "large").write_bytes(bytes(2**20 + 1))
    request = csi.NodeExpandVolumeRequest(
        volume_id="w", volume_path=str(target), capacity_range=csi.CapacityRange(required_bytes=2**22)
    )
    assert kubelet.call("NodeExpandVolume", request).capacity_bytes == 2**22
    (target / "large").write_bytes(bytes(2**20 + 1))


def test_a_mount_that_answers_with_an_error_is_said_to(
    service: NodeService, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = kubelet.target("v")
    target.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "volume", str(target)], check=True)
    mount = SharedMount(source="mask@0123", bucket=False)
    record = NodeVolume(volume_id="v", context={"dataset": mount.source}, mount=mount, mode=3)
    service.records.put(record.with_target(PublishedTarget(path=str(target), read_only=True)))

    def fail(_path: str) -> os.statvfs_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "statvfs", fail)
    condition = kubelet.stats("v", target).volume_condition
    assert condition.abnormal
    assert "Input/output error" in condition.message
    kubelet.unpublish("v")


# --- inline ---------------------------------------------------------------------------------------------------------


def test_an_inline_volume_lives_as_long_as_its_pod(masks: dict[str, str], kubelet: Kubelet, settings: Settings) -> None:
    context = {"dataset": "mask@v2", "csi.storage.k8s.io/pod.namespace": "lab"}
    target = kubelet.publish("csi-1", context, inline=True, volume_capability=capability("SINGLE_NODE_WRITER"))
    assert (target / "VERSION").read_text() == "v2"
    kubelet.unpublish("csi-1")
    assert mounted_below(settings.home) == mounted_below(kubelet.folder) == []
    assert not list((settings.home / "csi").rglob("*.json"))


def test_an_inline_volume_may_name_no_bucket_that_is_not_open(bucket: Path, kubelet: Kubelet) -> None:
    context = {"bucket": f"s3://{bucket.name}/out", "csi.storage.k8s.io/pod.namespace": "lab"}
    code, words = kubelet.code("NodePublishVolume", kubelet.publish_request("i", context, inline=True))
    assert code == "PERMISSION_DENIED"
    assert "Secret" in words


# --- who may ----------------------------------------------------------------------------------------------------------


def test_a_pod_of_a_namespace_that_is_not_allowed_or_not_the_volumes_gets_nothing(
    masks: dict[str, str], kubelet: Kubelet, settings: Settings
) -> None:
    with closing(open_catalog(settings)) as catalog:
        set_access(catalog, "mask", everybody=False, allow=["lab", "guests"])
    context = {"dataset": f"mask@{masks['v1']}"}
    provisioned = context | {"asked": "mask@v1", "namespace": "other"}
    assert kubelet.code("NodeStageVolume", kubelet.stage_request("p", provisioned))[0] == "PERMISSION_DENIED"
    kubelet.stage("p", provisioned | {"namespace": "lab"})
    kubelet.stage("v", context)
    name = "csi.storage.k8s.io/pod.namespace"
    for namespace, expected in (("lab", "OK"), ("other", "PERMISSION_DENIED"), ("", "PERMISSION_DENIED")):
        request = kubelet.publish_request("v", context | {name: namespace}, f"pod-{namespace}")
        assert kubelet.code("NodePublishVolume", request)[0] == expected
    request = kubelet.publish_request("p", provisioned | {"namespace": "lab", name: "guests"})
    assert kubelet.code("NodePublishVolume", request)[0] == "PERMISSION_DENIED"
    inline = context | {name: "other", "namespace": "lab", "asked": "mask@v1"}
    assert kubelet.code("NodePublishVolume", kubelet.publish_request("i", inline, inline=True))[0] == (
        "PERMISSION_DENIED"
    )
    unknown = {"dataset": "masks@v1", name: "other"}
    code, words = kubelet.code("NodePublishVolume", kubelet.publish_request("i", unknown, inline=True))
    assert code == "INVALID_ARGUMENT"
    assert "mask@" not in words.replace("masks", "")
    assert "mask " not in f"{words} ".replace("masks", "")


def test_a_data_set_that_shuts_somebody_out_goes_to_no_pod_of_an_unknown_namespace(
    masks: dict[str, str], kubelet: Kubelet, settings: Settings
) -> None:
    with closing(open_catalog(settings)) as catalog:
        set_access(catalog, "mask", everybody=True, deny=["guests"])
    context, name = {"dataset": f"mask@{masks['v1']}"}, "csi.storage.k8s.io/pod.namespace"
    kubelet.stage("v", context)
    for namespace, expected in (("lab", "OK"), ("guests", "PERMISSION_DENIED"), ("", "PERMISSION_DENIED")):
        request = kubelet.publish_request("v", context | {name: namespace}, f"pod-{namespace}")
        assert kubelet.code("NodePublishVolume", request)[0] == expected


# --- credentials ----------------------------------------------------------------------------------------------------


def secret_of(server: RcloneS3, **more: str) -> dict[str, str]:
    values = {
        "access_key_id": server.access_key,
        "secret_access_key": server.secret_key,
        "endpoint_url": server.endpoint,
    }
    return values | more


def test_wrong_credentials_of_the_node_are_said_as_such(
    bucket: Path, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    code, words = kubelet.code("NodeStageVolume", kubelet.stage_request("w", {"bucket": f"s3://{bucket.name}/out"}))
    assert (code, "not-the-secret" in words) == ("UNAUTHENTICATED", False)


def test_credentials_of_a_volume_are_tried_out_used_and_forgotten(
    rclone_s3: RcloneS3, kubelet: Kubelet, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"own-{os.urandom(6).hex()}"
    rclone_s3.make_bucket(name)
    context = {"bucket": f"s3://{name}/out", "credentials": "secret"}
    code, _ = kubelet.code("NodeStageVolume", kubelet.stage_request("w", context))
    assert code == "UNAUTHENTICATED"
    wrong = secret_of(rclone_s3, secret_access_key="not-the-secret")
    code, words = kubelet.code("NodeStageVolume", kubelet.stage_request("w", context, secrets=wrong))
    assert code == "UNAUTHENTICATED"
    assert "not-the-secret" not in words
    assert everything_below(settings.home / "csi") == everything_below(settings.credentials_dir) == b""
    kubelet.stage("w", context, secrets=secret_of(rclone_s3))
    target = kubelet.publish("w", context)
    (target / "a").write_text("x")
    assert rclone_s3.secret_key.encode() not in everything_below(settings.home / "csi")
    assert rclone_s3.secret_key.encode() not in everything_below(settings.home / "mounts")
    assert rclone_s3.secret_key.encode() not in command_lines_and_environments(settings.home)
    kubelet.hide("w")
    assert (rclone_s3.root / name / "out" / "a").read_text() == "x"
    assert everything_below(settings.credentials_dir) == b""
    assert rclone_s3.secret_key not in caplog.text


def everything_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def command_lines_and_environments(home: Path) -> bytes:
    found = b""
    for pid in leftovers.processes_with("DATACACHE_HOME", lambda value: value == str(home)):
        for name in ("cmdline", "environ"):
            found += Path(f"/proc/{pid}/{name}").read_bytes()
    return found


def test_a_volume_whose_staging_fails_is_not_used_by_it(service: NodeService, kubelet: Kubelet) -> None:
    context = {"bucket": "s3://nowhere/out", "credentials": "secret"}
    mount = SharedMount(source="s3://nowhere/out/", bucket=True, options=MountOptions().of_mount())
    unstaged = NodeVolume(volume_id="unstaged", context=context, mount=mount, mode=5)  # and not uploaded at once
    service.records.put(unstaged)
    for volume in ("new", "unstaged"):
        assert kubelet.code("NodeStageVolume", kubelet.stage_request(volume, context))[0] == "UNAUTHENTICATED"
    assert [record for record in service.records.all() if record.used] == []


# --- what lies in the way -------------------------------------------------------------------------------------------


def test_an_empty_file_at_a_target_is_replaced_and_what_is_mounted_there_is_unmounted(
    masks: dict[str, str], kubelet: Kubelet
) -> None:
    target = kubelet.target("v")
    target.mkdir()
    for _ in range(3):
        subprocess.run(["mount", "-t", "tmpfs", "left-over", str(target)], check=True)
    kubelet.target("v", "pod-2").touch()
    context = {"dataset": f"mask@{masks['v1']}"}
    kubelet.show("v", context)
    assert (target / "VERSION").read_text() == "v1"
    assert (kubelet.publish("v", context, "pod-2") / "VERSION").read_text() == "v1"
    for _ in range(3):
        subprocess.run(["mount", "-t", "tmpfs", "left-over", str(target)], check=True)
    kubelet.hide("v", "pod-1", "pod-2")
    assert not target.exists()


def test_a_target_into_which_somebody_wrote_meanwhile_is_not_thrown_away(kubelet: Kubelet) -> None:
    target = kubelet.target("v")
    target.mkdir()
    (target / "work").write_text("hours")
    request = csi.NodeUnpublishVolumeRequest(volume_id="v", target_path=str(target))
    code, words = kubelet.code("NodeUnpublishVolume", request)
    assert code != "OK"
    assert "work" in words
    assert (target / "work").read_text() == "hours"


# --- the codes of the specification ---------------------------------------------------------------------------------


def test_wrong_requests_get_the_codes_that_the_specification_asks_for(
    masks: dict[str, str], bucket: Path, kubelet: Kubelet
) -> None:
    data = {"dataset": f"mask@{masks['v1']}"}
    files = {"bucket": f"s3://{bucket.name}/codes"}
    kubelet.stage("staged", data)
    kubelet.show("used", files)
    block = capability()
    block.block.SetInParent()
    path = str(kubelet.target("used"))
    stats, expand = csi.NodeGetVolumeStatsRequest, csi.NodeExpandVolumeRequest
    stage, publish = kubelet.stage_request, kubelet.publish_request
    flags = capability("MULTI_NODE_MULTI_WRITER", flags=("uid=1", "colour=red"))
    single = capability("SINGLE_NODE_SINGLE_WRITER")
    table: list[tuple[str, Any, str]] = [
        ("NodeStageVolume", stage("", data), "INVALID_ARGUMENT volume_id"),
        ("NodeStageVolume", csi.NodeStageVolumeRequest(volume_id="a", volume_context=data), "INVALID_ARGUMENT staging"),
        ("NodeStageVolume", stage("a", data, volume_capability=None), "INVALID_ARGUMENT volume_capability"),
        ("NodeStageVolume", stage("a", data, volume_capability=block), "INVALID_ARGUMENT block"),
        ("NodeStageVolume", stage("a", files, volume_capability=flags), "INVALID_ARGUMENT colour=red"),
        ("NodeStageVolume", stage("a", {}, volume_capability=WRITE), "INVALID_ARGUMENT data set or a bucket"),
        ("NodeStageVolume", stage("a", {"dataset": "mask@v9"}), "INVALID_ARGUMENT v9"),
        ("NodeStageVolume", stage("staged", {"dataset": f"mask@{masks['v2']}"}), "ALREADY_EXISTS not with this"),
        ("NodePublishVolume", publish("", data), "INVALID_ARGUMENT volume_id"),
        ("NodePublishVolume", csi.NodePublishVolumeRequest(volume_id="a"), "INVALID_ARGUMENT target_path"),
        ("NodePublishVolume", publish("a", data, volume_capability=None), "INVALID_ARGUMENT volume_capability"),
        ("NodePublishVolume", publish("a", data), "FAILED_PRECONDITION not staged"),
        ("NodePublishVolume", publish("staged", {"dataset": "mask@v2"}), "FAILED_PRECONDITION volumeHandle"),
        ("NodePublishVolume", publish("staged", data, staging_target_path=""), "FAILED_PRECONDITION staging"),
        ("NodePublishVolume", publish("used", files, "p2", volume_capability=single), "FAILED_PRECONDITION single"),
        ("NodePublishVolume", publish("i", files | {"quota": "1"}, inline=True), "INVALID_ARGUMENT quota"),
        ("NodeUnpublishVolume", csi.NodeUnpublishVolumeRequest(), "INVALID_ARGUMENT volume_id"),
        ("NodeUnpublishVolume", csi.NodeUnpublishVolumeRequest(volume_id="a"), "INVALID_ARGUMENT target_path"),
        ("NodeUnstageVolume", csi.NodeUnstageVolumeRequest(), "INVALID_ARGUMENT volume_id"),
        ("NodeUnstageVolume", csi.NodeUnstageVolumeRequest(volume_id="a"), "INVALID_ARGUMENT staging_target_path"),
        ("NodeUnstageVolume", csi.NodeUnstageVolumeRequest(
            volume_id="used", staging_target_path=str(kubelet.staging("used"))), "FAILED_PRECONDITION still published"),
        ("NodeGetVolumeStats", stats(volume_path=path), "INVALID_ARGUMENT volume_id"),
        ("NodeGetVolumeStats", stats(volume_id="used"), "INVALID_ARGUMENT volume_path"),
        ("NodeGetVolumeStats", stats(volume_id="no", volume_path=path), "NOT_FOUND no volume"),
        ("NodeGetVolumeStats", stats(volume_id="used", volume_path="some/path"), "NOT_FOUND not at"),
        ("NodeExpandVolume", expand(volume_path=path), "INVALID_ARGUMENT volume_id"),
        ("NodeExpandVolume", expand(volume_id="used"), "INVALID_ARGUMENT volume_path"),
        ("NodeExpandVolume", expand(volume_id="no", volume_path="some/path"), "NOT_FOUND no volume"),
        ("NodeExpandVolume", expand(volume_id="used", volume_path=path, volume_capability=block), "INVALID_ARGUMENT"),
    ]  # fmt: skip
    for rpc, request, expected in table:
        code, words = kubelet.code(rpc, request)
        wanted, _, named = expected.partition(" ")
        assert code == wanted, f"{rpc} {request}: {words}"
        assert named in words, f"{rpc} {request}: {words}"


def test_a_node_says_who_it_is_and_what_it_can(kubelet: Kubelet) -> None:
    assert kubelet.call("NodeGetInfo", csi.NodeGetInfoRequest()).node_id == "node-1"
    found = kubelet.call("NodeGetCapabilities", csi.NodeGetCapabilitiesRequest()).capabilities
    names = {csi.NodeServiceCapability.RPC.Type.Name(each.rpc.type) for each in found}
    assert {"STAGE_UNSTAGE_VOLUME", "GET_VOLUME_STATS", "VOLUME_CONDITION", "EXPAND_VOLUME"} < names
