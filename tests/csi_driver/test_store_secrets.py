"""Whose credentials open what: of volumes that bring store credentials along in a Secret."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import fuse_mount
from csi_driver.node.service import NodeService
from csi_driver.status import status_of
from datacache.api import create_snapshot
from datacache.core.errors import MountError
from datacache.settings import Settings, StoreOptions, load_settings
from datacache.store.credentials import CredentialFiles
from tests.csi_driver.driver import capability
from tests.csi_driver.kubelet import Kubelet, needs_root
from tests.promises import promise
from tests.servers import RcloneS3

pytestmark = needs_root


@pytest.fixture
def bucket(rclone_s3: RcloneS3) -> str:
    name = f"secrets-{os.urandom(6).hex()}"
    rclone_s3.make_bucket(name)
    return name


def secret_of(server: RcloneS3, **more: str) -> dict[str, str]:
    keys = {"access_key_id": server.access_key, "secret_access_key": server.secret_key}
    return keys | {"endpoint_url": server.endpoint} | more


@promise("Credentials of a bucket's volume are used by its mount alone")
def test_a_buckets_mount_has_its_own_credentials_and_nobody_else_has_them(
    rclone_s3: RcloneS3, bucket: str, kubelet: Kubelet, settings: Settings
) -> None:
    url = f"s3://{bucket}/out"

    def code(volume: str, namespace: str, secrets: dict[str, str]) -> str:
        context = {"bucket": url, "namespace": namespace} | ({"credentials": "secret"} if secrets else {})
        return kubelet.code("NodeStageVolume", kubelet.stage_request(volume, context, secrets=secrets))[0]

    (rclone_s3.root / bucket / "out").mkdir()
    (rclone_s3.root / bucket / "out" / "there").write_text("stored")
    good, other = secret_of(rclone_s3), secret_of(rclone_s3, access_key_id="another")
    assert code("a", "lab", good) == "OK"
    assert not CredentialFiles(settings.credentials_dir).owners()
    (info,) = fuse_mount.list_bucket_mounts(settings)
    assert info.config.direct
    assert code("b", "guests", other) == "FAILED_PRECONDITION"
    assert code("b", "guests", {}) == "FAILED_PRECONDITION"
    assert code("b", "lab", {}) == "FAILED_PRECONDITION"  # nor has its own namespace, without a Secret
    assert code("b", "guests", secret_of(rclone_s3, endpoint_url="http://127.0.0.1:9")) == "FAILED_PRECONDITION"
    assert code("b", "guests", good) == "OK"
    assert code("a", "lab", other) == "UNAUTHENTICATED"
    (kubelet.publish("a", {"bucket": url, "namespace": "lab", "credentials": "secret"}) / "file").write_text("x")
    assert (kubelet.target("a") / "there").read_text() == "stored"  # the daemon could not
    kubelet.hide("b")
    assert (kubelet.target("a") / "file").read_text() == "x"
    kubelet.hide("a")
    assert (rclone_s3.root / bucket / "out" / "file").read_text() == "x"
    assert list(settings.credentials_dir.iterdir()) == []


@promise("Credentials of a bucket's volume are used by its mount alone")
def test_a_secret_does_not_lead_to_the_credentials_of_a_store_of_the_node(
    rclone_s3: RcloneS3, bucket: str, settings: Settings, tmp_path: Path
) -> None:
    keys = {"access_key_id": rclone_s3.access_key, "secret_access_key": rclone_s3.secret_key}
    store = StoreOptions(name="own", url=f"s3://{bucket}", endpoint_url=rclone_s3.endpoint, **keys)
    kubelet = Kubelet(NodeService(replace(settings, stores=(store,)), "node-1"), tmp_path / "kubelet")
    context = {"bucket": f"s3://{bucket}/out", "credentials": "secret"}
    for secret in (secret_of(rclone_s3), secret_of(rclone_s3, endpoint_url="http://127.0.0.1:9")):
        code, words = kubelet.code("NodeStageVolume", kubelet.stage_request("v", context, secrets=secret))
        assert (code, "configuration" in words) == ("FAILED_PRECONDITION", True)
    assert not fuse_mount.list_bucket_mounts(settings)


@promise("Credentials of a bucket's volume are used by its mount alone")
def test_inline_volumes_share_a_bucket_only_with_the_same_secret_and_name_no_endpoint(
    rclone_s3: RcloneS3, bucket: str, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone_s3.endpoint)

    def code(volume: str, namespace: str, secrets: dict[str, str], url: str = f"s3://{bucket}/out") -> str:
        context = {"bucket": url, "csi.storage.k8s.io/pod.namespace": namespace}
        request = kubelet.publish_request(volume, context, volume, inline=True, secrets=secrets)
        return kubelet.code("NodePublishVolume", request)[0]

    good = secret_of(rclone_s3)
    assert code("a", "lab", good) == "INVALID_ARGUMENT"
    del good["endpoint_url"]
    assert code("a", "lab", good) == "OK"
    for namespace in ("lab", "guests"):  # nobody knows whose a running inline volume is
        assert code("b", namespace, good | {"secret_access_key": "another"}) == "FAILED_PRECONDITION"
        assert code("b", namespace, {}) == "PERMISSION_DENIED"
    assert code("b", "guests", good) == "OK"
    for volume in ("a", "b"):
        kubelet.unpublish(volume, volume)


@promise("Credentials of a bucket's volume are used by its mount alone")
def test_a_secret_opens_no_folder_of_the_node(kubelet: Kubelet, settings: Settings, tmp_path: Path) -> None:
    secret = {"access_key_id": "key", "secret_access_key": "secret"}
    context = {"bucket": (tmp_path / "of root").as_uri()}
    inline = kubelet.publish_request("i", context, inline=True, secrets=secret)
    assert kubelet.code("NodePublishVolume", inline)[0] == "PERMISSION_DENIED"
    staged = kubelet.stage_request("s", context | {"credentials": "secret"}, secrets=secret)
    assert kubelet.code("NodeStageVolume", staged)[0] == "PERMISSION_DENIED"
    assert not fuse_mount.list_bucket_mounts(settings)


@promise("Credentials of a bucket's volume are used by its mount alone")
def test_a_volume_with_a_secret_cannot_have_what_it_writes_uploaded_by_another_node(kubelet: Kubelet) -> None:
    writer = capability("MULTI_NODE_MULTI_WRITER", flags=("ack=replicated",))
    secret = {"access_key_id": "key", "secret_access_key": "secret"}
    staged = kubelet.stage_request("v", {"bucket": "s3://lab/out"}, secrets=secret, volume_capability=writer)
    code, words = kubelet.code("NodeStageVolume", staged)
    assert (code, "ack=uploaded" in words) == ("FAILED_PRECONDITION", True)


@promise("Credentials of a bucket's volume are used by its mount alone")
def test_a_mount_with_the_drivers_credentials_that_no_volume_has_serves_no_secret(
    rclone_s3: RcloneS3, bucket: str, service: NodeService, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    context = {"bucket": f"s3://{bucket}/out", "namespace": "lab"}
    kubelet.stage("own", context)
    record = service.records.get("own")
    assert record is not None
    service.records.remove("own")  # as a driver that was killed leaves it
    request = kubelet.stage_request("w", context, secrets=secret_of(rclone_s3, endpoint_url=""))
    assert kubelet.code("NodeStageVolume", request)[0] == "FAILED_PRECONDITION"
    service.records.put(record)
    kubelet.unstage("own")


def snapshot_of(server: RcloneS3, bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set of a bucket that the node's own credentials open from now on: NAME@ID."""
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    (server.root / bucket / "a").write_text("x")
    return f"faces@{create_snapshot('faces', f's3://{bucket}', settings=load_settings()).id}"


@promise("Credentials of a bucket's volume are used by its mount alone")
def test_a_secret_cannot_have_a_data_set_read_from_another_server(
    rclone_s3: RcloneS3, bucket: str, kubelet: Kubelet, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = snapshot_of(rclone_s3, bucket, monkeypatch)
    request = kubelet.stage_request("v", {"dataset": dataset}, secrets=secret_of(rclone_s3))
    assert kubelet.code("NodeStageVolume", request)[0] == "OK"
    assert not CredentialFiles(settings.credentials_dir).owners()  # the node's own open it
    kubelet.unstage("v")
    for more in ({"endpoint_url": "http://127.0.0.1:9"}, {"endpoint_url": "", "region": "x.example/"}):
        request = kubelet.stage_request("v", {"dataset": dataset}, secrets=secret_of(rclone_s3, **more))
        code, words = kubelet.code("NodeStageVolume", request)
        assert code in ("FAILED_PRECONDITION", "INVALID_ARGUMENT"), words
    assert not CredentialFiles(settings.credentials_dir).owners()


@promise("A data set is read with a Secret only where the store refuses the node's credentials")
def test_a_secret_does_not_take_the_place_of_the_nodes_credentials_while_the_store_is_away(
    rclone_s3: RcloneS3, bucket: str, kubelet: Kubelet, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = snapshot_of(rclone_s3, bucket, monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    secret = secret_of(rclone_s3, endpoint_url="")
    request = kubelet.stage_request("v", {"dataset": dataset}, secrets=secret)
    assert kubelet.code("NodeStageVolume", request)[0] == "UNAVAILABLE"
    assert not CredentialFiles(settings.credentials_dir).owners()
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone_s3.endpoint)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    assert kubelet.code("NodeStageVolume", request)[0] == "OK"
    assert CredentialFiles(settings.credentials_dir).owners() == {"csi-volume v"}


def test_what_kept_a_mount_from_starting_has_its_own_code() -> None:
    error = MountError("no")
    assert status_of(error)[0].name == "INTERNAL"
    error.kind = "StoreAccessError"
    assert status_of(error)[0].name == "UNAUTHENTICATED"
