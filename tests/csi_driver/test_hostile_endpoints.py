"""Stores that a tenant's Secret can name: no address of the node's, and no answer that does harm."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any

import pytest

from csi_driver.node.store_secrets import OF_ALL, OF_FIRST, OF_ONE, EndpointTurns
from csi_driver.server import THREADS
from csi_driver.status import RequestError
from csi_driver.wire import csi_pb2 as csi
from tests.csi_driver.conftest import StartDriver
from tests.csi_driver.driver import CALL_TIMEOUT_S, WRITE, Driver
from tests.csi_driver.kubelet import needs_root
from tests.promises import promise
from tests.servers import RcloneS3

pytestmark = needs_root
_MIB = 2**20


class Hostile(ThreadingHTTPServer):
    """Answers every request the same, and counts them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.status, self.headers, self.body = 200, {"Content-Type": "application/xml"}, b""
        self.asked = 0
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.asked += 1
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up on it."""


class _Answer(BaseHTTPRequestHandler):
    server: Hostile

    def do_GET(self) -> None:
        self.send_response_only(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(self.server.body)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def log_message(self, *_arguments: Any) -> None:
        """Quiet."""


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    server = Hostile()
    yield server
    server.shutdown()
    server.server_close()


def stage(
    driver: Driver,
    endpoint: str,
    folder: str,
    number: int = 0,
    namespace: str = "guests",
    keys: tuple[str, str] = ("mine", "mine"),
) -> tuple[str, str]:
    """The code and the words for a bucket volume whose Secret names this endpoint."""
    secret = {"access_key_id": keys[0], "secret_access_key": keys[1], "endpoint_url": endpoint, "region": "us-east-1"}
    request = csi.NodeStageVolumeRequest(
        volume_id=f"v-{namespace}-{number}",
        staging_target_path=folder,
        volume_capability=WRITE[0],
        volume_context={"bucket": f"s3://{namespace}-{number}/out", "namespace": namespace, "credentials": "secret"},
        secrets=secret,
    )
    return driver.client.code("NodeStageVolume", request)


def peak_bytes(driver: Driver) -> int:
    """The most memory that a driver has had at a time."""
    with open(f"/proc/{driver.process.pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


@promise("A Secret's endpoint that leads to this machine or a private network is refused")
def test_an_endpoint_of_this_machine_or_a_private_network_is_refused_and_not_asked(
    start_driver: StartDriver, hostile: Hostile, tmp_path: Any
) -> None:
    driver = start_driver("--mode=node", variables={"DATACACHE_ALLOW_NETWORK": ""})
    port = hostile.port
    places = [f"{host}:{port}" for host in ("127.0.0.1", "localhost", "2130706433", "0.0.0.0", "[::ffff:127.0.0.1]")]
    places += [f"{socket.gethostbyname(socket.gethostname())}:{port}", "169.254.169.254", "10.96.0.1:443", "[fd00::1]"]
    for place in places:
        code, words = stage(driver, f"http://{place}", str(tmp_path / "staging"))
        assert (code, "DATACACHE_ALLOW_NETWORK" in words) == ("PERMISSION_DENIED", True), f"{place}: {words}"
    assert hostile.asked == 0


@promise("What an administrator allows is asked, and no other port of it")
def test_a_place_that_an_administrator_allows_is_asked_and_no_other_port_of_it(
    start_driver: StartDriver, hostile: Hostile, tmp_path: Any
) -> None:
    driver = start_driver("--mode=node", variables={"DATACACHE_ALLOW_NETWORK": f"localhost:{hostile.port}"})
    folder = str(tmp_path / "staging")
    assert stage(driver, f"http://127.0.0.1:{hostile.port}", folder)[0] == "PERMISSION_DENIED"
    assert stage(driver, "http://localhost:1", folder)[0] == "PERMISSION_DENIED"
    assert hostile.asked == 0
    assert stage(driver, f"http://localhost:{hostile.port}", folder)[0] == "INTERNAL"  # it does not answer as S3 does
    assert hostile.asked > 0


@promise("An answer that is read whole takes bounded memory")
@pytest.mark.parametrize("kind", ["blanks", "tags", "attributes", "drawn out"])
def test_an_answer_takes_bounded_memory_however_it_is_packed(
    kind: str, start_driver: StartDriver, hostile: Hostile, tmp_path: Any
) -> None:
    driver = start_driver("--mode=node")
    inside = {
        "blanks": b" " * (300 * _MIB),
        "tags": b"<a/>" * (15 * _MIB // 4),
        "attributes": b"<a %s/>" % b" ".join(b"a%x=''" % number for number in range(1_200_000)),
        "drawn out": b"<Contents><Key>a</Key><Size>1</Size></Contents>" * 250_000,
    }[kind]
    hostile.body = gzip.compress(b"<ListBucketResult>" + inside + b"</ListBucketResult>", 1)
    hostile.headers["Content-Encoding"] = "gzip"
    assert stage(driver, f"http://127.0.0.1:{hostile.port + 1}", str(tmp_path / "staging"))[0] != "OK"  # all is loaded
    before = peak_bytes(driver)
    code, words = stage(driver, f"http://127.0.0.1:{hostile.port}", str(tmp_path / "staging"))
    assert code == "INTERNAL", words
    assert hostile.asked > 0
    assert peak_bytes(driver) - before < 100 * _MIB


@promise("A document that is no plain listing is refused at once and in bounded memory")
@pytest.mark.parametrize("kind", ["defaults in UTF-16", "entities in UTF-16", "a prefix without an end"])
def test_an_answer_that_is_no_plain_listing_is_refused_at_once(
    kind: str, start_driver: StartDriver, hostile: Hostile, tmp_path: Any
) -> None:
    driver = start_driver("--mode=node")
    attributes = " ".join(f"a{number} CDATA 'xxxxxxxx'" for number in range(2000))
    entities = "".join(f"<!ENTITY e{n} '{f'&e{n - 1};' * 10 if n else 'ha' * 10}'>" for n in range(10))
    hostile.body = {
        "defaults in UTF-16": f"<!DOCTYPE L [<!ATTLIST K {attributes}>]><L>{'<K/>' * 100_000}</L>".encode("utf-16"),
        "entities in UTF-16": f"<!DOCTYPE L [{entities}]><L>&e9;</L>".encode("utf-16"),
        "a prefix without an end": b"<ListBucketResult><Prefix>" + b"&#" * 1_000_000,
    }[kind]
    assert stage(driver, f"http://127.0.0.1:{hostile.port + 1}", str(tmp_path / "staging"))[0] != "OK"  # all is loaded
    before = peak_bytes(driver)
    code, words = stage(driver, f"http://127.0.0.1:{hostile.port}", str(tmp_path / "staging"))
    assert code == "INTERNAL", words
    assert peak_bytes(driver) - before < 100 * _MIB


@promise("Errors repeat no text of a server that is not an S3 server")
def test_what_something_else_answers_is_not_repeated(
    start_driver: StartDriver, hostile: Hostile, tmp_path: Any
) -> None:
    driver = start_driver("--mode=node")
    hostile.status, hostile.body = 400, b"<Error><Code>kubelet-token-abc</Code><Message>abc</Message></Error>"
    hostile.headers["x-amz-bucket-region"] = "abc-said-by-the-server"
    for status in (400, 301, 409):
        hostile.status = status
        code, words = stage(driver, f"http://127.0.0.1:{hostile.port}", str(tmp_path / "staging"))
        assert (code, "abc" in words) == ("INTERNAL", False), words
    assert "abc" not in driver.text


@promise("Endpoints that never answer keep a bounded number of a driver's calls waiting")
def test_endpoints_that_never_answer_take_few_threads_of_each_namespace_and_leave_others_theirs(
    start_driver: StartDriver, tmp_path: Any
) -> None:
    driver = start_driver("--mode=node", variables={"DATACACHE_STORE_TIMEOUT_S": "600"})
    with socket.create_server(("127.0.0.1", 0), backlog=128) as silent, ThreadPoolExecutor(40) as kubelets:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"  # takes connections, and says nothing

        def stages(namespace: str, count: int) -> list[Future[tuple[str, str]]]:
            return [
                kubelets.submit(stage, driver, endpoint, str(tmp_path / f"{namespace}-{number}"), number, namespace)
                for number in range(count)
            ]

        try:
            refused: list[tuple[str, str]] = []
            for one in as_completed(stages("guests", OF_ONE + 5), CALL_TIMEOUT_S):
                refused.append(one.result())
                if len(refused) == 5:
                    break
            assert {code for code, _ in refused} == {"UNAVAILABLE"}
            assert all(f"{OF_ONE} volumes of namespace guests wait" in words for _, words in refused), refused
            others = stages("others", OF_ONE + 1)  # not kept out by them, and bounded by themselves
            code, words = next(as_completed(others, CALL_TIMEOUT_S)).result()
            assert (code, "namespace others" in words) == ("UNAVAILABLE", True), words
            assert driver.client.code("NodeGetInfo", csi.NodeGetInfoRequest()) == ("OK", "")
        finally:
            driver.kill()  # and with it all calls end


@promise("Endpoints that never answer keep a bounded number of a driver's calls waiting")
def test_a_namespace_without_a_turn_gets_one_however_many_others_have_and_may_end_its_volume(
    start_driver: StartDriver, rclone_s3: RcloneS3, tmp_path: Any
) -> None:
    rclone_s3.make_bucket("honest-0")
    env = rclone_s3.env()
    keys = (env["AWS_ACCESS_KEY_ID"], env["AWS_SECRET_ACCESS_KEY"])
    driver = start_driver("--mode=node", variables={"DATACACHE_STORE_TIMEOUT_S": "600"})
    hostile = OF_ALL // OF_ONE
    with socket.create_server(("127.0.0.1", 0), backlog=128) as silent, ThreadPoolExecutor(64) as kubelets:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        try:
            waiting = [
                kubelets.submit(stage, driver, endpoint, str(tmp_path / f"{name}-{number}"), number, f"guests-{name}")
                for name in range(hostile)
                for number in range(OF_ONE + 1)
            ]
            for one in islice(as_completed(waiting, CALL_TIMEOUT_S), hostile):
                assert one.result()[0] == "UNAVAILABLE", one.result()  # and the others have all `OF_ALL` turns
            folder = str(tmp_path / "honest")
            assert stage(driver, rclone_s3.endpoint, folder, 0, "honest", keys) == ("OK", "")
            unstage = csi.NodeUnstageVolumeRequest(volume_id="v-honest-0", staging_target_path=folder)
            assert driver.client.code("NodeUnstageVolume", unstage) == ("OK", "")
        finally:
            driver.kill()  # and with it all calls end


@promise("Endpoints that never answer keep a bounded number of a driver's calls waiting")
def test_turns_of_all_namespaces_together_leave_threads_to_others() -> None:
    assert OF_ALL + OF_FIRST <= THREADS * 3 // 4
    turns = EndpointTurns()
    with ExitStack() as held:
        for number in range(OF_ALL):
            held.enter_context(turns.take(f"many-{number % (OF_ALL // OF_ONE)}"))
        for number in range(OF_FIRST - 1):
            held.enter_context(turns.take(f"first-{number}"))
            with pytest.raises(RequestError, match="of several namespaces"), turns.take(f"first-{number}"):
                pass
        with turns.take("last"), pytest.raises(RequestError, match="of several namespaces"), turns.take("one more"):
            pass
        with turns.take("one more"):
            pass
    with ExitStack() as held:
        for _ in range(OF_ONE):
            held.enter_context(turns.take(""))
        with pytest.raises(RequestError, match=f"{OF_ONE} volumes that were made by hand, for no"), turns.take(""):
            pass
