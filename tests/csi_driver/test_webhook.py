"""The admission webhook: what pods come to prefer, over TLS as an API server asks; and reviews that are meant badly."""

from __future__ import annotations

import base64
import contextlib
import copy
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from csi_driver import volume_records, webhook
from csi_driver.kube import KubeApi
from csi_driver.volume_records import VolumeRecord
from csi_driver.webhook import MOST_BYTES, PATH, PREFERRED, PodPlacement, WebhookServer, add_preferences
from datacache.api import create_snapshot, open_catalog, preferred_nodes
from datacache.catalog.access import set_access
from datacache.catalog.holdings import snapshot_label
from datacache.settings import Settings
from tests.csi_driver.api_server import ApiServer
from tests.csi_driver.conftest import StartDriver
from tests.exchange.authority import Ca
from tests.promises import promise

UID = "705ab4f5-6393-11e8-b7cc-42010a800002"
CLAIM_UID = "0f4d0000-0000-4000-8000-000000000001"


@pytest.fixture
def ids(home: Path, tmp_path: Path) -> dict[str, str]:
    """The data sets `open`, of 1,000 bytes, and `secret`, of 100, which the namespace `lab` alone may have."""
    made = {}
    for name, size in (("open", 1000), ("secret", 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * size)
        made[name] = create_snapshot(name, (tmp_path / name).as_uri(), tags=["v1"]).id
    with closing(open_catalog()) as catalog:
        set_access(catalog, "secret", everybody=False, allow=["lab"])
    return made


@pytest.fixture
def placement(settings: Settings, ids: dict[str, str], kubeconfig: Path) -> Iterator[PodPlacement]:
    with closing(PodPlacement(settings, KubeApi(kubeconfig))) as opened:
        yield opened


def pod(*volumes: dict[str, Any], **spec: Any) -> dict[str, Any]:
    named = [{"name": f"v{number}"} | volume for number, volume in enumerate(volumes)]
    containers = [{"name": "c", "image": "busybox:1"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p"},
        "spec": {"containers": containers, "volumes": named} | spec,
    }


def review(object: Any, namespace: Any = "team-a", **changes: Any) -> dict[str, Any]:
    """An AdmissionReview as an API server writes it."""
    request = {
        "uid": UID,
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "name": "",
        "namespace": namespace,
        "operation": "CREATE",
        "userInfo": {"username": "system:serviceaccount:kube-system:job-controller"},
        "object": object,
        "oldObject": None,
        "dryRun": False,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request | changes}


def patch_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    response = answer["response"]
    assert response["allowed"] is True
    assert set(response) <= {"uid", "allowed", "patchType", "patch"}
    if "patch" not in response:
        return []
    assert response["patchType"] == "JSONPatch"
    found: list[dict[str, Any]] = json.loads(base64.b64decode(response["patch"], validate=True))
    return found


def ask(placement: PodPlacement, object: Any, namespace: Any = "team-a", **changes: Any) -> list[dict[str, Any]]:
    return patch_of(placement.review(json.dumps(review(object, namespace, **changes)).encode()))


def patched(object: dict[str, Any], patch: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod with the patch, and valid."""
    made = copy.deepcopy(object)
    for change in patch:
        assert change["op"] == "add"
        *parents, last = change["path"].strip("/").split("/")
        there: Any = made
        for name in parents:
            there = there[name]
        if last == "-":
            there.append(change["value"])
        else:
            there[last] = change["value"]
    kubernetes_validate.validate(made, "1.37", strict=True)
    return made


def keys(pod: dict[str, Any]) -> list[tuple[str, int]]:
    terms = pod["spec"]["affinity"]["nodeAffinity"][PREFERRED]
    return [(term["preference"]["matchExpressions"][0]["key"], term["weight"]) for term in terms]


def claim(name: str) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": name}}


def inline(dataset: str) -> dict[str, Any]:
    return {"csi": {"driver": "datacache.io", "readOnly": True, "volumeAttributes": {"dataset": dataset}}}


def ephemeral(dataset: str) -> dict[str, Any]:
    spec = {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Gi"}}}
    template = {"metadata": {"annotations": {"datacache.io/dataset": dataset}}, "spec": spec}
    return {"ephemeral": {"volumeClaimTemplate": template}}


class TestWhatAPodPrefers:
    def test_nodes_that_hold_the_snapshot_of_its_claim(
        self, placement: PodPlacement, ids: dict[str, str], cluster: ApiServer
    ) -> None:
        cluster.put_claim("data", {"datacache.io/dataset": "open@v1"}, namespace="team-a")
        ours = pod(claim("data"), {"emptyDir": {}})
        made = patched(ours, ask(placement, ours))
        assert keys(made) == [(snapshot_label(ids["open"]), 100), (snapshot_label(ids["open"]), 50)]
        assert list(made["spec"]["affinity"]) == ["nodeAffinity"]
        assert list(made["spec"]["affinity"]["nodeAffinity"]) == [PREFERRED]

    def test_the_snapshot_that_the_volume_is_of_counts_and_no_longer_what_the_tag_says(
        self, placement: PodPlacement, ids: dict[str, str], cluster: ApiServer, tmp_path: Path
    ) -> None:
        cluster.put_claim("data", {"datacache.io/dataset": "open@latest"}, namespace="team-a")
        context = {"dataset": f"open@{ids['open']}", "asked": "open@latest", "namespace": "team-a"}
        record = VolumeRecord(id=f"pvc-{CLAIM_UID}", name=f"pvc-{CLAIM_UID}", context=context, capacity_bytes=1)
        with closing(open_catalog()) as catalog:
            volume_records.add(catalog, record)
        (tmp_path / "open" / "more").write_text("more")
        create_snapshot("open", (tmp_path / "open").as_uri())
        ours = pod(claim("data"))
        assert keys(patched(ours, ask(placement, ours)))[0][0] == snapshot_label(ids["open"])

    def test_of_inline_and_ephemeral_volumes_too_and_larger_ones_more(
        self, placement: PodPlacement, ids: dict[str, str]
    ) -> None:
        ours = pod(inline("open"), ephemeral("secret@v1"))
        made = patched(ours, ask(placement, ours, "lab"))
        a, b = snapshot_label(ids["open"]), snapshot_label(ids["secret"])
        assert keys(made) == [(a, 100), (a, 50), (b, 10), (b, 5)]

    def test_what_it_says_of_nodes_itself_stays(self, placement: PodPlacement, ids: dict[str, str]) -> None:
        zone = {"key": "zone", "operator": "In", "values": ["a"]}
        required = {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}
        own = {"weight": 7, "preference": {"matchExpressions": [zone]}}
        affinities: tuple[dict[str, Any] | None, ...] = (
            None,
            {},
            {"podAntiAffinity": {}},
            {"nodeAffinity": None},
            {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
            {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required, PREFERRED: [own]}},
            {"nodeAffinity": {PREFERRED: []}},
        )
        for affinity in affinities:
            ours = pod(inline("open"), **({} if affinity is None else {"affinity": copy.deepcopy(affinity)}))
            made = patched(ours, ask(placement, ours))
            found = made["spec"]["affinity"]
            given = affinity or {}
            assert {name: found[name] for name in given if name != "nodeAffinity"} == {
                name: value for name, value in given.items() if name != "nodeAffinity"
            }
            node = given.get("nodeAffinity") or {}
            assert found["nodeAffinity"][PREFERRED][: len(node.get(PREFERRED, []))] == node.get(PREFERRED, [])
            assert found["nodeAffinity"][PREFERRED][-1]["weight"] == 50
            name = "requiredDuringSchedulingIgnoredDuringExecution"
            assert found["nodeAffinity"].get(name) == node.get(name)
            assert ask(placement, made) == [], "a second time there is nothing to add"

    def test_nothing_where_there_is_nothing_to_prefer(self, placement: PodPlacement, cluster: ApiServer) -> None:
        cluster.put_claim("runs", {"datacache.io/bucket": "s3://runs"}, namespace="team-a")
        for ours in (
            pod(),
            pod(claim("gone")),
            pod(claim("runs")),
            pod({"csi": {"driver": "other", "volumeAttributes": {"dataset": "open"}}}),
            pod(inline("open@v9")),
            pod(inline("open"), nodeName="n1"),
        ):
            assert ask(placement, ours) == []
        assert ask(placement, pod(inline("open")), operation="UPDATE") == []
        assert ask(placement, pod(inline("open")), kind={"group": "apps", "kind": "Pod"}) == []

    def test_eight_data_sets_at_most(self, placement: PodPlacement, tmp_path: Path) -> None:
        for number in range(12):
            (tmp_path / f"d{number}").write_bytes(bytes(number + 1))
            (tmp_path / f"f{number}").mkdir()
            (tmp_path / f"d{number}").rename(tmp_path / f"f{number}" / "d")
            create_snapshot(f"d{number}", (tmp_path / f"f{number}").as_uri())
        ours = pod(*(inline(f"d{number}") for number in range(12)))
        assert len(keys(patched(ours, ask(placement, ours)))) == 16
        terms = preferred_nodes({"a" * 32: 1})
        many = [{"weight": 1, "preference": {"matchExpressions": [{"key": f"k{n}"}]}} for n in range(99)]
        assert add_preferences({"affinity": {"nodeAffinity": {PREFERRED: many}}}, terms) == []


class TestWhoAsks:
    def test_a_namespace_that_may_not_have_a_data_set_learns_nothing(
        self, placement: PodPlacement, ids: dict[str, str], cluster: ApiServer
    ) -> None:
        cluster.put_claim("data", {"datacache.io/dataset": "secret@v1"}, namespace="team-a")
        references = ["secret", "secret@v1", f"secret@{ids['secret']}", f"open@{ids['secret']}", "nothing@v1"]
        answers = set()
        for ours in (*(pod(inline(ref)) for ref in references), pod(ephemeral("secret@v1")), pod(claim("data"))):
            answers.add(json.dumps(placement.review(json.dumps(review(ours)).encode())))
        assert len(answers) == 1, "what is closed is answered as what is not there"
        assert "patch" not in answers.pop()
        assert len(ask(placement, pod(inline("secret")), "lab")) == 1

    def test_a_claim_whose_data_set_was_closed_since(
        self, placement: PodPlacement, ids: dict[str, str], cluster: ApiServer
    ) -> None:
        cluster.put_claim("data", {}, namespace="team-a")
        context = {"dataset": f"secret@{ids['secret']}", "namespace": "team-a"}
        record = VolumeRecord(id=f"pvc-{CLAIM_UID}", name=f"pvc-{CLAIM_UID}", context=context, capacity_bytes=1)
        with closing(open_catalog()) as catalog:
            volume_records.add(catalog, record)
            assert ask(placement, pod(claim("data"))) == []
            set_access(catalog, "secret", allow=["team-a"])
            assert len(ask(placement, pod(claim("data")))) == 1

    def test_a_pod_that_says_it_is_elsewhere_is_where_the_api_server_says(
        self, placement: PodPlacement, cluster: ApiServer
    ) -> None:
        cluster.put_claim("data", {"datacache.io/dataset": "secret@v1"}, namespace="lab")
        ours = pod(inline("secret"), claim("data"))
        ours["metadata"]["namespace"] = "lab"
        assert ask(placement, ours, "team-a") == []


@promise("No pod fails or waits for the webhook")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"request": null}',
        b'{"request": {"uid": 7}}',
        b'{"request": {"uid": "a", "uid": "b"}}',
        b'{"request": {"uid": "a\\r\\nb", "kind": {}}}',
        b'{"request": {"uid": "' + b"a" * 1000 + b'"}}',
    ],
)
def test_reviews_that_are_none_are_allowed(placement: PodPlacement, body: bytes) -> None:
    assert placement.review(body)["response"] == {"uid": "", "allowed": True}


@promise("No pod fails or waits for the webhook")
@pytest.mark.parametrize(
    "changes",
    [
        {"object": None},
        {"object": "pod"},
        {"object": {"spec": None}},
        {"object": {"spec": {"volumes": 7}}},
        {"object": pod(inline("open")) | {"spec": []}},
        {"object": pod(inline("open"), affinity="none")},
        {"object": pod(inline("open"), affinity={"nodeAffinity": []})},
        {"object": pod(inline("open"), affinity={"nodeAffinity": {PREFERRED: {"a": 1}}})},
        {"object": pod(inline("open"), affinity={"nodeAffinity": {PREFERRED: [7]}})},
        {"namespace": None},
        {"namespace": "../team-a"},
        {"namespace": "\ud800"},
        {"kind": None},
    ],
)
def test_pods_that_are_none_are_allowed(placement: PodPlacement, changes: dict[str, Any]) -> None:
    broken = review(pod(inline("open")))
    assert patch_of(placement.review(json.dumps(broken).encode()))
    broken["request"] |= changes
    answer = placement.review(json.dumps(broken).encode())
    patch = patch_of(answer)
    assert answer["response"]["uid"] == UID
    assert patch == [] or changes["object"]["spec"]["affinity"]["nodeAffinity"] == []


def test_one_odd_volume_takes_nothing_from_the_others(placement: PodPlacement, ids: dict[str, str]) -> None:
    odd: list[Any] = [
        None,
        7,
        {"csi": {"driver": "datacache.io"}},
        {"csi": {"driver": "datacache.io", "volumeAttributes": {"dataset": {"a": 1}}}},
        {"csi": "x"},
        {"ephemeral": {}},
        {"persistentVolumeClaim": {"claimName": 7}},
        {"persistentVolumeClaim": {"claimName": "../../secrets/x"}},
        inline("@@@"),
        inline("\ud800"),
    ]
    ours = pod()
    ours["spec"]["volumes"] = [*odd, inline("open")]
    [change] = ask(placement, ours)
    assert change["value"]["nodeAffinity"][PREFERRED][0]["preference"]["matchExpressions"][0]["key"] == snapshot_label(
        ids["open"]
    )


@promise("No pod fails or waits for the webhook")
def test_an_api_or_a_catalog_that_is_away_is_no_reason_against_a_pod(
    placement: PodPlacement, cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.put_claim("data", {"datacache.io/dataset": "open"}, namespace="team-a")
    cluster.fail = 503
    assert ask(placement, pod(claim("data"))) == []
    assert len(ask(placement, pod(claim("data"), inline("open")))) == 1
    monkeypatch.setattr(webhook, "resolve", lambda *_: 1 / 0)
    assert ask(placement, pod(inline("open"))) == []


def test_the_patience_of_a_review_ends(placement: PodPlacement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_PATIENCE_S", -1.0)
    assert ask(placement, pod(inline("open"))) == []


class TestServer:
    """The port itself."""

    @pytest.fixture
    def ca(self, tmp_path: Path) -> Ca:
        return Ca(tmp_path / "ca")

    @pytest.fixture
    def tls(self, ca: Ca, tmp_path: Path) -> Path:
        return ca.issue(tmp_path / "tls")

    @pytest.fixture
    def server(self, tls: Path, placement: PodPlacement) -> Iterator[WebhookServer]:
        with closing(WebhookServer(0, tls, placement.review, address="127.0.0.1")) as opened:
            yield opened

    def post(self, port: int, ca: Ca, body: bytes, path: str = PATH, **headers: str) -> tuple[int, bytes]:
        context = ssl.create_default_context(cafile=str(ca.folder / "ca.crt"))
        context.check_hostname = False
        with closing(http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)) as connection:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def test_a_review_over_tls(self, server: WebhookServer, ca: Ca) -> None:
        for _ in range(3):
            status, text = self.post(server.port, ca, json.dumps(review(pod(inline("open")))).encode())
            answer = json.loads(text)
            assert (status, answer["kind"], answer["response"]["uid"]) == (200, "AdmissionReview", UID)
            assert len(patch_of(answer)) == 1

    def test_what_is_too_large_or_elsewhere_is_refused_and_the_next_is_answered(
        self, server: WebhookServer, ca: Ca
    ) -> None:
        assert self.post(server.port, ca, b"", **{"Content-Length": str(MOST_BYTES + 1)})[0] == 413
        assert self.post(server.port, ca, b"", **{"Content-Length": "-1"})[0] == 413
        assert self.post(server.port, ca, b"{}", path="/metrics")[0] == 404
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain:
            plain.sendall(b"POST /place HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert b"HTTP" not in plain.recv(1000)
        assert self.post(server.port, ca, b"{}")[0] == 200

    def test_many_large_reviews_and_heads_take_little_memory_at_a_time(
        self, tls: Path, ca: Ca, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(webhook, "_PATIENCE_S", 0.05)
        monkeypatch.setattr(webhook, "_CONNECTION_S", 60.0)
        entered, leave = threading.Semaphore(0), threading.Event()

        def answer(_body: bytes) -> dict[str, Any]:
            entered.release()
            assert leave.wait(60)
            return {}

        with (
            closing(WebhookServer(0, tls, answer, address="127.0.0.1")) as server,
            ThreadPoolExecutor(2) as threads,
        ):
            large = b" " * MOST_BYTES
            try:
                under_way = [threads.submit(self.post, server.port, ca, large) for _ in range(2)]
                assert all(entered.acquire(timeout=60) for _ in under_way)
                assert self.post(server.port, ca, b"{}")[0] == 503
            finally:
                leave.set()
            assert [each.result()[0] for each in under_way] == [200, 200]
            assert self.post(server.port, ca, large)[0] == 200
            long = {f"x-{number}": "x" * 8000 for number in range(5)}
            with contextlib.suppress(ConnectionError):  # it hangs up, and the rest of the head was under way
                assert self.post(server.port, ca, b"{}", **long)[0] == 431
            del long["x-4"], long["x-3"]
            assert self.post(server.port, ca, b"{}", **long)[0] == 200

    def test_somebody_who_sends_nothing_is_hung_up_on(
        self, server: WebhookServer, ca: Ca, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(webhook, "_CONNECTION_S", 0.1)
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as silent, contextlib.suppress(OSError):
            assert silent.recv(1000) == b""
        monkeypatch.setattr(webhook, "_CONNECTION_S", 10.0)
        assert self.post(server.port, ca, b"{}")[0] == 200

    def test_a_renewed_certificate_is_taken_and_one_that_comes_later_too(
        self, ca: Ca, tmp_path: Path, placement: PodPlacement
    ) -> None:
        folder = tmp_path / "later"
        folder.mkdir()
        with closing(WebhookServer(0, folder, placement.review, address="127.0.0.1")) as server:
            with pytest.raises(OSError):  # noqa: PT011  whichever way a connection ends
                self.post(server.port, ca, b"{}")
            ca.issue(folder)
            assert self.post(server.port, ca, b"{}")[0] == 200
            (folder / "tls.crt").write_text("broken")
            assert self.post(server.port, ca, b"{}")[0] == 200, "the one before it still counts"
            other = Ca(tmp_path / "other")
            other.issue(folder)
            assert self.post(server.port, other, b"{}")[0] == 200

    def test_the_controllers_process_answers(
        self, ca: Ca, tls: Path, ids: dict[str, str], cluster: ApiServer, kubeconfig: Path, start_driver: StartDriver
    ) -> None:
        cluster.put_claim("data", {"datacache.io/dataset": "open@v1"}, namespace="team-a")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        driver = start_driver(
            "--mode=controller", f"--kubeconfig={kubeconfig}", f"--webhook-port={port}", f"--webhook-tls={tls}"
        )
        status, text = self.post(port, ca, json.dumps(review(pod(claim("data")))).encode())
        assert status == 200
        assert snapshot_label(ids["open"]) in json.dumps(patch_of(json.loads(text)))
        assert driver.stop() == 0
