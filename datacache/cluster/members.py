"""Which nodes are in the cluster: members, views of them, and the list in the settings.

A *view* is what a node believes at a moment. It may be old: that costs a GET, never a wrong byte. Values are immutable,
so any thread may read them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from datacache.core.errors import SettingsError
from datacache.core.nodes import LEAST_KEY_BYTES, ListedNode, host_ip, is_everywhere, parse_node
from datacache.settings import Settings

log = logging.getLogger(__name__)
JOINING = "joining"
"""The node answers, and owns nothing yet."""
SERVING = "serving"
"""The node owns its share of the blocks."""
DRAINING = "draining"
"""The node owns nothing any more, and hands over what it has; until then the new owners ask it."""
DRAINED = "drained"
"""The node has handed over all that found room elsewhere."""
IN_NO_CLUSTER = "this node is in no cluster"
JOIN_A_CLUSTER = "Set DATACACHE_CLUSTER and start the daemon again: docs/CLUSTER.md"
STATES = (JOINING, SERVING, DRAINING, DRAINED)


@dataclass(frozen=True, slots=True)
class Member:
    """One node of a cluster, as its lease or the list says. `seen_s` does not count when two are compared."""

    id: str
    address: str
    """`HOST:PORT`, where other nodes reach it. A node recognises itself by its id and this."""
    weight: float
    """Share of the blocks in relation to others: the capacity in bytes, or a number of the list."""
    zone: str = ""
    state: str = SERVING
    """One of `STATES`; what a later version adds owns nothing here."""
    since_ms: int = 0
    """Since when it is in its state, in ms of the database's clock; 0 for all members of a list."""
    left: int = field(default=0, compare=False)
    """The blocks that a node which drains has still to look at; of one that has drained, those that no other node
    took. Does not count when two are compared, either."""
    seen_s: float = field(default=0.0, compare=False)
    """How long ago the node renewed its lease, by the database's clock, when the view was read."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The members that a node knew of at a moment, sorted by id."""

    members: tuple[Member, ...] = ()
    version: int = 0
    """Grows whenever the members change, on this node only."""
    read_at: float = field(default=0.0, compare=False)
    """When it was read, by `time.monotonic()`."""

    def replaced(self, members: list[Member]) -> ClusterView:
        """Return the view with the members of now. The version stays if none came, went or changed."""
        found = tuple(sorted(members, key=lambda member: member.id))
        return ClusterView(found, self.version + (found != self.members), time.monotonic())

    def encode(self) -> bytes:
        """Return the view for `ShownMembers`."""
        return json.dumps([self.version, [asdict(member) for member in self.members]]).encode()


class Members(Protocol):
    """Where a node learns the members of its cluster, and tells the others of itself. Any thread may call."""

    @property
    def view(self) -> ClusterView:
        """The newest view. Never waits."""

    @property
    def problem(self) -> str:
        """Say why the view may be old, for people; '' if it is not."""

    def read(self) -> None:
        """Read the view once, without joining. Raises the catalog's errors."""

    def start(self) -> None:
        """Join the cluster. Raises `NodeTakenError` if another living node has this id."""

    def set_state(self, state: str, left: int = 0) -> None:
        """Tell the others, soon, the state of this node, and how many blocks are `Member.left`."""

    def stop(self) -> None:
        """Leave the cluster and end what `start` began. Idempotent."""


class StaticMembers:
    """The members that the settings list. No node is told when one goes: it notices that it gets no answer.
    Their states come from themselves (`Peers.tell`)."""

    problem = ""

    def __init__(self, node: str, members: tuple[Member, ...]) -> None:
        """`node` is the id of this node, which has to be in the list."""
        if node not in [member.id for member in members]:
            raise SettingsError(
                f"the node {node!r} is not in DATACACHE_CLUSTER_MEMBERS",
                hint=f"Set DATACACHE_NODE to one of {', '.join(m.id for m in members)}, or add it to the list.",
            )
        self._node = node
        self._lock = threading.Lock()  # held while the view is replaced
        self.view = ClusterView().replaced(list(members))

    def read(self) -> None:
        """Do nothing: the list is all there is."""

    def start(self) -> None:
        """Do nothing: the list is all there is."""

    def set_state(self, state: str, left: int = 0) -> None:
        """Note this node's state. The others do not learn it from here."""
        self.note(self._node, state, left)

    def note(self, node: str, state: str, left: int) -> None:
        """Note the state of a node, if it is in the list."""
        with self._lock:
            members = [replace(m, state=state, left=left) if m.id == node else m for m in self.view.members]
            self.view = self.view.replaced(members)

    def stop(self) -> None:
        """Do nothing."""


class ShownMembers:
    """The members as the process that takes part in the cluster shows them to others of its node, in a file. Nobody is
    there until it does."""

    problem = ""

    def __init__(self, path: Path) -> None:
        """`path` is the file, which has `ClusterView.encode`."""
        self._path = path
        self._seen: tuple[object, ClusterView] = (None, ClusterView())

    @property
    def view(self) -> ClusterView:
        """The view that the file has now, or had when it could be read last."""
        seen, view = self._seen
        with contextlib.suppress(OSError):  # it is not there yet, or the disk fails
            status = os.stat(self._path)
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp != seen:
                version, members = json.loads(self._path.read_bytes())
                view = ClusterView(tuple(Member(**member) for member in members), version)
                self._seen = (stamp, view)
        return view

    def read(self) -> None:
        """Do nothing: each look at `view` reads it."""

    def start(self) -> None:
        """Do nothing: the other process has joined."""

    def set_state(self, state: str, left: int = 0) -> None:
        """Do nothing: the other process tells the state of the node."""

    def stop(self) -> None:
        """Do nothing."""


def open_members(settings: Settings, holder: str) -> Members | None:
    """Return the members that settings lead to, not started; None without `DATACACHE_CLUSTER`.

    `holder` is what this home keeps over a restart and no other has: with it a node takes its own lease over. Raises
    `SettingsError` where a setting is missing that a node of a cluster needs.
    """
    if not settings.cluster:
        return None
    read_cluster_key(settings)
    if not settings.listen:
        raise SettingsError(
            f"the cluster {settings.cluster!r} is set, and not where this node listens",
            hint="Set DATACACHE_LISTEN to an address of this node and a port, such as 10.0.0.7:7070.",
        )
    node = settings.node or socket.gethostname()
    if settings.cluster_members:
        listed = [parse_node(text) for text in settings.cluster_members]
        for mine in (each for each in listed if each.id == node):
            _expect_alike(mine, settings)
        if settings.catalog_is_shared:
            log.info("the members are those of DATACACHE_CLUSTER_MEMBERS: none are looked for in the catalog")
        return StaticMembers(
            node,
            # This node knows itself by where it listens, which may be all its addresses.
            tuple(Member(n.id, settings.listen if n.id == node else n.address, n.weight, n.zone) for n in listed),
        )
    if not settings.catalog_is_shared:
        raise SettingsError(
            "the members of a cluster are found through a catalog in MongoDB, and this node's is none",
            hint="Set DATACACHE_CATALOG to mongodb://…, or list the nodes in DATACACHE_CLUSTER_MEMBERS.",
        )
    if is_everywhere(settings.listen):
        raise SettingsError(
            f"DATACACHE_LISTEN is {settings.listen}, and no other node could reach this one there",
            hint="Name the address that other nodes use, such as 10.0.0.7:7070 (in a pod: its IP).",
        )
    from datacache.cluster.mongo_members import MongoMembers

    weight = float(settings.ssd_bytes or settings.ram_bytes)
    me = Member(node, settings.listen, weight, settings.zone, JOINING)
    return MongoMembers(settings.catalog, settings.cluster, me, holder=holder)


def _expect_alike(mine: ListedNode, settings: Settings) -> None:
    """Raise `SettingsError` if the list says of this node what its other settings do not. A name may lead anywhere."""
    listed, listens = host_ip(mine.address), host_ip(settings.listen)
    other_host = listed and listens and not listens.is_unspecified and listed != listens
    if other_host or mine.address.rpartition(":")[2] != settings.listen.rpartition(":")[2]:
        raise SettingsError(
            f"DATACACHE_LISTEN is {settings.listen}, and DATACACHE_CLUSTER_MEMBERS has {mine.id} at {mine.address}",
            hint="Other nodes ask it where the list says: set both to the same.",
        )
    if settings.zone and settings.zone != mine.zone:
        in_list = f"has {mine.id} in the zone {mine.zone}" if mine.zone else f"has no zone for {mine.id}"
        raise SettingsError(
            f"DATACACHE_ZONE is {settings.zone}, and DATACACHE_CLUSTER_MEMBERS {in_list}",
            hint="With a list the zones are those of the list, the same on all nodes: unset DATACACHE_ZONE.",
        )


def read_cluster_key(settings: Settings) -> bytes:
    """Return the cluster's key, from the setting or its file. `SettingsError` if there is none, or two, if it is short,
    or if the file cannot be read. Only for nodes of the cluster: who reads through a node needs no key."""
    hint = "Make one with `openssl rand -hex 32`, and set DATACACHE_CLUSTER_KEY_FILE to a file with it on every node."
    file, key = settings.cluster_key_file, settings.cluster_key.encode("utf-8", "surrogateescape")
    if file and key:
        raise SettingsError("both DATACACHE_CLUSTER_KEY and DATACACHE_CLUSTER_KEY_FILE are set", hint="Unset one.")
    if not file and not key:
        raise SettingsError(f"the cluster {settings.cluster!r} is set, and no key for it", hint=hint)
    try:
        key = file.read_bytes().strip() if file else key
    except OSError as exc:
        raise SettingsError(f"DATACACHE_CLUSTER_KEY_FILE {file} cannot be read: {exc.strerror}", hint=hint) from exc
    if len(key) < LEAST_KEY_BYTES:
        where = f"in DATACACHE_CLUSTER_KEY_FILE {file}" if file else "of DATACACHE_CLUSTER_KEY"
        raise SettingsError(f"the key {where} has {len(key)} bytes, and needs {LEAST_KEY_BYTES}", hint=hint)
    return key
