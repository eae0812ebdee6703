"""Ask other nodes for blocks: the owner first, then who stands in for it, and nobody for long.

A miss on a node goes to the block's owner, which gets it once, whoever asks. A node that is busy, away, or slower than
about four times what its answers mostly take is passed over for the next in rank; in the end the caller asks the store.
An owner that became one lately asks who may have the block from before. Any thread.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from datacache.cluster.members import (
    DRAINING,
    SERVING,
    Member,
    Members,
    StaticMembers,
    open_members,
    read_cluster_key,
)
from datacache.cluster.placement import Placement
from datacache.core.breaker import pause_s
from datacache.core.errors import DatacacheError, UsageError
from datacache.core.ids import BlockId, ObjectRef
from datacache.exchange.auth import Identity, introduce
from datacache.exchange.client import Connection
from datacache.exchange.wire import BlocksRequest, Mode
from datacache.settings import Settings

log = logging.getLogger(__name__)
_RANK = 16
_TRIES = 4
"""Nodes that do not answer, for one block."""
_CONNECT_S = 0.5
_LOOK_EVERY_S = 0.02
_LEAST_S, _MOST_S = 0.1, 1.0
"""Bounds of the time that a node has for a block, until the next one is asked."""
_TIMES_P99 = 4.0
_TIMES_KEPT = 256
_IDLE = 32
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_LATELY_S = 600.0
"""So long after a change of the members, an owner asks who owned the block before."""


@dataclass
class PeerStats:
    """The blocks that other nodes gave, since the daemon's start."""

    blocks: int = 0
    bytes: int = 0
    missed: int = 0
    """Questions that brought no block: busy, away, late, or not there."""


@dataclass
class _Peer:
    """One node as this one knows it."""

    address: str
    idle: list[_PeerConnection] = field(default_factory=list)
    failures: int = 0
    failed_at: float = 0.0
    not_before: float = 0.0
    problem: str = ""
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES_KEPT))
    limit_s: float = _MOST_S
    answers: int = 0

    def answered(self, took_s: float) -> None:
        """Note an answer."""
        self.failures, self.not_before, self.problem = 0, 0.0, ""
        self.times_s.append(took_s)
        self.answers += 1
        if self.answers % 32 == 0:
            slowest = sorted(self.times_s)[int(0.99 * (len(self.times_s) - 1))]
            self.limit_s = min(_MOST_S, max(_LEAST_S, _TIMES_P99 * slowest))


class Peers:
    """The other nodes of the cluster. Any thread."""

    def __init__(self, members: Members, me: Identity, address: str, zone: str, mode_of: Callable[[str], str]) -> None:
        """`address` is this node's own; `mode_of` gives the mode of a data set."""
        self.members, self.me, self.address, self._zone, self._mode_of = members, me, address, zone, mode_of
        self._lock = threading.Lock()  # guards all below
        self._peers: dict[str, _Peer] = {}
        self._version, self._placement = -1, Placement(())
        self.stats = PeerStats()

    def ranked_before_this(self, id: BlockId, dataset: str) -> list[Member]:
        """Return whom to ask for a block: its owner, then who stands in for it. Empty if this node is the owner."""
        if self._mode_of(dataset) == "off":
            return []
        return list(takewhile(lambda member: member.address != self.address, self._placed().ranked(id, _RANK)))

    def get(self, members: list[Member], ref: ObjectRef, number: int, dataset: str) -> memoryview | None:
        """Return a block that one of some nodes has, or gets from the store; None if none of them gives it."""
        return self._first(members, BlocksRequest([(ref, number)], dataset, "", Mode.OWNER))

    def get_earlier(self, id: BlockId, ref: ObjectRef, number: int, dataset: str) -> memoryview | None:
        """Return a block that a node has which owned it lately; None if there is none."""
        if self._mode_of(dataset) == "off" or time.monotonic() - self.members.view.changed_at > _LATELY_S:
            return None
        return self._first(self._placed().before(id), BlocksRequest([(ref, number)], dataset, "", Mode.HAVE))

    def keeps(self, dataset: str) -> bool:
        """Tell whether this node keeps on its disk what it got from another one."""
        return self._mode_of(dataset) != "partition"

    def join(self) -> None:
        """Enter the cluster, once this node answers. `NodeTakenError` if there is one of this name."""
        self.members.start()
        self.members.set_state(SERVING)

    def drain(self, node: str) -> dict[str, Any]:
        """Have this node own nothing any more; `node` is its name, or ''. `UsageError` if it has another one."""
        if node not in ("", self.me.node):
            raise UsageError(f"this node is {self.me.node!r}, not {node!r}", hint=f"Run it on {node}.")
        self.members.set_state(DRAINING)
        return {"node": self.me.node, "state": DRAINING, "listed": self._listed}

    def describe(self) -> dict[str, Any]:
        """Return the members of the newest view, and how each answers this node."""
        return {
            "cluster": self.me.cluster,
            "node": self.me.node,
            "problem": self.members.problem,
            "listed": self._listed,
            "members": self._described(),
            "from_nodes": vars(self.stats),
        }

    @property
    def _listed(self) -> bool:
        """True where the members are a list of the settings: no node learns another's state."""
        return isinstance(self.members, StaticMembers)

    def _described(self) -> list[dict[str, Any]]:
        with self._lock:
            problems = {peer.address: peer.problem for peer in self._peers.values()}
        return [
            {
                "node": member.id,
                "address": member.address,
                "zone": member.zone,
                "state": member.state,
                "weight": member.weight,
                "seen_s": round(member.seen_s, 1),
                "this": member.address == self.address,
                "problem": problems.get(member.address, ""),
            }
            for member in self.members.view.members
        ]

    def close(self) -> None:
        """Hang up, and leave the cluster."""
        self.members.stop()
        with self._lock:
            idle = [connection for peer in self._peers.values() for connection in peer.idle]
            self._peers.clear()
        for connection in idle:
            connection.close()

    def _placed(self) -> Placement:
        view = self.members.view
        with self._lock:
            if view.version != self._version:
                self._version, self._placement = view.version, Placement(view.members, self._zone)
                there = {member.address for member in view.members}
                gone = [self._peers.pop(address) for address in list(self._peers) if address not in there]
            else:
                gone = []
            placement = self._placement
        for connection in [connection for peer in gone for connection in peer.idle]:
            connection.close()
        return placement

    def _first(self, members: list[Member], request: BlocksRequest) -> memoryview | None:
        """Return the block from the first of some nodes that gives it. Nodes that are busy, or have not got it, cost
        little; of those that do not answer a few are tried."""
        silent, end = 0, time.monotonic() + 1.5 * _MOST_S
        for member in members:
            if member.address == self.address or silent == _TRIES:
                continue
            if time.monotonic() > end:  # one that is late and one that stands in for it; then the store
                break
            try:
                found = self._ask(member, request)
            except _SilentError:
                found, silent = None, silent + 1
            with self._lock:
                if found is None:
                    self.stats.missed += 1
                else:
                    self.stats.blocks += 1
                    self.stats.bytes += len(found)
            if found is not None:
                return found
        return None

    def _ask(self, member: Member, request: BlocksRequest) -> memoryview | None:
        """Return the block, or None if the node answers that it gives none now, or is known not to answer. Raises
        `_SilentError`."""
        begun = time.monotonic()
        with self._lock:
            peer = self._peers.setdefault(member.address, _Peer(member.address))
            if begun < peer.not_before:
                return None
            kept = connection = peer.idle.pop() if peer.idle else None
            give_up_at = begun + peer.limit_s
        while True:
            try:
                connection = connection or _PeerConnection(member, self.me)
                connection.give_up_at = give_up_at
                [found] = connection.blocks(request)
                break
            except BaseException as exc:
                if connection is not None:
                    connection.close()
                if kept is not None and isinstance(exc, OSError) and not isinstance(exc, TimeoutError):
                    kept = connection = None  # the node was restarted since, perhaps: a new connection tells
                    self._hang_up(peer)
                    continue
                if not isinstance(exc, OSError | DatacacheError | ValueError):
                    raise
                self._failed(peer, exc, begun, late=connection is not None and isinstance(exc, TimeoutError))
                raise _SilentError from exc
        with self._lock:
            if not isinstance(found, DatacacheError):
                peer.answered(time.monotonic() - begun)
            keep = len(peer.idle) < _IDLE and self._peers.get(member.address) is peer
            if keep:
                peer.idle.append(connection)
        if not keep:
            connection.close()
        # An error is the owner's with its own credentials: this node asks the store itself, and has its own.
        return found if isinstance(found, memoryview) else None

    def _failed(self, peer: _Peer, exc: Exception, begun: float, *, late: bool) -> None:
        """Note that a node did not answer; `late`: it is there, and took longer than it has."""
        with self._lock:
            now = time.monotonic()
            first = not peer.problem
            peer.problem = str(exc)
            if begun >= peer.failed_at:  # else it failed together with others
                peer.failures += 1
                if late:  # answers that come too late are in no p99: without this a slower store would stay too slow
                    peer.limit_s = min(_MOST_S, 2 * peer.limit_s)
            elif late:
                peer.failures += 1
            peer.failed_at = now
            if late and peer.failures < 3:
                first = False  # one slow answer; the node may be as quick as ever
            else:
                pause = pause_s(peer.failures, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
                peer.not_before = now + pause
        self._hang_up(peer)  # a new connection shows soon whether the node answers at all
        if first:
            log.warning("the node at %s is passed over: %s", peer.address, exc)

    def _hang_up(self, peer: _Peer) -> None:
        """Close the connections to a node that wait for use."""
        with self._lock:
            idle, peer.idle = peer.idle, []
        for connection in idle:
            connection.close()


class _SilentError(Exception):
    """A node does not answer, or not as it should."""


def open_peers(settings: Settings, holder: str) -> Peers | None:
    """Return the cluster that the settings name, not joined yet; None without `DATACACHE_CLUSTER`. `holder`: see
    `open_members`. `SettingsError`."""
    members = open_members(settings, holder)
    if members is None:
        return None
    me = Identity(settings.cluster, settings.node or socket.gethostname(), read_cluster_key(settings))
    return Peers(members, me, settings.listen, settings.zone, settings.mode_of)


class _PeerConnection(Connection):
    """An authenticated connection to a node, with an end of all waiting."""

    def __init__(self, member: Member, me: Identity) -> None:
        self.give_up_at = time.monotonic() + _CONNECT_S
        host, _, port = member.address.rpartition(":")
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            super().__init__(plain, look=self._look, look_every_s=_LOOK_EVERY_S)
            introduce(self.frames, me, member.id)
        except BaseException:
            plain.close()
            raise

    def _look(self) -> None:
        if time.monotonic() > self.give_up_at:
            raise TimeoutError(errno.ETIMEDOUT, "the node did not answer in time")
