"""Access through a driver's socket, spoken to as the kubelet and the provisioner speak to it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from csi_driver.wire import csi_pb2 as csi
from datacache import connect
from datacache.api import create_snapshot, open_catalog
from datacache.catalog.access import set_access
from datacache.catalog.commit import commit_manifest
from datacache.core.ids import ObjectRef
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import Entry, Lineage, Naming, Source
from datacache.settings import Settings, load_settings
from datacache.store.local.store import etag_of
from tests import leftovers
from tests.csi_driver.api_server import ApiServer
from tests.csi_driver.conftest import StartDriver
from tests.csi_driver.driver import READ, Driver
from tests.csi_driver.kubelet import Kubelet, mounted_below, needs_root
from tests.promises import promise
from tests.servers import Mongod

pytestmark = needs_root
NAMESPACE = "csi.storage.k8s.io/pod.namespace"
SECRET = "nobody else's\n"
REFUSED = ("INVALID_ARGUMENT", "PERMISSION_DENIED", "FAILED_PRECONDITION")


class Ids(NamedTuple):
    """The snapshots of the data sets `open`, which is open to all, and `secret`, which is open to `lab` only."""

    open: str
    secret: str

    def foreign(self) -> list[str]:
        """Return references that lead to the secret one if an id is believed, whatever stands before it."""
        id = self.secret
        names = ["open", "doesnotexist", "Open", "OPEN", "secret2", "Secret", "a/secret"]
        shortened = [f"open@{id[:length]}" for length in (6, 12, 31)]
        return [*(f"{name}@{id}" for name in names), *shortened, f"open@{id.upper()}", f"Secret@{id[:12]}"]


@pytest.fixture
def ids(home: Path, bucket: Path) -> Ids:
    """Made in the catalog of the settings. Their objects lie in an S3 bucket."""
    for name, text in {"open": "for all\n", "secret": SECRET}.items():
        (bucket / name).mkdir()
        (bucket / name / "file").write_text(text)
    made = [create_snapshot(name, f"s3://{bucket.name}/{name}", tags=["v1"]).id for name in ("open", "secret")]
    with closing(open_catalog()) as catalog:
        set_access(catalog, "secret", everybody=False, allow=["lab"])
    return Ids(*made)


@pytest.fixture
def node(start_driver: StartDriver, tmp_path: Path) -> Iterator[Kubelet]:
    yield Kubelet(start_driver("--mode=node").client, tmp_path / "kubelet")
    leftovers.unmount_under(tmp_path)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def nothing_is_shown(node: Kubelet, home: Path) -> bool:
    return not mounted_below(node.folder) and not mounted_below(home)


@promise("An id opens nothing by itself")
def test_a_pod_has_no_id_of_another_data_set_inline(any_catalog: str, ids: Ids, node: Kubelet, home: Path) -> None:
    for number, ref in enumerate([*ids.foreign(), f"secret@{ids.secret}", "secret@v1", "secret"]):
        context = {"dataset": ref, NAMESPACE: "team", "asked": "open@v1", "namespace": "team"}
        for said in (context, {name: context[name] for name in ("dataset", NAMESPACE)}):
            code, words = node.code("NodePublishVolume", node.publish_request(f"i{number}", said, inline=True))
            assert code in REFUSED, (ref, code, words)
        assert nothing_is_shown(node, home), ref
    claimed = {"dataset": "secret", "namespace": "lab"}  # from a kubelet that does not say whose the pod is
    assert node.code("NodePublishVolume", node.publish_request("claimed", claimed, inline=True))[0] in REFUSED
    context = {"dataset": f"open@{ids.open}", NAMESPACE: "team"}
    assert (node.publish("own", context, inline=True) / "file").read_text() == "for all\n"
    assert (
        node.publish("lab", {"dataset": f"secret@{ids.secret}", NAMESPACE: "lab"}, inline=True) / "file"
    ).read_text() == SECRET


@promise("An id opens nothing by itself")
def test_a_volume_made_by_hand_has_no_id_of_another_data_set(
    any_catalog: str, ids: Ids, node: Kubelet, home: Path
) -> None:
    forged: tuple[dict[str, str], ...] = (
        {},
        {"asked": "open@v1"},
        {"asked": "open@v1", "namespace": "team"},
        {"namespace": "team"},
    )
    for number, ref in enumerate(ids.foreign()):
        for more in forged:
            context, volume = {"dataset": ref, **more}, f"s{number}"
            code, words = node.code("NodeStageVolume", node.stage_request(volume, context))
            assert code in REFUSED, (ref, more, code, words)
            publish = node.publish_request(volume, context | {NAMESPACE: "team"})
            assert node.code("NodePublishVolume", publish)[0] in REFUSED
        assert nothing_is_shown(node, home), ref


@promise("An id opens nothing by itself")
def test_two_volumes_of_one_handle_do_not_lend_each_other_their_names(ids: Ids, node: Kubelet, home: Path) -> None:
    """The one is staged, and the other, which is open, is published: a kubelet knows a volume by its handle."""
    staged = {"dataset": f"secret@{ids.secret}"}
    for asked in ({}, {"asked": "open@v1"}, {"asked": "open@latest"}, {"asked": f"open@{ids.open}"}):
        node.code("NodeStageVolume", node.stage_request("h", staged | asked))
        for ref in ("open@v1", "open", f"open@{ids.open}", f"open@{ids.secret}"):
            for more in ({}, asked):
                request = node.publish_request("h", {"dataset": ref, NAMESPACE: "team", **more})
                assert node.code("NodePublishVolume", request)[0] in REFUSED, (asked, ref)
        assert not mounted_below(node.folder / "pods")
        node.unstage("h")


@promise("An id opens nothing by itself")
def test_a_claim_is_given_no_id_of_another_data_set(
    any_catalog: str, ids: Ids, start_driver: StartDriver, cluster: ApiServer, kubeconfig: Path
) -> None:
    driver = start_driver("--mode=controller", f"--kubeconfig={kubeconfig}")
    for ref in [*ids.foreign(), f"secret@{ids.secret}"]:
        claim = cluster.put_claim("faces", {"datacache.io/dataset": ref}, namespace="team")
        request = csi.CreateVolumeRequest(name="faces", volume_capabilities=READ, parameters=claim)
        assert driver.client.code("CreateVolume", request)[0] in REFUSED, ref
        by_class = csi.CreateVolumeRequest(
            name="faces",
            volume_capabilities=READ,
            parameters=cluster.put_claim("faces", {}, namespace="team") | {"dataset": ref},
        )
        assert driver.client.code("CreateVolume", by_class)[0] in REFUSED, ref
    assert not driver.client.ListVolumes().entries


@promise("A volume of an unknown namespace hears nothing of a closed data set")
def test_what_a_closed_data_set_has_is_not_told_to_a_volume_of_nobody_knows_whom(ids: Ids, node: Kubelet) -> None:
    code, words = node.code("NodeStageVolume", node.stage_request("s", {"dataset": "secret@v9"}))
    assert code == "INVALID_ARGUMENT"
    assert "v1" not in words
    code, words = node.code("NodeStageVolume", node.stage_request("s", {"dataset": "open@v9"}))
    assert (code, "it has v1" in words) == ("INVALID_ARGUMENT", True)


@promise("A volume that was given goes on after its snapshot left the catalog, also after a kill")
def test_what_was_given_goes_on_and_revives_when_the_snapshot_was_removed(
    any_catalog: str, ids: Ids, start_driver: StartDriver, tmp_path: Path, home: Path
) -> None:
    driver = start_driver()
    node = Kubelet(driver.client, tmp_path / "kubelet")
    provisioned = driver.client.CreateVolume(
        name="made", volume_capabilities=READ, parameters={"dataset": "open@v1"}
    ).volume
    volumes = {
        provisioned.volume_id: dict(provisioned.volume_context),
        "by-tag": {"dataset": "open@v1"},
        "by-id": {"dataset": f"open@{ids.open}"},
    }
    pod = {NAMESPACE: "team"}
    shown = [node.show(volume, context | pod) for volume, context in volumes.items()]
    shown.append(node.publish("inline", {"dataset": f"open@{ids.open}", **pod}, inline=True))
    with closing(open_catalog()) as catalog:
        assert catalog.remove_snapshot("open", ids.open)
    kill_mounts(home)
    until(lambda: all(reads(path) for path in shown))
    for volume, context in volumes.items():
        # A kubelet that was started again asks for all of it anew; a second pod comes; all are gone, and others come.
        node.stage(volume, context)
        assert reads(node.publish(volume, context | pod, "pod-2"))
        node.hide(volume, "pod-1", "pod-2")
        assert reads(node.show(volume, context | pod, "pod-3"))
        node.hide(volume, "pod-3")
    node.unpublish("inline")
    for ref in (f"open@{ids.open}", f"other@{ids.open}"):  # to nobody else
        assert node.code("NodeStageVolume", node.stage_request("new", {"dataset": ref}))[0] in REFUSED
        inline = node.publish_request("new", {"dataset": ref, **pod}, inline=True)
        assert node.code("NodePublishVolume", inline)[0] in REFUSED


def reads(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return (path / "file").read_text() == "for all\n"
    return False


def kill_mounts(home: Path) -> None:
    """All processes of all mounts of the home, and its daemon."""
    for pid in leftovers.processes_with("DATACACHE_HOME", lambda value: value == str(home)):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"fuse_mount" in words or b"datacache.daemon" in words:
                os.kill(pid, signal.SIGKILL)


@promise("While the catalog is away, a node gives a volume only what the controller made it")
def test_while_the_catalog_is_away_a_volume_is_given_what_the_controller_made_it_and_nothing_by_its_own_word(
    bucket: Path, home: Path, tmp_path: Path, start_driver: StartDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Mongod(tmp_path / "mongod") as server:
        monkeypatch.setenv("DATACACHE_CATALOG", f"{server.database_url()}?serverSelectionTimeoutMS=500")
        (bucket / "file").write_text("for all\n")
        id = create_snapshot("shared", f"s3://{bucket.name}", tags=["v1"], settings=load_settings()).id
        driver: Driver = start_driver()
        node = Kubelet(driver.client, tmp_path / "kubelet")
        claim = {"dataset": "shared@v1", "csi.storage.k8s.io/pvc/namespace": "team"}
        claim |= {"csi.storage.k8s.io/pvc/name": "faces"}
        volume = driver.client.CreateVolume(name="made", volume_capabilities=READ, parameters=claim).volume
        context = dict(volume.volume_context)
        assert reads(node.show("made", context | {NAMESPACE: "team"}))
        node.hide("made")
        server.stop()
        assert reads(node.show("made", context | {NAMESPACE: "team"}))
        forged = context | {"namespace": "guests"}
        for handle in ("made", "other"):
            node.code("NodeStageVolume", node.stage_request(handle, forged))
            request = node.publish_request(handle, forged | {NAMESPACE: "guests"}, "pod-2")
            assert node.code("NodePublishVolume", request)[0] != "OK"
        foreign = {"dataset": f"other@{id}", "namespace": "team", "asked": "other@v1"}
        assert node.code("NodeStageVolume", node.stage_request("third", foreign))[0] == "UNAVAILABLE"
        leftovers.unmount_under(tmp_path)


# --- where data sets may come from -----------------------------------------------------------------------------------


def hostile(settings: Settings, files: dict[str, ObjectRef], *, name: str = "hostile") -> str:
    """Commit a manifest that says of its files that they lie there, as whoever writes the catalog can."""
    stores = sorted({ref.store for ref in files.values()})
    with closing(open_catalog(settings)) as catalog:
        builder = ManifestBuilder([Source(store, "") for store in stores], catalog.put_blobs)
        for path, ref in sorted(files.items()):
            key = os.fsencode(ref.key)
            source = stores.index(ref.store)
            builder.add(Entry(path.encode(), ref.size_bytes, 0, ref.etag, ref.version, source, key))
        lineage = Lineage("create", {})
        return commit_manifest(catalog, builder, Naming(name=name, tags=["v1"]), origin="file:///", lineage=lineage).id


@promise("A node reads data sets only from the stores that `DATACACHE_SOURCES` names")
def test_a_manifest_that_names_files_of_the_node_is_not_mounted(
    bucket: Path, home: Path, start_driver: StartDriver, tmp_path: Path, cluster: ApiServer, kubeconfig: Path
) -> None:
    target = tmp_path / "of root"
    target.write_text("of root")
    known = ObjectRef("file://", str(target)[1:], 7, etag_of(target.stat()))
    for number, store in enumerate(("file://", "FILE://", "file://localhost", "local://x")):
        hostile(load_settings(), {"a": known._replace(store=store)}, name=f"known-{number}")
        hostile(load_settings(), {"a": known._replace(store=store, etag="")}, name=f"no-etag-{number}")
    # What the driver does by itself: no setting says anything.
    driver = start_driver(f"--kubeconfig={kubeconfig}", variables={"DATACACHE_SOURCES": ""})
    node = Kubelet(driver.client, tmp_path / "kubelet")
    with closing(open_catalog()) as catalog:
        names = [each.name for each in catalog.datasets()]
    assert len(names) == 8
    for name in names:
        code, words = node.code("NodeStageVolume", node.stage_request(name, {"dataset": name}))
        assert (code, "DATACACHE_SOURCES" in words) == ("PERMISSION_DENIED", True)
        inline = node.publish_request(name, {"dataset": name, NAMESPACE: "team"}, inline=True)
        assert node.code("NodePublishVolume", inline)[0] == "PERMISSION_DENIED"
        claim = cluster.put_claim("faces", {"datacache.io/dataset": name}, namespace="team")
        request = csi.CreateVolumeRequest(name="faces", volume_capabilities=READ, parameters=claim)
        assert driver.client.code("CreateVolume", request)[0] == "PERMISSION_DENIED"
    assert nothing_is_shown(node, home)


@promise("A node reads data sets only from the stores that `DATACACHE_SOURCES` names")
def test_what_a_manifest_names_outside_of_the_sources_is_read_by_no_pod(
    bucket: Path, home: Path, start_driver: StartDriver, tmp_path: Path
) -> None:
    """The rule holds where the bytes are fetched: the driver that mounts cannot see each entry."""
    folder, outside = tmp_path / "sets", tmp_path / "of root"
    folder.mkdir()
    outside.write_text("of root")
    (folder / "good").write_text("good")
    (folder / "away").symlink_to(outside)
    known = {path: ObjectRef("file://", str(path)[1:], 7, etag_of(path.stat())) for path in (outside, folder / "away")}
    good = ObjectRef("file://", str(folder / "good")[1:], 4, etag_of((folder / "good").stat()))
    files = {
        "good": good,
        "no etag": good._replace(etag=""),
        "known": known[outside],
        "known, by a link": known[folder / "away"],
        "no etag outside": known[outside]._replace(etag=""),
        "shadow": ObjectRef("file://", "etc/shadow", Path("/etc/shadow").stat().st_size),
        "up": good._replace(key=f"{str(folder)[1:]}/../of root", size_bytes=7),
    }
    hostile(load_settings(), files)
    driver = start_driver("--mode=node", variables={"DATACACHE_SOURCES": f"* file://{folder}"})
    node = Kubelet(driver.client, tmp_path / "kubelet")
    target = node.publish("i", {"dataset": "hostile", NAMESPACE: "team"}, inline=True)
    assert sorted(os.listdir(target)) == sorted(files)
    assert (target / "good").read_text() == "good"
    for name in files:
        if name != "good":
            with pytest.raises(OSError, match=r"Permission denied|Stale file handle"):
                (target / name).read_bytes()
    leftovers.unmount_under(tmp_path)


# --- who may pin ------------------------------------------------------------------------------------------------------


@promise("A claim or a pod pins only where an administrator lets it")
def test_only_whom_an_administrator_lets_pins(
    ids: Ids, start_driver: StartDriver, tmp_path: Path, cluster: ApiServer, kubeconfig: Path, home: Path
) -> None:
    def claimed(driver: Driver, namespace: str, annotations: dict[str, str], **of_class: str) -> tuple[str, str]:
        claim = cluster.put_claim("faces", annotations, namespace=namespace) | of_class
        name = f"pin-{namespace}-{len(annotations)}-{len(of_class)}"
        request = csi.CreateVolumeRequest(name=name, volume_capabilities=READ, parameters=claim)
        return driver.client.code("CreateVolume", request)

    ask = {"datacache.io/dataset": "open@v1", "datacache.io/pin": "true"}
    pod = {"dataset": "open@v1", "pin": "true", NAMESPACE: "team"}
    driver = start_driver(f"--kubeconfig={kubeconfig}")
    node = Kubelet(driver.client, tmp_path / "kubelet")
    for claim, of_class in (
        (ask, {}),
        (ask, {"pin": "false"}),
        ({"datacache.io/pin": "true"}, {"dataset": "open"}),
    ):
        code, words = claimed(driver, "team", claim, **of_class)
        assert (code, "DATACACHE_PINS" in words) == ("PERMISSION_DENIED", True)
    assert node.code("NodePublishVolume", node.publish_request("i", pod, inline=True))[0] == "PERMISSION_DENIED"
    assert nothing_is_shown(node, home)
    assert claimed(driver, "team", ask | {"datacache.io/pin": "false"})[0] == "OK"
    assert claimed(driver, "team", {"datacache.io/dataset": "open@v1"}, pin="true")[0] == "OK"  # the class's word
    driver.kill()

    allowed = start_driver(f"--kubeconfig={kubeconfig}", variables={"DATACACHE_PINS": "ops team"})
    node = Kubelet(allowed.client, tmp_path / "kubelet")
    assert claimed(allowed, "team", ask)[0] == "OK"
    assert claimed(allowed, "guests", ask)[0] == "PERMISSION_DENIED"
    node.publish("i", pod, inline=True)
    assert [pin.partition("@")[0] for pin in connect().cache_status()["pins"]] == ["open"]
    node.unpublish("i")
    leftovers.unmount_under(tmp_path)
