"""Keep a second node's disk abreast of a staging area: `engine.Replication` over the connections between nodes.

The second node has a staging area of the same format and id. What it gets is the journal's records of keys that have
changed, newest state only, and the bytes of staged files that these refer to. As a key's last change wins, one message
has what many commits wait for. Keys that are gone come last, so a rename that was cut in two leaves both names.

A node that is new to this process, or was lost, gets all that is pending before it is named in the lease: until then
the node that was named has all that was acknowledged. One thread finds the second node and sends; `note_changed` is
called with the engine's lock held, all else by any thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from datacache.cluster.members import SERVING, Member
from datacache.cluster.peer import NodeConnection
from datacache.cluster.peers import Peers
from datacache.cluster.placement import Placement
from datacache.cluster.replicas.lease import AreaLease
from datacache.core.errors import DatacacheError, StagingError
from datacache.writeback.engine import Replicated, WriteBack
from datacache.writeback.journal.journal import Change
from datacache.writeback.staging.files import WATCHED_BYTES

log = logging.getLogger(__name__)
_PORTION_BYTES = 2 << 20
"""Of records, or of bytes, in a frame."""
_KEYS_AT_A_TIME = 5000
_PATIENCE_S = 10.0
"""How long the second node may take for one frame. Then it counts as gone."""
_PING_S = 5.0
_RETRY_S = 1.0


class SecondNode:
    """The second node, and the session in which it is told things in their order."""

    def __init__(self, connection: NodeConnection, node: str, area_id: str) -> None:
        self.connection, self.node = connection, node
        self._head = {"area": area_id, "session": secrets.token_hex(8)}

    def begin(self, url: str, endpoint: str, owner: str) -> None:
        """Begin a session: all that is pending follows."""
        self._call({"op": "begin", "url": url, "endpoint": endpoint, "node": owner}, [])

    def write(self, number: int, size_bytes: int, extents: Sequence[tuple[int, bytes]]) -> None:
        """Give bytes of a staged file, and its size."""
        where = [[offset, len(data)] for offset, data in extents]
        fields = {"op": "write", "file": number, "size_bytes": size_bytes, "extents": where}
        self._call(fields, [data for _, data in extents])

    def put(self, records: Sequence[Change], *, last: bool, whole: bool) -> None:
        """Give records (without a header: a key is gone); after the `last` of a message it is durable. `whole`: there
        are no others than were given."""
        listed = [[key, -1 if header is None else len(header), len(blob)] for key, header, blob in records]
        parts = [part for _, header, blob in records for part in (header or b"", blob)]
        self._call({"op": "put", "records": listed, "last": last, "whole": whole}, parts)

    def _call(self, fields: dict[str, Any], parts: Sequence[bytes | memoryview]) -> None:
        head = json.dumps(self._head | fields).encode()
        self.connection.call("replica", b"".join([len(head).to_bytes(4, "big"), head, *parts]))


class ReplicaSender:
    """See the module. Made before the engine that it works for, which `watch` names; `close` ends it."""

    def __init__(
        self,
        lease: AreaLease,
        peers: Peers | None,
        *,
        node: str,
        endpoint: str,
        required: bool,
        wait_s: float,
        done: Callable[[], object],
    ) -> None:
        """`peers`: None for a node of no cluster. `required`: nothing is acknowledged without a second node, for which
        `wait_s` is waited. `done` is called at the end where nothing was pending any more."""
        self._lease, self._peers, self._node, self._endpoint = lease, peers, node, endpoint
        self._required, self._wait_s, self._done = required, wait_s, done
        self._keys: dict[str, None] = {}  # that have changed; the engine's lock guards it
        self._changed = threading.Condition()  # guards all below
        self._wanted = self._sent = -1  # tickets
        self._alone = ""
        """Why no other node may take the area over, as the lease says."""
        self._why = "it is being looked for"
        """Why no node has all that is pending and is told what changes; '' where one is."""
        self._closing = False
        self._engine: WriteBack
        self._thread: threading.Thread | None = None

    # --- for the engine --------------------------------------------------------------------------------------------

    def watch(self, engine: WriteBack) -> None:
        """See `engine.Replication`."""
        self._engine = engine
        engine.area.also_check(self._lease.check)
        self._lease.start()
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)
        self._thread.start()

    def note_changed(self, keys: Sequence[str]) -> None:
        """See `engine.Replication`."""
        self._keys.update(dict.fromkeys(keys))

    def ask(self, ticket: int) -> None:
        """See `engine.Replication`."""
        with self._changed:
            self._wanted = max(self._wanted, ticket)
            self._changed.notify_all()

    def wait(self, ticket: int, *, acknowledges: bool) -> None:
        """See `engine.Replication`."""
        deadline = time.monotonic() + self._wait_s
        with self._changed:
            while not self.holds(ticket, acknowledges=acknowledges):
                left_s = deadline - time.monotonic()
                self._lease.check()
                if left_s <= 0 or self._closing:
                    raise StagingError(
                        f"no second node has what was written: {self._alone or self._why}",
                        hint="See dsctl cluster status. With DATACACHE_REPLICA=prefer, writes go on without one.",
                    )
                self._changed.wait(min(left_s, _RETRY_S))
        self._lease.check()

    def holds(self, ticket: int, *, acknowledges: bool = True) -> bool:
        """See `engine.Replication`."""
        return ticket <= self._sent or bool(self._alone and not (acknowledges and self._required))

    def status(self) -> Replicated:
        """See `engine.Replication`."""
        with self._changed:
            if self._lease.taken_by:
                return Replicated("", "")  # which is why uploading has stopped
            return Replicated(self._lease.replica, self._alone or self._why)

    def close(self, *, done: bool) -> None:
        """See `engine.Replication`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        done = done and not self._lease.taken_by
        self._lease.close(done=done)
        if done:
            self._done()
        if self._peers is not None:
            self._peers.close()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing and not self._lease.taken_by:
            try:
                link = self._find()
            except Exception as exc:  # noqa: BLE001 - the thread goes on
                self._note(f"{exc}")
                link = None
            if link is None:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, _RETRY_S)
                continue
            with contextlib.closing(link.connection):
                try:
                    self._follow(link)
                except Exception as exc:  # noqa: BLE001 - the node is lost, and another one found
                    self._note(f"the node {link.node} does not take it: {exc}")

    def _note(self, why: str) -> None:
        with self._changed:
            told, self._why = self._why, why
        if why != told:
            log.warning("what is written is not on a second node yet: %s", why)

    def _find(self) -> SecondNode | None:
        """Return a node that has all that is pending and is named in the lease. None where there is none, and the
        lease says that."""
        area, refusals = self._engine.area, list[str]()
        for peers, member in self._candidates():
            with contextlib.ExitStack() as failed:
                try:
                    connection = peers.connect(member, patience_s=_PATIENCE_S)
                    failed.callback(connection.close)
                    link = SecondNode(connection, member.id, area.id)
                    link.begin(area.bucket_url, self._endpoint, self._node)
                    self._bring(link, whole=True)
                    with self._changed:
                        self._alone = ""  # what is acknowledged from now on is there before that node may take over
                    ticket = self._bring(link, whole=False)
                    self._lease.name(member.id)
                except (OSError, DatacacheError) as exc:
                    refusals.append(f"the node {member.id} does not take it: {exc}")
                    continue
                failed.pop_all()
            log.info("what is written to %s is on the node %s as well", area.bucket_url, member.id)
            self._set_sent(ticket)
            return link
        self._lease.name("")
        why = "; ".join(refusals) or "the cluster has no other node that serves"
        self._note(why)
        with self._changed:
            self._alone = why
            self._changed.notify_all()
        return None

    def _candidates(self) -> list[tuple[Peers, Member]]:
        """Return other living nodes, the best first: the one that the lease names, then those of other zones. The
        catalog's errors."""
        peers = self._peers
        if peers is None:
            return []
        peers.members.read()
        members = peers.members.view.members
        zone = next((member.zone for member in members if member.id == self._node), "")
        others = [member for member in members if member.id != self._node and member.state == SERVING]
        ranked = Placement(others).ranked(self._engine.area.id.encode(), len(others))
        named = self._lease.replica
        return [(peers, m) for m in sorted(ranked, key=lambda m: (m.id != named, m.zone == zone))]

    def _follow(self, link: SecondNode) -> None:
        """Bring what changes, and see now and then whether the node is there, until it is not or all ends."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._wanted > self._sent, _PING_S)
                if self._closing:
                    return
            self._set_sent(self._bring(link, whole=False))

    def _set_sent(self, ticket: int) -> None:
        with self._changed:
            self._sent, self._alone, self._why = max(self._sent, ticket), "", ""
            self._changed.notify_all()

    def _bring(self, link: SecondNode, *, whole: bool) -> int:
        """Bring all that has changed, or all that there is; return up to which ticket."""
        engine, gone = self._engine, dict[str, None]()
        if whole:
            with engine.lock:
                engine.files.watch_none()
                self._keys = dict.fromkeys(engine.recorded_keys())
        while True:
            with contextlib.ExitStack() as opened:
                with engine.lock:
                    records, files = self._portion(gone, opened)
                    last, ticket = not self._keys, engine.last_ticket
                for number, fd, chunks in files:
                    self._write(link, number, fd, chunks)
            if last:
                break
            link.put(records, last=False, whole=whole)
        records += [Change(key, None) for key in gone]
        for at in range(0, max(1, len(records)), _KEYS_AT_A_TIME):
            some, last = records[at : at + _KEYS_AT_A_TIME], at + _KEYS_AT_A_TIME >= len(records)
            link.put(some, last=last, whole=whole)
        return ticket

    def _portion(
        self, gone: dict[str, None], opened: contextlib.ExitStack
    ) -> tuple[list[Change], list[tuple[int, int, list[int] | None]]]:
        """Take some of the changed keys: return their records, and the staged files that these refer to, each with what
        was written since it was brought last. Keys that are gone are put into `gone`. The engine's lock is held."""
        engine, size_bytes = self._engine, 0
        records: list[Change] = []
        files: dict[int, tuple[int, int, list[int] | None]] = {}
        while self._keys and size_bytes < _PORTION_BYTES and len(records) < _KEYS_AT_A_TIME:
            key = next(iter(self._keys))
            del self._keys[key]
            found = engine.recorded(key)
            if found is None:
                gone[key] = None
                continue
            gone.pop(key, None)
            header, blob, number = found
            records.append(Change(key, header, blob))
            size_bytes += len(header) + len(blob)
            if number is not None and number not in files:
                try:
                    fd = engine.files.open(number)
                except StagingError as exc:
                    log.error("%s is not on the second node: %s", key, exc)
                    continue
                opened.callback(os.close, fd)
                files[number] = number, fd, engine.files.take_written(number)
        return records, list(files.values())

    @staticmethod
    def _write(link: SecondNode, number: int, fd: int, chunks: list[int] | None) -> None:
        """Bring the chunks of a staged file, or all of it."""
        size_bytes = os.fstat(fd).st_size
        step = _PORTION_BYTES if chunks is None else WATCHED_BYTES
        numbers = range(-(-size_bytes // step)) if chunks is None else chunks
        for begin in range(0, max(1, len(numbers)), _PORTION_BYTES // step):  # once at least, for its size
            some = [n * step for n in numbers[begin : begin + _PORTION_BYTES // step]]
            extents = [(offset, data) for offset in some if (data := os.pread(fd, step, offset))]
            link.write(number, size_bytes, extents)
