"""Nodes reach each other and servers by cables that can be limited and pulled out, and leave nothing behind."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pymongo
import pytest

from tests.conformance.faults import Fault, FaultProxy
from tests.fuse_mount.mount_processes import waiting_for_the_end_of
from tests.netns import Network, Node, one_home_a_node
from tests.servers import CephRgw, Mongod, RcloneS3, ServerError

ROOT = Path(__file__).resolve().parent.parent
LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    while True:
        one = server.accept()[0]
        one.sendall(b"x" * int(sys.argv[2]))
        one.close()
"""
CONNECT = """
import socket, sys
got = 0
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])) as one:
    while data := one.recv(65536):
        got += len(data)
print(got)
"""
GET = "import boto3; print(boto3.client('s3').get_object(Bucket='from-nodes', Key='a')['Body'].read().decode())"
OPEN = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=30)"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(2) as made:
        yield made


def listen(node: Node, folder: Path, size_bytes: int) -> None:
    """Have a node send so much to whoever connects."""
    process = node.start(sys.executable, "-c", LISTEN, node.address, str(size_bytes), log=folder / "listen.log")
    deadline = time.monotonic() + 30
    while ":7000" not in node.run("ss", "-ltn"):
        assert process.poll() is None, (folder / "listen.log").read_text()
        assert time.monotonic() < deadline


def fetch(node: Node, address: str, timeout_s: float = 30.0) -> int:
    """Return how many bytes a node gets from one that listens."""
    return int(node.run(sys.executable, "-c", CONNECT, address, str(timeout_s)))


def test_nodes_reach_each_other_until_one_is_cut_off_and_again_when_it_is_back(tmp_path: Path) -> None:
    with Network(2) as network:
        one, two = network.nodes
        listen(two, tmp_path, 300_000)
        before = one.traffic()
        assert fetch(one, two.address) == 300_000
        after = one.traffic()
        assert after.received_bytes - before.received_bytes >= 300_000 > after.sent_bytes - before.sent_bytes
        assert fetch(two, two.address) == 300_000  # a node reaches itself without its cable
        assert one.traffic().received_bytes - after.received_bytes < 300_000
        two.cut()
        with pytest.raises(ServerError, match=r"timed out|No route"):
            fetch(one, two.address, timeout_s=0.5)
        assert fetch(two, two.address) == 300_000
        two.mend()
        assert fetch(one, two.address) == 300_000


def test_a_limited_cable_holds_back_what_goes_over_it_in_both_directions(network: Network, tmp_path: Path) -> None:
    one, two = network.nodes
    assert two.rates_bytes_s() == []
    two.limit(200)
    assert two.rates_bytes_s() == [25_000_000, 25_000_000]
    assert one.rates_bytes_s() == []
    listen(two, tmp_path, 4_000_000)
    assert fetch(one, two.address) == 4_000_000
    assert two.delayed() > 0
    two.limit(400)
    assert two.rates_bytes_s() == [50_000_000, 50_000_000]
    two.limit(None)
    assert two.rates_bytes_s() == []


def test_nodes_reach_servers_of_this_machine_and_faults_between(network: Network, tmp_path: Path) -> None:
    with (
        RcloneS3(tmp_path / "s3", host=network.address) as store,
        FaultProxy(store.endpoint, host=network.address) as proxy,
        Mongod(tmp_path / "mongod", replica_set=True, host=network.address) as mongod,
    ):
        store.make_bucket("from-nodes").joinpath("a").write_text("one")
        count = "import pymongo, sys; print(pymongo.MongoClient(sys.argv[1]).d.c.count_documents({}))"
        with pymongo.MongoClient(mongod.url) as client:
            client["d"]["c"].insert_one({})
        for number, node in enumerate(network.nodes, 1):
            assert node.run(sys.executable, "-c", GET, env=os.environ | store.env()) == "one\n"
            assert store.get_count("from-nodes") == number
            assert node.run(sys.executable, "-c", count, mongod.url) == "1\n"
        proxy.add(Fault(lose_answer=True))
        with pytest.raises(ServerError, match="reset"):
            network.nodes[0].run(sys.executable, "-c", OPEN, proxy.url)


@pytest.mark.ceph
def test_nodes_reach_ceph(network: Network, tmp_path: Path) -> None:
    with CephRgw(tmp_path / "ceph", memory_bytes=2**28, host=network.address) as ceph:
        ceph.make_bucket("from-nodes")
        ceph.client().put_object(Bucket="from-nodes", Key="a", Body=b"one")
        assert network.nodes[1].run(sys.executable, "-c", GET, env=os.environ | ceph.env()) == "one\n"


def test_a_program_that_fails_in_a_node_says_why(network: Network) -> None:
    with pytest.raises(ServerError, match="no such thing"):
        network.nodes[0].run(sys.executable, "-c", "raise SystemExit('no such thing')")


def links() -> str:
    return subprocess.check_output(["ip", "-brief", "address"], text=True)


def test_networks_have_addresses_of_their_own_and_are_gone_when_they_are_closed() -> None:
    with Network(1) as one, Network(1) as two:
        assert one.address != two.address
        assert all(network.address in links() for network in (one, two))
        sleeps = one.nodes[0].start("sleep", "600", log=Path("/dev/null"))
    assert not any(network.address in links() for network in (one, two))
    assert sleeps.poll() is not None
    one.close()


def test_a_network_is_gone_when_its_owner_is_killed() -> None:
    code = (
        "import os; from pathlib import Path; from tests.netns import Network\n"
        "network = Network(2)\n"
        "started = [node.start('sleep', '600', log=Path('/dev/null')).pid for node in network.nodes]\n"
        "holders = [one.pid for one in network._namespaces]\n"
        "print(network.link, *started, *holders, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    link, *pids = done.stdout.split()
    assert len(pids) == 5, done.stderr
    for pid in pids:
        with waiting_for_the_end_of(int(pid)):
            pass
    deadline = time.monotonic() + 30
    while f"{link}@" in links():  # the kernel takes namespaces down in its own time
        assert time.monotonic() < deadline


def test_a_cache_in_a_node_fetches_over_its_cable_and_serves_without_it(network: Network, tmp_path: Path) -> None:
    data = {f"{number}.bin": bytes([number]) * 100_000 for number in range(5)}
    read = (
        "import hashlib, datacache\n"
        "with datacache.open_snapshot('images') as snapshot:\n"
        "    print(*(hashlib.sha256(snapshot.read(path)).hexdigest() for path in sorted(snapshot.paths())))"
    )
    with (
        RcloneS3(tmp_path / "s3", host=network.address) as store,
        one_home_a_node(network, tmp_path, store.env(), ram_bytes="32MiB", ssd_bytes="64MiB") as (home, other),
    ):
        bucket = store.make_bucket("images")
        for name, content in data.items():
            (bucket / name).write_bytes(content)
        before = home.node.traffic()
        home.snapshot("images", "s3://images", warm=True)
        assert store.get_count("images") == len(data)
        assert home.node.traffic().received_bytes - before.received_bytes >= 500_000
        home.node.cut()
        try:
            got = home.node.run(sys.executable, "-c", read, env=home.env).split()
            assert got == [hashlib.sha256(content).hexdigest() for content in data.values()]
        finally:
            home.node.mend()
        assert store.get_count("images") == len(data)
        other.snapshot("images", "s3://images", warm=True)
        assert store.get_count("images") == 2 * len(data)  # each has a cache of its own
        assert home.daemon is not None
        pid = home.daemon.pid
        home.end_daemon()
        home.start_daemon()
        assert home.daemon.pid != pid
        assert home.processes() == [home.daemon.pid]
    assert home.processes() == []
    assert not home.path.exists()
