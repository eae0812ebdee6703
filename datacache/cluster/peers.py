"""Ask other nodes for blocks: the owner first, then who stands in for it, and nobody that shows no sign of life.

A miss on a node goes to the block's owner, which gets it once, whoever asks. A node that is busy, away or late (`peer`)
is passed over for the next in rank; in the end, or when nodes have been silent for a second in all, the caller asks the
store. Where a node came or went lately, an owner first asks who may have the block from before. Any thread.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from xxhash import xxh3_64_hexdigest

from datacache.cluster.members import (
    DRAINED,
    DRAINING,
    SERVING,
    STATES,
    Member,
    Members,
    StaticMembers,
    read_cluster_key,
)
from datacache.cluster.peer import REQUEST_S, Came, NodeConnection, OtherNode, Question, SilenceBudget, SilentError
from datacache.cluster.placement import Placement
from datacache.core.concurrency import gather
from datacache.core.errors import CacheError, StoreError, StoreUnavailableError, UsageError
from datacache.core.ids import BlockId, ObjectRef
from datacache.core.nodes import parse_node
from datacache.exchange.auth import Identity, PeerRefusedError
from datacache.exchange.tls import Certificates
from datacache.exchange.wire import Mode
from datacache.settings import Settings

_RANK = 16
_FURTHER = 2
"""Nodes next in rank that are asked what they have. They stood in for the owner while it was away, or owned the block
until it came; and readers keep what came from an owner that has gone."""
_MORE_S = 5.0
"""How long the owner of a block may take for it beyond a store's last try."""
_LAST_TRY = 0.25
"""The part of the time for a store that this node tries it, once it has not answered the owner for all of that."""
_TELL_S = 5.0
"""How long a node may take to tell its state."""
_LATELY_S = 600.0
"""So long after it began to serve, or another node went, an owner asks who may have a block."""

_LOOK_S, _MOST_LOOKS = 3.0, 64
"""How long a look at all other nodes takes at most, and at how many at a time."""

_GONE_HINT = "If it is gone for good, take it off DATACACHE_CLUSTER_MEMBERS of all nodes."
_Key = tuple[str, str, int]


@dataclass
class PeerStats:
    """The blocks that other nodes gave, since the daemon's start."""

    blocks: int = 0
    bytes: int = 0
    missed: int = 0
    """Questions to owners, and to those that stand in for them, that brought no block: busy, away, late, or an
    error."""


class Peers:
    """The other nodes of the cluster. Any thread."""

    def __init__(
        self,
        members: Members,
        me: Identity,
        address: str,
        zone: str,
        mode_of: Callable[[str], str],
        *,
        store_timeout_s: float = 30.0,
        list_id: str = "",
    ) -> None:
        """`address` is this node's own; `mode_of` gives the mode of a data set; `store_timeout_s` is how long a node
        tries a store, and how long its last try may take; `list_id` is that of no other list of members, '' of none."""
        self._list_id = list_id
        self.members, self.me, self.address, self._zone, self._mode_of = members, me, address, zone, mode_of
        self._patience_s = 2 * store_timeout_s + _MORE_S
        self.last_try_s = _LAST_TRY * store_timeout_s
        """How long to try a store that has not answered the owner."""
        self._lock = threading.Lock()  # guards all below
        self._peers: dict[_Key, OtherNode] = {}
        self._version, self._placement, self._leaves = -1, Placement(()), False
        self._names = frozenset[str]()
        self._changed_at = time.monotonic()
        """When this node joined, or another one went."""
        self.draining = threading.Event()
        """Set when this process is to hand over what the node has."""
        self.stats = PeerStats()

    def ranked_before_this(self, id: BlockId, dataset: str) -> list[Member]:
        """Return whom to ask for a block: its owner, then who stands in for it. Empty if this node is the owner."""
        if self._mode_of(dataset) == "off":
            return []
        return list(takewhile(self._is_other, self._placed().ranked(id, _RANK)))

    def ranked_across(self, id: BlockId, dataset: str) -> list[Member]:
        """Return the nodes of other zones that come before this one in the rank of all: one of them is the block's
        owner among all zones, unless that is of this node's zone."""
        if self._mode_of(dataset) == "off":
            return []
        ranked = self._placed().ranked_across(id, _RANK)
        return [member for member in takewhile(self._is_other, ranked) if member.zone != self._zone]

    def get(
        self,
        members: list[Member],
        ref: ObjectRef,
        number: int,
        dataset: str,
        patience: SilenceBudget | None = None,
        *,
        mode: Mode = Mode.OWNER,
    ) -> memoryview | StoreUnavailableError | None:
        """Return a block that one of some nodes has, or gets for this one, or the error of one whose store does not
        answer; None if none of them gives it."""
        return self._first(members, (ref, number, dataset), mode, patience or SilenceBudget())

    def get_earlier(
        self, id: BlockId, ref: ObjectRef, number: int, dataset: str, patience: SilenceBudget | None = None
    ) -> memoryview | None:
        """Return a block that a node has which drains and owned it until then; or one of the next in rank, where nodes
        came or went lately, or this one stands in for an owner that gives nothing. None if there is none."""
        if self._mode_of(dataset) == "off":
            return None
        placement = self._placed()
        asked, ranked = placement.leaving(id), placement.ranked(id, _RANK + _FURTHER)
        # Until this node's own view says that it serves, it has no rank: the first may have stood in for it.
        at = next((at for at, member in enumerate(ranked) if not self._is_other(member)), -1)
        if at or time.monotonic() - self._changed_at < _LATELY_S:
            asked += ranked[at + 1 : at + 1 + _FURTHER]
            across = placement.ranked_across(id, _RANK)  # an owner among all zones is asked by all others
            at = next((at for at, member in enumerate(across) if not self._is_other(member)), -1)
            asked += [member for member in across[at + 1 : at + 2] if member not in asked]
        found = self._first(asked, (ref, number, dataset), Mode.HAVE, patience or SilenceBudget())
        return found if isinstance(found, memoryview) else None

    def partitions(self, dataset: str) -> bool:
        """Tell whether only the owner of a block keeps it on its disk."""
        return self._mode_of(dataset) == "partition"

    def join(self) -> None:
        """Own a share of the blocks from now on, as this node answers. `members.start` comes first."""
        self.members.set_state(SERVING)
        self._changed_at = time.monotonic()

    def drain(self, node: str) -> dict[str, Any]:
        """Have a node own nothing any more and hand over what it has; '' is this one. `UsageError` if there is none of
        this name, `CacheError` if it cannot be told."""
        if node in ("", self.me.node):
            if not self.draining.is_set():
                self.members.set_state(DRAINING)
                self.draining.set()
            mine = self._own_state()  # in a view that may not say yet that it drains
            return {"node": self.me.node, "state": DRAINING, "left": 0} | (mine if mine.get("state") == DRAINED else {})
        found = [member for member in self.members.view.members if member.id == node]
        if not found:
            names = ", ".join(member.id for member in self.members.view.members)
            raise UsageError(f"the cluster has no node {node!r}", hint=f"It has {names}.")
        try:
            with contextlib.closing(self.connect(found[0])) as connection:
                theirs = connection.ask("drain")
            if theirs.get("state") == DRAINED:  # it could not tell this node, or does not know it
                self.note(node, DRAINED, int(theirs.get("left", 0)))
            return theirs
        except (OSError, PeerRefusedError) as exc:
            gone = f" {_GONE_HINT}" if self.listed else ""
            why = getattr(exc, "strerror", None) or exc
            hint = getattr(exc, "hint", "") or f"If its daemon runs, run dsctl cluster drain on {node}.{gone}"
            raise CacheError(
                f"the node {node!r} at {found[0].address} cannot be told to drain: {why}",
                hint=hint,
            ) from exc

    def report(self, state: str, left: int) -> None:
        """Tell the other nodes how far this one is with draining."""
        self.members.set_state(state, left)
        self.tell()

    def tell(self, nodes: Collection[str] | None = None) -> list[str]:
        """Tell some nodes of a list, or all, the state of this one, and hear theirs. Return who could not be told.
        Where the members are found through the catalog, they hear it from there."""
        if not isinstance(self.members, StaticMembers):
            return []

        def told(member: Member) -> bool:
            try:
                with contextlib.closing(self.connect(member, patience_s=_TELL_S)) as connection:
                    theirs = connection.ask("state", self._own_state())
                self.note(member.id, str(theirs.get("state")), int(theirs.get("left", 0)))
            except Exception:  # noqa: BLE001 - it is away, or answers nonsense
                return False
            return True

        others = [member for member in self.members.view.members if member.id != self.me.node]
        some = [member for member in others if nodes is None or member.id in nodes]
        try:
            came = gather(told, some)  # at once: one that hangs keeps no other waiting
        except RuntimeError:  # no more threads can be started
            came = [False] * len(some)
        return [member.id for member, heard in zip(some, came, strict=True) if heard is not True]

    def note(self, node: str, state: str, left: int) -> dict[str, Any]:
        """Take note of what another node of a list tells of itself; return the same of this one."""
        if isinstance(self.members, StaticMembers) and state in STATES and node != self.me.node:
            self.members.note(node, state, left)
        return self._own_state() | {"list": self._list_id}

    def _own_state(self) -> dict[str, Any]:
        me = next((member for member in self.members.view.members if member.id == self.me.node), None)
        return {"node": me.id, "state": me.state, "left": me.left} if me else {}

    def connect(self, member: Member, *, patience_s: float = REQUEST_S) -> NodeConnection:
        """Return a connection to a node, for other requests than for blocks: `patience_s` for each. `OSError`,
        `PeerRefusedError`."""
        return self._peer(member).connect(patience_s)

    @property
    def leaves(self) -> bool:
        """True as soon as this node drains, by its own decision or by its view."""
        self._placed()
        return self._leaves or self.draining.is_set()

    @property
    def serves(self) -> bool:
        """True as long as this node's own view says that it serves."""
        return any(not self._is_other(member) and member.state == SERVING for member in self.members.view.members)

    def owners(self, ids: Sequence[BlockId], *, without: Collection[str] = ()) -> dict[Member, list[int]]:
        """Return the owners of some blocks, each with the positions of its own, as if nodes at some addresses were not
        there. `LookupError` if no node serves."""
        found: dict[Member, list[int]] = {}
        placement = self._placed()
        if without:
            members = [member for member in self.members.view.members if member.address not in without]
            placement = Placement(members, self._zone)
        for at, owner in enumerate(placement.owners(ids)):
            found.setdefault(owner, []).append(at)
        return found

    def shares(self, dataset: str) -> bool:
        """Tell whether the nodes give each other blocks of a data set."""
        return self._mode_of(dataset) != "off"

    def look(self) -> None:
        """See whether the other nodes let this one in: all at the same time, and for some seconds at most. `describe`
        tells what came of it."""
        others = [member for member in self.members.view.members if member.id != self.me.node]
        pool = ThreadPoolExecutor(min(len(others), _MOST_LOOKS) or 1, thread_name_prefix="look")
        try:
            with contextlib.suppress(RuntimeError):  # no more threads can be started
                wait([pool.submit(self._peer(member).look, self._list_id) for member in others], _LOOK_S)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def describe(self) -> dict[str, Any]:
        """Return the members of the newest view, and how each answers this process."""
        return {
            "cluster": self.me.cluster,
            "node": self.me.node,
            "problem": self.members.problem,
            "listed": self.listed,
            "members": self._described(),
            "from_nodes": vars(self.stats),
        }

    def describe_answers(self) -> dict[str, Any]:
        """Return what `describe` has that is of this process alone."""
        members = [{name: each[name] for name in ("node", "problem", "hint")} for each in self._described()]
        return {"members": members, "from_nodes": vars(self.stats)}

    def _is_other(self, member: Member) -> bool:
        """Tell whether a member is not this node. It is by name and address: another one may have been at this address
        a moment ago, and the second node of a name is not in the view."""
        return (member.id, member.address) != (self.me.node, self.address)

    @property
    def listed(self) -> bool:
        """True where the members are a list of the settings."""
        return isinstance(self.members, StaticMembers)

    def _described(self) -> list[dict[str, Any]]:
        view, now = self.members.view, time.monotonic()
        with self._lock:
            peers = dict(self._peers)
        return [
            {
                "node": member.id,
                "address": member.address,
                "zone": member.zone,
                "state": member.state,
                "weight": member.weight,
                "left": member.left,
                "seen_s": round(member.seen_s + now - view.read_at, 1),
                "this": member.id == self.me.node,
                "looked_at": peer is not None and peer.looked_at,
                "problem": peer.problem if peer is not None else "",
                "hint": self._hint(member, peer) if peer is not None else "",
            }
            for member in view.members
            for peer in [peers.get(_key(member))]
        ]

    def _hint(self, member: Member, peer: OtherNode) -> str:
        return _GONE_HINT if self.listed and member.state == DRAINED and peer.problem else peer.hint

    def close(self) -> None:
        """Hang up, and leave the cluster."""
        self.members.stop()
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.close()

    def _placed(self) -> Placement:
        view = self.members.view
        with self._lock:
            if view.version != self._version:
                # A list says where each node is, this one included.
                mine = [member for member in view.members if not self._is_other(member)]
                self._zone = mine[0].zone if mine else self._zone
                self._version, self._placement = view.version, Placement(view.members, self._zone)
                self._leaves = any(member.state in (DRAINING, DRAINED) for member in mine)
                there = {_key(member) for member in view.members}
                gone = [self._peers.pop(key) for key in list(self._peers) if key not in there]
                names = frozenset(member.id for member in view.members)
                if not self._names <= names:
                    self._changed_at = time.monotonic()
                self._names = names
            else:
                gone = []
            placement = self._placement
        for peer in gone:
            peer.close()
        return placement

    def _first(
        self, members: list[Member], block: tuple[ObjectRef, int, str], mode: Mode, patience: SilenceBudget
    ) -> memoryview | StoreUnavailableError | None:
        """Return the block from the first of some nodes that gives it. Nodes that are busy, or have not got it, cost
        little, and those that turn out to be silent no more than there is patience."""
        left = [member for member in members if member.address != self.address]
        while left and (silence_s := patience.share_s(last=len(left) == 1)):
            member, begun = left.pop(0), time.monotonic()
            try:
                came: Came | SilentError = self._peer(member).ask(Question(*block, mode, silence_s))
            except SilentError as exc:
                came = exc
                patience.lose(min(time.monotonic() - begun, silence_s))
            with self._lock:
                if isinstance(came, memoryview):
                    self.stats.blocks += 1
                    self.stats.bytes += len(came)
                elif mode is not Mode.HAVE:
                    self.stats.missed += 1
            if isinstance(came, memoryview):
                return came
            # The store's refusal is for the owner's credentials, and this node has its own; so it asks the store.
            if isinstance(came, StoreError):
                return came if isinstance(came, StoreUnavailableError) else None
        return None

    def _peer(self, member: Member) -> OtherNode:
        with self._lock:
            peer = self._peers.get(_key(member))
            if peer is None:
                peer = self._peers[_key(member)] = OtherNode(member, self.me, self._patience_s)
            return peer


def _key(member: Member) -> _Key:
    """Return what a node is known by: one that is back after a failure is asked at once."""
    return member.id, member.address, member.since_ms


def open_peers(settings: Settings, members: Members) -> Peers:
    """Return the other nodes of the cluster that the settings name. `SettingsError`."""
    tls = Certificates(settings.cluster_tls) if settings.cluster_tls else None
    me = Identity(settings.cluster, settings.node or socket.gethostname(), read_cluster_key(settings), tls)
    listed = sorted(parse_node(text) for text in settings.cluster_members)
    return Peers(
        members,
        me,
        settings.listen,
        settings.zone,
        settings.mode_of,
        store_timeout_s=settings.store_timeout_s,
        list_id=xxh3_64_hexdigest(repr(listed).encode()) if listed else "",
    )
