"""Test how changes are brought to a second node: the order of bringing, naming and acknowledging."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from datacache.catalog.open import open_catalog_url
from datacache.cluster.replicas.lease import AreaLease
from datacache.cluster.replicas.opening import open_replication
from datacache.cluster.replicas.sender import ReplicaSender
from datacache.core.errors import StagingError, UsageError
from datacache.exchange.frames import Frame, FrameSocket, Kind
from datacache.exchange.wire import encode_error
from datacache.settings import load_settings
from datacache.writeback.model import PENDING
from datacache.writeback.staging.area import StagingArea
from tests.cluster.test_peers import Nodes
from tests.daemon.test_fetcher import until
from tests.promises import promise
from tests.writeback.upload_rig import Rig


@promise("Where the second node is lost, another one has all that is pending before anything more is acknowledged")
def test_a_second_node_has_what_was_acknowledged_without_one_before_it_is_named(tmp_path: Path) -> None:
    got: set[str] = set()
    refuses = [True]
    settings = load_settings({"DATACACHE_HOME": str(tmp_path)})
    lease = AreaLease(open_catalog_url(f"sqlite:///{tmp_path}/c.db"), "0" * 16, "me", 60, request_s=30)
    with ExitStack() as stack:
        nodes = Nodes(stack)

        def play(frames: FrameSocket, request: Frame) -> None:
            size = int.from_bytes(request.body[:4], "big")
            head = json.loads(bytes(request.body[4 : 4 + size]))
            if refuses:
                refuses.clear()
                frames.send(Kind.REFUSED, request.number, body=encode_error(StagingError("full")))
                return
            if lease.replica:  # what comes from now on is too late
                nodes.over.wait(30)
            elif head["op"] == "put":
                got.update(key for key, _header_bytes, _blob_bytes in head["records"])
                if head["whole"]:
                    rig.put("meanwhile", b"2")  # returns at once: there is no second node yet
            frames.send(Kind.OK, request.number, b"", b"{}")

        nodes.add(play)
        sender = ReplicaSender(
            lease, nodes.peers(), node="me", endpoint="", required=False, wait_s=30, done=lambda: None
        )
        (tmp_path / "bucket").mkdir()
        with Rig(tmp_path / "staging", (tmp_path / "bucket").as_uri(), settings, replication=sender) as rig:
            rig.put("before", b"1")
            until(lambda: lease.replica == "n1")
            found = set(got)
            nodes.over.set()
        assert found == {PENDING + "before", PENDING + "meanwhile"}


def test_a_lease_lasts_for_two_requests_to_the_store(tmp_path: Path) -> None:
    names = {"HOME": tmp_path, "CATALOG": "mongodb://127.0.0.1:1/d", "REPLICA_LEASE_S": 59, "STORE_TIMEOUT_S": 30}
    settings = load_settings({f"DATACACHE_{name}": str(value) for name, value in names.items()})
    with (
        StagingArea.open(tmp_path / "staging", "s3://bucket", who="test") as area,
        pytest.raises(UsageError, match="59 s are less than two of 30 s"),
    ):
        open_replication(settings, area, "", required=True, in_use=False)
