"""`dsctl cluster`, and what `cache status` and the metrics say of a cluster, with two real daemons."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from datacache import api
from datacache.api import node
from datacache.core.errors import CacheError
from tests.cli.conftest import Dsctl
from tests.servers import Mongod, free_port

_KEY = {"DATACACHE_CLUSTER": "lab", "DATACACHE_CLUSTER_KEY": "a key of sixteen bytes or more"}


class Pair:
    """The variables of two nodes `a` and `b`, with a home each and one catalog."""

    def __init__(self, homes: dict[str, Path], catalog: str, members: str = "") -> None:
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in homes}
        listed = {"DATACACHE_CLUSTER_MEMBERS": members.format(**self.addresses)} if members else {}
        self.a, self.b = (
            _KEY
            | listed
            | {
                "DATACACHE_HOME": str(home),
                "DATACACHE_CATALOG": catalog,
                "DATACACHE_NODE": name,
                "DATACACHE_LISTEN": self.addresses[name],
            }
            for name, home in homes.items()
        )


@pytest.fixture
def homes(home: Path, tmp_path_factory: pytest.TempPathFactory, dsctl: Dsctl) -> Iterator[dict[str, Path]]:
    """The home of the test, and another one, whose daemon is stopped at the end."""
    other = tmp_path_factory.mktemp("b")
    yield {"a": home, "b": other}
    dsctl("daemon", "stop", DATACACHE_HOME=str(other))


def test_status_tells_members_and_what_came_from_them(dsctl: Dsctl, homes: dict[str, Path], bucket: Path) -> None:
    nodes = Pair(homes, f"sqlite:///{homes['a']}/catalog.db", "a={a}/x b={b}/x*9999999")  # b owns nearly all
    assert dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1", **nodes.a).code == 0
    assert dsctl("daemon", "start", **nodes.b).code == 0
    warmed = dsctl("warm", "mask@v1", **nodes.a)
    assert warmed.code == 0
    state = dsctl("cluster", "status", "--json", **nodes.a).json
    assert (state["cluster"], state["node"], state["problem"], state["listed"]) == ("lab", "a", "", True)
    assert [(each["node"], each["this"], each["state"]) for each in state["members"]] == [
        ("a", True, "serving"),
        ("b", False, "serving"),
    ]
    given = state["from_nodes"]
    # On a busy machine b may be later than it has.
    assert given["blocks"] > 0
    assert given["blocks"] + given["missed"] == 3
    assert f", {given['bytes']} B of these from other nodes" in warmed.out
    assert (given["bytes"] == 902) == (given["blocks"] == 3)
    shown = dsctl("cluster", "status", **nodes.a)
    assert shown.err == ""
    rows = [re.split(r"\s{2,}", line) for line in shown.out.splitlines()]
    assert rows[1:3] == [
        ["a", nodes.addresses["a"], "x", "serving", "0.0%", "-", "this node"],
        ["b", nodes.addresses["b"], "x", "serving", "100.0%", "-"],
    ]
    size = f"{given['bytes']} B"
    said = f"{given['blocks']} blocks ({size}) came from other nodes, {given['missed']} questions brought none"
    assert rows[3] == [f"cluster lab; mode share; {said}"]
    assert f"cluster lab: {said}" in dsctl("cache", "status", **nodes.a).out
    metrics = dsctl("status", "--metrics", **nodes.a).out
    for name, value in (("blocks", given["blocks"]), ("bytes", given["bytes"]), ("misses", given["missed"])):
        assert f"datacache_peer_{name}_total {value}\n" in metrics
    assert 'datacache_cluster_members{state="serving"} 2.0\n' in metrics

    assert dsctl("daemon", "stop", **nodes.b).code == 0
    assert dsctl("cache", "evict", "--all", **nodes.a).code == 0
    assert dsctl("warm", "mask@v1", **nodes.a).code == 0
    state = dsctl("cluster", "status", "--json", **nodes.a).json
    assert state["from_nodes"]["blocks"] == given["blocks"]
    assert state["from_nodes"]["missed"] > given["missed"]
    assert [bool(each["problem"]) for each in state["members"]] == [False, True]
    assert "Connection refused" in dsctl("cluster", "status", **nodes.a).out
    assert dsctl("daemon", "start", **nodes.b).code == 0
    assert [each["problem"] for each in dsctl("cluster", "status", "--json", **nodes.a).json["members"]] == ["", ""]


def test_doctor_tells_which_node_does_not_let_this_one_in(dsctl: Dsctl, homes: dict[str, Path]) -> None:
    nodes = Pair(homes, f"sqlite:///{homes['a']}/catalog.db", "a={a} b={b}")

    def told(*more: str, **changed: str) -> list[tuple[str, str, str]]:
        found = dsctl("doctor", "--json", **nodes.a | changed).json["checks"]
        names = ("cluster", "node", *more)
        return [(each["name"], each["state"], each["message"]) for each in found if each["name"] in names]

    away = ("cluster", "fail", "lab: 1 other node, 1 with a problem")
    at = f"b at {nodes.addresses['b']}"
    out = ("daemon", "warn", "not running: this node is not in the cluster 'lab' now")
    assert told("daemon") == [out, away, ("node", "warn", f"{at}: Connection refused")]
    assert told(DATACACHE_NODE="c") == [("cluster", "fail", "the node 'c' is not in DATACACHE_CLUSTER_MEMBERS")]
    assert dsctl("daemon", "start", **nodes.b | {"DATACACHE_CLUSTER_KEY": "another key of sixteen bytes"}).code == 0
    differ = [away, ("node", "warn", f"{at}: the keys of the two nodes differ")]
    assert told() == differ  # by this process
    assert dsctl("daemon", "start", **nodes.a).code == 0
    assert told() == differ  # by the daemon
    assert dsctl("daemon", "stop", **nodes.b).code == 0
    assert dsctl("daemon", "start", **nodes.b).code == 0
    assert told() == [("cluster", "ok", "lab: 1 other node, which can be asked")]
    assert dsctl("daemon", "stop", **nodes.a).code == 0
    listed = nodes.a["DATACACHE_CLUSTER_MEMBERS"]
    another = {"DATACACHE_CLUSTER_MEMBERS": f"{listed}*2"}
    assert told(**another) == [away, ("node", "warn", f"{at}: it has another list of members")]
    reordered = {"DATACACHE_CLUSTER_MEMBERS": ",".join(reversed(listed.split()))}
    assert told(**reordered) == [("cluster", "ok", "lab: 1 other node, which can be asked")]


def test_a_node_of_a_list_drains_at_the_word_of_another(dsctl: Dsctl, homes: dict[str, Path], bucket: Path) -> None:
    nodes = Pair(homes, f"sqlite:///{homes['a']}/catalog.db", "a={a} b={b}")
    for number in range(30):  # so many that each of the two owns some
        (bucket / f"{number}.bin").write_bytes(bytes([number]))
    assert dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1", **nodes.a).code == 0

    def fetched() -> int:
        return int(re.findall(r"^datacache_fetched_total (\d+)$", dsctl("status", "--metrics", **nodes.a).out, re.M)[0])

    assert dsctl("daemon", "start", **nodes.a).code == 0
    unknown = dsctl("cluster", "drain", "c", "--json", **nodes.a)
    assert (unknown.code, unknown.error["message"]) == (2, "the cluster has no node 'c'")
    away = dsctl("cluster", "drain", "b", "--json", **nodes.a)
    assert away.code == 1
    assert away.error["message"].startswith(f"the node 'b' at {nodes.addresses['b']} cannot be told to drain")
    assert dsctl("daemon", "start", **nodes.b).code == 0
    assert dsctl("warm", "mask@v1", **nodes.b).code == 0
    own = fetched()
    assert own < 33
    drained = dsctl("cluster", "drain", "b", "--json", **nodes.a)
    assert drained.code == 0, drained.err
    assert drained.json == {"node": "b", "state": "drained", "left": 0}
    rows = dsctl("cluster", "status", **nodes.a).out.splitlines()
    assert re.split(r"\s{2,}", rows[1])[3:5] == ["serving", "100.0%"]
    assert re.split(r"\s{2,}", rows[2])[3:5] == ["drained", "-"]
    assert dsctl("daemon", "stop", **nodes.b).code == 0
    assert "b → If it is gone for good, take it off" in dsctl("cluster", "status", **nodes.a).out
    assert dsctl("warm", "mask@v1", **nodes.a).code == 0
    assert fetched() == own


def test_others_learn_by_leases_that_a_node_drains(dsctl: Dsctl, homes: dict[str, Path], mongod: Mongod) -> None:
    nodes = Pair(homes, mongod.database_url())
    for variables in (nodes.a, nodes.b):
        assert dsctl("daemon", "start", **variables).code == 0
    drained = dsctl("cluster", "drain", "--no-wait", "--json", **nodes.a)
    assert drained.json == {"node": "a", "state": "draining"}
    assert dsctl("cluster", "drain", "a", **nodes.a).out.startswith("node a has drained")

    def states() -> list[tuple[str, str]]:
        return [
            (each["node"], each["state"]) for each in dsctl("cluster", "status", "--json", **nodes.b).json["members"]
        ]

    deadline = time.monotonic() + 60
    while states() != [("a", "drained"), ("b", "serving")]:  # read every two seconds
        assert time.monotonic() < deadline, states()
        time.sleep(0.1)
    assert " s ago" in dsctl("cluster", "status", **nodes.b).out


def test_a_drain_is_followed_until_the_node_has_drained_or_does_so_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(*states: str) -> list[str]:
        told = (
            {"problem": "", "members": [{"node": "a", "state": state, "left": 0}] if state else []} for state in states
        )
        monkeypatch.setattr(node, "_member", lambda _: SimpleNamespace(cluster=lambda: next(told)))
        return [member["state"] for member in api.follow_drain("a")]

    monkeypatch.setattr(node, "_DRAIN_POLL_S", 0)
    for states in (
        ["serving", "draining", "drained"],
        ["draining", "serving"],
        ["draining", "joining"],
        ["draining", ""],
    ):
        assert seen(*states, "more") == states


def test_a_node_that_cannot_start_says_what_to_set(dsctl: Dsctl, home: Path) -> None:
    refused = dsctl("daemon", "start", "--json", **_KEY, DATACACHE_CLUSTER_MEMBERS="a=127.0.0.1:7071")
    assert refused.code != 0
    assert "not where this node listens" in refused.error["message"]
    assert "DATACACHE_LISTEN" in refused.error["hint"]
    for command in (("cluster", "status"), ("cluster", "drain"), ("daemon", "status")):
        later = dsctl(*command, "--json", **_KEY)
        assert later.error["message"].startswith("no daemon runs for")
        assert "not where this node listens" in later.error["hint"]
    assert "not where this node listens" in dsctl("status").err
    [check] = [each for each in dsctl("doctor", "--json").json["checks"] if each["name"] == "daemon"]
    assert check["state"] == "fail"
    assert "not where this node listens" in check["message"]
    assert dsctl("daemon", "start").code == 0
    assert dsctl("daemon", "stop").code == 0
    [check] = [each for each in dsctl("doctor", "--json").json["checks"] if each["name"] == "daemon"]
    assert check["state"] == "ok"


@pytest.mark.parametrize("problem", ["", "MongoDB does not answer"])
def test_following_a_node_that_gets_no_further_ends(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    def drain(_: str) -> None:
        raise CacheError("the node 'a' cannot be told to drain: timed out")

    listed = {"problem": problem, "members": [{"node": "a", "state": "draining", "left": 5}]}
    monkeypatch.setattr(node, "_member", lambda _: SimpleNamespace(cluster=lambda: listed, drain=drain))
    monkeypatch.setattr(node, "_DRAIN_POLL_S", 0)
    monkeypatch.setattr(node, "_DRAIN_SILENT_S", 0)
    with pytest.raises(CacheError, match=problem or "cannot be told to drain"):
        for _ in api.follow_drain("a"):
            pass


@pytest.mark.parametrize("what", ["status", "drain"])
def test_a_node_in_no_cluster_says_how_to_be_in_one(dsctl: Dsctl, home: Path, what: str) -> None:
    refused = dsctl("cluster", what, "--json")
    assert refused.code == 2
    assert "in no cluster" in refused.error["message"]
    assert "DATACACHE_CLUSTER" in refused.error["hint"]
    assert dsctl("daemon", "start").code == 0
    assert 'datacache_cluster_members{state="serving"} 0' in dsctl("status", "--metrics").out


def test_a_view_that_may_be_old_is_told_with_the_reason(dsctl: Dsctl, homes: dict[str, Path]) -> None:
    nodes = Pair(homes, f"mongodb://127.0.0.1:{free_port()}/x?serverSelectionTimeoutMS=200")
    started = dsctl("daemon", "start", **nodes.a)
    assert started.code == 0
    assert started.err.startswith("warning: cluster lab: MongoDB at ")
    shown = dsctl("cluster", "status", **nodes.a)
    assert shown.code == 0
    assert shown.err.startswith("warning: no members are known yet: ")
    assert dsctl("cluster", "status", "--json", **nodes.a).json["problem"]
