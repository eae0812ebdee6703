"""The members of a cluster: leases in a real MongoDB, by its clock; the list in the settings; what has to be set."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pymongo
import pytest

from datacache.cluster.members import DRAINING, JOINING, SERVING, Member, StaticMembers, open_members, read_cluster_key
from datacache.cluster.mongo_members import MongoMembers
from datacache.core.errors import CatalogError, NodeTakenError, SettingsError
from datacache.settings import Settings, load_settings
from tests.servers import Mongod

KEY = "0123456789abcdef"


@pytest.fixture
def url(mongod: Mongod) -> str:
    return mongod.database_url()


def a_node(url: str, name: str, *, holder: str = "", address: str = "", **options: float) -> MongoMembers:
    me = Member(name, address or f"{name}.example:7070", 1e9, "north", JOINING)
    return MongoMembers(url, "lab", me, holder=holder or f"home of {name}", **options)


def names(node: MongoMembers) -> list[str]:
    node.refresh()
    return [member.id for member in node.view.members]


def until(true: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + 30, threading.Event()
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        pause.wait(0.02)


@contextmanager
def leases_of(url: str) -> Iterator[pymongo.collection.Collection[dict[str, object]]]:
    with pymongo.MongoClient(url) as client:
        yield client.get_default_database()["cluster_members"]


def test_members_tell_since_when_they_are_in_their_state(url: str) -> None:
    a = a_node(url, "a")
    assert a.problem  # nobody has told anything yet
    a.refresh()

    def since(state: str) -> int:
        a.set_state(state)
        a.refresh()
        [member] = a.view.members
        assert member.state == state
        return member.since_ms

    joined = since(JOINING)
    assert joined > 1e12
    served = since(SERVING)
    assert served >= joined
    assert since(SERVING) == served  # renewed
    end_lease(url, "a")
    again = since(SERVING)  # nobody counted on it meanwhile
    assert again > served
    assert since(DRAINING) >= again


def end_lease(url: str, name: str) -> None:
    """Have as much time pass for a lease as it lasts, without waiting."""
    with leases_of(url) as leases:
        changed = leases.update_one({"_id": f"lab/{name}"}, [{"$set": {"until": "$$NOW"}}])
        assert changed.modified_count == 1


def test_nodes_learn_of_each_other_and_of_states_addresses_and_weights(url: str) -> None:
    a, b = a_node(url, "a"), a_node(url, "b")
    a.start()
    b.start()
    a.set_state(SERVING)
    b.set_state(DRAINING)
    until(lambda: [m.state for m in b.view.members] == [SERVING, DRAINING])
    until(lambda: a.view.members == b.view.members)
    assert replace(a.view.members[1], since_ms=0) == Member("b", "b.example:7070", 1e9, "north", DRAINING)
    b.stop()
    until(lambda: [m.id for m in a.view.members] == ["a"])  # at once, not when the lease has ended
    a.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "cluster-members"]
    with leases_of(url) as leases:
        assert leases.count_documents({}) == 0


def test_who_reads_the_members_need_not_be_one(url: str) -> None:
    a, looks = a_node(url, "a"), a_node(url, "looks")
    a.refresh()
    looks.read()
    looks.stop()
    a.refresh()
    assert [[m.id for m in each.view.members] for each in (a, looks)] == [["a"], ["a"]]
    a.stop()


def test_clusters_in_one_database_do_not_meet(url: str) -> None:
    a, other = a_node(url, "a"), MongoMembers(url, "other", Member("b", "b:1", 1.0), holder="b")
    assert (names(a), names(other), names(a)) == (["a"], ["b"], ["a"])


def test_a_view_gets_another_version_only_when_members_change(url: str) -> None:
    a, b = a_node(url, "a"), a_node(url, "b")
    assert names(a) == ["a"]
    first = a.view
    assert names(a) == ["a"]
    assert a.view.version == first.version
    names(b)
    assert names(a) == ["a", "b"]
    assert a.view.version == first.version + 1


def test_a_node_whose_lease_has_ended_is_gone_and_comes_back_when_it_renews(url: str) -> None:
    a, b = a_node(url, "a"), a_node(url, "b")
    names(b)
    assert names(a) == ["a", "b"]
    end_lease(url, "b")
    assert names(a) == ["a"]
    assert names(b) == ["a"]  # it notices, before a renewal is due
    assert names(b) == ["a", "b"]


def test_a_lease_from_before_the_databases_clock_was_set_back_does_not_last(url: str) -> None:
    a, dead = a_node(url, "a"), a_node(url, "dead")
    names(dead)
    with leases_of(url) as leases:
        leases.update_one({"_id": "lab/dead"}, [{"$set": {"until": {"$add": ["$$NOW", 3_600_000]}}}])
    assert names(a) == ["a"]


def test_a_restarted_node_takes_its_own_lease_over_at_once_also_at_another_address(url: str) -> None:
    killed, other = a_node(url, "a"), a_node(url, "b")
    names(killed)
    again = a_node(url, "a", address="10.0.0.9:7070")
    assert names(again) == ["a"]
    other.refresh()
    assert [m.address for m in other.view.members] == ["10.0.0.9:7070", "b.example:7070"]


def test_the_second_of_two_nodes_with_one_id_is_told_where_the_first_is(url: str) -> None:
    first = a_node(url, "a")
    first.refresh()
    second = a_node(url, "a", holder="another home", address="10.0.0.9:7070")
    with pytest.raises(NodeTakenError, match=r"another node 'a', at a\.example:7070") as caught:
        second.start()
    assert caught.value.address == "a.example:7070"
    assert "DATACACHE_NODE" in caught.value.hint
    second.stop()  # takes nothing from the first
    assert names(first) == ["a"]
    end_lease(url, "a")
    second = a_node(url, "a", holder="another home", address="10.0.0.9:7070")
    assert names(second) == ["a"]
    assert second.view.members[0].address == "10.0.0.9:7070"
    first._renewed_at = float("-inf")
    with pytest.raises(NodeTakenError, match=r"10\.0\.0\.9"):  # it slept for longer than its lease
        first.refresh()
    assert first.view.members == second.view.members


def test_a_nodes_wrong_clock_changes_nothing(url: str) -> None:
    """Its lease lasts as long as others', and others' leases last for it."""
    a = a_node(url, "a")
    for days in ("+3d", "-3d"):
        a.refresh()
        shown = subprocess.run(
            ["faketime", "--exclude-monotonic", "-f", days, sys.executable, "-c", SHOW, url],
            env=os.environ | {"NO_FAKE_STAT": "1", "FAKETIME_FORCE_MONOTONIC_FIX": "0"},
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert abs(json.loads(shown.stdout)["clock"] - time.time()) > 86_400
        assert json.loads(shown.stdout)["members"] == ["a", "wrong"]
        assert names(a) == ["a", "wrong"]
        assert a.view.members[1].seen_s < 60
        end_lease(url, "wrong")
        assert names(a) == ["a"]


SHOW = """
import json, sys, time
from tests.cluster.test_members import a_node, names
print(json.dumps({"clock": time.time(), "members": names(a_node(sys.argv[1], "wrong"))}))
"""


def test_while_mongodb_is_away_the_last_view_stays_and_renewal_goes_on_afterwards(tmp_path: Path) -> None:
    with Mongod(tmp_path / "mongod") as server:
        url = f"{server.database_url()}?serverSelectionTimeoutMS=200&heartbeatFrequencyMS=500"
        a, b = a_node(url, "a", lease_s=2.0), a_node(url, "b", lease_s=2.0)
        b.refresh()
        a.start()
        assert [m.id for m in a.view.members] == ["a", "b"]
        server.stop()
        until(lambda: a.problem)
        assert [m.id for m in a.view.members] == ["a", "b"]
        with pytest.raises(CatalogError):
            b.refresh()
        a.set_state(SERVING)
        server.start()
        until(
            lambda: not a.problem and [(m.id, m.state) for m in a.view.members] == [("a", SERVING)]
        )  # b did not renew
        a.stop()


def test_a_node_starts_while_mongodb_is_away_and_joins_when_it_is_back(tmp_path: Path) -> None:
    with Mongod(tmp_path / "mongod") as server:
        server.stop()
        a = a_node(f"{server.database_url()}?serverSelectionTimeoutMS=200&heartbeatFrequencyMS=500", "a", lease_s=2.0)
        a.start()
        assert a.view.members == ()
        assert "MongoDB" in a.problem
        server.start()
        until(lambda: [m.id for m in a.view.members] == ["a"])
        server.stop()
        a.stop()  # the lease ends by itself


def test_a_lease_that_cannot_be_read_is_passed_over(url: str) -> None:
    a, b = a_node(url, "a"), a_node(url, "b")
    b.refresh()
    odd = {"node": [5, "a"], "address": [7, "b", "b:99999"], "weight": [None, "x", math.inf, math.nan], "seen": ["now"]}
    with leases_of(url) as leases:
        lease = leases.find_one({"node": "b"})
        assert lease is not None
        for changed in ({name: value} for name, values in odd.items() for value in values):
            leases.replace_one({"_id": lease["_id"]}, lease | changed)
            assert names(a) == ["a"], changed
        leases.replace_one({"_id": lease["_id"]}, lease | {"since": "then"})
        assert names(a) == ["a", "b"]


def test_leases_that_ended_long_ago_are_removed(url: str) -> None:
    gone, a = a_node(url, "gone"), a_node(url, "a")
    gone.refresh()
    with leases_of(url) as leases:
        leases.update_one({}, [{"$set": {"until": {"$subtract": ["$$NOW", 2 * 86_400_000]}}}])
        a.start()
        until(lambda: leases.count_documents({"node": "gone"}) == 0)
        a.stop()


# --- the list, and what has to be set --------------------------------------------------------------------------------


@pytest.fixture
def joined(home: Path, tmp_path: Path) -> Settings:
    """Settings with all that a node of a listed cluster needs."""
    settings = load_settings()
    listed = ("a=10.0.0.1:7070/north*2", "b=[fd00::1]:7070")
    return replace(settings, cluster="lab", listen="10.0.0.1:7070", cluster_key=KEY, cluster_members=listed, node="a")


def test_the_list_in_the_settings_is_the_members(joined: Settings) -> None:
    found = open_members(joined, "holder")
    assert isinstance(found, StaticMembers)
    found.start()
    assert found.view.members == (Member("a", "10.0.0.1:7070", 2.0, "north"), Member("b", "[fd00::1]:7070", 1.0))
    found.set_state(DRAINING)
    assert [m.state for m in found.view.members] == [DRAINING, SERVING]
    found.stop()


@pytest.mark.parametrize(
    ("node", "listen"), [("a", "0.0.0.0:7070"), ("a", "[::]:7070"), ("b", "[fd00:0:0::1]:7070"), ("a", "a.lan:7070")]
)
def test_a_node_listens_at_its_address_in_the_list_however_that_is_written(
    joined: Settings, node: str, listen: str
) -> None:
    found = open_members(replace(joined, node=node, listen=listen), "holder")
    assert found is not None
    assert [member.address for member in found.view.members if member.id == node] == [listen]


def test_a_node_without_a_cluster_has_no_members(settings: Settings) -> None:
    assert open_members(settings, "holder") is None


@pytest.mark.parametrize(
    ("change", "message", "way_out"),
    [
        ({"listen": ""}, "not where this node listens", "DATACACHE_LISTEN"),
        ({"cluster_key": ""}, "no key", "DATACACHE_CLUSTER_KEY_FILE"),
        ({"cluster_key_file": Path("/nowhere")}, "both", "Unset one"),
        ({"cluster_key": "", "cluster_key_file": Path("/nowhere")}, "cannot be read", "openssl"),
        (
            {"cluster_key": "", "cluster_key_file": Path("/dev/null")},
            "DATACACHE_CLUSTER_KEY_FILE /dev/null has 0 bytes",
            "openssl",
        ),
        ({"node": "c"}, "'c' is not in DATACACHE_CLUSTER_MEMBERS", "one of a, b"),
        ({"cluster_members": ()}, "in MongoDB, and this node", "DATACACHE_CLUSTER_MEMBERS"),
        ({"listen": "10.0.0.2:7070"}, "is 10.0.0.2:7070, and .* has a at 10.0.0.1:7070", "the same"),
        ({"listen": "0.0.0.0:7071"}, "is 0.0.0.0:7071, and .* has a at 10.0.0.1:7070", "the same"),
        ({"zone": "south"}, "is south, and .* has a in the zone north", "unset DATACACHE_ZONE"),
        ({"zone": "south", "node": "b", "listen": "[::]:7070"}, "has no zone for b", "unset DATACACHE_ZONE"),
        (
            {"cluster_members": (), "catalog": "mongodb://db/x", "listen": "0.0.0.0:7070"},
            "no other node could reach",
            "10.0.0.7:7070",
        ),
    ],
)
def test_a_setting_that_a_cluster_needs_is_asked_for(
    joined: Settings, change: dict[str, object], message: str, way_out: str
) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        open_members(replace(joined, **change), "holder")
    assert way_out in caught.value.hint
    assert KEY not in f"{caught.value} {caught.value.hint}"


def test_the_key_comes_from_its_variable_or_its_file_without_the_line_end(joined: Settings, tmp_path: Path) -> None:
    assert read_cluster_key(joined) == KEY.encode()
    (tmp_path / "key").write_text(f"{KEY}7\n")
    assert read_cluster_key(replace(joined, cluster_key="", cluster_key_file=tmp_path / "key")) == f"{KEY}7".encode()
    assert KEY not in repr(joined)


def test_a_shared_catalog_leads_to_members_by_leases(joined: Settings, url: str) -> None:
    found = open_members(replace(joined, cluster_members=(), catalog=url, zone="south"), "holder")
    assert isinstance(found, MongoMembers)
    found.refresh()
    [member] = found.view.members
    assert replace(member, since_ms=0) == Member("a", "10.0.0.1:7070", float(joined.ssd_bytes), "south", JOINING)
    found.stop()
