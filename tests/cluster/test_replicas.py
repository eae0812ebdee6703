"""Mounts whose node is killed and loses its disk, while another node has all that they acknowledged."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import fuse_mount
from datacache.settings import load_settings
from tests import leftovers
from tests.cluster.three_nodes import Cluster, a_cluster, until
from tests.conformance.faults import Answer, FaultProxy
from tests.exchange.authority import Ca
from tests.netns import NodeHome
from tests.promises import promise

pytestmark = pytest.mark.alone
"""As in `test_nodes`: who gets no processor for a second is passed over."""

ROUNDS = int(os.environ.get("DATACACHE_TEST_KILLS") or 1)
LEASE_S = 7.0
LARGE_BYTES = 3_000_000
"""Too large for the journal, and for one frame."""


class CountingProxy(FaultProxy):
    """Count what was put, by path."""

    def __init__(self, endpoint: str, *, host: str) -> None:
        self.put = Counter[str]()
        super().__init__(endpoint, host=host)

    def forward(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        answer = super().forward(method, path, headers, body)
        whole = method == "PUT" and "?" not in path.replace("?x-id=PutObject", "")
        if answer.status == 200 and (whole or (method == "POST" and "uploadId" in path)):
            self.put[path.partition("?")[0]] += 1
        return answer


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("replicas")
    more = {"replica_lease_s": LEASE_S, "store_timeout_s": 2, "staging_wait_s": 20, "catalog": "mongodb"}
    more["cluster_tls"] = Ca(folder / "ca").issue(folder / "tls")
    with a_cluster(folder, proxy_of=CountingProxy, processes=(1, 2, 1), zones=("a", "a", "b"), **more) as made:
        made.until_all_serve()
        yield made


def replicas_of(cluster: Cluster) -> list[str]:
    """Return which replicas there are, by node."""
    return [f"{home.node.name} {path.name}" for home in cluster.homes for path in home.path.glob("staging/replicas/*")]


def twice(cluster: Cluster, bucket: str) -> list[str]:
    """Return what was put into a bucket more than once."""
    assert isinstance(cluster.proxy, CountingProxy)
    own = f"/{bucket}/.datacache-probe"
    put = cluster.proxy.put.items()
    return [path for path, count in put if count > 1 and path.startswith(f"/{bucket}/") and not path.startswith(own)]


class Mounted:
    """A read-write mount on a node, and what it has acknowledged."""

    def __init__(self, cluster: Cluster, home: NodeHome, bucket: str) -> None:
        self.cluster, self.home, self.bucket = cluster, home, cluster.store.root / bucket
        self.folder = home.path / "mount"
        self.folder.mkdir(exist_ok=True)
        home.dsctl("mount", "--rw", f"s3://{bucket}", self.folder, "--ack", "replicated")
        self.files: dict[str, bytes | None] = {}
        """Content by name; None for what is deleted."""

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)
        self.files[name] = data

    def replica(self) -> str:
        """The second node."""
        return str(self.status()["replica"]["node"])

    def status(self) -> dict[str, Any]:
        """The server's own."""
        return fuse_mount.bucket_status(self.info())

    def info(self) -> fuse_mount.BucketInfo:
        """Return what is mounted."""
        found = fuse_mount.bucket_mount_at(self.folder, load_settings(self.home.env))
        assert found is not None
        return found

    def lose_node(self, writers: Iterable[threading.Thread] = ()) -> None:
        """SIGKILL to all that runs on the node, and take its files away."""
        leftovers.end_processes(self.home.processes)
        self.home.daemon = None
        for writer in writers:  # the dead mount ends them; one that is late would write into the folder below it
            writer.join(60)
        subprocess.run(["umount", "-l", self.folder], check=True)
        for path in self.home.path.iterdir():  # but for the folder, by which the cluster knows the node
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def is_in_bucket(self) -> bool:
        """All that was acknowledged, and nothing that was deleted."""

        def found(name: str) -> bytes | None:
            with suppress(FileNotFoundError):
                return (self.bucket / name).read_bytes()
            return None

        return all(found(name) == data for name, data in self.files.items())


def write_until_killed(mounted: Mounted, seed: int, some: threading.Event) -> None:
    """Write files of both kinds, append, rename and delete, until there is no mount any more."""
    chance = random.Random(seed)
    with suppress(OSError):
        for number in range(10_000):
            name = f"{seed}-{number}"
            mounted.write(name, chance.randbytes(LARGE_BYTES if number % 5 == 0 else 3000))
            if number % 4 == 1:  # an older one under another name, or gone
                old = mounted.folder / name
                data = mounted.files.pop(name)  # not settled until it is acknowledged
                old.rename(mounted.folder / f"{name}-moved")
                mounted.files |= {name: None, f"{name}-moved": data}
            if number % 4 == 3:
                del mounted.files[name]
                (mounted.folder / name).unlink()
                mounted.files[name] = None
            if number == 6:
                some.set()


def lose_second_node(mounted: Mounted) -> NodeHome:
    """Kill the second node while nothing is uploaded, and see another one take its place; return the one killed."""
    mounted.cluster.proxy.refuse()
    mounted.write("small", b"1")
    mounted.write("large", random.Random(1).randbytes(LARGE_BYTES))
    lost = mounted.cluster.homes[2]
    lost.end_daemon(signal.SIGKILL)
    mounted.write("more", b"2")
    assert mounted.replica() == "n2"
    with open(mounted.folder / "large", "r+b") as file:  # in place, of what only this node has seen from the beginning
        file.seek(70_000)
        file.write(b"changed")
        file.truncate(500_000)
        os.fsync(file.fileno())
    large = mounted.files["large"]
    assert large is not None
    mounted.files["large"] = large[:70_000] + b"changed" + large[70_007:500_000]
    mounted.cluster.proxy.accept()
    return lost


@promise("What a mount with `--ack replicated` has acknowledged outlives its node and the node's disk")
@promise("Where the second node is lost, another one has all that is pending before anything more is acknowledged")
def test_nodes_and_a_disk_are_lost_while_files_are_written(cluster: Cluster) -> None:
    proxy = cluster.proxy
    for turn in range(ROUNDS):
        bucket = f"lost-{turn}"
        cluster.store.make_bucket(bucket)
        lost = [cluster.homes[0]]
        mounted = Mounted(cluster, lost[0], bucket)
        until(lambda mounted=mounted: mounted.replica() == "n3")  # of another zone
        if turn == 0:
            lost.append(lose_second_node(mounted))
        some = [threading.Event() for _ in range(2)]
        writers = [
            threading.Thread(target=write_until_killed, args=(mounted, seed, event)) for seed, event in enumerate(some)
        ]
        for writer in writers:
            writer.start()
        for event in some:
            assert event.wait(60)
        if turn % 2 == 0:
            proxy.refuse()  # what follows is only on the two disks
            mounted.files["away"] = None
            with suppress(OSError):
                mounted.write("away", b"while the store was away")
        mounted.lose_node(writers)
        proxy.accept()
        assert mounted.files["away"] if turn % 2 == 0 else mounted.files
        until(mounted.is_in_bucket)
        for home in lost:
            home.start_daemon()
        cluster.until_all_serve()
        until(lambda: not replicas_of(cluster))
        assert twice(cluster, bucket) == []


def cut(home: NodeHome) -> Callable[[], object]:
    """Cut a node off; return what brings it back."""
    home.node.cut()
    return home.node.mend


def stop(home: NodeHome) -> Callable[[], object]:
    """Stop all that runs on a node; return what brings it back."""
    pids = home.processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return lambda: [os.kill(pid, signal.SIGCONT) for pid in pids]


@promise("Where a node comes back whose staging area another one has taken over, nothing of it is uploaded again")
@pytest.mark.parametrize("put_away", [cut, *([stop] if ROUNDS > 1 else [])])
def test_a_node_that_was_away_for_longer_than_its_lease_uploads_nothing_any_more(
    cluster: Cluster, put_away: Callable[[NodeHome], Callable[[], object]]
) -> None:
    bucket, home = f"back-{put_away.__name__}", cluster.homes[0]
    (cluster.store.make_bucket(bucket) / "first").write_bytes(b"1")
    mounted = Mounted(cluster, home, bucket)
    assert (mounted.folder / "first").read_bytes() == b"1"
    cluster.proxy.refuse()
    mounted.write("first", b"2")
    mounted.write("large", bytes(LARGE_BYTES))
    come_back = put_away(home)
    cluster.proxy.accept()
    until(mounted.is_in_bucket)
    until(lambda: not replicas_of(cluster))
    (mounted.bucket / "first").write_bytes(b"3, of somebody else")
    mounted.files["first"] = b"3, of somebody else"
    assert isinstance(cluster.proxy, CountingProxy)
    put = Counter(cluster.proxy.put)
    come_back()
    until(lambda: "has taken over what was pending here" in mounted.status()["halted"])
    with pytest.raises(OSError, match="Input/output"):
        (mounted.folder / "refused").write_bytes(b"nobody was told that this is kept")
    assert "→ Unmount here (dsctl umount --no-wait)" in home.dsctl("status")
    home.dsctl("umount", "--no-wait", mounted.folder)
    assert cluster.proxy.put == put
    again = Mounted(cluster, home, bucket)
    assert [path.name for path in home.path.glob(f"staging/s3-{bucket}-*.taken-*")]
    assert (again.folder / "first").read_bytes() == b"3, of somebody else"
    again.write("second", b"4")
    os.kill(again.info().pid, signal.SIGKILL)  # the next server brings all of it anew
    again.write("third", b"5")
    assert again.replica()
    home.dsctl("umount", again.folder)
    assert again.is_in_bucket()
    assert mounted.is_in_bucket()
    until(lambda: not replicas_of(cluster))


@promise("While MongoDB is away, a mount with `--ack replicated` stays its node's, and goes on when it is back")
def test_mongodb_is_away_for_longer_than_a_lease(cluster: Cluster) -> None:
    cluster.store.make_bucket("mongo")
    mounted, mongod = Mounted(cluster, cluster.homes[0], "mongo"), cluster.mongod
    assert mongod is not None
    cluster.proxy.refuse()
    mounted.write("first", b"1")
    with mongod.away(stopped=True):
        since = time.monotonic()
        until(lambda: "could not be renewed" in mounted.status()["halted"])
        with pytest.raises(OSError, match="Input/output"):
            (mounted.folder / "refused").write_bytes(b"nobody was told that this is kept")
        cluster.proxy.accept()
        until(lambda: time.monotonic() > since + LEASE_S)
        assert not mounted.is_in_bucket()
    until(mounted.is_in_bucket)
    until(lambda: not mounted.status()["halted"])
    mounted.write("second", b"2")
    assert mounted.replica()
    mounted.home.dsctl("umount", mounted.folder)
    assert mounted.is_in_bucket()
    assert twice(cluster, "mongo") == []
    until(lambda: not replicas_of(cluster))


@promise("Without a second node `--ack replicated` fails, or goes on with this node alone, as `DATACACHE_REPLICA` says")
def test_without_a_second_node_writes_fail_or_go_on_as_the_setting_says(cluster: Cluster) -> None:
    cluster.store.make_bucket("alone")
    home, lost, full = cluster.homes
    disk = full.path / "staging" / "replicas"
    disk.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=True)
    kept = dict(home.env)
    try:
        home.env |= {
            "DATACACHE_STAGING_WAIT_S": "1",
            "DATACACHE_CLUSTER_KEY": "another key, and not that of the others",
        }
        mounted = Mounted(cluster, home, "alone")
        with pytest.raises(OSError, match="Input/output"):
            (mounted.folder / "refused").write_bytes(b"1")
        assert "the node n3 does not take it: the keys of the two nodes differ" in home.dsctl("status")
        home.dsctl("umount", mounted.folder)
        lost.end_daemon(signal.SIGKILL)
        cluster.proxy.refuse()
        home.env |= {"DATACACHE_CLUSTER_KEY": kept["DATACACHE_CLUSTER_KEY"], "DATACACHE_REPLICA": "prefer"}
        mounted = Mounted(cluster, home, "alone")
        mounted.write("alone", bytes(LARGE_BYTES))
        [line] = [line for line in home.dsctl("status").splitlines() if "no second node has all" in line]
        assert "the node n2 does not take it" in line
        assert "is full: No space left on device" in line
        cluster.proxy.accept()
        home.dsctl("umount", mounted.folder)
        assert mounted.is_in_bucket()
        until(lambda: not replicas_of(cluster))
    finally:
        cluster.proxy.accept()
        home.env = kept
        subprocess.run(["umount", "-l", disk], check=True)
        lost.start_daemon()
